//! The machine's side: makes the droplet that the host asks for, and reads its counters.

use std::{
    fs,
    io::{self, BufRead},
    net::Ipv4Addr,
    path::Path,
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use thuban_cluster::{command::run as command, wait::wait_until};
use thuban_common::tables::{
    LAYOUT_VERSION, RemoteRow, SUBNET_BOUNCER_HERE, SubnetEntry, VPC_DIVIDER_HERE, VpcEntry,
};
use thuban_e2e::{
    programs::{members, object},
    rig::droplet::{Droplet, Pod, address6},
};
use transitd::{
    dataplane::{
        bpffs::PinSettings,
        hook::Hook,
        hooks::{self, TransitHook, TransitHookChoice},
        links::Links,
        loader,
    },
    netlink::ethtool,
    settings::FlowMode,
};

use crate::{
    plan::{BOUNCED, DIRECT, HERE, POD, THREE, TWO, VPC, mac, text},
    request::{Choice, Counts, DriverCounts, Hooks, MARK, Reply, Request},
};

/// The machine ends when it has not heard of the host for so long.
const SILENCE_LIMIT: Duration = Duration::from_mins(2);

/// A droplet of a card, with its pod.
struct World {
    nic: String,
    droplet: Droplet,
    _pod: Pod,
}

/// Answers requests until the last one.
pub fn run() -> Result<bool> {
    let (send, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("reading the kernel's release")?;
    say(&Reply::Ready {
        release: release.trim().to_owned(),
    })?;
    let mut world = None;
    loop {
        let line = lines
            .recv_timeout(SILENCE_LIMIT)
            .context("waiting for the host")?;
        let Ok(request) = serde_json::from_str(line.trim()) else {
            continue;
        };
        if matches!(request, Request::End) {
            return Ok(true);
        }
        say(&answer(&request, &mut world).unwrap_or_else(|error| Reply::Failed(format!("{error:#}"))))?;
    }
}

/// Prints a reply on a line of its own, whatever the kernel is printing.
fn say(reply: &Reply) -> Result<()> {
    println!("\n{MARK}{}", serde_json::to_string(reply)?);
    Ok(())
}

fn answer(request: &Request, world: &mut Option<World>) -> Result<Reply> {
    match request {
        Request::Choose { mac, mtu } => Ok(Reply::Chosen(choose(&interface(*mac)?, *mtu)?)),
        Request::Begin { mac, hooks, mtu } => {
            *world = Some(World::new(interface(*mac)?, *hooks, *mtu)?);
            Ok(Reply::Done)
        }
        Request::Count => Ok(Reply::Counted(world.as_ref().context("no droplet")?.count()?)),
        Request::Finish => {
            let World { nic, droplet, _pod } = world.take().context("no droplet")?;
            droplet.give_back(&nic)?;
            Ok(Reply::Done)
        }
        Request::End => bail!("the end has no answer"),
    }
}

/// Returns the name of the interface with a MAC.
fn interface(mac: [u8; 6]) -> Result<String> {
    for entry in fs::read_dir("/sys/class/net").context("listing interfaces")? {
        let entry = entry.context("listing interfaces")?;
        let address = fs::read_to_string(entry.path().join("address")).unwrap_or_default();
        if address.trim() == text(mac) {
            return Ok(entry.file_name().to_string_lossy().into_owned());
        }
    }
    bail!("no interface has the MAC {}", text(mac))
}

/// The kernel takes a program away only some time after its pinned link is removed (RCU), and takes no other before.
fn wait_for_no_xdp(nic: &str) -> Result<()> {
    let what = format!("{nic} to lose its program");
    wait_until(&what, Duration::from_secs(2), Duration::from_millis(20), || {
        let shown = command("ip", &["-details", "link", "show", nic])?;
        Ok((!shown.contains("prog/xdp")).then_some(()))
    })
}

/// Tries native XDP, then does what transitd does at its start, and leaves the card as it was.
fn choose(nic: &str, mtu: u32) -> Result<Choice> {
    let pins = PinSettings {
        bpffs: Path::new("/sys/fs/bpf").to_owned(),
        layout: LAYOUT_VERSION,
    };
    command("ip", &["link", "set", nic, "mtu", &mtu.to_string(), "up"])?;
    let mut links = Links::new(
        loader::load(&object(), &pins, FlowMode::Off)?,
        pins.links(),
        Vec::new(),
    );
    let demanded = hooks::attach(&mut links, TransitHookChoice::Xdp, TransitHook::Xdp, nic);
    let refusal = demanded
        .err()
        .map(|error| format!("{:#}", anyhow::Error::from(error)));
    links.release(Hook::TransitXdp, nic)?;
    wait_for_no_xdp(nic)?;
    let choice = TransitHookChoice::Auto;
    let preferred = hooks::preferred(choice, &hooks::examine(nic)?, true);
    let hook = hooks::attach(&mut links, choice, preferred, nic)?;
    let shown = command("ip", &["-details", "link", "show", nic])?;
    for hook in [Hook::TransitXdp, Hook::TransitTc] {
        links.release(hook, nic)?;
    }
    command("ip", &["link", "set", nic, "down"])?;
    Ok(Choice {
        driver: ethtool::driver(nic)?,
        refusal,
        hook: hook.name().to_owned(),
        is_native: shown.contains("prog/xdp") && !shown.contains("xdpgeneric"),
    })
}

impl World {
    fn new(nic: String, hooks: Hooks, mtu: u32) -> Result<Self> {
        let mut droplet = Droplet::on_nic(&nic, HERE, hooks.transit(), mtu)?;
        droplet.agent_at_xdp = hooks == Hooks::XdpAgents;
        for far in [TWO, THREE] {
            droplet.namespace.command(&format!(
                "ip neigh replace {far} lladdr {} dev uplink nud permanent",
                text(mac(far))
            ))?;
        }
        droplet.know(&[HERE, TWO, THREE])?;
        let pod = droplet.add_pod(VPC, 1, POD)?;
        for (network, flags, bouncer) in [(1, SUBNET_BOUNCER_HERE, HERE), (2, 0, THREE)] {
            let entry = SubnetEntry {
                network,
                flags,
                bouncers: members(&[bouncer]),
            };
            droplet.set_subnet(VPC, Ipv4Addr::new(10, 0, network as u8, 0), entry)?;
        }
        droplet.set_vpc(VpcEntry::new(VPC, VPC_DIVIDER_HERE, members(&[HERE])))?;
        for (row, address) in [(RemoteRow::Direct, DIRECT), (RemoteRow::Bouncer, BOUNCED)] {
            droplet.set_row(row, VPC, address, TWO)?;
            droplet.set_row(row, VPC, address6(address), TWO)?;
        }
        Ok(Self {
            nic,
            droplet,
            _pod: pod,
        })
    }

    fn count(&self) -> Result<Counts> {
        let programs = self.droplet.programs.counters()?;
        let shown = self.droplet.namespace.command("ethtool -S uplink")?;
        Ok(Counts {
            programs: programs
                .into_iter()
                .map(|(name, count)| (name.to_owned(), count))
                .collect(),
            driver: driver_counts(&shown),
        })
    }
}

/// Adds up what ethtool shows of each receive queue (`rx0_xdp_tx`). The sums that it shows too have no number.
fn driver_counts(shown: &str) -> DriverCounts {
    let mut counts = DriverCounts::default();
    for line in shown.lines() {
        let Some((name, count)) = line.trim().split_once(": ") else {
            continue;
        };
        let count: u64 = count.trim().parse().unwrap_or(0);
        let queue = name.strip_prefix("rx").and_then(|name| name.split_once("_xdp_"));
        match queue
            .filter(|(number, _)| !number.is_empty())
            .map(|(_, what)| what)
        {
            Some("packets") => counts.seen += count,
            Some("tx") => counts.turned += count,
            Some("drops") => counts.dropped += count,
            _ => {}
        }
    }
    counts
}

//! The virtual machine: its process, its cards with the other ends of their cables, and its serial console.

use std::{
    io::{BufRead, BufReader, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixDatagram,
    },
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use thuban_cluster::wait::wait_until;
use thuban_e2e::rig::{capture::Wire, namespace::Namespace};

use crate::{
    plan::text,
    request::{Choice, Counts, Hooks, MARK, Reply, Request},
    wire::Cable,
};

/// How long the machine may take to boot, and to answer one request.
const BOOT_LIMIT: Duration = Duration::from_mins(3);
const ANSWER_LIMIT: Duration = Duration::from_mins(1);
const MEMORY_MIB: &str = "2048";

/// A kind of virtio's network card.
pub struct Card {
    pub name: &'static str,
    pub mac: [u8; 6],
    /// Options of QEMU's device.
    pub device: &'static str,
    /// Queue pairs of a tap device; a card without is at a socket, which has one queue pair and no offloads.
    pub tap_queues: Option<u8>,
}

pub struct Machine {
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    pub cables: Vec<Cable>,
    // The tap devices, which go last.
    _namespace: Namespace,
}

impl Machine {
    /// Starts the machine, and returns it with its kernel's release when it is up.
    pub fn boot(kernel: &Path, root: &Path, cards: &[Card]) -> Result<(Self, String)> {
        let namespace = Namespace::new("taps")?;
        for interface in ["all", "default"] {
            namespace.sysctl(&format!("ipv6/conf/{interface}/disable_ipv6"), "1")?;
        }
        let mut command = Command::new("qemu-system-x86_64");
        // KVM within a virtual machine fails on many hosts.
        command
            .args(["-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", MEMORY_MIB])
            .args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-display", "none", "-serial", "stdio"])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(root)
            .args(["-append", "console=ttyS0 quiet panic=-1"]);
        let mut cables = Vec::new();
        let mut far_ends = Vec::new();
        for (number, card) in cards.iter().enumerate() {
            let (cable, network, far_end) = plug(&namespace, number, card)?;
            let mac = text(card.mac);
            let device = format!(
                "virtio-net-pci,netdev=net{number},mac={mac},romfile={}",
                card.device
            );
            command.args(["-netdev", &network, "-device", &device]);
            cables.push(cable);
            far_ends.extend(far_end);
        }
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        let mut process = namespace.run(|| command.spawn().context("starting qemu-system-x86_64"))?;
        drop(far_ends);
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("the machine has no console");
        };
        let (send, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let machine = Self {
            process,
            input,
            lines,
            cables,
            _namespace: namespace,
        };
        match machine.reply(BOOT_LIMIT)? {
            Reply::Ready { release } => Ok((machine, release)),
            other => bail!("the machine began with {other:?}"),
        }
    }

    pub fn choose(&mut self, mac: [u8; 6], mtu: u32) -> Result<Choice> {
        match self.ask(&Request::Choose { mac, mtu })? {
            Reply::Chosen(choice) => Ok(choice),
            other => bail!("{other:?}"),
        }
    }

    pub fn begin(&mut self, mac: [u8; 6], hooks: Hooks, mtu: u32) -> Result<()> {
        match self.ask(&Request::Begin { mac, hooks, mtu })? {
            Reply::Done => Ok(()),
            other => bail!("{other:?}"),
        }
    }

    pub fn count(&mut self) -> Result<Counts> {
        match self.ask(&Request::Count)? {
            Reply::Counted(counts) => Ok(counts),
            other => bail!("{other:?}"),
        }
    }

    pub fn finish(&mut self) -> Result<()> {
        match self.ask(&Request::Finish)? {
            Reply::Done => Ok(()),
            other => bail!("{other:?}"),
        }
    }

    /// Has the machine power off by itself. Dropping it would end its process.
    pub fn end(mut self) -> Result<()> {
        self.write(&Request::End)?;
        let pause = Duration::from_millis(50);
        let ended = wait_until("the machine to power off", ANSWER_LIMIT, pause, || {
            Ok(self.process.try_wait()?)
        });
        ended.map(drop)
    }

    fn ask(&mut self, request: &Request) -> Result<Reply> {
        self.write(request)?;
        let reply = self
            .reply(ANSWER_LIMIT)
            .with_context(|| format!("asking for {request:?}"))?;
        match reply {
            Reply::Failed(error) => bail!("{request:?}: {error}"),
            reply => Ok(reply),
        }
    }

    fn write(&mut self, request: &Request) -> Result<()> {
        let line = serde_json::to_string(request)?;
        writeln!(self.input, "{line}").context("writing to the machine's console")
    }

    /// Returns the machine's next reply, and prints what else it says.
    fn reply(&self, limit: Duration) -> Result<Reply> {
        let end = Instant::now() + limit;
        loop {
            match self
                .lines
                .recv_timeout(end.saturating_duration_since(Instant::now()))
            {
                Ok(line) => match line.strip_prefix(MARK) {
                    Some(reply) => return serde_json::from_str(reply).with_context(|| line.clone()),
                    // The console repeats the request.
                    None if line.is_empty() || line.starts_with('{') || line.starts_with('"') => {}
                    None => println!("    {line}"),
                },
                Err(RecvTimeoutError::Disconnected) => bail!("the machine has ended"),
                Err(RecvTimeoutError::Timeout) => bail!("no answer within {} s", limit.as_secs()),
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Makes the cable of a card. Returns this end, QEMU's option for the other end, and what QEMU inherits.
fn plug(namespace: &Namespace, number: usize, card: &Card) -> Result<(Cable, String, Option<OwnedFd>)> {
    let Some(queues) = card.tap_queues else {
        let (near, far) = UnixDatagram::pair().context("making a pair of sockets")?;
        let far = OwnedFd::from(far);
        fcntl(&far, FcntlArg::F_SETFD(FdFlag::empty())).context("leaving a socket to QEMU")?;
        let network = format!("dgram,id=net{number},local.type=fd,local.str={}", far.as_raw_fd());
        return Ok((Cable::socket(near)?, network, Some(far)));
    };
    let tap = format!("tap{number}");
    let kind = if queues > 1 { " multi_queue" } else { "" };
    namespace.command(&format!("ip tuntap add dev {tap} mode tap vnet_hdr{kind}"))?;
    namespace.command(&format!("ip link set {tap} mtu 9000 up"))?;
    let queues = if queues > 1 {
        format!(",queues={queues}")
    } else {
        String::new()
    };
    let network = format!("tap,id=net{number},ifname={tap},script=no,downscript=no,vhost=off{queues}");
    Ok((Cable::Tap(Wire::open(namespace, &tap)?), network, None))
}

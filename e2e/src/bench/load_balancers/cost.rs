//! What a datagram of 64 bytes costs the node in the middle: as a front, by nftables' DNAT, and by plain forwarding.
//!
//! A client's namespace and a node's are joined by a veth. The client sends as fast as one core can. The kernel does
//! all further work on that core: the node's part, and dropping the frame when it comes back to the client's
//! interface. So one over the rate is the time of a datagram. The time of a datagram that the node drops at its
//! interface is taken off: the rest is the node's own work and the way of the frame out of the node. A front pays for
//! more than at a NIC: a frame that came by a veth has no room for outer headers, so the kernel copies it.
//!
//! Datagrams go to each address in turn, from one port. For nftables each address is a connection that conntrack knows,
//! so only the first datagram to an address is looked up in the map; a front looks up each. With all of many addresses
//! in turn the processor's cache has lost the entries of an address when its next datagram comes. So a second figure is
//! taken with the first [`HOT`] addresses alone. The others are there, but nobody uses them.
//!
//! A third figure is the time of a front's program by the kernel's count, which has no way out of the node in it.

use std::{
    fmt::Write,
    net::{Ipv4Addr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::sys::{Stats, enable_stats};
use thuban_common::{counters::Counter, services::FRONTS};

use super::Plan;
use crate::{
    bench::{
        datapath::rigs::node::{Hook, Node},
        float, go_on,
        policy::nft,
        process::{CLIENT_CORE, prefer},
        results::{Results, Sample},
        table::number,
    },
    rig::namespace::Namespace,
    services::Served,
};

const NODE: Ipv4Addr = Ipv4Addr::new(172, 31, 97, 1);
/// The droplet of all backends, which the client's namespace plays.
const DROPLET: Ipv4Addr = Ipv4Addr::new(172, 31, 97, 2);
const CLIENT: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
const BACKEND: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 50);
const VNI: u32 = 100;
const PORT: u16 = 4321;
const UDP: u8 = 17;
/// The first of the load balancers' addresses.
const FIRST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
const RANGE: &str = "198.18.0.0/15";
const MESSAGE: [u8; 64] = [0x55; 64];
/// Load balancers that are in use where only some of them are.
const HOT: u32 = 64;
/// The metric of what a datagram costs with [`HOT`] of the load balancers in use.
pub const HOT_COST: &str = "hot_cost_ns";
const WARM_UP: Duration = Duration::from_millis(300);
/// The least share of datagrams that must pass. The rate is that of datagrams that passed.
const PASSED: f64 = 0.9;

/// The node's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Middle {
    Drop,
    Forward,
    /// With so many load balancers.
    Front(u32),
    Nft(u32),
}

impl Middle {
    fn name(self) -> String {
        match self {
            Self::Drop => "drop".to_owned(),
            Self::Forward => "forward".to_owned(),
            Self::Front(count) => front(count),
            Self::Nft(count) => nftables(count),
        }
    }
}

/// Returns the name of the case with so many load balancers.
pub fn front(count: u32) -> String {
    format!("front-{count}")
}

pub fn nftables(count: u32) -> String {
    format!("nftables-{count}")
}

struct Rig {
    middle: Middle,
    node: Node,
    client: Namespace,
    addresses: u32,
}

pub fn measure(plan: &Plan, results: &mut Results) -> Result<()> {
    let many = plan
        .sizes
        .iter()
        .flat_map(|size| [Middle::Front(*size), Middle::Nft(*size)]);
    let middles = [Middle::Drop, Middle::Forward].into_iter().chain(many);
    let make = |middle: Middle| {
        go_on()?;
        Rig::new(middle).with_context(|| format!("setting up {}", middle.name()))
    };
    let rigs = middles.map(make).collect::<Result<Vec<_>>>()?;
    for round in 1..=plan.rounds {
        let mut dropping = 0.0;
        for rig in &rigs {
            go_on()?;
            let name = rig.middle.name();
            let samples = rig
                .measure(plan.time, &mut dropping)
                .with_context(|| name.clone())?;
            let figures: Vec<String> = samples
                .iter()
                .map(|sample| format!("{} {}", sample.metric, number(sample.value)))
                .collect();
            println!(
                "round {round} of {}, {name:<15} {}",
                plan.rounds,
                figures.join("  ")
            );
            results.add(&name, &samples);
        }
    }
    Ok(())
}

impl Rig {
    fn new(middle: Middle) -> Result<Self> {
        let addresses = match middle {
            Middle::Drop | Middle::Forward => 1,
            Middle::Front(count) | Middle::Nft(count) => count,
        };
        let mut node = Node::new(NODE, 1500)?;
        let client = Namespace::new("client")?;
        let far = client.name();
        node.namespace
            .command(&format!("ip link add uplink type veth peer name far netns {far}"))?;
        node.bring_up()?;
        // A frame of a NIC has its checksum.
        client.command("ethtool -K far tx off")?;
        for line in [
            &format!("ip addr add {DROPLET}/24 dev far"),
            &format!("ip addr add {CLIENT}/32 dev lo"),
            "ip link set far up",
            &format!("ip route add {RANGE} via {NODE}"),
        ] {
            client.command(line)?;
        }
        let mac = |namespace: &Namespace, link: &str| -> Result<String> {
            let text = namespace.command(&format!("cat /sys/class/net/{link}/address"))?;
            Ok(text.trim().to_owned())
        };
        let (near, other) = (mac(&node.namespace, "uplink")?, mac(&client, "far")?);
        client.command(&format!(
            "ip neigh replace {NODE} lladdr {near} dev far nud permanent"
        ))?;
        for setting in ["all", "uplink"] {
            // Frames leave where they came in.
            node.namespace
                .sysctl(&format!("ipv4/conf/{setting}/send_redirects"), "0")?;
        }
        for line in [
            format!("ip neigh replace {DROPLET} lladdr {other} dev uplink nud permanent"),
            format!("ip route add {RANGE} via {DROPLET}"),
            format!("ip route add {BACKEND} via {DROPLET}"),
        ] {
            node.namespace.command(&line)?;
        }
        nft::apply(&client, &dropping("far"))?;
        match middle {
            Middle::Drop => nft::apply(&node.namespace, &dropping("uplink"))?,
            Middle::Forward => {}
            Middle::Front(count) => fronts(&mut node, count)?,
            Middle::Nft(count) => nft::apply(&node.namespace, &translating(count)?)?,
        }
        Ok(Self {
            middle,
            node,
            client,
            addresses,
        })
    }

    /// Measures the case. `dropping`: the time of a datagram that the node drops, ns, which one of the cases measures.
    fn measure(&self, time: Duration, dropping: &mut f64) -> Result<Vec<Sample>> {
        let rate = self.rate(time, self.addresses)?;
        if self.middle == Middle::Drop {
            *dropping = 1e9 / rate;
        }
        let cost = |rate: f64| 1e9 / rate - *dropping;
        let mut samples = vec![
            Sample::new("pps", "1/s", rate),
            Sample::new("cost_ns", "ns", cost(rate)),
        ];
        if self.addresses > HOT {
            let hot = self.rate(time, HOT)?;
            samples.push(Sample::new(HOT_COST, "ns", cost(hot)));
        }
        if let Some(nanos) = self.program_time(time)? {
            samples.push(Sample::new("program_ns", "ns", nanos));
        }
        Ok(samples)
    }

    /// Returns the time of a run of the front's program, ns. The kernel's count takes time itself, so no other figure
    /// is taken meanwhile.
    fn program_time(&self, time: Duration) -> Result<Option<f64>> {
        let Some(programs) = &self.node.programs else {
            return Ok(None);
        };
        let counting = enable_stats(Stats::RunTime).context("counting the time of programs")?;
        let (before, first) = programs.runs("transit_tc")?;
        self.rate(time, self.addresses)?;
        let (after, last) = programs.runs("transit_tc")?;
        drop(counting);
        ensure!(last > first, "the program did not run");
        let took = after.saturating_sub(before);
        Ok(Some(took.as_secs_f64() * 1e9 / float(last - first)))
    }

    /// Returns the datagrams, to so many of the addresses, that passed in a second.
    fn rate(&self, time: Duration, addresses: u32) -> Result<f64> {
        self.client.run(|| {
            prefer(CLIENT_CORE)?;
            let socket = UdpSocket::bind((CLIENT, 1234)).context("binding")?;
            send(&socket, WARM_UP, addresses)?;
            let (before, fronted) = (self.passed()?, self.fronted()?);
            let start = Instant::now();
            let sent = send(&socket, time, addresses)?;
            let elapsed = start.elapsed();
            let passed = float(self.passed()? - before);
            let sent = float(sent);
            ensure!(passed > sent * PASSED, "only {passed} of {sent} datagrams passed");
            if let Some((after, before)) = self.fronted()?.zip(fronted) {
                ensure!(float(after - before) > sent * PASSED, "they took another way");
            }
            Ok(passed / elapsed.as_secs_f64())
        })
    }

    /// Returns the number of frames that came to the end of their way.
    fn passed(&self) -> Result<u64> {
        let end = if self.middle == Middle::Drop {
            &self.node.namespace
        } else {
            &self.client
        };
        let text = end.command("nft list table netdev bench")?;
        let count = text
            .split_once("packets ")
            .and_then(|(_, rest)| rest.split(' ').next());
        count.context("no counter")?.parse().context("a counter")
    }

    /// Returns what the node sent as a front.
    fn fronted(&self) -> Result<Option<u64>> {
        let programs = self.node.programs.as_ref();
        programs
            .map(|programs| programs.counter(Counter::Fronted))
            .transpose()
    }
}

/// Sends to so many addresses in turn for this time; returns how many datagrams.
fn send(socket: &UdpSocket, time: Duration, addresses: u32) -> Result<u64> {
    let (start, mut sent) = (Instant::now(), 0);
    while start.elapsed() < time {
        // The clock is read only now and then.
        for _ in 0..64 {
            let number = (sent % u64::from(addresses)) as u32;
            let address = Ipv4Addr::from_bits(FIRST.to_bits() + number);
            socket.send_to(&MESSAGE, (address, PORT)).context("sending")?;
            sent += 1;
        }
    }
    Ok(sent)
}

/// Returns rules that count and drop what comes in.
fn dropping(interface: &str) -> String {
    format!(
        "table netdev bench {{\nchain in {{\ntype filter hook ingress device {interface} priority 0;\n\
         counter drop\n}}\n}}\n"
    )
}

/// Returns rules as kube-proxy's nftables mode writes them, each address with its verdict.
fn translating(count: u32) -> Result<String> {
    let mut text = format!(
        "table ip bench {{\nchain backend {{\nmeta l4proto udp dnat to {BACKEND}:{PORT}\n}}\n\
         map services {{\ntype ipv4_addr . inet_proto . inet_service : verdict\nelements = {{"
    );
    for number in 0..count {
        let address = Ipv4Addr::from_bits(FIRST.to_bits() + number);
        write!(text, "{address} . udp . {PORT} : goto backend,")?;
    }
    write!(
        text,
        "}}\n}}\nchain prerouting {{\ntype nat hook prerouting priority -100;\n\
         ip daddr . meta l4proto . th dport vmap @services\n}}\n}}\n"
    )?;
    Ok(text)
}

/// Attaches the programs, with rows of so many load balancers, each with a backend on the other droplet.
fn fronts(node: &mut Node, count: u32) -> Result<()> {
    node.load(Hook::Tc)?;
    node.know(&[NODE, DROPLET])?;
    node.vpc(VNI, None)?;
    node.network(VNI, 1, Ipv4Addr::new(10, 0, 1, 0), None)?;
    let programs = node.programs.as_mut().context("no programs")?;
    for number in 0..count {
        let address = Ipv4Addr::from_bits(FIRST.to_bits() + number);
        let front = Served::new(FRONTS, number + 1, address.into(), PORT, UDP);
        front.by_fronts(programs, VNI, &[(BACKEND.into(), PORT, DROPLET)])?;
    }
    Ok(())
}

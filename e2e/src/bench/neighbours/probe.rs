//! The probes of the tenant that measures: a steady number of attempts a second, and how many were answered in time.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use thuban_cluster::wait::uninterrupted;
use thuban_proto::transit::droplet_message::Message;
use thuban_testkit::{operator::IN_THE_END, wait::wait_for};

use super::{
    Plan,
    servers::query,
    site::{DNS, PORT, SERVICE, SHARED, Site, another, nobody, service},
};
use crate::{
    bench::{
        float, go_on,
        stats::{median, quantile, sorted},
    },
    rig::namespace::Namespace,
};

/// How often something is looked for that comes sooner or later.
const LOOK: Duration = Duration::from_millis(2);
const SECOND: Duration = Duration::from_secs(1);
/// The packet at which a flow is announced.
const FEW: u32 = 3;
/// The most new Services of one measurement.
const MAX_SERVICES: u32 = 4096;

#[derive(Clone, Copy, Debug)]
pub enum Probe {
    /// New connections to the VPC's own Service.
    Connect,
    /// New connections to the Service that the node serves for all VPCs.
    Shared,
    /// Connections to a Service that were open before, while the Service gets a backend.
    Open,
    Names,
    /// Direct paths to addresses that are new to the node.
    Paths,
    /// Pods that come and go.
    Pods,
    /// Services that are new to the node.
    Services,
}

/// A steady number of attempts.
#[derive(Clone, Copy)]
struct Pace {
    count: u64,
    rate: u32,
    patience: Duration,
}

/// The result of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub attempts: u64,
    pub answered: u64,
    /// Median of the attempts that were answered.
    pub median_ms: f64,
    pub p99_ms: f64,
}

impl Outcome {
    fn of(attempts: u64, times: &[Duration]) -> Self {
        let times = sorted(times.iter().map(|time| time.as_secs_f64() * 1000.0));
        Self {
            attempts,
            answered: times.len() as u64,
            median_ms: median(times.iter().copied()),
            p99_ms: quantile(&times, 0.99),
        }
    }

    /// Returns the answered part of all attempts.
    pub fn share(&self) -> f64 {
        float(self.answered) / float(self.attempts)
    }
}

impl Probe {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connect => "new connections",
            Self::Shared => "new connections to the shared Service",
            Self::Open => "open connections",
            Self::Names => "DNS",
            Self::Paths => "direct paths",
            Self::Pods => "pods",
            Self::Services => "new Services",
        }
    }

    /// Returns the attempts a second.
    const fn rate(self) -> u32 {
        match self {
            Self::Connect | Self::Shared => 100,
            Self::Names => 50,
            Self::Open | Self::Paths => 40,
            Self::Services => 20,
            Self::Pods => 4,
        }
    }

    /// Measures once; `turn` is another one for each measurement of a site.
    pub fn measure(self, site: &Site, plan: &Plan, turn: u32) -> Result<Outcome> {
        let rate = self.rate();
        let pace = Pace {
            count: u64::from(rate) * plan.seconds,
            rate,
            patience: plan.patience,
        };
        let client = site.victim.client();
        match self {
            Self::Connect => client.run(|| connections(pace, SERVICE)),
            Self::Shared => client.run(|| connections(pace, SHARED)),
            Self::Open => open(site, u64::from(rate), plan, turn),
            Self::Names => client.run(|| names(pace)),
            Self::Paths => paths(site, u64::from(rate), plan.patience, turn),
            Self::Pods => site.transitd.node.run(|| pods(site, pace)),
            Self::Services => services(site, pace, turn),
        }
    }
}

impl Pace {
    /// Makes the attempts, each no sooner than its turn; one that fails delays the next.
    fn run(self, mut attempt: impl FnMut(u64) -> Result<bool>) -> Result<Outcome> {
        let Self {
            count,
            rate,
            patience,
        } = self;
        let start = Instant::now();
        let each = Duration::from_secs(1) / rate;
        // What takes this long takes for ever.
        let end = start + each * count as u32 * 2 + patience;
        let mut times = Vec::new();
        for number in 0..count {
            go_on()?;
            let due = start + each * number as u32;
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let begin = Instant::now();
            if begin > end {
                break;
            }
            if attempt(number)? {
                times.push(begin.elapsed());
            }
        }
        Ok(Outcome::of(count, &times))
    }
}

fn connections(pace: Pace, to: SocketAddrV4) -> Result<Outcome> {
    pace.run(|_| Ok(connect(to, pace.patience).is_some()))
}

fn pods(site: &Site, pace: Pace) -> Result<Outcome> {
    let (plugin, pod) = (&site.transitd.plugin, site.victim.guest());
    pace.run(|_| {
        let added = plugin.call("ADD", pod).is_ok();
        Ok(plugin.call("DEL", pod).is_ok() && added)
    })
}

/// Has the operator send a new Service for each attempt: transitd acknowledges it, and a client connects to it.
fn services(site: &Site, pace: Pace, turn: u32) -> Result<Outcome> {
    let operator = &site.transitd.operator;
    pace.run(|number| {
        let (row, address) = another(turn * MAX_SERVICES + number as u32 % MAX_SERVICES);
        let sequence = operator.push(vec![row], vec![]);
        let is_acked = || operator.count(|m| matches!(m, Message::Ack(ack) if ack.sequence >= sequence)) > 0;
        if !becomes_true(pace.patience, is_acked) {
            return Ok(false);
        }
        let connected = || Ok(connect(address, pace.patience).is_some());
        site.victim.client().run(connected)
    })
}

/// Whether something is true before the patience ends.
fn becomes_true(patience: Duration, is_true: impl Fn() -> bool) -> bool {
    wait_for("a condition", patience, LOOK, || Ok(is_true())).is_ok()
}

/// A connection that carries a byte and back, or none in time.
fn connect(to: SocketAddrV4, patience: Duration) -> Option<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::V4(to), patience).ok()?;
    stream.set_read_timeout(Some(patience)).ok()?;
    echoes(&mut stream).then_some(stream)
}

fn echoes(stream: &mut TcpStream) -> bool {
    let mut byte = [0];
    stream.write_all(&[7]).is_ok() && stream.read_exact(&mut byte).is_ok() && byte == [7]
}

fn names(pace: Pace) -> Result<Outcome> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(DNS).context("the cluster's DNS")?;
    socket.set_read_timeout(Some(pace.patience))?;
    let mut buffer = [0; 1500];
    pace.run(|number| {
        let identifier = number as u16;
        // A refusal of an earlier query is no answer to this one.
        let _ = socket.send(&query(identifier, &["web", "example"]));
        let deadline = Instant::now() + pace.patience;
        while Instant::now() < deadline {
            let Ok(length) = uninterrupted(|| socket.recv(&mut buffer)) else {
                continue;
            };
            if length > 12 && buffer[..2] == identifier.to_be_bytes() {
                // The response has an answer.
                return Ok(buffer[7] > 0);
            }
        }
        Ok(false)
    })
}

/// Opens them, lets the time go by, adds a backend, and asks each.
fn open(site: &Site, count: u64, plan: &Plan, turn: u32) -> Result<Outcome> {
    let opened = || {
        let streams = (0..count).filter_map(|_| connect(SERVICE, plan.patience));
        Ok(streams.collect::<Vec<TcpStream>>())
    };
    let streams: Vec<TcpStream> = site.victim.client().run(opened)?;
    thread::sleep(Duration::from_secs(plan.seconds));
    let backends = if turn.is_multiple_of(2) { 2 } else { 1 };
    let row = service(site.victim.vni, backends);
    site.transitd.operator.push_and_wait(vec![row], vec![]);
    let mut times = Vec::new();
    for mut stream in streams {
        let begin = Instant::now();
        if echoes(&mut stream) {
            times.push(begin.elapsed());
        }
    }
    Ok(Outcome::of(count, &times))
}

/// Datagrams to each of so many addresses, a second apart, until the node has asked for all, and for how many it asked.
/// The time is from the first datagram to the end.
fn paths(site: &Site, count: u64, patience: Duration, turn: u32) -> Result<Outcome> {
    let vni = site.victim.vni;
    let addresses: BTreeSet<Ipv4Addr> = (0..count as u32)
        .map(|number| nobody(vni, 1000 * (turn + 1) + number))
        .collect();
    let asked = || {
        // The operator hears of each address once.
        site.transitd.operator.count(|message| {
            matches!(message, Message::Subscribe(row) if row.vni == u32::from(vni) && is_one_of(&addresses, &row.address))
        })
    };
    let begin = Instant::now();
    site.victim.client().run(|| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        for packet in 1.. {
            for address in &addresses {
                // A datagram that nobody answers may be refused.
                let _ = socket.send_to(&[0], (*address, PORT));
            }
            if packet < FEW {
                thread::sleep(SECOND);
            } else if becomes_true(SECOND, || asked() == addresses.len()) || begin.elapsed() > patience {
                // An attacker may take the place in which a flow is counted: then the count begins anew.
                break;
            }
        }
        Ok(())
    })?;
    Ok(Outcome::of(count, &vec![begin.elapsed(); asked()]))
}

fn is_one_of(addresses: &BTreeSet<Ipv4Addr>, bytes: &[u8]) -> bool {
    let address = <[u8; 16]>::try_from(bytes).map(Ipv6Addr::from);
    address.is_ok_and(|address| address.to_ipv4_mapped().is_some_and(|v4| addresses.contains(&v4)))
}

/// Returns an error unless a tenant's Services answer.
pub fn works(namespace: &Namespace, services: &[SocketAddrV4]) -> Result<()> {
    for service in services {
        let answer = namespace.run(|| Ok(connect(*service, IN_THE_END).is_some()))?;
        ensure!(answer, "{service} does not answer the VPC that measures");
    }
    Ok(())
}

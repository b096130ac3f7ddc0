//! The probes of the tenant that measures: a steady number of attempts a second, and how many were answered in time.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde::Serialize;
use thuban_proto::transit::droplet_message::Message;

use super::{
    servers::query,
    site::{DNS, PORT, SERVICE, Site, nobody, service},
};
use crate::{
    bench::{
        float, go_on,
        stats::{median, quantile, sorted},
    },
    rig::namespace::Namespace,
};

/// How long a person waits for an answer.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub enum Probe {
    /// New connections to the VPC's own Service.
    Connect,
    /// Connections to a Service that were open before, while the Service gets a backend.
    Open,
    Names,
    /// Direct paths to addresses that are new to the node.
    Paths,
    /// Pods that come and go.
    Pods,
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
            Self::Open => "open connections",
            Self::Names => "DNS",
            Self::Paths => "direct paths",
            Self::Pods => "pods",
        }
    }

    /// Returns the attempts a second.
    const fn rate(self) -> u32 {
        match self {
            Self::Connect => 100,
            Self::Names => 50,
            Self::Open | Self::Paths => 40,
            Self::Pods => 4,
        }
    }

    /// Measures for so long; `turn` is another one for each measurement of a site.
    pub fn measure(self, site: &Site, seconds: u64, turn: u32) -> Result<Outcome> {
        let count = u64::from(self.rate()) * seconds;
        let client = site.victim.client();
        match self {
            Self::Connect => {
                let attempt = |_| Ok(connect(SERVICE).is_some());
                client.run(|| paced(count, self.rate(), attempt))
            }
            Self::Open => open(site, u64::from(self.rate()), seconds, turn),
            Self::Names => client.run(|| names(count, self.rate())),
            Self::Paths => paths(site, u64::from(self.rate()), turn),
            Self::Pods => site.transitd.node.run(|| {
                paced(count, self.rate(), |_| {
                    let (plugin, pod) = (&site.transitd.plugin, site.victim.guest());
                    let added = plugin.call("ADD", pod).is_ok();
                    Ok(plugin.call("DEL", pod).is_ok() && added)
                })
            }),
        }
    }
}

/// So many attempts, each no sooner than its turn; one that fails delays the next.
fn paced(count: u64, rate: u32, mut attempt: impl FnMut(u64) -> Result<bool>) -> Result<Outcome> {
    let start = Instant::now();
    let each = Duration::from_secs(1) / rate;
    // What takes this long takes for ever.
    let end = start + each * count as u32 * 2 + PATIENCE;
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

/// A connection that carries a byte and back, or none in time.
fn connect(to: SocketAddrV4) -> Option<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::V4(to), PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    echoes(&mut stream).then_some(stream)
}

fn echoes(stream: &mut TcpStream) -> bool {
    let mut byte = [0];
    stream.write_all(&[7]).is_ok() && stream.read_exact(&mut byte).is_ok() && byte == [7]
}

fn names(count: u64, rate: u32) -> Result<Outcome> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(DNS).context("the cluster's DNS")?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut buffer = [0; 1500];
    paced(count, rate, |number| {
        let identifier = number as u16;
        // A refusal of an earlier query is no answer to this one.
        let _ = socket.send(&query(identifier, &["web", "example"]));
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let Ok(length) = socket.recv(&mut buffer) else {
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
fn open(site: &Site, count: u64, seconds: u64, turn: u32) -> Result<Outcome> {
    let opened = || {
        Ok((0..count)
            .filter_map(|_| connect(SERVICE))
            .collect::<Vec<TcpStream>>())
    };
    let streams: Vec<TcpStream> = site.victim.client().run(opened)?;
    thread::sleep(Duration::from_secs(seconds));
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

/// Three datagrams to each of so many addresses, a second apart, and how many of them the node asked for. The time is
/// from the first datagram to the end.
fn paths(site: &Site, count: u64, turn: u32) -> Result<Outcome> {
    let vni = site.victim.vni;
    let addresses: BTreeSet<Ipv4Addr> = (0..count as u32)
        .map(|number| nobody(vni, 1000 * (turn + 1) + number))
        .collect();
    let begin = Instant::now();
    site.victim.client().run(|| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        for _ in 0..3 {
            for address in &addresses {
                // A datagram that nobody answers may be refused.
                let _ = socket.send_to(&[0], (*address, PORT));
            }
            thread::sleep(Duration::from_secs(1));
        }
        Ok(())
    })?;
    thread::sleep(PATIENCE);
    let mut asked = 0;
    for address in &addresses {
        let bytes = address.to_ipv6_mapped().octets().to_vec();
        let is_asked = site.transitd.operator.count(|message| {
            matches!(message, Message::Subscribe(row) if row.vni == u32::from(vni) && row.address == bytes)
        });
        asked += usize::from(is_asked > 0);
    }
    Ok(Outcome::of(count, &vec![begin.elapsed(); asked]))
}

/// Whether a tenant's pods and servers work at all.
pub fn works(namespace: &Namespace) -> Result<bool> {
    namespace.run(|| Ok(connect(SERVICE).is_some()))
}

//! The measures between two pods. The client's end is kept on core 0 and the server's on core 1, both with real-time
//! priority. Without the fixed cores, latencies vary by a fifth from run to run. Without the priority, other work of
//! the machine is measured.

mod connections;
mod datagrams;
mod latency;
mod stream;

use std::{fs::File, net::Ipv4Addr, path::Path, time::Duration};

use anyhow::{Context, Result};
use thuban_cluster::namespace::inside;

use super::results::Sample;

/// Two pods by the files of their network namespaces, and the server's addresses.
#[derive(Clone, Copy)]
pub struct Ends<'a> {
    pub client: &'a Path,
    pub server: &'a Path,
    /// The server's own address.
    pub own: Ipv4Addr,
    /// The address that the client uses: the server's own, or a Service's.
    pub address: Ipv4Addr,
}

/// Ports of the measures, each with its protocol. A Service that leads to a server needs all of them.
pub const PORTS: [(u16, &str); 4] = [
    (stream::PORT, "TCP"),
    (latency::PORT, "TCP"),
    (connections::PORT, "TCP"),
    (datagrams::PORT, "UDP"),
];

/// Runs `work` on a thread of its own in a network namespace.
pub(super) fn within<T: Send>(namespace: &Path, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let file = File::open(namespace).with_context(|| namespace.display().to_string())?;
    inside(file, work)
}

/// One measure; it may give several metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// One TCP stream: throughput, and the whole machine's CPU time for it.
    Stream,
    /// Eight TCP streams.
    Streams,
    /// Round trips of 64 bytes over one TCP connection.
    RoundTrips,
    /// Connections made, used for one byte each way, and closed, one after the other.
    Connections,
    /// Datagrams of 64 bytes: those that arrive, and the whole machine's CPU time for them.
    Datagrams,
}

impl Measure {
    pub const ALL: &'static [Self] = &[
        Self::Stream,
        Self::Streams,
        Self::RoundTrips,
        Self::Connections,
        Self::Datagrams,
    ];

    /// Returns the names of the metrics that it gives.
    pub const fn metrics(self) -> &'static [&'static str] {
        match self {
            Self::Stream => &["tcp1_gbps", "cpu_ms_per_gb"],
            Self::Streams => &["tcp8_gbps"],
            Self::RoundTrips => &["rr_p50_us", "rr_p99_us"],
            Self::Connections => &["crr_per_s"],
            Self::Datagrams => &["udp64_pps", "udp64_loss", "udp64_cpu_us"],
        }
    }

    /// Measures for the given time. Measures that settle fast take half of it, and at least a second.
    pub fn run(self, ends: Ends, time: Duration) -> Result<Vec<Sample>> {
        let half = (time / 2).max(Duration::from_secs(1));
        match self {
            Self::Stream => stream::one(ends, time),
            Self::Streams => stream::eight(ends, half),
            Self::RoundTrips => latency::round_trips(ends, time),
            Self::Connections => connections::per_second(ends, half),
            Self::Datagrams => datagrams::per_second(ends, half),
        }
    }
}

//! CONNECTIONS, PENDING, AFFINITY and SHARES: what agents remember of connections to services, and when it goes.
//!
//! Must not write anything that leads a packet: entries are only taken away, and shares counted anew.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Duration;

use aya::maps::{Array, Map, MapData};
use nix::time::{ClockId, clock_gettime};
use thuban_common::packet::ipv4::UDP;
use thuban_common::services::{
    ALL_CONNECTIONS, ALL_PENDING, AffinityEntry, AffinityKey, BackendEntry, BackendKey, ConnectionEntry,
    ConnectionKey, FINISHED, FORWARD, GatesEntry, HAIRPIN, NO_INDEX, PENDING_LIFE, PendingEntry, PendingKey,
    RESET, REVERSE, SEEN, ServiceKey,
};
use thuban_common::tables::{Address, EndpointKey};

use super::tables::{Hash, TableError, access, data, hash, lookup, lru, open, take};

/// The table of connections.
pub const CONNECTIONS: &str = "CONNECTIONS";
/// TCP and SCTP, both sides heard: as long as Linux's conntrack.
const ESTABLISHED: Duration = Duration::from_hours(120);
/// One side has ended it.
const HALF_CLOSED: Duration = Duration::from_mins(2);
/// The life of a connection that is not answered yet, or was ended by both sides or a reset.
const TRANSITORY: Duration = Duration::from_mins(1);
/// The life, without a packet, of a TCP or SCTP connection to a backend that its service no longer has.
const ABANDONED: Duration = Duration::from_mins(5);
const DATAGRAMS: Duration = Duration::from_mins(2);
const UNANSWERED_DATAGRAM: Duration = Duration::from_secs(30);
/// Entries that one scan takes away at most; the rest is found by the next.
const MAX_EXPIRED_PER_SCAN: usize = 65_536;

pub struct Connections {
    flows: Hash<ConnectionKey, ConnectionEntry>,
    pending: Hash<PendingKey, PendingEntry>,
    affinity: Hash<AffinityKey, AffinityEntry>,
    backends: Hash<BackendKey, BackendEntry>,
    shares: Hash<EndpointKey, u32>,
    gates: Array<MapData, GatesEntry>,
}

type Backends = HashSet<BackendEntry>;

/// The result of a scan.
#[derive(Debug, Default)]
pub struct Scan {
    /// Connections that stay.
    pub held: usize,
    pub expired: usize,
    /// Services that they lead to.
    pub services: HashSet<EndpointKey>,
}

impl Connections {
    pub fn open(maps: &Path) -> Result<Self, TableError> {
        Ok(Self {
            flows: hash(maps, CONNECTIONS)?,
            pending: lru(maps, "PENDING")?,
            affinity: lru(maps, "AFFINITY")?,
            backends: hash(maps, "BACKENDS")?,
            shares: hash(maps, "SHARES")?,
            gates: Array::try_from(Map::Array(data(maps, "GATES")?)).map_err(open("GATES"))?,
        })
    }

    /// Looks at every connection once, and takes away those whose time is over and those of clients that aren't here.
    /// `backends` is asked once for a service; `None`: it isn't known.
    pub fn scan(
        &mut self,
        is_here: impl Fn(&EndpointKey) -> bool,
        backends: impl Fn(&ServiceKey) -> Option<Backends>,
    ) -> Result<Scan, TableError> {
        let now = now();
        let mut known: HashMap<ServiceKey, Option<Backends>> = HashMap::new();
        let (mut scan, mut doomed) = (Scan::default(), Vec::new());
        let mut shares: HashMap<EndpointKey, u32> = HashMap::new();
        for entry in &self.flows {
            let (key, entry) = entry.map_err(access("read", CONNECTIONS))?;
            if key.direction != FORWARD {
                if doomed.len() < MAX_EXPIRED_PER_SCAN && self.is_orphan(&key, &entry, now)? {
                    doomed.push((Looked::at(key, Some(&entry)), None));
                }
                continue;
            }
            let client = endpoint(key.vni, key.source);
            let back = reverse(&key, &entry);
            let answered = self.connection(&back)?;
            let seen = Seen {
                protocol: key.protocol,
                forward: entry.state,
                reverse: answered.map_or(0, |answered| answered.state),
                has_backend: if entry.index == NO_INDEX {
                    let service = service(&key);
                    let backends = known.entry(service).or_insert_with(|| backends(&service));
                    backends
                        .as_ref()
                        .is_none_or(|there| there.contains(&backend(&entry)))
                } else {
                    self.has_backend(&entry)?
                },
            };
            let last = entry.time.max(answered.map_or(0, |answered| answered.time));
            let is_over = now.saturating_sub(Duration::from_nanos(last)) > life(&seen);
            if doomed.len() < MAX_EXPIRED_PER_SCAN && (is_over || !is_here(&client)) {
                scan.expired += 1;
                let back = Looked::at(back, answered.as_ref());
                doomed.push((Looked::at(key, Some(&entry)), Some(back)));
            } else {
                scan.held += 1;
                for of in [client, endpoint(key.vni, ALL_CONNECTIONS)] {
                    *shares.entry(of).or_default() += 2;
                }
                scan.services.insert(endpoint(key.vni, key.destination));
            }
        }
        for (entry, back) in doomed {
            let both = [Some(entry), back];
            let is_same = both.iter().flatten().try_fold(true, |is_same, looked| {
                Ok(is_same && self.connection(&looked.key)?.map(|now| now.time) == looked.time)
            })?;
            // Else a packet has come since, and made one of both anew.
            if is_same {
                let mut both = both.iter().flatten();
                both.try_for_each(|looked| take(&mut self.flows, CONNECTIONS, &looked.key))?;
            }
        }
        self.scan_pending(now, &mut shares)?;
        self.count(&shares)?;
        Ok(scan)
    }

    /// Takes away what is believed no longer, and counts the rest.
    fn scan_pending(
        &mut self,
        now: Duration,
        shares: &mut HashMap<EndpointKey, u32>,
    ) -> Result<(), TableError> {
        let mut doomed = Vec::new();
        for entry in &self.pending {
            let (key, entry) = entry.map_err(access("read", "PENDING"))?;
            if now.saturating_sub(Duration::from_nanos(entry.time)) > Duration::from_nanos(PENDING_LIFE) {
                doomed.push(key);
            } else {
                *shares.entry(endpoint(key.vni, ALL_PENDING)).or_default() += 1;
            }
        }
        doomed
            .iter()
            .try_for_each(|key| take(&mut self.pending, "PENDING", key))
    }

    /// Takes away all that is remembered of endpoints that have left, as clients or as backends. `vnis`: of services.
    pub fn forget(
        &mut self,
        has_left: impl Fn(&EndpointKey) -> bool,
        vnis: impl FnOnce() -> HashMap<u32, u32>,
    ) -> Result<(), TableError> {
        let gates = self.gates.get(&0, 0).map_err(access("read", "GATES"))?;
        if gates.connections == 0 {
            return Ok(());
        }
        let is_gone = |vni, addresses: &[Address]| {
            let mut ends = addresses.iter().map(|address| endpoint(vni, *address));
            ends.any(|end| has_left(&end))
        };
        let mut flows = Vec::new();
        for entry in &self.flows {
            let (key, entry) = entry.map_err(access("read", CONNECTIONS))?;
            // The service's address, which is one of them, is no endpoint's.
            if is_gone(key.vni, &[key.source, key.destination, entry.address]) {
                flows.push(key);
            }
        }
        let mut pending = Vec::new();
        for entry in &self.pending {
            let (key, entry) = entry.map_err(access("read", "PENDING"))?;
            if is_gone(key.vni, &[key.address, entry.backend]) {
                pending.push(key);
            }
        }
        let (mut affinity, vnis) = (Vec::new(), vnis());
        for entry in &self.affinity {
            let (key, entry) = entry.map_err(access("read", "AFFINITY"))?;
            let vni = vnis.get(&key.service);
            // Of a service that has gone as well nobody asks.
            if vni.is_some_and(|vni| is_gone(*vni, &[key.client, entry.backend.address])) {
                affinity.push(key);
            }
        }
        let mut flows = flows.iter();
        flows.try_for_each(|key| take(&mut self.flows, CONNECTIONS, key))?;
        let mut pending = pending.iter();
        pending.try_for_each(|key| take(&mut self.pending, "PENDING", key))?;
        let mut affinity = affinity.iter();
        affinity.try_for_each(|key| take(&mut self.affinity, "AFFINITY", key))
    }

    /// An entry that leads back and nothing leads there. It may be one that is just made.
    fn is_orphan(
        &self,
        key: &ConnectionKey,
        entry: &ConnectionEntry,
        now: Duration,
    ) -> Result<bool, TableError> {
        if now.saturating_sub(Duration::from_nanos(entry.time)) < UNANSWERED_DATAGRAM {
            return Ok(false);
        }
        let client = if key.direction == HAIRPIN {
            key.source
        } else {
            key.destination
        };
        let forward = ConnectionKey {
            vni: key.vni,
            ports: [key.ports[1], entry.port],
            source: client,
            destination: entry.address,
            protocol: key.protocol,
            direction: FORWARD,
            padding: 0,
        };
        let leads_here = |there: &ConnectionEntry| there.address == key.source && there.port == key.ports[0];
        Ok(!self.connection(&forward)?.as_ref().is_some_and(leads_here))
    }

    fn connection(&self, key: &ConnectionKey) -> Result<Option<ConnectionEntry>, TableError> {
        lookup(CONNECTIONS, self.flows.get(key, 0))
    }

    /// Whether the service has the backend still.
    fn has_backend(&self, entry: &ConnectionEntry) -> Result<bool, TableError> {
        let (service, index) = (entry.service, entry.index);
        let there = lookup("BACKENDS", self.backends.get(&BackendKey { service, index }, 0))?;
        Ok(there.is_some_and(|there| there == backend(entry)))
    }

    fn count(&mut self, shares: &HashMap<EndpointKey, u32>) -> Result<(), TableError> {
        let held: Result<Vec<EndpointKey>, _> = self.shares.keys().collect();
        for client in held.map_err(access("read", "SHARES"))? {
            match shares.get(&client) {
                Some(share) => self
                    .shares
                    .insert(client, share, 0)
                    .map_err(access("write", "SHARES"))?,
                None => take(&mut self.shares, "SHARES", &client)?,
            }
        }
        Ok(())
    }
}

/// An entry as a scan saw it, or saw that it wasn't there.
struct Looked {
    key: ConnectionKey,
    time: Option<u64>,
}

impl Looked {
    fn at(key: ConnectionKey, entry: Option<&ConnectionEntry>) -> Self {
        Self {
            key,
            time: entry.map(|entry| entry.time),
        }
    }
}

/// The known facts of a connection.
struct Seen {
    protocol: u8,
    /// [`ConnectionEntry::state`] of both directions.
    forward: u16,
    reverse: u16,
    has_backend: bool,
}

/// How long a connection may be without a packet.
fn life(seen: &Seen) -> Duration {
    let either = seen.forward | seen.reverse;
    let is_answered = seen.reverse & SEEN != 0;
    if seen.protocol == UDP {
        return match (seen.has_backend, is_answered) {
            (false, _) => Duration::ZERO,
            (true, true) => DATAGRAMS,
            (true, false) => UNANSWERED_DATAGRAM,
        };
    }
    let usual = if !is_answered || either & RESET != 0 || seen.forward & seen.reverse & FINISHED != 0 {
        TRANSITORY
    } else if either & FINISHED != 0 {
        HALF_CLOSED
    } else {
        ESTABLISHED
    };
    if seen.has_backend {
        usual
    } else {
        usual.min(ABANDONED)
    }
}

/// The service that a forward key leads to.
fn service(key: &ConnectionKey) -> ServiceKey {
    ServiceKey {
        vni: key.vni,
        address: key.destination,
        port: key.ports[1],
        protocol: key.protocol,
        padding: 0,
    }
}

/// The backend of a forward entry.
fn backend(entry: &ConnectionEntry) -> BackendEntry {
    BackendEntry {
        address: entry.address,
        port: entry.port,
        padding: 0,
    }
}

/// The key that leads back, of a forward one.
fn reverse(key: &ConnectionKey, entry: &ConnectionEntry) -> ConnectionKey {
    let is_own = entry.address == key.source;
    ConnectionKey {
        vni: key.vni,
        ports: [entry.port, key.ports[0]],
        source: entry.address,
        destination: if is_own { key.destination } else { key.source },
        protocol: key.protocol,
        direction: if is_own { HAIRPIN } else { REVERSE },
        padding: 0,
    }
}

fn endpoint(vni: u32, address: [u8; 16]) -> EndpointKey {
    EndpointKey { vni, address }
}

/// The programs' clock.
fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lives(protocol: u8, forward: u16, reverse: u16, has_backend: bool) -> u64 {
        let seen = Seen {
            protocol,
            forward,
            reverse,
            has_backend,
        };
        life(&seen).as_secs()
    }

    #[test]
    fn connections_live_by_what_both_sides_said() {
        for protocol in [6, 132] {
            assert_eq!(lives(protocol, SEEN, 0, true), 60, "opening");
            assert_eq!(lives(protocol, SEEN, SEEN, true), 432_000);
            assert_eq!(lives(protocol, SEEN | FINISHED, SEEN, true), 120);
            assert_eq!(lives(protocol, SEEN | FINISHED, SEEN | FINISHED, true), 60);
            assert_eq!(lives(protocol, SEEN, SEEN | RESET, true), 60);
            assert_eq!(lives(protocol, SEEN, SEEN, false), 300, "its backend is gone");
        }
        assert_eq!(lives(17, SEEN, 0, true), 30);
        assert_eq!(lives(17, SEEN, SEEN, true), 120);
        assert_eq!(lives(17, SEEN, SEEN, false), 0);
    }
}

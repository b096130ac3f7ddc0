//! CONNECTIONS, PENDING, AFFINITY, FRAGMENTS, FLOWS, SHARES and QUOTAS: what programs remember of connections and
//! flows, when entries are removed, and how many each VPC may have.
//!
//! Must not write anything that leads a packet: entries are only removed, and shares counted anew.

mod flows;
mod life;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Duration;

use aya::maps::{Array, Map, MapData};
use thuban_common::packet::ipv4::SCTP;
use thuban_common::policy::{FLOWS_CAPACITY, FLOWS_SHARED, FlowEntry};
use thuban_common::services::{
    ALL_CONNECTIONS, ALL_FLOWS, ALL_PENDING, ARRIVING, AffinityEntry, AffinityKey, BackendEntry, BackendKey,
    CONFIRMED, CONNECTIONS_CAPACITY, ConnectionEntry, ConnectionKey, FORWARD, FRAGMENT_LIFE, FragmentEntry,
    FragmentKey, GATE_OF_ANY, GatesEntry, HAIRPIN, LEAST_CONNECTIONS, LEAVING, NO_INDEX, PENDING_LIFE,
    PENDING_OF_VPC, PendingEntry, PendingKey, QUOTA_FLOWS_HELD, QUOTA_FLOWS_RESERVE, QUOTA_HELD,
    QUOTA_RESERVE, QUOTA_SHARED, REVERSE, SEEN, ServiceKey, has_connections,
};
use thuban_common::tables::{Address, EndpointKey};

use super::reserve::Shared;
use super::tables::{Hash, TableError, access, capacity, data, hash, lookup, lru, open, take};
use super::walk::Walk;
use crate::boot;
pub use flows::FLOWS;
use life::{Seen, UNANSWERED_DATAGRAM, life};

/// The shares of VPCs in FLOWS.
const ROOM_OF_FLOWS: Shared = Shared::half_reserved(FLOWS_CAPACITY as usize);
const _: () = assert!(ROOM_OF_FLOWS.capacity - ROOM_OF_FLOWS.reserved == FLOWS_SHARED as usize);
/// The table of connections.
pub const CONNECTIONS: &str = "CONNECTIONS";
/// The life of flows in PENDING of a VPC that has nearly all that it may have there. A flow that goes on is written
/// anew within that time ([`thuban_common::services::refresh`]).
const PENDING_IN_A_CROWD: Duration = Duration::from_secs(15);
/// The most entries that one scan removes; the next scan finds the rest.
const MAX_EXPIRED_PER_SCAN: usize = 65_536;

pub struct Connections {
    entries: Hash<ConnectionKey, ConnectionEntry>,
    pending: Hash<PendingKey, PendingEntry>,
    affinity: Hash<AffinityKey, AffinityEntry>,
    fragments: Hash<FragmentKey, FragmentEntry>,
    flows: Hash<ConnectionKey, FlowEntry>,
    backends: Hash<BackendKey, BackendEntry>,
    shares: Hash<EndpointKey, u32>,
    quotas: Array<MapData, u32>,
    room: Shared,
    gates: Array<MapData, GatesEntry>,
    all_entries: Walk<ConnectionKey, ConnectionEntry>,
    all_pending: Walk<PendingKey, PendingEntry>,
    all_affinity: Walk<AffinityKey, AffinityEntry>,
    all_fragments: Walk<FragmentKey, FragmentEntry>,
    all_flows: Walk<ConnectionKey, FlowEntry>,
}

/// Returns how many entries CONNECTIONS is to have room for on a node with so much memory, bytes. The empty table takes
/// 16 bytes for each, so that is at most 1/3600 of the memory. The kernel keeps some of a machine's memory for itself.
/// An eighth more is counted, so that a machine of 16 GiB counts as one.
pub fn entries_for(memory: u64) -> u32 {
    let entries = u32::try_from((memory + memory / 8) >> 16).unwrap_or(u32::MAX);
    let power = entries.checked_ilog2().map_or(0, |log| 1 << log);
    power.clamp(LEAST_CONNECTIONS, CONNECTIONS_CAPACITY)
}

/// Tells agents the size of the table. Must come before any program is attached.
pub fn write_room(maps: &Path) -> Result<(), TableError> {
    let room = room(maps)?;
    quotas(maps)?
        .set(QUOTA_SHARED, room.shared() as u32, 0)
        .map_err(access("write", "QUOTAS"))
}

fn room(maps: &Path) -> Result<Shared, TableError> {
    capacity(maps, CONNECTIONS).map(|entries| Shared::half_reserved(entries as usize))
}

fn quotas(maps: &Path) -> Result<Array<MapData, u32>, TableError> {
    Array::try_from(Map::Array(data(maps, "QUOTAS")?)).map_err(open("QUOTAS"))
}

type Backends = HashSet<BackendEntry>;

/// The result of a scan.
#[derive(Debug, Default)]
pub struct Scan {
    /// Connections that stay.
    pub held: usize,
    pub expired: usize,
    /// The services that they lead to.
    pub services: HashSet<EndpointKey>,
    /// Flows that stay.
    pub flows: usize,
}

impl Connections {
    pub fn open(maps: &Path) -> Result<Self, TableError> {
        Ok(Self {
            entries: hash(maps, CONNECTIONS)?,
            pending: lru(maps, "PENDING")?,
            affinity: lru(maps, "AFFINITY")?,
            fragments: hash(maps, "FRAGMENTS")?,
            flows: hash(maps, FLOWS)?,
            backends: hash(maps, "BACKENDS")?,
            shares: hash(maps, "SHARES")?,
            quotas: quotas(maps)?,
            room: room(maps)?,
            gates: Array::try_from(Map::Array(data(maps, "GATES")?)).map_err(open("GATES"))?,
            all_entries: Walk::open(maps, CONNECTIONS)?,
            all_pending: Walk::open(maps, "PENDING")?,
            all_affinity: Walk::open(maps, "AFFINITY")?,
            all_fragments: Walk::open(maps, "FRAGMENTS")?,
            all_flows: Walk::open(maps, FLOWS)?,
        })
    }

    /// Looks at every connection and flow once. Removes those whose time is over, connections of clients that aren't
    /// here, and flows of servers that aren't here.
    /// `backends` is called once for a service; it returns `None` if the service isn't known. `vpcs`: how many VPCs
    /// have endpoints here.
    pub fn scan(
        &mut self,
        is_here: impl Fn(&EndpointKey) -> bool,
        vpcs: usize,
        backends: impl Fn(&ServiceKey) -> Option<Backends>,
    ) -> Result<Scan, TableError> {
        let now = boot::monotonic();
        let before = self.counts()?;
        let limit = before.limit(ALL_CONNECTIONS, self.room);
        let mut known: HashMap<ServiceKey, Option<Backends>> = HashMap::new();
        let (mut scan, mut doomed) = (Scan::default(), Vec::new());
        let mut counted = Counts::default();
        self.all_entries.each(|key, entry| {
            counted.connections.held += 1;
            if !matches!(key.direction, FORWARD | ARRIVING) {
                if doomed.len() < MAX_EXPIRED_PER_SCAN && self.is_orphan(&key, &entry, now)? {
                    doomed.push((Looked::at(key, Some(&entry)), None));
                }
                return Ok(());
            }
            // Clients of a front are outside, and its backend is here.
            let is_fronts = key.direction == ARRIVING;
            let own = if is_fronts { entry.address } else { key.source };
            let back = reverse(&key, &entry);
            let answered = self.connection(&back)?;
            let answers = answered.map_or(0, |answered| answered.state);
            // Whoever claims an address sends no more than what opens a connection. Of SCTP the backend alone knows.
            let is_claimed = is_fronts
                && match key.protocol {
                    SCTP => answers & CONFIRMED == 0,
                    protocol => has_connections(protocol) && entry.state & CONFIRMED == 0,
                };
            let seen = Seen {
                protocol: key.protocol,
                forward: entry.state,
                reverse: if is_claimed { answers & !SEEN } else { answers },
                has_backend: if entry.index == NO_INDEX {
                    let service = service(&key);
                    let backends = known.entry(service).or_insert_with(|| backends(&service));
                    backends
                        .as_ref()
                        .is_none_or(|there| there.contains(&backend(&entry)))
                } else {
                    self.has_backend(&entry)?
                },
                awaits_answer: entry.index != NO_INDEX
                    && answered.is_none_or(|answered| answered.time < entry.time),
                is_crowding: before.share(entry.payer, ALL_CONNECTIONS) > limit,
            };
            let last = entry.time.max(answered.map_or(0, |answered| answered.time));
            let is_over = now.saturating_sub(Duration::from_nanos(last)) > life(&seen);
            if doomed.len() < MAX_EXPIRED_PER_SCAN && (is_over || !is_here(&endpoint(key.vni, own))) {
                scan.expired += 1;
                let back = Looked::at(back, answered.as_ref());
                doomed.push((Looked::at(key, Some(&entry)), Some(back)));
            } else {
                scan.held += 1;
                let mut count = |of| {
                    let of = endpoint(entry.payer, of);
                    *counted.shares.entry(of).or_default() += 2;
                };
                count(ALL_CONNECTIONS);
                if !is_fronts {
                    count(own);
                    scan.services.insert(endpoint(key.vni, key.destination));
                }
            }
            Ok(())
        })?;
        for (entry, back) in doomed {
            let both = [Some(entry), back];
            let is_same = both.iter().flatten().try_fold(true, |is_same, looked| {
                Ok(is_same && self.connection(&looked.key)?.map(|now| now.time) == looked.time)
            })?;
            // If the times differ, a packet has come since, and made one of both entries anew.
            if is_same {
                for looked in both.iter().flatten() {
                    take(&mut self.entries, CONNECTIONS, &looked.key)?;
                    let held = &mut counted.connections.held;
                    *held = held.saturating_sub(u32::from(looked.time.is_some()));
                }
            }
        }
        self.scan_pending(now, &before, &mut counted.shares)?;
        self.scan_fragments(now)?;
        scan.flows = self.scan_flows(&is_here, now, &before, &mut counted.shares)?;
        counted.flows.held = scan.flows as u32;
        self.count(&before, &counted, vpcs)?;
        Ok(scan)
    }

    /// Removes flows in PENDING that are no longer believed, and counts the rest. `before`: the counts before the scan.
    fn scan_pending(
        &mut self,
        now: Duration,
        before: &Counts,
        shares: &mut HashMap<EndpointKey, u32>,
    ) -> Result<(), TableError> {
        let mut doomed = Vec::new();
        self.all_pending.each(|key, entry| {
            let of_vpc = endpoint(entry.payer, ALL_PENDING);
            let life = before.life_of_pending(&of_vpc);
            if now.saturating_sub(Duration::from_nanos(entry.time)) > life {
                doomed.push(key);
            } else {
                *shares.entry(of_vpc).or_default() += 1;
            }
            Ok(())
        })?;
        doomed
            .iter()
            .try_for_each(|key| take(&mut self.pending, "PENDING", key))
    }

    /// Removes datagrams in FRAGMENTS that are no longer believed: VPCs that have left the node must not keep places.
    fn scan_fragments(&mut self, now: Duration) -> Result<(), TableError> {
        let mut doomed = Vec::new();
        self.all_fragments.each(|key, entry| {
            if now.saturating_sub(Duration::from_nanos(entry.time)) > Duration::from_nanos(FRAGMENT_LIFE) {
                doomed.push(key);
            }
            Ok(())
        })?;
        let mut doomed = doomed.iter();
        doomed.try_for_each(|key| take(&mut self.fragments, "FRAGMENTS", key))
    }

    /// Removes everything that is remembered of endpoints that have left, as clients or as backends. `vnis` gives the
    /// VPC of each service.
    pub fn forget(
        &mut self,
        has_left: impl Fn(&EndpointKey) -> bool,
        vnis: impl FnOnce() -> HashMap<u32, u32>,
    ) -> Result<(), TableError> {
        self.forget_flows(&has_left)?;
        let gates = self.gates.get(&GATE_OF_ANY, 0).map_err(access("read", "GATES"))?;
        if (gates.services, gates.fronts) == (0, 0) {
            return Ok(());
        }
        let is_gone = |vni, addresses: &[Address]| {
            let mut ends = addresses.iter().map(|address| endpoint(vni, *address));
            ends.any(|end| has_left(&end))
        };
        let mut connections = Vec::new();
        self.all_entries.each(|key, entry| {
            // One of these addresses is the service's. No endpoint has it.
            if is_gone(key.vni, &[key.source, key.destination, entry.address]) {
                connections.push(key);
            }
            Ok(())
        })?;
        let mut pending = Vec::new();
        self.all_pending.each(|key, entry| {
            if is_gone(key.vni, &[key.address, entry.backend]) {
                pending.push(key);
            }
            Ok(())
        })?;
        let (mut affinity, vnis) = (Vec::new(), vnis());
        self.all_affinity.each(|key, entry| {
            let vni = vnis.get(&key.service);
            // If the service has gone as well, nobody looks the entry up.
            if vni.is_some_and(|vni| is_gone(*vni, &[key.client, entry.backend.address])) {
                affinity.push(key);
            }
            Ok(())
        })?;
        let mut connections = connections.iter();
        connections.try_for_each(|key| take(&mut self.entries, CONNECTIONS, key))?;
        let mut pending = pending.iter();
        pending.try_for_each(|key| take(&mut self.pending, "PENDING", key))?;
        let mut affinity = affinity.iter();
        affinity.try_for_each(|key| take(&mut self.affinity, "AFFINITY", key))
    }

    /// Whether an entry leads back and no entry leads there. A connection that is just being made may look like this.
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
            ports: [entry.client_port, entry.port],
            source: client,
            destination: entry.address,
            protocol: key.protocol,
            direction: if key.direction == LEAVING {
                ARRIVING
            } else {
                FORWARD
            },
            padding: 0,
        };
        let leads_here = |there: &ConnectionEntry| {
            there.address == key.source && [there.port, there.client_port] == key.ports
        };
        Ok(!self.connection(&forward)?.as_ref().is_some_and(leads_here))
    }

    fn connection(&self, key: &ConnectionKey) -> Result<Option<ConnectionEntry>, TableError> {
        lookup(CONNECTIONS, self.entries.get(key, 0))
    }

    /// Whether the service still has the backend.
    fn has_backend(&self, entry: &ConnectionEntry) -> Result<bool, TableError> {
        let (service, index) = (entry.service, entry.index);
        let there = lookup("BACKENDS", self.backends.get(&BackendKey { service, index }, 0))?;
        Ok(there.is_some_and(|there| there == backend(entry)))
    }

    /// Reads the counts that agents keep.
    fn counts(&self) -> Result<Counts, TableError> {
        // Agents add keys and remove none: this iteration ends.
        let shares: Result<_, _> = self.shares.iter().collect();
        Ok(Counts {
            shares: shares.map_err(access("read", "SHARES"))?,
            connections: self.quotas_at(QUOTA_HELD, QUOTA_RESERVE)?,
            flows: self.quotas_at(QUOTA_FLOWS_HELD, QUOTA_FLOWS_RESERVE)?,
        })
    }

    fn quotas_at(&self, held: u32, reserve: u32) -> Result<Quotas, TableError> {
        Ok(Quotas {
            held: self.quota(held)?,
            reserve: self.quota(reserve)?,
        })
    }

    fn quota(&self, index: u32) -> Result<u32, TableError> {
        self.quotas.get(&index, 0).map_err(access("read", "QUOTAS"))
    }

    /// Writes what a scan counted, and adds what agents have counted since it began: the scan's walk may not have met
    /// those entries.
    fn count(&mut self, before: &Counts, counted: &Counts, vpcs: usize) -> Result<(), TableError> {
        let now = self.counts()?;
        let (mut of_connections, mut of_flows) = (Vec::new(), Vec::new());
        for (of, share) in now.shares {
            let added = share.saturating_sub(before.shares.get(&of).copied().unwrap_or_default());
            let share = counted.shares.get(&of).copied().unwrap_or_default() + added;
            if share == 0 {
                take(&mut self.shares, "SHARES", &of)?;
                continue;
            }
            self.shares
                .insert(of, share, 0)
                .map_err(access("write", "SHARES"))?;
            match of.address {
                ALL_CONNECTIONS => of_connections.push(share as usize),
                ALL_FLOWS => of_flows.push(share as usize),
                _ => {}
            }
        }
        let added = now.connections.held.saturating_sub(before.connections.held);
        let held = counted.connections.held + added;
        let reserve = self.room.reserve(&of_connections, vpcs, held as usize) as u32;
        self.set_quotas([(QUOTA_HELD, held), (QUOTA_RESERVE, reserve)])?;
        let held = counted.flows.held + now.flows.held.saturating_sub(before.flows.held);
        let reserve = ROOM_OF_FLOWS.reserve(&of_flows, vpcs, held as usize) as u32;
        self.set_quotas([(QUOTA_FLOWS_HELD, held), (QUOTA_FLOWS_RESERVE, reserve)])
    }

    fn set_quotas(&mut self, quotas: [(u32, u32); 2]) -> Result<(), TableError> {
        quotas.into_iter().try_for_each(|(index, value)| {
            self.quotas
                .set(index, value, 0)
                .map_err(access("write", "QUOTAS"))
        })
    }
}

/// The contents of SHARES and QUOTAS, as they are or as they are to be.
#[derive(Default)]
struct Counts {
    shares: HashMap<EndpointKey, u32>,
    connections: Quotas,
    flows: Quotas,
}

/// What QUOTAS has of a table.
#[derive(Default)]
struct Quotas {
    /// Entries in the table.
    held: u32,
    /// Entries that each VPC may always have.
    reserve: u32,
}

impl Counts {
    /// Returns how many entries a VPC may have without shorter lives: its reserve, or its fair part of a crowded table
    /// if that is more.
    /// `of`: [`ALL_CONNECTIONS`] or [`ALL_FLOWS`]; `room`: that of the same table.
    fn limit(&self, of: Address, room: Shared) -> u32 {
        let table = if of == ALL_FLOWS {
            &self.flows
        } else {
            &self.connections
        };
        let held = self.shares.iter().filter(|(key, _)| key.address == of);
        let held = held.map(|(_, own)| *own as usize).collect();
        let fair = room.fair(held, table.held as usize);
        u32::try_from(fair).unwrap_or(u32::MAX).max(table.reserve)
    }

    /// Returns how many entries a VPC has. `of`: as of [`Self::limit`].
    fn share(&self, vni: u32, of: Address) -> u32 {
        self.shares.get(&endpoint(vni, of)).copied().unwrap_or_default()
    }

    /// Returns how long a flow in PENDING may be without a packet, by the share of its VPC.
    fn life_of_pending(&self, of_vpc: &EndpointKey) -> Duration {
        let own = self.shares.get(of_vpc);
        if own.is_some_and(|own| *own >= PENDING_OF_VPC / 4 * 3) {
            PENDING_IN_A_CROWD
        } else {
            Duration::from_nanos(PENDING_LIFE)
        }
    }
}

/// An entry as a scan saw it; without a time if it wasn't there.
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

/// Returns the service that a forward key leads to.
fn service(key: &ConnectionKey) -> ServiceKey {
    ServiceKey {
        vni: key.vni,
        address: key.destination,
        port: key.ports[1],
        protocol: key.protocol,
        former: 0,
    }
}

/// Returns the backend of a forward entry.
fn backend(entry: &ConnectionEntry) -> BackendEntry {
    BackendEntry {
        address: entry.address,
        port: entry.port,
        padding: 0,
    }
}

/// Returns the key of the entry that leads back, for a forward entry.
fn reverse(key: &ConnectionKey, entry: &ConnectionEntry) -> ConnectionKey {
    let is_own = entry.address == key.source;
    let direction = match key.direction {
        ARRIVING => LEAVING,
        _ if is_own => HAIRPIN,
        _ => REVERSE,
    };
    ConnectionKey {
        vni: key.vni,
        ports: [entry.port, entry.client_port],
        source: entry.address,
        destination: if is_own { key.destination } else { key.source },
        protocol: key.protocol,
        direction,
        padding: 0,
    }
}

fn endpoint(vni: u32, address: [u8; 16]) -> EndpointKey {
    EndpointKey { vni, address }
}

#[cfg(test)]
mod tests {
    use thuban_common::packet::ipv4::UDP;
    use thuban_common::services::refresh;

    use super::*;

    #[test]
    fn a_table_of_connections_is_as_large_as_the_node_allows() {
        let gib = |gib: u64| entries_for(gib << 30);
        assert_eq!([1, 7, 15, 24].map(gib), [65_536, 65_536, 262_144, 262_144]);
        assert_eq!([30, 1024].map(gib), [524_288; 2]);
    }

    #[test]
    fn flows_without_a_connection_go_soon_if_a_vpc_has_many() {
        let life = |own| {
            let of_vpc = endpoint(7, ALL_PENDING);
            let shares = [(of_vpc, own), (endpoint(8, ALL_PENDING), 1)];
            let counts = Counts {
                shares: HashMap::from(shares),
                ..Counts::default()
            };
            assert_eq!(counts.life_of_pending(&endpoint(8, ALL_PENDING)).as_secs(), 120);
            counts.life_of_pending(&of_vpc).as_secs()
        };
        let many = PENDING_OF_VPC / 4 * 3;
        assert_eq!([life(many), life(many - 1)], [15, 120]);
        assert!(PENDING_IN_A_CROWD.as_nanos() as u64 > refresh(6).max(refresh(UDP)));
    }

    #[test]
    fn only_who_is_beyond_reserve_and_fair_part_crowds_a_table() {
        for (of, other) in [(ALL_CONNECTIONS, ALL_FLOWS), (ALL_FLOWS, ALL_CONNECTIONS)] {
            // Tables are crowded by 750 entries.
            let limit = |shares: &[(u32, u32)], held| {
                let shares = shares.iter().map(|(vni, own)| (endpoint(*vni, of), *own));
                let own = Quotas { held, reserve: 100 };
                let full = Quotas {
                    held: 2000,
                    reserve: 0,
                };
                let (connections, flows) = if of == ALL_FLOWS { (full, own) } else { (own, full) };
                let counts = Counts {
                    shares: shares.chain([(endpoint(9, other), 2000)]).collect(),
                    connections,
                    flows,
                };
                assert_eq!([8, 9].map(|vni| counts.share(vni, of)), [351, 0]);
                counts.limit(of, Shared::half_reserved(2000))
            };
            assert_eq!(limit(&[(7, 399), (8, 351)], 750), u32::MAX, "a table with room");
            assert_eq!(limit(&[(7, 500), (8, 351)], 851), 399);
            let crowd: Vec<(u32, u32)> = (10..20).map(|vni| (vni, 101)).chain([(8, 351)]).collect();
            assert_eq!(limit(&crowd, 1361), 100, "the reserve");
        }
    }
}

//! What transitd takes away of what agents remember of connections, in the kernel's maps without a daemon.

use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::time::Instant;

use nix::time::{ClockId, clock_gettime};
use thuban_common::services::{
    ALL_CONNECTIONS, ALL_PENDING, AffinityEntry, AffinityKey, BackendEntry, ConnectionEntry, ConnectionKey,
    FORWARD, GatesEntry, NO_INDEX, PENDING_LIFE, PendingEntry, PendingKey, REVERSE, SEEN,
};
use thuban_common::tables::{Address, EndpointKey};
use transitd::dataplane::connections::{Connections, Scan};

use crate::service_tables::Pinned;

const TCP: u8 = 6;
const UDP: u8 = 17;

fn address(last: u8) -> Address {
    Ipv4Addr::new(10, 0, 1, last).to_ipv6_mapped().octets()
}

const fn endpoint(vni: u32, address: Address) -> EndpointKey {
    EndpointKey { vni, address }
}

/// The service of the tests: port 80.
fn service() -> Address {
    Ipv4Addr::new(10, 96, 0, 10).to_ipv6_mapped().octets()
}

fn backend(last: u8) -> BackendEntry {
    BackendEntry {
        address: address(last),
        port: 8080_u16.to_be(),
        padding: 0,
    }
}

/// ns since boot.
fn now() -> u64 {
    let now = std::time::Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap());
    now.as_nanos() as u64
}

struct World {
    pinned: Pinned,
}

impl World {
    fn new() -> Self {
        let pinned = Pinned::new("SLOTS", 1024);
        let gates = GatesEntry {
            pending_until: 0,
            connections: 1,
            padding: 0,
        };
        pinned.array("GATES").set(0, gates, 0).unwrap();
        Self { pinned }
    }

    /// Both entries of a connection to the service that was adopted from its backend's answer.
    fn adopt(&self, vni: u32, protocol: u8, client: u8, port: u16, backend: u8) {
        let mut flows = self.pinned.map("CONNECTIONS");
        let entry = |address, port| ConnectionEntry {
            vni,
            index: NO_INDEX,
            time: now(),
            address,
            port,
            state: SEEN,
            service: 0,
        };
        let (to, at) = (80_u16.to_be(), 8080_u16.to_be());
        let key = |direction, source, destination, ports| ConnectionKey {
            vni,
            ports,
            source,
            destination,
            protocol,
            direction,
            padding: 0,
        };
        let there = key(FORWARD, address(client), service(), [port, to]);
        let back = key(REVERSE, address(backend), address(client), [at, port]);
        flows.insert(there, entry(address(backend), at), 0).unwrap();
        flows.insert(back, entry(service(), to), 0).unwrap();
    }

    fn wait(&self, vni: u32, client: u8, backend: Address, age: u64) {
        let key = PendingKey {
            vni,
            address: address(client),
            port: 1,
            protocol: UDP,
            padding: 0,
        };
        let entry = PendingEntry {
            time: now() - age,
            service: service(),
            backend,
            service_port: 0,
            backend_port: 0,
            acknowledgement: 0,
        };
        self.pinned.map("PENDING").insert(key, entry, 0).unwrap();
    }

    fn scan(&self, backends: Option<&[BackendEntry]>) -> Scan {
        let known = |_: &_| backends.map(|there| there.iter().copied().collect());
        let mut connections = Connections::open(&self.pinned.maps).unwrap();
        connections.scan(|_| true, known).unwrap()
    }

    fn connections(&self) -> usize {
        let flows = self.pinned.map::<ConnectionKey, ConnectionEntry>("CONNECTIONS");
        flows.keys().count()
    }

    fn share(&self, vni: u32, address: Address) -> u32 {
        let shares = self.pinned.map("SHARES");
        shares.get(&endpoint(vni, address), 0).unwrap_or_default()
    }
}

#[test]
fn adopted_flow_expires_if_service_lacks_its_backend() {
    let world = World::new();
    world.adopt(7, UDP, 5, 1, 6);
    world.adopt(7, TCP, 5, 2, 6);
    assert_eq!(world.scan(None).held, 2, "nobody knows the service");
    assert_eq!(world.scan(Some(&[backend(6), backend(7)])).held, 2);
    let scan = world.scan(Some(&[backend(7)]));
    assert_eq!(
        (scan.held, scan.expired, world.connections()),
        (1, 1, 2),
        "TCP may end by itself"
    );
    world.adopt(7, UDP, 5, 1, 6);
    assert_eq!(
        world.scan(Some(&[])).expired,
        1,
        "the service has that port no longer"
    );
}

#[test]
fn shares_are_counted_anew_for_clients_and_their_vpcs() {
    let world = World::new();
    for (vni, client, port) in [(7, 5, 1), (7, 5, 2), (7, 6, 1), (8, 5, 1)] {
        world.adopt(vni, UDP, client, port, 9);
        world.wait(vni, client, [0; 16], 0);
    }
    world.wait(8, 7, [0; 16], PENDING_LIFE + 1_000_000_000);
    let mut shares = world.pinned.map("SHARES");
    for (vni, of) in [(7, address(5)), (7, address(6)), (8, address(5)), (9, address(5))] {
        shares.insert(endpoint(vni, of), 1_u32, 0).unwrap();
    }
    for (vni, of) in [
        (7, ALL_CONNECTIONS),
        (8, ALL_CONNECTIONS),
        (7, ALL_PENDING),
        (8, ALL_PENDING),
    ] {
        shares.insert(endpoint(vni, of), 1000_u32, 0).unwrap();
    }
    world.scan(None);
    let of = |vni, address| world.share(vni, address);
    assert_eq!(
        [of(7, address(5)), of(7, address(6)), of(8, address(5))],
        [4, 2, 2]
    );
    assert_eq!([of(7, ALL_CONNECTIONS), of(8, ALL_CONNECTIONS)], [6, 2]);
    assert_eq!(
        [of(7, ALL_PENDING), of(8, ALL_PENDING)],
        [2, 1],
        "one was too old"
    );
    assert!(shares.get(&endpoint(9, address(5)), 0).is_err());
    let pending = world.pinned.map::<PendingKey, PendingEntry>("PENDING");
    assert_eq!(pending.keys().count(), 3);
}

#[test]
fn nothing_is_remembered_of_endpoints_that_left() {
    let world = World::new();
    // As a client, as a backend, and others of the same VPC and of another.
    world.adopt(7, UDP, 5, 1, 6);
    world.adopt(7, UDP, 8, 2, 5);
    world.adopt(7, UDP, 8, 3, 6);
    world.adopt(8, UDP, 5, 4, 6);
    world.wait(7, 5, [0; 16], 0);
    world.wait(7, 6, address(5), 0);
    world.wait(7, 8, address(6), 0);
    world.wait(8, 5, [0; 16], 0);
    let mut affinity = world.pinned.map::<AffinityKey, AffinityEntry>("AFFINITY");
    for (service, client, last) in [(1, 5, 6), (1, 8, 5), (1, 9, 6), (2, 5, 6)] {
        let key = AffinityKey {
            service,
            client: address(client),
        };
        let entry = AffinityEntry {
            time: 0,
            index: 0,
            backend: backend(last),
        };
        affinity.insert(key, entry, 0).unwrap();
    }
    let forget = |gone: &[EndpointKey]| {
        let gone: HashSet<EndpointKey> = gone.iter().copied().collect();
        let mut connections = Connections::open(&world.pinned.maps).unwrap();
        connections
            .forget(
                |endpoint| gone.contains(endpoint),
                || HashMap::from([(1, 7), (2, 8)]),
            )
            .unwrap();
        let pending = world.pinned.map::<PendingKey, PendingEntry>("PENDING");
        [
            world.connections(),
            pending.keys().count(),
            affinity.keys().count(),
        ]
    };
    assert_eq!(forget(&[endpoint(9, address(5))]), [8, 4, 4], "another VPC's");
    assert_eq!(forget(&[endpoint(7, address(5))]), [4, 2, 2]);
    assert_eq!(
        forget(&[endpoint(8, address(5)), endpoint(7, address(6))]),
        [0, 0, 0]
    );
}

#[test]
fn what_a_look_through_many_connections_takes() {
    let world = World::new();
    for port in 0..25_000 {
        world.adopt(7, TCP, 5, port, 6);
    }
    let begun = Instant::now();
    let mut connections = Connections::open(&world.pinned.maps).unwrap();
    let gone = HashSet::from([endpoint(7, address(9))]);
    connections
        .forget(|endpoint| gone.contains(endpoint), HashMap::new)
        .unwrap();
    println!("50,000 entries, an endpoint has left: {:?}", begun.elapsed());
    let begun = Instant::now();
    assert_eq!(world.scan(None).held, 25_000);
    println!("and looked through as each 10 s: {:?}", begun.elapsed());
}

//! How transitd removes entries of the agents' memory of connections, in the kernel's maps without a daemon.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::time::Instant;

use nix::time::{ClockId, clock_gettime};
use thuban_common::services::{
    ALL_CONNECTIONS, ALL_PENDING, ARRIVING, AffinityEntry, AffinityKey, BackendEntry, BackendKey, CONFIRMED,
    ConnectionEntry, ConnectionKey, FORWARD, GATE_OF_ANY, GatesEntry, LEAVING, NO_INDEX, PENDING_LIFE,
    PendingEntry, PendingKey, QUOTA_HELD, QUOTA_RESERVE, REVERSE, SEEN,
};
use thuban_common::tables::{Address, EndpointKey};
use transitd::dataplane::connections::{Connections, Scan};
use transitd::dataplane::tables::capacity;

use crate::service_tables::Pinned;

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;

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

/// Returns the nanoseconds since boot.
fn now() -> u64 {
    let now = std::time::Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap());
    now.as_nanos() as u64
}

/// Returns the keys of both entries of a connection.
fn keys(vni: u32, protocol: u8, client: u8, port: u16, backend: u8) -> [ConnectionKey; 2] {
    let (to, at) = (80_u16.to_be(), 8080_u16.to_be());
    let key = key(vni, protocol);
    [
        key(FORWARD, address(client), service(), [port, to]),
        key(REVERSE, address(backend), address(client), [at, port]),
    ]
}

/// Returns what makes a key of a direction, a source, a destination, and ports.
fn key(vni: u32, protocol: u8) -> impl Fn(u8, Address, Address, [u16; 2]) -> ConnectionKey {
    move |direction, source, destination, ports| ConnectionKey {
        vni,
        ports,
        source,
        destination,
        protocol,
        direction,
        padding: 0,
    }
}

struct World {
    pinned: Pinned,
}

impl World {
    fn new() -> Self {
        let pinned = Pinned::new("SLOTS", 1024);
        let gates = GatesEntry {
            pending_until: 0,
            services: 1,
            fronts: 0,
            flows: 0,
        };
        pinned.array("GATES").set(GATE_OF_ANY, gates, 0).unwrap();
        Self { pinned }
    }

    /// Writes both entries of a connection to the service that was adopted from its backend's answer.
    fn adopt(&self, vni: u32, protocol: u8, client: u8, port: u16, backend: u8) {
        self.connect(vni, protocol, client, port, backend, SEEN, 0);
    }

    /// Writes the same with the state of the answers, and how many seconds ago the last packet was.
    #[expect(clippy::too_many_arguments)]
    fn connect(&self, vni: u32, protocol: u8, client: u8, port: u16, backend: u8, answers: u16, age: u64) {
        let mut flows = self.pinned.map("CONNECTIONS");
        let client_port = port;
        let entry = |address, port, state| ConnectionEntry {
            vni,
            index: NO_INDEX,
            time: now().saturating_sub(age * 1_000_000_000),
            address,
            port,
            state,
            service: 0,
            client_port,
            padding: 0,
            payer: vni,
        };
        let (to, at) = (80_u16.to_be(), 8080_u16.to_be());
        let [there, back] = keys(vni, protocol, client, port, backend);
        flows.insert(there, entry(address(backend), at, SEEN), 0).unwrap();
        flows.insert(back, entry(service(), to, answers), 0).unwrap();
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
            time: now().saturating_sub(age),
            service: service(),
            backend,
            service_port: 0,
            backend_port: 0,
            acknowledgement: 0,
            payer: vni,
            padding: 0,
        };
        self.pinned.map("PENDING").insert(key, entry, 0).unwrap();
    }

    fn scan(&self, backends: Option<&[BackendEntry]>) -> Scan {
        let known = |_: &_| backends.map(|there| there.iter().copied().collect());
        let mut connections = Connections::open(&self.pinned.maps).unwrap();
        connections.scan(|_| true, 2, known).unwrap()
    }

    fn connections(&self) -> usize {
        let flows = self.pinned.map::<ConnectionKey, ConnectionEntry>("CONNECTIONS");
        flows.keys().count()
    }

    fn quota(&self, index: u32) -> u32 {
        self.pinned.array("QUOTAS").get(&index, 0).unwrap()
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

/// Writes both entries of a datagram to a backend that service 3 had, and how many seconds ago the client's last packet
/// and the backend's were.
fn ask_former(world: &World, client_port: u16, [asked, answered]: [u64; 2]) {
    let entry = |address, port, age: u64| ConnectionEntry {
        vni: 7,
        index: 0,
        time: now().saturating_sub(age * 1_000_000_000),
        address,
        port,
        state: SEEN,
        service: 3,
        client_port,
        padding: 0,
        payer: 7,
    };
    let mut flows = world.pinned.map("CONNECTIONS");
    let [there, back] = keys(7, UDP, 5, client_port, 6);
    let (to, at) = (80_u16.to_be(), 8080_u16.to_be());
    flows.insert(there, entry(address(6), at, asked), 0).unwrap();
    flows.insert(back, entry(service(), to, answered), 0).unwrap();
}

#[test]
fn a_former_backends_answer_still_finds_its_client() {
    let world = World::new();
    ask_former(&world, 1, [5, 20]);
    ask_former(&world, 2, [31, 40]);
    ask_former(&world, 3, [5, 4]);
    let scan = world.scan(Some(&[backend(7)]));
    assert_eq!(
        (scan.held, scan.expired, world.connections()),
        (1, 2, 2),
        "only the first awaits its answer"
    );
}

/// Writes both entries of a connection of a client outside to a front of service 3, whose last packet came so many
/// seconds ago. `states`: of the client's packets, and of the backend's.
fn arrive(world: &World, protocol: u8, port: u16, states: [u16; 2], age: u64) {
    let client = Ipv4Addr::new(198, 51, 100, 7).to_ipv6_mapped().octets();
    let front = Ipv4Addr::new(203, 0, 113, 1).to_ipv6_mapped().octets();
    // The backend sees the client by another port.
    let (to, at, seen) = (443_u16.to_be(), 8080_u16.to_be(), port + 1);
    let key = key(7, protocol);
    let entry = |address, port, client_port, state| ConnectionEntry {
        vni: 7,
        index: 0,
        time: now().saturating_sub(age * 1_000_000_000),
        address,
        port,
        state,
        service: 3,
        client_port,
        padding: 0,
        payer: 7,
    };
    let mut flows = world.pinned.map("CONNECTIONS");
    let there = key(ARRIVING, client, front, [port, to]);
    flows
        .insert(there, entry(address(6), at, seen, states[0]), 0)
        .unwrap();
    let back = key(LEAVING, address(6), client, [at, seen]);
    flows.insert(back, entry(front, to, port, states[1]), 0).unwrap();
}

#[test]
fn connections_from_outside_live_while_their_backend_is_here() {
    let world = World::new();
    let key = BackendKey { service: 3, index: 0 };
    world.pinned.map("BACKENDS").insert(key, backend(6), 0).unwrap();
    let scan = |is_here: bool| {
        let mut connections = Connections::open(&world.pinned.maps).unwrap();
        let is_here = |of: &EndpointKey| is_here && *of == endpoint(7, address(6));
        connections.scan(is_here, 2, |_| None).unwrap()
    };
    let confirmed = SEEN | CONFIRMED;
    arrive(&world, TCP, 1, [confirmed, SEEN], 3600);
    arrive(&world, TCP, 3, [SEEN, confirmed], 50);
    arrive(&world, TCP, 5, [SEEN, confirmed], 70);
    arrive(&world, UDP, 7, [SEEN, SEEN], 100);
    arrive(&world, UDP, 9, [SEEN, SEEN], 130);
    // Of SCTP the backend alone knows whether a client is who it claims to be.
    arrive(&world, SCTP, 11, [confirmed, confirmed], 3600);
    arrive(&world, SCTP, 13, [confirmed, SEEN], 70);
    let seen = scan(true);
    assert_eq!((seen.held, seen.expired, world.connections()), (4, 3, 8));
    assert!(seen.services.is_empty(), "fronts are no services of a VPC");
    assert_eq!(world.share(7, ALL_CONNECTIONS), 0, "programs count first");
    let mut shares = world.pinned.map("SHARES");
    for of in [ALL_CONNECTIONS, address(6)] {
        shares.insert(endpoint(7, of), 100_u32, 0).unwrap();
    }
    scan(true);
    assert_eq!(
        (world.share(7, ALL_CONNECTIONS), world.share(7, address(6))),
        (8, 0)
    );
    assert_eq!(scan(false).expired, 4);
    assert_eq!(world.connections(), 0);
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

/// Agents remove the entry that the walk is at, and add other connections in its place.
#[test]
fn entries_that_go_during_a_walk_send_it_back_to_no_others() {
    const CONNECTIONS: u32 = 6000;
    let world = World::new();
    for vni in 1..=CONNECTIONS {
        world.adopt(vni, TCP, 5, 1, 6);
    }
    let flows = world.pinned.map::<ConnectionKey, ConnectionEntry>("CONNECTIONS");
    let (flows, next) = (RefCell::new(flows), Cell::new(CONNECTIONS));
    let mut connections = Connections::open(&world.pinned.maps).unwrap();
    // The walk asks this at its place. A walk without an end would find no end here.
    let is_here = |client: &EndpointKey| {
        if next.get() < 5 * CONNECTIONS {
            let [forward, reverse] = keys(client.vni, TCP, 5, 1, 6);
            let mut flows = flows.borrow_mut();
            flows.remove(&forward).unwrap();
            flows.remove(&reverse).unwrap();
            next.set(next.get() + 1);
            world.adopt(next.get(), TCP, 5, 1, 6);
        }
        true
    };
    let scan = connections.scan(is_here, 1, |_| None).unwrap();
    // New entries lie anywhere: behind the walk, or ahead of it.
    let others = next.get() - CONNECTIONS;
    println!("{} met of {CONNECTIONS}, {others} have come meanwhile", scan.held);
    assert!(others < 2 * CONNECTIONS && scan.held == others as usize);
    let held = world.connections() / 2;
    assert_eq!((world.scan(None).held, held), (CONNECTIONS as usize, held));
}

#[test]
fn many_batches_are_counted_as_one_walk() {
    let world = World::new();
    for vni in 1..=5 {
        for port in 0..4000 {
            world.adopt(vni, TCP, 5, port, 6);
        }
        let mut shares = world.pinned.map("SHARES");
        shares.insert(endpoint(vni, ALL_CONNECTIONS), 1, 0).unwrap();
    }
    assert_eq!(world.scan(None).held, 20_000);
    assert_eq!(world.quota(QUOTA_HELD), 40_000);
    for vni in 1..=5 {
        assert_eq!(world.share(vni, ALL_CONNECTIONS), 8000);
    }
}

#[test]
fn who_crowds_the_table_loses_what_nobody_answers() {
    let world = World::new();
    let open = |vni, port, answers| world.connect(vni, TCP, 5, port, 6, answers, 6);
    let scan = |held, reserve, shares: [u32; 2]| {
        let mut quotas = world.pinned.array::<u32>("QUOTAS");
        quotas.set(QUOTA_HELD, held, 0).unwrap();
        quotas.set(QUOTA_RESERVE, reserve, 0).unwrap();
        for (vni, share) in [7, 8].into_iter().zip(shares) {
            let mut all = world.pinned.map("SHARES");
            all.insert(endpoint(vni, ALL_CONNECTIONS), share, 0).unwrap();
        }
        world.scan(None);
        [7, 8].map(|vni| world.share(vni, ALL_CONNECTIONS) / 2)
    };
    for vni in [7, 8] {
        open(vni, 1, SEEN);
        open(vni, 2, 0);
    }
    let room = capacity(&world.pinned.maps, "CONNECTIONS").unwrap();
    let crowded = room / 2;
    assert_eq!(scan(4, 0, [4, 4]), [2, 2], "a table with room");
    assert_eq!(scan(crowded, 5, [4, 4]), [2, 2], "each within its reserve");
    assert_eq!(scan(crowded, 4, [5, 4]), [1, 2], "one is beyond it");
    // Agents use the values that a scan leaves.
    assert_eq!(world.quota(QUOTA_HELD), 6);
    assert_eq!(world.quota(QUOTA_RESERVE), room / 8);
}

#[test]
fn nothing_is_remembered_of_endpoints_that_left() {
    let world = World::new();
    // The endpoint as a client, as a backend, and others of the same VPC and of another.
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

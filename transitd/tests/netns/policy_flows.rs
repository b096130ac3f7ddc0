//! How transitd removes entries of FLOWS and counts them, in the kernel's maps without a daemon.

use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use thuban_common::policy::{FLOWS_OF_VPC, FlowEntry};
use thuban_common::services::{
    ALL_FLOWS, ConnectionKey, FINISHED, FORWARD, QUOTA_FLOWS_HELD, QUOTA_FLOWS_RESERVE, RESET, SEEN,
};
use thuban_common::tables::{Address, EndpointKey};
use transitd::dataplane::connections::Connections;

use crate::service_tables::Pinned;

const TCP: u8 = 6;
const UDP: u8 = 17;
const CLIENT: u8 = 5;

fn address(last: u8) -> Address {
    Ipv4Addr::new(10, 0, 1, last).to_ipv6_mapped().octets()
}

fn endpoint(vni: u32, last: u8) -> EndpointKey {
    EndpointKey {
        vni,
        address: address(last),
    }
}

struct World(Pinned);

impl World {
    fn new() -> Self {
        Self(Pinned::new("SLOTS", 1024))
    }

    /// Writes a flow of the client to a server. Its last packet was so many seconds ago.
    fn flow(&self, vni: u32, protocol: u8, port: u16, server: u8, state: u16, age: u64) {
        let key = ConnectionKey {
            vni,
            ports: [port, 80_u16.to_be()],
            source: address(CLIENT),
            destination: address(server),
            protocol,
            direction: FORWARD,
            padding: 0,
        };
        let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap());
        let entry = FlowEntry {
            tag: FlowEntry::tag(&key),
            epoch: 1,
            time: now.as_nanos() as u64 - age * 1_000_000_000,
            class: 3,
            egress_set: 0,
            state,
            answers: state & SEEN,
            padding: 0,
        };
        self.0.map("FLOWS").insert(key, entry, 0).unwrap();
    }

    /// Writes the count that programs have for a VPC.
    fn count(&self, vni: u32, count: u32) {
        let of = EndpointKey {
            vni,
            address: ALL_FLOWS,
        };
        self.0.map("SHARES").insert(of, count, 0).unwrap();
    }

    fn counted(&self, vni: u32) -> Option<u32> {
        let of = EndpointKey {
            vni,
            address: ALL_FLOWS,
        };
        self.0.map("SHARES").get(&of, 0).ok()
    }

    /// Returns how many flows a scan keeps.
    fn scan(&self, is_here: impl Fn(&EndpointKey) -> bool) -> usize {
        let mut connections = Connections::open(&self.0.maps).unwrap();
        let kept = connections.scan(is_here, 2, |_| None).unwrap().flows;
        assert_eq!(kept, self.held());
        kept
    }

    fn held(&self) -> usize {
        self.0.map::<ConnectionKey, FlowEntry>("FLOWS").keys().count()
    }
}

#[test]
fn flows_go_when_their_time_is_over_or_their_server_left() {
    let world = World::new();
    let all = |_: &EndpointKey| true;
    world.flow(7, TCP, 1, 6, SEEN, 600);
    world.flow(7, TCP, 2, 6, SEEN | FINISHED, 110);
    world.flow(7, TCP, 3, 6, SEEN | RESET, 50);
    world.flow(7, UDP, 4, 6, SEEN, 25);
    assert_eq!(world.scan(all), 4);
    world.flow(7, TCP, 2, 6, SEEN | FINISHED, 130);
    world.flow(7, TCP, 3, 6, SEEN | RESET, 70);
    world.flow(7, UDP, 4, 6, SEEN, 35);
    assert_eq!(world.scan(all), 1);
    // The client may be anywhere.
    assert_eq!(world.scan(|of| *of == endpoint(7, 6)), 1);
    assert_eq!(world.scan(|of| *of == endpoint(7, CLIENT)), 0);
}

#[test]
fn flows_are_counted_anew_for_their_vpcs() {
    let world = World::new();
    for port in 0..5000 {
        world.flow(7, TCP, port, 6, SEEN, 0);
    }
    world.flow(8, UDP, 1, 6, SEEN, 0);
    for (vni, count) in [(7, 1), (8, 1000), (9, 1000)] {
        world.count(vni, count);
    }
    world.scan(|_| true);
    assert_eq!(
        [7, 8, 9].map(|vni| world.counted(vni)),
        [Some(5000), Some(1), None]
    );
}

#[test]
fn who_has_used_up_its_share_loses_silent_flows() {
    let world = World::new();
    for vni in [7, 8] {
        world.flow(vni, TCP, 1, 6, SEEN, 70);
        world.flow(vni, TCP, 2, 6, SEEN, 50);
    }
    world.count(7, FLOWS_OF_VPC / 4 * 3);
    world.count(8, FLOWS_OF_VPC / 4 * 3 - 1);
    assert_eq!(world.scan(|_| true), 3);
    assert_eq!([7, 8].map(|vni| world.counted(vni)), [Some(1), Some(2)]);
}

#[test]
fn two_vpcs_that_crowd_the_table_shorten_no_third_ones_flows() {
    let world = World::new();
    // All have more than their reserve.
    let shares = [(7, 24_000), (8, 24_000), (9, 10_000)];
    for (vni, count) in shares {
        world.flow(vni, TCP, 1, 6, SEEN, 70);
        world.count(vni, count);
    }
    let mut quotas = world.0.array::<u32>("QUOTAS");
    let held: u32 = shares.iter().map(|(_, count)| count).sum();
    quotas.set(QUOTA_FLOWS_HELD, held, 0).unwrap();
    quotas.set(QUOTA_FLOWS_RESERVE, 64, 0).unwrap();
    assert_eq!(world.scan(|_| true), 1);
    assert_eq!([7, 8, 9].map(|vni| world.counted(vni)), [None, None, Some(1)]);
}

#[test]
fn nothing_is_remembered_of_flows_of_endpoints_that_left() {
    let world = World::new();
    world.flow(7, TCP, 1, 6, SEEN, 0);
    world.flow(7, TCP, 1, 8, SEEN, 0);
    world.flow(8, TCP, 1, 6, SEEN, 0);
    let forget = |gone: &[EndpointKey]| {
        let gone: HashSet<EndpointKey> = gone.iter().copied().collect();
        let mut connections = Connections::open(&world.0.maps).unwrap();
        let begun = Instant::now();
        connections.forget(|of| gone.contains(of), HashMap::new).unwrap();
        println!("an endpoint has left: {:?}", begun.elapsed());
        world.held()
    };
    assert_eq!(forget(&[endpoint(9, 6)]), 3);
    assert_eq!(forget(&[endpoint(7, 6)]), 2);
    assert_eq!(forget(&[endpoint(7, CLIENT)]), 1, "as a client, too");
}

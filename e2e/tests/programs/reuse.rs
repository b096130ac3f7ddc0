//! The kernel gives an element of a hash map that is removed or replaced to the next key at once. No program that holds
//! such an element takes another VPC's element for its own.

use std::{
    net::IpAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context, Result, ensure};
use aya::{
    Pod,
    maps::{HashMap, Map, MapData},
};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use thuban_common::{
    counters::Counter,
    services::{ConnectionEntry, ConnectionKey, FORWARD, NO_INDEX},
    tables::{
        AttachmentEntry, EndpointEntry, LOCAL_TAKES_XDP, LocalEntry, TRANSIT_MAGIC, VPC_HOST_ACCESS, VpcEntry,
    },
};
use thuban_e2e::{
    programs::{Programs, address, key, members},
    services::Served,
};

use crate::{
    frames::{Packet, Tunnel},
    rows::{BOUNCED, HERE, LOCAL_MAC, SECOND, STRAY, TENANT, ip},
    service_world::{SERVICE, Segment, UDP, ensure_dropped, inner, send, world},
    world::{Hook, Role, World},
};

/// Runs of each program beside the changes.
const RUNS: usize = 60_000;
/// The MAC of the other VPC's endpoint.
const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 77];

/// Returns the CPU of the programs and the CPU of the changes, of those that the test may use.
fn cpus(all: CpuSet) -> Result<(usize, usize)> {
    let all: Vec<usize> = (0..CpuSet::count())
        .filter(|cpu| all.is_set(*cpu) == Ok(true))
        .collect();
    match all[..] {
        [first, second, ..] => Ok((first, second)),
        _ => anyhow::bail!("two CPUs are needed, these are {all:?}"),
    }
}

/// Keeps the calling thread on a CPU: each CPU has its own free lists in the kernel.
fn stay_on(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

/// Returns a map for another thread.
fn share<K: Pod, V: Pod>(programs: &Programs, name: &str) -> Result<HashMap<MapData, K, V>> {
    let Some(Map::HashMap(map)) = programs.ebpf.map(name) else {
        anyhow::bail!("no hash map {name}");
    };
    let map = MapData::from_id(map.info()?.id())?;
    Ok(HashMap::try_from(Map::HashMap(map))?)
}

/// Calls `run` [`RUNS`] times on one CPU. Another CPU writes one row anew all the time, and adds and removes `other`,
/// which gets the element of the replaced row.
fn beside_changes<K: Pod + Send, V: Pod + Send>(
    mut rows: HashMap<MapData, K, V>,
    own: (K, V),
    other: (K, V),
    run: impl FnMut() -> Result<()>,
) -> Result<()> {
    let all = sched_getaffinity(Pid::from_raw(0))?;
    let (here, there) = cpus(all)?;
    let is_over = &AtomicBool::new(false);
    thread::scope(|scope| {
        let changes = scope.spawn(move || -> Result<u64> {
            stay_on(there)?;
            let mut rounds = 0;
            while !is_over.load(Ordering::Relaxed) {
                rows.insert(own.0, own.1, 0)?;
                rows.insert(other.0, other.1, 0)?;
                rows.remove(&other.0)?;
                rounds += 1;
            }
            Ok(rounds)
        });
        let runs = stay_on(here).and_then(|()| std::iter::repeat_with(run).take(RUNS).collect());
        is_over.store(true, Ordering::Relaxed);
        sched_setaffinity(Pid::from_raw(0), &all)?;
        let rounds = changes.join().ok().context("the changes' thread")??;
        println!("{RUNS} runs beside {rounds} changes");
        runs
    })
}

#[test]
fn removed_endpoints_element_delivers_to_no_other_vpc() -> Result<()> {
    let mut world = World::new()?;
    let (own, other) = (ip(10, 0, 1, 12), ip(10, 0, 1, 99));
    let entry = |vni, index: u8, mac| EndpointEntry {
        local: LocalEntry {
            vni,
            ifindex: world.interfaces[usize::from(index)],
            mac,
            flags: LOCAL_TAKES_XDP,
        },
        ..EndpointEntry::new(vni)
    };
    let own = (key(100, own), entry(100, BOUNCED.index, LOCAL_MAC));
    let stranger = entry(103, STRAY.index, OTHER_MAC);
    let other = (key(103, other), stranger);
    let inside = Packet::udp([9; 6], ip(10, 0, 1, 50), ip(10, 0, 1, 12)).bytes();
    let frame = Tunnel::new(SECOND, HERE, 100).around([2; 12], &inside);
    world.enter()?;
    for hook in [Hook::Tc, Hook::Xdp] {
        let rows = share(&world.programs, "ENDPOINTS")?;
        let world = &mut world;
        let mut delivered = 0;
        let run = || {
            let outcome = world.run_uncounted(Role::Transit, hook, &frame, 0)?;
            let mut inner = &outcome.frame[..];
            if hook == Hook::Xdp && outcome.frame.starts_with(&TRANSIT_MAGIC.to_ne_bytes()) {
                let interface = &outcome.frame[8..12];
                ensure!(
                    interface != stranger.local.ifindex.to_ne_bytes(),
                    "to its interface"
                );
                inner = &outcome.frame[12..];
            }
            ensure!(!inner.starts_with(&OTHER_MAC), "to its MAC");
            delivered += usize::from(inner.starts_with(&LOCAL_MAC));
            Ok(())
        };
        beside_changes(rows, own, other, run).with_context(|| format!("transit at {hook:?}"))?;
        ensure!(delivered > RUNS / 2, "{delivered} delivered at {hook:?}");
    }
    Ok(())
}

#[test]
fn removed_attachments_element_sends_for_no_other_vpc() -> Result<()> {
    let mut world = World::new()?;
    let mac = TENANT.mac();
    let interface = |index: u8| world.interfaces[usize::from(index)];
    // Another tenant may have the same address and MAC.
    let entry = |ifindex, vni, network| AttachmentEntry {
        ifindex,
        vni,
        address: key(vni, TENANT.address).address,
        network,
        mac,
        flags: 0,
        outer_dscp: 0,
        class: 0,
        ingress_set: 0,
        egress_set: 0,
    };
    let (mine, theirs) = (interface(TENANT.index), interface(STRAY.index));
    let own = (mine, entry(mine, 100, 1));
    let other = (theirs, entry(theirs, 103, 11));
    // The row leads to the second droplet in VPC 100, and to the third one in VPC 103.
    let frame = Packet::udp(mac, TENANT.address, ip(10, 0, 1, 50)).bytes();
    world.enter()?;
    for hook in [Hook::Tc, Hook::Xdp] {
        let rows = share(&world.programs, "ATTACHMENTS")?;
        let world = &mut world;
        let mut sent = 0;
        let run = || {
            let outcome = world.run_uncounted(Role::Agent(TENANT.index), hook, &frame, 0)?;
            if outcome.frame.len() == frame.len() + 50 {
                let vni = u32::from_be_bytes([0, outcome.frame[46], outcome.frame[47], outcome.frame[48]]);
                ensure!(vni == 100, "sent in VPC {vni}");
                ensure!(outcome.frame[30..34] == SECOND.octets(), "to the other's droplet");
                sent += 1;
            }
            Ok(())
        };
        beside_changes(rows, own, other, run).with_context(|| format!("agent at {hook:?}"))?;
        ensure!(sent > RUNS / 2, "{sent} sent at {hook:?}");
    }
    Ok(())
}

#[test]
fn entries_that_became_another_vpcs_are_not_used() -> Result<()> {
    let mut world = world()?;
    let to = |destination| Packet::udp(TENANT.mac(), TENANT.address, destination).bytes();
    let run =
        |world: &mut World, destination| world.run(Role::Agent(TENANT.index), Hook::Tc, &to(destination));
    // The entry of an endpoint is another VPC's now.
    let mut entry: EndpointEntry = world.programs.get("ENDPOINTS", &key(100, ip(10, 0, 1, 12)))?;
    entry.local.vni = 103;
    world
        .programs
        .insert("ENDPOINTS", key(100, ip(10, 0, 1, 12)), entry)?;
    let outcome = run(&mut world, ip(10, 0, 1, 12))?;
    ensure!(outcome.counted.contains_key(Counter::SentToBouncer.name()));
    // The entry is that of a VPC that may go out.
    let open = VpcEntry::new(101, VPC_HOST_ACCESS, members(&[]));
    world.programs.insert("VPCS", 100_u32, open)?;
    ensure_dropped(&run(&mut world, ip(198, 51, 100, 9))?, Counter::OutsideVpc)?;
    // The entry is another interface's.
    let interface = world.interfaces[usize::from(TENANT.index)];
    let mut attachment: AttachmentEntry = world.programs.get("ATTACHMENTS", &interface)?;
    attachment.ifindex += 1;
    world.programs.insert("ATTACHMENTS", interface, attachment)?;
    ensure_dropped(&run(&mut world, ip(10, 0, 1, 50))?, Counter::NoAttachment)
}

#[test]
fn connection_entry_of_another_vpc_leads_nowhere() -> Result<()> {
    let mut world = world()?;
    let backend = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    Served::new(100, 1, SERVICE, 80, UDP).by(&mut world.programs, &[backend])?;
    let request = Segment::new(UDP, TENANT.mac(), (TENANT.address.into(), 40000), (SERVICE, 80));
    let flow = ConnectionKey {
        vni: 100,
        ports: [40000_u16.to_be(), 80_u16.to_be()],
        source: address(TENANT.address),
        destination: address(SERVICE),
        protocol: UDP,
        direction: FORWARD,
        padding: 0,
    };
    send(&mut world, TENANT.index, &request)?;
    let mut entry: ConnectionEntry = world.programs.get("CONNECTIONS", &flow)?;
    ensure!(entry.vni == 100);
    entry.address = address(ip(10, 0, 1, 60));
    for (vni, expected) in [(100, [10, 0, 1, 60]), (103, [10, 0, 1, 50])] {
        // The entry is that of a backend that an answer decided: the program doesn't check whether the service has it.
        (entry.vni, entry.index) = (vni, NO_INDEX);
        world.programs.insert("CONNECTIONS", flow, entry)?;
        let outcome = send(&mut world, TENANT.index, &request)?;
        ensure!(
            inner(&outcome)[30..34] == expected,
            "VPC {vni}: {:?}",
            outcome.counted
        );
    }
    Ok(())
}

//! The room for connections to services: no client and no VPC fills the table for others.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    host_stack::{MARK_HOST_ENDPOINT, mark_of},
    services::{
        ALL_CONNECTIONS, ALL_PENDING, CONNECTIONS_CAPACITY, CONNECTIONS_OF_CLIENT, PENDING_OF_VPC,
        QUOTA_HELD, QUOTA_RESERVE,
    },
    tables::{AttachmentEntry, EndpointKey},
};
use thuban_e2e::{programs::key, services::Served};

use crate::{
    connections::{backend, chosen, ensure_served, forward, segment},
    rows::{BOUNCED, DIVIDED, Endpoint, SECOND, SPREAD, TENANT, THIRD, ip},
    service_world::{SERVICE, Segment, TCP, UDP, arrive, ensure_delivered, ensure_sent, send, world},
    world::{Hook, Role, World},
};

/// Entries up to which VPCs may have more than their reserves.
const HALF: u32 = CONNECTIONS_CAPACITY / 2;

#[test]
fn a_clients_share_bounds_its_entries_and_it_is_served_beyond() -> Result<()> {
    let mut world = world()?;
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    Served::new(100, 1, SERVICE, 80, UDP).by(&mut world.programs, &[far])?;
    send(&mut world, TENANT.index, &segment(UDP, 40000))?;
    let client = key(100, TENANT.address);
    ensure!(world.programs.get::<_, u32>("SHARES", &client)? == 2);
    world.programs.insert("SHARES", client, CONNECTIONS_OF_CLIENT)?;
    let request = segment(UDP, 40001);
    let outcome = send(&mut world, TENANT.index, &request)?;
    ensure_sent(&outcome, &request.sent_to(far), SECOND)?;
    ensure!(outcome.counted.contains_key(Counter::ServiceStateless.name()));
    ensure!(forward(&world, &request).is_err());
    let answer = request.sent_to(far).answer([9; 6]);
    let outcome = arrive(&mut world, SECOND, 100, &answer)?;
    ensure_delivered(&outcome, &answer.sent_from((SERVICE, 80)), TENANT.mac())?;
    let other = answer.sent_from((IpAddr::V4(ip(10, 0, 1, 50)), 8081));
    ensure_delivered(&arrive(&mut world, SECOND, 100, &other)?, &other, TENANT.mac())?;
    // Another client is not bound to this backend.
    let other = Segment::new(UDP, BOUNCED.mac(), (BOUNCED.address.into(), 40000), (SERVICE, 80));
    let outcome = send(&mut world, BOUNCED.index, &other)?;
    ensure!(outcome.counted.contains_key(Counter::ServiceConnections.name()));
    Ok(())
}

#[test]
fn a_vpcs_share_bounds_all_its_clients_together_and_no_others() -> Result<()> {
    let mut world = world()?;
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    for (vni, id) in [(100, 1), (103, 2)] {
        Served::new(vni, id, SERVICE, 80, UDP).by(&mut world.programs, &[far])?;
    }
    let all = |vni| EndpointKey {
        vni,
        address: ALL_CONNECTIONS,
    };
    let from = |client: Endpoint, port| {
        Segment::new(UDP, client.mac(), (client.address.into(), port), (SERVICE, 80))
    };
    send(&mut world, TENANT.index, &from(TENANT, 40000))?;
    send(&mut world, BOUNCED.index, &from(BOUNCED, 40000))?;
    ensure!(world.programs.get::<_, u32>("SHARES", &all(100))? == 4);
    world.programs.set("QUOTAS", QUOTA_HELD, HALF)?;
    world.programs.set("QUOTAS", QUOTA_RESERVE, 4_u32)?;
    for client in [TENANT, BOUNCED] {
        let request = from(client, 40001);
        let outcome = send(&mut world, client.index, &request)?;
        ensure_sent(&outcome, &request.sent_to(far), SECOND)?;
        ensure!(outcome.counted.contains_key(Counter::ServiceStateless.name()));
        ensure!(forward(&world, &request).is_err());
    }
    let outcome = send(&mut world, SPREAD.index, &from(SPREAD, 40000))?;
    ensure!(outcome.counted.contains_key(Counter::ServiceConnections.name()));
    ensure!(world.programs.get::<_, u32>("SHARES", &all(103))? == 2);
    // While half of the table is free, no client is limited to its reserve.
    let free = HALF - 2;
    world.programs.set("QUOTAS", QUOTA_HELD, free)?;
    for is_made in [true, false] {
        let outcome = send(
            &mut world,
            TENANT.index,
            &from(TENANT, 40002 + u16::from(is_made)),
        )?;
        ensure!(is_made == outcome.counted.contains_key(Counter::ServiceConnections.name()));
    }
    Ok(())
}

#[test]
fn what_the_node_sends_on_for_a_vpc_is_of_that_vpcs_room() -> Result<()> {
    let mut world = world()?;
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &[far])?;
    let held = |world: &World| [100, 103].map(|vni| held_by(world, vni));
    // The node's stack leaves this mark on packets that it forwards for the pod of another VPC.
    world.mark = mark_of(world.interfaces[usize::from(SPREAD.index)], MARK_HOST_ENDPOINT);
    let requests: Vec<Segment> = (0..8).map(|port| segment(TCP, 40000 + port)).collect();
    ensure_served(&mut world, &requests[0], far)?;
    ensure!(
        held(&world) == [2, 0],
        "of no other endpoint a mark says anything"
    );
    world.be_host(TENANT)?;
    ensure_served(&mut world, &requests[1], far)?;
    ensure!(held(&world) == [2, 2]);
    ensure!(forward(&world, &requests[1])?.payer == 103);
    // The entry is given back to the client that it was taken from.
    ensure_served(&mut world, &requests[1].clone().with_flags(0x14), far)?;
    ensure_served(&mut world, &requests[1], far)?;
    ensure!(held(&world) == [2, 2]);
    // One interface number has more bits than the mark, and one belongs to no interface.
    let of_spread = world.interfaces[usize::from(SPREAD.index)];
    let mut later: AttachmentEntry = world.programs.get("ATTACHMENTS", &of_spread)?;
    later.ifindex = 3 << 16 | 0xfff0;
    world.programs.insert("ATTACHMENTS", later.ifindex, later)?;
    for (mark, expected) in [(later.ifindex, [2, 4]), (0xfff1, [4, 4]), (0, [6, 4])] {
        world.mark = mark_of(mark, MARK_HOST_ENDPOINT);
        ensure_served(&mut world, &requests[usize::from(expected[0] as u8)], far)?;
        ensure!(held(&world) == expected, "{mark:#x}: {:?}", held(&world));
    }
    // The VPC has all entries that a client may have, which limits nobody else.
    let full = key(103, TENANT.address);
    world.programs.insert("SHARES", full, CONNECTIONS_OF_CLIENT)?;
    for (interface, is_made) in [(of_spread, false), (0, true)] {
        world.mark = mark_of(interface, MARK_HOST_ENDPOINT);
        let outcome = send(&mut world, TENANT.index, &requests[7 - usize::from(is_made) * 2])?;
        let counter = if is_made {
            Counter::ServiceConnections
        } else {
            Counter::ServiceStateless
        };
        ensure!(
            outcome.counted.contains_key(counter.name()),
            "{:?}",
            outcome.counted
        );
    }
    Ok(())
}

/// Returns the number of entries of CONNECTIONS of all clients of a VPC.
fn held_by(world: &World, vni: u32) -> u32 {
    let address = ALL_CONNECTIONS;
    let held = world.programs.get("SHARES", &EndpointKey { vni, address });
    held.unwrap_or_default()
}

/// Sends the first packets of connections from all ports of a client to one port of the service.
fn open_all(world: &mut World, client: Endpoint, to: u16) -> Result<()> {
    let opening = Segment::new(TCP, client.mac(), (client.address.into(), 0), (SERVICE, to));
    let mut frame = opening.bytes();
    for port in 1..=32768_u16 {
        frame[34..36].copy_from_slice(&port.to_be_bytes());
        let outcome = world.run_uncounted(Role::Agent(client.index), Hook::Tc, &frame, 0)?;
        ensure!(outcome.verdict == 7, "port {port}: {}", outcome.verdict);
    }
    Ok(())
}

#[test]
fn vpcs_that_fill_the_table_leave_a_third_its_room() -> Result<()> {
    let mut world = world()?;
    world.enter()?;
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    // The connections fill the table together: four pods have 32,768 each.
    let ports = 4;
    for (vni, id) in [(100, 1), (102, 20), (103, 40)] {
        for port in 0..ports {
            let served = Served::new(vni, id + u32::from(port), SERVICE, 80 + port, TCP);
            let backend = if vni == 102 {
                IpAddr::V4(ip(10, 7, 2, 30))
            } else {
                far.0
            };
            served.by(&mut world.programs, &[(backend, 8080 + port)])?;
        }
    }
    // transitd writes this before anything is attached.
    world.programs.set("QUOTAS", QUOTA_RESERVE, HALF / 4)?;
    for port in 0..ports {
        for client in [SPREAD, DIVIDED] {
            open_all(&mut world, client, 80 + port)?;
            // The next pod follows.
            let of = key(client.vni, client.address);
            world.programs.insert("SHARES", of, 0_u32)?;
        }
    }
    let fillers = [SPREAD, DIVIDED].map(|endpoint| held_by(&world, endpoint.vni));
    println!("the VPCs that fill have {fillers:?} entries");
    ensure!(fillers.iter().sum::<u32>() >= HALF, "they do fill it");
    let requests: Vec<Segment> = (0..40).map(|port| segment(TCP, 40000 + port)).collect();
    for request in &requests {
        ensure_served(&mut world, request, far)?;
        ensure!(forward(&world, request).is_ok(), "an entry of its own");
    }
    // The connections keep their backend when others come.
    Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &[backend(40), backend(41)])?;
    for request in &requests {
        let next = request.clone().with_flags(0x10);
        ensure!(chosen(&mut world, &next)? == [10, 0, 1, 50]);
    }
    Ok(())
}

#[test]
fn full_pending_share_of_a_vpc_evicts_no_other_flow() -> Result<()> {
    let mut world = world()?;
    let all = |vni| EndpointKey {
        vni,
        address: ALL_PENDING,
    };
    let held = |world: &World, vni| world.programs.get::<_, u32>("SHARES", &all(vni));
    world.programs.insert("SHARES", all(100), PENDING_OF_VPC - 1)?;
    // This droplet has no row of the service.
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    let (noted, beyond) = (segment(UDP, 40000), segment(UDP, 40001));
    for _ in 0..2 {
        let outcome = send(&mut world, TENANT.index, &noted)?;
        ensure_sent(&outcome, &noted, THIRD)?;
        ensure!(!outcome.counted.contains_key(Counter::ServiceStateless.name()));
    }
    ensure!(held(&world, 100)? == PENDING_OF_VPC, "counted once");
    let outcome = send(&mut world, TENANT.index, &beyond)?;
    ensure_sent(&outcome, &beyond, THIRD)?;
    ensure!(outcome.counted.contains_key(Counter::ServiceStateless.name()));
    let answer = beyond.sent_to(far).answer([9; 6]);
    let outcome = arrive(&mut world, SECOND, 100, &answer)?;
    ensure_delivered(&outcome, &answer, TENANT.mac())?;
    let answer = noted.sent_to(far).answer([9; 6]);
    let outcome = arrive(&mut world, SECOND, 100, &answer)?;
    ensure_delivered(&outcome, &answer.sent_from((SERVICE, 80)), TENANT.mac())?;
    let other = Segment::new(UDP, SPREAD.mac(), (SPREAD.address.into(), 40000), (SERVICE, 80));
    send(&mut world, SPREAD.index, &other)?;
    ensure!(held(&world, 103)? == 1);
    Ok(())
}

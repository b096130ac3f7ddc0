//! What is remembered of connections to services: a backend stays a connection's, new ones are chosen anew, and no client
//! fills the table for others.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    services::{
        ALL_CONNECTIONS, ALL_PENDING, CONNECTIONS_OF_CLIENT, CONNECTIONS_OF_VPC, ConnectionEntry,
        ConnectionKey, FINISHED, FORWARD, PENDING_OF_VPC, RESET, REVERSE, SEEN,
    },
    tables::EndpointKey,
};
use thuban_e2e::{
    programs::{address, key},
    services::Served,
};

use crate::{
    rows::{BOUNCED, Endpoint, SECOND, SPREAD, TENANT, THIRD, ip},
    service_world::{
        SERVICE, Segment, TCP, UDP, arrive, ensure_delivered, ensure_dropped, ensure_sent, inner, send, world,
    },
    world::World,
};

const CLIENT: IpAddr = IpAddr::V4(TENANT.address);

fn backend(n: u8) -> (IpAddr, u16) {
    (IpAddr::V4(ip(10, 0, 2, n)), 8080)
}

fn segment(protocol: u8, port: u16) -> Segment {
    Segment::new(protocol, TENANT.mac(), (CLIENT, port), (SERVICE, 80))
}

/// The backend that a packet goes to.
fn chosen(world: &mut World, segment: &Segment) -> Result<[u8; 4]> {
    let outcome = send(world, TENANT.index, segment)?;
    ensure!(outcome.verdict == 7, "{:?}", outcome.counted);
    Ok(inner(&outcome)[30..34].try_into()?)
}

fn connection(segment: &Segment, direction: u8) -> ConnectionKey {
    ConnectionKey {
        vni: 100,
        ports: [segment.from.1.to_be(), segment.to.1.to_be()],
        source: address(segment.from.0),
        destination: address(segment.to.0),
        protocol: segment.protocol,
        direction,
        padding: 0,
    }
}

fn forward(world: &World, segment: &Segment) -> Result<ConnectionEntry> {
    world.programs.get("CONNECTIONS", &connection(segment, FORWARD))
}

fn reverse(world: &World, segment: &Segment) -> Result<ConnectionEntry> {
    world.programs.get("CONNECTIONS", &connection(segment, REVERSE))
}

#[test]
fn connection_keeps_its_backend_if_service_changes_or_ends() -> Result<()> {
    let mut world = world()?;
    let served = Served::new(100, 1, SERVICE, 80, TCP);
    served.by(&mut world.programs, &[backend(40)])?;
    let request = segment(TCP, 40000);
    ensure!(chosen(&mut world, &request)? == [10, 0, 2, 40]);
    let next = request.clone().with_flags(0x10);
    served.by(&mut world.programs, &[backend(41)])?;
    ensure!(chosen(&mut world, &next)? == [10, 0, 2, 40]);
    ensure!(chosen(&mut world, &segment(TCP, 40001))? == [10, 0, 2, 41]);
    served.by(&mut world.programs, &[])?;
    ensure!(chosen(&mut world, &next)? == [10, 0, 2, 40]);
    Ok(())
}

#[test]
fn udp_flow_keeps_its_backend_while_service_has_it() -> Result<()> {
    let mut world = world()?;
    let served = Served::new(100, 1, SERVICE, 80, UDP);
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    served.by(&mut world.programs, &[far])?;
    let request = segment(UDP, 40000);
    ensure!(chosen(&mut world, &request)? == [10, 0, 1, 50]);
    let more = [far, backend(40), backend(41), backend(42)];
    served.by(&mut world.programs, &more)?;
    ensure!(
        chosen(&mut world, &request)? == [10, 0, 1, 50],
        "others have come"
    );
    served.by(&mut world.programs, &[backend(41)])?;
    ensure!(chosen(&mut world, &request)? == [10, 0, 2, 41], "it has gone");
    // What it answered before that was under way.
    let late = request.sent_to(far).answer([9; 6]);
    let outcome = arrive(&mut world, SECOND, 100, &late)?;
    ensure_delivered(&outcome, &late.sent_from((SERVICE, 80)), TENANT.mac())?;
    served.by(&mut world.programs, &[])?;
    let outcome = send(&mut world, TENANT.index, &request)?;
    ensure!(
        outcome.counted.contains_key(Counter::ServiceRefused.name()),
        "nobody serves: {:?}",
        outcome.counted
    );
    served.by(&mut world.programs, &[backend(42)])?;
    ensure!(chosen(&mut world, &request)? == [10, 0, 2, 42], "somebody does");
    Ok(())
}

#[test]
fn a_port_used_again_gets_a_backend_that_is_there() -> Result<()> {
    let mut world = world()?;
    let served = Served::new(100, 1, SERVICE, 80, TCP);
    served.by(&mut world.programs, &[backend(40)])?;
    let opening = segment(TCP, 40000);
    ensure!(chosen(&mut world, &opening)? == [10, 0, 2, 40]);
    // Sent again: the same.
    ensure!(chosen(&mut world, &opening)? == [10, 0, 2, 40]);
    served.by(&mut world.programs, &[backend(41)])?;
    ensure!(
        chosen(&mut world, &opening)? == [10, 0, 2, 41],
        "its backend is gone"
    );
    served.by(&mut world.programs, &[backend(41), backend(42)])?;
    for flags in [0x11, 0x14] {
        let first = chosen(&mut world, &opening)?;
        ensure!(chosen(&mut world, &opening)? == first);
        ensure!(chosen(&mut world, &opening.clone().with_flags(flags))? == first);
        ensure!(forward(&world, &opening)?.state & (FINISHED | RESET) != 0);
        chosen(&mut world, &opening)?;
        ensure!(forward(&world, &opening)?.state == SEEN, "chosen anew");
    }
    Ok(())
}

#[test]
fn both_sides_of_a_connection_are_written_down() -> Result<()> {
    let mut world = world()?;
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &[far])?;
    let request = segment(TCP, 40000);
    ensure_sent(
        &send(&mut world, TENANT.index, &request)?,
        &request.sent_to(far),
        SECOND,
    )?;
    let answer = request.sent_to(far).answer([9; 6]);
    ensure!(forward(&world, &request)?.state == SEEN && reverse(&world, &answer)?.state == 0);
    arrive(&mut world, SECOND, 100, &answer)?;
    ensure!(reverse(&world, &answer)?.state == SEEN);
    let before = forward(&world, &request)?;
    chosen(&mut world, &request.clone().with_flags(0x10))?;
    ensure!(
        forward(&world, &request)? == before,
        "not written for each packet"
    );
    arrive(&mut world, SECOND, 100, &answer.clone().with_flags(0x11))?;
    ensure!(reverse(&world, &answer)?.state == SEEN | FINISHED);
    Ok(())
}

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
    // Another client isn't bound by it.
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
    world.programs.insert("SHARES", all(100), CONNECTIONS_OF_VPC)?;
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
    // No row of the service is here.
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

#[test]
fn reused_port_takes_backend_of_new_service_row() -> Result<()> {
    let mut world = world()?;
    let opening = segment(TCP, 40000);
    send(&mut world, TENANT.index, &opening)?;
    let gone = opening.sent_to((IpAddr::V4(ip(10, 0, 1, 50)), 8080));
    arrive(&mut world, SECOND, 100, &gone.answer([9; 6]))?;
    ensure!(chosen(&mut world, &opening)? == [10, 0, 1, 50], "who answered");
    Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &[backend(40)])?;
    let next = opening.clone().with_flags(0x10);
    ensure!(chosen(&mut world, &next)? == [10, 0, 1, 50], "it goes on");
    ensure!(chosen(&mut world, &opening)? == [10, 0, 2, 40], "opened anew");
    Ok(())
}

#[test]
fn answers_that_two_services_could_have_given_are_not_made() -> Result<()> {
    let mut world = world()?;
    let second = IpAddr::V4(ip(10, 96, 0, 11));
    Served::new(100, 1, SERVICE, 80, UDP).by(&mut world.programs, &[backend(40)])?;
    Served::new(100, 2, second, 80, UDP).by(&mut world.programs, &[backend(40)])?;
    let request = segment(UDP, 40000);
    ensure!(chosen(&mut world, &request)? == [10, 0, 2, 40]);
    let outcome = send(&mut world, TENANT.index, &request.sent_to((second, 80)))?;
    ensure_dropped(&outcome, Counter::ServiceCollision)?;
    // With another backend there is a way.
    Served::new(100, 2, second, 80, UDP).by(&mut world.programs, &[backend(40), backend(41)])?;
    ensure!(chosen(&mut world, &request.sent_to((second, 80)))? == [10, 0, 2, 41]);
    // A connection that is over is in nobody's way.
    Served::new(100, 3, SERVICE, 80, TCP).by(&mut world.programs, &[backend(40)])?;
    Served::new(100, 4, second, 80, TCP).by(&mut world.programs, &[backend(40)])?;
    let (request, other) = (segment(TCP, 40000), segment(TCP, 40000).sent_to((second, 80)));
    ensure!(chosen(&mut world, &request)? == [10, 0, 2, 40]);
    let outcome = send(&mut world, TENANT.index, &other)?;
    ensure_dropped(&outcome, Counter::ServiceCollision)?;
    chosen(&mut world, &request.clone().with_flags(0x14))?;
    ensure!(chosen(&mut world, &other)? == [10, 0, 2, 40]);
    ensure!(forward(&world, &request).is_err());
    Ok(())
}

/// Sends a segment to an endpoint itself and asserts that its answer comes from there.
fn ensure_direct(world: &mut World, segment: &Segment) -> Result<()> {
    ensure_sent(&send(world, TENANT.index, segment)?, segment, SECOND)?;
    let answer = segment.answer([9; 6]);
    ensure_delivered(&arrive(world, SECOND, 100, &answer)?, &answer, TENANT.mac())
}

/// Sends a segment to an endpoint itself and asserts that the client is told at once that it can't.
fn ensure_collides(world: &mut World, segment: &Segment) -> Result<()> {
    let outcome = send(world, TENANT.index, segment)?;
    let told = [Counter::ServiceCollision, Counter::ServiceRefused];
    let is_told = told.iter().all(|told| outcome.counted.contains_key(told.name()));
    ensure!(is_told, "{:?}", outcome.counted);
    Ok(())
}

/// Sends a segment to the service and asserts that it goes to `backend`, whose answer comes from the service.
fn ensure_served(world: &mut World, request: &Segment, backend: (IpAddr, u16)) -> Result<()> {
    ensure_sent(
        &send(world, TENANT.index, request)?,
        &request.sent_to(backend),
        SECOND,
    )?;
    let answer = request.sent_to(backend).answer([9; 6]);
    let outcome = arrive(world, SECOND, 100, &answer)?;
    ensure_delivered(&outcome, &answer.sent_from(request.to), TENANT.mac())
}

#[test]
fn port_may_send_udp_to_backend_after_using_its_service() -> Result<()> {
    let mut world = world()?;
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    Served::new(100, 1, SERVICE, 80, UDP).by(&mut world.programs, &[far])?;
    let request = segment(UDP, 40000);
    for _ in 0..2 {
        ensure_served(&mut world, &request, far)?;
        ensure_direct(&mut world, &request.sent_to(far))?;
        ensure!(forward(&world, &request).is_err());
        let held: u32 = world.programs.get("SHARES", &key(100, TENANT.address))?;
        ensure!(held <= 2, "given back: {held}");
        // Other ports are other flows.
        ensure_served(&mut world, &segment(UDP, 40001), far)?;
    }
    Ok(())
}

#[test]
fn ended_service_connection_frees_port_for_its_backend() -> Result<()> {
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    for (ends, is_over) in [(0x11, false), (0x14, true)] {
        let mut world = world()?;
        Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &[far])?;
        let request = segment(TCP, 40000);
        let direct = request.sent_to(far);
        ensure_served(&mut world, &request, far)?;
        ensure_collides(&mut world, &direct)?;
        ensure!(forward(&world, &request).is_ok(), "it lives");
        send(&mut world, TENANT.index, &request.clone().with_flags(ends))?;
        if !is_over {
            ensure_collides(&mut world, &direct)?;
            let answer = direct.answer([9; 6]).with_flags(0x11);
            arrive(&mut world, SECOND, 100, &answer)?;
        }
        ensure_direct(&mut world, &direct)?;
        ensure_direct(&mut world, &direct.clone().with_flags(0x10))?;
    }
    Ok(())
}

#[test]
fn refused_connection_is_closed_but_untracked_one_is_not() -> Result<()> {
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    let mut world = world()?;
    let request = segment(TCP, 40000);
    let direct = request.sent_to(far);
    // No row of the service is here: who answers decides, were it by a reset.
    send(&mut world, TENANT.index, &request)?;
    let answer = direct.answer([9; 6]).with_flags(0x14);
    let outcome = arrive(&mut world, SECOND, 100, &answer)?;
    ensure_delivered(&outcome, &answer.sent_from(request.to), TENANT.mac())?;
    ensure_direct(&mut world, &direct)?;
    // No room for it.
    Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &[far])?;
    let client = key(100, TENANT.address);
    world.programs.insert("SHARES", client, CONNECTIONS_OF_CLIENT)?;
    let request = segment(TCP, 40001);
    ensure_served(&mut world, &request, far)?;
    ensure!(forward(&world, &request).is_err());
    ensure_collides(&mut world, &request.sent_to(far))?;
    let elsewhere = request.sent_to((IpAddr::V4(ip(10, 0, 1, 50)), 8081));
    ensure_direct(&mut world, &elsewhere)
}

#[test]
fn what_waits_for_an_answer_of_a_service_takes_nobody_elses() -> Result<()> {
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    // No row of the service is here, and nobody answered.
    let mut world = world()?;
    let request = segment(UDP, 40000);
    ensure_sent(&send(&mut world, TENANT.index, &request)?, &request, THIRD)?;
    ensure_direct(&mut world, &request.sent_to(far))?;
    ensure!(forward(&world, &request).is_err());
    // Somebody answered, the row came, and the connection is forgotten.
    ensure_sent(&send(&mut world, TENANT.index, &request)?, &request, THIRD)?;
    let answer = request.sent_to(far).answer([9; 6]);
    let restored = answer.sent_from(request.to);
    ensure_delivered(
        &arrive(&mut world, SECOND, 100, &answer)?,
        &restored,
        TENANT.mac(),
    )?;
    for (segment, direction) in [(&request, FORWARD), (&answer, REVERSE)] {
        world
            .programs
            .remove::<_, ConnectionEntry>("CONNECTIONS", &connection(segment, direction))?;
    }
    ensure_delivered(&arrive(&mut world, SECOND, 100, &answer)?, &answer, TENANT.mac())
}

#[test]
fn a_client_with_affinity_keeps_its_backend_while_it_is_there() -> Result<()> {
    let mut world = world()?;
    let mut served = Served::new(100, 1, SERVICE, 80, TCP);
    served.affinity = 60;
    let backends: Vec<_> = (40..50).map(backend).collect();
    served.by(&mut world.programs, &backends)?;
    let first = chosen(&mut world, &segment(TCP, 40000))?;
    for port in 40001..40020 {
        ensure!(chosen(&mut world, &segment(TCP, port))? == first);
    }
    // Others take its slots, but it is there still.
    let mut turned = backends.clone();
    turned.rotate_left(1);
    let place = backends
        .iter()
        .position(|b| b.0 == IpAddr::from(first))
        .unwrap_or_default();
    turned.swap((place + 9) % 10, place);
    served.by(&mut world.programs, &turned)?;
    ensure!(chosen(&mut world, &segment(TCP, 40030))? == first);
    let others: Vec<_> = (60..70).map(backend).collect();
    served.by(&mut world.programs, &others)?;
    ensure!(chosen(&mut world, &segment(TCP, 40040))? != first);
    Ok(())
}

#[test]
fn connections_are_spread_over_the_backends() -> Result<()> {
    let mut world = world()?;
    let backends: Vec<_> = (40..50).map(backend).collect();
    Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &backends)?;
    let mut seen = BTreeSet::new();
    for port in 40000..40100 {
        seen.insert(chosen(&mut world, &segment(TCP, port))?);
    }
    ensure!(seen.len() == 10, "{seen:?}");
    Ok(())
}

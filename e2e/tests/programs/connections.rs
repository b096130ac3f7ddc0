//! The memory of connections to services: a connection keeps its backend, and new connections get a new choice.

use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
};

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    services::{
        AffinityEntry, AffinityKey, CONNECTIONS_OF_CLIENT, ConnectionEntry, ConnectionKey, FINISHED, FORWARD,
        RESET, REVERSE, SEEN,
    },
    tables::EndpointKey,
};
use thuban_e2e::{
    programs::{address, key},
    services::Served,
};

use crate::{
    rows::{SECOND, TENANT, THIRD, ip, ip6},
    service_world::{
        SCTP, SERVICE, SERVICE6, Segment, TCP, UDP, arrive, ensure_delivered, ensure_dropped, ensure_sent,
        inner, port_of, send, world,
    },
    world::World,
};

pub const CLIENT: IpAddr = IpAddr::V4(TENANT.address);

pub fn backend(n: u8) -> (IpAddr, u16) {
    (IpAddr::V4(ip(10, 0, 2, n)), 8080)
}

pub fn segment(protocol: u8, port: u16) -> Segment {
    Segment::new(protocol, TENANT.mac(), (CLIENT, port), (SERVICE, 80))
}

/// Returns the backend that a packet goes to.
pub fn chosen(world: &mut World, segment: &Segment) -> Result<[u8; 4]> {
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

pub fn forward(world: &World, segment: &Segment) -> Result<ConnectionEntry> {
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
    // An answer of before was still under way.
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
    // The packet is sent again: the backend is the same.
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

/// A port that one service used is used for another one, which has no row here yet. The same backend serves both.
fn port_goes_to_service_without_row(protocol: u8) -> Result<()> {
    let mut world = world()?;
    let (first, second) = (segment(protocol, 40000), (IpAddr::V4(ip(10, 96, 0, 77)), 80));
    let far = (IpAddr::V4(ip(10, 0, 1, 50)), 8080);
    Served::new(100, 1, SERVICE, 80, protocol).by(&mut world.programs, &[far])?;
    ensure!(chosen(&mut world, &first)? == [10, 0, 1, 50]);
    let answer = first.sent_to(far).answer([9; 6]);
    let outcome = arrive(&mut world, SECOND, 100, &answer)?;
    ensure_delivered(&outcome, &answer.sent_from(first.to), TENANT.mac())?;
    let next = first.sent_to(second);
    ensure_sent(&send(&mut world, TENANT.index, &next)?, &next, THIRD)?;
    let outcome = arrive(&mut world, SECOND, 100, &answer)?;
    ensure_delivered(&outcome, &answer.sent_from(second), TENANT.mac())?;
    ensure!(forward(&world, &first).is_err(), "the first one's is over");
    ensure!(forward(&world, &next)?.address == address(far.0), "who answered");
    let client = EndpointKey {
        vni: 100,
        address: address(CLIENT),
    };
    let held: u32 = world.programs.get("SHARES", &client)?;
    ensure!(held == 2, "{held} entries counted, a connection has two");
    // A packet to the first service again is a connection of its own.
    let port = ensure_connected(&mut world, &first, far)?;
    ensure!(port != 40000, "its answers would be the second one's");
    Ok(())
}

#[test]
fn answer_is_of_the_service_that_a_port_was_used_for_last() -> Result<()> {
    port_goes_to_service_without_row(UDP)?;
    port_goes_to_service_without_row(TCP)
}

/// Sends a segment of a connection to a service. Asserts that it goes to `backend`, and that the backend's answer comes
/// from the service to the port that sent it. Returns the port that the backend sees.
fn ensure_connected(world: &mut World, request: &Segment, backend: (IpAddr, u16)) -> Result<u16> {
    let outcome = send(world, TENANT.index, request)?;
    ensure!(outcome.verdict == 7, "{:?}", outcome.counted);
    let port = port_of(&outcome);
    let there = request.sent_to(backend).sent_from((request.from.0, port));
    ensure_sent(&outcome, &there, SECOND)?;
    let mut answer = there.answer([9; 6]);
    let outcome = arrive(world, SECOND, 100, &answer)?;
    (answer.from, answer.to) = (request.to, request.from);
    ensure_delivered(&outcome, &answer, TENANT.mac())?;
    Ok(port)
}

#[test]
fn services_with_one_backend_are_used_from_one_port_at_once() -> Result<()> {
    let v4 = (CLIENT, SERVICE, IpAddr::V4(ip(10, 0, 1, 50)));
    let v6 = (TENANT.v6.into(), SERVICE6, IpAddr::V6(ip6(0, 1, 0x50)));
    for (client, service, backend) in [v4, v6] {
        for protocol in [TCP, UDP] {
            let mut world = world()?;
            let backend = (backend, 8080);
            let requests: Vec<Segment> = (80..83)
                .map(|port| Segment::new(protocol, TENANT.mac(), (client, 40000), (service, port)))
                .collect();
            for (id, request) in (1..).zip(&requests) {
                let served = Served::new(100, id, service, request.to.1, protocol);
                served.by(&mut world.programs, &[backend])?;
            }
            let mut seen = Vec::new();
            for request in &requests {
                seen.push(ensure_connected(&mut world, request, backend)?);
            }
            ensure!(seen[0] == 40000, "the first keeps the client's port: {seen:?}");
            ensure!(BTreeSet::from_iter(&seen).len() == 3, "{seen:?}");
            // All connections live, and each again gets its own answers.
            for _ in 0..2 {
                for (request, port) in requests.iter().zip(&seen) {
                    let next = request.clone().with_flags(0x10);
                    ensure!(ensure_connected(&mut world, &next, backend)? == *port);
                }
            }
            // A port that was another client's towards the backend is some client's own as well.
            let mut own = requests[0].clone();
            own.from.1 = seen[1];
            ensure!(ensure_connected(&mut world, &own, backend)? != seen[1]);
            ensure!(ensure_connected(&mut world, &requests[1], backend)? == seen[1]);
            // Once the first connection is over, its port is free again.
            if protocol == TCP {
                send(&mut world, TENANT.index, &requests[0].clone().with_flags(0x14))?;
                send(&mut world, TENANT.index, &requests[2].clone().with_flags(0x14))?;
                ensure!(ensure_connected(&mut world, &requests[2], backend)? == 40000);
                ensure!(ensure_connected(&mut world, &requests[1], backend)? == seen[1]);
            }
        }
    }
    Ok(())
}

#[test]
fn a_pod_reaches_itself_by_two_services_from_one_port() -> Result<()> {
    let mut world = world()?;
    let own = (CLIENT, 8080);
    for (id, port) in [(1, 80), (2, 81)] {
        Served::new(100, id, SERVICE, port, TCP).by(&mut world.programs, &[own])?;
    }
    let mut seen = BTreeSet::new();
    for port in [80, 81, 80, 81] {
        let request = segment(TCP, 40000).sent_to((SERVICE, port));
        let outcome = send(&mut world, TENANT.index, &request)?;
        let there = request.sent_to(own).sent_from((SERVICE, port_of(&outcome)));
        ensure_delivered(&outcome, &there, TENANT.mac())?;
        seen.insert(there.from.1);
        // The client itself answers as the backend.
        let answer = there.answer(TENANT.mac());
        let outcome = send(&mut world, TENANT.index, &answer)?;
        let mut restored = answer.clone();
        (restored.from, restored.to) = ((SERVICE, port), (CLIENT, 40000));
        ensure_delivered(&outcome, &restored, TENANT.mac())?;
    }
    ensure!(seen.len() == 2, "{seen:?}");
    Ok(())
}

#[test]
fn sctp_answers_that_two_services_could_give_are_not_made() -> Result<()> {
    let mut world = world()?;
    let second = IpAddr::V4(ip(10, 96, 0, 11));
    let backend = |n| (IpAddr::V4(ip(10, 0, 2, n)), 80);
    Served::new(100, 1, SERVICE, 80, SCTP).by(&mut world.programs, &[backend(40)])?;
    Served::new(100, 2, second, 80, SCTP).by(&mut world.programs, &[backend(40)])?;
    let request = segment(SCTP, 40000);
    let other = request.sent_to((second, 80));
    ensure!(chosen(&mut world, &request)? == [10, 0, 2, 40]);
    let outcome = send(&mut world, TENANT.index, &other)?;
    ensure_dropped(&outcome, Counter::ServiceCollision)?;
    // With another backend there is a free way.
    Served::new(100, 2, second, 80, SCTP).by(&mut world.programs, &[backend(40), backend(41)])?;
    ensure!(chosen(&mut world, &other)? == [10, 0, 2, 41]);
    Ok(())
}

/// Sends a segment to an endpoint itself and asserts that its answer comes from there.
fn ensure_direct(world: &mut World, segment: &Segment) -> Result<()> {
    ensure_sent(&send(world, TENANT.index, segment)?, segment, SECOND)?;
    let answer = segment.answer([9; 6]);
    ensure_delivered(&arrive(world, SECOND, 100, &answer)?, &answer, TENANT.mac())
}

/// Sends a segment to an endpoint itself and asserts that the client is told at once that this can't be done.
fn ensure_collides(world: &mut World, segment: &Segment) -> Result<()> {
    let outcome = send(world, TENANT.index, segment)?;
    let told = [Counter::ServiceCollision, Counter::ServiceRefused];
    let is_told = told.iter().all(|told| outcome.counted.contains_key(told.name()));
    ensure!(is_told, "{:?}", outcome.counted);
    Ok(())
}

/// Sends a segment to the service and asserts that it goes to `backend`, and that the backend's answer comes from the
/// service.
pub fn ensure_served(world: &mut World, request: &Segment, backend: (IpAddr, u16)) -> Result<()> {
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
        // Other ports make other flows.
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
    // This droplet has no row of the service: the answer decides, even a reset.
    send(&mut world, TENANT.index, &request)?;
    let answer = direct.answer([9; 6]).with_flags(0x14);
    let outcome = arrive(&mut world, SECOND, 100, &answer)?;
    ensure_delivered(&outcome, &answer.sent_from(request.to), TENANT.mac())?;
    ensure_direct(&mut world, &direct)?;
    // There is no room for it.
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
    // This droplet has no row of the service, and no backend answered.
    let mut world = world()?;
    let request = segment(UDP, 40000);
    ensure_sent(&send(&mut world, TENANT.index, &request)?, &request, THIRD)?;
    ensure_direct(&mut world, &request.sent_to(far))?;
    ensure!(forward(&world, &request).is_err());
    // A backend answered, the row came, and the connection is forgotten.
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
    // Other backends take its slots, but the backend still exists.
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
fn a_client_gets_any_backend_when_its_affinity_is_over() -> Result<()> {
    let mut world = world()?;
    let mut served = Served::new(100, 1, SERVICE, 80, TCP);
    served.affinity = 10;
    let backends: Vec<_> = (40..50).map(backend).collect();
    served.by(&mut world.programs, &backends)?;
    let key = AffinityKey {
        service: 1,
        client: address(TENANT.address),
    };
    let mut seen = HashSet::from([chosen(&mut world, &segment(TCP, 40000))?]);
    for port in 40001..40020 {
        let mut entry: AffinityEntry = world.programs.get("AFFINITY", &key)?;
        entry.time = entry.time.saturating_sub(11_000_000_000);
        world.programs.insert("AFFINITY", key, entry)?;
        let next = chosen(&mut world, &segment(TCP, port))?;
        ensure!(
            chosen(&mut world, &segment(TCP, port + 1000))? == next,
            "it is kept again"
        );
        seen.insert(next);
    }
    ensure!(seen.len() > 3, "{seen:?}");
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

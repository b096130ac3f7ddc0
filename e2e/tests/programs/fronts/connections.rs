//! Connections that clients outside open by fronts: where they go on when backends change, and whose they are.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    services::{ALL_CONNECTIONS, CONFIRMED, CONNECTIONS_CAPACITY, QUOTA_HELD, QUOTA_RESERVE, SEEN},
    tables::EndpointKey,
};
use thuban_e2e::programs::key;

use super::{
    BACKENDS_FAR, BACKENDS_HERE, CLIENT, DSR, FAR_BACKEND, FRONT, GOES_ON, HERE_BACKEND, OPENS, arrive,
    arriving, ask, ensure_left, ensure_passed_on, front, fronted, request, serve,
};
use crate::{
    rows::{BOUNCED, HERE, SECOND, THIRD, ip},
    service_world::{SCTP, Segment, TCP, UDP, ensure_delivered, ensure_dropped, port_of, send},
    world::{Hook, Outcome, Role, World},
};

/// Runs a packet that a droplet passed on here, with this class of the stamp.
fn arrive_on(world: &mut World, from: Ipv4Addr, class: u8, segment: &Segment) -> Result<Outcome> {
    let mut frame = fronted(from, 100, segment);
    frame[59] = class;
    world.run(Role::Transit, Hook::Tc, &frame)
}

#[test]
fn connections_go_on_where_they_began_when_backends_change() -> Result<()> {
    let mut world = World::new()?;
    let (former, now) = (front(1, FRONT, TCP), front(2, FRONT, TCP));
    former.by_fronts(&mut world.programs, 100, &[(FAR_BACKEND, 8080, SECOND)])?;
    now.by_fronts(&mut world.programs, 100, &[(HERE_BACKEND, 8080, HERE)])?;
    now.was(&mut world.programs, &former)?;
    let goes_on = request(TCP).with_flags(GOES_ON);
    // This droplet has no such connection. The former backend's may.
    for sender in [SECOND, THIRD] {
        ensure_passed_on(&arrive(&mut world, sender, 100, &goes_on)?, SECOND, 1)?;
    }
    let at_front = ask(&mut world, &goes_on)?;
    ensure!(at_front.frame[30..34] == SECOND.octets() && at_front.frame[59] == 1);
    // That droplet does not know it either, and sends it back. Now the table decides.
    let there = |segment: &Segment| segment.sent_to((HERE_BACKEND, 8080));
    let stray = goes_on.sent_from((CLIENT, 40009));
    for class in [1, 2] {
        let outcome = arrive_on(&mut world, SECOND, class, &stray)?;
        ensure_delivered(&outcome, &there(&stray), BOUNCED.mac())?;
    }
    // New ones begin here, and then go on here.
    for segment in [request(TCP).with_flags(OPENS), goes_on.clone()] {
        let outcome = arrive(&mut world, THIRD, 100, &segment)?;
        ensure_delivered(&outcome, &there(&segment), BOUNCED.mac())?;
    }
    // The other way round: the connection began here, and a front that knows the change already asks another droplet.
    now.by_fronts(&mut world.programs, 100, &[(FAR_BACKEND, 8080, SECOND)])?;
    let outcome = arrive(&mut world, SECOND, 100, &goes_on)?;
    ensure_delivered(&outcome, &there(&goes_on), BOUNCED.mac())
}

#[test]
fn what_began_nowhere_is_refused_where_the_table_says() -> Result<()> {
    let mut world = World::new()?;
    let (former, now) = (front(1, FRONT, TCP), front(2, FRONT, TCP));
    former.by_fronts(&mut world.programs, 100, &[(HERE_BACKEND, 8080, HERE)])?;
    now.by_fronts(&mut world.programs, 100, &[(FAR_BACKEND, 8080, SECOND)])?;
    now.was(&mut world.programs, &former)?;
    let stray = request(TCP).with_flags(GOES_ON);
    // The former backend is here, and does not have the connection: this droplet would know. So the packet goes to the
    // present one at last, from where it never comes back.
    for class in [0, 1] {
        ensure_passed_on(&arrive_on(&mut world, SECOND, class, &stray)?, SECOND, 2)?;
    }
    ensure_dropped(&arrive_on(&mut world, SECOND, 2, &stray)?, Counter::WouldReturn)?;
    ensure!(arriving(&world, &stray).is_err());
    // Rows that differ on all droplets make no circle.
    let third = front(3, FRONT, TCP);
    third.by_fronts(
        &mut world.programs,
        100,
        &[(IpAddr::V4(ip(10, 0, 1, 60)), 8080, THIRD)],
    )?;
    now.by_fronts(&mut world.programs, 100, &[(FAR_BACKEND, 8080, SECOND)])?;
    now.was(&mut world.programs, &third)?;
    ensure_passed_on(&arrive(&mut world, SECOND, 100, &stray)?, THIRD, 1)?;
    ensure_passed_on(&arrive_on(&mut world, THIRD, 1, &stray)?, SECOND, 2)?;
    // A backend that only moved has its connections with it.
    third.by_fronts(&mut world.programs, 100, &[(FAR_BACKEND, 8080, THIRD)])?;
    now.by_fronts(&mut world.programs, 100, &[(FAR_BACKEND, 8080, SECOND)])?;
    now.was(&mut world.programs, &third)?;
    ensure_passed_on(&arrive(&mut world, THIRD, 100, &stray)?, SECOND, 2)
}

#[test]
fn a_front_that_is_wrong_is_put_right_once() -> Result<()> {
    let mut world = World::new()?;
    serve(&mut world, TCP, 8080, BACKENDS_FAR, DSR)?;
    for asked in [request(TCP), request(TCP).with_flags(GOES_ON)] {
        for sender in [SECOND, THIRD] {
            ensure_passed_on(&arrive(&mut world, sender, 100, &asked)?, SECOND, 2)?;
        }
        ensure_dropped(&arrive_on(&mut world, THIRD, 2, &asked)?, Counter::WouldReturn)?;
    }
    Ok(())
}

#[test]
fn datagrams_go_where_the_table_says() -> Result<()> {
    let mut world = World::new()?;
    let port = |port: u16| [(HERE_BACKEND, port, HERE)];
    front(1, FRONT, UDP).by_fronts(&mut world.programs, 100, &port(8080))?;
    let asked = request(UDP);
    let to = |port: u16| asked.sent_to((HERE_BACKEND, port));
    for _ in 0..2 {
        let outcome = arrive(&mut world, SECOND, 100, &asked)?;
        ensure_delivered(&outcome, &to(8080), BOUNCED.mac())?;
    }
    front(1, FRONT, UDP).by_fronts(&mut world.programs, 100, &port(9090))?;
    ensure_delivered(
        &arrive(&mut world, SECOND, 100, &asked)?,
        &to(9090),
        BOUNCED.mac(),
    )?;
    let answer = to(9090).answer(BOUNCED.mac());
    ensure_left(
        &send(&mut world, BOUNCED.index, &answer)?,
        &answer.sent_from((FRONT, 443)),
    )?;
    let all = EndpointKey {
        vni: 100,
        address: ALL_CONNECTIONS,
    };
    ensure!(world.programs.get::<_, u32>("SHARES", &all)? == 2);
    front(2, FRONT, UDP).by_fronts(&mut world.programs, 100, &[(FAR_BACKEND, 8080, SECOND)])?;
    ensure_passed_on(&arrive(&mut world, THIRD, 100, &asked)?, SECOND, 2)
}

#[test]
fn a_client_that_begins_anew_gets_a_connection_of_its_own() -> Result<()> {
    let mut world = World::new()?;
    let backends = |port: u16| [(HERE_BACKEND, port, HERE)];
    front(1, FRONT, TCP).by_fronts(&mut world.programs, 100, &backends(8080))?;
    let (opens, there) = (request(TCP), request(TCP).sent_to((HERE_BACKEND, 8080)));
    let answer = there.answer(BOUNCED.mac());
    ensure_delivered(&arrive(&mut world, SECOND, 100, &opens)?, &there, BOUNCED.mac())?;
    ensure_left(
        &send(&mut world, BOUNCED.index, &answer)?,
        &answer.sent_from((FRONT, 443)),
    )?;
    // The same packet once more is of the same connection, whatever the front has now.
    front(1, FRONT, TCP).by_fronts(&mut world.programs, 100, &backends(8080))?;
    ensure_delivered(&arrive(&mut world, SECOND, 100, &opens)?, &there, BOUNCED.mac())?;
    let reset = answer.clone().with_flags(0x14);
    send(&mut world, BOUNCED.index, &reset)?;
    ensure_delivered(&arrive(&mut world, SECOND, 100, &opens)?, &there, BOUNCED.mac())?;
    let ends = opens.clone().with_flags(0x11);
    arrive(&mut world, SECOND, 100, &ends)?;
    ensure_delivered(&arrive(&mut world, SECOND, 100, &opens)?, &there, BOUNCED.mac())?;
    ensure!(
        arriving(&world, &opens)?.state == SEEN,
        "it begins without an end"
    );
    // Servers answer some packets by silence, so these prove nothing.
    for flags in [0x00, 0x08, 0x20] {
        arrive(&mut world, SECOND, 100, &opens.clone().with_flags(flags))?;
    }
    ensure!(arriving(&world, &opens)?.state == SEEN);
    let goes_on = opens.clone().with_flags(GOES_ON);
    arrive(&mut world, SECOND, 100, &goes_on)?;
    ensure!(arriving(&world, &opens)?.state == SEEN | CONFIRMED);
    let all = EndpointKey {
        vni: 100,
        address: ALL_CONNECTIONS,
    };
    ensure!(world.programs.get::<_, u32>("SHARES", &all)? == 2);
    // Of a backend that the front has lost, only what goes on is kept.
    front(1, FRONT, TCP).by_fronts(&mut world.programs, 100, &backends(9090))?;
    let outcome = arrive(&mut world, SECOND, 100, &goes_on)?;
    ensure_delivered(&outcome, &goes_on.sent_to((HERE_BACKEND, 8080)), BOUNCED.mac())?;
    let outcome = arrive(&mut world, SECOND, 100, &opens)?;
    ensure_delivered(&outcome, &opens.sent_to((HERE_BACKEND, 9090)), BOUNCED.mac())?;
    // A reset that belongs to nothing is delivered, and nothing is remembered of it.
    let reset = opens.sent_from((CLIENT, 40009)).with_flags(0x04);
    let outcome = arrive(&mut world, SECOND, 100, &reset)?;
    ensure_delivered(&outcome, &reset.sent_to((HERE_BACKEND, 9090)), BOUNCED.mac())?;
    ensure!(arriving(&world, &reset).is_err());
    Ok(())
}

#[test]
fn nobody_else_ends_a_clients_connection() -> Result<()> {
    let mut world = World::new()?;
    let backends = |port: u16| [(HERE_BACKEND, port, HERE)];
    front(1, FRONT, TCP).by_fronts(&mut world.programs, 100, &backends(8080))?;
    let (opens, goes_on) = (request(TCP), request(TCP).with_flags(GOES_ON));
    let old = |segment: &Segment| segment.sent_to((HERE_BACKEND, 8080));
    let answer = old(&opens).answer(BOUNCED.mac());
    arrive(&mut world, SECOND, 100, &opens)?;
    send(&mut world, BOUNCED.index, &answer)?;
    arrive(&mut world, SECOND, 100, &goes_on)?;
    front(1, FRONT, TCP).by_fronts(&mut world.programs, 100, &backends(9090))?;
    // Somebody who claims to be the client opens and resets: the connection's own backend decides what that means.
    let reset = opens.clone().with_flags(0x04);
    for segment in [&opens, &reset, &opens, &goes_on] {
        let outcome = arrive(&mut world, SECOND, 100, segment)?;
        ensure_delivered(&outcome, &old(segment), BOUNCED.mac())?;
    }
    ensure!(
        arriving(&world, &opens)?.state == SEEN | CONFIRMED,
        "it goes on after the reset"
    );
    // By another front with the same backend's port nobody takes the client's port away.
    let other = IpAddr::V4(ip(203, 0, 113, 81));
    front(2, other, TCP).by_fronts(&mut world.programs, 100, &backends(8080))?;
    arrive(&mut world, SECOND, 100, &reset)?;
    let outcome = arrive(&mut world, SECOND, 100, &opens.sent_to((other, 443)))?;
    ensure!(port_of(&outcome) >= 61000);
    let outcome = arrive(&mut world, SECOND, 100, &goes_on)?;
    ensure_delivered(&outcome, &old(&goes_on), BOUNCED.mac())?;
    // Once the backend has reset it, a new one gets a backend that the front has.
    send(&mut world, BOUNCED.index, &answer.with_flags(0x14))?;
    let outcome = arrive(&mut world, SECOND, 100, &opens)?;
    ensure_delivered(&outcome, &opens.sent_to((HERE_BACKEND, 9090)), BOUNCED.mac())
}

#[test]
fn connections_of_clients_outside_count_for_the_backends_vpc() -> Result<()> {
    let mut world = World::new()?;
    serve(&mut world, UDP, 8080, BACKENDS_HERE, DSR)?;
    let all = EndpointKey {
        vni: 100,
        address: ALL_CONNECTIONS,
    };
    arrive(&mut world, SECOND, 100, &request(UDP))?;
    ensure!(world.programs.get::<_, u32>("SHARES", &all)? == 2);
    ensure!(world.programs.get::<_, u32>("SHARES", &key(100, CLIENT)).is_err());
    world
        .programs
        .set("QUOTAS", QUOTA_HELD, CONNECTIONS_CAPACITY / 2)?;
    world.programs.set("QUOTAS", QUOTA_RESERVE, 2_u32)?;
    let more = request(UDP).sent_from((CLIENT, 40001));
    ensure_dropped(&arrive(&mut world, SECOND, 100, &more)?, Counter::FrontNoRoom)?;
    let there = request(UDP).sent_to((HERE_BACKEND, 8080));
    ensure_delivered(
        &arrive(&mut world, SECOND, 100, &request(UDP))?,
        &there,
        BOUNCED.mac(),
    )
}

#[test]
fn a_client_has_another_port_where_its_own_is_taken() -> Result<()> {
    for protocol in [TCP, UDP] {
        let mut world = World::new()?;
        let backend = [(HERE_BACKEND, 8080, HERE)];
        let other = IpAddr::V4(ip(203, 0, 113, 81));
        for (id, address) in [(1, FRONT), (2, other)] {
            front(id, address, protocol).by_fronts(&mut world.programs, 100, &backend)?;
        }
        let first = request(protocol);
        let there = first.sent_to((HERE_BACKEND, 8080));
        ensure_delivered(&arrive(&mut world, SECOND, 100, &first)?, &there, BOUNCED.mac())?;
        let second = first.sent_to((other, 443));
        let outcome = arrive(&mut world, SECOND, 100, &second)?;
        let port = port_of(&outcome);
        ensure!(port >= 61000, "port {port}");
        let seen = second.sent_from((CLIENT, port)).sent_to((HERE_BACKEND, 8080));
        ensure_delivered(&outcome, &seen, BOUNCED.mac())?;
        ensure_delivered(&arrive(&mut world, SECOND, 100, &second)?, &seen, BOUNCED.mac())?;
        for (seen, from) in [(&there, FRONT), (&seen, other)] {
            let answer = seen.answer(BOUNCED.mac());
            let left = answer.sent_from((from, 443)).sent_to((CLIENT, 40000));
            ensure_left(&send(&mut world, BOUNCED.index, &answer)?, &left)?;
        }
    }
    Ok(())
}

#[test]
fn a_clients_port_of_sctp_serves_one_front_at_a_time() -> Result<()> {
    let mut world = World::new()?;
    let backend = [(HERE_BACKEND, 443, HERE)];
    let other = IpAddr::V4(ip(203, 0, 113, 81));
    for (id, address) in [(1, FRONT), (2, other)] {
        front(id, address, SCTP).by_fronts(&mut world.programs, 100, &backend)?;
    }
    arrive(&mut world, SECOND, 100, &request(SCTP))?;
    let second = request(SCTP).sent_to((other, 443));
    ensure_dropped(
        &arrive(&mut world, SECOND, 100, &second)?,
        Counter::ServiceCollision,
    )
}

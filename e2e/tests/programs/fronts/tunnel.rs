//! Fronts of mode Tunnel: a backend's answers go back to the droplet that took the client's packet. It sends them on.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result, ensure};
use thuban_common::{
    counters::Counter,
    policy::{STAMP_FRONT, Stamp},
    services::{SERVICE_TUNNEL, TUNNELLED},
};
use thuban_testkit::packets::ensure_same;

use super::{
    BACKENDS_FAR, BACKENDS_HERE, CLIENT, CLIENT6, DSR, FAR_BACKEND, FRONT, GOES_ON, HERE_BACKEND,
    HERE_BACKEND6, PROTOCOLS, arriving, ask, ensure_left, ensure_passed, outside, request, request6, serve,
    stamp,
};
use crate::{
    fixture::stamp_bytes,
    frames::Tunnel,
    rows::{BOUNCED, HERE, SECOND, TENANT, THIRD, ip},
    service_world::{Segment, TCP, UDP, ensure_delivered, ensure_dropped, send},
    world::{Hook, Outcome, Role, World},
};

/// Returns the stamp of a packet whose answers this front wants.
fn wants(front: Ipv4Addr) -> [u8; 12] {
    let [a, b, c, d] = front.octets();
    stamp_bytes(Stamp {
        class: u32::from_be_bytes([0, a, 0, 0]),
        egress_set: u32::from_be_bytes([0, b, c, d]),
        flags: STAMP_FRONT,
    })
}

/// Returns the stamp of a backend's answer to a front.
fn answers() -> [u8; 12] {
    stamp_bytes(Stamp {
        class: 3,
        egress_set: 0,
        flags: STAMP_FRONT,
    })
}

/// Returns a frame in the tunnel of a VPC, with a stamp.
fn tunnelled(stamp: [u8; 12], from: Ipv4Addr, vni: u32, segment: &Segment) -> Vec<u8> {
    let inner = [&stamp[..], &segment.bytes()[12..]].concat();
    Tunnel::new(from, HERE, vni).around([2; 12], &inner)
}

/// Runs a frame in the tunnel of VPC 100 that comes from a droplet.
fn arrive(world: &mut World, stamp: [u8; 12], from: Ipv4Addr, segment: &Segment) -> Result<Outcome> {
    world.run(Role::Transit, Hook::Tc, &tunnelled(stamp, from, 100, segment))
}

/// Asserts that a frame went into the tunnel of VPC 100 to a droplet, as this segment with this stamp.
fn ensure_tunnelled(outcome: &Outcome, stamp: [u8; 12], to: Ipv4Addr, segment: &Segment) -> Result<()> {
    let frame = &outcome.frame;
    ensure!(
        frame.len() > 62,
        "verdict {} counted {:?}",
        outcome.verdict,
        outcome.counted
    );
    ensure_same(&frame[50..62], &stamp)?;
    ensure_same(&frame[62..], &segment.bytes()[12..])?;
    ensure!(
        frame[26..30] == HERE.octets() && frame[30..34] == to.octets(),
        "not to {to}"
    );
    ensure!(frame[46..49] == [0, 0, 100], "not for VPC 100");
    Ok(())
}

/// Asserts that the agent sent an answer to a front.
fn ensure_answered_by(outcome: &Outcome, front: Ipv4Addr, segment: &Segment) -> Result<()> {
    ensure_tunnelled(outcome, answers(), front, segment)?;
    ensure!(outcome.verdict == 7 && outcome.counted.keys().eq([&Counter::FrontAnswered.name()]));
    Ok(())
}

#[test]
fn a_front_names_itself_where_it_wants_the_answers() -> Result<()> {
    for (protocol, port, has_sum) in PROTOCOLS {
        let mut world = World::new()?;
        serve(&mut world, protocol, port, BACKENDS_FAR, SERVICE_TUNNEL)?;
        for mut asked in [request(protocol), request6(protocol)] {
            asked.has_sum = has_sum;
            for hook in [Hook::Tc, Hook::Xdp] {
                let outcome = world.run(Role::Transit, hook, &outside(&asked))?;
                ensure_tunnelled(&outcome, wants(HERE), SECOND, &asked)
                    .with_context(|| format!("{protocol} {hook:?}"))?;
                ensure!(outcome.counted.keys().eq([&Counter::Fronted.name()]));
            }
        }
    }
    Ok(())
}

#[test]
fn answers_go_to_the_front_of_the_latest_packet() -> Result<()> {
    for (protocol, port, has_sum) in PROTOCOLS {
        let mut world = World::new()?;
        let (v4, v6) = ((HERE_BACKEND, port), (HERE_BACKEND6, port));
        serve(&mut world, protocol, port, BACKENDS_HERE, SERVICE_TUNNEL)?;
        for (mut asked, backend) in [(request(protocol), v4), (request6(protocol), v6)] {
            asked.has_sum = has_sum;
            let there = asked.sent_to(backend);
            let answer = there.answer(BOUNCED.mac());
            let left = answer.sent_from((asked.to.0, 443));
            // A droplet passes the third one on for a front: the stamp says whose the answers are.
            for (sender, front) in [(SECOND, SECOND), (THIRD, THIRD), (THIRD, SECOND)] {
                let outcome = arrive(&mut world, wants(front), sender, &asked)?;
                ensure_delivered(&outcome, &there, BOUNCED.mac())?;
                let outcome = send(&mut world, BOUNCED.index, &answer)?;
                ensure_answered_by(&outcome, front, &left)
                    .with_context(|| format!("{protocol} at {} by {front}", backend.0))?;
            }
            // The front of the latest packet is this droplet, or wants no answers, or is no droplet.
            ensure_delivered(&ask(&mut world, &asked)?, &there, BOUNCED.mac())?;
            ensure_left(&send(&mut world, BOUNCED.index, &answer)?, &left)?;
            for stamp in [wants(SECOND), stamp(), wants(SECOND), wants(ip(192, 0, 2, 99))] {
                let outcome = arrive(&mut world, stamp, SECOND, &asked)?;
                ensure_delivered(&outcome, &there, BOUNCED.mac())?;
                let outcome = send(&mut world, BOUNCED.index, &answer)?;
                if stamp == wants(SECOND) {
                    ensure_answered_by(&outcome, SECOND, &left)?;
                } else {
                    ensure_left(&outcome, &left)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_connection_that_goes_on_follows_its_front() -> Result<()> {
    let mut world = World::new()?;
    let backend = (HERE_BACKEND, 8080);
    serve(&mut world, TCP, 8080, BACKENDS_HERE, DSR)?;
    let answer = request(TCP).sent_to(backend).answer(BOUNCED.mac());
    let left = answer.sent_from((FRONT, 443));
    arrive(&mut world, stamp(), SECOND, &request(TCP))?;
    ensure_left(&send(&mut world, BOUNCED.index, &answer)?, &left)?;
    ensure!(arriving(&world, &request(TCP))?.state & TUNNELLED == 0);
    // The mode changes while the connection is open.
    let goes_on = request(TCP).with_flags(GOES_ON);
    for front in [SECOND, THIRD] {
        arrive(&mut world, wants(front), front, &goes_on)?;
        let outcome = send(&mut world, BOUNCED.index, &answer)?;
        ensure_answered_by(&outcome, front, &left)?;
    }
    ensure!(arriving(&world, &request(TCP))?.state & TUNNELLED != 0);
    // Another connection of the client has a front of its own.
    let other = request(TCP).sent_from((CLIENT, 40001));
    arrive(&mut world, wants(SECOND), SECOND, &other)?;
    let outcome = send(&mut world, BOUNCED.index, &answer)?;
    ensure_answered_by(&outcome, THIRD, &left)?;
    arrive(&mut world, stamp(), SECOND, &goes_on)?;
    ensure_left(&send(&mut world, BOUNCED.index, &answer)?, &left)
}

#[test]
fn a_droplet_passes_on_whose_the_answers_are() -> Result<()> {
    let mut world = World::new()?;
    serve(&mut world, TCP, 8080, BACKENDS_FAR, SERVICE_TUNNEL)?;
    let outcome = arrive(&mut world, wants(THIRD), THIRD, &request(TCP))?;
    let mut at_last = wants(THIRD);
    at_last[9] = 2;
    ensure_tunnelled(&outcome, at_last, SECOND, &request(TCP))?;
    ensure!(outcome.counted.keys().eq([&Counter::Forwarded.name()]));
    Ok(())
}

#[test]
fn a_front_sends_answers_of_other_droplets_to_clients() -> Result<()> {
    for (protocol, port, has_sum) in PROTOCOLS {
        let mut world = World::new()?;
        serve(&mut world, protocol, port, BACKENDS_FAR, SERVICE_TUNNEL)?;
        for mut asked in [request(protocol), request6(protocol)] {
            asked.has_sum = has_sum;
            let answer = asked.answer([7; 6]);
            // Any droplet of the VPC may have the backend: a connection may be older than its place in the table.
            for sender in [SECOND, THIRD] {
                let frame = tunnelled(answers(), sender, 100, &answer);
                let at_xdp = world.run(Role::Transit, Hook::Xdp, &frame)?;
                ensure_passed(&at_xdp, &frame, Hook::Xdp)?;
                let outcome = world.run(Role::Transit, Hook::Tc, &frame)?;
                ensure_same(&outcome.frame[12..], &answer.bytes()[12..])
                    .with_context(|| format!("{protocol} counted {:?}", outcome.counted))?;
                ensure!(outcome.verdict == 7 && outcome.frame[0] & 1 == 0);
                ensure!(outcome.counted.keys().eq([&Counter::FrontReturned.name()]));
            }
        }
    }
    Ok(())
}

#[test]
fn a_front_refuses_answers_that_its_rows_do_not_name() -> Result<()> {
    let mut world = World::new()?;
    let answer = request(UDP).answer([7; 6]);
    let refused = |world: &mut World, vni, segment: &Segment| {
        let frame = tunnelled(answers(), SECOND, vni, segment);
        let outcome = world.run(Role::Transit, Hook::Tc, &frame)?;
        ensure_dropped(&outcome, Counter::FrontAnswerUnknown)
            .with_context(|| format!("{vni} {:?} to {:?}", segment.from, segment.to))
    };
    refused(&mut world, 100, &answer)?;
    serve(&mut world, UDP, 8080, BACKENDS_FAR, DSR)?;
    refused(&mut world, 100, &answer).context("mode Dsr")?;
    serve(&mut world, UDP, 8080, BACKENDS_FAR, SERVICE_TUNNEL)?;
    for vni in [101, 103, 9999] {
        refused(&mut world, vni, &answer)?;
    }
    for from in [(FRONT, 444), (CLIENT, 443), (FAR_BACKEND, 8080)] {
        refused(&mut world, 100, &answer.sent_from(from))?;
    }
    refused(&mut world, 100, &request(TCP).answer([7; 6]))?;
    // Nodes, pods of the VPC, and what no host outside has.
    let inside = [
        IpAddr::from(HERE),
        SECOND.into(),
        TENANT.address.into(),
        ip(169, 254, 64, 1).into(),
        ip(127, 0, 0, 1).into(),
        ip(224, 0, 0, 1).into(),
    ];
    for to in inside {
        refused(&mut world, 100, &answer.sent_to((to, 40000)))?;
    }
    let mapped = request6(UDP).answer([7; 6]);
    refused(&mut world, 100, &mapped.sent_to((TENANT.v6.into(), 40000)))?;
    ensure_dropped(
        &arrive(&mut world, answers(), ip(192, 0, 2, 99), &answer)?,
        Counter::UnknownDroplet,
    )?;
    // The same to a client outside leaves.
    for segment in [answer, mapped.sent_to((CLIENT6, 40000))] {
        let outcome = arrive(&mut world, answers(), SECOND, &segment)?;
        ensure!(outcome.counted.keys().eq([&Counter::FrontReturned.name()]));
    }
    Ok(())
}

#[test]
fn an_answer_too_big_for_the_tunnel_is_told_to_the_pod() -> Result<()> {
    let mut world = World::new()?;
    let backend = (HERE_BACKEND, 8080);
    serve(&mut world, UDP, 8080, BACKENDS_HERE, DSR)?;
    let mut answer = request(UDP).sent_to(backend).answer(BOUNCED.mac());
    answer.payload = vec![1; 1450 - 20 - 8 + 1];
    arrive(&mut world, stamp(), SECOND, &request(UDP))?;
    let outcome = send(&mut world, BOUNCED.index, &answer)?;
    ensure_left(&outcome, &answer.sent_from((FRONT, 443))).context("it leaves from here")?;
    arrive(&mut world, wants(SECOND), SECOND, &request(UDP))?;
    let outcome = send(&mut world, BOUNCED.index, &answer)?;
    ensure!(
        outcome.counted.keys().eq([&Counter::TooBigAnswered.name()]),
        "{:?}",
        outcome.counted
    );
    answer.payload.pop();
    let outcome = send(&mut world, BOUNCED.index, &answer)?;
    ensure_answered_by(&outcome, SECOND, &answer.sent_from((FRONT, 443)))
}

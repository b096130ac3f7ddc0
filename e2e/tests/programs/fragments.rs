//! Fragments of datagrams to services, and of their answers.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    host_stack::{MARK_HOST_ENDPOINT, mark_of},
    services::{FragmentEntry, FragmentKey, PLACES_OF_VPC},
};
use thuban_e2e::services::Served;
use thuban_testkit::packets::ensure_same;

use crate::{
    frames::Tunnel,
    rows::{BOUNCED, HERE, SECOND, SPREAD, TENANT, ip, ip6},
    service_world::{SERVICE, SERVICE6, Segment, TCP, UDP, ensure_dropped, inner, send, to_endpoint, world},
    world::{Hook, Outcome, Role, World},
};

const CLIENT: IpAddr = IpAddr::V4(TENANT.address);
const CLIENT6: IpAddr = IpAddr::V6(TENANT.v6);
/// A backend on this droplet.
const NEAR: IpAddr = IpAddr::V4(BOUNCED.address);
const NEAR6: IpAddr = IpAddr::V6(BOUNCED.v6);
/// A backend with a direct row.
const FAR: IpAddr = IpAddr::V4(ip(10, 0, 1, 50));
const FAR6: IpAddr = IpAddr::V6(ip6(0, 1, 0x50));
/// Bytes of a datagram in each fragment.
const SIZE: usize = 1400;

/// Returns a world whose service of both families has one backend each.
fn serving(v4: IpAddr, v6: IpAddr) -> Result<World> {
    let mut world = world()?;
    Served::new(100, 1, SERVICE, 80, UDP).by(&mut world.programs, &[(v4, 8080)])?;
    Served::new(100, 2, SERVICE6, 80, UDP).by(&mut world.programs, &[(v6, 8080)])?;
    Ok(world)
}

/// Returns a datagram of three fragments from the client to the service.
fn datagram(client: IpAddr, service: IpAddr) -> Segment {
    let mut datagram = Segment::new(UDP, TENANT.mac(), (client, 40000), (service, 80));
    datagram.payload = (0..3500_u32).map(|byte| byte as u8).collect();
    datagram
}

fn from_client(world: &mut World, frame: &[u8]) -> Result<Outcome> {
    world.run(Role::Agent(TENANT.index), Hook::Tc, frame)
}

fn to_client(world: &mut World, frame: &[u8]) -> Result<Outcome> {
    let frame = Tunnel::new(SECOND, HERE, 100).around([2; 12], frame);
    world.run(Role::Transit, Hook::Tc, &frame)
}

fn ensure_is(outcome: &Outcome, frame: &[u8]) -> Result<()> {
    ensure!(
        outcome.verdict == 7,
        "verdict {} counted {:?}",
        outcome.verdict,
        outcome.counted
    );
    ensure_same(&inner(outcome), frame)
}

#[test]
fn a_datagram_in_fragments_reaches_its_backend_and_is_answered() -> Result<()> {
    for has_sum in [true, false] {
        for (client, service, backend) in [(CLIENT, SERVICE, NEAR), (CLIENT6, SERVICE6, NEAR6)] {
            let mut world = serving(NEAR, NEAR6)?;
            let mut request = datagram(client, service);
            request.has_sum = has_sum;
            let there = request.sent_to((backend, 8080));
            for number in [7, 0xfffe, 7] {
                let sent = request.fragments(number, SIZE);
                ensure!(sent.len() == 3);
                for (sent, there) in sent.iter().zip(there.fragments(number, SIZE)) {
                    let outcome = from_client(&mut world, sent)?;
                    ensure_is(&outcome, &to_endpoint(&there, BOUNCED.mac()))?;
                }
            }
            let answer = there.answer(BOUNCED.mac());
            let back = answer.sent_from((service, 80));
            for (sent, back) in answer.fragments(9, SIZE).iter().zip(back.fragments(9, SIZE)) {
                let outcome = world.run(Role::Agent(BOUNCED.index), Hook::Tc, sent)?;
                ensure_is(&outcome, &to_endpoint(&back, TENANT.mac()))?;
            }
        }
    }
    Ok(())
}

#[test]
fn fragments_go_through_tunnels_and_come_back_by_them() -> Result<()> {
    for (client, service, backend) in [(CLIENT, SERVICE, FAR), (CLIENT6, SERVICE6, FAR6)] {
        let mut world = serving(FAR, FAR6)?;
        let request = datagram(client, service);
        let there = request.sent_to((backend, 8080));
        let mut ports = Vec::new();
        for (sent, there) in request.fragments(7, SIZE).iter().zip(there.fragments(7, SIZE)) {
            let outcome = from_client(&mut world, sent)?;
            ensure_is(&outcome, &there)?;
            ports.push(outcome.frame[34..36].to_vec());
        }
        ensure!(ports.iter().all(|port| *port == ports[0]), "all go one way");
        let answer = there.answer([9; 6]);
        let back = answer.sent_from((service, 80));
        for (sent, back) in answer.fragments(9, SIZE).iter().zip(back.fragments(9, SIZE)) {
            let outcome = to_client(&mut world, sent)?;
            ensure_is(&outcome, &to_endpoint(&back, TENANT.mac()))?;
        }
        // A whole datagram of the same flow belongs to the same connection.
        let whole = Segment::new(UDP, TENANT.mac(), (client, 40000), (service, 80));
        send(&mut world, TENANT.index, &whole)?;
        ensure!(world.programs.counter(Counter::ServiceConnections)? == 1);
    }
    Ok(())
}

#[test]
fn a_bouncer_passes_fragments_on_to_the_backend_that_it_chose() -> Result<()> {
    let mut world = serving(NEAR, NEAR6)?;
    // A client of network 3, whose bouncer is this droplet.
    for (client, service, backend) in [
        (IpAddr::V4(ip(10, 0, 3, 21)), SERVICE, NEAR),
        (IpAddr::V6(ip6(0, 3, 0x21)), SERVICE6, NEAR6),
    ] {
        let request = Segment {
            from: (client, 40000),
            ..datagram(client, service)
        };
        let there = request.sent_to((backend, 8080));
        let fragments: Vec<_> = request.fragments(7, SIZE);
        let late = to_client(&mut world, &fragments[1])?;
        ensure_dropped(&late, Counter::FragmentWithoutFirst)?;
        for (sent, there) in fragments.iter().zip(there.fragments(7, SIZE)) {
            let outcome = to_client(&mut world, sent)?;
            ensure_is(&outcome, &to_endpoint(&there, BOUNCED.mac()))?;
        }
    }
    Ok(())
}

#[test]
fn fragments_to_an_unknown_service_go_to_one_bouncer_unchanged() -> Result<()> {
    let mut world = world()?;
    for (client, service) in [(CLIENT, SERVICE), (CLIENT6, SERVICE6)] {
        let mut ways = Vec::new();
        for sent in datagram(client, service).fragments(7, SIZE) {
            let outcome = from_client(&mut world, &sent)?;
            ensure_is(&outcome, &sent)?;
            ensure!(outcome.counted.contains_key(Counter::SentToBouncer.name()));
            ways.push(outcome.frame[30..36].to_vec());
        }
        ensure!(ways.iter().all(|way| *way == ways[0]));
    }
    Ok(())
}

#[test]
fn fragments_without_their_first_one_are_dropped() -> Result<()> {
    let mut world = serving(NEAR, NEAR6)?;
    for (client, service) in [(CLIENT, SERVICE), (CLIENT6, SERVICE6)] {
        let request = datagram(client, service);
        let fragments = request.fragments(7, SIZE);
        let later = |world: &mut World, frame: &[u8]| {
            ensure_dropped(&from_client(world, frame)?, Counter::FragmentWithoutFirst)
        };
        later(&mut world, &fragments[1])?;
        from_client(&mut world, &fragments[0])?;
        ensure!(from_client(&mut world, &fragments[1])?.verdict == 7);
        // Another datagram, and another service.
        later(&mut world, &request.fragments(8, SIZE)[1])?;
        let other = if client.is_ipv4() {
            IpAddr::V4(ip(10, 96, 0, 11))
        } else {
            IpAddr::V6(ip6(0x96, 0, 0x11))
        };
        later(&mut world, &request.sent_to((other, 80)).fragments(7, SIZE)[1])?;
    }
    // Another VPC with the same addresses: SPREAD's is a client's of its own.
    let request = datagram(CLIENT, SERVICE);
    from_client(&mut world, &request.fragments(7, SIZE)[0])?;
    let of_spread = Segment {
        source_mac: SPREAD.mac(),
        from: (SPREAD.address.into(), 40000),
        ..request
    };
    let outcome = world.run(
        Role::Agent(SPREAD.index),
        Hook::Tc,
        &of_spread.fragments(7, SIZE)[1],
    )?;
    ensure_dropped(&outcome, Counter::FragmentWithoutFirst)
}

#[test]
fn datagrams_with_one_place_are_told_apart() -> Result<()> {
    let mut world = serving(NEAR, NEAR6)?;
    let request = datagram(CLIENT, SERVICE);
    from_client(&mut world, &request.fragments(7, SIZE)[0])?;
    // So many numbers, services and clients that some have the place of the first one.
    for other in 0..=255_u8 {
        let by_number = request.fragments(256 + u32::from(other), SIZE);
        let dropped = from_client(&mut world, &by_number[1])?;
        ensure_dropped(&dropped, Counter::FragmentWithoutFirst)?;
        if other != 10 {
            let to_other = request.sent_to((IpAddr::V4(ip(10, 96, 0, other)), 80));
            let dropped = from_client(&mut world, &to_other.fragments(7, SIZE)[1])?;
            ensure_dropped(&dropped, Counter::FragmentWithoutFirst)?;
        }
    }
    let of_client = |last| Segment {
        from: (IpAddr::V4(ip(10, 0, 3, last)), 40000),
        ..request.clone()
    };
    to_client(&mut world, &of_client(21).fragments(7, SIZE)[0])?;
    for other in (30..=250).filter(|last| *last != 21) {
        let dropped = to_client(&mut world, &of_client(other).fragments(7, SIZE)[1])?;
        ensure_dropped(&dropped, Counter::FragmentWithoutFirst)?;
    }
    Ok(())
}

#[test]
fn tiny_first_fragments_and_those_of_tcp_are_dropped() -> Result<()> {
    let mut world = serving(NEAR, NEAR6)?;
    Served::new(100, 3, SERVICE, 81, TCP).by(&mut world.programs, &[(NEAR, 8080)])?;
    for (client, service) in [(CLIENT, SERVICE), (CLIENT6, SERVICE6)] {
        let request = datagram(client, service);
        for part in [&[][..], &[0x9c, 0x40, 0, 80], &[0x9c, 0x40, 0, 80, 0, 9, 0]] {
            let mut frame = request.fragment(7, 0, true, part);
            // Bytes behind the packet are no part of it.
            frame.extend([0; 32]);
            ensure_dropped(&from_client(&mut world, &frame)?, Counter::ServiceUnreadable)?;
        }
        let later = request.fragments(7, SIZE).remove(1);
        ensure_dropped(&from_client(&mut world, &later)?, Counter::FragmentWithoutFirst)?;
        let of_tcp = Segment {
            protocol: TCP,
            to: (service, 81),
            ..request
        };
        for frame in of_tcp.fragments(7, SIZE) {
            ensure_dropped(&from_client(&mut world, &frame)?, Counter::ServiceUnreadable)?;
        }
    }
    Ok(())
}

#[test]
fn overlapping_fragments_go_where_the_last_first_one_went() -> Result<()> {
    let mut world = serving(NEAR, NEAR6)?;
    Served::new(100, 3, SERVICE, 81, UDP).by(&mut world.programs, &[(FAR, 8080)])?;
    let one = datagram(CLIENT, SERVICE);
    let other = one.sent_to((SERVICE, 81));
    let later = one.fragments(7, SIZE).remove(1);
    from_client(&mut world, &one.fragments(7, SIZE)[0])?;
    from_client(&mut world, &other.fragments(7, SIZE)[0])?;
    let outcome = from_client(&mut world, &later)?;
    ensure_is(&outcome, &one.sent_to((FAR, 8080)).fragments(7, SIZE)[1])?;
    // A fragment that overlaps the ports changes nothing: it shows no ports.
    let over = one.fragment(7, 8, true, &[0; 16]);
    let outcome = from_client(&mut world, &over)?;
    ensure_is(&outcome, &one.sent_to((FAR, 8080)).fragment(7, 8, true, &[0; 16]))
}

#[test]
fn datagrams_of_no_service_are_not_taken_for_answers() -> Result<()> {
    for (client, service, backend) in [(CLIENT, SERVICE, FAR), (CLIENT6, SERVICE6, FAR6)] {
        let mut world = serving(FAR, FAR6)?;
        let request = datagram(client, service);
        let there = request.sent_to((backend, 8080));
        from_client(&mut world, &request.fragments(7, SIZE)[0])?;
        let answer = there.answer([9; 6]).fragments(9, SIZE);
        to_client(&mut world, &answer[0])?;
        // The backend sends something of its own by the same number.
        let direct = there.answer([9; 6]).sent_from((backend, 9090));
        for sent in direct.fragments(9, SIZE) {
            let outcome = to_client(&mut world, &sent)?;
            ensure_is(&outcome, &to_endpoint(&sent, TENANT.mac()))?;
        }
        // Neither has a fragment of nobody's, nor one of another protocol.
        let stray = direct.fragments(10, SIZE).remove(1);
        ensure_is(
            &to_client(&mut world, &stray)?,
            &to_endpoint(&stray, TENANT.mac()),
        )?;
        let of_tcp = Segment {
            protocol: TCP,
            ..direct
        };
        for sent in of_tcp.fragments(9, SIZE) {
            ensure_is(&to_client(&mut world, &sent)?, &to_endpoint(&sent, TENANT.mac()))?;
        }
    }
    Ok(())
}

#[test]
fn datagrams_that_never_end_fill_their_own_vpcs_places_alone() -> Result<()> {
    let mut world = serving(NEAR, NEAR6)?;
    Served::new(103, 3, SERVICE, 80, UDP).by(&mut world.programs, &[(FAR, 8080)])?;
    let others = Segment {
        source_mac: SPREAD.mac(),
        from: (SPREAD.address.into(), 40000),
        ..datagram(CLIENT, SERVICE)
    };
    let fragments = others.fragments(7, SIZE);
    let of_spread = |world: &mut World, frame: &[u8]| world.run(Role::Agent(SPREAD.index), Hook::Tc, frame);
    ensure!(of_spread(&mut world, &fragments[0])?.verdict == 7);
    let endless = datagram(CLIENT, SERVICE);
    for number in 0..2000 {
        from_client(&mut world, &endless.fragments(number, SIZE)[0])?;
    }
    let all = PLACES_OF_VPC as usize;
    ensure!([100, 103].map(|vni| held(&world, vni)) == [all, 1]);
    let outcome = of_spread(&mut world, &fragments[1])?;
    ensure_is(&outcome, &others.sent_to((FAR, 8080)).fragments(7, SIZE)[1])
}

#[test]
fn a_datagram_of_no_service_forgets_no_other() -> Result<()> {
    let mut world = serving(FAR, FAR6)?;
    let request = datagram(CLIENT, SERVICE);
    let there = request.sent_to((FAR, 8080));
    from_client(&mut world, &request.fragments(7, SIZE)[0])?;
    let answer = there.answer([9; 6]);
    to_client(&mut world, &answer.fragments(9, SIZE)[0])?;
    // So many that some have the place of the answer.
    let direct = answer.sent_from((FAR, 9090));
    for number in 256..512 {
        to_client(&mut world, &direct.fragments(number, SIZE)[0])?;
    }
    let outcome = to_client(&mut world, &answer.fragments(9, SIZE)[1])?;
    let back = answer.sent_from((SERVICE, 80));
    ensure_is(&outcome, &to_endpoint(&back.fragments(9, SIZE)[1], TENANT.mac()))
}

#[test]
fn what_the_node_sends_on_takes_places_of_the_pods_vpc() -> Result<()> {
    let mut world = serving(FAR, FAR6)?;
    world.be_host(TENANT)?;
    world.mark = mark_of(world.interfaces[usize::from(SPREAD.index)], MARK_HOST_ENDPOINT);
    let request = datagram(CLIENT, SERVICE);
    let there = request.sent_to((FAR, 8080));
    for (sent, there) in request.fragments(7, SIZE).iter().zip(there.fragments(7, SIZE)) {
        ensure_is(&from_client(&mut world, sent)?, &there)?;
    }
    ensure!([100, 103].map(|vni| held(&world, vni)) == [0, 1]);
    Ok(())
}

/// Returns how many places of a VPC are taken.
fn held(world: &World, vni: u32) -> usize {
    let places = 0..PLACES_OF_VPC + 8;
    let places = places.filter(|place| {
        let key = FragmentKey { vni, place: *place };
        world.programs.get::<_, FragmentEntry>("FRAGMENTS", &key).is_ok()
    });
    places.count()
}

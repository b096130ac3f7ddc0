//! Services at the client's agent and at its bouncer: the backend that gets a packet, and the answer that the client
//! sees.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    services::{GATE_OF_ANY, GatesEntry, SERVICE_LOCAL, gate_of},
    tables::EndpointKey,
};
use thuban_e2e::{programs::key, services::Served};
use thuban_testkit::packets::ensure_same;

use crate::{
    frames::Tunnel,
    rows::{BOUNCED, Endpoint, HERE, LOCAL_MAC, SECOND, SPREAD, TENANT, THIRD, ip, ip6},
    service_world::{
        SCTP, SERVICE, SERVICE6, Segment, TCP, UDP, arrive, ensure_delivered, ensure_dropped, ensure_sent,
        inner, port_of, send, world,
    },
    world::{Hook, Role, World},
};

/// The client, in both families.
const CLIENT: IpAddr = IpAddr::V4(TENANT.address);
const CLIENT6: IpAddr = IpAddr::V6(TENANT.v6);
/// A backend on this droplet.
const HERE_BACKEND: IpAddr = IpAddr::V4(BOUNCED.address);
const HERE_BACKEND6: IpAddr = IpAddr::V6(BOUNCED.v6);
/// A backend with a direct row.
const FAR_BACKEND: IpAddr = IpAddr::V4(ip(10, 0, 1, 50));
const FAR_BACKEND6: IpAddr = IpAddr::V6(ip6(0, 1, 0x50));

fn segment(protocol: u8, port: u16) -> Segment {
    Segment::new(protocol, TENANT.mac(), (CLIENT, port), (SERVICE, 80))
}

/// Writes VPC 100's service of both families at port 80, one backend each.
fn serve(world: &mut World, protocol: u8, v4: (IpAddr, u16), v6: (IpAddr, u16)) -> Result<()> {
    Served::new(100, 1, SERVICE, 80, protocol).by(&mut world.programs, &[v4])?;
    Served::new(100, 2, SERVICE6, 80, protocol).by(&mut world.programs, &[v6])
}

/// The cases that must hold for every protocol: protocol, backend's port, whether UDP sums.
const PROTOCOLS: [(u8, u16, bool); 4] = [
    (TCP, 8080, true),
    (UDP, 8080, true),
    (UDP, 8080, false),
    (SCTP, 80, true),
];

#[test]
fn local_backend_is_reached_and_answers_as_the_service() -> Result<()> {
    for (protocol, port, has_sum) in PROTOCOLS {
        let mut world = world()?;
        serve(&mut world, protocol, (HERE_BACKEND, port), (HERE_BACKEND6, port))?;
        for (client, service, backend) in [
            (CLIENT, SERVICE, HERE_BACKEND),
            (CLIENT6, SERVICE6, HERE_BACKEND6),
        ] {
            let mut request = Segment::new(protocol, TENANT.mac(), (client, 40000), (service, 80));
            request.has_sum = has_sum;
            let there = request.sent_to((backend, port));
            for _ in 0..2 {
                let outcome = send(&mut world, TENANT.index, &request)?;
                ensure_delivered(&outcome, &there, BOUNCED.mac())?;
            }
            let answer = there.answer(BOUNCED.mac());
            let outcome = send(&mut world, BOUNCED.index, &answer)?;
            ensure_delivered(&outcome, &answer.sent_from((service, 80)), TENANT.mac())?;
        }
        ensure!(world.programs.counter(Counter::ServiceConnections)? == 2);
    }
    Ok(())
}

#[test]
fn remote_backend_is_reached_and_answers_as_the_service() -> Result<()> {
    for (protocol, port, has_sum) in PROTOCOLS {
        let mut world = world()?;
        serve(&mut world, protocol, (FAR_BACKEND, port), (FAR_BACKEND6, port))?;
        for (client, service, backend) in [(CLIENT, SERVICE, FAR_BACKEND), (CLIENT6, SERVICE6, FAR_BACKEND6)]
        {
            let mut request = Segment::new(protocol, TENANT.mac(), (client, 40000), (service, 80));
            request.has_sum = has_sum;
            let there = request.sent_to((backend, port));
            let outcome = send(&mut world, TENANT.index, &request)?;
            ensure_sent(&outcome, &there, SECOND)?;
            let answer = there.answer([9; 6]);
            let outcome = arrive(&mut world, SECOND, 100, &answer)?;
            ensure_delivered(&outcome, &answer.sent_from((service, 80)), TENANT.mac())?;
        }
    }
    Ok(())
}

#[test]
fn xdp_leaves_services_and_their_answers_to_tc() -> Result<()> {
    let mut world = world()?;
    serve(&mut world, TCP, (HERE_BACKEND, 8080), (HERE_BACKEND6, 8080))?;
    let request = segment(TCP, 40000);
    let outcome = world.run(Role::Agent(TENANT.index), Hook::Xdp, &request.bytes())?;
    ensure!(outcome.verdict == 2 && outcome.frame == request.bytes());
    let answer = request.sent_to((HERE_BACKEND, 8080)).answer(BOUNCED.mac());
    let unasked = world.run(Role::Agent(BOUNCED.index), Hook::Xdp, &answer.bytes())?;
    ensure!(unasked.verdict == 4, "an answer of nobody's service needs no tc");
    send(&mut world, TENANT.index, &request)?;
    let outcome = world.run(Role::Agent(BOUNCED.index), Hook::Xdp, &answer.bytes())?;
    ensure!(outcome.verdict == 2 && outcome.frame == answer.bytes());
    Ok(())
}

#[test]
fn a_connection_opens_its_clients_gate_and_no_others() -> Result<()> {
    let mut world = world()?;
    serve(&mut world, TCP, (HERE_BACKEND, 8080), (HERE_BACKEND6, 8080))?;
    let is_open = |world: &World, of: Endpoint| {
        let interface = world.interfaces[usize::from(of.index)];
        let gate: Result<GatesEntry> = world.programs.element("GATES", gate_of(interface));
        gate.map(|gate| gate.services != 0)
    };
    let any = |world: &World| world.programs.element::<GatesEntry>("GATES", GATE_OF_ANY);
    ensure!(any(&world)?.services == 0 && !is_open(&world, TENANT)?);
    send(&mut world, TENANT.index, &segment(TCP, 40000))?;
    ensure!(any(&world)?.services == 1 && is_open(&world, TENANT)?);
    ensure!(!is_open(&world, BOUNCED)?, "a backend's packets need no look-up");
    Ok(())
}

#[test]
fn a_pod_that_is_its_own_backend_hears_from_the_service() -> Result<()> {
    for (protocol, port, _) in PROTOCOLS {
        let mut world = world()?;
        serve(&mut world, protocol, (CLIENT, port), (CLIENT6, port))?;
        for (client, service) in [(CLIENT, SERVICE), (CLIENT6, SERVICE6)] {
            let request = Segment::new(protocol, TENANT.mac(), (client, 40000), (service, 80));
            let there = request.sent_to((client, port)).sent_from((service, 40000));
            let outcome = send(&mut world, TENANT.index, &request)?;
            ensure_delivered(&outcome, &there, TENANT.mac())?;
            let answer = there.answer(TENANT.mac());
            let outcome = send(&mut world, TENANT.index, &answer)?;
            let back = answer.sent_from((service, 80)).sent_to((client, 40000));
            ensure_delivered(&outcome, &back, TENANT.mac())?;
        }
    }
    Ok(())
}

#[test]
fn what_nobody_serves_is_refused_at_once() -> Result<()> {
    let mut world = world()?;
    Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &[])?;
    Served::new(100, 2, SERVICE6, 80, UDP).by(&mut world.programs, &[])?;
    for (client, service, port) in [
        (CLIENT, SERVICE, 80),
        (CLIENT, SERVICE, 81),
        (CLIENT6, SERVICE6, 80),
    ] {
        let request = Segment::new(TCP, TENANT.mac(), (client, 40000), (service, port));
        let mut reset = request.answer([0; 6]).with_flags(0x14);
        (reset.sequence, reset.acknowledged) = (0, request.sequence + 1 + request.payload.len() as u32);
        reset.payload.clear();
        let outcome = send(&mut world, TENANT.index, &request)?;
        let mut expected = reset.delivered(TENANT.mac());
        // There is no window; zero has two forms in the checksum, so it is the same.
        let window = if client.is_ipv4() { 48 } else { 68 };
        expected[window..window + 2].fill(0);
        if client.is_ipv4() {
            // The header is written afresh: another TTL, no don't-fragment.
            expected[20] = 0;
            expected[22] = 64;
            expected[24..26].fill(0);
            let sum = thuban_testkit::packets::checksum(&expected[14..34]);
            expected[24..26].copy_from_slice(&sum.to_be_bytes());
        } else {
            expected[21] = 64;
        }
        ensure_same(&outcome.frame, &expected)?;
        ensure!(outcome.counted.contains_key(Counter::ServiceRefused.name()));
        let outcome = send(&mut world, TENANT.index, &request.with_flags(0x04))?;
        ensure_dropped(&outcome, Counter::NoBackend)?;
    }
    for (client, service, transport) in [(CLIENT, SERVICE, 34), (CLIENT6, SERVICE6, 54)] {
        let request = Segment::new(UDP, TENANT.mac(), (client, 40000), (service, 80));
        let outcome = send(&mut world, TENANT.index, &request)?;
        ensure!(outcome.counted.contains_key(Counter::ServiceRefused.name()) && outcome.verdict == 7);
        let kind = if client.is_ipv4() { [3, 3] } else { [1, 4] };
        ensure!(outcome.frame[transport..transport + 2] == kind);
        let quoted = &outcome.frame[transport + 8..];
        ensure_same(quoted, &request.bytes()[14..transport + 8])?;
    }
    Ok(())
}

#[test]
fn what_shows_no_ports_is_dropped() -> Result<()> {
    let mut world = world()?;
    serve(&mut world, TCP, (HERE_BACKEND, 8080), (HERE_BACKEND6, 8080))?;
    let mut fragment = segment(TCP, 40000).bytes();
    fragment[20] = 0x20;
    let mut ping = segment(TCP, 40000).bytes();
    ping[23] = 1;
    for mut frame in [fragment, ping] {
        frame[24..26].fill(0);
        let sum = thuban_testkit::packets::checksum(&frame[14..34]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        let outcome = world.run(Role::Agent(TENANT.index), Hook::Tc, &frame)?;
        ensure_dropped(&outcome, Counter::ServiceUnreadable)?;
    }
    Ok(())
}

#[test]
fn ports_of_sctp_stay() -> Result<()> {
    let mut world = world()?;
    serve(&mut world, SCTP, (HERE_BACKEND, 8080), (HERE_BACKEND6, 8080))?;
    let outcome = send(&mut world, TENANT.index, &segment(SCTP, 40000))?;
    ensure_dropped(&outcome, Counter::ServicePortFixed)
}

#[test]
fn vpcs_with_the_same_service_and_clients_never_meet() -> Result<()> {
    let mut world = world()?;
    serve(&mut world, TCP, (HERE_BACKEND, 8080), (HERE_BACKEND6, 8080))?;
    let far = IpAddr::V4(ip(10, 0, 1, 50));
    Served::new(103, 3, SERVICE, 80, TCP).by(&mut world.programs, &[(far, 8080)])?;
    let request = Segment::new(TCP, SPREAD.mac(), (SPREAD.address.into(), 40000), (SERVICE, 80));
    let there = request.sent_to((far, 8080));
    let outcome = send(&mut world, SPREAD.index, &request)?;
    ensure_sent(&outcome, &there, THIRD)?;
    // The same answer in the other VPC goes to an endpoint of another droplet there, and comes from no service.
    let answer = there.answer([9; 6]);
    let outcome = arrive(&mut world, SECOND, 100, &answer)?;
    ensure!(outcome.verdict == 2, "{:?}", outcome.counted);
    let outcome = arrive(&mut world, THIRD, 103, &answer)?;
    ensure_delivered(&outcome, &answer.sent_from((SERVICE, 80)), SPREAD.mac())
}

#[test]
fn nobody_speaks_for_a_service() -> Result<()> {
    let mut world = world()?;
    let forged = Segment::new(UDP, [9; 6], (SERVICE, 80), (CLIENT, 40000));
    for sender in [SECOND, THIRD] {
        let outcome = arrive(&mut world, sender, 100, &forged)?;
        ensure_dropped(&outcome, Counter::SourceMismatch)?;
    }
    let own = Segment::new(UDP, TENANT.mac(), (SERVICE, 80), (HERE_BACKEND, 40000));
    ensure_dropped(&send(&mut world, TENANT.index, &own)?, Counter::SpoofedSource)
}

#[test]
fn unknown_service_goes_to_bouncer_and_answer_sets_backend() -> Result<()> {
    for protocol in [TCP, UDP, SCTP] {
        let mut world = world()?;
        world.programs.take_wanted()?;
        let request = segment(protocol, 40000);
        let outcome = send(&mut world, TENANT.index, &request)?;
        ensure_sent(&outcome, &request, THIRD)?;
        let service: EndpointKey = key(100, SERVICE);
        ensure!(
            world.programs.take_wanted()? == [service],
            "the first packet is announced"
        );

        let there = request.sent_to((FAR_BACKEND, 80));
        let answer = there.answer([9; 6]);
        if protocol == TCP {
            for wrong in [
                answer.clone().with_flags(0x10),
                Segment {
                    acknowledged: 5,
                    ..answer.clone()
                },
            ] {
                let outcome = arrive(&mut world, SECOND, 100, &wrong)?;
                ensure_delivered(&outcome, &wrong, TENANT.mac())?;
            }
        }
        let outcome = arrive(&mut world, SECOND, 100, &answer)?;
        ensure_delivered(&outcome, &answer.sent_from((SERVICE, 80)), TENANT.mac())?;
        // From now on the client goes to the backend itself, whatever the service's row says later.
        if protocol != SCTP {
            Served::new(100, 1, SERVICE, 80, protocol).by(&mut world.programs, &[(HERE_BACKEND, 80)])?;
        }
        // SCTP sends an INIT once more; a row would make a new choice for it.
        let next = request.clone().with_flags(0x10);
        let outcome = send(&mut world, TENANT.index, &next)?;
        ensure_sent(&outcome, &next.sent_to((FAR_BACKEND, 80)), SECOND)?;
        // Another endpoint that answers is not the service.
        let other = request.sent_to((IpAddr::V4(ip(10, 0, 1, 77)), 80)).answer([9; 6]);
        let outcome = arrive(&mut world, SECOND, 100, &other)?;
        ensure_delivered(&outcome, &other, TENANT.mac())?;
    }
    Ok(())
}

#[test]
fn reused_port_of_unknown_service_follows_newest_answer() -> Result<()> {
    let mut world = world()?;
    let request = segment(TCP, 40000);
    let elsewhere = IpAddr::V4(ip(10, 0, 1, 77));
    for backend in [FAR_BACKEND, elsewhere] {
        ensure_sent(&send(&mut world, TENANT.index, &request)?, &request, THIRD)?;
        let there = request.sent_to((backend, 80));
        let answer = there.answer([9; 6]);
        let outcome = arrive(&mut world, SECOND, 100, &answer)?;
        ensure_delivered(&outcome, &answer.sent_from((SERVICE, 80)), TENANT.mac())?;
        let end = request.clone().with_flags(0x11);
        let outcome = send(&mut world, TENANT.index, &end)?;
        ensure_same(&inner(&outcome), &end.sent_to((backend, 80)).bytes())?;
    }
    Ok(())
}

/// Returns a segment of a client of network 3, whose bouncer is this droplet; the client is on the second droplet.
fn foreign(protocol: u8) -> Segment {
    let client = IpAddr::V4(ip(10, 0, 3, 30));
    Segment::new(protocol, [9; 6], (client, 40000), (SERVICE, 80))
}

#[test]
fn a_bouncer_chooses_for_clients_that_do_not_know_the_service() -> Result<()> {
    for protocol in [TCP, UDP] {
        let mut world = world()?;
        let request = foreign(protocol);
        ensure_dropped(&arrive(&mut world, SECOND, 100, &request)?, Counter::NoBackend)?;
        let served = Served::new(100, 1, SERVICE, 80, protocol);
        // Backends that are only for this droplet's own clients come first. Then backends on this droplet, in its
        // network, in another network (by a divider), and on the client's own droplet.
        let mut local = served;
        local.flags = SERVICE_LOCAL;
        local.by(&mut world.programs, &[(HERE_BACKEND, 8080)])?;
        ensure_dropped(&arrive(&mut world, SECOND, 100, &request)?, Counter::NoBackend)?;
        served.by(&mut world.programs, &[(HERE_BACKEND, 8080)])?;
        let outcome = arrive(&mut world, SECOND, 100, &request)?;
        ensure_delivered(&outcome, &request.sent_to((HERE_BACKEND, 8080)), BOUNCED.mac())?;
        for (backend, droplet) in [
            (ip(10, 0, 3, 33), THIRD),
            (ip(10, 0, 2, 40), SECOND),
            (ip(10, 0, 3, 30), SECOND),
        ] {
            served.by(&mut world.programs, &[(backend.into(), 8080)])?;
            let outcome = arrive(&mut world, SECOND, 100, &request)?;
            if backend == ip(10, 0, 3, 30) {
                // The client is the only backend: its agent will know.
                ensure_dropped(&outcome, Counter::NoBackend)?;
                continue;
            }
            ensure_sent(&outcome, &request.sent_to((backend.into(), 8080)), droplet)?;
            ensure!(outcome.counted.contains_key(Counter::Bounced.name()));
        }
    }
    Ok(())
}

#[test]
fn a_bouncer_and_the_clients_agent_choose_alike() -> Result<()> {
    let mut world = world()?;
    let backends: Vec<(IpAddr, u16)> = (40..60).map(|n| (IpAddr::V4(ip(10, 0, 2, n)), 8080)).collect();
    Served::new(100, 1, SERVICE, 80, UDP).by(&mut world.programs, &backends)?;
    let mut chosen = std::collections::BTreeSet::new();
    for port in 40000..40064 {
        // The same client sends once from the wire and once from its veth.
        let request = Segment::new(UDP, BOUNCED.mac(), (BOUNCED.address.into(), port), (SERVICE, 80));
        let own = send(&mut world, BOUNCED.index, &request)?;
        let tunnel = Tunnel::new(THIRD, HERE, 100);
        world.programs.remove_local(key(100, BOUNCED.address))?;
        let frame = tunnel.around([2; 12], &request.bytes());
        let bounced = world.run(Role::Transit, Hook::Tc, &frame)?;
        world.restore_local(BOUNCED)?;
        let (own, bounced) = (inner(&own), inner(&bounced));
        ensure!(own[30..34] == bounced[30..34], "port {port}");
        chosen.insert(own[30..34].to_vec());
    }
    ensure!(chosen.len() > 12, "{} of 20 backends", chosen.len());
    Ok(())
}

#[test]
fn an_error_of_the_path_quotes_what_the_client_sent() -> Result<()> {
    let mut world = world()?;
    serve(&mut world, UDP, (FAR_BACKEND, 8080), (FAR_BACKEND6, 8080))?;
    let mut request = segment(UDP, 40000);
    request.payload = vec![7; 1460];
    let outcome = send(&mut world, TENANT.index, &request)?;
    ensure!(outcome.counted.contains_key(Counter::TooBigAnswered.name()));
    ensure_same(&outcome.frame[42..42 + 128], &request.bytes()[14..142])
}

#[test]
fn the_mac_of_a_local_backend_is_its_own() -> Result<()> {
    let mut world = world()?;
    let local = IpAddr::V4(ip(10, 0, 1, 12));
    Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &[(local, 8080)])?;
    let request = segment(TCP, 40000);
    let outcome = send(&mut world, TENANT.index, &request)?;
    ensure_delivered(&outcome, &request.sent_to((local, 8080)), LOCAL_MAC)
}

/// Returns ICMP "port unreachable" of the backend about a packet that it got, in a frame to the client.
fn unreachable(from: IpAddr, about: &Segment, mac: [u8; 6]) -> Vec<u8> {
    let quoted = &about.bytes()[14..];
    match (from, about.from.0) {
        (IpAddr::V4(from), IpAddr::V4(client)) => {
            let mut message = [&[3, 3, 0, 0, 0, 0, 0, 0][..], quoted].concat();
            let sum = thuban_testkit::packets::checksum(&message);
            message[2..4].copy_from_slice(&sum.to_be_bytes());
            crate::frames::Packet::udp(mac, from, client)
                .carrying(1, &message)
                .bytes()
        }
        (IpAddr::V6(from), IpAddr::V6(client)) => {
            let mut packet =
                crate::frames::Packet6::udp(mac, from, client).icmp(1, &[&[0; 4][..], quoted].concat());
            packet.hop_limit = 63;
            // The code is 4, in the checksum's place of the type's word.
            let mut frame = packet.bytes();
            frame[55] = 4;
            let sum = u16::from_be_bytes([frame[56], frame[57]]);
            let (sum, borrowed) = sum.overflowing_sub(4);
            let sum = sum - u16::from(borrowed);
            frame[56..58].copy_from_slice(&sum.to_be_bytes());
            frame
        }
        _ => Vec::new(),
    }
}

#[test]
fn errors_about_packets_to_a_backend_quote_what_the_client_sent() -> Result<()> {
    let mut world = world()?;
    serve(&mut world, UDP, (FAR_BACKEND, 8080), (FAR_BACKEND6, 8080))?;
    let router = (IpAddr::V4(ip(10, 0, 1, 90)), IpAddr::V6(ip6(0, 1, 0x90)));
    // Another service has the same backend, and the backend sees other ports.
    Served::new(100, 11, SERVICE, 81, UDP).by(&mut world.programs, &[(FAR_BACKEND, 8080)])?;
    Served::new(100, 12, SERVICE6, 81, UDP).by(&mut world.programs, &[(FAR_BACKEND6, 8080)])?;
    for (client, service, port, backend, router, quoted_sum) in [
        (CLIENT, SERVICE, 80, FAR_BACKEND, router.0, 34 + 8 + 20 + 6),
        (CLIENT6, SERVICE6, 80, FAR_BACKEND6, router.1, 54 + 8 + 40 + 6),
        (CLIENT, SERVICE, 81, FAR_BACKEND, router.0, 34 + 8 + 20 + 6),
        (CLIENT6, SERVICE6, 81, FAR_BACKEND6, router.1, 54 + 8 + 40 + 6),
    ] {
        let request = Segment::new(UDP, TENANT.mac(), (client, 40000), (service, port));
        let outcome = send(&mut world, TENANT.index, &request)?;
        let there = request
            .sent_to((backend, 8080))
            .sent_from((client, port_of(&outcome)));
        ensure!((there.from.1 == 40000) == (port == 80), "{}", there.from.1);
        for from in [backend, router] {
            let error = unreachable(from, &there, [9; 6]);
            let frame = Tunnel::new(SECOND, HERE, 100).around([2; 12], &error);
            let outcome = world.run(Role::Transit, Hook::Tc, &frame)?;
            let seen_from = if from == backend { service } else { from };
            let mut expected = unreachable(seen_from, &request, [9; 6]);
            expected[..6].copy_from_slice(&TENANT.mac());
            expected[6..12].copy_from_slice(&thuban_common::tables::GATEWAY_MAC);
            // The quoted checksum is still the backend's, and ICMP's checksum covers it.
            let mut is = outcome.frame.clone();
            ensure!(is.len() == expected.len(), "{:?}", outcome.counted);
            let icmp = if client.is_ipv4() { 34 } else { 54 };
            ensure!(sum_of(&is, icmp) == 0, "{from}: ICMP's checksum");
            for place in [quoted_sum, icmp + 2] {
                is[place..place + 2].fill(0);
                expected[place..place + 2].fill(0);
            }
            ensure_same(&is, &expected)?;
        }
    }
    Ok(())
}

/// Returns the checksum over an ICMP message at `at` of a frame, with IPv6's pseudo header: 0 if it is right.
fn sum_of(frame: &[u8], at: usize) -> u16 {
    let message = &frame[at..];
    let mut bytes = Vec::new();
    if at == 54 {
        bytes.extend(&frame[22..54]);
        bytes.extend((message.len() as u32).to_be_bytes());
        bytes.extend([0, 0, 0, 58]);
    }
    bytes.extend(message);
    thuban_testkit::packets::checksum(&bytes)
}

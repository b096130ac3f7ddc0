//! ICMP at fronts: echo requests, and errors about answers that backends have sent to clients.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result, ensure};
use thuban_common::{
    counters::Counter,
    services::ALL_CONNECTIONS,
    tables::{EndpointKey, SourceEntry, SourceKey},
};
use thuban_e2e::programs::{address, key};
use thuban_testkit::packets::{checksum, ensure_same};

use crate::{
    frames::header,
    fronts::{
        BACKENDS_FAR, BACKENDS_HERE, CLIENT, CLIENT6, DSR, FAR_BACKEND, FAR_BACKEND6, FRONT, FRONT6, GOES_ON,
        HERE_BACKEND, around, arrive, arriving, deny_clients_of_spread, each_request_of_a_backend_here,
        ensure_left, ensure_passed, ensure_passed_on, ensure_sent_on, front, outside, request, request6,
        serve,
    },
    rows::{BOUNCED, HERE, SECOND, SPREAD, TENANT, THIRD, ip, ip6},
    service_world::{Segment, TCP, UDP, ensure_dropped, octets, port_of, send, to_endpoint},
    world::{Hook, Outcome, Role, UPLINK_MAC, World},
};

const ROUTER: IpAddr = IpAddr::V4(ip(198, 51, 100, 1));
const ROUTER6: IpAddr = IpAddr::V6(ip6(0x198, 0, 1));
const OTHER_FRONT: IpAddr = IpAddr::V4(ip(203, 0, 113, 81));

/// An ICMP message.
#[derive(Clone)]
struct Message {
    from: IpAddr,
    to: IpAddr,
    hops: u8,
    /// Type and code.
    kind: [u8; 2],
    /// The bytes behind the checksum.
    rest: [u8; 4],
    body: Vec<u8>,
}

impl Message {
    /// Returns the frame of a router to this node.
    fn bytes(&self) -> Vec<u8> {
        let mut message = [&self.kind[..], &[0, 0], &self.rest, &self.body[..]].concat();
        let mut summed = Vec::new();
        if self.from.is_ipv6() {
            summed.extend(octets(self.from));
            summed.extend(octets(self.to));
            summed.extend((message.len() as u32).to_be_bytes());
            summed.extend([0, 0, 0, 58]);
        }
        summed.extend(&message);
        message[2..4].copy_from_slice(&checksum(&summed).to_be_bytes());
        let mut frame = [&UPLINK_MAC[..], &[7; 6]].concat();
        if let (IpAddr::V4(from), IpAddr::V4(to)) = (self.from, self.to) {
            frame.extend([8, 0]);
            frame.extend(header(0, message.len(), 0x4000, self.hops, 1, from, to));
        } else {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend((message.len() as u16).to_be_bytes());
            frame.extend([58, self.hops]);
            frame.extend(octets(self.from));
            frame.extend(octets(self.to));
        }
        frame.extend(message);
        frame
    }
}

fn run(world: &mut World, frame: &[u8]) -> Result<Outcome> {
    world.run(Role::Transit, Hook::Tc, frame)
}

fn echo(from: IpAddr, to: IpAddr) -> Message {
    Message {
        from,
        to,
        hops: 57,
        kind: [if from.is_ipv6() { 128 } else { 8 }, 0],
        rest: [0x12, 0x34, 0, 7],
        body: b"are you there".to_vec(),
    }
}

/// Returns the frame that answers an echo request.
fn echo_answer(asked: &Message) -> Vec<u8> {
    let answer = Message {
        from: asked.to,
        to: asked.from,
        hops: 64,
        kind: [if asked.from.is_ipv6() { 129 } else { 0 }, 0],
        ..asked.clone()
    };
    [&[7; 6][..], &UPLINK_MAC, &answer.bytes()[12..]].concat()
}

/// Bytes of an address's IP header.
const fn header_length(of: IpAddr) -> usize {
    if of.is_ipv6() { 40 } else { 20 }
}

/// Returns what an error quotes of a segment.
fn quote(of: &Segment) -> Vec<u8> {
    of.bytes()[14..14 + header_length(of.from.0) + 8].to_vec()
}

/// Returns the error "too big" about an answer as it left the node.
fn error(left: &Segment) -> Message {
    let is_v6 = left.from.0.is_ipv6();
    Message {
        from: if is_v6 { ROUTER6 } else { ROUTER },
        to: left.from.0,
        hops: 60,
        kind: if is_v6 { [2, 0] } else { [3, 4] },
        rest: [0, 0, 5, 120],
        body: quote(left),
    }
}

/// Returns the frame of an error as the backend gets it, about an answer as the backend sent it.
fn delivered(error: &Message, sent: &Segment) -> Vec<u8> {
    let mut body = quote(sent);
    if sent.protocol == UDP {
        // Nobody checks the checksum of a quoted datagram, and nobody writes it.
        let at = header_length(sent.from.0) + 6;
        body[at..at + 2].copy_from_slice(&error.body[at..at + 2]);
    }
    let seen = Message {
        to: sent.from.0,
        body,
        ..error.clone()
    };
    to_endpoint(&seen.bytes(), BOUNCED.mac())
}

fn ensure_error_delivered(outcome: &Outcome, frame: &[u8]) -> Result<()> {
    ensure_same(&outcome.frame, frame)
        .with_context(|| format!("verdict {} counted {:?}", outcome.verdict, outcome.counted))?;
    ensure!(outcome.verdict == 7 && outcome.counted.keys().eq([&Counter::FrontErrors.name()]));
    Ok(())
}

#[test]
fn a_front_answers_pings() -> Result<()> {
    let mut world = World::new()?;
    serve(&mut world, TCP, 8080, BACKENDS_FAR, DSR)?;
    for (client, front) in [(CLIENT, FRONT), (CLIENT6, FRONT6), (SECOND.into(), FRONT)] {
        let mut asked = echo(client, front);
        for length in [0, 13, 1400] {
            asked.body = vec![0x5a; length];
            let frame = asked.bytes();
            ensure_passed(&world.run(Role::Transit, Hook::Xdp, &frame)?, &frame, Hook::Xdp)?;
            let outcome = run(&mut world, &frame)?;
            ensure_same(&outcome.frame, &echo_answer(&asked))
                .with_context(|| format!("{client} {length} {:?}", outcome.counted))?;
            ensure!(outcome.verdict == 7 && outcome.counted.keys().eq([&Counter::FrontPings.name()]));
        }
    }
    // A wrong checksum stays wrong.
    let mut frame = echo(CLIENT, FRONT).bytes();
    frame[36] ^= 1;
    let outcome = run(&mut world, &frame)?;
    ensure!(outcome.frame[34] == 0 && checksum(&outcome.frame[34..]) != 0);
    Ok(())
}

#[test]
fn pings_to_nobodys_address_are_the_hosts() -> Result<()> {
    let mut world = World::new()?;
    let asked = echo(CLIENT, FRONT).bytes();
    ensure_passed(&run(&mut world, &asked)?, &asked, Hook::Tc)?;
    serve(&mut world, TCP, 8080, BACKENDS_FAR, DSR)?;
    front(3, OTHER_FRONT, TCP).by_fronts(&mut world.programs, 100, &[])?;
    let changed = |at: usize, bytes: &[u8]| {
        let mut frame = asked.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let frames = [
        echo(CLIENT, OTHER_FRONT).bytes(),
        echo(CLIENT, IpAddr::V4(ip(203, 0, 113, 82))).bytes(),
        echo(IpAddr::V4(ip(127, 0, 0, 1)), FRONT).bytes(),
        echo(IpAddr::V4(ip(224, 0, 0, 1)), FRONT).bytes(),
        echo(IpAddr::V4(ip(169, 254, 64, 1)), FRONT).bytes(),
        // An answer, another code, another message.
        changed(34, &[0, 0]),
        changed(34, &[8, 1]),
        changed(34, &[13, 0]),
        // A fragment, options, no ICMP header within the packet, and none within the frame.
        changed(20, &[0x20, 0]),
        changed(14, &[0x46]),
        changed(16, &[0, 24]),
        asked[..40].to_vec(),
        // Another host's, on a NIC that lets all frames through.
        changed(0, &[2, 2, 2, 2, 2, 9]),
    ];
    for (number, frame) in frames.iter().enumerate() {
        for hook in [Hook::Tc, Hook::Xdp] {
            ensure_passed(&world.run(Role::Transit, hook, frame)?, frame, hook)
                .with_context(|| format!("frame {number}"))?;
        }
    }
    world.programs.set("FRONTED", 0, 0_u32)?;
    ensure_passed(&run(&mut world, &asked)?, &asked, Hook::Tc)
}

#[test]
fn source_ranges_hold_for_icmp() -> Result<()> {
    for (segment, client) in [(request(TCP), CLIENT), (request6(TCP), CLIENT6)] {
        let mut world = World::new()?;
        serve(&mut world, TCP, 8080, BACKENDS_FAR, DSR)?;
        let front = segment.to.0;
        let range = |client| SourceKey {
            vni: 100_u32.to_be_bytes(),
            front: address(front),
            client: address(client),
        };
        let programs = &mut world.programs;
        programs.insert_source(range(front), 0, SourceEntry { admits: 0 })?;
        let ping = echo(client, front).bytes();
        // The client of the quoted answer counts, not the router.
        let error = error(&segment.answer([7; 6])).bytes();
        for frame in [&ping, &error] {
            ensure_dropped(&run(&mut world, frame)?, Counter::OutOfSourceRanges)?;
        }
        world
            .programs
            .insert_source(range(client), 128, SourceEntry { admits: 1 })?;
        ensure!(run(&mut world, &ping)?.verdict == 7);
        ensure_sent_on(&run(&mut world, &error)?, &error, SECOND, 100)?;
    }
    Ok(())
}

#[test]
fn a_front_sends_errors_to_the_connections_droplet() -> Result<()> {
    let mut world = World::new()?;
    let far = IpAddr::V4(ip(10, 0, 1, 60));
    let backends = [(FAR_BACKEND, 8080, SECOND), (far, 8080, THIRD)];
    front(1, FRONT, TCP).by_fronts(&mut world.programs, 100, &backends)?;
    let mut met = [0, 0];
    for port in 40000..40032 {
        let asked = request(TCP).sent_from((CLIENT, port));
        let there = run(&mut world, &outside(&asked))?.frame;
        let droplet = Ipv4Addr::new(there[30], there[31], there[32], there[33]);
        met[usize::from(droplet == THIRD)] += 1;
        let error = error(&asked.answer([7; 6])).bytes();
        ensure_passed(&world.run(Role::Transit, Hook::Xdp, &error)?, &error, Hook::Xdp)?;
        ensure_sent_on(&run(&mut world, &error)?, &error, droplet, 100)
            .with_context(|| format!("port {port}"))?;
    }
    ensure!(met.iter().all(|met| *met > 0), "{met:?}");
    front(2, FRONT6, UDP).by_fronts(&mut world.programs, 100, &[(FAR_BACKEND6, 8080, SECOND)])?;
    let error = error(&request6(UDP).answer([7; 6])).bytes();
    ensure_sent_on(&run(&mut world, &error)?, &error, SECOND, 100)
}

#[test]
fn a_backend_hears_errors_about_its_answers() -> Result<()> {
    each_request_of_a_backend_here(|world, asked, there| {
        let sent = there.answer(BOUNCED.mac());
        let left = sent.sent_from((asked.to.0, 443));
        let error = error(&left);
        let frames = [error.bytes(), around(SECOND, 100, &error.bytes())];
        arrive(world, SECOND, 100, asked)?;
        for frame in &frames {
            // It would be about an answer that nobody has sent.
            ensure_dropped(&run(world, frame)?, Counter::FrontErrorUnknown)?;
        }
        ensure_left(&send(world, BOUNCED.index, &sent)?, &left)?;
        let before = arriving(world, asked)?;
        for frame in &frames {
            ensure_passed(&world.run(Role::Transit, Hook::Xdp, frame)?, frame, Hook::Xdp)?;
            ensure_error_delivered(&run(world, frame)?, &delivered(&error, &sent))?;
        }
        ensure!(
            arriving(world, asked)? == before,
            "an error is no packet of its connection"
        );
        Ok(())
    })
}

#[test]
fn an_error_names_the_port_that_the_backend_sees() -> Result<()> {
    for protocol in [TCP, UDP] {
        let mut world = World::new()?;
        let backend = [(HERE_BACKEND, 8080, HERE)];
        for (id, address) in [(1, FRONT), (2, OTHER_FRONT)] {
            front(id, address, protocol).by_fronts(&mut world.programs, 100, &backend)?;
        }
        arrive(&mut world, SECOND, 100, &request(protocol))?;
        let second = request(protocol).sent_to((OTHER_FRONT, 443));
        let port = port_of(&arrive(&mut world, SECOND, 100, &second)?);
        ensure!(port >= 61000, "port {port}");
        let seen = second.sent_from((CLIENT, port)).sent_to((HERE_BACKEND, 8080));
        let sent = seen.answer(BOUNCED.mac());
        let left = sent.sent_from((OTHER_FRONT, 443)).sent_to((CLIENT, 40000));
        ensure_left(&send(&mut world, BOUNCED.index, &sent)?, &left)?;
        let error = error(&left);
        let outcome = run(&mut world, &around(SECOND, 100, &error.bytes()))?;
        ensure_error_delivered(&outcome, &delivered(&error, &sent))?;
    }
    Ok(())
}

/// Returns a world with a connection of VPC 100 to a backend here, and the answer as it left.
fn connected() -> Result<(World, Segment)> {
    let mut world = World::new()?;
    serve(&mut world, TCP, 8080, BACKENDS_HERE, DSR)?;
    let asked = request(TCP);
    arrive(&mut world, SECOND, 100, &asked)?;
    let sent = asked.sent_to((HERE_BACKEND, 8080)).answer(BOUNCED.mac());
    let left = sent.sent_from((FRONT, 443));
    ensure_left(&send(&mut world, BOUNCED.index, &sent)?, &left)?;
    Ok((world, left))
}

#[test]
fn what_is_no_error_about_an_answer_reaches_nobody() -> Result<()> {
    let (mut world, left) = connected()?;
    let right = error(&left);
    let kind = |kind: [u8; 2]| Message {
        kind,
        ..right.clone()
    };
    let about = |segment: &Segment| Message {
        body: quote(segment),
        ..right.clone()
    };
    let body = |at: usize, bytes: &[u8]| {
        let mut changed = right.clone();
        changed.body[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let cut = Message {
        body: right.body[..24].to_vec(),
        ..right.clone()
    };
    let (whole, unserved) = (right.bytes(), left.sent_from((FRONT, 444)));
    // Each as a front sends it here is dropped. From outside it is the host's.
    let forged = [
        ("redirect", kind([5, 1]).bytes()),
        ("echo", kind([0, 0]).bytes()),
        (
            "another's answer",
            about(&left.sent_from((OTHER_FRONT, 443))).bytes(),
        ),
        ("a port without front", about(&unserved).bytes()),
        ("a quoted fragment", body(6, &[0x20, 0]).bytes()),
        ("quoted options", body(0, &[0x46]).bytes()),
        ("quoted ICMP", body(9, &[1]).bytes()),
        ("a short quote", cut.bytes()),
        ("a short frame", whole[..whole.len() - 6].to_vec()),
    ];
    for (what, frame) in &forged {
        ensure_dropped(
            &run(&mut world, &around(SECOND, 100, frame))?,
            Counter::FrontErrorUnknown,
        )
        .context(*what)?;
        ensure_passed(&run(&mut world, frame)?, frame, Hook::Tc).context(*what)?;
    }
    // Of a client that has no connection.
    let stray = about(&left.sent_to((CLIENT, 40001))).bytes();
    for frame in [stray.clone(), around(SECOND, 100, &stray)] {
        ensure_dropped(&run(&mut world, &frame)?, Counter::FrontErrorUnknown)?;
    }
    ensure!(arriving(&world, &request(TCP).sent_from((CLIENT, 40001))).is_err());
    let all = EndpointKey {
        vni: 100,
        address: ALL_CONNECTIONS,
    };
    ensure!(world.programs.get::<_, u32>("SHARES", &all)? == 2);
    Ok(())
}

#[test]
fn an_error_enters_no_vpc_but_its_connections() -> Result<()> {
    let (mut world, left) = connected()?;
    let right = error(&left);
    let in_other = around(SECOND, 103, &right.bytes());
    ensure_dropped(&run(&mut world, &in_other)?, Counter::FrontErrorUnknown)?;
    let of_nobody = around(ip(192, 0, 2, 99), 100, &right.bytes());
    ensure_dropped(&run(&mut world, &of_nobody)?, Counter::UnknownDroplet)?;
    // Nobody outside speaks as a pod of the VPC, or as a node.
    let spoofed = |from| {
        Message {
            from,
            ..right.clone()
        }
        .bytes()
    };
    let as_pod = spoofed(TENANT.address.into());
    for frame in [as_pod.clone(), around(SECOND, 100, &as_pod)] {
        ensure_dropped(&run(&mut world, &frame)?, Counter::SourceMismatch)?;
    }
    let as_node = spoofed(SECOND.into());
    let in_tunnel = around(SECOND, 100, &as_node);
    ensure_dropped(&run(&mut world, &in_tunnel)?, Counter::SourceMismatch)?;
    ensure_passed(&run(&mut world, &as_node)?, &as_node, Hook::Tc)?;
    // A wrong checksum stays wrong.
    let mut wrong = right.bytes();
    wrong[36] ^= 1;
    let outcome = run(&mut world, &wrong)?;
    ensure!(outcome.counted.keys().eq([&Counter::FrontErrors.name()]));
    ensure!(checksum(&outcome.frame[34..]) != 0 && checksum(&outcome.frame[14..34]) == 0);
    // Without its endpoint the connection is nobody's.
    world.programs.remove_local(key(100, BOUNCED.address))?;
    let frame = around(SECOND, 100, &right.bytes());
    ensure_dropped(&run(&mut world, &frame)?, Counter::FrontErrorUnknown)
}

#[test]
fn policies_judge_the_client_of_an_error() -> Result<()> {
    let mut world = World::new()?;
    // SPREAD has an ingress set, which allows everything.
    let backend = (SPREAD.address.into(), 8080);
    front(1, FRONT, TCP).by_fronts(&mut world.programs, 103, &[(backend.0, backend.1, HERE)])?;
    arrive(&mut world, SECOND, 103, &request(TCP))?;
    let sent = request(TCP).sent_to(backend).answer(SPREAD.mac());
    let left = sent.sent_from((FRONT, 443));
    ensure_left(&send(&mut world, SPREAD.index, &sent)?, &left)?;
    let error = error(&left).bytes();
    let frames = [error.clone(), around(SECOND, 103, &error)];
    for frame in &frames {
        let outcome = run(&mut world, frame)?;
        ensure!(outcome.counted.keys().eq([&Counter::FrontErrors.name()]));
    }
    deny_clients_of_spread(&mut world)?;
    for frame in &frames {
        ensure_dropped(&run(&mut world, frame)?, Counter::PolicyIngress)?;
    }
    Ok(())
}

#[test]
fn errors_go_where_their_connection_began() -> Result<()> {
    let mut world = World::new()?;
    let (former, now) = (front(1, FRONT, TCP), front(2, FRONT, TCP));
    former.by_fronts(&mut world.programs, 100, &[(FAR_BACKEND, 8080, SECOND)])?;
    now.by_fronts(&mut world.programs, 100, &[(HERE_BACKEND, 8080, HERE)])?;
    now.was(&mut world.programs, &former)?;
    let error = error(&request(TCP).with_flags(GOES_ON).answer([7; 6])).bytes();
    // The former backend's droplet may know the connection.
    let mut frame = around(THIRD, 100, &error);
    ensure_passed_on(&run(&mut world, &frame)?, SECOND, 1)?;
    let at_front = run(&mut world, &error)?;
    ensure!(at_front.frame[30..34] == SECOND.octets() && at_front.frame[59] == 1);
    // Asked in vain, this droplet asks nobody.
    for class in [1, 2] {
        frame[59] = class;
        ensure_dropped(&run(&mut world, &frame)?, Counter::FrontErrorUnknown)?;
    }
    Ok(())
}

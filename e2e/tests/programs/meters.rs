//! Meters: what an endpoint sends, what its VPC sends out of the droplet, and the DSCP of outer headers.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    host_stack::MARK_REJECTION,
    meter::{MeterEntry, MeterKey},
    tables::{ATTACHMENT_METERED, ATTACHMENT_REJECTS, ATTACHMENT_VPC_METERED, AttachmentEntry, outer_dscp},
};

use crate::{
    frames::{Packet, Packet6},
    rows::{BOUNCED, Endpoint, GUEST, TENANT, ip, ip6},
    service_world::{Segment, TCP, UDP},
    world::{Hook, Outcome, Role, World},
};

/// So slow that no frame's time passes in a test: 1 kb/s.
const RATE: u64 = 125;
/// More frames than a burst has room for.
const MANY: u32 = 400;
const XDP_PASS: u32 = 2;

fn frame(endpoint: Endpoint, last: u8) -> Vec<u8> {
    let packet = Packet::udp(endpoint.mac(), endpoint.address, ip(10, 0, 1, last));
    packet.carrying(17, &[0; 1200]).bytes()
}

/// A pod on this droplet, and one on another.
const HERE: u8 = 12;
const ELSEWHERE: u8 = 50;

fn change(world: &mut World, endpoint: Endpoint, change: impl Fn(&mut AttachmentEntry)) -> Result<()> {
    let interface = world.interfaces[usize::from(endpoint.index)];
    let mut entry: AttachmentEntry = world.programs.get("ATTACHMENTS", &interface)?;
    change(&mut entry);
    world.programs.insert("ATTACHMENTS", interface, entry)
}

fn meter(world: &mut World, key: MeterKey) -> Result<()> {
    world.programs.insert("METERS", key, MeterEntry::new(RATE))
}

fn send(world: &mut World, endpoint: Endpoint, last: u8) -> Result<Outcome> {
    let frame = frame(endpoint, last);
    world.run(Role::Agent(endpoint.index), Hook::Tc, &frame)
}

/// Sends frames until one is too much, and returns how many were not.
fn until_exceeded(world: &mut World, endpoint: Endpoint, last: u8) -> Result<u32> {
    for number in 0..MANY {
        if send(world, endpoint, last)?
            .counted
            .contains_key(Counter::RateExceeded.name())
        {
            return Ok(number);
        }
    }
    anyhow::bail!("nothing is too much")
}

fn is_sent(world: &mut World, endpoint: Endpoint, last: u8) -> Result<bool> {
    let counted = send(world, endpoint, last)?.counted;
    Ok(!counted.contains_key(Counter::RateExceeded.name()))
}

#[test]
fn an_endpoint_sends_a_burst_and_then_its_rate() -> Result<()> {
    let mut world = World::new()?;
    world.enter()?;
    let interface = world.interfaces[usize::from(TENANT.index)];
    let key = MeterKey::of_endpoint(interface);
    meter(&mut world, key)?;
    // Without the flag there is no look-up.
    for _ in 0..MANY {
        ensure!(is_sent(&mut world, TENANT, ELSEWHERE)?);
    }
    ensure!(world.programs.get::<_, MeterEntry>("METERS", &key)?.next == 0);
    change(&mut world, TENANT, |entry| entry.flags = ATTACHMENT_METERED)?;
    // 256 KiB of frames of 1234 bytes, and the last one begins within them.
    let passed = until_exceeded(&mut world, TENANT, ELSEWHERE)?;
    ensure!((213..=214).contains(&passed), "{passed}");
    // To every destination, also to this droplet and to the node.
    ensure!(!is_sent(&mut world, TENANT, HERE)?);
    ensure!(is_sent(&mut world, GUEST, ELSEWHERE)?, "another endpoint");
    let late: MeterEntry = world.programs.get("METERS", &key)?;
    let later = MeterEntry {
        next: late.next - 10 * 1_000_000_000,
        ..late
    };
    world.programs.insert("METERS", key, later)?;
    // A frame takes 9.9 seconds.
    ensure!(is_sent(&mut world, TENANT, HERE)?);
    ensure!(!is_sent(&mut world, TENANT, HERE)?);
    // Transit's answers in its name are not its own.
    change(&mut world, TENANT, |entry| entry.flags |= ATTACHMENT_REJECTS)?;
    world.mark = MARK_REJECTION;
    ensure!(is_sent(&mut world, TENANT, HERE)?);
    Ok(())
}

#[test]
fn a_vpc_sends_its_rate_out_of_the_droplet() -> Result<()> {
    let mut world = World::new()?;
    world.enter()?;
    meter(&mut world, MeterKey::of_vpc(TENANT.vni))?;
    for endpoint in [TENANT, BOUNCED] {
        change(&mut world, endpoint, |entry| entry.flags = ATTACHMENT_VPC_METERED)?;
    }
    for _ in 0..MANY {
        ensure!(is_sent(&mut world, TENANT, HERE)?, "within the droplet");
    }
    // With the outer headers a frame has 50 bytes more.
    let passed = until_exceeded(&mut world, TENANT, ELSEWHERE)?;
    ensure!((205..=206).contains(&passed), "{passed}");
    ensure!(BOUNCED.vni == TENANT.vni && !is_sent(&mut world, BOUNCED, ELSEWHERE)?);
    ensure!(is_sent(&mut world, TENANT, HERE)?);
    // What an endpoint may not send itself takes nothing of its VPC's.
    let key = MeterKey::of_vpc(TENANT.vni);
    let before: MeterEntry = world.programs.get("METERS", &key)?;
    let interface = world.interfaces[usize::from(TENANT.index)];
    let exceeded = MeterEntry {
        rate: RATE,
        next: u64::MAX,
    };
    world
        .programs
        .insert("METERS", MeterKey::of_endpoint(interface), exceeded)?;
    let both = ATTACHMENT_METERED | ATTACHMENT_VPC_METERED;
    change(&mut world, TENANT, |entry| entry.flags = both)?;
    world.programs.insert("METERS", key, MeterEntry::new(RATE))?;
    ensure!(!is_sent(&mut world, TENANT, ELSEWHERE)?);
    let after: MeterEntry = world.programs.get("METERS", &key)?;
    ensure!(before.next != 0 && after.next == 0);
    Ok(())
}

/// Returns the bytes that a meter counts of a frame, which the agent handles twice.
fn counted(world: &mut World, key: MeterKey, segment: &Segment, size: u32) -> Result<u64> {
    let rate = 125_000;
    world.programs.insert("METERS", key, MeterEntry::new(rate))?;
    let mut next = [0; 2];
    for next in &mut next {
        world.run_segmented(Role::Agent(TENANT.index), Hook::Tc, &segment.bytes(), size)?;
        *next = world.programs.get::<_, MeterEntry>("METERS", &key)?.next;
    }
    // The first one finds an idle meter.
    Ok((next[1] - next[0]) * rate / 1_000_000_000)
}

#[test]
fn a_frame_counts_as_the_packets_it_is_sent_as() -> Result<()> {
    let mut world = World::new()?;
    let own = MeterKey::of_endpoint(world.interfaces[usize::from(TENANT.index)]);
    let of_vpc = MeterKey::of_vpc(TENANT.vni);
    change(&mut world, TENANT, |entry| {
        entry.flags = ATTACHMENT_METERED | ATTACHMENT_VPC_METERED;
    })?;
    let v4 = (
        IpAddr::from(TENANT.address),
        IpAddr::from(ip(10, 0, 1, ELSEWHERE)),
    );
    let v6 = (IpAddr::from(TENANT.v6), IpAddr::from(ip6(0, 1, 0x50)));
    for (protocol, (from, to), headers) in [
        (TCP, v4, 14 + 20 + 20),
        (TCP, v6, 14 + 40 + 20),
        (UDP, v4, 14 + 20 + 8),
        (UDP, v6, 14 + 40 + 8),
    ] {
        let mut segment = Segment::new(protocol, TENANT.mac(), (from, 40000), (to, 80));
        segment.payload = vec![0; 1200];
        for (size, packets) in [(0, 1), (1200, 1), (600, 2), (500, 3), (1, 1200)] {
            let expected = 1200 + packets * headers;
            let sent = counted(&mut world, own, &segment, size)?;
            ensure!(
                sent == expected,
                "{protocol} {from} by {size}: {sent} of {expected}"
            );
            let left = counted(&mut world, of_vpc, &segment, size)?;
            let expected = expected + packets * 50;
            ensure!(
                left == expected,
                "{protocol} {from} by {size}: {left} of {expected}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_vpc_is_charged_for_what_leaves() -> Result<()> {
    let mut world = World::new()?;
    let key = MeterKey::of_vpc(TENANT.vni);
    change(&mut world, TENANT, |entry| entry.flags = ATTACHMENT_VPC_METERED)?;
    for (to, size, reason) in [
        (ip(8, 8, 8, 8), 1200, Counter::OutsideVpc),
        (ip(10, 0, 1, ELSEWHERE), 1480, Counter::TooBigAnswered),
    ] {
        meter(&mut world, key)?;
        let packet = Packet::udp(TENANT.mac(), TENANT.address, to);
        let frame = packet.carrying(17, &vec![0; size]).bytes();
        let counted = world.run(Role::Agent(TENANT.index), Hook::Tc, &frame)?.counted;
        ensure!(counted.contains_key(reason.name()), "{counted:?}");
        ensure!(
            world.programs.get::<_, MeterEntry>("METERS", &key)?.next == 0,
            "{to}"
        );
    }
    Ok(())
}

#[test]
fn xdp_leaves_what_is_metered_to_tc() -> Result<()> {
    let mut world = World::new()?;
    let frame = frame(TENANT, ELSEWHERE);
    let key = MeterKey::of_endpoint(world.interfaces[usize::from(TENANT.index)]);
    meter(&mut world, key)?;
    for flag in [ATTACHMENT_METERED, ATTACHMENT_VPC_METERED] {
        change(&mut world, TENANT, |entry| entry.flags = flag)?;
        let outcome = world.run(Role::Agent(TENANT.index), Hook::Xdp, &frame)?;
        ensure!(outcome.verdict == XDP_PASS && outcome.counted.is_empty());
        ensure!(outcome.frame == frame);
    }
    ensure!(world.programs.get::<_, MeterEntry>("METERS", &key)?.next == 0);
    Ok(())
}

#[test]
fn outer_headers_have_the_dscp_of_their_vpc() -> Result<()> {
    let mut world = World::new()?;
    // DSCP 10, and the mark ECT(0).
    let inner = 10 << 2 | 2;
    let mut v4 = Packet::udp(TENANT.mac(), TENANT.address, ip(10, 0, 1, ELSEWHERE));
    v4.traffic_class = inner;
    let mut v6 = Packet6::udp(TENANT.mac(), TENANT.v6, ip6(0, 1, 0x50));
    v6.traffic_class = inner;
    for (dscp, outer) in [
        (None, inner),
        (Some(0), 2),
        (Some(46), 46 << 2 | 2),
        (Some(63), 0xfe),
    ] {
        change(&mut world, TENANT, |entry| entry.outer_dscp = outer_dscp(dscp))?;
        for hook in [Hook::Tc, Hook::Xdp] {
            for frame in [v4.bytes(), v6.bytes()] {
                let sent = world.run(Role::Agent(TENANT.index), hook, &frame)?;
                ensure!(
                    sent.counted.contains_key(Counter::SentDirect.name()),
                    "{:?}",
                    sent.counted
                );
                ensure!(sent.frame[15] == outer, "{dscp:?}: {}", sent.frame[15]);
                // The pod's own packet is as it was.
                ensure!(sent.frame.ends_with(&frame[14..]), "{dscp:?}");
            }
        }
    }
    Ok(())
}

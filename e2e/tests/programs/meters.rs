//! Meters: what an endpoint sends, what its VPC sends out of the droplet, and the DSCP of outer headers.

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    meter::{MeterEntry, MeterKey},
    tables::{ATTACHMENT_METERED, ATTACHMENT_VPC_METERED, AttachmentEntry, outer_dscp},
};

use crate::{
    frames::{Packet, Packet6},
    rows::{BOUNCED, Endpoint, GUEST, TENANT, ip, ip6},
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
    let passed = until_exceeded(&mut world, TENANT, ELSEWHERE)?;
    ensure!((213..=214).contains(&passed), "{passed}");
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

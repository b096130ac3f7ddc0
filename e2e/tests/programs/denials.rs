//! What policy denies: by which rule of which set, of which flow, and to whom it is told.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, MapData, RingBuf};
use thuban_common::{
    counters::Counter,
    policy::{
        Action, DENIAL_EGRESS, DENIAL_OUTSIDE, DENIALS_PER_WINDOW, Decision, DenialEntry, DenialKey,
        DenialRecord, GRANT_DENIES, Grant, GrantKey, LAST_POINT, ListEntry, ListKey, NO_RULE, PEER_OTHER,
        PEER_OUTSIDE, PortRange, Stamp, of_vpc, ranked,
    },
    tables::{CONFIG_TRACE, CONFIG_TRANSIT_AT_XDP},
};
use thuban_e2e::programs::{address, key};

use crate::{
    policy::{
        BY_FRIEND, BY_GUARDED, BY_STRANGER, EGRESS, FAMILIES, FRIEND, HOME, HOOKS, INGRESS, STRANGER, VNI,
        allow, arrive, ensure_in, grant, icmp, is_vouched, policed, raise_epoch, set_policies, stamp,
        to_home,
    },
    rows::{Endpoint, SPREAD, ip},
    service_world::{Segment, TCP, UDP, world},
    trace::take_denials,
    world::{Hook, Role, World},
};

/// The greatest time.
const FOR_EVER: u64 = u64::MAX;

fn denials(world: &World) -> Result<BTreeMap<DenialKey, DenialEntry>> {
    let map = world.programs.ebpf.map("DENIALS").context("DENIALS")?;
    let map: HashMap<&MapData, DenialKey, DenialEntry> = map.try_into()?;
    Ok(map.iter().collect::<Result<_, _>>()?)
}

fn take_told(world: &mut World) -> Result<Vec<DenialRecord>> {
    let map = world.programs.ebpf.map_mut("DENIED").context("DENIED")?;
    let mut ring: RingBuf<_> = map.try_into()?;
    let mut records = Vec::new();
    while let Some(item) = ring.next() {
        ensure!(item.len() == size_of::<DenialRecord>(), "{} bytes", item.len());
        // SAFETY: long enough, any bytes are a record, and the record is copied.
        #[allow(unsafe_code)]
        records.push(unsafe { item.as_ptr().cast::<DenialRecord>().read_unaligned() });
    }
    Ok(records)
}

fn interface(world: &World, of: Endpoint) -> u32 {
    world.interfaces[usize::from(of.index)]
}

/// Returns the key of what a set of [`VNI`] denies at [`HOME`].
fn at_home(world: &World, set: u32, rank: u16, flags: u16) -> DenialKey {
    DenialKey {
        set: of_vpc(VNI, set),
        interface: interface(world, HOME),
        rank,
        flags,
    }
}

/// Has the set deny the class by a rule of tier Admin, which has rank 7.
fn deny(world: &mut World, set: u32, class: u32) -> Result<()> {
    let range = PortRange {
        first: 0,
        last: LAST_POINT,
        decision: Decision {
            admin: ranked(7, Action::Deny),
            ..Decision::NONE
        }
        .word(),
    };
    let key = ListKey { list: 9, part: 0 };
    world.programs.insert("LISTS", key, ListEntry::new(&[range], 0))?;
    grant(world, set, of_vpc(VNI, class), 9, GRANT_DENIES)
}

fn forget(world: &mut World) -> Result<()> {
    for key in denials(world)?.keys() {
        world.programs.remove::<_, DenialEntry>("DENIALS", key)?;
    }
    Ok(())
}

/// Sends from elsewhere to [`HOME`], and returns the only denial.
fn denied(world: &mut World, who: Stamp, hook: Hook, (from, to): (IpAddr, IpAddr)) -> Result<DenialKey> {
    forget(world)?;
    let segment = to_home(TCP, (from, to), 80);
    arrive(world, hook, who, &segment.bytes())?;
    let mut known = denials(world)?;
    let (key, entry) = known.pop_first().context("nothing is denied")?;
    ensure!(known.is_empty());
    ensure!(entry.time != 0 && (entry.packets, entry.recent) == (1, 1));
    ensure!((entry.source, entry.destination) == (address(from), address(to)));
    let ports = [40_000_u16, 80].map(u16::to_be);
    ensure!((entry.ports, entry.protocol, entry.is_error) == (ports, TCP, 0));
    Ok(key)
}

#[test]
fn a_denial_names_the_set_the_rule_and_the_flow() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    allow(&mut world, INGRESS, FRIEND, (TCP, 80))?;
    deny(&mut world, INGRESS, 0x13)?;
    allow(&mut world, EGRESS, STRANGER, (TCP, 80))?;
    for (family, hook) in FAMILIES
        .into_iter()
        .flat_map(|family| HOOKS.map(|hook| (family, hook)))
    {
        let unknown = stamp(FRIEND, 0x99, 0);
        for (who, set, rank, flags) in [
            (BY_STRANGER, INGRESS, NO_RULE, 0),
            (stamp(0x13, 0, 0), INGRESS, 7, 0),
            (stamp(FRIEND, EGRESS, 0), EGRESS, NO_RULE, DENIAL_EGRESS),
            (unknown, 0x99, NO_RULE, DENIAL_EGRESS),
        ] {
            let key = denied(&mut world, who, hook, family)?;
            ensure!(
                key == at_home(&world, set, rank, flags),
                "{who:?} {hook:?}: {key:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn what_passes_is_no_denial() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    for hook in HOOKS {
        allow(&mut world, INGRESS, FRIEND, (TCP, 80))?;
        raise_epoch(&mut world)?;
        let request = to_home(TCP, FAMILIES[0], 80);
        ensure_in(&arrive(&mut world, hook, BY_FRIEND, &request.bytes())?)?;
        ensure_in(&arrive(&mut world, hook, BY_GUARDED, &request.bytes())?)?;
        // Its answer is not vouched for any more. Whoever gets the answer judges it.
        grant(&mut world, INGRESS, of_vpc(VNI, FRIEND), 0, GRANT_DENIES)?;
        raise_epoch(&mut world)?;
        let answer = request.answer(HOME.mac()).bytes();
        ensure!(!is_vouched(&mut world, hook, &answer)?);
        ensure!(denials(&world)?.is_empty());
    }
    Ok(())
}

#[test]
fn packets_are_counted_and_each_second_shows_its_first() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    grant(&mut world, INGRESS, PEER_OTHER, 0, GRANT_DENIES)?;
    let key = at_home(&world, INGRESS, NO_RULE, 0);
    let send = |world: &mut World, port| {
        let frame = to_home(TCP, FAMILIES[0], port).bytes();
        arrive(world, Hook::Tc, BY_STRANGER, &frame)?;
        Ok::<DenialEntry, anyhow::Error>(denials(world)?[&key])
    };
    let first = send(&mut world, 80)?;
    let second = send(&mut world, 81)?;
    ensure!((second.packets, second.recent) == (2, 2));
    ensure!(second.ports == first.ports && second.time == first.time);
    let long_ago = DenialEntry {
        time: second.time.saturating_sub(2_000_000_000),
        ..second
    };
    world.programs.insert("DENIALS", key, long_ago)?;
    let third = send(&mut world, 82)?;
    ensure!((third.packets, third.recent) == (3, 1), "{third:?}");
    ensure!(third.ports[1] == 82_u16.to_be() && third.time > first.time);
    Ok(())
}

#[test]
fn denials_are_told_only_to_a_follower_and_at_a_pace() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    grant(&mut world, INGRESS, PEER_OTHER, 0, GRANT_DENIES)?;
    for hook in HOOKS {
        forget(&mut world)?;
        set_policies(&mut world, HOME, FRIEND, [INGRESS, 0])?;
        world.programs.set("FOLLOWED", 0, 0_u64)?;
        let frame = to_home(UDP, FAMILIES[0], 53).bytes();
        let send = |world: &mut World, egress_set| {
            arrive(world, hook, stamp(STRANGER, egress_set, 0), &frame)?;
            take_told(world)
        };
        ensure!(send(&mut world, 0)?.is_empty(), "nobody follows");
        world.programs.set("FOLLOWED", 0, 1_u64)?;
        ensure!(send(&mut world, 0)?.is_empty(), "nobody follows any more");
        world.programs.set("FOLLOWED", 0, FOR_EVER)?;
        set_policies(&mut world, HOME, FRIEND, [0, 0])?;
        let begun = Instant::now();
        let mut told = Vec::new();
        for _ in 0..DENIALS_PER_WINDOW + 4 {
            told.extend(send(&mut world, EGRESS)?);
        }
        ensure!(begun.elapsed() < Duration::from_secs(1), "too slow to be told");
        let packets: Vec<u64> = told.iter().map(|record| record.entry.packets).collect();
        let expected: Vec<u64> = (1..=u64::from(DENIALS_PER_WINDOW)).collect();
        ensure!(packets == expected, "{packets:?}");
        let by = at_home(&world, EGRESS, NO_RULE, DENIAL_EGRESS);
        ensure!(told.iter().all(|record| record.key == by));
        let last = told.last().context("nothing told")?.entry;
        ensure!((last.protocol, last.ports[1]) == (UDP, 53_u16.to_be()));
        let all = denials(&world)?[&by].packets;
        ensure!(all == u64::from(DENIALS_PER_WINDOW) + 4, "{all}");
        // A flood by one rule leaves room to others.
        ensure!(send(&mut world, 0x99)?.len() == 1);
    }
    Ok(())
}

#[test]
fn a_denial_that_cannot_be_told_is_counted() -> Result<()> {
    const MOST: usize = 10_000;
    let mut world = policed([INGRESS, 0], [0, 0])?;
    grant(&mut world, INGRESS, PEER_OTHER, 0, GRANT_DENIES)?;
    world.programs.set("FOLLOWED", 0, FOR_EVER)?;
    take_told(&mut world)?;
    let frame = to_home(UDP, FAMILIES[0], 53).bytes();
    let mut sent = 0;
    loop {
        // Each one is the first of its second.
        forget(&mut world)?;
        sent += 1;
        let outcome = arrive(&mut world, Hook::Tc, BY_STRANGER, &frame)?;
        if outcome.counted.contains_key(Counter::DenialsLost.name()) {
            break;
        }
        ensure!(sent < MOST, "nothing was lost of {sent} records");
    }
    let told = take_told(&mut world)?.len();
    ensure!(told + 1 == sent, "{told} of {sent} records");
    Ok(())
}

#[test]
fn on_the_way_out_questions_are_denials_and_answers_not() -> Result<()> {
    let mut world = world()?;
    set_policies(&mut world, SPREAD, FRIEND, [0, EGRESS])?;
    let closed = GrantKey {
        set: of_vpc(SPREAD.vni, EGRESS),
        peer: PEER_OUTSIDE,
    };
    let denies = Grant {
        list: 0,
        flags: GRANT_DENIES,
    };
    world.programs.insert("GRANTS", closed, denies.of(&closed))?;
    let by = DenialKey {
        set: closed.set,
        interface: interface(&world, SPREAD),
        rank: NO_RULE,
        flags: DENIAL_EGRESS | DENIAL_OUTSIDE,
    };
    let (from, to) = (IpAddr::V4(SPREAD.address), IpAddr::V4(ip(198, 51, 100, 9)));
    let segment = |protocol| Segment::new(protocol, SPREAD.mac(), (from, 40_000), (to, 80));
    let echo = |kind| icmp((from, to), SPREAD.mac(), kind, &[0, 7, 0, 1]);
    let mut count = 0;
    for (frame, is_question) in [
        (segment(TCP).bytes(), true),
        (segment(TCP).with_flags(0x12).bytes(), false),
        (segment(TCP).with_flags(0x10).bytes(), false),
        (segment(UDP).bytes(), true),
        (echo(8), true),
        (echo(0), false),
    ] {
        world.run(Role::Agent(SPREAD.index), Hook::Tc, &frame)?;
        count += u64::from(is_question);
        let known = denials(&world)?;
        ensure!(known.len() == 1 && known[&by].packets == count, "{known:?}");
    }
    Ok(())
}

#[test]
fn a_trace_says_which_rule_denied_its_packet() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    allow(&mut world, INGRESS, FRIEND, (TCP, 80))?;
    deny(&mut world, INGRESS, 0x13)?;
    world.configure_with(CONFIG_TRANSIT_AT_XDP | CONFIG_TRACE)?;
    world
        .programs
        .insert("TRACED", key(VNI, HOME.address), FOR_EVER)?;
    let frame = to_home(TCP, FAMILIES[0], 80).bytes();
    for hook in HOOKS {
        for (who, seen) in [
            (BY_STRANGER, (NO_RULE, INGRESS)),
            (stamp(0x13, 0, 0), (7, INGRESS)),
            (BY_FRIEND, (0, 0)),
            (stamp(FRIEND, 0x99, 0), (NO_RULE, 0x99)),
        ] {
            arrive(&mut world, hook, who, &frame)?;
            let records = take_denials(&mut world)?;
            ensure!(records == [seen], "{who:?} at {hook:?}: {records:?}");
        }
    }
    Ok(())
}

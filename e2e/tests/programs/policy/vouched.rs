//! Whose answers an agent vouches for: flows that policy let in, as long as policy lets them in.

use anyhow::{Context, Result, ensure};
use thuban_common::{
    counters::Counter,
    policy::{FLOWS_OF_VPC, FlowEntry, GRANT_DENIES, PEER_OTHER, STAMP_GUARDED, STAMP_REPLY, of_vpc},
    services::ALL_FLOWS,
    tables::EndpointKey,
};
use transitd::boot::monotonic;

use super::{
    BY_FRIEND, BY_GUARDED, EGRESS, FAMILIES, FRIEND, HOME, HOOKS, INGRESS, STRANGER, VNI, allow, arrive,
    ensure_in, ensure_out, flows, grant, is_vouched, policed, raise_epoch, stamp, to_home,
};
use crate::{
    service_world::{SCTP, TCP, UDP},
    world::{Hook, World},
};

#[test]
fn answers_to_a_guarded_client_are_vouched_for() -> Result<()> {
    for protocol in [TCP, UDP, SCTP] {
        let mut world = policed([0, 0], [0, 0])?;
        for (family, hook) in FAMILIES
            .into_iter()
            .flat_map(|family| HOOKS.map(|hook| (family, hook)))
        {
            let request = to_home(protocol, family, 80);
            let answer = request.answer(HOME.mac());
            let other = request.sent_to((family.1, 81)).answer(HOME.mac());
            ensure_in(&arrive(&mut world, hook, BY_FRIEND, &request.bytes())?)?;
            ensure!(
                !is_vouched(&mut world, hook, &answer.bytes())?,
                "an unguarded client needs nobody"
            );
            ensure_in(&arrive(&mut world, hook, BY_GUARDED, &request.bytes())?)?;
            ensure!(
                is_vouched(&mut world, hook, &answer.bytes())?,
                "{protocol} {family:?}"
            );
            ensure!(!is_vouched(&mut world, hook, &other.bytes())?, "another port");
            let flow = flows(&world)?.pop().context("no flow")?;
            world.programs.remove::<_, FlowEntry>("FLOWS", &flow.0)?;
            ensure!(!is_vouched(&mut world, hook, &answer.bytes())?, "forgotten");
        }
    }
    Ok(())
}

#[test]
fn answers_by_datagram_end_after_the_client() -> Result<()> {
    for (protocol, ends) in [(TCP, false), (SCTP, false), (UDP, true)] {
        let mut world = policed([0, 0], [0, 0])?;
        let request = to_home(protocol, FAMILIES[0], 80).bytes();
        let answer = to_home(protocol, FAMILIES[0], 80).answer(HOME.mac()).bytes();
        ensure_in(&arrive(&mut world, Hook::Tc, BY_GUARDED, &request)?)?;
        let age = |world: &mut World, seconds: u64| {
            let (key, mut entry) = flows(world)?.pop().context("no flow")?;
            entry.time = monotonic().as_nanos() as u64 - seconds * 1_000_000_000;
            world.programs.insert("FLOWS", key, entry)?;
            anyhow::Ok(entry.time)
        };
        let time = age(&mut world, 25)?;
        for _ in 0..2 {
            ensure!(is_vouched(&mut world, Hook::Tc, &answer)?, "{protocol}");
            let (_, entry) = flows(&world)?.pop().context("no flow")?;
            ensure!(entry.time == time, "an answer keeps no flow alive");
        }
        age(&mut world, 31)?;
        ensure!(is_vouched(&mut world, Hook::Tc, &answer)? != ends, "{protocol}");
        // The client goes on.
        ensure_in(&arrive(&mut world, Hook::Tc, BY_GUARDED, &request)?)?;
        ensure!(is_vouched(&mut world, Hook::Tc, &answer)?, "{protocol}");
    }
    Ok(())
}

#[test]
fn answers_of_an_endpoint_with_egress_rules_are_vouched_for() -> Result<()> {
    let mut world = policed([0, EGRESS], [0, 0])?;
    let request = to_home(TCP, FAMILIES[0], 80);
    ensure_in(&arrive(&mut world, Hook::Tc, BY_FRIEND, &request.bytes())?)?;
    ensure!(is_vouched(
        &mut world,
        Hook::Tc,
        &request.answer(HOME.mac()).bytes()
    )?);
    Ok(())
}

#[test]
fn a_vouched_packet_passes_unless_it_opens_a_connection() -> Result<()> {
    let vouched = stamp(STRANGER, EGRESS, STAMP_REPLY);
    for hook in HOOKS {
        let mut world = policed([INGRESS, 0], [0, 0])?;
        grant(&mut world, INGRESS, PEER_OTHER, 0, GRANT_DENIES)?;
        for flags in [0x12, 0x10, 0x11, 0x04] {
            let segment = to_home(TCP, FAMILIES[0], 80).with_flags(flags);
            ensure_in(&arrive(&mut world, hook, vouched, &segment.bytes())?)?;
        }
        for flags in [0x02, 0xc2] {
            let segment = to_home(TCP, FAMILIES[0], 80).with_flags(flags);
            let outcome = arrive(&mut world, hook, vouched, &segment.bytes())?;
            ensure_out(&outcome, Counter::PolicyIngress)?;
        }
        let datagram = to_home(UDP, FAMILIES[0], 80).bytes();
        ensure_in(&arrive(&mut world, hook, vouched, &datagram)?)?;
        let init = to_home(SCTP, FAMILIES[0], 80).bytes();
        ensure_out(&arrive(&mut world, hook, vouched, &init)?, Counter::PolicyIngress)?;
    }
    Ok(())
}

#[test]
fn a_connection_follows_a_change_at_its_next_packet() -> Result<()> {
    for hook in HOOKS {
        let mut world = policed([INGRESS, 0], [0, 0])?;
        allow(&mut world, INGRESS, FRIEND, (TCP, 80))?;
        let request = to_home(TCP, FAMILIES[0], 80);
        let answer = request.answer(HOME.mac()).bytes();
        let data = request.clone().with_flags(0x10).bytes();
        ensure_in(&arrive(&mut world, hook, BY_GUARDED, &request.bytes())?)?;
        ensure!(is_vouched(&mut world, hook, &answer)?);
        // A change that leaves the flow alone.
        raise_epoch(&mut world)?;
        ensure!(is_vouched(&mut world, hook, &answer)?);
        ensure_in(&arrive(&mut world, hook, BY_GUARDED, &data)?)?;
        // The sender's labels change.
        let other = stamp(STRANGER, 0, STAMP_GUARDED);
        ensure_out(&arrive(&mut world, hook, other, &data)?, Counter::PolicyIngress)?;
        ensure!(flows(&world)?.is_empty() && !is_vouched(&mut world, hook, &answer)?);
        // The sender gets egress rules, which this droplet doesn't know.
        ensure_in(&arrive(&mut world, hook, BY_GUARDED, &data)?)?;
        let limited = stamp(FRIEND, EGRESS, STAMP_GUARDED);
        ensure_out(&arrive(&mut world, hook, limited, &data)?, Counter::PolicyEgress)?;
        ensure!(flows(&world)?.is_empty() && !is_vouched(&mut world, hook, &answer)?);
        // The rule goes: first the server speaks, then the client.
        ensure_in(&arrive(&mut world, hook, BY_GUARDED, &data)?)?;
        grant(&mut world, INGRESS, of_vpc(VNI, FRIEND), 0, GRANT_DENIES)?;
        raise_epoch(&mut world)?;
        ensure!(!is_vouched(&mut world, hook, &answer)? && flows(&world)?.is_empty());
        ensure_out(
            &arrive(&mut world, hook, BY_GUARDED, &data)?,
            Counter::PolicyIngress,
        )?;
    }
    Ok(())
}

#[test]
fn a_vpc_without_room_for_flows_is_let_in_and_not_vouched_for() -> Result<()> {
    let mut world = policed([0, 0], [0, 0])?;
    let share = EndpointKey {
        vni: VNI,
        address: ALL_FLOWS,
    };
    let request = |port| to_home(TCP, FAMILIES[0], port);
    ensure_in(&arrive(&mut world, Hook::Tc, BY_GUARDED, &request(80).bytes())?)?;
    ensure!(world.programs.get::<_, u32>("SHARES", &share)? == 1);
    world.programs.insert("SHARES", share, FLOWS_OF_VPC)?;
    let outcome = arrive(&mut world, Hook::Tc, BY_GUARDED, &request(81).bytes())?;
    ensure!(outcome.counted.contains_key(Counter::PolicyUnvouched.name()));
    ensure_in(&outcome)?;
    let mut answer = request(81).answer(HOME.mac());
    ensure!(!is_vouched(&mut world, Hook::Tc, &answer.bytes())?);
    answer = request(80).answer(HOME.mac());
    ensure!(
        is_vouched(&mut world, Hook::Tc, &answer.bytes())?,
        "it has an entry"
    );
    Ok(())
}

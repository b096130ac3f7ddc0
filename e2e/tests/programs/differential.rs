//! Random frames through the programs and through their model: verdict, frame and counters must be the same.
//!
//! `THUBAN_DIFFERENTIAL` says how many frames, `THUBAN_SEED` repeats a run.

use std::{collections::BTreeMap, env, time::SystemTime};

use anyhow::{Context, Result, ensure};
use aya::maps::HashMap;
use thuban_common::{
    counters::Counter,
    policy::FlowEntry,
    services::{ALL_FLOWS, ConnectionKey, FragmentEntry, FragmentKey, QUOTA_FLOWS_HELD},
    tables::{EndpointKey, PathMtuEntry},
};

use crate::{
    fixture::judge,
    model::Model,
    random::Random,
    rows::DROPLETS,
    world::{Hook, Role, World},
};

/// Frames of a run if the environment sets no number.
const FRAMES: u64 = 100_000;
/// Frames between two looks at the counters, which take longer than a frame.
const BATCH: u64 = 128;
/// Frames between two worlds without learnt paths: otherwise all paths would soon be learnt.
const FORGET: u64 = 4096;

type Counts = BTreeMap<&'static str, u64>;

fn number(name: &str) -> Result<Option<u64>> {
    let Ok(text) = env::var(name) else {
        return Ok(None);
    };
    let number = text.parse().with_context(|| format!("{name}={text}"))?;
    Ok(Some(number))
}

/// Whether a frame can run. Test runs at tc refuse IP packets that are shorter than the header.
fn runs(hook: Hook, frame: &[u8]) -> bool {
    let least = match [frame[12], frame[13]] {
        [0x08, 0x00] => 34,
        [0x86, 0xdd] => 54,
        _ => 14,
    };
    hook == Hook::Xdp || frame.len() >= least
}

/// Runs a frame at both hooks and returns what the model counted.
fn compare(world: &mut World, model: &mut Model, role: Role, frame: &[u8]) -> Result<Vec<Counter>> {
    let mut counted = Vec::new();
    for hook in [Hook::Xdp, Hook::Tc] {
        if !runs(hook, frame) {
            continue;
        }
        let expect = match role {
            Role::Agent(index) => model.agent(index, hook, frame),
            Role::Transit => model.transit(hook, frame),
        };
        let said = || format!("{role:?} at {hook:?}, the model says {expect:02x?}: {frame:02x?}");
        let outcome = world.run_uncounted(role, hook, frame, 0).with_context(said)?;
        let counter = judge(&expect, hook, frame, &outcome)
            .with_context(|| format!("verdict {}", outcome.verdict))
            .with_context(said)?;
        counted.extend(counter);
        forget_fragments(world)?;
        forget_flows(world)?;
    }
    Ok(counted)
}

/// Forgets first fragments: the model knows none.
fn forget_fragments(world: &mut World) -> Result<()> {
    let map = world.programs.ebpf.map_mut("FRAGMENTS").context("FRAGMENTS")?;
    let mut fragments: HashMap<_, FragmentKey, FragmentEntry> = map.try_into()?;
    let keys: Vec<FragmentKey> = fragments.keys().collect::<Result<_, _>>()?;
    for key in keys {
        fragments.remove(&key)?;
    }
    Ok(())
}

/// Forgets the flows that policy let in, and who had how many of them: the model knows no answers. The agent of who
/// answers vouches for them, and such a packet makes no flow.
fn forget_flows(world: &mut World) -> Result<()> {
    let map = world.programs.ebpf.map_mut("FLOWS").context("FLOWS")?;
    let mut flows: HashMap<_, ConnectionKey, FlowEntry> = map.try_into()?;
    let keys: Vec<ConnectionKey> = flows.keys().collect::<Result<_, _>>()?;
    for key in &keys {
        flows.remove(key)?;
    }
    for vni in keys.iter().map(|key| key.vni) {
        // One frame makes one flow.
        let share = EndpointKey {
            vni,
            address: ALL_FLOWS,
        };
        world.programs.remove::<_, u32>("SHARES", &share)?;
        world.programs.set("QUOTAS", QUOTA_FLOWS_HELD, 0_u32)?;
    }
    Ok(())
}

/// Returns the counters of packets' ends.
fn ends(world: &World) -> Result<Counts> {
    let mut counters = world.programs.counters()?;
    for event in [Counter::DirectWanted, Counter::DirectPaced] {
        counters.remove(event.name());
    }
    Ok(counters)
}

fn add(counts: &mut Counts, counted: &[Counter]) {
    for counter in counted {
        *counts.entry(counter.name()).or_default() += 1;
    }
}

/// Returns the frame whose counters aren't the model's, found by running the batch once more.
fn find(world: &mut World, model: &mut Model, batch: &[(Role, Vec<u8>)]) -> Result<()> {
    for (role, frame) in batch {
        let mut counts = ends(world)?;
        add(&mut counts, &compare(world, model, *role, frame)?);
        let counted = ends(world)?;
        ensure!(
            counts == counted,
            "{role:?}: {counted:?} instead of {counts:?}: {frame:02x?}"
        );
    }
    Ok(())
}

fn forget(world: &mut World, model: &mut Model) {
    model.paths.clear();
    for droplet in DROPLETS {
        // There may be nothing learnt.
        let _ = world
            .programs
            .remove::<_, PathMtuEntry>("PATH_MTUS", &droplet.octets());
    }
}

#[test]
fn programs_do_what_their_model_does() -> Result<()> {
    let clock = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)?
        .as_nanos() as u64;
    let seed = number("THUBAN_SEED")?.unwrap_or(clock);
    let frames = number("THUBAN_DIFFERENTIAL")?.unwrap_or(FRAMES);
    println!("THUBAN_SEED={seed} THUBAN_DIFFERENTIAL={frames}");
    let mut random = Random::new(seed);
    let mut world = World::new()?;
    world.enter()?;
    let mut model = Model::new();
    let mut counts = Counts::new();
    let mut batch = Vec::new();
    for number in 1..=frames {
        let (role, frame) = random.frame();
        let counted =
            compare(&mut world, &mut model, role, &frame).with_context(|| format!("frame {number}"))?;
        add(&mut counts, &counted);
        batch.push((role, frame));
        if number % BATCH == 0 || number == frames {
            let is = ends(&world)?;
            if is != counts {
                find(&mut world, &mut model, &batch).with_context(|| format!("before frame {number}"))?;
            }
            ensure!(
                is == counts,
                "before frame {number}: {is:?} instead of {counts:?}"
            );
            batch.clear();
            world.programs.take_wanted()?;
        }
        if number % FORGET == 0 {
            forget(&mut world, &mut model);
        }
    }
    println!("{counts:#?}");
    // A generator that reaches little proves little.
    let unreached: Vec<&str> = Counter::ALL
        .iter()
        .map(|counter| counter.name())
        .filter(|name| !counts.contains_key(name) && !UNREACHABLE.contains(name))
        .collect();
    ensure!(
        frames < FRAMES || unreached.is_empty(),
        "no frame was counted as {unreached:?}"
    );
    Ok(())
}

/// Counters that no frame raises: events, failures of the world around, services and fronts, of which this world has
/// none, what it denies to nobody, rates, which it limits for nobody, what only packet sockets can ask of a NIC, and
/// records for readers, of which this world has none.
const UNREACHABLE: [&str; 31] = [
    "trace_lost",
    "denials_lost",
    "flows_over_budget",
    "flow_events_lost",
    "flow_table_full",
    "checksum_misplaced",
    "rate_exceeded",
    "direct_wanted",
    "direct_paced",
    "adjust_room_failed",
    "tunnel_segments",
    "no_config",
    "service_connections",
    "service_stateless",
    "service_refused",
    "service_unreadable",
    "no_backend",
    "service_collision",
    "service_port_fixed",
    "fragment_without_first",
    "policy_ingress",
    "policy_unvouched",
    "fronted",
    "front_delivered",
    "front_answered",
    "front_pings",
    "front_errors",
    "front_returned",
    "front_answer_unknown",
    "front_no_room",
    "out_of_source_ranges",
];

//! The programs under BPF_PROG_TEST_RUN: packet fixtures for every verdict and every reason to drop, at both hooks.
//! Needs root and the object that `cargo xtask build-ebpf` makes.

mod agent;
mod announcements;
mod answers;
mod connections;
mod denials;
mod differential;
mod discovery;
mod drops;
mod ecn;
mod egress;
mod fixture;
mod flow_events;
mod fragments;
mod frames;
mod front_icmp;
mod fronts;
mod ipv6;
mod ipv6_transit;
mod meters;
mod model;
mod model_agent;
mod model_policy;
mod model_transit;
mod policy;
mod probes;
mod random;
mod rejections;
mod reuse;
mod rows;
mod service_world;
mod services;
mod shares;
mod sources;
mod too_big;
mod trace;
mod transit;
mod world;

use anyhow::{Context, Result, ensure};
use thuban_common::counters::Counter;
use thuban_e2e::programs::Programs;

#[test]
fn every_program_passes_the_verifier_with_room_to_spare() -> Result<()> {
    let mut programs = Programs::load()?;
    let mut counts = Vec::new();
    for name in ["agent_tc", "transit_tc", "probe_tc"] {
        counts.push((name, programs.tc(name)?.info()?.verified_instruction_count()));
    }
    for name in ["agent_xdp", "transit_xdp", "xdp_pass"] {
        counts.push((name, programs.xdp(name)?.info()?.verified_instruction_count()));
    }
    for (name, count) in counts {
        let count = count.with_context(|| format!("no count for {name}"))?;
        println!("{name}: {count} instructions verified");
        // Where the kernel refuses the BTF, no function is global, and agent_tc costs 400,000.
        ensure!(count < 300_000, "{name}");
    }
    Ok(())
}

#[test]
fn every_counter_has_a_test() {
    let tests = [
        include_str!("agent.rs"),
        include_str!("announcements.rs"),
        include_str!("connections.rs"),
        include_str!("denials.rs"),
        include_str!("discovery.rs"),
        include_str!("ecn.rs"),
        include_str!("fixture.rs"),
        include_str!("flow_events.rs"),
        include_str!("fragments.rs"),
        include_str!("front_icmp.rs"),
        include_str!("fronts.rs"),
        include_str!("fronts/connections.rs"),
        include_str!("fronts/tunnel.rs"),
        include_str!("ipv6.rs"),
        include_str!("ipv6_transit.rs"),
        include_str!("meters.rs"),
        include_str!("policy.rs"),
        include_str!("policy/portless.rs"),
        include_str!("policy/vouched.rs"),
        include_str!("probes.rs"),
        include_str!("services.rs"),
        include_str!("shares.rs"),
        include_str!("sources.rs"),
        include_str!("too_big.rs"),
        include_str!("trace.rs"),
        include_str!("transit.rs"),
        include_str!("../datapath/checksums.rs"),
        include_str!("../datapath/paths.rs"),
        include_str!("../datapath/forwarders.rs"),
        include_str!("../datapath/isolation.rs"),
    ]
    .concat();
    // A comment tests nothing.
    let code = tests.lines().filter(|line| !line.trim_start().starts_with("//"));
    let tests = code.collect::<Vec<_>>().join("\n");
    let untested: Vec<&str> = Counter::ALL
        .iter()
        .filter(|counter| {
            !tests.contains(&format!("Counter::{counter:?}")) && !tests.contains(counter.name())
        })
        .map(|counter| counter.name())
        .collect();
    assert!(untested.is_empty(), "no test names {untested:?}");
}

//! Runs the cases on every card that takes transit, at every hook, and tells how each card took native XDP.

use std::{path::Path, time::Instant};

use anyhow::{Result, ensure};

use crate::{
    cases::{Bench, Outcome},
    machine::{Card, Machine},
    request::{Choice, Hooks},
    table,
};

/// What the driver must make of native XDP.
#[derive(Clone, Copy, Debug)]
enum Native {
    Taken,
    /// It takes the program and shows it no frame.
    Hidden,
    /// It refuses, with this in the text.
    Refused(&'static str),
}

/// What must become of a card.
struct Plan {
    card: Card,
    native: Native,
    /// Hooks and MTUs.
    runs: &'static [(Hooks, u32)],
}

const MTUS: [u32; 2] = [1500, 9000];
const ALL: [(Hooks, u32); 6] = [
    (Hooks::Xdp, 1500),
    (Hooks::XdpAgents, 1500),
    (Hooks::Tc, 1500),
    (Hooks::Aggregated, 1500),
    (Hooks::Xdp, 9000),
    (Hooks::Tc, 9000),
];
const BOTH: [(Hooks, u32); 2] = [(Hooks::Xdp, 1500), (Hooks::Aggregated, 1500)];
const XDP: [(Hooks, u32); 1] = [(Hooks::Xdp, 1500)];
/// What transitd makes where native XDP is refused.
const AT_TC: [(Hooks, u32); 1] = [(Hooks::Aggregated, 1500)];

fn plans() -> [Plan; 7] {
    let plan = |number: u8, name, device, tap_queues, native, runs| Plan {
        card: Card {
            name,
            mac: [2, 0x54, 0x68, 0, 0, number],
            device,
            tap_queues,
        },
        native,
        runs,
    };
    let legacy = ",disable-legacy=off,disable-modern=on,any_layout=off";
    let (taken, hidden) = (Native::Taken, Native::Hidden);
    let (apart, stay) = (Native::Refused("os error 22"), Native::Refused("os error 95"));
    [
        plan(1, "1 queue pair, no offloads", "", None, taken, &ALL),
        plan(
            2,
            "4 queue pairs, offloads",
            ",mq=on,vectors=10",
            Some(4),
            taken,
            &ALL,
        ),
        plan(
            3,
            "one buffer a frame, no offloads",
            ",mrg_rxbuf=off",
            None,
            taken,
            &XDP,
        ),
        plan(
            4,
            "one buffer a frame, offloads",
            ",mrg_rxbuf=off",
            Some(1),
            hidden,
            &BOTH,
        ),
        plan(
            5,
            "offloads stay on",
            ",ctrl_guest_offloads=off",
            Some(1),
            stay,
            &AT_TC,
        ),
        plan(6, "header apart", legacy, None, apart, &AT_TC),
        plan(
            7,
            "one buffer a frame, MTU 9000",
            ",mrg_rxbuf=off,host_mtu=9000",
            None,
            hidden,
            &BOTH,
        ),
    ]
}

/// A row of the last table.
pub struct Row {
    pub card: &'static str,
    pub mtu: u32,
    pub hooks: Hooks,
    pub outcome: Outcome,
}

/// Runs everything. Returns whether all passed.
pub fn run(kernel: &Path, root: &Path, only: Option<usize>) -> Result<bool> {
    let start = Instant::now();
    let plans = plans();
    let (cards, rest): (Vec<Card>, Vec<_>) = plans
        .into_iter()
        .map(|plan| (plan.card, (plan.native, plan.runs)))
        .unzip();
    let (mut machine, release) = Machine::boot(kernel, root, &cards)?;
    println!(
        "    the machine is up, after {:.0} s: kernel {release}",
        start.elapsed().as_secs_f32()
    );
    let (mut passed, mut failures) = (0, Vec::new());
    let mut rows = Vec::new();
    let mut choices = Vec::new();
    for (number, (card, (native, runs))) in cards.iter().zip(rest).enumerate() {
        if only.is_some_and(|only| only != number + 1) {
            continue;
        }
        for mtu in MTUS {
            let choice = machine.choose(card.mac, mtu)?;
            match judge(&choice, native) {
                Ok(()) => passed += 1,
                Err(error) => failures.push(format!("{}, MTU {mtu}, auto: {error:#}", card.name)),
            }
            choices.push((card.name, mtu, choice));
        }
        for &(hooks, mtu) in runs {
            let before = Instant::now();
            machine.begin(card.mac, hooks, mtu)?;
            let mut bench = Bench {
                machine: &mut machine,
                card: number,
                mac: card.mac,
                mtu,
                sees_frames: hooks.is_xdp() && matches!(native, Native::Taken),
            };
            let outcome = bench.run()?;
            machine.finish()?;
            println!(
                "    {}, MTU {mtu}, transit at {}: {} passed, {} failed, {:.1} s",
                card.name,
                hooks.name(),
                outcome.passed,
                outcome.failures.len(),
                before.elapsed().as_secs_f32()
            );
            passed += outcome.passed;
            for failure in &outcome.failures {
                failures.push(format!(
                    "{}, MTU {mtu}, transit at {}, {failure}",
                    card.name,
                    hooks.name()
                ));
            }
            rows.push(Row {
                card: card.name,
                mtu,
                hooks,
                outcome,
            });
        }
    }
    machine.end()?;
    table::print(&choices, &rows);
    println!("\non {release}, after {:.0} s:", start.elapsed().as_secs_f32());
    for failure in &failures {
        println!("FAILED {failure}");
    }
    println!("{passed} passed, {} failed", failures.len());
    Ok(failures.is_empty())
}

/// Checks what became of native XDP, and that `auto` follows it.
fn judge(choice: &Choice, native: Native) -> Result<()> {
    let Choice {
        refusal,
        hook,
        is_native,
        ..
    } = choice;
    let is_right = match (native, refusal) {
        (Native::Taken, None) => hook == "xdp" && *is_native,
        (Native::Hidden, None) => hook == "tc" && !is_native,
        (Native::Refused(should), Some(said)) => said.contains(should) && hook == "tc" && !is_native,
        _ => false,
    };
    ensure!(is_right, "{choice:?}, should be {native:?}");
    Ok(())
}

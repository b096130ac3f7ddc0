//! The simulator of the control plane: the real controllers against a fake API server and simulated droplets, in
//! virtual time, by random schedules that a seed repeats.
//!
//! `cargo xtask test --only simulator` runs two thousand of them, `--schedules N` more or less. By hand: `cargo test -p
//! thuban-operator --test simulator`, with `THUBAN_SCHEDULES=N` (100), `THUBAN_FIRST_SEED=S` (1);
//! `THUBAN_SIMULATOR_SEED=S` runs one and prints its trace. The seed decides everything, the order of hash maps too:
//! the same binary does the same again. Any change of code may give a seed another schedule. `THUBAN_SIMULATOR_TRIES=N`
//! runs a seed with N orders of hash maps, and so of tasks of one instant, until one fails. The trace of a schedule
//! that failed is also kept in a file. The seeds of `chosen.txt` run first and count, unless `THUBAN_FIRST_SEED` is
//! given.

// Helpers of tests: a failure that they find ends the test.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::struct_excessive_bools,
    clippy::needless_pass_by_value
)]

mod chance;
mod chosen;
mod cluster;
mod convergence;
mod deletions;
mod directed;
mod droplet;
mod faults;
mod invariants;
mod kind;
mod operators;
mod placement;
mod policies;
mod provisioned;
mod random;
mod restore;
mod schedule;
mod server;
mod services;
mod signal;
mod simulation;
mod store;
mod tables;
mod walk;
mod workflow;

use std::io::Write as _;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const SCHEDULES: u64 = 100;
/// Seeds whose schedules are run twice.
const REPEATED: u64 = 50;
const PROGRESS_EVERY: u64 = 1000;

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{variable}: expected a number, not {value:?}")),
    )
}

/// Prints a line past cargo's capture, because the run takes minutes.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Keeps the trace of a schedule that failed in a file.
fn keep(seed: impl std::fmt::Display, trace: &[String]) {
    let path = format!("{}/simulator-{seed}.txt", env!("CARGO_TARGET_TMPDIR"));
    if std::fs::write(&path, trace.join("\n")).is_ok() {
        say(&format!("seed {seed}: what happened is in {path}"));
    }
}

#[test]
fn the_control_plane_keeps_its_promises_whatever_happens() {
    if let Some(seed) = number("THUBAN_SIMULATOR_SEED") {
        let tries = number("THUBAN_SIMULATOR_TRIES").unwrap_or(1);
        let failure = (0..tries)
            .map(|order| schedule::run_in_order(seed, order))
            .find(|(violations, _)| !violations.is_empty());
        let (violations, trace) = failure.unwrap_or_else(|| schedule::run(seed));
        say(&trace.join("\n"));
        assert!(violations.is_empty(), "seed {seed}: {}", violations.join("; "));
        return;
    }
    let schedules = number("THUBAN_SCHEDULES").unwrap_or(SCHEDULES);
    let first = number("THUBAN_FIRST_SEED");
    let chosen = if first.is_none() {
        chosen::seeds()
    } else {
        Vec::new()
    };
    let first = first.unwrap_or(1);
    let seed_of = |number: u64| {
        let chosen_seed = chosen.get(number as usize).copied();
        chosen_seed.unwrap_or_else(|| first + number - chosen.len() as u64)
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let start = Instant::now();
    let (next, done, is_over) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let failures: Mutex<Vec<(u64, Vec<String>)>> = Mutex::default();
    let measures: Mutex<Vec<chosen::Measure>> = Mutex::default();
    let most = number("THUBAN_FAILURES").unwrap_or(5) as usize;
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= schedules {
                        return;
                    }
                    let seed = seed_of(number);
                    let (violations, trace) = schedule::run(seed);
                    measures.lock().unwrap().push(chosen::Measure::of(seed, &trace));
                    if !violations.is_empty() {
                        say(&format!("seed {seed}: {}", violations.join("; ")));
                        keep(seed, &trace);
                        let mut failures = failures.lock().unwrap();
                        failures.push((seed, violations));
                        is_over.store(failures.len() >= most, Ordering::Relaxed);
                    }
                    let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                    if done.is_multiple_of(PROGRESS_EVERY) {
                        let time = start.elapsed().as_secs_f32();
                        say(&format!("{done} of {schedules} schedules in {time:.0} s"));
                    }
                }
            });
        }
    });
    if let Some(path) = std::env::var_os("THUBAN_CHOSEN") {
        std::fs::write(path, chosen::choose(measures.into_inner().unwrap()))
            .expect("a file for THUBAN_CHOSEN");
    }
    let failures = failures.into_inner().unwrap();
    let done = done.into_inner();
    say(&format!(
        "{done} schedules from seed {first} in {:.1} s",
        start.elapsed().as_secs_f32()
    ));
    assert!(
        failures.is_empty(),
        "{} of {done} schedules failed, the first with THUBAN_SIMULATOR_SEED={}: {}",
        failures.len(),
        failures[0].0,
        failures[0].1.join("; ")
    );
}

/// Returns the trace that a separate process prints for a seed.
fn trace_elsewhere(seed: u64) -> String {
    let itself = std::env::current_exe().expect("a path");
    let output = Command::new(itself)
        .args(["--exact", "the_control_plane_keeps_its_promises_whatever_happens"])
        .arg("--nocapture")
        .env("THUBAN_SIMULATOR_SEED", seed.to_string())
        .output()
        .expect("another simulator");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn a_seed_does_the_same_again_byte_for_byte() {
    for seed in (1..=REPEATED).rev() {
        let (_, trace) = schedule::run(seed);
        assert!(trace.len() > 20, "seed {seed}: little happens: {trace:?}");
        let again = trace_elsewhere(seed);
        let again: Vec<&str> = again.lines().collect();
        let differs = trace.iter().zip(&again).find(|(one, other)| one != *other);
        if differs.is_some() || trace.len() != again.len() {
            keep(format!("again-{seed}"), &trace);
        }
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!(trace.len(), again.len(), "seed {seed}");
    }
}

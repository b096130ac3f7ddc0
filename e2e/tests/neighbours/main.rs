//! One VPC of a node does its worst to something that all VPCs share, while another one asks. Nothing of the other one
//! fails, and counters say that the attackers were held to their share. How long an answer takes does not matter.
//!
//! `cargo xtask bench neighbours` measures the same scenes. Needs root, and the object that `cargo xtask build-ebpf`
//! makes.

use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use thuban_e2e::bench::{neighbours, transitd::Parts};

/// Plays a scene on a node of its own.
fn play(scene: &str) -> Result<()> {
    neighbours::check(scene, &Parts::of_tests()?)
}

/// Plays a scene whose attackers send as fast as they can. Such scenes take turns: each one keeps the cores busy.
fn flood(scene: &str) -> Result<()> {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    play(scene)
}

#[test]
fn a_full_table_of_connections_moves_nobody_elses() -> Result<()> {
    flood("connections")
}

#[test]
fn a_flood_of_a_shared_service_leaves_others_ports() -> Result<()> {
    flood("shared-service")
}

#[test]
fn names_that_nobody_answers_silence_no_other_vpc() -> Result<()> {
    play("dns")
}

#[test]
fn names_that_nobody_answers_silence_no_other_pod() -> Result<()> {
    play("dns-of-one-vpc")
}

#[test]
fn a_scan_keeps_nobody_else_from_direct_paths() -> Result<()> {
    flood("scan")
}

#[test]
fn a_scan_keeps_nobody_elses_rows_from_the_stream() -> Result<()> {
    flood("stream")
}

#[test]
fn who_fills_tables_of_services_leaves_others_room() -> Result<()> {
    play("tables")
}

#[test]
fn changes_of_services_keep_nobody_else_waiting_for_ever() -> Result<()> {
    play("changes")
}

#[test]
fn changes_of_node_ports_keep_nobody_else_waiting_for_ever() -> Result<()> {
    play("node-ports")
}

#[test]
fn most_rules_and_denials_leave_others_connections() -> Result<()> {
    flood("policy-denials")
}

#[test]
fn who_fills_flows_leaves_others_connections() -> Result<()> {
    flood("policy-flows")
}

#[test]
fn every_scene_has_a_test() {
    let tests = include_str!("main.rs");
    for scene in neighbours::names() {
        assert!(tests.contains(&format!("(\"{scene}\")")), "{scene}");
    }
}

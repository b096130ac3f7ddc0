//! The benchmark of neighbours: one VPC attacks something that the tenants of a node share, and another one measures.
//!
//! Each round has a fresh node, with a real transitd, and three measurements: alone; beside attackers who send as many
//! packets that touch nothing shared (`control`); beside the attack. The attack's packets cost the machine's cores the
//! same in both of the latter, so their ratio shows what is shared. Nothing is passed or failed by time.
//!
//! The same scenes are tests at small size ([`check`]): there nothing of the tenant that measures may fail.

mod flood;
mod plot;
mod policies;
mod probe;
mod report;
mod scenes;
mod servers;
mod site;

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, ensure};

use super::{go_on, report::Session, transitd::Parts};
use report::Report;
use scenes::SCENES;

/// How long a person waits for an answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The amounts that are measured.
#[derive(Clone, Debug)]
pub struct Plan {
    pub rounds: usize,
    /// Length of each measurement.
    pub seconds: u64,
    /// How long an attempt waits for its answer.
    pub patience: Duration,
    /// VPCs that attack at the same time.
    pub attackers: u8,
    /// Packets a second of each pod that attacks.
    pub rate: u32,
    /// Scenes by name; all when empty.
    pub only: Vec<String>,
}

impl Plan {
    /// Returns the plan of tests: small, and on a busy machine an answer may take long. Twelve pods are enough to
    /// take more connections or flows than any table has room for.
    fn small() -> Self {
        Self {
            rounds: 1,
            seconds: 1,
            patience: Duration::from_secs(30),
            attackers: 6,
            rate: 5000,
            only: Vec::new(),
        }
    }
}

/// Measures, prints the table and writes `neighbours.json`, `neighbours.svg` and, if rsvg-convert is there,
/// `neighbours.png`.
pub fn run(plan: &Plan, parts: &Parts, folder: &Path) -> Result<()> {
    let session = Session::begin("neighbours", folder)?;
    let chosen: Vec<_> = SCENES
        .iter()
        .filter(|scene| plan.only.is_empty() || plan.only.iter().any(|name| name == scene.name))
        .collect();
    ensure!(
        !chosen.is_empty(),
        "--only: no scene of these names; there are {}",
        names().join(", ")
    );
    let mut report = Report::default();
    for round in 1..=plan.rounds {
        for scene in &chosen {
            go_on()?;
            let outcomes = scenes::play(scene, plan, parts)?;
            println!(
                "round {round} of {}: {}",
                plan.rounds,
                report::line(scene.name, &outcomes)
            );
            report.add(scene.name, outcomes);
        }
    }
    report.write(plan, &session)
}

/// Returns the names of all scenes.
pub fn names() -> Vec<&'static str> {
    SCENES.iter().map(|scene| scene.name).collect()
}

/// Plays a scene at small size, as a test. Returns an error if an attempt of the tenant that measures fails, or if
/// nothing says that the attackers were held to their share.
pub fn check(name: &str, parts: &Parts) -> Result<()> {
    let scene = SCENES.iter().find(|scene| scene.name == name);
    scenes::check(scene.context("no scene of this name")?, &Plan::small(), parts)
}

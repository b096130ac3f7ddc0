//! The benchmark of neighbours: one VPC attacks something that the tenants of a node share, and another one measures.
//!
//! Each round has a fresh node, with a real transitd, and three measurements: alone; beside attackers who send as many
//! packets that touch nothing shared (`control`); beside the attack. The attack's packets cost the machine's cores the
//! same in both of the latter, so their ratio shows what is shared. Nothing is passed or failed by time.

mod flood;
mod plot;
mod probe;
mod report;
mod scenes;
mod servers;
mod site;

use std::path::Path;

use anyhow::{Result, ensure};

use super::{go_on, report::Session, transitd::Parts};
use report::Report;
use scenes::SCENES;

/// The amounts that are measured.
#[derive(Clone, Debug)]
pub struct Plan {
    pub rounds: usize,
    /// Length of each measurement.
    pub seconds: u64,
    /// VPCs that attack at the same time.
    pub attackers: u8,
    /// Packets a second of each pod that attacks.
    pub rate: u32,
    /// Scenes by name; all when empty.
    pub only: Vec<String>,
}

/// Measures, prints the table and writes `neighbours.json`, `neighbours.svg` and, if rsvg-convert is there,
/// `neighbours.png`.
pub fn run(plan: &Plan, parts: &Parts, folder: &Path) -> Result<()> {
    let session = Session::begin("neighbours", folder)?;
    let chosen: Vec<_> = SCENES
        .iter()
        .filter(|scene| plan.only.is_empty() || plan.only.iter().any(|name| name == scene.name))
        .collect();
    let known = SCENES.map(|scene| scene.name).join(", ");
    ensure!(
        !chosen.is_empty(),
        "--only: no scene of these names; there are {known}"
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

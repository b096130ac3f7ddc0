//! The CNI benchmark: ADD and DEL of the real plugin with a real transitd, beside others' plugins and a bare veth pair.
//!
//! All contestants take turns, pod by pod and round by round, in the same namespaces of pods. The benchmark compares
//! ratios of medians within one run of this program. A plugin's time is the time that a runtime waits: from before its
//! process is made until it has ended and its answer is read. Nothing is passed or failed by time.

mod contestant;
mod link;
mod measure;
mod others;
mod plot;
mod report;
mod thuban;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::{float, go_on, plugin::Pod, report::Session, transitd};
use contestant::Contestant;
use link::{Link, LinkCommand};
use measure::Times;
use others::Other;
use report::Report;
use thuban::Thuban;

/// The amounts that are measured.
#[derive(Clone, Debug)]
pub struct Plan {
    pub runs: usize,
    /// Pods of a run, one after the other.
    pub single: usize,
    /// Rounds of a run, each with many pods at once.
    pub rounds: usize,
    pub at_once: usize,
    /// Pods that are attached when the daemon's memory is read.
    pub pods: usize,
    /// Contestants by name; all when empty.
    pub only: Vec<String>,
}

/// The programs that are run.
#[derive(Clone, Debug)]
pub struct Parts {
    pub own: transitd::Parts,
    /// Folder of ptp, bridge and host-local.
    pub others: PathBuf,
}

/// Measures, prints the table and writes `cni.json`, `cni.svg` and, if rsvg-convert is there, `cni.png`.
pub fn run(plan: &Plan, parts: &Parts, folder: &Path) -> Result<()> {
    let session = Session::begin("cni", folder)?;
    println!("setting up");
    let pods: Vec<Pod> = (0..plan.pods.max(plan.at_once))
        .map(Pod::new)
        .collect::<Result<_>>()?;
    let thuban = Thuban::up(parts, pods.len())?;
    let rivals: Vec<Box<dyn Contestant>> = vec![
        Box::new(Other::ptp(parts)?),
        Box::new(Other::bridge(parts)?),
        Box::new(Link::new()?),
        Box::new(LinkCommand::new()?),
    ];
    let mut contestants: Vec<&dyn Contestant> = vec![&thuban];
    contestants.extend(rivals.iter().map(AsRef::as_ref));
    contestants.retain(|c| plan.only.is_empty() || plan.only.iter().any(|name| name == c.name()));
    ensure!(!contestants.is_empty(), "nothing of these names is known");

    let mut times = Times::default();
    for contestant in &contestants {
        // The first pod of each contestant loads programs, fills caches and makes the bridge.
        measure::one(*contestant, &pods[0]).with_context(|| contestant.name())?;
    }
    for run in 0..plan.runs {
        for _ in 0..plan.single {
            for contestant in &contestants {
                go_on()?;
                let [add, del] = measure::one(*contestant, &pods[0]).with_context(|| contestant.name())?;
                times.add(contestant.name(), "add", 1, run, &[add]);
                times.add(contestant.name(), "del", 1, run, &[del]);
            }
        }
        for _ in 0..plan.rounds {
            for contestant in &contestants {
                go_on()?;
                let [adds, dels] = measure::at_once(*contestant, &pods[..plan.at_once])
                    .with_context(|| contestant.name())?;
                times.add(contestant.name(), "add", plan.at_once, run, &adds);
                times.add(contestant.name(), "del", plan.at_once, run, &dels);
            }
        }
        println!("run {} of {}: {}", run + 1, plan.runs, times.line(run));
    }
    let mut report = Report::new(&times, plan.at_once);
    memory(&thuban, &pods, plan, &mut report)?;
    report.add("plugin_size_mib", "MiB", size_mib(&parts.own.plugin)?);
    report.write(&times, plan, &session)
}

/// Measures the daemon's memory with nothing attached, with all pods, and after they are gone.
fn memory(thuban: &Thuban, pods: &[Pod], plan: &Plan, report: &mut Report) -> Result<()> {
    let pods = &pods[..plan.pods.min(pods.len())];
    report.add("transitd_rss_mib_0_pods", "MiB", thuban.memory_mib()?);
    for pod in pods {
        thuban.add(pod)?;
    }
    report.add("transitd_rss_mib_with_pods", "MiB", thuban.memory_mib()?);
    for pod in pods {
        thuban.del(pod)?;
    }
    report.add("transitd_rss_mib_afterwards", "MiB", thuban.memory_mib()?);
    Ok(())
}

fn size_mib(file: &Path) -> Result<f64> {
    let size = std::fs::metadata(file)
        .with_context(|| file.display().to_string())?
        .len();
    Ok(float(size) / f64::from(1 << 20))
}

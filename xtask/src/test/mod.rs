//! `cargo xtask test`: every test there is, in groups that all run even when one fails, and one sum at the end.
//!
//! A test that failed only because it waited too long is run once more by itself, for machines of tests are busy, and the
//! sum counts it. Whatever else fails has failed.

mod binaries;
mod output;
mod times;

use std::{
    fs,
    io::Write,
    process::{Command, ExitCode},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use thuban_cluster::Cluster;

use self::{binaries::Binary, output::Sum, times::Times};
use crate::{
    build::{self, root, run_command, step},
    check, cluster, cni_tools, deps, diagnostics, dns, ebpf, install, removal,
};

const CLUSTER: &str = "test";
/// Test targets that need root, a cluster, or both. All others are the group `unit`.
const PROGRAMS: &str = "programs";
const NETNS: [&str; 2] = ["netns", "datapath"];
const E2E: &str = "cluster";
const SIMULATOR: &str = "simulator";
const GROUPS: [&str; 6] = ["check", "unit", SIMULATOR, "programs", "netns", "e2e"];
/// More of them: `cargo xtask soak --only simulator`.
pub const SCHEDULES: u64 = 2_000;

/// Runs all groups, or only one. The last line of output is `N passed, N failed`.
pub fn run(only: Option<&str>, schedules: u64) -> Result<ExitCode> {
    if let Some(group) = only.filter(|group| !GROUPS.contains(group)) {
        bail!(
            "no group of tests is called {group}: take one of {}",
            GROUPS.join(", ")
        );
    }
    if !nix::unistd::geteuid().is_root() {
        bail!("the tests make network namespaces, load eBPF programs and start a cluster: run them as root");
    }
    let mut times = Times::default();
    times.stage("packages of the system", |_| deps::ensure())?;
    times.stage("eBPF programs", |_| step("eBPF programs", ebpf::build))?;
    let binaries = times.stage("build of tests", |_| step("tests", binaries::build))?;
    let mut total = Sum::default();
    let mut summary = Vec::new();
    for group in GROUPS {
        if only.is_some_and(|only| only != group) {
            continue;
        }
        println!("\n==> tests: {group}");
        let start = Instant::now();
        let sum = times.stage(group, |times| run_group(group, &binaries, schedules, times))?;
        summary.push(format!(
            "{group:<10}{:>5} passed {:>4} failed {:>4} ignored {:>7.1} s{}",
            sum.passed,
            sum.failed,
            sum.ignored,
            start.elapsed().as_secs_f32(),
            if sum.again > 0 {
                format!(", {} when run again", sum.again)
            } else {
                String::new()
            }
        ));
        total.add(sum);
    }
    times.tell()?;
    println!("\n{}\n", summary.join("\n"));
    for (name, said) in &total.failures {
        println!("FAILED {name}: {said}");
    }
    println!("{} passed, {} failed", total.passed, total.failed);
    std::io::stdout().flush()?;
    Ok(if total.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn run_group(group: &str, binaries: &[Binary], schedules: u64, times: &mut Times) -> Result<Sum> {
    let is_special = |binary: &&Binary| {
        let names = [PROGRAMS, E2E, SIMULATOR].into_iter().chain(NETNS);
        names.into_iter().any(|name| binary.is_test(name))
    };
    let named = |names: &[&str]| {
        let chosen = binaries
            .iter()
            .filter(|binary| names.iter().any(|name| binary.is_test(name)));
        chosen.collect::<Vec<_>>()
    };
    match group {
        "check" => Ok(Sum::one("check", check::run())),
        "unit" => {
            let units: Vec<_> = binaries.iter().filter(|binary| !is_special(binary)).collect();
            run_each(&units, &[], &[], times)
        }
        SIMULATOR => {
            let schedules = schedules.to_string();
            run_each(
                &named(&[SIMULATOR]),
                &[],
                &[("THUBAN_SCHEDULES", &schedules)],
                times,
            )
        }
        "programs" => run_each(&named(&[PROGRAMS]), &[], &[], times),
        "netns" => {
            step("cnitool and others", cni_tools::ensure)?;
            run_each(&named(&NETNS), &[], &[], times)
        }
        _ => Ok(run_e2e(&named(&[E2E]), times)),
    }
}

fn run_each(
    binaries: &[&Binary],
    arguments: &[&str],
    environment: &[(&str, &str)],
    times: &mut Times,
) -> Result<Sum> {
    let mut sum = Sum::default();
    for binary in binaries {
        sum.add(binaries::run(binary, arguments, environment, times)?);
    }
    Ok(sum)
}

/// A cluster of its own, from nothing to nothing.
fn run_e2e(binaries: &[&Binary], times: &mut Times) -> Sum {
    let built = times.stage("e2e: release binaries and images", |_| {
        cluster::down(CLUSTER)
            .and_then(|()| build::run())
            .and_then(|()| step("operator with failpoints", failpoints))
    });
    let prepared = times.stage("e2e: cluster with Thuban on it", |_| {
        built
            .and_then(|()| cluster::up(CLUSTER))
            .and_then(|()| cni_tools::portmap_on_nodes(&Cluster::named(CLUSTER)?))
            .and_then(|()| install::run(CLUSTER))
            .and_then(|()| dns::import(&Cluster::named(CLUSTER)?))
    });
    let is_prepared = prepared.is_ok();
    let mut sum = Sum::one("cluster with Thuban on it", prepared);
    if is_prepared {
        let environment = [("THUBAN_CLUSTER", CLUSTER)];
        match run_each(binaries, &["--test-threads=1"], &environment, times) {
            Ok(tests) => sum.add(tests),
            Err(error) => sum.add(Sum::one("e2e", Err(error))),
        }
        times.stage("e2e: removal", |_| {
            for (name, test) in removal::TESTS {
                sum.add(Sum::one(name, test(CLUSTER)));
            }
        });
        if let (true, Ok(cluster)) = (sum.failed > 0, Cluster::named(CLUSTER)) {
            diagnostics::print(&cluster);
        }
    }
    sum.add(Sum::one("cluster without a trace left", cluster::down(CLUSTER)));
    sum
}

/// An operator that tests of the cluster end after a write of their choice, at `target/failpoints/thuban-operator`.
fn failpoints() -> Result<()> {
    let mut command = Command::new("cargo");
    // With the tests' packages, so that their dependencies serve once more.
    command
        .current_dir(root())
        .args(["build", "--quiet", "--workspace", "--exclude", "xdp-programs"])
        .args([
            "--bin",
            "thuban-operator",
            "--features",
            "thuban-operator/failpoints",
        ]);
    run_command(&mut command)?;
    let folder = root().join("target/failpoints");
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let built = root().join("target/debug/thuban-operator");
    let copy = folder.join("thuban-operator");
    // Not over a file that runs.
    let partial = copy.with_extension("partial");
    fs::copy(&built, &partial).with_context(|| format!("copying {}", built.display()))?;
    fs::rename(&partial, &copy).with_context(|| format!("renaming to {}", copy.display()))
}

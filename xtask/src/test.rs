//! `cargo xtask test`: every test there is, in groups that all run even when one fails, and one sum at the end.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    process::{Command, ExitCode, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use thuban_cluster::Cluster;

use crate::{
    build::{self, root, run_command, step},
    check, cluster, cni_tools, deps, diagnostics, ebpf, install, removal,
};

const CLUSTER: &str = "test";
/// Always the same packages, so that cargo builds their dependencies with the same features once.
const PACKAGES: [&str; 4] = ["--workspace", "--exclude", "xdp-programs", "--no-fail-fast"];
/// Test targets that need root, a cluster, or both. All others are the group `unit`.
const PROGRAMS: &str = "programs";
const NETNS: [&str; 2] = ["netns", "datapath"];
const E2E: &str = "cluster";
/// Optimised, by a profile of its own: it runs thousands of schedules.
const SIMULATOR: &str = "simulator";
const GROUPS: [&str; 6] = ["check", "unit", SIMULATOR, "programs", "netns", "e2e"];
pub const SCHEDULES: u64 = 10_000;

/// Tests that passed and failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    passed: usize,
    failed: usize,
    ignored: usize,
}

impl Sum {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }

    /// Something that is no test of cargo's, as one.
    fn one(name: &str, result: Result<()>) -> Self {
        match result {
            Ok(()) => Self {
                passed: 1,
                ..Self::default()
            },
            Err(error) => {
                eprintln!("FAILED {name}: {error:#}");
                Self {
                    failed: 1,
                    ..Self::default()
                }
            }
        }
    }
}

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
    deps::ensure()?;
    step("eBPF programs", ebpf::build)?;
    step("tests", || {
        run_command(cargo_test(&[]).args(["--quiet", "--all-targets", "--no-run"]))
    })?;
    let mut total = Sum::default();
    let mut summary = Vec::new();
    for group in GROUPS {
        if only.is_some_and(|only| only != group) {
            continue;
        }
        println!("\n==> tests: {group}");
        let start = Instant::now();
        let sum = run_group(group, schedules)?;
        summary.push(format!(
            "{group:<10}{:>5} passed {:>4} failed {:>4} ignored {:>7.1} s",
            sum.passed,
            sum.failed,
            sum.ignored,
            start.elapsed().as_secs_f32()
        ));
        total.add(sum);
    }
    println!("\n{}\n", summary.join("\n"));
    println!("{} passed, {} failed", total.passed, total.failed);
    std::io::stdout().flush()?;
    Ok(if total.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn run_group(group: &str, schedules: u64) -> Result<Sum> {
    match group {
        "check" => Ok(Sum::one("check", check::run())),
        "unit" => {
            let targets = unit_targets()?;
            let mut arguments = vec!["--lib", "--bins"];
            arguments.extend(targets.iter().flat_map(|target| ["--test", target]));
            run_tests(&arguments, &[])
        }
        SIMULATOR => run_simulator(schedules),
        "programs" => run_tests(&["--test", PROGRAMS], &[]),
        "netns" => {
            step("cnitool and others", cni_tools::ensure)?;
            let arguments: Vec<&str> = NETNS.iter().flat_map(|target| ["--test", target]).collect();
            run_tests(&arguments, &[])
        }
        _ => Ok(run_e2e()),
    }
}

/// A cluster of its own, from nothing to nothing.
fn run_e2e() -> Sum {
    let prepared = cluster::down(CLUSTER)
        .and_then(|()| build::run())
        .and_then(|()| step("operator with failpoints", failpoints))
        .and_then(|()| cluster::up(CLUSTER))
        .and_then(|()| install::run(CLUSTER));
    let is_prepared = prepared.is_ok();
    let mut sum = Sum::one("cluster with Thuban on it", prepared);
    if is_prepared {
        match run_tests(&["--test", E2E], &["--test-threads=1"]) {
            Ok(tests) => sum.add(tests),
            Err(error) => sum.add(Sum::one("e2e", Err(error))),
        }
        for (name, test) in removal::TESTS {
            sum.add(Sum::one(name, test(CLUSTER)));
        }
        if let (true, Ok(cluster)) = (sum.failed > 0, Cluster::named(CLUSTER)) {
            diagnostics::print(&cluster);
        }
    }
    sum.add(Sum::one("cluster without a trace left", cluster::down(CLUSTER)));
    sum
}

/// An operator that tests of the cluster end after a write of their choice, at `target/failpoints/thuban-operator`.
fn failpoints() -> Result<()> {
    run_command(Command::new("cargo").current_dir(root()).args([
        "build",
        "--quiet",
        "-p",
        "thuban-operator",
        "--features",
        "failpoints",
    ]))?;
    let folder = root().join("target/failpoints");
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let built = root().join("target/debug/thuban-operator");
    let copy = folder.join("thuban-operator");
    // Not over a file that runs.
    let partial = copy.with_extension("partial");
    fs::copy(&built, &partial).with_context(|| format!("copying {}", built.display()))?;
    fs::rename(&partial, &copy).with_context(|| format!("renaming to {}", copy.display()))
}

fn cargo_test(targets: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command
        .current_dir(root())
        .arg("test")
        .args(PACKAGES)
        .args(targets)
        .env("THUBAN_CLUSTER", CLUSTER);
    command
}

/// Its own build: other features and another profile than the workspace's.
fn run_simulator(schedules: u64) -> Result<Sum> {
    let mut command = Command::new("cargo");
    command
        .current_dir(root())
        .args([
            "test",
            "--profile",
            SIMULATOR,
            "-p",
            "thuban-operator",
            "--test",
            SIMULATOR,
        ])
        .env("THUBAN_SCHEDULES", schedules.to_string());
    sum_of(&mut command)
}

/// Runs test targets, shows what they print, and adds up their results.
fn run_tests(targets: &[&str], arguments: &[&str]) -> Result<Sum> {
    sum_of(cargo_test(targets).arg("--").args(arguments))
}

fn sum_of(command: &mut Command) -> Result<Sum> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .context("starting cargo test")?;
    let mut sum = Sum::default();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line.context("reading from cargo test")?;
            println!("{line}");
            if let Some(result) = result_of(&line) {
                sum.add(result);
            }
        }
    }
    let status = child.wait().context("waiting for cargo test")?;
    if !status.success() && sum.failed == 0 {
        // A test that took its whole process down has no result.
        eprintln!("FAILED {command:?}: {status}");
        sum.failed += 1;
    }
    Ok(sum)
}

/// Of a line such as `test result: ok. 12 passed; 0 failed; 1 ignored; …`.
fn result_of(line: &str) -> Option<Sum> {
    let rest = line.trim().strip_prefix("test result: ")?;
    let number = |word: &str| {
        let part = rest.split(['.', ';']).find(|part| part.trim().ends_with(word))?;
        part.trim().strip_suffix(word)?.trim().parse().ok()
    };
    Some(Sum {
        passed: number("passed")?,
        failed: number("failed")?,
        ignored: number("ignored")?,
    })
}

/// Integration tests of the workspace that belong to no other group.
fn unit_targets() -> Result<Vec<String>> {
    let output = Command::new("cargo")
        .current_dir(root())
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .context("starting cargo metadata")?;
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("reading cargo metadata")?;
    let packages = metadata["packages"].as_array().context("a list of packages")?;
    let mut names: Vec<String> = packages
        .iter()
        .filter_map(|package| package["targets"].as_array())
        .flatten()
        .filter(|target| target["kind"][0] == "test")
        .filter_map(|target| target["name"].as_str().map(str::to_owned))
        .filter(|name| {
            ![PROGRAMS, E2E, SIMULATOR].contains(&name.as_str()) && !NETNS.contains(&name.as_str())
        })
        .collect();
    names.sort();
    names.dedup();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::{Sum, result_of};

    #[test]
    fn results_are_read_from_lines_of_cargo() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s";
        assert_eq!(
            result_of(line),
            Some(Sum {
                passed: 12,
                failed: 3,
                ignored: 1
            })
        );
        let line =
            "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.00s";
        assert_eq!(result_of(line), Some(Sum::default()));
        assert_eq!(result_of("test a_test ... ok"), None);
    }
}

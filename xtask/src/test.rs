//! `cargo xtask test`: every test there is, in groups that all run even when one fails, and one sum at the end.
//!
//! A test that failed only because it waited too long is run once more by itself, for machines of tests are busy, and the
//! sum counts it. Whatever else fails has failed.

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
    check, cluster, cni_tools, deps, diagnostics, dns, ebpf, install, removal,
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
/// What tests print when they have waited too long.
const LATE: [&str; 3] = ["waited ", "never happened: ", "assertion failed: rig.ping("];

/// Tests that passed and failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Sum {
    passed: usize,
    failed: usize,
    ignored: usize,
    /// Of those that passed, how many did when they were run again.
    again: usize,
    /// Names of those that failed, with what they said first.
    failures: Vec<(String, String)>,
}

impl Sum {
    fn add(&mut self, other: Self) {
        self.failures.extend(other.failures);
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.again += other.again;
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
                    failures: vec![(name.to_owned(), format!("{error:#}"))],
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
        .and_then(|()| cni_tools::portmap_on_nodes(&Cluster::named(CLUSTER)?))
        .and_then(|()| install::run(CLUSTER))
        .and_then(|()| dns::import(&Cluster::named(CLUSTER)?));
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
    Ok(sum_of(&mut command)?.0)
}

/// Runs test targets, shows what they print, and adds up their results.
fn run_tests(targets: &[&str], arguments: &[&str]) -> Result<Sum> {
    let (mut sum, late) = sum_of(cargo_test(targets).arg("--").args(arguments))?;
    if late.is_empty() {
        return Ok(sum);
    }
    println!("\n==> waited too long, run again: {}", late.join(", "));
    let mut command = cargo_test(targets);
    command.arg("--").args(arguments).arg("--exact").args(&late);
    let (second, _) = sum_of(&mut command)?;
    sum.again = second.passed.min(late.len());
    sum.failures.retain(|(name, _)| !late.contains(name));
    sum.failures.extend(second.failures);
    sum.passed += sum.again;
    sum.failed = sum.failed.saturating_sub(sum.again);
    Ok(sum)
}

/// Also the tests that failed only because they waited too long.
fn sum_of(command: &mut Command) -> Result<(Sum, Vec<String>)> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .context("starting cargo test")?;
    let mut sum = Sum::default();
    let mut failures = Failures::default();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line.context("reading from cargo test")?;
            println!("{line}");
            failures.read(&line);
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
        sum.failures.push((format!("{command:?}"), status.to_string()));
    }
    sum.failures.extend(failures.said);
    Ok((sum, failures.late))
}

/// Of a test binary, what it prints of tests that failed: after all have run, a block for each.
#[derive(Debug, Default)]
struct Failures {
    late: Vec<String>,
    /// The first message of each.
    said: Vec<(String, String)>,
    /// Whose block this is.
    current: Option<String>,
    /// The next line is what a panic says.
    is_message: bool,
}

impl Failures {
    fn read(&mut self, line: &str) {
        let begins = line.strip_prefix("---- ");
        if let Some(name) = begins.and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.current = Some(name.to_owned());
        } else if line == "failures:" || result_of(line).is_some() {
            self.current = None;
        }
        let is_message = std::mem::replace(&mut self.is_message, line.contains(" panicked at "));
        let Some(name) = self.current.as_ref().filter(|_| is_message) else {
            return;
        };
        if self.said.last().is_none_or(|(last, _)| last != name) {
            self.said.push((name.clone(), line.to_owned()));
        }
        self.late.retain(|late| late != name);
        if LATE.iter().any(|word| line.contains(word)) {
            self.late.push(name.clone());
        } else {
            // Whatever else it panics about.
            self.current = None;
        }
    }
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
        ..Sum::default()
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
    use super::{Failures, Sum, result_of};

    #[test]
    fn results_are_read_from_lines_of_cargo() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s";
        assert_eq!(
            result_of(line),
            Some(Sum {
                passed: 12,
                failed: 3,
                ignored: 1,
                ..Sum::default()
            })
        );
        let line =
            "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.00s";
        assert_eq!(result_of(line), Some(Sum::default()));
        assert_eq!(result_of("test a_test ... ok"), None);
    }
    #[test]
    fn only_tests_that_waited_too_long_are_run_again() {
        let mut failures = Failures::default();
        let output = "test a::slow ... FAILED\n\nfailures:\n\n---- a::slow stdout ----\n\
            thread 'a::slow' (7) panicked at a.rs:1:2:\nwaited 60 s for pod red/after Ready\n\n\
            ---- b::wrong stdout ----\nwaited 1 s, then went on\nthread 'b::wrong' (8) panicked at b.rs:1:2:\n\
            3 of 20 lost\nthread 'b::wrong' (8) panicked at b.rs:1:2:\nwaited 9 s\n\nfailures:\n    a::slow\n    b::wrong\n\n\
            test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s\n\
            waited 3 s, says somebody else";
        output.lines().for_each(|line| failures.read(line));
        assert_eq!(failures.late, ["a::slow"]);
        let said = failures.said.iter();
        let said: Vec<_> = said.map(|(name, said)| (&**name, &**said)).collect();
        let slow = ("a::slow", "waited 60 s for pod red/after Ready");
        assert_eq!(said, [slow, ("b::wrong", "3 of 20 lost")]);
    }
}

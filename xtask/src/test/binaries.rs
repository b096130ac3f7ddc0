//! Test binaries: built once, all together, so that their dependencies are built once; then run by their paths.

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::{
    output::{Failures, Sum, result_of, time_of},
    times::Times,
};
use crate::build::{cargo, root};

/// A test binary.
#[derive(Clone, Debug)]
pub struct Binary {
    /// Name of its target: `netns`, `transitd`.
    pub name: String,
    /// Kind of its target: `test`, or the kind of the target with the unit tests.
    kind: String,
    pub executable: PathBuf,
    /// Folder of its package: cargo runs the binary there.
    folder: PathBuf,
}

impl Binary {
    /// Whether it is an integration test of that name.
    pub fn is_test(&self, name: &str) -> bool {
        self.kind == "test" && self.name == name
    }
}

/// A message of cargo about something that it has built.
#[derive(Deserialize)]
struct Message {
    reason: String,
    #[serde(default)]
    manifest_path: PathBuf,
    target: Option<Target>,
    executable: Option<PathBuf>,
    profile: Option<Profile>,
    #[serde(rename = "message")]
    diagnostic: Option<Diagnostic>,
}

#[derive(Deserialize)]
struct Diagnostic {
    rendered: Option<String>,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// The result of a build.
#[derive(Debug, Default)]
pub struct Built {
    pub binaries: Vec<Binary>,
    /// Number of warnings of rustc and clippy on code of the workspace.
    pub warnings: usize,
}

/// Builds all of the workspace that runs on this machine. Builds also the binaries that tests start and that go into
/// the images of the tests' clusters; the operator there can end after a write that a test chooses. The compiler is
/// clippy, so that lints need no build of their own.
pub fn build() -> Result<Built> {
    // Cargo builds the programs of a package with its integration tests. `--bins` would make a test binary of each
    // program, of those with `test = false` too.
    build_targets(&["--tests"])
}

/// Builds an integration test alone, with the dependencies that [`build`] makes.
pub fn build_test(name: &str) -> Result<Binary> {
    let built = build_targets(&["--test", name])?;
    let mut binaries = built.binaries.into_iter();
    let binary = binaries.find(|binary| binary.is_test(name));
    binary.with_context(|| format!("no test {name} was built"))
}

fn build_targets(targets: &[&str]) -> Result<Built> {
    let mut child = cargo()
        .current_dir(root())
        .args(["test", "--workspace", "--exclude", "xdp-programs"])
        .args(targets)
        .args(["--features", "thuban-operator/failpoints,transitd/clock-steps"])
        .args(["--no-run", "--message-format=json"])
        .env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver")
        .stdout(Stdio::piped())
        .spawn()
        .context("starting cargo test")?;
    let output = child.stdout.take().context("the output of cargo test")?;
    let mut built = Built::default();
    for line in BufReader::new(output).lines() {
        let line = line.context("reading from cargo test")?;
        let message: Message =
            serde_json::from_str(&line).with_context(|| format!("reading cargo's message {line}"))?;
        if let Some(rendered) = message.diagnostic.and_then(|diagnostic| diagnostic.rendered) {
            eprint!("{rendered}");
            built.warnings += 1;
        }
        let (Some(target), Some(executable)) = (message.target, message.executable) else {
            continue;
        };
        if message.reason != "compiler-artifact" || !message.profile.is_some_and(|profile| profile.test) {
            continue;
        }
        let folder = message.manifest_path.parent().context("a package's folder")?;
        built.binaries.push(Binary {
            name: target.name,
            kind: target.kind.into_iter().next().unwrap_or_default(),
            executable,
            folder: folder.to_path_buf(),
        });
    }
    let status = child.wait().context("waiting for cargo test")?;
    if !status.success() {
        bail!("cargo test --no-run: {status}");
    }
    built
        .binaries
        .sort_by(|one, other| (&one.folder, &one.name).cmp(&(&other.folder, &other.name)));
    Ok(built)
}

/// Runs a binary, shows what it prints, and adds up its results. Tests that failed only because they waited too long
/// are run once more by themselves.
pub fn run(
    binary: &Binary,
    arguments: &[&str],
    environment: &[(&str, &str)],
    times: &mut Times,
) -> Result<Sum> {
    let (mut sum, late) = once(binary, arguments, environment, times)?;
    if late.is_empty() {
        return Ok(sum);
    }
    println!("\n==> waited too long, run again: {}", late.join(", "));
    let mut arguments = arguments.to_vec();
    arguments.push("--exact");
    arguments.extend(late.iter().map(String::as_str));
    let (second, _) = once(binary, &arguments, environment, times)?;
    let has_failed = |name: &String| second.failures.iter().any(|(failed, _)| failed == name);
    let (failed, passed): (Vec<String>, Vec<String>) = late.into_iter().partition(has_failed);
    sum.failures
        .retain(|(name, _)| !passed.contains(name) && !failed.contains(name));
    sum.failures.extend(second.failures);
    sum.passed += passed.len();
    sum.failed = sum.failed.saturating_sub(passed.len());
    sum.late = passed;
    Ok(sum)
}

/// Runs a binary once. Returns also the tests that failed only because they waited too long.
fn once(
    binary: &Binary,
    arguments: &[&str],
    environment: &[(&str, &str)],
    times: &mut Times,
) -> Result<(Sum, Vec<String>)> {
    // The name of the binary's output, where several run side by side.
    let label = arguments.first().filter(|argument| argument.ends_with("::"));
    let label = label.map_or(String::new(), |filter| format!("[{filter}] "));
    println!("\n{label}     {} ({})", binary.name, binary.kind);
    let mut child = Command::new(&binary.executable)
        .current_dir(&binary.folder)
        .args(arguments)
        // This reports how long each test took; the harness takes the flag for unstable.
        .args(["-Z", "unstable-options", "--report-time"])
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_MANIFEST_DIR", &binary.folder)
        .envs(environment.iter().copied())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {}", binary.executable.display()))?;
    let mut sum = Sum::default();
    let mut failures = Failures::default();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line.with_context(|| format!("reading from {}", binary.name))?;
            println!("{label}{line}");
            failures.read(&line);
            if let Some((name, took)) = time_of(&line) {
                times.test(format!("{} {name}", binary.name), took);
            }
            if let Some(result) = result_of(&line) {
                sum.add(result);
            }
        }
    }
    let status = child
        .wait()
        .with_context(|| format!("waiting for {}", binary.name))?;
    if !status.success() && sum.failed == 0 {
        // A test that ended its whole process has no result.
        eprintln!("FAILED {}: {status}", binary.name);
        sum.failed += 1;
        sum.failures.push((binary.name.clone(), status.to_string()));
    }
    sum.failures.extend(failures.said);
    Ok((sum, failures.late))
}

#[cfg(test)]
mod tests {
    use std::{fs, iter};

    use crate::{build::root, links};

    /// Returns the sources of a manifest's targets that have no test binary.
    fn without_binary(manifest: &str) -> Vec<&str> {
        let targets = manifest.split("\n[");
        targets
            .filter(|target| target.contains("\ntest = false\n"))
            .filter_map(|target| target.lines().find_map(|line| line.strip_prefix("path = ")))
            .map(|path| path.trim_matches('"'))
            .collect()
    }

    /// Returns a source's file and those of its modules.
    fn files(source: &str, text: &str) -> Vec<String> {
        let folder = source.rsplit_once('/').map_or("", |(folder, _)| folder);
        let modules = text.lines().filter_map(|line| {
            let module = line.strip_prefix("pub ").unwrap_or(line).strip_prefix("mod ")?;
            Some(format!("{folder}/{}.rs", module.strip_suffix(';')?))
        });
        iter::once(source.to_owned()).chain(modules).collect()
    }

    #[test]
    fn targets_without_a_test_binary_have_no_tests() {
        let tree = links::tree().unwrap();
        let mut count = 0;
        for path in tree.keys().filter(|path| path.ends_with("Cargo.toml")) {
            let folder = path.strip_suffix("Cargo.toml").unwrap();
            let manifest = fs::read_to_string(root().join(path)).unwrap();
            for source in without_binary(&manifest) {
                let source = format!("{folder}{source}");
                for file in files(&source, &tree[&source]) {
                    let text = tree.get(&file).map_or("", String::as_str);
                    let has_test = ["#[test]", "#[tokio::test"]
                        .iter()
                        .any(|word| text.contains(word));
                    assert!(!has_test, "{file} has tests that never run: see {path}");
                }
                count += 1;
            }
        }
        assert!(count >= 16, "found only {count} such targets");
    }
}

//! The conformance tests of ClusterNetworkPolicies: a Go program of network-policy-api, of which each subtest is a
//! test.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use thuban_cluster::Cluster;

use super::{
    report::{Outcome, State},
    suite,
};
use crate::{build::root, go_tools::GoTools, progress};

const TOOLS: GoTools = GoTools {
    name: "cnp-tests",
    modules: "e2e/cnp",
    files: &["go.mod", "go.sum"],
    tags: "",
    needs_c: false,
    flags: "",
    packages: &[],
    tests: &[("cnp.test", "sigs.k8s.io/network-policy-api/conformance")],
    binaries: &["cnp.test"],
};

/// The condition that says that all droplets judge by a policy.
const PROVISIONED: &str = "Provisioned";

/// What an attempt by SCTP says on a kernel without SCTP sockets.
const NO_SCTP: &str = "OTHER: protocol not supported";
/// The tests that need SCTP sockets alone, and the reason for which they are left out.
const SCTP: (&str, &str) = ("SCTP", "needs a kernel with SCTP sockets");

/// Returns the test program; builds it first if it doesn't exist.
pub fn program() -> Result<PathBuf> {
    let folder = progress::watched("building the tests of ClusterNetworkPolicies", || TOOLS.ensure())?;
    Ok(folder.join("cnp.test"))
}

/// Has policy judge the packets of all pods, and accept them.
pub fn judge_all(cluster: &Cluster) -> Result<()> {
    let file = root().join("e2e/cnp/judged.yaml");
    let file = file.to_str().context("a path of this repository")?;
    cluster.kubectl(&["apply", "-f", file])?;
    let condition = format!("--for=condition={PROVISIONED}");
    cluster.kubectl(&["wait", &condition, "--timeout=2m", "clusternetworkpolicy/judged"])?;
    Ok(())
}

/// Runs the tests whose name matches `focus`, and prints how each ended.
pub fn run(program: &PathBuf, cluster: &Cluster, focus: &str, timeout: &str) -> Result<Vec<Outcome>> {
    let folder = suite::folder();
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let log = folder.join("output.log");
    let mut file = File::create(&log).with_context(|| format!("making {}", log.display()))?;
    let mut child = Command::new(program)
        .env("KUBECONFIG", cluster.instance().kubeconfig())
        .args(["-test.v", "-test.timeout", timeout, "-all-features"])
        .arg(format!("-test.run=^TestConformance$/{focus}"))
        .arg(format!("-test.skip=^TestConformance$/{}", SCTP.0))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(file.try_clone()?)
        .spawn()
        .context("starting the tests")?;
    let output = child.stdout.take().context("no output of the tests")?;
    let mut results = Results::default();
    progress::watched("tests", || -> Result<()> {
        for line in BufReader::new(output).split(b'\n') {
            let line = line.context("reading the tests' output")?;
            file.write_all(&line)?;
            file.write_all(b"\n")?;
            if let Some((result, name)) = results.take(&String::from_utf8_lossy(&line)) {
                println!("    {result}: {name}");
            }
        }
        Ok(())
    })?;
    let status = child.wait().context("waiting for the tests")?;
    let mut outcomes = results.outcomes();
    if outcomes.is_empty() {
        bail!("no test ended ({status}); see {}", log.display());
    }
    if !status.success() && !outcomes.iter().any(Outcome::is_bad) {
        bail!("the tests ended with {status}; see {}", log.display());
    }
    outcomes.push(Outcome {
        name: format!("tests whose name has {}", SCTP.0),
        state: State::LeftOut,
        why: SCTP.1.into(),
    });
    Ok(outcomes)
}

/// What Go's test program says of each test.
#[derive(Default)]
struct Results {
    /// The test that the following lines are about.
    current: String,
    /// The last attempt that went wrong.
    attempt: String,
    /// What each test waited for in vain, but for SCTP sockets.
    complaints: BTreeMap<String, String>,
    ended: BTreeMap<String, State>,
}

impl Results {
    /// Takes a line of the output. Returns the result and the name, if a test ended.
    fn take(&mut self, line: &str) -> Option<(&'static str, String)> {
        for start in ["=== RUN ", "=== NAME ", "=== CONT "] {
            if let Some(name) = line.strip_prefix(start) {
                name.trim().clone_into(&mut self.current);
                return None;
            }
        }
        let text = line.trim();
        for (start, state) in [
            ("--- PASS: ", State::Passed),
            ("--- FAIL: ", State::Failed),
            ("--- SKIP: ", State::NotRunnable),
        ] {
            if let Some(rest) = text.strip_prefix(start) {
                let name = rest.split(" (").next().unwrap_or(rest).to_owned();
                self.ended.insert(name.clone(), state);
                return Some((state.word(), name));
            }
        }
        if text.contains("Expected connection") {
            text.clone_into(&mut self.attempt);
        } else if text.starts_with("Error:") || text.starts_with("panic:") {
            let why = std::mem::take(&mut self.attempt);
            if !why.contains(NO_SCTP) {
                let why = if why.is_empty() { text.to_owned() } else { why };
                self.complaints.insert(self.current.clone(), why);
            }
        }
        None
    }

    /// Returns the tests that have no subtests: a test with some says only what they say.
    fn outcomes(&self) -> Vec<Outcome> {
        let has_subtests = |name: &str| {
            let start = format!("{name}/");
            self.ended.keys().any(|other| other.starts_with(&start))
        };
        let leaves = self.ended.iter().filter(|(name, _)| !has_subtests(name));
        leaves
            .map(|(name, state)| {
                let (state, why) = match (state, self.complaints.get(name)) {
                    (State::Failed, None) => (State::NotRunnable, SCTP.1),
                    (state, why) => (*state, why.map_or("", |why| why)),
                };
                Outcome {
                    name: name.clone(),
                    state,
                    why: why.to_owned(),
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_subtest_has_a_result() {
        let output = "=== RUN   TestConformance/A/first\n    helper.go:1: Expected connection to fail from a to b\n\
                      \x20   Error:   Condition never satisfied\n\
                      === RUN   TestConformance/A/second\n    helper.go:1: Expected connection to fail from a to b\n\
                      === RUN   TestConformance/A/third\n\
                      \x20   helper.go:1: Expected connection to succeed. stderr: OTHER: protocol not supported\n\
                      \x20   Error:   Condition never satisfied\n--- FAIL: TestConformance (2.0s)\n\
                      \x20   --- FAIL: TestConformance/A (2.0s)\n\
                      \x20       --- FAIL: TestConformance/A/first (1.0s)\n\
                      \x20       --- PASS: TestConformance/A/second (1.0s)\n\
                      \x20       --- FAIL: TestConformance/A/third (1.0s)\n";
        let mut results = Results::default();
        let ended = output.lines().filter(|line| results.take(line).is_some()).count();
        assert_eq!(ended, 5);
        let outcome = |name: &str, state, why: &str| Outcome {
            name: format!("TestConformance/A/{name}"),
            state,
            why: why.into(),
        };
        let expected = [
            outcome(
                "first",
                State::Failed,
                "helper.go:1: Expected connection to fail from a to b",
            ),
            outcome("second", State::Passed, ""),
            outcome("third", State::NotRunnable, SCTP.1),
        ];
        assert_eq!(results.outcomes(), expected);
    }
}

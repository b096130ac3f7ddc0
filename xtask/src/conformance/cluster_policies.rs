//! The conformance tests of ClusterNetworkPolicies: a Go program of network-policy-api, of which each subtest is a
//! test.

use std::{collections::BTreeMap, process::Command};

use anyhow::{Context, Result, bail};
use thuban_cluster::Cluster;

use super::{
    left_out::NEEDS_SCTP,
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

/// What an attempt by SCTP says on a kernel without SCTP sockets.
const NO_SCTP: &str = "OTHER: protocol not supported";
/// What names of tests have that need SCTP sockets alone.
const SCTP: &str = "SCTP";

/// Has policy judge the packets of all pods, and accept them.
pub fn judge_all(cluster: &Cluster) -> Result<()> {
    let file = root().join("e2e/cnp/judged.yaml");
    let file = file.to_str().context("a path of this repository")?;
    cluster.kubectl(&["apply", "-f", file])?;
    let condition = "--for=condition=Provisioned";
    cluster.kubectl(&["wait", condition, "--timeout=2m", "clusternetworkpolicy/judged"])?;
    Ok(())
}

/// Builds the test program if it doesn't exist, runs the tests whose name matches `focus`, and prints how each ended.
pub fn run(cluster: &Cluster, focus: &str, timeout: &str) -> Result<Vec<Outcome>> {
    let program = progress::watched("building the tests of ClusterNetworkPolicies", || TOOLS.ensure())?;
    let log = suite::fresh_folder()?.join("output.log");
    let mut tests = Command::new(program.join("cnp.test"));
    tests
        .env("KUBECONFIG", cluster.instance().kubeconfig())
        .args(["-test.v", "-test.timeout", timeout, "-all-features"])
        .arg(format!("-test.run=^TestConformance$/{focus}"))
        .arg(format!("-test.skip=^TestConformance$/{SCTP}"));
    let mut results = Results::default();
    let status = suite::watch(&mut tests, &log, |line| {
        let (result, name) = results.take(line)?;
        Some(format!("{result}: {name}"))
    })?;
    let mut outcomes = results.outcomes();
    if outcomes.is_empty() {
        bail!("no test ended ({status}); see {}", log.display());
    }
    if !status.success() && !results.has_failure() {
        bail!("the tests ended with {status}; see {}", log.display());
    }
    outcomes.push(Outcome {
        name: format!("tests whose name has {SCTP}"),
        state: State::LeftOut,
        why: NEEDS_SCTP.into(),
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
    /// What each test waited for in vain; SCTP sockets only if for nothing else.
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
            let attempt = std::mem::take(&mut self.attempt);
            let why = if attempt.is_empty() {
                text.to_owned()
            } else {
                attempt
            };
            let known = self
                .complaints
                .entry(self.current.clone())
                .or_insert_with(|| why.clone());
            if known.contains(NO_SCTP) {
                *known = why;
            }
        }
        None
    }

    /// Whether Go calls any test failed, even one that isn't runnable here.
    fn has_failure(&self) -> bool {
        self.ended.values().any(|state| *state == State::Failed)
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
                    (State::Passed, _) => (State::Passed, ""),
                    (State::Failed, Some(why)) if why.contains(NO_SCTP) => (State::NotRunnable, NEEDS_SCTP),
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
                      \x20   Error:   Condition never satisfied\n\
                      === RUN   TestConformance/A/fourth\n\
                      \x20   helper.go:1: Expected connection to succeed. stderr: OTHER: protocol not supported\n\
                      \x20   Error:   Condition never satisfied\n    apply.go:2: Expected connection to be dropped\n\
                      \x20   Error:   Condition never satisfied\n\
                      === RUN   TestConformance/A/fifth\n    apply.go:3: cannot apply\n\
                      --- FAIL: TestConformance (2.0s)\n\
                      \x20   --- FAIL: TestConformance/A (2.0s)\n\
                      \x20       --- FAIL: TestConformance/A/first (1.0s)\n\
                      \x20       --- PASS: TestConformance/A/second (1.0s)\n\
                      \x20       --- FAIL: TestConformance/A/third (1.0s)\n\
                      \x20       --- FAIL: TestConformance/A/fourth (1.0s)\n\
                      \x20       --- FAIL: TestConformance/A/fifth (1.0s)\n";
        let mut results = Results::default();
        let ended = output.lines().filter(|line| results.take(line).is_some()).count();
        assert_eq!(ended, 7);
        assert!(results.has_failure());
        let outcome = |name: &str, state, why: &str| Outcome {
            name: format!("TestConformance/A/{name}"),
            state,
            why: why.into(),
        };
        let expected = [
            // What says nothing of SCTP is a failure, whatever else it says.
            outcome("fifth", State::Failed, ""),
            outcome(
                "first",
                State::Failed,
                "helper.go:1: Expected connection to fail from a to b",
            ),
            outcome(
                "fourth",
                State::Failed,
                "apply.go:2: Expected connection to be dropped",
            ),
            outcome("second", State::Passed, ""),
            outcome("third", State::NotRunnable, NEEDS_SCTP),
        ];
        assert_eq!(results.outcomes(), expected);
    }
}

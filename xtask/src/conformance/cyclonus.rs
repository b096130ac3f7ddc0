//! Cyclonus's cases of NetworkPolicies: a driver of ours, in Go, runs them and says how each ended.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use thuban_cluster::Cluster;

use super::{
    Suite, left_out,
    report::{Outcome, State},
    suite,
};
use crate::{
    build::{Profile, root},
    go_tools::GoTools,
    images::Image,
    install, kube, progress,
};

const TOOLS: GoTools = GoTools {
    name: "cyclonus",
    modules: "e2e/cyclonus",
    files: &[
        "go.mod",
        "go.sum",
        "driver/cluster.go",
        "driver/main.go",
        "driver/neighbour.go",
        "driver/report.go",
        "worker/main.go",
    ],
    tags: "",
    needs_c: false,
    flags: "",
    packages: &["tool"],
    tests: &[],
    binaries: &["driver", "worker"],
};

/// The image that cyclonus asks for.
const IMAGE: &str = "docker.io/mfenwick100/cyclonus-worker:latest";
/// The network of the cases in [`Suite::CyclonusVpc`], and the one with the same addresses in another VPC.
const NETWORKS: [&str; 2] = ["cyclonus", "cyclonus-twin"];
/// What lines of the driver begin with: the names of all cases, and the result of one.
const PLAN: &str = "PLAN ";
const RESULT: &str = "RESULT ";

/// Returns the folder of the driver and of the program in the cases' pods; builds them first if they don't exist.
pub fn tools() -> Result<PathBuf> {
    progress::watched("building cyclonus", || TOOLS.ensure())
}

/// Returns the archive of the image of the cases' pods.
pub fn image(tools: &Path) -> Result<PathBuf> {
    let image = Image {
        archive: "cyclonus-worker.tar",
        name: IMAGE,
        files: vec![
            (kube::binaries()?.join("agnhost"), "/agnhost".into()),
            (tools.join("worker"), "/worker".into()),
        ],
        links: &[],
        entrypoint: &["/agnhost"],
        command: &["pause"],
    };
    image.write(&Profile::Release.images().join("more"))
}

/// Runs the cases whose name matches `focus`, and prints how each ended.
pub fn run(tools: &Path, cluster: &Cluster, suite: Suite, focus: &str) -> Result<Vec<Outcome>> {
    let log = suite::fresh_folder()?.join("output.log");
    let mut driver = Command::new(tools.join("driver"));
    driver
        .env("KUBECONFIG", cluster.instance().kubeconfig())
        .args(["--timeout", suite.timeout()])
        .args(["--focus", focus]);
    if suite == Suite::CyclonusVpc {
        make_networks(cluster)?;
        driver.args(["--network", NETWORKS[0], "--twin", NETWORKS[1]]);
    }
    let mut results = Results::default();
    let status = suite::watch(&mut driver, &log, |line| results.take(line))?;
    if let Some(error) = results.error {
        return Err(error).with_context(|| format!("reading the driver's results; see {}", log.display()));
    }
    if results.ended.is_empty() {
        bail!("no case ended ({status}); see {}", log.display());
    }
    // After its last case the driver still has namespaces to delete.
    if !status.success() && results.missing().is_empty() {
        bail!("the driver ended with {status}; see {}", log.display());
    }
    Ok(results.outcomes())
}

fn make_networks(cluster: &Cluster) -> Result<()> {
    let file = root().join("e2e/cyclonus/networks.yaml");
    let file = file.to_str().context("a path of this repository")?;
    cluster.kubectl(&["apply", "-f", file])?;
    for network in NETWORKS {
        let object = format!("networks.thuban.dev/{network}");
        install::wait(&object, || install::provisioned(cluster, &object))?;
    }
    Ok(())
}

/// How a case ended, in the driver's words.
#[derive(Debug, Deserialize)]
struct Ended {
    name: String,
    passed: bool,
    right: u64,
    all: u64,
    tries: u32,
    why: Vec<String>,
}

/// What the driver has said so far.
#[derive(Default)]
struct Results {
    planned: Vec<String>,
    ended: Vec<Ended>,
    /// A line that is not understood.
    error: Option<serde_json::Error>,
}

impl Results {
    /// Takes a line of the output. Returns what to tell of it.
    fn take(&mut self, line: &str) -> Option<String> {
        if let Some(plan) = line.strip_prefix(PLAN) {
            match serde_json::from_str(plan) {
                Ok(names) => self.planned = names,
                Err(error) => self.error = Some(error),
            }
            return Some(format!("{} cases", self.planned.len()));
        }
        let ended: Ended = match serde_json::from_str(line.strip_prefix(RESULT)?) {
            Ok(ended) => ended,
            Err(error) => {
                self.error = Some(error);
                return None;
            }
        };
        let word = if ended.passed { "passed" } else { "FAILED" };
        let tries = match ended.tries {
            0 | 1 => String::new(),
            tries => format!(", {tries} tries"),
        };
        let told = format!(
            "{word} ({} of {} probes{tries}): {}",
            ended.right, ended.all, ended.name
        );
        self.ended.push(ended);
        Some(told)
    }

    /// Returns the planned cases that have not ended.
    fn missing(&self) -> Vec<&String> {
        let has_ended = |name: &String| self.ended.iter().any(|ended| ended.name == *name);
        self.planned.iter().filter(|name| !has_ended(name)).collect()
    }

    fn outcomes(&self) -> Vec<Outcome> {
        let ended = self.ended.iter().map(|ended| Outcome {
            name: ended.name.clone(),
            state: if ended.passed {
                State::Passed
            } else {
                State::Failed
            },
            why: ended.why.join("; "),
        });
        let missing = self.missing().into_iter().map(|name| Outcome {
            name: name.clone(),
            state: State::NotRun,
            why: "the run ended before it".into(),
        });
        let left_out = left_out::CYCLONUS.iter().map(|(name, why)| Outcome {
            name: (*name).into(),
            state: State::LeftOut,
            why: (*why).into(),
        });
        ended.chain(missing).chain(left_out).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_planned_case_has_a_result() {
        let mut results = Results::default();
        let output = "resources:\nPLAN [\"1: a\",\"2: b\",\"3: c\"]\n\
            RESULT {\"name\":\"1: a\",\"passed\":true,\"right\":4,\"all\":4,\"tries\":1,\"why\":[]}\n\
            RESULT {\"name\":\"2: b\",\"passed\":false,\"right\":2,\"all\":4,\"tries\":4,\"why\":[\"x\",\"y\"]}\n";
        let told: Vec<String> = output.lines().filter_map(|line| results.take(line)).collect();
        assert_eq!(
            told,
            [
                "3 cases",
                "passed (4 of 4 probes): 1: a",
                "FAILED (2 of 4 probes, 4 tries): 2: b"
            ]
        );
        let outcomes = results.outcomes();
        let states: Vec<State> = outcomes.iter().map(|outcome| outcome.state).collect();
        assert_eq!(states[..3], [State::Passed, State::Failed, State::NotRun]);
        assert_eq!(outcomes[1].why, "x; y");
        assert!(states[3..].iter().all(|state| *state == State::LeftOut));
    }

    #[test]
    fn a_line_that_is_not_understood_is_an_error() {
        let mut results = Results::default();
        assert_eq!(results.take("RESULT {\"name\":\"1: a\"}"), None);
        assert!(results.error.is_some());
    }
}

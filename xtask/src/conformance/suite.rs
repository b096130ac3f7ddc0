//! Kubernetes' test program under ginkgo: the list of its tests, and a run with a line for each test that ended.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

use anyhow::{Context, Result, bail};
use thuban_cluster::{Cluster, NODES};

use super::{
    Suite, left_out,
    report::{self, Outcome},
};
use crate::{build::root, go_tools::GoTools, progress};

const TOOLS: GoTools = GoTools {
    name: "kube-tests",
    // The tools are of kubelet's version this way.
    modules: "e2e/kube",
    files: &["go.mod", "go.sum"],
    tags: "",
    needs_c: false,
    flags: "",
    packages: &[
        "github.com/onsi/ginkgo/v2/ginkgo",
        "k8s.io/kubernetes/test/images/regression-issue-74839",
    ],
    tests: &[("e2e.test", "k8s.io/kubernetes/test/e2e")],
    binaries: &["e2e.test", "ginkgo", "regression-issue-74839"],
};

/// Returns the folder of the test program and of ginkgo; builds them first if they don't exist.
pub fn tools() -> Result<PathBuf> {
    progress::watched("building Kubernetes' tests", || TOOLS.ensure())
}

/// Returns the folder of the files that ginkgo and the tests write.
pub fn folder() -> PathBuf {
    root().join("target/conformance")
}

/// Makes [`folder`] anew.
pub fn fresh_folder() -> Result<PathBuf> {
    let folder = folder();
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    Ok(folder)
}

/// Runs the tests of the suite whose name matches `focus`, and prints how each ended.
pub fn run(tools: &Path, cluster: &Cluster, suite: Suite, focus: &str, procs: u32) -> Result<Vec<Outcome>> {
    let folder = fresh_folder()?;
    let ginkgo = |report: &str, procs: u32| {
        let mut ginkgo = Command::new(tools.join("ginkgo"));
        ginkgo
            .current_dir(&folder)
            .args(["run", "-v", "--no-color", "--timeout", suite.timeout()])
            .args(["--label-filter", suite.labels()])
            .args(["--json-report", report])
            .arg(format!("--procs={procs}"));
        if !focus.is_empty() {
            ginkgo.args(["--focus", focus]);
        }
        ginkgo
    };
    let instance = cluster.instance();
    let options = [
        "--provider=skeleton".to_owned(),
        format!("--num-nodes={}", NODES.len()),
        "--repo-root=".to_owned(),
        format!("--kubeconfig={}", instance.kubeconfig().display()),
        format!("--kubectl-path={}", instance.bin().join("kubectl").display()),
        format!("--e2e-output-dir={}", folder.display()),
        // Logs of the nodes would be fetched by SSH.
        "--disable-log-dump".to_owned(),
    ];
    let program = tools.join("e2e.test");

    let mut plan = ginkgo("plan.json", 1);
    plan.arg("--dry-run").arg(&program).arg("--").args(&options);
    let output = plan.output().context("starting ginkgo")?;
    if !output.status.success() {
        bail!(
            "listing the tests: {}: {}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let (planned, left_out) = report::planned(&report::read(&folder.join("plan.json"))?, |name, labels| {
        left_out::reason(suite, name, labels)
    })?;
    if planned.is_empty() {
        bail!("no test matches {focus:?}");
    }

    println!(
        "    {} tests, {procs} side by side; {} left out",
        planned.len(),
        left_out.len()
    );
    let mut tests = ginkgo("report.json", procs);
    for outcome in &left_out {
        tests.args(["--skip", &exactly(&outcome.name)]);
    }
    tests.arg(&program).arg("--").args(&options);
    let (mut lines, mut ended, count) = (Lines::default(), 0, planned.len());
    watch(&mut tests, &folder.join("output.log"), |line| {
        let (result, name) = lines.next(line)?;
        ended += 1;
        Some(format!("{ended} of {count}: {result}: {}", report::short(&name)))
    })?;
    // The exit code only says that a test failed; a run without a report is an error.
    let mut outcomes = report::outcomes(&planned, &report::read(&folder.join("report.json"))?)?;
    outcomes.extend(left_out);
    Ok(outcomes)
}

/// Returns a regular expression of Go's for one test's name.
fn exactly(name: &str) -> String {
    // Ginkgo puts the suite's description before the name.
    let mut pattern = String::from(" ");
    for character in name.chars() {
        if !character.is_alphanumeric() && character != ' ' {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern + "$"
}

/// Runs tests with their output in `log`, and prints what `told` makes of each line.
pub fn watch(
    tests: &mut Command,
    log: &Path,
    mut told: impl FnMut(&str) -> Option<String>,
) -> Result<ExitStatus> {
    let mut file = File::create(log).with_context(|| format!("making {}", log.display()))?;
    let mut child = tests
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(file.try_clone()?)
        .spawn()
        .context("starting the tests")?;
    let output = child.stdout.take().context("no output of the tests")?;
    progress::watched("tests", || -> Result<()> {
        for line in BufReader::new(output).split(b'\n') {
            let line = line.context("reading the tests' output")?;
            file.write_all(&line)?;
            file.write_all(b"\n")?;
            if let Some(told) = told(&String::from_utf8_lossy(&line)) {
                println!("    {told}");
            }
        }
        Ok(())
    })?;
    child.wait().context("waiting for the tests")
}

/// The state after the lines that were read so far.
#[derive(Default)]
struct Lines {
    name: String,
    heading: Option<String>,
}

impl Lines {
    /// Returns result and name of a test when the line after its heading has come. Where tests run side by side, that
    /// line is the name. Where they run one after the other, the name came when the test began.
    fn next(&mut self, line: &str) -> Option<(String, String)> {
        if line.starts_with("[sig-") {
            // The line marks the node of the test that failed.
            self.name = line.replace(" [It] ", " ");
        }
        let ended = self.heading.take().map(|result| (result, self.name.clone()));
        self.heading = result(line);
        ended
    }
}

/// Returns the result in ginkgo's heading of a test that ended.
fn result(line: &str) -> Option<String> {
    let (word, rest) = if let Some(rest) = line.strip_prefix("S [SKIPPED] [") {
        ("skipped", rest)
    } else {
        let rest = line.strip_prefix("• [")?;
        match rest.split_once("] [") {
            Some((_, rest)) => ("FAILED", rest),
            None => ("passed", rest),
        }
    };
    let seconds: f32 = rest.strip_suffix(" seconds]")?.parse().ok()?;
    Some(format!("{word} in {seconds:.0} s"))
}

#[cfg(test)]
mod tests {
    use super::{Lines, exactly, result};

    fn ended(output: &str) -> Vec<(String, String)> {
        let mut lines = Lines::default();
        output.lines().filter_map(|line| lines.next(line)).collect()
    }

    #[test]
    fn a_test_is_named_whether_alone_or_beside_others() {
        let alone =
            "[sig-a] one\n  STEP: x\n• [1.000 seconds]\n-----\n[sig-a] two\n• [2.000 seconds]\n-----\n";
        let beside = "-----\n• [1.000 seconds]\n[sig-a] one\nx.go:1\n-----\n• [2.000 seconds]\n[sig-a] [It] two\nx.go:2\n";
        let expected = [("passed in 1 s", "[sig-a] one"), ("passed in 2 s", "[sig-a] two")];
        for output in [alone, beside] {
            assert_eq!(
                ended(output),
                expected.map(|(result, name)| (result.to_owned(), name.to_owned()))
            );
        }
    }

    #[test]
    fn a_name_is_matched_as_it_is() {
        assert_eq!(exactly("[a] b: c (d)"), r" \[a\] b\: c \(d\)$");
    }

    #[test]
    fn a_heading_says_how_a_test_ended() {
        assert_eq!(result("• [12.345 seconds]").unwrap(), "passed in 12 s");
        assert_eq!(result("• [FAILED] [121.000 seconds]").unwrap(), "FAILED in 121 s");
        assert_eq!(result("• [PANICKED] [1.000 seconds]").unwrap(), "FAILED in 1 s");
        assert_eq!(result("S [SKIPPED] [0.100 seconds]").unwrap(), "skipped in 0 s");
        assert!(result("  STEP: waiting [5 seconds]").is_none());
        assert!(result("[SynchronizedBeforeSuite] PASSED [0.062 seconds]").is_none());
    }
}

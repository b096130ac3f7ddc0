//! Makes a result for every planned test out of ginkgo's report.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// The longest reason in the table, in characters.
const WIDTH: usize = 110;
/// The longest reason in the file, in characters.
const LONGEST: usize = 600;

/// The result of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Passed,
    Failed,
    /// The test found that this cluster can't have what the test needs.
    NotRunnable,
    /// The run ended before the test: as bad as failed.
    NotRun,
    /// The cluster is not made for the test.
    LeftOut,
}

impl State {
    pub fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::NotRunnable | Self::NotRun => "not-runnable",
            Self::LeftOut => "left-out",
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    pub name: String,
    pub state: State,
    /// Empty when it passed.
    pub why: String,
}

impl Outcome {
    /// Whether this result makes the run fail.
    pub fn is_bad(&self) -> bool {
        matches!(self.state, State::Failed | State::NotRun)
    }
}

/// Returns the tests that ginkgo reports on.
pub fn read(path: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let suites: Vec<Value> =
        serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))?;
    let reports = suites
        .into_iter()
        .filter_map(|mut suite| match suite["SpecReports"].take() {
            Value::Array(reports) => Some(reports),
            _ => None,
        });
    Ok(reports.flatten().collect())
}

/// Returns the names of the tests that a dry run would run, and the tests for which `reason` has a reason not to. It
/// gets a test's name and labels.
pub fn planned(
    reports: &[Value],
    reason: impl Fn(&str, &[&str]) -> Option<&'static str>,
) -> Result<(Vec<String>, Vec<Outcome>)> {
    let (mut planned, mut left_out) = (Vec::new(), Vec::new());
    for report in reports.iter().filter(|report| is_test(report)) {
        if report["State"] != "passed" {
            continue;
        }
        let name = name(report)?;
        match reason(&name, &labels(report)) {
            None => planned.push(name),
            Some(why) => left_out.push(Outcome {
                name,
                state: State::LeftOut,
                why: why.into(),
            }),
        }
    }
    planned.sort();
    left_out.sort_by(|one, other| (&one.why, &one.name).cmp(&(&other.why, &other.name)));
    Ok((planned, left_out))
}

/// Returns the labels of a test and of the containers that it is in.
fn labels(report: &Value) -> Vec<&str> {
    let of_containers = report["ContainerHierarchyLabels"].as_array();
    let lists = of_containers
        .into_iter()
        .flatten()
        .chain([&report["LeafNodeLabels"]]);
    let labels = lists.filter_map(Value::as_array).flatten();
    labels.filter_map(Value::as_str).collect()
}

/// Returns a result for each of `planned`, whatever the report lacks.
pub fn outcomes(planned: &[String], reports: &[Value]) -> Result<Vec<Outcome>> {
    let mut found = BTreeMap::new();
    for report in reports.iter().filter(|report| is_test(report)) {
        found.insert(name(report)?, report);
    }
    let outcome = |test: &String| {
        let (state, why) = found.get(test).map_or_else(not_run, |report| judge(report));
        Outcome {
            name: test.clone(),
            state,
            why,
        }
    };
    let mut outcomes: Vec<Outcome> = planned.iter().map(outcome).collect();
    // A failure before or after all tests belongs to no test.
    for report in reports.iter().filter(|report| !is_test(report)) {
        let (state, why) = judge(report);
        if state == State::Failed {
            outcomes.push(Outcome {
                name: format!("({})", report["LeafNodeType"].as_str().unwrap_or("suite")),
                state,
                why,
            });
        }
    }
    Ok(outcomes)
}

fn judge(report: &Value) -> (State, String) {
    let message = report["Failure"]["Message"].as_str().unwrap_or_default();
    let why = cut(&one_line(message), LONGEST);
    match report["State"].as_str() {
        Some("passed") => (State::Passed, String::new()),
        // A test that ginkgo leaves out because the run ends has no message.
        Some("skipped") if message.is_empty() => not_run(),
        Some("skipped") => (State::NotRunnable, why),
        Some("pending") => (State::NotRunnable, "Kubernetes has it switched off".into()),
        Some("failed") => (State::Failed, why),
        other => (State::Failed, format!("{}: {why}", other.unwrap_or("no state"))),
    }
}

fn not_run() -> (State, String) {
    (State::NotRun, "the run ended before it".into())
}

fn is_test(report: &Value) -> bool {
    report["LeafNodeType"] == "It"
}

fn name(report: &Value) -> Result<String> {
    let containers = report["ContainerHierarchyTexts"].as_array();
    let texts = containers.into_iter().flatten().chain([&report["LeafNodeText"]]);
    let texts: Option<Vec<&str>> = texts.map(Value::as_str).collect();
    Ok(texts
        .context("a test without a name in ginkgo's report")?
        .join(" "))
}

/// Returns `{"tests": [{"name", "result", "why"}]}`.
pub fn to_json(outcomes: &[Outcome]) -> Value {
    let tests: Vec<Value> = outcomes
        .iter()
        .map(|outcome| json!({"name": outcome.name, "result": outcome.state.word(), "why": outcome.why}))
        .collect();
    json!({ "tests": tests })
}

/// Prints a table: failed ones last, where they are seen.
pub fn print(outcomes: &[Outcome]) {
    println!();
    for state in [
        State::LeftOut,
        State::Passed,
        State::NotRunnable,
        State::NotRun,
        State::Failed,
    ] {
        for outcome in outcomes.iter().filter(|outcome| outcome.state == state) {
            println!("  {:<13} {}", state.word(), short(&outcome.name));
            if !outcome.why.is_empty() {
                println!("  {:<13}   {}", "", cut(&outcome.why, WIDTH));
            }
        }
    }
    let count = |word: &str| {
        outcomes
            .iter()
            .filter(|outcome| outcome.state.word() == word)
            .count()
    };
    println!(
        "\n  {} of {} passed, {} failed, {} not runnable; {} left out\n",
        count("passed"),
        outcomes.len() - count("left-out"),
        count("failed"),
        count("not-runnable"),
        count("left-out")
    );
}

/// Returns a test's name without the part that all names have.
pub fn short(name: &str) -> &str {
    let name = name.strip_prefix("[sig-network] ").unwrap_or(name);
    name.split(" [").next().unwrap_or(name)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn cut(text: &str, width: usize) -> String {
    match text.char_indices().nth(width) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test(name: &str, state: &str, message: &str) -> Value {
        json!({
            "LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-network] Services"], "LeafNodeText": name,
            "State": state, "Failure": {"Message": message},
        })
    }

    #[test]
    fn every_planned_test_has_a_result() {
        let planned = ["a", "b", "c", "d", "e", "f"].map(|name| format!("[sig-network] Services {name}"));
        let reports = [
            test("a", "passed", ""),
            test("b", "failed", "no\n  answer"),
            test("c", "skipped", "needs SSH"),
            test("d", "skipped", ""),
            test("e", "timedout", "too long"),
            test("not asked for", "skipped", ""),
        ];
        let outcomes = outcomes(&planned, &reports).unwrap();
        let states: Vec<State> = outcomes.iter().map(|outcome| outcome.state).collect();
        let expected = [
            State::Passed,
            State::Failed,
            State::NotRunnable,
            State::NotRun,
            State::Failed,
            State::NotRun,
        ];
        assert_eq!(states, expected);
        assert_eq!(outcomes[1].why, "no answer");
        assert_eq!(outcomes[4].why, "timedout: too long");
        assert!(outcomes[3].is_bad() && !outcomes[2].is_bad());
        let json = to_json(&outcomes);
        assert_eq!(json["tests"][2]["result"], "not-runnable");
        assert_eq!(json["tests"][2]["why"], "needs SSH");
    }

    #[test]
    fn a_failure_outside_of_tests_fails_the_run() {
        let setup = json!({
            "LeafNodeType": "SynchronizedBeforeSuite", "LeafNodeText": "", "State": "failed",
            "Failure": {"Message": "nodes are not ready"},
        });
        let outcomes = outcomes(&[], &[setup]).unwrap();
        assert_eq!(outcomes[0].name, "(SynchronizedBeforeSuite)");
        assert!(outcomes[0].is_bad());
    }

    #[test]
    fn a_plan_is_what_a_dry_run_passes_without_what_has_a_reason() {
        let mut labelled = test("c", "passed", "");
        labelled["ContainerHierarchyLabels"] = json!([["sig-network"], null]);
        labelled["LeafNodeLabels"] = json!(["Feature:X"]);
        let reports = [test("a", "passed", ""), test("b", "skipped", ""), labelled];
        let reason = |_: &str, labels: &[&str]| labels.contains(&"Feature:X").then_some("needs X");
        let (planned, left_out) = planned(&reports, reason).unwrap();
        assert_eq!(planned, ["[sig-network] Services a"]);
        let [outcome] = &left_out[..] else {
            panic!("{left_out:?}")
        };
        assert_eq!(outcome.name, "[sig-network] Services c");
        assert!(outcome.why == "needs X" && !outcome.is_bad());
    }

    #[test]
    fn names_lose_what_all_have_in_common() {
        assert_eq!(
            short("[sig-network] DNS should provide DNS [LinuxOnly] [Conformance]"),
            "DNS should provide DNS"
        );
    }
}

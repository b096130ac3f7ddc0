//! Questions of `kubectl thuban why`: what the answers must say, and how soon.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::side_by_side::command_line::Said;
use crate::tenants::tenants;

/// How long the operator may take to see what a test has made.
pub const SEEN: Duration = Duration::from_secs(20);
/// How long it may take until a fault is named.
const NAMED_WITHIN: Duration = Duration::from_secs(5);

/// What an answer must say.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    verdict: &'a str,
    reason: &'a str,
    /// The message of the last step contains this.
    says: &'a str,
    /// The state of the answer to the probe; empty: there was no probe.
    probe: &'a str,
}

/// The path works.
pub const WORKS: Expected<'static> = Expected {
    verdict: "OK",
    reason: "",
    says: "",
    probe: "",
};

impl<'a> Expected<'a> {
    /// Packets do not arrive.
    pub const fn no(reason: &'a str, says: &'a str) -> Self {
        Self {
            verdict: "NO",
            reason,
            says,
            probe: "",
        }
    }

    /// Nobody knows whether packets arrive.
    pub const fn unknown(reason: &'a str, says: &'a str) -> Self {
        Self {
            verdict: "UNKNOWN",
            ..Self::no(reason, says)
        }
    }

    /// Returns the same with an answer to a probe in this state.
    pub const fn probed(self, state: &'a str) -> Self {
        Self { probe: state, ..self }
    }

    fn is_met(&self, said: &Said) -> bool {
        let answer: Value = serde_json::from_str(&said.output).unwrap_or_default();
        let status = match self.verdict {
            "OK" => 0,
            "NO" => 1,
            _ => 2,
        };
        let text = |value: &Value, expected: &str| value.as_str().unwrap_or_default() == expected;
        said.code == Some(status)
            && text(&answer["verdict"], self.verdict)
            && text(&answer["reason"], self.reason)
            && text(&answer["answer"]["state"], self.probe)
            && last_message(&answer).contains(self.says)
    }
}

/// Asks until the answer is as expected. Rows change while tests run side by side, so that the answer may be UNKNOWN
/// for a moment.
pub fn wait_answer(expected: &Expected<'_>, patience: Duration, ask: &dyn Fn() -> Said) -> Result<Said> {
    let mut last = None;
    let found = tenants().cluster.wait_for("an answer", patience, || {
        let said = ask();
        let is_met = expected.is_met(&said);
        last = Some(said);
        Ok(is_met)
    });
    found.with_context(|| format!("{expected:?}; the last answer: {last:?}"))?;
    last.context("an answer")
}

/// Asks about a fault that was planted just now, or long ago. The answer must name it in time.
pub fn named(expected: &Expected<'_>, ask: &dyn Fn() -> Said) -> Result<Value> {
    let planted = Instant::now();
    let said = wait_answer(expected, SEEN, ask)?;
    in_time(expected, planted.elapsed())?;
    Ok(said.json())
}

/// Asks with a probe. Its packet may have to wait for its turn: from the question that has the answer on, the fault is
/// named in time.
pub fn named_by_probe(expected: &Expected<'_>, ask: &dyn Fn() -> Said) -> Result<Value> {
    let said = wait_answer(expected, SEEN, ask)?;
    in_time(expected, said.took)?;
    Ok(said.json())
}

fn in_time(expected: &Expected<'_>, took: Duration) -> Result<()> {
    ensure!(took <= NAMED_WITHIN, "{expected:?} after {took:.1?}");
    Ok(())
}

/// Returns the message of the last step.
pub fn last_message(answer: &Value) -> &str {
    let steps = answer["steps"].as_array();
    let last = steps.and_then(|steps| steps.last());
    last.and_then(|step| step["message"].as_str()).unwrap_or_default()
}

/// Whether a node did this with the packet of a probe.
pub fn has_hop(answer: &Value, node: &str, verdict: &str) -> bool {
    let is_it = |hop: &Value| hop["node"] == node && hop["verdict"] == verdict;
    let hops = answer["hops"].as_array();
    hops.is_some_and(|hops| hops.iter().any(is_it))
}

//! A report: what was looked at, what was found, and what to do. The same for people and for programs.

use serde::Serialize;
use thuban_api::reasons;

use crate::objects::Unseen;

/// The version of this plugin.
pub const PLUGIN: &str = env!("CARGO_PKG_VERSION");
/// Kinds in the table of reasons, for what no condition says.
pub const STATUS: &str = "kubectl thuban status";
pub const CHECK: &str = "kubectl thuban check";
pub const WHY: &str = "kubectl thuban why";
/// Reasons for which the message of the condition says what to do, about the very object.
const SAID_BY_MESSAGE: [&str; 9] = [
    "AddressInUseOnNode",
    "AddressTaken",
    "AddressUnfit",
    "NamespaceNotAllowed",
    "NetworkDeleting",
    "NetworkFull",
    "NetworkNotFound",
    "VpcDeleting",
    "VpcLeaves",
];
/// How many problems the one line of a part names.
const NAMED: usize = 2;

/// How a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// All was looked at, and all is well.
    Good,
    /// Something is not well.
    Found,
    /// What was looked at is well, but not all was looked at.
    Unseen,
}

impl Verdict {
    pub fn exit_status(self) -> u8 {
        match self {
            Self::Good => 0,
            Self::Found => 1,
            Self::Unseen => 2,
        }
    }

    pub fn of(lines: &[Line]) -> Self {
        let has = |level: Level| lines.iter().any(|line| line.level == level);
        Self::from_findings(has(Level::Warn), has(Level::Unseen))
    }

    pub fn from_findings(has_problems: bool, has_unseen: bool) -> Self {
        match (has_problems, has_unseen) {
            (true, _) => Self::Found,
            (false, true) => Self::Unseen,
            (false, false) => Self::Good,
        }
    }
}

/// How a part stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Ok,
    Warn,
    Unseen,
}

/// Something that is not well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The name of the object, with its namespace if it has one.
    pub object: String,
    /// One word in CamelCase, which `explain` knows.
    pub reason: String,
    pub message: String,
    pub remedy: String,
}

impl Problem {
    /// Makes a problem of an object of a kind. The remedy is that of the table of reasons.
    pub fn new(
        kind: &str,
        object: impl Into<String>,
        reason: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        let reason = reason.into();
        Self {
            object: object.into(),
            remedy: reasons::remedy(kind, &reason).to_owned(),
            reason,
            message: message.into(),
        }
    }

    pub fn text(&self) -> String {
        if self.message.is_empty() {
            format!("{} {}", self.object, self.reason)
        } else {
            format!("{} {}: {}", self.object, self.reason, self.message)
        }
    }

    /// Returns what to do, if the text does not say it.
    pub fn further_remedy(&self) -> Option<&str> {
        let is_said = !self.message.is_empty() && SAID_BY_MESSAGE.contains(&self.reason.as_str());
        (!is_said && !self.remedy.is_empty()).then_some(self.remedy.as_str())
    }
}

/// How one part of Thuban stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    pub level: Level,
    pub part: &'static str,
    /// The part in numbers; may be empty.
    pub summary: String,
    /// The summary and the first problems.
    pub text: String,
    pub problems: Vec<Problem>,
}

impl Line {
    /// Makes a line of a summary and what is not well. The first problems are named in it.
    pub fn new(part: &'static str, summary: impl Into<String>, problems: Vec<Problem>) -> Self {
        let summary = summary.into();
        let mut texts = vec![summary.clone()];
        texts.extend(problems.iter().take(NAMED).map(Problem::text));
        if problems.len() > NAMED {
            texts.push(format!("and {} more", problems.len() - NAMED));
        }
        texts.retain(|text| !text.is_empty());
        Self {
            level: if problems.is_empty() {
                Level::Ok
            } else {
                Level::Warn
            },
            part,
            summary,
            text: texts.join("; "),
            problems,
        }
    }

    pub fn unseen(part: &'static str, unseen: &Unseen) -> Self {
        Self {
            level: Level::Unseen,
            part,
            summary: String::new(),
            text: unseen.to_string(),
            problems: Vec::new(),
        }
    }
}

/// What `status` and `check` say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    pub verdict: Verdict,
    /// The version of the plugin.
    pub plugin: &'static str,
    /// The version of the leading operator, if it could be read.
    pub thuban: Option<String>,
    pub lines: Vec<Line>,
}

impl Report {
    pub fn new(thuban: Option<&str>, lines: Vec<Line>) -> Self {
        Self {
            verdict: Verdict::of(&lines),
            plugin: PLUGIN,
            thuban: thuban.map(str::to_owned),
            lines,
        }
    }

    /// Yields what is not well.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.lines.iter().flat_map(|line| &line.problems)
    }
}

#[cfg(test)]
mod tests {
    use thuban_api::reasons;

    use super::{Level, Line, Problem, SAID_BY_MESSAGE, STATUS, Verdict};
    use crate::objects::Unseen;

    fn problem(object: &str) -> Problem {
        Problem::new("Network", object, "NetworkFull", "")
    }

    #[test]
    fn a_line_names_the_first_problems_and_counts_the_others() {
        let line = Line::new("networks", "0/3 Ready", ["a", "b", "c"].map(problem).into());
        assert_eq!(line.level, Level::Warn);
        assert_eq!(line.text, "0/3 Ready; a NetworkFull; b NetworkFull; and 1 more");
        assert_eq!(Line::new("networks", "3 Ready", Vec::new()).text, "3 Ready");
    }

    #[test]
    fn what_was_found_outweighs_what_was_not_seen() {
        let unseen = Line::unseen("nodes", &Unseen::NotInstalled("nodes"));
        let good = Line::new("VPCs", "1 Ready", Vec::new());
        let bad = Line::new("networks", "0/1 Ready", vec![problem("a")]);
        let verdict = |lines: &[&Line]| {
            let lines: Vec<Line> = lines.iter().map(|line| (*line).clone()).collect();
            Verdict::of(&lines).exit_status()
        };
        assert_eq!(verdict(&[&good]), 0);
        assert_eq!(verdict(&[&good, &unseen, &bad]), 1);
        assert_eq!(verdict(&[&good, &unseen]), 2);
    }

    #[test]
    fn a_remedy_that_the_message_says_is_not_said_again() {
        let message = "network \"web\" has no free IPv4 address; append an IPv4 range";
        let full = Problem::new("Endpoint", "red/web-2", "NetworkFull", message);
        assert!(!full.remedy.is_empty());
        assert_eq!(full.further_remedy(), None);
        assert!(problem("a").further_remedy().is_some(), "without a message");
        let other = Problem::new(
            "Network",
            "a",
            "RangeOverlaps",
            "10.0.0.0/24 overlaps 10.0.0.0/16",
        );
        assert_eq!(other.further_remedy(), Some("choose a free range"));
        for reason in SAID_BY_MESSAGE {
            assert!(reasons::named(reason).next().is_some(), "{reason}");
        }
    }

    #[test]
    fn every_problem_of_the_plugin_has_a_remedy() {
        let problem = Problem::new(STATUS, "operator", "NoLeader", "");
        assert!(!problem.remedy.is_empty(), "{problem:?}");
    }
}

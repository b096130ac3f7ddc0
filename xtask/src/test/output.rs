//! The output of test binaries, read line by line.

use std::time::Duration;

use anyhow::Result;

/// Parts of the messages that tests print when they have waited too long.
const LATE: [&str; 3] = ["waited ", "never happened: ", "assertion failed: rig.ping("];

/// Tests that passed and failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    pub passed: usize,
    pub failed: usize,
    pub ignored: usize,
    /// Names of tests that passed only when they were run again.
    pub late: Vec<String>,
    /// Names of tests that failed, with their first message.
    pub failures: Vec<(String, String)>,
}

impl Sum {
    pub fn add(&mut self, other: Self) {
        self.failures.extend(other.failures);
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.late.extend(other.late);
    }

    /// Returns the result of one check that is no test of cargo's.
    pub fn one(name: &str, result: Result<()>) -> Self {
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

/// The part of a test binary's output about tests that failed: after all have run, a block for each.
#[derive(Debug, Default)]
pub struct Failures {
    /// Names of tests that failed only because they waited too long.
    pub late: Vec<String>,
    /// Names of tests that failed, with the first message of each.
    pub said: Vec<(String, String)>,
    /// The test of the current block.
    current: Option<String>,
    /// Whether the next line is the message of a panic.
    is_message: bool,
}

impl Failures {
    pub fn read(&mut self, line: &str) {
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
            // Later panics of the same block don't count.
            self.current = None;
        }
    }
}

/// Reads the result of a line such as `test result: ok. 12 passed; 0 failed; 1 ignored; …`.
pub fn result_of(line: &str) -> Option<Sum> {
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

/// Reads name and time of a line such as `test a::b ... ok <1.250s>`.
pub fn time_of(line: &str) -> Option<(&str, Duration)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let seconds = rest.split_once('<')?.1.strip_suffix("s>")?;
    Some((name, Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?))
}

#[cfg(test)]
mod tests {
    use super::{Duration, Failures, Sum, result_of, time_of};

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
    fn a_test_tells_how_long_it_took() {
        let took = Duration::from_millis(1250);
        assert_eq!(time_of("test a::slow ... ok <1.250s>"), Some(("a::slow", took)));
        assert_eq!(time_of("test a::bad ... FAILED <1.250s>"), Some(("a::bad", took)));
        for other in [
            "test a::slow ... ok",
            "test result: ok. 1 passed; finished in 0.02s",
            "waited <1s>",
        ] {
            assert_eq!(time_of(other), None, "{other}");
        }
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

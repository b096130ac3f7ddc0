//! The times of stages and tests: printed, and written to a file.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::build::root;

/// How many of the slowest tests are printed.
const SLOWEST: usize = 30;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timed {
    pub name: String,
    pub seconds: f64,
}

/// The content of `target/test-times.json`.
#[derive(Debug, Default, Serialize)]
pub struct Times {
    /// Stages, one after the other: their sum is the whole run.
    pub stages: Vec<Timed>,
    /// The slowest tests, the longest first.
    pub slowest: Vec<Timed>,
}

impl Times {
    /// Runs a stage.
    pub fn stage<T>(&mut self, name: &str, work: impl FnOnce(&mut Self) -> T) -> T {
        let start = Instant::now();
        let within: f64 = self.stages.iter().map(|stage| stage.seconds).sum();
        let made = work(self);
        // The time of a stage within this one counts as the inner stage's.
        let now: f64 = self.stages.iter().map(|stage| stage.seconds).sum();
        self.stages.push(Timed {
            name: name.to_owned(),
            seconds: start.elapsed().as_secs_f64() - (now - within),
        });
        made
    }

    pub fn test(&mut self, name: String, took: Duration) {
        self.slowest.push(Timed {
            name,
            seconds: took.as_secs_f64(),
        });
        self.keep_slowest();
    }

    /// Adds the tests of another one.
    pub fn merge(&mut self, other: Self) {
        self.slowest.extend(other.slowest);
        self.keep_slowest();
    }

    fn keep_slowest(&mut self) {
        self.slowest
            .sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        self.slowest.truncate(SLOWEST);
    }

    /// Prints the times and writes the file.
    pub fn tell(&self) -> Result<()> {
        println!("\nSeconds of each stage");
        for Timed { name, seconds } in &self.stages {
            println!("{seconds:>8.1}  {name}");
        }
        let all: f64 = self.stages.iter().map(|stage| stage.seconds).sum();
        println!("{all:>8.1}  all");
        if !self.slowest.is_empty() {
            println!("\nThe slowest tests");
        }
        for Timed { name, seconds } in &self.slowest {
            println!("{seconds:>8.1}  {name}");
        }
        let path = root().join("target/test-times.json");
        let text = serde_json::to_string_pretty(self).context("writing test times as JSON")?;
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Times;

    #[test]
    fn stages_within_a_stage_count_once() {
        let mut times = Times::default();
        let wait = || std::thread::sleep(Duration::from_millis(30));
        times.stage("outer", |times| {
            wait();
            times.stage("inner", |_| wait());
        });
        let names: Vec<_> = times.stages.iter().map(|stage| &*stage.name).collect();
        assert_eq!(names, ["inner", "outer"]);
        let all: f64 = times.stages.iter().map(|stage| stage.seconds).sum();
        assert!(
            (0.06..0.089).contains(&all) || all > 0.089 && times.stages[1].seconds < all,
            "{all}"
        );
    }

    #[test]
    fn the_slowest_tests_are_kept_the_longest_first() {
        let mut times = Times::default();
        for number in 0..40 {
            times.test(number.to_string(), Duration::from_secs(number));
        }
        assert_eq!(times.slowest.len(), super::SLOWEST);
        assert_eq!(times.slowest[0].name, "39");
        assert_eq!(times.slowest.last().unwrap().name, "10");
    }
}

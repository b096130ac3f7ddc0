//! The times that each contestant took, one pod after the other and many at once.

use std::{collections::BTreeMap, sync::Barrier, thread, time::Duration};

use anyhow::{Result, anyhow};

use super::contestant::Contestant;
use crate::bench::{
    plugin::Pod,
    stats::{median, quantile, sorted},
};

/// Milliseconds by (contestant, verb, how many at once) and run.
#[derive(Debug, Default)]
pub struct Times {
    runs: BTreeMap<(&'static str, &'static str, usize), Vec<Vec<f64>>>,
}

impl Times {
    pub fn add(
        &mut self,
        who: &'static str,
        what: &'static str,
        at_once: usize,
        run: usize,
        times: &[Duration],
    ) {
        let runs = self.runs.entry((who, what, at_once)).or_default();
        runs.resize_with(runs.len().max(run + 1), Vec::new);
        runs[run].extend(times.iter().map(|time| time.as_secs_f64() * 1000.0));
    }

    /// Returns the median of the runs' medians.
    pub fn p50(&self, who: &str, what: &str, at_once: usize) -> Option<f64> {
        let runs = self.of(who, what, at_once)?;
        Some(median(runs.iter().map(|run| median(run.iter().copied()))))
    }

    /// Returns the 99th percentile of all runs together.
    pub fn p99(&self, who: &str, what: &str, at_once: usize) -> Option<f64> {
        let all = self.of(who, what, at_once)?.concat();
        Some(quantile(&sorted(all), 0.99))
    }

    /// Returns the keys that were measured.
    pub fn keys(&self) -> impl Iterator<Item = (&'static str, &'static str, usize)> {
        self.runs.keys().copied()
    }

    /// Returns the medians of a run.
    pub fn line(&self, run: usize) -> String {
        let mut parts = Vec::new();
        for ((who, what, at_once), runs) in &self.runs {
            if let Some(times) = runs.get(run) {
                parts.push(format!(
                    "{who} {what} x{at_once} {:.1}",
                    median(times.iter().copied())
                ));
            }
        }
        parts.join(", ")
    }

    fn of(&self, who: &str, what: &str, at_once: usize) -> Option<&Vec<Vec<f64>>> {
        let found = self
            .runs
            .iter()
            .find(|((w, t, n), _)| *w == who && *t == what && *n == at_once);
        found.map(|(_, runs)| runs)
    }
}

/// Times ADD and DEL of one pod.
pub fn one(contestant: &dyn Contestant, pod: &Pod) -> Result<[Duration; 2]> {
    contestant
        .node()
        .run(|| Ok([contestant.add_here(pod)?, contestant.del_here(pod)?]))
}

/// Times the ADDs of all pods at once, and when all are there, the DELs of all at once.
pub fn at_once(contestant: &dyn Contestant, pods: &[Pod]) -> Result<[Vec<Duration>; 2]> {
    let barrier = Barrier::new(pods.len());
    let results: Vec<Result<[Duration; 2]>> = thread::scope(|scope| {
        let threads: Vec<_> = pods
            .iter()
            .map(|pod| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let entered = contestant.node().enter();
                    // Every thread comes to each barrier, even after an error.
                    barrier.wait();
                    let add = entered.and_then(|()| contestant.add_here(pod));
                    barrier.wait();
                    let del = contestant.del_here(pod);
                    Ok([add?, del?])
                })
            })
            .collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked")).flatten());
        joined.collect()
    });
    let times: Vec<[Duration; 2]> = results.into_iter().collect::<Result<_>>()?;
    Ok([0, 1].map(|index| times.iter().map(|both| both[index]).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_that_of_runs_and_the_worst_that_of_all() {
        let mut times = Times::default();
        for (run, milliseconds) in [[1, 2, 3], [10, 20, 30], [2, 4, 6]].iter().enumerate() {
            let run_times = milliseconds.map(Duration::from_millis);
            times.add("a", "add", 1, run, &run_times);
        }
        assert_eq!(times.p50("a", "add", 1), Some(4.0));
        assert_eq!(times.p99("a", "add", 1), Some(30.0));
        assert_eq!(times.p50("a", "del", 1), None);
    }
}

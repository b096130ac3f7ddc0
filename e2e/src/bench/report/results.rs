//! Samples by case and metric, in the order in which cases came first.

use anyhow::{Context, Result};
use serde::Serialize;

use crate::bench::{Sample, machine::Machine};

/// All samples of one metric of one case.
#[derive(Debug, Serialize)]
pub struct Series {
    pub case: String,
    pub metric: &'static str,
    pub unit: &'static str,
    pub samples: Vec<f64>,
}

impl Series {
    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }

    pub fn median(&self) -> f64 {
        let sorted = self.sorted();
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => f64::NAN,
            length if length % 2 == 0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
            _ => sorted[middle],
        }
    }

    pub fn least(&self) -> f64 {
        self.sorted().first().copied().unwrap_or(f64::NAN)
    }

    pub fn most(&self) -> f64 {
        self.sorted().last().copied().unwrap_or(f64::NAN)
    }
}

#[derive(Debug, Default)]
pub struct Results {
    pub series: Vec<Series>,
}

#[derive(Serialize)]
struct File<'a> {
    date: &'a str,
    machine: &'a Machine,
    runs: usize,
    results: &'a [Series],
}

impl Results {
    pub fn add(&mut self, case: &str, samples: &[Sample]) {
        for sample in samples {
            let known = self
                .series
                .iter_mut()
                .find(|series| series.case == case && series.metric == sample.metric);
            match known {
                Some(series) => series.samples.push(sample.value),
                None => self.insert(Series {
                    case: case.to_owned(),
                    metric: sample.metric,
                    unit: sample.unit,
                    samples: vec![sample.value],
                }),
            }
        }
    }

    /// Behind the others of its case.
    fn insert(&mut self, series: Series) {
        let last = self.series.iter().rposition(|known| known.case == series.case);
        let position = last.map_or(self.series.len(), |last| last + 1);
        self.series.insert(position, series);
    }

    pub fn median(&self, case: &str, metric: &str) -> Option<f64> {
        let series = self
            .series
            .iter()
            .find(|series| series.case == case && series.metric == metric);
        series.map(Series::median)
    }

    /// The file for other programs.
    pub fn json(&self, machine: &Machine, date: &str, runs: usize) -> Result<String> {
        let file = File {
            date,
            machine,
            runs,
            results: &self.series,
        };
        serde_json::to_string_pretty(&file).context("writing JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::Results;
    use crate::bench::Sample;

    #[test]
    fn medians_are_of_sorted_samples() {
        let mut results = Results::default();
        for value in [9.0, 1.0, 3.0] {
            results.add("a", &[Sample::new("m", "u", value)]);
        }
        assert_eq!(results.median("a", "m"), Some(3.0));
        results.add("a", &[Sample::new("m", "u", 5.0)]);
        assert_eq!(results.median("a", "m"), Some(4.0));
        assert_eq!(results.median("b", "m"), None);
    }
}

//! Samples by case and metric, in the order in which the cases appeared.

use serde::Serialize;

use super::{
    stats::{median, median_ratio, quantile, sorted},
    table::{Table, number},
};

/// A number that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    pub metric: &'static str,
    pub unit: &'static str,
    pub value: f64,
}

impl Sample {
    pub const fn new(metric: &'static str, unit: &'static str, value: f64) -> Self {
        Self { metric, unit, value }
    }
}

/// All samples of one metric of one case.
#[derive(Debug, Serialize)]
pub struct Series {
    pub case: String,
    pub metric: &'static str,
    pub unit: &'static str,
    pub samples: Vec<f64>,
}

impl Series {
    pub fn median(&self) -> f64 {
        median(self.samples.iter().copied())
    }
}

#[derive(Debug, Default)]
pub struct Results {
    pub series: Vec<Series>,
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

    /// Inserts a series after the others of its case.
    fn insert(&mut self, series: Series) {
        let last = self.series.iter().rposition(|known| known.case == series.case);
        let position = last.map_or(self.series.len(), |last| last + 1);
        self.series.insert(position, series);
    }

    fn find(&self, case: &str, metric: &str) -> Option<&Series> {
        let mut all = self.series.iter();
        all.find(|series| series.case == case && series.metric == metric)
    }

    pub fn median(&self, case: &str, metric: &str) -> Option<f64> {
        self.find(case, metric).map(Series::median)
    }

    /// Returns the least sample such that `part` of all samples are not above it.
    pub fn quantile(&self, case: &str, metric: &str, part: f64) -> Option<f64> {
        let series = self.find(case, metric)?;
        Some(quantile(&sorted(series.samples.iter().copied()), part))
    }

    /// Returns the median of one case's samples divided by another's of the same round.
    pub fn ratio(&self, over: &str, under: &str, metric: &str) -> Option<f64> {
        let (over, under) = (self.find(over, metric)?, self.find(under, metric)?);
        let rounds = over.samples.iter().zip(&under.samples);
        median_ratio(rounds.map(|(over, under)| (*over, *under)))
    }

    /// Returns a table of every series: least, median, most.
    pub fn table(&self) -> Table {
        let mut table = Table::new(["case", "metric", "least", "median", "most", "unit"]).right(2..5);
        let mut last = "";
        for series in &self.series {
            let case = if series.case == last { "" } else { &series.case };
            last = &series.case;
            let samples = sorted(series.samples.iter().copied());
            let [least, most] = [samples.first(), samples.last()].map(|end| end.copied().unwrap_or(f64::NAN));
            table.row([
                case,
                series.metric,
                &number(least),
                &number(series.median()),
                &number(most),
                series.unit,
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::{Results, Sample};

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

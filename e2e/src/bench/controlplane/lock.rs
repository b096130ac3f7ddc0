//! How long the operator locks the rows of all droplets at a time, as its own metrics say.

use anyhow::Result;

use super::{Bench, metrics::quantile_ms};

const BUCKETS: &str = "thuban_operator_lock_held_seconds_bucket{le=\"";

impl Bench {
    /// Reports how long 99 of 100 locks took at most since the operator's start. The value is the bound of a bucket.
    pub(super) fn lock_held(&mut self, metric: &str) -> Result<()> {
        if let Some(bound) = held_ms(&self.plane.metrics()?, 0.99) {
            self.report.add(metric, "ms", bound);
        }
        Ok(())
    }
}

fn held_ms(page: &str, part: f64) -> Option<f64> {
    let buckets = page.lines().filter_map(|line| {
        let (bound, count) = line.strip_prefix(BUCKETS)?.split_once("\"} ")?;
        Some((bound, count.trim().parse().ok()?))
    });
    quantile_ms(buckets, part)
}

#[cfg(test)]
mod tests {
    use super::{BUCKETS, held_ms};

    #[test]
    fn the_bound_of_the_bucket_with_the_part_is_found() {
        let page = |counts: [u32; 3]| {
            let bounds = ["0.001", "0.002", "+Inf"].into_iter().zip(counts);
            let lines = bounds.map(|(bound, count)| format!("{BUCKETS}{bound}\"}} {count}\n"));
            "# TYPE x histogram\n".to_owned() + &lines.collect::<String>()
        };
        assert_eq!(held_ms(&page([98, 99, 100]), 0.99), Some(2.0));
        assert_eq!(held_ms(&page([99, 99, 100]), 0.99), Some(1.0));
        assert_eq!(held_ms(&page([0, 0, 0]), 0.99), None);
        assert_eq!(held_ms("", 0.99), None);
    }
}

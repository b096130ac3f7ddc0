//! Statistics of samples: one definition of each, for all benchmarks.

use super::float;

/// Returns the values, ascending.
pub fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Returns the value in the middle, or halfway between the two in the middle. NaN if there are no values.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let sorted = sorted(values);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        length if length % 2 == 0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

/// Returns the least of the ascending values such that `part` of all values are not above it. NaN if there are no
/// values.
pub fn quantile(sorted: &[f64], part: f64) -> f64 {
    // The rank is not negative, and not beyond the last.
    #[allow(clippy::cast_sign_loss)]
    let rank = (float(sorted.len() as u64) * part).ceil().max(1.0) as usize;
    sorted
        .get(rank.min(sorted.len()).saturating_sub(1))
        .copied()
        .unwrap_or(f64::NAN)
}

/// Returns the median of ratios, each of two values of one round: a slow round changes none of them.
pub fn median_ratio(rounds: impl IntoIterator<Item = (f64, f64)>) -> Option<f64> {
    let ratios: Vec<f64> = rounds.into_iter().map(|(over, under)| over / under).collect();
    (!ratios.is_empty()).then(|| median(ratios))
}

#[cfg(test)]
mod tests {
    use super::{median, median_ratio, quantile};

    #[test]
    fn a_quantile_is_the_value_that_so_many_are_not_above() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert!((quantile(&values, 0.99) - 99.0).abs() < 1e-9);
        assert!((quantile(&values, 0.5) - 50.0).abs() < 1e-9);
        assert!((quantile(&values, 1.0) - 100.0).abs() < 1e-9);
        assert!(quantile(&[], 0.5).is_nan());
    }

    #[test]
    fn the_median_is_the_middle() {
        assert!((median([9.0, 1.0, 3.0]) - 3.0).abs() < 1e-9);
        assert!((median([4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median([]).is_nan());
    }

    #[test]
    fn a_ratio_is_of_one_round() {
        let ratio = median_ratio([(10.0, 5.0), (3.0, 1.0), (40.0, 10.0)]);
        assert!((ratio.unwrap() - 3.0).abs() < 1e-9);
        assert_eq!(median_ratio([]), None);
    }
}

//! The report at the end: shares that were answered, times, and their ratios beside the goals.

use anyhow::Result;
use serde::Serialize;

use super::{Plan, plot, scenes::Outcomes};
use crate::bench::{
    report::{Bound, Number, Session, judge},
    stats::{median, median_ratio},
    table::{Table, number},
};

/// The least part of what is answered without the attack.
const GOAL: f64 = 0.9;

#[derive(Debug, Default)]
pub struct Report {
    probed: Vec<Probed>,
}

/// A probe of a scene over all rounds.
#[derive(Debug)]
pub struct Probed {
    pub scene: &'static str,
    pub probe: &'static str,
    rounds: Vec<Outcomes>,
}

impl Probed {
    /// Returns the medians of the answered shares: alone, beside the harmless flood, beside the attack.
    pub fn shares(&self) -> [f64; 3] {
        let of = |pick: fn(&Outcomes) -> f64| median(self.rounds.iter().map(pick));
        [
            of(|round| round.alone.share()),
            of(|round| round.control.share()),
            of(|round| round.beside.share()),
        ]
    }

    /// Returns the share beside the attack over the share beside the harmless flood.
    pub fn ratio(&self) -> f64 {
        let rounds = self.rounds.iter();
        median_ratio(rounds.map(|round| (round.beside.share(), round.control.share()))).unwrap_or(f64::NAN)
    }

    fn p99_ratio(&self) -> f64 {
        let rounds = self.rounds.iter();
        median_ratio(rounds.map(|round| (round.beside.p99_ms, round.control.p99_ms))).unwrap_or(f64::NAN)
    }

    /// Returns the failed attempts of all rounds beside the attack.
    fn failed(&self) -> u64 {
        let rounds = self.rounds.iter();
        rounds
            .map(|round| round.beside.attempts - round.beside.answered)
            .sum()
    }

    fn p99(&self, pick: fn(&Outcomes) -> f64) -> f64 {
        median(self.rounds.iter().map(pick))
    }
}

#[derive(Serialize)]
struct File<'a> {
    rounds: usize,
    seconds: u64,
    attackers: u8,
    rate: u32,
    results: &'a [Number],
}

/// Returns one round of a scene as a line.
pub fn line(scene: &str, outcomes: &[Outcomes]) -> String {
    let parts = outcomes.iter().map(|each| {
        let [alone, control, beside] =
            [&each.alone, &each.control, &each.beside].map(|outcome| outcome.share() * 100.0);
        format!(
            "{} {alone:.0} % alone, {control:.0} % control, {beside:.0} % attacked",
            each.probe
        )
    });
    format!("{scene}: {}", parts.collect::<Vec<_>>().join("; "))
}

impl Report {
    pub fn add(&mut self, scene: &'static str, outcomes: Vec<Outcomes>) {
        for each in outcomes {
            let known = self
                .probed
                .iter()
                .position(|probed| probed.scene == scene && probed.probe == each.probe);
            let index = known.unwrap_or_else(|| {
                self.probed.push(Probed {
                    scene,
                    probe: each.probe,
                    rounds: Vec::new(),
                });
                self.probed.len() - 1
            });
            self.probed[index].rounds.push(each);
        }
    }

    fn table(&self) -> Table {
        let titles = [
            "scene",
            "measured",
            "answered alone",
            "control",
            "attacked",
            "attacked/control",
            "goal",
            "failed",
            "p99 ms control",
            "attacked",
        ];
        let mut table = Table::new(titles).right(2..6).right(7..10);
        for probed in &self.probed {
            let [alone, control, beside] = probed.shares().map(number);
            let (ratio, goal) = (probed.ratio(), Bound::AtLeast(GOAL));
            table.row([
                probed.scene.to_owned(),
                probed.probe.to_owned(),
                alone,
                control,
                beside,
                number(ratio),
                judge(ratio, goal),
                probed.failed().to_string(),
                number(probed.p99(|round| round.control.p99_ms)),
                number(probed.p99(|round| round.beside.p99_ms)),
            ]);
        }
        table
    }

    fn numbers(&self) -> Vec<Number> {
        let mut numbers = Vec::new();
        for probed in &self.probed {
            let name = format!("{}_{}", probed.scene, probed.probe).replace([' ', ','], "_");
            let mut add =
                |what: &str, unit, value| numbers.push(Number::new(format!("{name}_{what}"), unit, value));
            let [alone, control, beside] = probed.shares();
            add("alone", "", alone);
            add("control", "", control);
            add("attacked", "", beside);
            add("attacked_over_control", "", probed.ratio());
            add("p99_attacked_over_control", "", probed.p99_ratio());
            add("failed", "", crate::bench::float(probed.failed()));
        }
        numbers
    }

    /// Prints the table and writes the files.
    pub fn write(&self, plan: &Plan, session: &Session) -> Result<()> {
        let file = File {
            rounds: plan.rounds,
            seconds: plan.seconds,
            attackers: plan.attackers,
            rate: plan.rate,
            results: &self.numbers(),
        };
        session.finish(
            &self.table().to_string(),
            &file,
            Some(&plot::picture(&self.probed)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::neighbours::probe::Outcome;

    #[test]
    fn the_attack_is_judged_beside_a_harmless_flood() {
        let outcome = |answered| Outcome {
            attempts: 100,
            answered,
            median_ms: 1.0,
            p99_ms: 2.0,
        };
        let mut report = Report::default();
        for beside in [40, 50, 60] {
            let outcomes = Outcomes {
                probe: "DNS",
                alone: outcome(100),
                control: outcome(80),
                beside: outcome(beside),
            };
            report.add("dns", vec![outcomes]);
        }
        assert_eq!(report.probed.len(), 1);
        assert!((report.probed[0].ratio() - 0.625).abs() < 1e-9);
        assert_eq!(report.probed[0].failed(), 150);
        let table = report.table().to_string();
        assert!(table.contains(">= 0.9 missed"), "{table}");
    }
}

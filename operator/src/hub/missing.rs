//! The report on what a barrier waits for, for people.

use thuban_rows::Kind;

use crate::model::full_tables::{Full, LONGEST_PAUSE};

/// Reason of conditions: droplets have not acknowledged what they were sent.
pub const WAITS_FOR_ACKS: &str = "WaitsForAcks";
/// Reason of conditions: droplets are not sent the needed rows, because their transitd does not understand them.
pub const WAITS_FOR_UPGRADE: &str = "WaitsForUpgrade";
/// Reason of conditions: droplets have no room for the needed rows.
pub const TABLE_FULL: &str = "TableFull";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// Droplets that have not acked a row, or the removal of a row.
    pub unacked: Vec<String>,
    /// Droplets that are not sent a row of this kind, because their transitd does not understand it. They hold none.
    pub outdated: Vec<(String, Kind)>,
    /// Names of what no live droplet serves.
    pub unserved: Vec<String>,
    /// Tables without room for a needed row. Their droplets are in `unacked` too, if the needed rows are waited for.
    pub full: Vec<Full>,
}

impl Missing {
    pub fn is_empty(&self) -> bool {
        self.unacked.is_empty()
            && self.outdated.is_empty()
            && self.unserved.is_empty()
            && self.full.is_empty()
    }

    /// Returns the reason of the condition.
    pub fn reason(&self) -> &'static str {
        match (self.outdated.is_empty(), self.full.is_empty()) {
            (false, _) => WAITS_FOR_UPGRADE,
            (true, false) => TABLE_FULL,
            (true, true) => WAITS_FOR_ACKS,
        }
    }

    /// Returns the message of the condition: what somebody must do first.
    pub fn message(&self) -> String {
        if self.outdated.is_empty() && !self.full.is_empty() {
            return self.room_message();
        }
        if self.outdated.is_empty() && !self.unserved.is_empty() {
            return format!("waits for {}", self.unserved.join(" and "));
        }
        if self.outdated.is_empty() {
            return format!("waits for acks of droplets: {}", self.unacked.join(", "));
        }
        let outdated = self.outdated.iter();
        let outdated: Vec<String> = outdated
            .map(|(droplet, kind)| format!("{droplet} (rows of kind {kind})"))
            .collect();
        format!(
            "transitd does not understand what is needed on these droplets: {}; upgrade transitd there",
            outdated.join(", ")
        )
    }

    fn room_message(&self) -> String {
        let full = self.full.iter();
        let full: Vec<String> = full
            .map(|full| format!("{} ({} of kind {})", full.droplet, about(full.rows), full.kind))
            .collect();
        format!(
            "tables are full on these droplets: {}; run fewer pods, networks or Services there; the rows are sent again \
             within {} minutes",
            full.join(", "),
            LONGEST_PAUSE / 60_000
        )
    }
}

/// Returns a number of rows in words that seldom change: many objects say the same, and each change is a write.
fn about(rows: usize) -> String {
    match rows {
        1 => "1 row".into(),
        2..10 => "some rows".into(),
        _ => format!("{} rows or more", 10_usize.pow(rows.max(10).ilog10())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upgrade_that_is_needed_is_told_before_acks() {
        let mut missing = Missing {
            unacked: vec!["a".into(), "b".into()],
            ..Missing::default()
        };
        assert_eq!(
            (missing.reason(), missing.message().as_str()),
            ("WaitsForAcks", "waits for acks of droplets: a, b")
        );
        missing.unserved = vec!["a bouncer".into(), "a divider".into()];
        assert_eq!(
            (missing.reason(), missing.message().as_str()),
            ("WaitsForAcks", "waits for a bouncer and a divider")
        );
        missing.outdated = vec![("c".into(), Kind::Exposed)];
        assert_eq!(missing.reason(), "WaitsForUpgrade");
        assert_eq!(
            missing.message(),
            "transitd does not understand what is needed on these droplets: c (rows of kind exposed); upgrade transitd there"
        );
        assert!(!missing.is_empty() && Missing::default().is_empty());
        let full = |rows| Missing {
            unacked: vec!["a".into()],
            full: vec![Full {
                droplet: "a".into(),
                kind: Kind::Bouncer,
                rows,
            }],
            ..Missing::default()
        };
        assert_eq!(full(1).reason(), "TableFull");
        assert_eq!(
            full(1).message(),
            "tables are full on these droplets: a (1 row of kind bouncer); run fewer pods, networks or Services there; the \
             rows are sent again within 5 minutes"
        );
        let told = [
            (3, "some rows"),
            (10, "10 rows or more"),
            (4321, "1000 rows or more"),
        ];
        for (rows, words) in told {
            assert!(full(rows).message().contains(words), "{rows}");
        }
        let unserved = Missing {
            unserved: vec!["a bouncer".into()],
            ..Missing::default()
        };
        assert!(!unserved.is_empty());
    }
}

//! The report on what a barrier waits for, for people.

use thuban_rows::Kind;

/// Reason of conditions: droplets have not acknowledged what they were sent.
pub const WAITS_FOR_ACKS: &str = "WaitsForAcks";
/// Reason of conditions: droplets are not sent the needed rows, because their transitd does not understand them.
pub const WAITS_FOR_UPGRADE: &str = "WaitsForUpgrade";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// Droplets that have not acked a row, or the removal of a row.
    pub unacked: Vec<String>,
    /// Droplets that are not sent a row of this kind, because their transitd does not understand it. They hold none.
    pub outdated: Vec<(String, Kind)>,
    /// Names of what no live droplet serves.
    pub unserved: Vec<String>,
}

impl Missing {
    pub fn is_empty(&self) -> bool {
        self.unacked.is_empty() && self.outdated.is_empty() && self.unserved.is_empty()
    }

    /// Returns the reason of the condition.
    pub fn reason(&self) -> &'static str {
        if self.outdated.is_empty() {
            WAITS_FOR_ACKS
        } else {
            WAITS_FOR_UPGRADE
        }
    }

    /// Returns the message of the condition: what somebody must do first.
    pub fn message(&self) -> String {
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
        let unserved = Missing {
            unserved: vec!["a bouncer".into()],
            ..Missing::default()
        };
        assert!(!unserved.is_empty());
    }
}

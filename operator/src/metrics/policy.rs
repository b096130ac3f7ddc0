//! Metrics of network policy: how far droplets enforce policies, and how long that takes.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use thuban_api::ConditionStatus;

use super::{METRICS, seconds};

/// The types of conditions that a policy has.
pub const CONDITIONS: [&str; 2] = ["Accepted", "Provisioned"];

const STATUSES: [(ConditionStatus, &str); 3] = [
    (ConditionStatus::True, "True"),
    (ConditionStatus::False, "False"),
    (ConditionStatus::Unknown, "Unknown"),
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfCondition {
    condition: &'static str,
    status: &'static str,
}

/// What is told of one policy: the status of each of [`CONDITIONS`], in that order.
pub type Told = [ConditionStatus; CONDITIONS.len()];

pub(super) struct PolicyMetrics {
    conditions: Family<OfCondition, Gauge>,
    compiled: Histogram,
    provisioned: Histogram,
}

impl Default for PolicyMetrics {
    fn default() -> Self {
        Self {
            conditions: Family::default(),
            compiled: seconds(),
            provisioned: seconds(),
        }
    }
}

impl PolicyMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "policies",
            "Network policies of all kinds, by the status of a condition",
            self.conditions.clone(),
        );
        registry.register(
            "policy_compile_duration_seconds",
            "How long it took to work out what changed policies say of endpoints",
            self.compiled.clone(),
        );
        registry.register(
            "policy_provisioned_duration_seconds",
            "How long policies waited until all droplets enforced them",
            self.provisioned.clone(),
        );
    }

    /// Shows how many policies there are with each status of each condition.
    pub(super) fn show(&self, policies: &[Told]) {
        for (place, condition) in CONDITIONS.into_iter().enumerate() {
            for (status, name) in STATUSES {
                let count = policies.iter().filter(|told| told[place] == status).count();
                let of = OfCondition {
                    condition,
                    status: name,
                };
                let count = i64::try_from(count).unwrap_or(i64::MAX);
                self.conditions.get_or_create(&of).set(count);
            }
        }
    }

    /// Shows no policies: this process does not lead.
    pub(super) fn clear(&self) {
        self.conditions.clear();
    }
}

/// Notes how long it took to work out what changed policies say.
pub fn policies_compiled(took: Duration) {
    METRICS.policies.compiled.observe(took.as_secs_f64());
}

/// Notes how long a policy waited until all droplets enforced it.
pub fn policy_provisioned(waited: Duration) {
    METRICS.policies.provisioned.observe(waited.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn policies_are_counted_once_for_each_condition() {
        let (mut registry, metrics) = (Registry::default(), PolicyMetrics::default());
        metrics.register(&mut registry);
        let page = || {
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text
        };
        let yes = [ConditionStatus::True, ConditionStatus::True];
        let waiting = [ConditionStatus::True, ConditionStatus::Unknown];
        let refused = [ConditionStatus::False, ConditionStatus::False];
        metrics.show(&[yes, waiting, refused, yes]);
        let text = page();
        for line in [
            r#"policies{condition="Accepted",status="True"} 3"#,
            r#"policies{condition="Accepted",status="False"} 1"#,
            r#"policies{condition="Accepted",status="Unknown"} 0"#,
            r#"policies{condition="Provisioned",status="True"} 2"#,
            r#"policies{condition="Provisioned",status="False"} 1"#,
            r#"policies{condition="Provisioned",status="Unknown"} 1"#,
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}: {text}");
        }
        metrics.show(&[yes]);
        let text = page();
        assert!(
            text.contains(r#"policies{condition="Provisioned",status="False"} 0"#),
            "{text}"
        );
        metrics.clear();
        assert!(!page().contains("policies{"), "a standby shows none");
    }
}

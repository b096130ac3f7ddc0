//! Limits of pods' bandwidth: what a pod asks for by annotations, and what its network makes of it.
//!
//! Invariant: no pod of a network with a maximum gets more than that, whatever its annotations say.

use std::collections::BTreeMap;

use thuban_api::{BitRate, EGRESS_BANDWIDTH_ANNOTATION, INGRESS_BANDWIDTH_ANNOTATION, NetworkSpec};

/// Rates of both directions, as the pod sees them; none: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bandwidth {
    pub egress: Option<BitRate>,
    pub ingress: Option<BitRate>,
}

impl Bandwidth {
    /// Returns what a pod asks for. An annotation that can't be read asks for nothing.
    pub fn asked(annotations: &BTreeMap<String, String>) -> Self {
        let read = |annotation: &str| annotations.get(annotation)?.parse().ok();
        Self {
            egress: read(EGRESS_BANDWIDTH_ANNOTATION),
            ingress: read(INGRESS_BANDWIDTH_ANNOTATION),
        }
    }
}

/// The limits of a network's pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The rates of pods that ask for none.
    default: Bandwidth,
    max: Bandwidth,
}

impl Limits {
    pub fn of(network: &NetworkSpec) -> Self {
        let Some(spec) = &network.bandwidth else {
            return Self::default();
        };
        // The API server accepts rates alone.
        let read = |text: &Option<String>| text.as_ref()?.parse().ok();
        Self {
            default: Bandwidth {
                egress: read(&spec.default_egress),
                ingress: read(&spec.default_ingress),
            },
            max: Bandwidth {
                egress: read(&spec.max_egress),
                ingress: read(&spec.max_ingress),
            },
        }
    }

    /// Returns what a pod gets.
    pub fn apply(&self, asked: Bandwidth) -> Bandwidth {
        let limit = |asked: Option<BitRate>, default, max: Option<BitRate>| match asked.or(default) {
            Some(rate) => Some(max.map_or(rate, |max| rate.min(max))),
            None => max,
        };
        Bandwidth {
            egress: limit(asked.egress, self.default.egress, self.max.egress),
            ingress: limit(asked.ingress, self.default.ingress, self.max.ingress),
        }
    }
}

/// A difference between what a pod's annotation says and what the pod gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    /// The reason of the event.
    pub reason: &'static str,
    /// Names the annotation and the remedy.
    pub note: String,
}

/// Returns what is to be told of a pod's annotations in a network of that name.
pub fn remarks(annotations: &BTreeMap<String, String>, limits: &Limits, network: &str) -> Vec<Remark> {
    let got = limits.apply(Bandwidth::asked(annotations));
    let directions = [
        (
            EGRESS_BANDWIDTH_ANNOTATION,
            "maxEgress",
            got.egress,
            limits.max.egress,
        ),
        (
            INGRESS_BANDWIDTH_ANNOTATION,
            "maxIngress",
            got.ingress,
            limits.max.ingress,
        ),
    ];
    let mut remarks = Vec::new();
    for (annotation, field, got, max) in directions {
        let Some(text) = annotations.get(annotation) else {
            continue;
        };
        match (text.parse::<BitRate>(), got, max) {
            (Err(error), got, _) => {
                let instead = got.map_or("no limit".to_owned(), |rate| format!("the limit {rate} of its network"));
                remarks.push(Remark {
                    reason: "InvalidAnnotation",
                    note: format!(
                        "{annotation}: {error}. Correct or remove it: containerd starts no pod with it anew. Until \
                         then a pod that runs has {instead}"
                    ),
                });
            }
            (Ok(asked), Some(got), Some(max)) if asked > max => remarks.push(Remark {
                reason: "BandwidthLimited",
                note: format!(
                    "{annotation}: {text:?} is more than spec.bandwidth.{field} of network {network}: the pod has \
                     {got}. Ask for less, or have the network's maximum raised"
                ),
            }),
            (Ok(_), _, _) => {}
        }
    }
    remarks
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{BTreeMap, Bandwidth, Limits, NetworkSpec, Remark, remarks};

    fn limits(bandwidth: &Value) -> Limits {
        let spec = json!({"vpc": "red", "cidrs": [], "bandwidth": bandwidth});
        Limits::of(&serde_json::from_value::<NetworkSpec>(spec).unwrap())
    }

    fn annotations(egress: Option<&str>, ingress: Option<&str>) -> BTreeMap<String, String> {
        let pair = |direction: &str, rate: Option<&str>| {
            let rate = rate?.to_owned();
            Some((format!("kubernetes.io/{direction}-bandwidth"), rate))
        };
        let pairs = [pair("egress", egress), pair("ingress", ingress)];
        pairs.into_iter().flatten().collect()
    }

    /// Returns what a pod with these annotations gets, in both directions.
    fn got(limits: &Limits, egress: Option<&str>, ingress: Option<&str>) -> [Option<String>; 2] {
        let Bandwidth { egress, ingress } = limits.apply(Bandwidth::asked(&annotations(egress, ingress)));
        [egress, ingress].map(|rate| rate.map(|rate| rate.to_string()))
    }

    fn rates(texts: [Option<&str>; 2]) -> [Option<String>; 2] {
        texts.map(|text| text.map(str::to_owned))
    }

    #[test]
    fn a_pod_gets_what_it_asks_for_in_each_direction() {
        let none = limits(&json!(null));
        assert_eq!(got(&none, None, None), [None, None]);
        assert_eq!(got(&none, Some("10M"), None), rates([Some("10M"), None]));
        assert_eq!(got(&none, None, Some("20M")), rates([None, Some("20M")]));
        assert_eq!(got(&none, Some("10 M"), Some("500")), [None, None]);
    }

    #[test]
    fn defaults_and_maxima_are_those_of_their_direction() {
        let both = limits(&json!({
            "defaultEgress": "10M", "defaultIngress": "20M", "maxEgress": "100M", "maxIngress": "200M",
        }));
        assert_eq!(got(&both, None, None), rates([Some("10M"), Some("20M")]));
        assert_eq!(
            got(&both, Some("50M"), Some("50M")),
            rates([Some("50M"), Some("50M")])
        );
        assert_eq!(
            got(&both, Some("1G"), Some("1G")),
            rates([Some("100M"), Some("200M")])
        );
        assert_eq!(
            got(&both, Some("x"), Some("2P")),
            rates([Some("10M"), Some("20M")]),
            "the default applies"
        );
        let max = limits(&json!({"maxEgress": "100M"}));
        assert_eq!(
            got(&max, None, None),
            rates([Some("100M"), None]),
            "no pod is above the maximum"
        );
    }

    fn told(limits: &Limits, egress: Option<&str>, ingress: Option<&str>) -> Vec<(&'static str, String)> {
        let remarks = remarks(&annotations(egress, ingress), limits, "web");
        let told = remarks.into_iter().map(|Remark { reason, note }| (reason, note));
        told.collect()
    }

    #[test]
    fn remarks_name_the_annotation_and_the_remedy() {
        let limits = limits(&json!({"defaultIngress": "20M", "maxEgress": "100M"}));
        assert_eq!(told(&limits, Some("100M"), Some("1G")), []);
        assert_eq!(told(&limits, None, None), []);
        let above = told(&limits, Some("101M"), None);
        let [(reason, note)] = &above[..] else {
            panic!("one remark")
        };
        assert_eq!(*reason, "BandwidthLimited");
        for part in [
            "kubernetes.io/egress-bandwidth",
            "101M",
            "maxEgress of network web",
            "has 100M.",
            "Ask for less",
        ] {
            assert!(note.contains(part), "{note}");
        }
        let told = told(&limits, Some("1k"), Some("1"));
        let [(reason, note)] = &told[..] else {
            panic!("one remark")
        };
        assert_eq!(*reason, "InvalidAnnotation");
        for part in [
            "kubernetes.io/ingress-bandwidth: \"1\"",
            "between 1k and 1P",
            "Correct or remove it",
            "containerd starts no pod",
            "the limit 20M",
        ] {
            assert!(note.contains(part), "{note}");
        }
    }
}

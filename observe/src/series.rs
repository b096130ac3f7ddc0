//! Sums of flows since the process began, as Prometheus reads them.
//!
//! Invariant: a sum is of one namespace, so that its readers learn nothing of others. The number of sums is bounded.
//! Packets are counted where they come from; those that no pod, Service or node sent, at what they go to.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

use crate::flow::{End, Flow, reason};
use crate::metrics;
use crate::names::{Name, Names};
use crate::view::Scope;

/// The most sums of passed packets: pairs of a namespace and a network. One takes about 150 bytes.
const MAX_PASSED: usize = 20_000;
/// The most sums of dropped packets, by reason.
const MAX_DROPPED: usize = 40_000;

/// The namespace, VPC and network that packets are counted for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    namespace: Option<Name>,
    vpc: Option<Name>,
    network: Option<Name>,
}

impl Place {
    fn of(flow: &Flow) -> Self {
        let known = |end: &End| end.who.clone();
        let who = known(&flow.from).or_else(|| known(&flow.to));
        Self {
            namespace: who.as_ref().and_then(|who| who.namespace.clone()),
            // That of the network: another VPC may share a Service of the VPC `default`.
            vpc: who
                .as_ref()
                .map(|who| who.vpc.clone())
                .or_else(|| flow.vpc.clone()),
            network: who.map(|who| who.network.clone()),
        }
    }

    fn is_seen_by(&self, scope: &Scope) -> bool {
        scope
            .namespace()
            .is_none_or(|asked| self.namespace.as_deref() == Some(asked))
    }

    fn labels(&self) -> (&str, &str) {
        (
            self.vpc.as_deref().unwrap_or_default(),
            self.network.as_deref().unwrap_or_default(),
        )
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Passed {
    packets: u64,
    bytes: u64,
}

#[derive(Default)]
struct Sums {
    passed: BTreeMap<Place, Passed>,
    dropped: BTreeMap<(Place, u8), u64>,
}

/// All sums.
#[derive(Default)]
pub struct Series(Mutex<Sums>);

impl Series {
    /// Adds flows to their sums.
    pub fn add<'a>(&self, flows: impl IntoIterator<Item = &'a Flow>) {
        let sums = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for flow in flows.into_iter().filter(|flow| flow.is_counted()) {
            let place = Place::of(flow);
            if flow.is_dropped() {
                let key = (place, flow.verdict);
                let is_full = sums.dropped.len() >= MAX_DROPPED && !sums.dropped.contains_key(&key);
                if is_full {
                    metrics::sum_refused();
                } else {
                    let packets = sums.dropped.entry(key).or_default();
                    *packets = packets.saturating_add(flow.packets);
                }
            } else if sums.passed.len() >= MAX_PASSED && !sums.passed.contains_key(&place) {
                metrics::sum_refused();
            } else {
                let passed = sums.passed.entry(place).or_default();
                passed.packets = passed.packets.saturating_add(flow.packets);
                passed.bytes = passed.bytes.saturating_add(flow.bytes);
            }
        }
    }

    /// Returns the page of a reader, in Prometheus' text format.
    pub fn page(&self, scope: &Scope, names: &Names) -> String {
        let mut page = String::new();
        self.write_sums(&mut page, scope);
        write_addresses(&mut page, scope, names);
        page
    }

    fn write_sums(&self, page: &mut String, scope: &Scope) {
        let sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut passed: BTreeMap<(&str, &str), Passed> = BTreeMap::new();
        for (place, more) in sums.passed.iter().filter(|(place, _)| place.is_seen_by(scope)) {
            let sum = passed.entry(place.labels()).or_default();
            sum.packets = sum.packets.saturating_add(more.packets);
            sum.bytes = sum.bytes.saturating_add(more.bytes);
        }
        let mut dropped: BTreeMap<(&str, &str, u8), u64> = BTreeMap::new();
        for ((place, verdict), more) in &sums.dropped {
            if place.is_seen_by(scope) {
                let (vpc, network) = place.labels();
                let sum = dropped.entry((vpc, network, *verdict)).or_default();
                *sum = sum.saturating_add(*more);
            }
        }
        head(
            page,
            "thuban_observe_flow_packets_total",
            "counter",
            "Packets that passed",
        );
        for ((vpc, network), sum) in &passed {
            let packets = sum.packets;
            line(
                page,
                "thuban_observe_flow_packets_total",
                vpc,
                network,
                "",
                packets,
            );
        }
        head(
            page,
            "thuban_observe_flow_bytes_total",
            "counter",
            "Bytes of packets that passed",
        );
        for ((vpc, network), sum) in &passed {
            line(
                page,
                "thuban_observe_flow_bytes_total",
                vpc,
                network,
                "",
                sum.bytes,
            );
        }
        head(
            page,
            "thuban_observe_dropped_packets_total",
            "counter",
            "Dropped packets",
        );
        for ((vpc, network, verdict), packets) in &dropped {
            let reason = reason(*verdict);
            line(
                page,
                "thuban_observe_dropped_packets_total",
                vpc,
                network,
                &reason,
                *packets,
            );
        }
    }
}

/// Adds the addresses of networks that the reader has endpoints in.
fn write_addresses(page: &mut String, scope: &Scope, names: &Names) {
    let own: Option<BTreeSet<&Name>> = scope.namespace().map(|namespace| {
        let own = names.endpoints().filter(|placed| placed.who.is_of(namespace));
        own.map(|placed| &placed.who.network).collect()
    });
    let is_seen = |network: &Name| own.as_ref().is_none_or(|own| own.contains(network));
    let seen: Vec<_> = names.networks().filter(|(name, _)| is_seen(name)).collect();
    head(
        page,
        "thuban_network_addresses_used",
        "gauge",
        "Reserved IPv4 addresses",
    );
    for (name, network) in &seen {
        if let Some(used) = network.allocated {
            line(
                page,
                "thuban_network_addresses_used",
                &network.vpc,
                name,
                "",
                used,
            );
        }
    }
    head(
        page,
        "thuban_network_addresses",
        "gauge",
        "IPv4 addresses in the ranges of the network",
    );
    for (name, network) in &seen {
        if let Some(capacity) = network.capacity {
            line(page, "thuban_network_addresses", &network.vpc, name, "", capacity);
        }
    }
}

fn head(page: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(page, "# HELP {name} {help}.\n# TYPE {name} {kind}");
}

/// Adds a sum. Names of objects need no escapes.
fn line(page: &mut String, name: &str, vpc: &str, network: &str, reason: &str, value: u64) {
    let reason = if reason.is_empty() {
        String::new()
    } else {
        format!(",reason=\"{reason}\"")
    };
    let _ = writeln!(
        page,
        "{name}{{vpc=\"{vpc}\",network=\"{network}\"{reason}}} {value}"
    );
}

#[cfg(test)]
mod tests {
    use thuban_common::counters::Counter;

    use super::*;
    use crate::flow::tests::{flow, names};

    #[test]
    fn sums_are_those_of_the_asked_namespace() {
        let (series, names) = (Series::default(), names());
        let red = flow(&names, "10.0.1.3", "10.0.2.4", Counter::SentDirect);
        let delivered = flow(&names, "10.0.1.3", "10.0.2.4", Counter::Delivered);
        let blue = flow(&names, "10.0.2.4", "10.0.1.3", Counter::SentDirect);
        let dropped = flow(&names, "10.0.1.4", "8.8.8.8", Counter::OutsideVpc);
        let come_in = flow(&names, "8.8.8.8", "10.0.1.3", Counter::Delivered);
        series.add([&red, &red, &delivered, &blue, &dropped, &come_in]);
        let page = series.page(&Scope::Namespace("red".to_owned()), &names);
        for expected in [
            "# TYPE thuban_observe_flow_packets_total counter\n",
            "thuban_observe_flow_packets_total{vpc=\"red\",network=\"red-web\"} 18\n",
            "thuban_observe_flow_bytes_total{vpc=\"red\",network=\"red-web\"} 12600\n",
            "thuban_observe_dropped_packets_total{vpc=\"red\",network=\"red-web\",reason=\"outside_vpc\"} 6\n",
            "thuban_network_addresses_used{vpc=\"red\",network=\"red-web\"} 3\n",
            "thuban_network_addresses{vpc=\"red\",network=\"red-web\"} 252\n",
        ] {
            assert!(page.contains(expected), "{expected} in {page}");
        }
        assert!(!page.contains("red-db"), "a network of others: {page}");
        let all = series.page(&Scope::All, &names);
        assert!(
            all.contains("thuban_observe_flow_packets_total{vpc=\"red\",network=\"red-db\"} 6\n"),
            "{all}"
        );
        assert!(
            all.contains("thuban_network_addresses_used{vpc=\"red\",network=\"red-db\"} 1\n"),
            "{all}"
        );
    }

    #[test]
    fn the_number_of_sums_is_bounded() {
        let (series, names) = (Series::default(), names());
        for number in 0..MAX_PASSED + 10 {
            let vpc = Some(format!("vpc-{number}").into());
            let passed = flow(&names, "10.0.1.99", "10.0.2.99", Counter::SentDirect);
            series.add([&Flow { vpc, ..passed }]);
        }
        assert_eq!(series.0.lock().unwrap().passed.len(), MAX_PASSED);
    }
}

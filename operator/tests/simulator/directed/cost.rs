//! Tests of how often the operator writes to the API server for what a user makes.

use std::collections::BTreeMap;
use std::time::Duration;

use http::Method;
use tokio::time::sleep;

use super::pace::{create, create_network};
use super::{begin, check, has, is_provisioned, until};
use crate::kind::Kind;
use crate::simulation::State;

/// The operator has written all that it holds back after this time.
const QUIET: Duration = Duration::from_secs(20);

/// Returns how often the operator wrote since a line of the trace, by method and kind. Refused writes don't count: the
/// operator may act twice on what its watches have not brought yet.
fn written(state: &State, since: usize) -> BTreeMap<String, usize> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for entry in &state.trace[since..] {
        let words: Vec<&str> = entry.split_whitespace().collect();
        let [_, _, method, target, "->", code, ..] = words.as_slice() else {
            continue;
        };
        if code.starts_with('2') {
            let kind = target.split('/').next().unwrap_or_default();
            let status = if target.ends_with("/status") {
                " status"
            } else {
                ""
            };
            *counts.entry(format!("{method} {kind}{status}")).or_default() += 1;
        }
    }
    counts
}

#[test]
fn a_vpc_and_its_network_cost_15_writes_and_8_events() {
    for seed in 1..=3 {
        check("cost", seed, async |simulation| {
            begin(simulation, 1).await;
            sleep(QUIET).await;
            let since = simulation.lock().trace.len();
            // The VPC becomes Provisioned after the operator knows the network, so that it is counted by then.
            simulation.lock().stalled = Some((Method::PATCH, Kind::Divider));
            create(simulation, "10.0.0.0/16");
            until(simulation, "the VPC has a divider", |state| {
                has(state, Kind::Divider, "blue-d0")
            })
            .await;
            create_network(simulation);
            sleep(Duration::from_secs(1)).await;
            simulation.lock().stalled = None;
            until(simulation, "the network is Provisioned", |state| {
                is_provisioned(state, Kind::Network, "", "blue-1")
            })
            .await;
            sleep(QUIET).await;
            let wanted = [
                // Two statuses of the VPC: its number and ranges in force, and its phase.
                ("PATCH vpcs", 1),
                ("POST vniclaims", 1),
                ("PATCH vpcs status", 2),
                ("POST dividers", 2),
                ("PATCH dividers status", 2),
                // Two statuses of the network: its ranges in force, and its phase.
                ("PATCH networks", 1),
                ("PATCH networks status", 2),
                ("POST bouncers", 1),
                ("PATCH bouncers status", 1),
                // The roles that each droplet has.
                ("PATCH droplets status", 2),
                // The VPC and the network name the roles that they made, and each object is Provisioned.
                ("POST events", 8),
            ];
            let wanted: BTreeMap<String, usize> =
                wanted.map(|(request, times)| (request.to_owned(), times)).into();
            let written = written(&simulation.lock(), since);
            if written != wanted {
                simulation.lock().violation(format!("written were {written:?}"));
            }
        });
    }
}

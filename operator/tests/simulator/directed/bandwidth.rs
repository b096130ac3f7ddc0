//! Limits of a pod's bandwidth follow its annotations and its network, while it runs.

use serde_json::{Value, json};

use super::{begin, check, end_everything, pod_on, says, until};
use crate::kind::Kind;
use crate::simulation::{Simulation, State};

/// Returns the rates of all pods' rows: what they may send and receive.
fn rates(state: &State) -> Vec<[u64; 2]> {
    let droplets = state.droplets.values();
    let locals = droplets.flat_map(|droplet| droplet.tables.locals());
    locals.map(|row| [row.egress_rate, row.ingress_rate]).collect()
}

/// Sets the annotation of what pod `p` may send, or takes it away.
fn annotate(simulation: &Simulation, egress: Option<&str>) {
    simulation.with(|state| {
        state.store.edit(Kind::Pod, "east", "p", |pod| {
            let annotations = pod["metadata"]["annotations"].as_object_mut().unwrap();
            let name = "kubernetes.io/egress-bandwidth";
            match egress {
                Some(rate) => annotations.insert(name.to_owned(), json!(rate)),
                None => annotations.remove(name),
            };
        });
    });
}

fn limit_network(simulation: &Simulation, bandwidth: Value) {
    simulation.with(|state| {
        state.store.edit(Kind::Network, "", "red-1", |network| {
            network["spec"]["bandwidth"] = bandwidth;
        });
    });
}

fn is_told(state: &State, reason: &str) -> bool {
    let event = ["Pod", "p", reason].map(str::to_owned).into();
    state.told.contains(&event)
}

#[test]
fn limits_follow_a_pod_and_its_network() {
    check("bandwidth", 1, async |simulation| {
        begin(simulation, 1).await;
        pod_on(simulation, "p", "n0").await;
        until(simulation, "the pod is served", |state| {
            says(state, "p", "Acknowledged") && rates(state) == [[0, 0]]
        })
        .await;
        annotate(simulation, Some("8M"));
        until(simulation, "it is limited", |state| {
            rates(state) == [[1_000_000, 0]]
        })
        .await;
        simulation.with(|state| assert!(!is_told(state, "BandwidthLimited")));
        limit_network(simulation, json!({"maxEgress": "4M", "defaultIngress": "16M"}));
        until(
            simulation,
            "the network's limits hold, and people know",
            |state| rates(state) == [[500_000, 2_000_000]] && is_told(state, "BandwidthLimited"),
        )
        .await;
        simulation.with(|state| assert!(!is_told(state, "InvalidAnnotation")));
        limit_network(simulation, json!({"defaultEgress": "2M"}));
        annotate(simulation, Some("fast"));
        until(simulation, "the default holds, and people know", |state| {
            rates(state) == [[250_000, 0]] && is_told(state, "InvalidAnnotation")
        })
        .await;
        annotate(simulation, None);
        limit_network(simulation, Value::Null);
        until(simulation, "no limit is left", |state| rates(state) == [[0, 0]]).await;
        end_everything(simulation).await;
    });
}

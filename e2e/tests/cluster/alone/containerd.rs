//! containerd dies again and again while pods come: all of them run in the end, and nothing of them stays afterwards.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;

use crate::audit::wait_sound;
use crate::holdings::holdings;
use crate::support::{apply, delete, get};
use crate::tenant::Tenant;
use crate::tenants::tenants;

const NODE: &str = "node-c";
const NAME: &str = "restless";
const PODS: usize = 24;
const KILLS: usize = 6;

fn containerd() -> String {
    let found = tenants()
        .cluster
        .exec_on_node(NODE, &["pgrep", "-o", "-x", "containerd"]);
    found.unwrap_or_default()
}

#[test]
fn six_containerd_kills_lose_no_pod_and_leave_no_state() {
    let cluster = &tenants().cluster;
    let tenant = Tenant::new(cluster, NAME, &["10.43.0.0/16"], &["10.43.0.0/24"]).unwrap();
    // The network's own rows exist before and after; the rows of pods must come and go.
    std::thread::sleep(Duration::from_secs(1));
    let vpc = get(cluster, &["vpc", NAME]).unwrap();
    let vni = vpc["status"]["vni"].as_u64().unwrap();
    let before = holdings(NODE, vni);
    let pods = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NAME, "namespace": NAME},
        "spec": {"replicas": PODS, "selector": {"matchLabels": {"app": NAME}}, "template": {
            "metadata": {"labels": {"app": NAME}},
            "spec": {"nodeSelector": {"kubernetes.io/hostname": NODE}, "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "pause", "image": "registry.k8s.io/pause:3.10"}]},
        }},
    });
    apply(cluster, &[pods]).unwrap();
    for _ in 0..KILLS {
        std::thread::sleep(Duration::from_millis(1500));
        let old = containerd();
        cluster.signal(NODE, "containerd", "KILL").unwrap();
        cluster
            .wait_for("another containerd", Duration::from_secs(30), || {
                let new = containerd();
                Ok(!new.is_empty() && new != old)
            })
            .unwrap();
    }
    // containerd's libcni does not write a result's file at once. An empty file makes every DEL of that sandbox fail in
    // it for ever.
    let empty = ["find", "/var/lib/cni/results", "-type", "f", "-empty", "-delete"];
    cluster.exec_on_node(NODE, &empty).unwrap();
    let deployment = format!("deployment/{NAME}");
    let status = ["rollout", "status", "-n", NAME, &deployment, "--timeout=300s"];
    cluster.kubectl(&status).unwrap();
    let running = get(cluster, &["pods", "-n", NAME]).unwrap();
    let addresses: BTreeSet<String> = running["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pod| pod["status"]["podIP"].to_string())
        .collect();
    assert_eq!(addresses.len(), PODS, "an address was given twice");
    eprintln!(
        "{PODS} pods run after {KILLS} deaths of containerd, the node holds {:?}",
        holdings(NODE, vni)
    );
    delete(cluster, &["namespace", NAME]).unwrap();
    cluster
        .wait_for("nothing of them on the node", Duration::from_mins(1), || {
            Ok(holdings(NODE, vni) == before)
        })
        .unwrap_or_else(|error| panic!("{error:#}; before {before:?}, now {:?}", holdings(NODE, vni)));
    wait_sound(cluster);
    tenant.remove().unwrap();
}

//! NetworkPolicies and ClusterNetworkPolicies, in one of two VPCs that are as equal as possible: what is allowed and
//! denied in one says nothing of the other. Policies say the same by both families.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use thuban_api::REPORT_DENIED_ANNOTATION;
use thuban_cluster::Cluster;

use crate::support::{NOT_REACHED, Pod, REACHED, addresses, apply, delete, netexec_manifest, running};
use crate::tenant::Tenant;
use crate::tenants::tenants;

const TWINS: [&str; 2] = ["cedar", "birch"];
const SOON: Duration = Duration::from_secs(30);
/// Nodes report once a minute.
const TOLD: Duration = Duration::from_mins(3);

/// Pods of a twin: name, role, node.
const PODS: [(&str, &str, &str); 4] = [
    ("server", "server", "node-a"),
    ("near", "friend", "node-a"),
    ("far", "friend", "node-b"),
    ("stranger", "stranger", "node-c"),
];

struct Twin {
    /// Each with its addresses, one of each family.
    pods: Vec<(Pod, Vec<IpAddr>)>,
}

impl Twin {
    fn member(&self, name: &str) -> &(Pod, Vec<IpAddr>) {
        self.pods.iter().find(|(pod, _)| pod.name == name).unwrap()
    }

    fn pod(&self, name: &str) -> &Pod {
        &self.member(name).0
    }

    /// Whether a pod reaches another one by TCP at all of its addresses, or at none. `None`: the families differ.
    fn reaches(&self, from: &str, to: &str, patience: Duration) -> Option<bool> {
        let (from, addresses) = (self.pod(from), &self.member(to).1);
        let reached = |address: &&IpAddr| from.tcp(**address, patience).is_ok();
        match addresses.iter().filter(reached).count() {
            0 => Some(false),
            count => (count == addresses.len()).then_some(true),
        }
    }
}

fn pods(cluster: &Cluster, namespace: &str) -> Twin {
    let manifest = |(name, role, node): (&str, &str, &str)| {
        let mut pod = netexec_manifest(namespace, name, node, None);
        pod["metadata"]["labels"] = json!({"role": role});
        pod
    };
    apply(cluster, &PODS.map(manifest)).unwrap();
    let pods = PODS.map(|(name, ..)| {
        let pod = running(cluster, namespace, name).unwrap();
        let addresses = addresses(cluster, &pod);
        assert_eq!(addresses.len(), 2, "{name} has {addresses:?}");
        (pod, addresses)
    });
    Twin { pods: pods.into() }
}

fn policy(name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": TWINS[0]},
        "spec": spec,
    })
}

/// Waits until all droplets enforce a policy.
fn wait_in_force(cluster: &Cluster, name: &str) -> Result<()> {
    let state = format!("policystates.thuban.dev/{name}");
    let wait = [
        "wait",
        "-n",
        TWINS[0],
        "--for=condition=Provisioned",
        &state,
        "--timeout=30s",
    ];
    cluster.wait_for(&format!("a state of {name}"), SOON, || {
        Ok(cluster.kubectl(&["get", "-n", TWINS[0], &state]).is_ok())
    })?;
    cluster.kubectl(&wait).map(|_| ())
}

/// Asserts who reaches whom by TCP, by both families, in a twin: `expected` are the pairs that do, all others do not.
fn assert_reach(twin: &Twin, denied: &[(&str, &str)]) {
    for (from, ..) in PODS {
        for (to, ..) in PODS.iter().filter(|(to, ..)| *to != from) {
            let is_denied = denied.contains(&(from, to));
            let patience = if is_denied { NOT_REACHED } else { REACHED };
            let expected = if is_denied { "denied" } else { "allowed" };
            assert_eq!(
                twin.reaches(from, to, patience),
                Some(!is_denied),
                "{from} to {to} is to be {expected}"
            );
        }
    }
}

/// Asserts that the PolicyState of `server` says that the stranger was denied, and no more when its author no longer
/// asks. That of the other policy says nothing.
fn assert_told(cluster: &Cluster, cedar: &Twin) {
    let denied = |name: &str| -> Result<Value> {
        let state = format!("policystates.thuban.dev/{name}");
        let state = cluster.kubectl(&["get", "-n", TWINS[0], &state, "-o", "json"])?;
        Ok(serde_json::from_str::<Value>(&state)?["status"]["denied"].take())
    };
    cluster
        .wait_for("the stranger in the PolicyState", TOLD, || {
            // What is denied before the droplets are asked isn't told.
            assert_eq!(cedar.reaches("stranger", "server", NOT_REACHED), Some(false));
            let denied = denied("server")?;
            let peers = denied["lastPeers"].as_array();
            let is_stranger = |peer: &Value| {
                peer["peerPod"] == "cedar/stranger"
                    && peer["pod"] == "cedar/server"
                    && peer["direction"] == "Ingress"
            };
            Ok(denied["packets"].as_u64() > Some(0)
                && peers.is_some_and(|peers| peers.iter().any(is_stranger)))
        })
        .unwrap();
    assert_eq!(denied("stranger").unwrap(), Value::Null, "nobody has asked");
    let annotation = format!("{REPORT_DENIED_ANNOTATION}-");
    cluster
        .kubectl(&["annotate", "networkpolicy", "-n", TWINS[0], "server", &annotation])
        .unwrap();
    cluster
        .wait_for("the end of it", SOON, || Ok(denied("server")?.is_null()))
        .unwrap();
}

#[test]
fn policies_allow_and_deny_in_their_own_vpc_alone() {
    let cluster = &tenants().cluster;
    let vpc = ["10.88.0.0/16", "fd00:88::/48"];
    let network = ["10.88.1.0/24", "fd00:88:0:1::/64"];
    let new = |name: &&str| Tenant::new(cluster, name, &vpc, &network).unwrap();
    let made: Vec<Tenant> = TWINS.iter().map(new).collect();
    let [cedar, birch] = TWINS.map(|name| pods(cluster, name));
    assert_reach(&cedar, &[]);

    // Ingress by label and port.
    let server = json!({
        "podSelector": {"matchLabels": {"role": "server"}}, "policyTypes": ["Ingress"],
        "ingress": [{
            "from": [{"podSelector": {"matchLabels": {"role": "friend"}}}],
            "ports": [{"port": 8080, "protocol": "TCP"}],
        }],
    });
    let mut server = policy("server", &server);
    server["metadata"]["annotations"] = json!({REPORT_DENIED_ANNOTATION: "true"});
    apply(cluster, &[server]).unwrap();
    wait_in_force(cluster, "server").unwrap();
    assert_reach(&cedar, &[("stranger", "server")]);
    assert!(
        cedar
            .pod("far")
            .udp(cedar.pod("server").address, NOT_REACHED)
            .is_err()
    );
    assert!(
        cedar
            .pod("far")
            .ping(cedar.pod("server").address, NOT_REACHED)
            .is_err()
    );
    assert_reach(&birch, &[]);

    // Egress: the stranger may ask nobody, and is answered by whom it may not ask.
    let stranger = json!({
        "podSelector": {"matchLabels": {"role": "stranger"}}, "policyTypes": ["Egress"], "egress": [],
    });
    apply(cluster, &[policy("stranger", &stranger)]).unwrap();
    wait_in_force(cluster, "stranger").unwrap();
    let shut = [("stranger", "server"), ("stranger", "near"), ("stranger", "far")];
    assert_reach(&cedar, &shut);
    assert_reach(&birch, &[]);

    // Other labels change what a pod may do while it runs.
    let label = |role: &str| {
        let role = format!("role={role}");
        cluster
            .kubectl(&["label", "pod", "-n", TWINS[0], "stranger", "--overwrite", &role])
            .unwrap();
    };
    label("friend");
    cluster
        .wait_for("the friend's way to the server", SOON, || {
            Ok(cedar.reaches("stranger", "server", NOT_REACHED) == Some(true))
        })
        .unwrap();
    label("stranger");
    cluster
        .wait_for("the end of it", SOON, || {
            Ok(cedar.reaches("stranger", "server", NOT_REACHED) == Some(false))
        })
        .unwrap();

    assert_told(cluster, &cedar);

    // Without policies all is as before.
    delete(cluster, &["networkpolicy", "-n", TWINS[0], "server", "stranger"]).unwrap();
    cluster
        .wait_for("the stranger's way to the server", SOON, || {
            Ok(cedar.reaches("stranger", "server", NOT_REACHED) == Some(true))
        })
        .unwrap();
    assert_reach(&cedar, &[]);
    for tenant in made {
        tenant.remove().unwrap();
    }
}

//! Nodes that are gone for good, by their deletion or by the out-of-service taint: endpoints follow their pods, claims
//! are freed, roles work elsewhere. Then the node comes back clean. These tests take the node's pods of all tenants
//! too.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::audit::wait_sound;
use crate::flows::settled;
use crate::leadership::{leader, pod_of};
use crate::support::{REACHED, apply, condition, get, netexec_manifest, pod_addresses, running};
use crate::tenant::Tenant;
use crate::tenants::tenants;

/// The name of the tenant, its network and its namespace.
const NAME: &str = "vanished";
/// Roles go to Nodes with this label first.
const PREFERENCE: &str = "transit.node-restriction.kubernetes.io/thuban";
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
const REPLICAS: usize = 4;

/// Makes pods on all nodes, and an Endpoint of a user's whose pod is on `node`.
fn make<'a>(cluster: &'a Cluster, node: &str) -> Result<Tenant<'a>> {
    cluster.kubectl(&["label", "node", node, &format!("{PREFERENCE}=")])?;
    let tenant = Tenant::new(cluster, NAME, &["10.24.0.0/16"], &["10.24.1.0/24"])?;
    cluster.kubectl(&["label", "node", node, &format!("{PREFERENCE}-")])?;
    let mut template = netexec_manifest(NAME, "web", node, None);
    template["spec"]["nodeSelector"] = json!({});
    template["spec"]["topologySpreadConstraints"] = json!([{
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"app": "netexec"}},
    }]);
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": NAME},
        "spec": {"replicas": REPLICAS, "selector": {"matchLabels": {"app": "netexec"}}, "template": {
            "metadata": {"labels": {"app": "netexec"}}, "spec": template["spec"]}},
    });
    let endpoint = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Endpoint",
        "metadata": {"name": "db", "namespace": NAME}, "spec": {"network": NAME},
    });
    apply(cluster, &[deployment, endpoint, named(node)])?;
    running(cluster, NAME, "db-0")?;
    rolled_out(cluster)?;
    Ok(tenant)
}

/// Returns the pod that has the Endpoint. A StatefulSet makes such a pod again under its name.
fn named(node: &str) -> Value {
    let mut pod = netexec_manifest(NAME, "db-0", node, None);
    pod["metadata"]["labels"] = json!({"app": "db"});
    pod["metadata"]["annotations"]["thuban.dev/endpoint"] = "db".into();
    pod
}

fn rolled_out(cluster: &Cluster) -> Result<()> {
    let status = ["rollout", "status", "-n", NAME, "deployment/web", "--timeout=60s"];
    cluster.kubectl(&status).map(|_| ())
}

/// Returns names and addresses of the tenant's pods on a node.
fn pods_on(cluster: &Cluster, node: &str) -> Result<Vec<(String, String)>> {
    let field = format!("--field-selector=spec.nodeName={node}");
    let pods = get(cluster, &["pods", "-n", NAME, &field])?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let pods = pods["items"].as_array().into_iter().flatten();
    Ok(pods
        .map(|pod| (text(&pod["metadata"]["name"]), text(&pod["status"]["podIP"])))
        .collect())
}

/// How long an address may take to be free: until all have acked, and then it rests for 30 s.
const FREED: Duration = Duration::from_secs(90);

/// Whether no pod of this name holds the address any more: its claim has a mark, is gone, or is another pod's.
fn is_freed(cluster: &Cluster, pod: &str, address: &str) -> Result<bool> {
    let claims = get(cluster, &["ipclaims.thuban.dev"])?;
    let name = format!("{NAME}.{address}");
    let claim = claims["items"].as_array().into_iter().flatten();
    let mut claim = claim.filter(|claim| claim["metadata"]["name"] == name.as_str());
    Ok(claim.all(|claim| claim["spec"]["pod"] != pod || !claim["status"]["releasedAt"].is_null()))
}

/// Waits until no endpoint, no claim and no role is left on the node, and all pods run elsewhere with addresses of
/// their own.
fn wait_left(cluster: &Cluster, node: &str, was: &[(String, String)]) -> Result<()> {
    let elsewhere =
        |kind: &'static str| move || Ok(settled(cluster, kind, NAME, 1)?.is_some_and(|on| on[0] != node));
    let patience = Duration::from_secs(30);
    cluster.wait_for("the bouncer elsewhere", patience, elsewhere("bouncers"))?;
    cluster.wait_for("the divider elsewhere", patience, elsewhere("dividers"))?;
    rolled_out(cluster)?;
    for (pod, address) in was.iter().filter(|(pod, _)| pod != "db-0") {
        let what = format!("{address} of {pod} freed");
        cluster.wait_for(&what, FREED, || is_freed(cluster, pod, address))?;
    }
    running(cluster, NAME, "db-0")?;
    ensure!(pods_on(cluster, node)?.is_empty(), "pods on {node}");
    ensure!(pod_addresses(cluster, NAME)?.len() == REPLICAS + 1);
    Ok(())
}

/// A node that does not answer, until this is dropped.
struct Dead<'a>(&'a Cluster, &'a str);

impl<'a> Dead<'a> {
    fn new(cluster: &'a Cluster, node: &'a str) -> Result<Self> {
        for process in ["kubelet", "transitd"] {
            cluster.signal(node, process, "KILL")?;
        }
        Ok(Self(cluster, node))
    }
}

impl Drop for Dead<'_> {
    fn drop(&mut self) {
        let Self(cluster, node) = self;
        // The node may have no taint, or not be registered.
        let _ = cluster.kubectl(&["taint", "node", node, &format!("{OUT_OF_SERVICE}-")]);
        if let Err(error) = cluster.start_kubelet(node) {
            eprintln!("{node}: {error:#}");
        }
    }
}

/// Makes the node vanish and come back; `end` reports the loss to Kubernetes.
fn vanishes(what: &str, end: impl FnOnce(&Cluster, &str) -> Result<()>) {
    let cluster = &tenants().cluster;
    let nodes = cluster.nodes().unwrap();
    let (_, leads) = pod_of(cluster, &leader(cluster).unwrap().0).unwrap();
    let (node, other) = {
        let mut others = nodes.iter().filter(|node| **node != leads);
        (others.next().unwrap().as_str(), others.next().unwrap().as_str())
    };
    let tenant = make(cluster, node).unwrap();
    assert_eq!(
        settled(cluster, "bouncers", NAME, 1).unwrap(),
        Some(vec![node.to_owned()])
    );
    let was = pods_on(cluster, node).unwrap();
    let address = running(cluster, NAME, "db-0").unwrap().address;
    assert!(was.len() >= 2, "{was:?}");
    let dead = Dead::new(cluster, node).unwrap();
    let since = Instant::now();
    end(cluster, node).unwrap();
    // Kubernetes does this itself after a minute.
    let force = [
        "delete",
        "pods",
        "-n",
        NAME,
        "--force",
        "--grace-period=0",
        "--wait=false",
        "--ignore-not-found",
    ];
    let names: Vec<&str> = was.iter().map(|(name, _)| name.as_str()).collect();
    cluster.kubectl(&[&force[..], &names].concat()).unwrap();
    apply(cluster, &[named(other)]).unwrap();
    wait_left(cluster, node, &was).unwrap();
    follows(cluster, other, address).unwrap();
    eprintln!("{what}: all is elsewhere after {:.1?}", since.elapsed());
    let since = Instant::now();
    drop(dead);
    wait_back(cluster, node).unwrap();
    eprintln!("{what}: {node} is back after {:.1?}", since.elapsed());
    wait_sound(cluster);
    tenant.remove().unwrap();
}

/// Asserts that the user's Endpoint has its address at the pod's new place, and that all reach it there.
fn follows(cluster: &Cluster, node: &str, address: Ipv4Addr) -> Result<()> {
    let db = running(cluster, NAME, "db-0")?;
    ensure!((db.node.as_str(), db.address) == (node, address), "{db:?}");
    let pods = get(cluster, &["pods", "-n", NAME, "-l", "app=netexec"])?;
    for pod in pods["items"].as_array().context("a list")? {
        let name = pod["metadata"]["name"].as_str().context("a name")?;
        let answer = running(cluster, NAME, name)?.tcp(address, REACHED)?;
        ensure!(answer == "db-0", "{name} reached {answer}");
    }
    Ok(())
}

/// Waits until node and droplet exist again.
fn wait_back(cluster: &Cluster, node: &str) -> Result<()> {
    cluster.wait_for(&format!("{node} back"), Duration::from_mins(1), || {
        let is_ready = |object: &Value| {
            let ready = condition(object, "Ready");
            ready.is_some_and(|ready| ready["status"] == "True")
        };
        let droplet = get(cluster, &["droplets.thuban.dev", node])?;
        Ok(is_ready(&get(cluster, &["node", node])?) && is_ready(&droplet))
    })
}

#[test]
fn all_leaves_a_node_that_is_deleted_and_it_comes_back_clean() {
    vanishes("node deleted", |cluster, node| {
        cluster
            .kubectl(&["delete", "node", node, "--wait=false"])
            .map(|_| ())
    });
}

#[test]
fn out_of_service_node_is_vacated_and_returns_clean() {
    vanishes("node out of service", |cluster, node| {
        let taint = format!("{OUT_OF_SERVICE}=nodeshutdown:NoExecute");
        cluster.kubectl(&["taint", "node", node, &taint]).map(|_| ())
    });
}

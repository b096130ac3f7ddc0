//! From a Service to a client outside: an address is leased, nodes announce it to a router, and the client is answered.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::Cluster;
use thuban_cluster::router::{ASN, NODES_ASN, Router};

use super::fronts::{Connections, ensure_own_address};
use super::vips::{self, Backends};
use super::{
    Made, SOON, SYSTEM, TENANT, ensure_pages_are_well_formed, install, pool, wait_for_address,
    wait_for_processes,
};
use crate::support::{PORT, REACHED, apply, delete, get, http_hostname_at, netexec_manifest, running};
use crate::tenants::tenants;

const NAME: &str = "announced";
const POOL: &str = "announced";
const PASSWORD: &str = "s3cret";

fn service() -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME, "namespace": TENANT}, "spec": {
        "type": "LoadBalancer", "loadBalancerClass": "thuban.dev/vip", "selector": {"app": NAME},
        "ports": [{"port": 80, "targetPort": PORT}]}})
}

/// Returns a backend on a node.
fn backend(node: &str) -> Value {
    let mut pod = netexec_manifest(TENANT, &format!("{NAME}-{node}"), node, None);
    pod["metadata"]["labels"] = json!({"app": NAME, "test": "announcing"});
    pod
}

fn peer(router: &Router) -> Value {
    json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "BgpPeer", "metadata": {"name": "router"}, "spec": {
        "address": router.address(), "asn": ASN, "localAsn": NODES_ASN, "holdSeconds": 3, "bfd": {},
        "passwordSecret": "router"}})
}

/// Writes the Secret with a password for the router.
fn set_password(cluster: &Cluster, password: &str) -> Result<()> {
    let metadata = json!({"name": "router", "namespace": "thuban-bgp"});
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata,
        "type": "kubernetes.io/basic-auth", "stringData": {"password": password}});
    apply(cluster, &[secret])
}

/// Asserts that nodes have no session without the password, nor with a wrong one, and that they notice each change.
fn ensure_password_counts(cluster: &Cluster, router: &Router, address: IpAddr, nodes: usize) -> Result<()> {
    let events = [
        "events",
        "-n",
        "default",
        "--field-selector=involvedObject.kind=BgpPeer",
    ];
    cluster.wait_for("an event of the BgpPeer", SOON, || {
        let events = get(cluster, &events)?;
        let mut events = events["items"].as_array().into_iter().flatten();
        Ok(events.any(|event| event["reason"] == "PasswordNotFound"))
    })?;
    assert_eq!(router.next_hops(address)?.len(), 0, "without a password");
    set_password(cluster, PASSWORD)?;
    wait_for_next_hops(cluster, router, address, nodes)?;
    set_password(cluster, "wrong")?;
    wait_for_next_hops(cluster, router, address, 0)?;
    set_password(cluster, PASSWORD)?;
    wait_for_next_hops(cluster, router, address, nodes)
}

fn vip(cluster: &Cluster) -> Result<Value> {
    get(cluster, &["vip", "-n", TENANT, NAME])
}

/// Waits until the router has so many ways to the address. Tells what is known otherwise.
pub fn wait_for_next_hops(cluster: &Cluster, router: &Router, address: IpAddr, count: usize) -> Result<()> {
    let mut last = Vec::new();
    cluster
        .wait_for(&format!("{count} next hops"), SOON, || {
            last = router.next_hops(address)?;
            Ok(last.len() == count)
        })
        .with_context(|| {
            let vips = get(cluster, &["vip", "-n", TENANT]).unwrap_or_default();
            let logs = cluster.kubectl(&[
                "logs",
                "-n",
                SYSTEM,
                "ds/thuban-speaker",
                "-c",
                "speaker",
                "--tail=20",
            ]);
            format!(
                "{last:?}; {vips:#}; {}; {}",
                logs.unwrap_or_default(),
                router.log()
            )
        })
}

/// Asks by several connections, and returns who answered.
pub fn answers(router: &Router, address: SocketAddr) -> Result<BTreeSet<String>> {
    router.at_client(|| {
        (0..24)
            .map(|_| http_hostname_at(address, REACHED))
            .collect::<Result<_>>()
    })
}

/// Waits until these pods answer, and no other: nodes hear of a new backend one after the other.
pub fn wait_for_answers(
    cluster: &Cluster,
    router: &Router,
    address: SocketAddr,
    pods: &BTreeSet<String>,
) -> Result<()> {
    let mut last = None;
    cluster
        .wait_for("the answers of the backends", SOON, || {
            let answers = answers(router, address);
            let are_all = answers.as_ref().is_ok_and(|answers| answers == pods);
            last = Some(answers);
            Ok(are_all)
        })
        .with_context(|| format!("wanted {pods:?}, last {last:?}"))
}

/// Asserts that an address is announced without lbaasd and cidrd, too.
fn outlives_control_plane(
    cluster: &Cluster,
    router: &Router,
    server: SocketAddr,
    answering: &BTreeSet<String>,
) -> Result<()> {
    for workload in ["deployment/thuban-cidrd", "deployment/thuban-lbaasd"] {
        cluster.kubectl(&["scale", "-n", SYSTEM, workload, "--replicas=0"])?;
    }
    cluster.wait_for("the end of lbaasd", SOON, || {
        let pods = cluster.kubectl(&[
            "get",
            "pods",
            "-n",
            SYSTEM,
            "-l",
            "app.kubernetes.io/name=thuban-lbaasd",
        ])?;
        Ok(pods.trim().is_empty())
    })?;
    wait_for_answers(cluster, router, server, answering)?;
    for workload in ["deployment/thuban-cidrd", "deployment/thuban-lbaasd"] {
        cluster.kubectl(&["scale", "-n", SYSTEM, workload, "--replicas=2"])?;
        cluster.kubectl(&["rollout", "status", "-n", SYSTEM, workload, "--timeout=120s"])?;
    }
    wait_for_answers(cluster, router, server, answering)?;
    Ok(())
}

#[test]
fn a_client_outside_reaches_a_leased_address_by_bgp() -> Result<()> {
    let cluster = &tenants().cluster;
    install(cluster)?;
    let router = Router::start(cluster, Some(PASSWORD))?;
    let _made = Made {
        cluster,
        label: "test=announcing",
        needed: &[
            &["bgppeer", "router"],
            &["secret", "-n", "thuban-bgp", "router"],
            &["vipprofile", "-n", TENANT, "sticky"],
            &["ippool", POOL, "inside"],
        ],
    };
    wait_for_processes(cluster)?;
    let admits_tenant = json!({"matchLabels": {"kubernetes.io/metadata.name": TENANT}});
    let terms = [
        ("allowedNamespaces", admits_tenant),
        ("quarantineSeconds", json!(5)),
    ];
    apply(
        cluster,
        &[pool(POOL, &["203.0.113.64/29"], &terms), peer(&router)],
    )?;
    let mut objects = vec![service()];
    objects[0]["metadata"]["labels"] = json!({"test": "announcing"});
    let nodes = cluster.nodes()?;
    objects.extend(nodes[..2].iter().map(|node| backend(node)));
    apply(cluster, &objects)?;
    for node in &nodes[..2] {
        running(cluster, TENANT, &format!("{NAME}-{node}"))?;
    }
    let address = wait_for_address(cluster, NAME)?;
    // All nodes serve it, for the nodes without a backend send connections on.
    ensure_password_counts(cluster, &router, address, nodes.len())?;
    let server = SocketAddr::new(address, 80);
    let both: BTreeSet<String> = nodes[..2].iter().map(|node| format!("{NAME}-{node}")).collect();
    wait_for_answers(cluster, &router, server, &both)?;
    ensure_own_address(&router, server)?;
    let mut held = Connections::open(cluster, &router, server)?;
    let next_hops = |count| wait_for_next_hops(cluster, &router, address, count);
    held.outlive_nodes(&nodes, next_hops)?;
    // A third backend gets new connections, and takes none of the others'.
    let third = format!("{NAME}-{}", nodes[2]);
    apply(cluster, &[backend(&nodes[2])])?;
    cluster.wait_for("an answer of the third backend", SOON, || {
        Ok(answers(&router, server)?.contains(&third))
    })?;
    assert_eq!(held.ask("with a third backend")?, both);
    delete(cluster, &["pod", "-n", TENANT, &third, "--now"])?;
    wait_for_answers(cluster, &router, server, &both)?;
    held.ask("without the third backend")?;
    cluster.wait_for("who announces", SOON, || {
        Ok(vip(cluster)?["status"]["announcedBy"] == json!(nodes))
    })?;
    let lease = get(cluster, &["iplease", &address.to_string()])?;
    assert_eq!(lease["spec"]["holder"]["uid"], vip(cluster)?["metadata"]["uid"]);
    let backends = Backends {
        namespace: TENANT,
        app: NAME,
        pool: POOL,
        pods: &both,
        labels: json!({"test": "announcing"}),
    };
    vips::check(cluster, &router, &backends)?;
    ensure_pages_are_well_formed(cluster)?;
    // With `Local` only nodes with a backend announce it.
    let local = r#"{"spec":{"externalTrafficPolicy":"Local"}}"#;
    cluster.kubectl(&[
        "patch",
        "service",
        "-n",
        TENANT,
        NAME,
        "--type=merge",
        "-p",
        local,
    ])?;
    wait_for_next_hops(cluster, &router, address, 2)?;
    assert_eq!(answers(&router, server)?, both);
    outlives_control_plane(cluster, &router, server, &both)?;
    // The end: withdrawn, then released.
    delete(cluster, &["service", "-n", TENANT, NAME])?;
    wait_for_next_hops(cluster, &router, address, 0)?;
    cluster.wait_for("the end of the Vip", SOON, || Ok(vip(cluster).is_err()))?;
    cluster.wait_for("the end of the lease", SOON, || {
        Ok(get(cluster, &["iplease", &address.to_string()]).is_err())
    })
}

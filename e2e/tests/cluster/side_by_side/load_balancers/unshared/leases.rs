//! Two cidrds on the cluster's API server: who gets which address, and what stops a pool.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use cidrd::client::{Client, ClientError, Grant};
use cidrd::http::{Released, Wanted};
use cidrd::lease::Family;
use cidrd::store::{ApiServer, Store, StoreError};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Config, ResourceExt};
use serde_json::{Value, json};
use thuban_api::IpLease;
use thuban_authority::Ca;
use thuban_cluster::Cluster;
use thuban_e2e::bench::process::end_with_owner;

use super::{SECRETS, WithoutProcesses};
use crate::actor::Actor;
use crate::operator_stream::runtime;
use crate::side_by_side::load_balancers::{NAMESPACE, pool};
use crate::support::{apply, binary, condition, get};
use crate::tenants::tenants;

const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;
const POOL: &str = "leases-public";

/// A cidrd as a process of the test. Killed when this is dropped.
struct Cidrd {
    child: Child,
    address: String,
}

impl Cidrd {
    fn start(account: &Actor) -> Result<Self> {
        let port = TcpListener::bind((LOOPBACK, 0))?.local_addr()?.port();
        let mut command = Command::new(binary("cidrd")?);
        command
            .env("KUBECONFIG", &account.kubeconfig)
            .env("POD_IP", LOOPBACK.to_string())
            .env("THUBAN_CIDRD_PORT", port.to_string())
            .env("THUBAN_CIDRD_METRICS_PORT", "0")
            .stdin(Stdio::null());
        end_with_owner(&mut command);
        Ok(Self {
            child: command.spawn().context("starting a cidrd")?,
            address: format!("{LOOPBACK}:{port}"),
        })
    }

    /// Waits until it answers, and returns a client of it.
    fn client(&self, cluster: &Cluster) -> Result<Client> {
        let mut made = None;
        cluster.wait_for("cidrd's answer", Duration::from_secs(30), || {
            let Ok(secret) = get(cluster, &SECRETS[0]) else {
                return Ok(false);
            };
            let [certificate, key] = ["tls.crt", "tls.key"].map(|name| decoded(&secret["data"][name]));
            let ca = Ca::read(certificate?, key?)?;
            let client = Client::new(&self.address, &ca.certificate, ca.sign_client("lbaasd")?)?;
            let answers = runtime().block_on(client.list()).is_ok();
            made = answers.then_some(client);
            Ok(answers)
        })?;
        made.context("a client")
    }
}

impl Drop for Cidrd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn decoded(value: &Value) -> Result<String> {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "data": {"value": value}});
    let secret: k8s_openapi::api::core::v1::Secret = serde_json::from_value(secret)?;
    let data = secret.data.unwrap_or_default();
    Ok(String::from_utf8(
        data.get("value").context("a value")?.0.clone(),
    )?)
}

/// Asks for an address for a holder.
async fn ask(client: &Client, uid: &str, namespace: &str) -> Result<Vec<Grant>, ClientError> {
    let wanted = Wanted {
        pool: POOL.into(),
        namespace: namespace.into(),
        name: uid.into(),
        families: vec![Family::V4],
        ..Wanted::default()
    };
    client.put(uid, &wanted).await
}

fn reason<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> String {
    match answer {
        Err(ClientError::Refused(problem)) => problem.reason,
        other => panic!("{other:?}"),
    }
}

/// Waits until `Accepted` of a pool has a reason.
fn wait_for_reason(cluster: &Cluster, pool: &str, reason: &str) -> Result<()> {
    cluster.wait_for(reason, Duration::from_secs(10), || {
        let pool = get(cluster, &["ippool", pool])?;
        Ok(condition(&pool, "Accepted").is_some_and(|accepted| accepted["reason"] == reason))
    })
}

#[test]
fn two_cidrds_give_each_address_to_one_holder() -> Result<()> {
    let cluster = &tenants().cluster;
    let installed = WithoutProcesses::new(cluster)?;
    let account = Actor::service_account(cluster, "thuban-system", "thuban-cidrd")?;
    refused_by_the_api_server(cluster, &account);
    refused_peers(cluster);
    let (one, other) = (Cidrd::start(&account)?, Cidrd::start(&account)?);
    let clients = [one.client(cluster)?, other.client(cluster)?];
    let terms = [("quarantineSeconds", json!(3)), ("leaseSeconds", json!(600))];
    apply(cluster, &[pool(POOL, &["198.51.100.4/30"], &terms)])?;
    wait_for_reason(cluster, POOL, "Valid")?;
    let runtime = runtime();
    // Five holders, each of whom both are asked for at once.
    let held: BTreeMap<IpAddr, String> = runtime.block_on(async {
        let mut held = BTreeMap::new();
        for number in 0..5 {
            let uid = format!("uid-{number}");
            let [first, second] = &clients;
            let answers = tokio::join!(ask(first, &uid, NAMESPACE), ask(second, &uid, NAMESPACE));
            let (Ok(first), Ok(second)) = answers else {
                assert_eq!(reason(answers.0), "Exhausted");
                continue;
            };
            assert_eq!(first[0].lease.address, second[0].lease.address);
            assert!(held.insert(first[0].lease.address, uid).is_none());
        }
        held
    });
    assert_eq!(held.len(), 4, "{held:?}");
    let namespace = runtime.block_on(ask(&clients[0], "uid-9", "kube-system"));
    assert_eq!(reason(namespace), "NamespaceNotAllowed");
    let numbers = |pool: &Value| ["size", "leased", "free"].map(|field| pool["status"][field].clone());
    cluster.wait_for("the pool's numbers", Duration::from_secs(10), || {
        Ok(numbers(&get(cluster, &["ippool", POOL])?) == [json!(4), json!(4), json!(0)])
    })?;
    assert_eq!(
        get(cluster, &["ippool", POOL])?["status"]["ranges"],
        "198.51.100.4/30"
    );
    // The other one goes on without the first.
    drop(one);
    let others = Actor::administrator(cluster)?;
    others.is_refused(
        "free",
        others.kubectl(&["delete", "iplease", "--all"]),
        &["deleted by cidrd alone"],
    );
    let patch = [
        "patch",
        "ippool",
        POOL,
        "--subresource=status",
        "--type=merge",
        "-p",
        r#"{"status":{"free":9}}"#,
    ];
    others.is_refused(
        "tell",
        others.kubectl(&patch),
        &["status of IpPool", "written by cidrd alone"],
    );
    let l2 = r#"{"spec":{"announce":"L2"}}"#;
    let answer = others.kubectl(&["patch", "ippool", POOL, "--type=merge", "-p", l2]);
    others.is_refused("announce", answer, &["spec.announce can't be changed"]);
    let (address, uid) = held.first_key_value().context("a holder")?;
    let renewed = runtime.block_on(clients[1].renew(uid))?;
    assert_eq!(renewed[0].lease.address, *address);
    let released = Released {
        grants: vec![renewed[0].lease.grant.clone()],
    };
    runtime.block_on(clients[1].release(uid, &released))?;
    assert_eq!(
        reason(runtime.block_on(ask(&clients[1], "uid-new", NAMESPACE))),
        "Exhausted"
    );
    cluster.wait_for(
        "the end of the quarantine",
        Duration::from_secs(20),
        || match runtime.block_on(ask(&clients[1], "uid-new", NAMESPACE)) {
            Ok(granted) => Ok(granted[0].lease.address == *address),
            Err(_) => Ok(false),
        },
    )?;
    runtime.block_on(old_versions_are_worth_nothing(&account, &clients[1]))?;
    // A pool that touches a node's address, and one that touches another pool.
    let node = get(cluster, &["node", "node-a"])?;
    let addresses = node["status"]["addresses"].as_array().context("addresses")?;
    let internal = addresses.iter().find(|address| address["type"] == "InternalIP");
    let internal = internal
        .and_then(|address| address["address"].as_str())
        .context("an address")?;
    apply(
        cluster,
        &[
            pool("leases-node", &[&format!("{internal}/32")], &[]),
            pool("leases-twice", &["198.51.100.0/24"], &[]),
        ],
    )?;
    wait_for_reason(cluster, "leases-node", "RangeRefused")?;
    wait_for_reason(cluster, "leases-twice", "RangeOverlaps")?;
    // A cidrd that runs would make its Secret again.
    drop(other);
    installed.end()
}

/// Decisions on a lease that was renewed meanwhile take no effect.
async fn old_versions_are_worth_nothing(account: &Actor, client: &Client) -> Result<()> {
    let kubeconfig = Kubeconfig::read_from(&account.kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let store = ApiServer::new(kube::Client::try_from(config)?);
    let old = store.of_holder("uid-new").await?.remove(0);
    client.renew("uid-new").await?;
    let status = old.status.clone().unwrap_or_default();
    assert!(matches!(
        store.set_status(&old, status.clone()).await,
        Err(StoreError::Conflict)
    ));
    assert!(matches!(store.delete(&old).await, Err(StoreError::Conflict)));
    assert!(matches!(
        store.create(&old_as_new(&old)).await,
        Err(StoreError::Exists)
    ));
    let new = store.of_holder("uid-new").await?.remove(0);
    store.set_status(&new, status).await?;
    Ok(())
}

fn old_as_new(old: &IpLease) -> IpLease {
    IpLease::new(&old.name_any(), old.spec.clone())
}

/// BgpPeers that break a rule.
fn refused_peers(cluster: &Cluster) {
    let account = Actor::administrator(cluster).unwrap();
    let cases = [
        (
            json!({"localAsn": 64512, "ebgpMultihop": 2}),
            "spec.ebgpMultihop is for external BGP: leave it out if spec.asn and spec.localAsn are equal",
        ),
        (
            json!({"bfd": {}, "ebgpMultihop": 2}),
            "spec.bfd looks for routers on the same link: leave it out with spec.ebgpMultihop",
        ),
        (json!({"ebgpMultihop": 1}), "spec.ebgpMultihop"),
        (json!({"ebgpMultihop": 256}), "spec.ebgpMultihop"),
        (
            json!({"passwordSecret": "../leaf"}),
            "spec.passwordSecret must be the name of a Secret in the namespace thuban-bgp",
        ),
        (
            json!({"address": "192.0.2.01"}),
            "spec.address must be an IP address in its shortest form",
        ),
    ];
    let peer = |terms: &Value| {
        let mut spec = json!({"address": "192.0.2.1", "asn": 64512, "localAsn": 64513});
        for (field, value) in terms.as_object().into_iter().flatten() {
            spec[field] = value.clone();
        }
        json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "BgpPeer", "metadata": {"name": "rule"}, "spec": spec})
    };
    for (terms, message) in &cases {
        let answer = account.write("create", &peer(terms), &[]);
        account.is_refused(&terms.to_string(), answer, &[message]);
    }
    for good in [
        json!({"localAsn": 64512, "bfd": {}}),
        json!({"ebgpMultihop": 255, "passwordSecret": "leaf-1.password"}),
    ] {
        account.write("create", &peer(&good), &[]).unwrap();
    }
}

/// What one object can say about itself, the API server refuses.
fn refused_by_the_api_server(cluster: &Cluster, account: &Actor) {
    let lease = |name: &str, vpc: &str, address: &str| {
        json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "IpLease", "metadata": {"name": name}, "spec": {
            "pool": POOL, "vpc": vpc, "address": address, "leaseSeconds": 600, "quarantineSeconds": 300,
            "holder": {"uid": "uid", "namespace": NAMESPACE, "name": "web"}}})
    };
    let range = ["198.51.100.0/24"];
    for (object, message) in [
        (
            pool("p", &["198.51.100.1/24"], &[]),
            "spec.cidrs must be networks without host bits",
        ),
        (pool("p", &[], &[]), "spec.cidrs must have 1 to 16 ranges"),
        (
            pool("p", &["198.51.100.0/24", "198.51.100.0/25"], &[]),
            "one within another",
        ),
        (
            pool("p", &range, &[("vpc", json!("red"))]),
            "spec.vpc must name the VPC of a private pool",
        ),
        (
            pool("p", &range, &[("class", json!("private"))]),
            "spec.vpc must name the VPC of a private pool",
        ),
        (
            pool(
                "p",
                &range,
                &[
                    ("class", json!("private")),
                    ("vpc", json!("red")),
                    ("announce", json!("L2")),
                ],
            ),
            "spec.announce must be BGP for a private pool",
        ),
        (
            pool("p", &range, &[("announce", json!("OSPF"))]),
            "spec.announce: Unsupported value",
        ),
        (
            pool(
                "p",
                &range,
                &[
                    ("class", json!("private")),
                    ("vpc", json!("red")),
                    ("driver", json!("Haproxy")),
                ],
            ),
            "spec.driver must be Xdp for a private pool",
        ),
        (
            pool("p", &range, &[("driver", json!("Nginx"))]),
            "spec.driver: Unsupported value",
        ),
        (
            pool("p", &range, &[("leaseSeconds", json!(599))]),
            "spec.leaseSeconds",
        ),
        (
            pool("p", &range, &[("quarantineSeconds", json!(0))]),
            "spec.quarantineSeconds",
        ),
        (
            lease("198.51.100.7", "", "198.51.100.8"),
            "metadata.name must be spec.address",
        ),
        (
            lease("198.51.100.7", "red", "198.51.100.7"),
            "metadata.name must be spec.address",
        ),
        (
            lease("red.2001", "red", "2001:db8::7"),
            "metadata.name must be spec.address",
        ),
        (
            lease("198.51.100.7", "", "198.51.100.07"),
            "spec.address must be an IP address",
        ),
    ] {
        let answer = if object["kind"] == "IpPool" {
            apply(cluster, std::slice::from_ref(&object)).map(|()| String::new())
        } else {
            account.write("create", &object, &[])
        };
        account.is_refused(&object.to_string(), answer, &[message]);
    }
    for good in [
        lease("198.51.100.7", "", "198.51.100.7"),
        lease("red.198.51.100.7", "red", "198.51.100.7"),
        lease("20010db8000000000000000000000007", "", "2001:db8::7"),
        lease("red.20010db8000000000000000000000007", "red", "2001:db8::7"),
    ] {
        account.write("create", &good, &[]).unwrap();
        // Nobody else gives addresses out, not even an administrator.
        let others = Actor::administrator(cluster).unwrap();
        others.is_refused("lease", others.write("create", &good, &[]), &["by cidrd alone"]);
    }
}

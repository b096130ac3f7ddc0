//! Operators die after 22 of the 25 kinds of writes, at random, and two lead at once: nothing leaks, nothing is double,
//! traffic goes on.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::audit::wait_sound;
use crate::flows::none_lost_while;
use crate::own_operator::Stage;
use crate::support::{apply, delete, pod_addresses, wait_provisioned};
use crate::tenant::{Tenant, manifests};
use crate::tenants::tenants;

const PORT: u16 = 6182;
/// Kinds of writes (docs/workflows.md names the ones that are left out). The order is such that one round makes the
/// objects that the next one takes away.
const POINTS: [&str; 22] = [
    "create/VniClaim",
    "status/Vpc",
    "create/Divider",
    "update/Divider",
    "status/Divider",
    "status/Network",
    "create/Bouncer",
    "update/Bouncer",
    "status/Bouncer",
    "status/Droplet",
    "create/IpClaim",
    "create/Endpoint",
    "status/Endpoint",
    "status/IpClaim",
    "delete/Endpoint",
    "update/Endpoint",
    "delete/Bouncer",
    "update/Network",
    "delete/Divider",
    "update/Vpc",
    "delete/VniClaim",
    "delete/IpClaim",
];

/// How long an operator may take to come to a write. Numbers of VPCs and addresses rest for 30 s before their claims
/// go.
const WRITTEN: Duration = Duration::from_mins(1);
/// How often pods are replaced in that time.
const TRIES: u32 = 6;

fn number(variable: &str, default: usize) -> usize {
    let given = std::env::var(variable).ok();
    given.and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Runs traffic of red's web pods while `work` runs.
fn under_traffic(what: &str, work: impl FnOnce() -> Result<()>) {
    let ways = tenants().ring("red-web");
    none_lost_while(what, &ways, work);
}

/// Returns VPC, network and namespace.
fn tenant(name: &str, second: u8) -> [Value; 3] {
    manifests(
        name,
        &[&format!("10.{second}.0.0/16")],
        &[&format!("10.{second}.0.0/22")],
    )
}

fn make<'a>(cluster: &'a Cluster, name: &str, second: u8) -> Tenant<'a> {
    Tenant::of(cluster, name, &tenant(name, second)).unwrap()
}

/// Removes a VPC and its network.
fn remove(cluster: &Cluster, name: &str) -> Result<()> {
    delete(cluster, &["networks.thuban.dev", name])?;
    delete(cluster, &["vpcs.thuban.dev", name])
}

/// Returns pods that do nothing, spread over the nodes.
fn idlers(namespace: &str, count: usize) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "idle", "namespace": namespace},
        "spec": {"replicas": count, "selector": {"matchLabels": {"app": "idle"}}, "template": {
            "metadata": {"labels": {"app": "idle"}},
            "spec": {"terminationGracePeriodSeconds": 0,
                "containers": [{"name": "pause", "image": "registry.k8s.io/pause:3.10"}]},
        }},
    })
}

fn scale(cluster: &Cluster, namespace: &str, count: usize) -> Result<()> {
    let count = format!("--replicas={count}");
    cluster
        .kubectl(&["scale", "-n", namespace, "deployment/idle", &count])
        .map(|_| ())
}

/// Returns the name of the tenant of a round.
fn passing(round: usize) -> String {
    format!("passing-{round}")
}

/// Causes all kinds of writes: a tenant comes, the previous one goes, pods come and go.
fn stir(cluster: &Cluster, round: usize) -> Result<()> {
    apply(cluster, &tenant(&passing(round), 40 + round as u8)[..2])?;
    if round > 0 {
        let before = passing(round - 1);
        let gone = ["delete", "--ignore-not-found", "--wait=false"];
        cluster.kubectl(&[&gone[..], &["networks.thuban.dev", &before]].concat())?;
        cluster.kubectl(&[&gone[..], &["vpcs.thuban.dev", &before]].concat())?;
    }
    let users = |round| format!("users-{round}");
    let endpoint = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Endpoint",
        "metadata": {"name": users(round), "namespace": "crashes"}, "spec": {"network": "crashes"},
    });
    apply(cluster, &[endpoint])?;
    if round > 0 {
        let gone = [
            "delete",
            "--ignore-not-found",
            "--wait=false",
            "endpoints.thuban.dev",
            "-n",
            "crashes",
        ];
        cluster.kubectl(&[&gone[..], &[&users(round - 1)]].concat())?;
    }
    replace_pods(cluster)
}

fn replace_pods(cluster: &Cluster) -> Result<()> {
    let replaced = [
        "delete",
        "pods",
        "-n",
        "crashes",
        "-l",
        "app=idle",
        "--wait=false",
    ];
    cluster.kubectl(&replaced).map(|_| ())
}

#[test]
fn operator_crash_after_any_write_leaves_nothing_behind() {
    let cluster = &tenants().cluster;
    let tenant_of_pods = make(cluster, "crashes", 39);
    apply(cluster, &[idlers("crashes", 3)]).unwrap();
    let mut untouched = Vec::new();
    under_traffic("crashes after every kind of write", || {
        let stage = Stage::new(cluster)?;
        for (round, point) in POINTS.iter().enumerate() {
            stage.free_lease()?;
            let since = Instant::now();
            let mut operator = stage.operator(&format!("crash-{round}"), PORT, &[("THUBAN_CRASH", point)])?;
            stir(cluster, round)?;
            let mut ended = operator.ends_within(WRITTEN / TRIES)?;
            for _ in 1..TRIES {
                if ended.is_none() {
                    // An Endpoint whose pod went before this operator led may have been deleted by the garbage
                    // collector.
                    replace_pods(cluster)?;
                    ended = operator.ends_within(WRITTEN / TRIES)?;
                }
            }
            match ended {
                Some(status) => ensure!(
                    std::os::unix::process::ExitStatusExt::signal(&status) == Some(6),
                    "{point}: {status}: {}",
                    operator.log()
                ),
                None => untouched.push(*point),
            }
            eprintln!("{point}: {:.1?}", since.elapsed());
        }
        Ok(())
    });
    remove(cluster, &passing(POINTS.len() - 1)).unwrap();
    wait_sound(cluster);
    tenant_of_pods.remove().unwrap();
    assert!(untouched.is_empty(), "no such write was made: {untouched:?}");
}

#[test]
fn random_operator_kills_in_churn_leave_nothing_behind() {
    let cluster = &tenants().cluster;
    let (kills, pods) = (number("THUBAN_E2E_KILLS", 4), number("THUBAN_E2E_CHURN", 12));
    let seed = number("THUBAN_E2E_SEED", std::process::id() as usize) as u64;
    eprintln!("seed {seed}");
    let tenant_of_pods = make(cluster, "churn", 38);
    apply(cluster, &[idlers("churn", pods)]).unwrap();
    under_traffic("killed at random", || {
        let stage = Stage::new(cluster)?;
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for round in 0..kills {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            stage.free_lease()?;
            let operator = stage.operator(&format!("killed-{round}"), PORT, &[])?;
            scale(
                cluster,
                "churn",
                if round.is_multiple_of(2) { pods / 3 } else { pods },
            )?;
            std::thread::sleep(Duration::from_millis(500 + random % 5000));
            drop(operator);
        }
        scale(cluster, "churn", pods)
    });
    let status = [
        "rollout",
        "status",
        "-n",
        "churn",
        "deployment/idle",
        "--timeout=180s",
    ];
    cluster.kubectl(&status).unwrap();
    wait_sound(cluster);
    assert_eq!(pod_addresses(cluster, "churn").unwrap().len(), pods);
    tenant_of_pods.remove().unwrap();
}

#[test]
fn two_simultaneous_leaders_allocate_nothing_twice() {
    let cluster = &tenants().cluster;
    let pods = number("THUBAN_E2E_CHURN", 12);
    let tenant_of_pods = make(cluster, "twins", 37);
    apply(cluster, &[idlers("twins", 1)]).unwrap();
    under_traffic("two leaders", || {
        let stage = Stage::new(cluster)?;
        stage.free_lease()?;
        let first = stage.operator("twin-1", PORT, &[("THUBAN_DEAF", "1")])?;
        first.wait_serving(cluster, 3)?;
        stage.free_lease()?;
        let second = stage.operator("twin-2", PORT + 1, &[("THUBAN_DEAF", "1")])?;
        // One droplet moves to the second operator, the others stay with the first.
        let transitd = cluster.transitd_pod("node-b")?;
        cluster.kubectl(&["delete", "pod", "-n", "thuban-system", &transitd, "--wait=false"])?;
        second.wait_serving(cluster, 1)?;
        for count in [pods, 2, pods] {
            scale(cluster, "twins", count)?;
            apply(cluster, &tenant("passing-0", 40)[..2])?;
            let end = Instant::now() + Duration::from_secs(6);
            while Instant::now() < end {
                pod_addresses(cluster, "twins")?;
                std::thread::sleep(Duration::from_millis(300));
            }
        }
        Ok(())
    });
    let status = [
        "rollout",
        "status",
        "-n",
        "twins",
        "deployment/idle",
        "--timeout=180s",
    ];
    cluster.kubectl(&status).unwrap();
    assert_eq!(pod_addresses(cluster, "twins").unwrap().len(), pods);
    wait_provisioned(cluster, "networks.thuban.dev/passing-0").unwrap();
    wait_sound(cluster);
    remove(cluster, "passing-0").unwrap();
    tenant_of_pods.remove().unwrap();
}

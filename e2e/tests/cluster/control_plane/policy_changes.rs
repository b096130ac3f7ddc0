//! Policies and labels change under traffic while operators and transitds are killed. A packet passes only if the
//! policies before or after the change allow it.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::flows::none_lost_while;
use crate::leadership::{leader, pod_of};
use crate::requests::Ends;
use crate::support::{Hanging, Pod, apply, condition, get, netexec_manifest, running};
use crate::tenant::Tenant;
use crate::tenants::tenants;

const NAME: &str = "shift";
/// Name, which is the label `role` too, and node.
const PODS: [(&str, &str); 4] = [
    ("server", "node-a"),
    ("friend", "node-b"),
    ("guest", "node-b"),
    ("stranger", "node-c"),
];
/// How long a change may take: a leader was killed, and another one takes over.
const CHANGE_TIMEOUT: Duration = Duration::from_mins(1);
/// How long an answer that should not come is waited for.
const DENIED: Duration = Duration::from_millis(200);

/// What happens as a change is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kill {
    None,
    Transitd(&'static str),
    Leader,
}

/// Returns the server's policy: the friend may always ask, the guest if it is `open`. The two say it by other ports.
fn ingress(open: bool) -> Value {
    let roles: &[&str] = if open { &["friend", "guest"] } else { &["friend"] };
    let ports = if open {
        json!([{"port": 8080, "protocol": "TCP"}, {"port": 8000, "endPort": 8100, "protocol": "UDP"}])
    } else {
        json!([{"port": 8080, "protocol": "UDP"}])
    };
    json!({
        "podSelector": {"matchLabels": {"role": "server"}}, "policyTypes": ["Ingress"],
        "ingress": [{
            "from": [{"podSelector": {"matchExpressions": [{"key": "role", "operator": "In", "values": roles}]}}],
            "ports": ports,
        }],
    })
}

/// Returns the policy of what the friend may ask. It says the same by other peers.
fn egress(open: bool) -> Value {
    let to = if open {
        json!([{"podSelector": {}}])
    } else {
        json!([{"podSelector": {"matchLabels": {"role": "server"}}}])
    };
    json!({
        "podSelector": {"matchLabels": {"role": "friend"}}, "policyTypes": ["Egress"], "egress": [{"to": to}],
    })
}

fn set(cluster: &Cluster, open: bool) -> Result<()> {
    let policy = |(name, spec): (&str, Value)| {
        json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": name, "namespace": NAME}, "spec": spec,
        })
    };
    apply(
        cluster,
        &[("server", ingress(open)), ("friend", egress(open))].map(policy),
    )
}

fn kill(cluster: &Cluster, kill: Kill) -> Result<()> {
    match kill {
        Kill::None => Ok(()),
        Kill::Transitd(node) => cluster.signal(node, "transitd", "KILL"),
        Kill::Leader => {
            let (_, node) = pod_of(cluster, &leader(cluster)?.0)?;
            cluster.signal(&node, "thuban-operator", "KILL")
        }
    }
}

/// Waits until the pod's datagrams pass or not. Returns how long that took.
fn until(pod: &Pod, address: Ipv4Addr, passes: bool) -> Result<Duration> {
    let start = Instant::now();
    // A lost datagram isn't a denial.
    let (mut in_a_row, mut since) = (0, start.elapsed());
    while in_a_row < 3 {
        if pod.udp(address, Duration::ZERO).is_ok() == passes {
            in_a_row += 1;
        } else {
            anyhow::ensure!(
                start.elapsed() < CHANGE_TIMEOUT,
                "{} passes: not {passes}",
                pod.name
            );
            (in_a_row, since) = (0, start.elapsed());
        }
    }
    Ok(since)
}

/// Opens the policy while the server's droplet hears nothing. The old policy holds there, and the PolicyState names the
/// droplet, until the droplet hears again.
fn open_without_its_droplet(cluster: &Cluster, guest: &Pod, server: &Pod) -> Result<()> {
    let provisioned = || -> Result<(bool, String)> {
        let state = get(cluster, &["policystates.thuban.dev", "-n", NAME, "server"])?;
        let told = condition(&state, "Provisioned").cloned().unwrap_or_default();
        Ok((told["status"] == "True", told["message"].to_string()))
    };
    let hanging = Hanging::new(cluster, &server.node, "transitd")?;
    set(cluster, true)?;
    let lacking = format!("; {}: ", server.node);
    cluster.wait_for("a PolicyState that names the droplet", CHANGE_TIMEOUT, || {
        let (is_provisioned, message) = provisioned()?;
        Ok(!is_provisioned && message.contains(&lacking))
    })?;
    let answer = guest.udp(server.address, DENIED);
    anyhow::ensure!(
        answer.is_err(),
        "a droplet without the new policy let the guest in"
    );
    drop(hanging);
    until(guest, server.address, true)?;
    cluster.wait_for("the policy in force on all droplets", CHANGE_TIMEOUT, || {
        Ok(provisioned()?.0)
    })
}

#[test]
fn policy_changes_pass_only_what_old_or_new_allow() {
    let cluster = &tenants().cluster;
    let tenant = Tenant::new(cluster, NAME, &["10.92.0.0/16"], &["10.92.1.0/24"]).unwrap();
    let manifest = |(name, node): (&str, &str)| {
        let mut pod = netexec_manifest(NAME, name, node, None);
        pod["metadata"]["labels"] = json!({"role": name});
        pod
    };
    apply(cluster, &PODS.map(manifest)).unwrap();
    let [server, friend, guest, stranger] = PODS.map(|(name, _)| running(cluster, NAME, name).unwrap());
    set(cluster, false).unwrap();
    until(&stranger, server.address, false).unwrap();
    until(&friend, server.address, true).unwrap();
    until(&guest, server.address, false).unwrap();
    let (is_over, tried, passed) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let mut took = Vec::new();
    std::thread::scope(|scope| {
        let ends = Ends(&is_over);
        let stranger = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                tried.fetch_add(1, Ordering::Relaxed);
                let answer = stranger.udp(server.address, DENIED);
                passed.fetch_add(u64::from(answer.is_ok()), Ordering::Relaxed);
            }
        });
        none_lost_while("policy changes", &[(&friend, server.address)], || {
            let kills = [
                Kill::None,
                Kill::None,
                Kill::Transitd("node-a"),
                Kill::None,
                Kill::Leader,
                Kill::Transitd("node-b"),
            ];
            for (change, event) in kills.into_iter().enumerate() {
                let open = change % 2 == 0;
                set(cluster, open)?;
                let start = Instant::now();
                kill(cluster, event)?;
                until(&guest, server.address, open)?;
                took.push((event, start.elapsed()));
            }
            // Labels decide, too.
            for (role, passes) in [("friend", true), ("guest", false)] {
                let role = format!("role={role}");
                cluster.kubectl(&["label", "pod", "-n", NAME, "guest", "--overwrite", &role])?;
                let start = Instant::now();
                until(&guest, server.address, passes)?;
                took.push((Kill::None, start.elapsed()));
            }
            open_without_its_droplet(cluster, &guest, &server)
        });
        drop(ends);
        stranger.join().unwrap();
    });
    eprintln!("changes took, three answers included: {took:.3?}");
    let (tried, passed) = (tried.into_inner(), passed.into_inner());
    assert!(tried > 20, "the stranger asked only {tried} times");
    assert_eq!(passed, 0, "answers to the stranger, of {tried} questions");
    tenant.remove().unwrap();
}

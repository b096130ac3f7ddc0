//! Policies and labels change under traffic while operators and transitds are killed. A packet passes only if the
//! policies before or after the change allow it.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::flows::none_lost_while;
use crate::leadership::{leader, pod_of, wait_led};
use crate::requests::Ends;
use crate::support::{Pod, apply, netexec_manifest, running};
use crate::tenant::Tenant;
use crate::tenants::tenants;

const NAME: &str = "shift";
/// Name, label `role`, node.
pub type Role = (&'static str, &'static str, &'static str);
const PODS: [Role; 4] = [
    ("server", "server", "node-a"),
    ("friend", "friend", "node-b"),
    ("guest", "guest", "node-b"),
    ("stranger", "stranger", "node-c"),
];
/// How long a change may take: a leader was killed, and another one takes over.
pub const CHANGE_TIMEOUT: Duration = Duration::from_mins(1);
/// How long a new leader leads until all droplets have its policies.
const TAKEN_OVER: Duration = Duration::from_secs(3);
/// How long after the server's policy the friend's is in force, too, and what was before has rested.
const SETTLED: Duration = Duration::from_secs(3);
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
pub fn ingress(open: bool) -> Value {
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

pub fn policy(namespace: &str, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace}, "spec": spec,
    })
}

fn set(cluster: &Cluster, open: bool) -> Result<()> {
    let policies = [("server", ingress(open)), ("friend", egress(open))];
    apply(cluster, &policies.map(|(name, spec)| policy(NAME, name, &spec)))
}

pub fn make<const COUNT: usize>(cluster: &Cluster, namespace: &str, pods: [Role; COUNT]) -> [Pod; COUNT] {
    let manifest = |(name, role, node): Role| {
        let mut pod = netexec_manifest(namespace, name, node, None);
        pod["metadata"]["labels"] = json!({"role": role});
        pod
    };
    apply(cluster, &pods.map(manifest)).unwrap();
    pods.map(|(name, ..)| running(cluster, namespace, name).unwrap())
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
pub fn until(pod: &Pod, address: Ipv4Addr, passes: bool) -> Result<Duration> {
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

/// Runs `work` while a pod asks others that no policy lets it reach, and asserts that none of them answers.
pub fn none_answers_while(pod: &Pod, addresses: &[Ipv4Addr], work: impl FnOnce()) {
    let is_over = AtomicBool::new(false);
    let (tried, passed) = std::thread::scope(|scope| {
        let ends = Ends(&is_over);
        let asking = scope.spawn(|| {
            let (mut tried, mut passed) = (0, 0);
            for address in addresses.iter().cycle() {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                tried += 1;
                passed += u32::from(pod.udp(*address, DENIED).is_ok());
            }
            (tried, passed)
        });
        work();
        drop(ends);
        asking.join().unwrap()
    });
    assert!(tried > 20, "{} asked only {tried} times", pod.name);
    assert_eq!(passed, 0, "answers to {}, of {tried} questions", pod.name);
}

#[test]
fn policy_changes_pass_only_what_old_or_new_allow() {
    let cluster = &tenants().cluster;
    let tenant = Tenant::new(cluster, NAME, &["10.92.0.0/16"], &["10.92.1.0/24"]).unwrap();
    let [server, friend, guest, stranger] = make(cluster, NAME, PODS);
    set(cluster, false).unwrap();
    until(&stranger, server.address, false).unwrap();
    until(&friend, server.address, true).unwrap();
    until(&guest, server.address, false).unwrap();
    let mut took = Vec::new();
    let change = || -> Result<()> {
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
            if event == Kill::Leader {
                // The next leader does not know the policies that endpoints had before, which rest. The guest sees the
                // server's policy only: the friend's may come later.
                until(&guest, server.address, open)?;
                std::thread::sleep(SETTLED);
                let (_, epoch) = leader(cluster)?;
                kill(cluster, event)?;
                cluster.wait_for(
                    "another leader",
                    CHANGE_TIMEOUT,
                    || Ok(leader(cluster)?.1 > epoch),
                )?;
                wait_led(cluster, TAKEN_OVER)?;
            } else {
                kill(cluster, event)?;
            }
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
        Ok(())
    };
    none_answers_while(&stranger, &[server.address], || {
        none_lost_while("policy changes", &[(&friend, server.address)], change);
    });
    eprintln!("changes took, three answers included: {took:.3?}");
    tenant.remove().unwrap();
}

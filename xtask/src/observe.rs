//! `cargo xtask observe`: Debian's Prometheus scrapes the demo's cluster. All queries of the dashboards are asked, and
//! real faults fire alerts: each fault is caused, its alerts are waited for, and the fault is mended.
//!
//! Alerts fire after seconds here (see [`crate::prometheus`]). Whether their conditions are right, and how long people
//! wait, is tested with made-up numbers (see [`crate::alerts`]).

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, UdpSocket},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use thuban_cluster::{Cluster, wait::wait_for};

use crate::{
    build::{DEMO, run_command, step},
    dashboards,
    demo::first_pod,
    deps, images,
    install::NAMESPACE,
    prometheus::{Running, Server},
    scraper::Scraper,
};

/// How long Prometheus looks before it is asked: a rate needs two scrapes.
const WARM_UP: Duration = Duration::from_secs(15);
/// How long a fault may take to be seen: kubelet's and the operator's patience included.
const FIRING_TIMEOUT: Duration = Duration::from_mins(4);
const READY_TIMEOUT: Duration = Duration::from_mins(2);
const POLL: Duration = Duration::from_secs(1);
const OPERATOR: &str = "deployment/thuban-operator";
const TRANSITD: &str = "daemonset/transitd";
/// The node whose transitd is killed, and the one that is cut off.
const KILLED: &str = "node-c";
const CUT_OFF: &str = "node-b";
/// A file of an attachment that is none.
const TORN: &str = "/var/lib/thuban/attachments/observe";
/// A pod of a network that does not exist.
const LOST_POD: &str = "observe-lost";
/// An address that is not the pod's.
const FORGED: &str = "10.66.6.6";
const FORGING: Duration = Duration::from_secs(10);

/// A fault, and the alerts that tell of it.
struct Fault {
    name: &'static str,
    alerts: &'static [&'static str],
    begin: fn(&Cluster) -> Result<()>,
    end: fn(&Cluster) -> Result<()>,
}

const FAULTS: [Fault; 4] = [
    Fault {
        name: "a pod forges its address",
        alerts: &["ThubanPacketsForged"],
        begin: forge,
        end: stop_forging,
    },
    Fault {
        name: "a pod asks for a network that does not exist",
        alerts: &["ThubanEndpointsWait", "ThubanPodsRefused"],
        begin: lose_pod,
        end: delete_pod,
    },
    Fault {
        name: "a node is cut off from the others",
        alerts: &["ThubanDropletAway", "ThubanDropletSilent"],
        begin: cut_off,
        end: join_again,
    },
    Fault {
        name: "the operator is gone, and a transitd starts with a broken file",
        alerts: &[
            "ThubanOperatorNoLeader",
            "ThubanTransitdWithoutOperator",
            "ThubanTransitdNotReady",
            "ThubanAttachmentFilesRefused",
        ],
        begin: remove_operator,
        end: start_operator,
    },
];

/// Runs all of it on the demo's cluster, which stays up.
pub fn run() -> Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "the demo's nodes are network namespaces: run this as root"
    );
    let cluster =
        &Cluster::named(DEMO).context("this runs on the demo's cluster: `cargo xtask demo` makes it")?;
    println!(
        "This runs Prometheus beside the demo's cluster, asks it the dashboards' queries, and causes faults until\n\
         their alerts fire. It takes about 2 minutes."
    );
    deps::ensure_more(&deps::ALERT_PACKAGES)?;
    step("metrics of transitd at the nodes' addresses", || {
        open_pages(cluster)
    })?;
    let scraper = step("the account that reads metrics", || Scraper::make(cluster))?;
    let running = step("Prometheus", || Running::start(cluster, &scraper))?;
    let server = running.server;
    thread::sleep(WARM_UP);
    step("queries of the dashboards", || dashboards::ask(&server))?;
    let mut fired = 0;
    for fault in &FAULTS {
        step(fault.name, || fault.show(cluster, server))?;
        fired += fault.alerts.len();
    }
    println!(
        "{fired} alerts were fired by {} faults. The cluster stays up.",
        FAULTS.len()
    );
    Ok(())
}

impl Fault {
    /// Causes the fault, waits for its alerts, and mends it.
    fn show(&self, cluster: &Cluster, server: Server) -> Result<()> {
        let early: Vec<String> = server
            .firing()?
            .into_iter()
            .filter(|name| self.is_shown_by(name))
            .collect();
        ensure!(early.is_empty(), "already before the fault: {}", early.join(", "));
        let seen = (self.begin)(cluster).and_then(|()| self.wait(server));
        let mended = (self.end)(cluster).context("mending the fault");
        seen.and(mended)
    }

    fn is_shown_by(&self, alert: &str) -> bool {
        self.alerts.contains(&alert)
    }

    /// Waits until each alert has fired, not necessarily all at once.
    fn wait(&self, server: Server) -> Result<()> {
        let begin = Instant::now();
        let mut missing: BTreeSet<&str> = self.alerts.iter().copied().collect();
        loop {
            for alert in server.firing()? {
                if missing.remove(alert.as_str()) {
                    println!("    {alert} fires after {:.0} s", begin.elapsed().as_secs_f32());
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            if begin.elapsed() > FIRING_TIMEOUT {
                let missing: Vec<&str> = missing.into_iter().collect();
                bail!("these did not fire: {}", missing.join(", "));
            }
            thread::sleep(POLL);
        }
    }
}

/// Has each transitd serve its metrics at its node's address. `cargo xtask demo` takes that back.
fn open_pages(cluster: &Cluster) -> Result<()> {
    let patch = json!({"data": {"THUBAN_TRANSITD_METRICS_ADDRESS": "node"}}).to_string();
    cluster.kubectl(&[
        "patch",
        "configmap",
        "-n",
        NAMESPACE,
        "thuban-config",
        "--type=merge",
        "-p",
        &patch,
    ])?;
    cluster.kubectl(&["rollout", "restart", "-n", NAMESPACE, TRANSITD])?;
    rolled_out(cluster, TRANSITD)
}

fn rolled_out(cluster: &Cluster, workload: &str) -> Result<()> {
    cluster
        .kubectl(&["rollout", "status", "-n", NAMESPACE, workload, "--timeout=180s"])
        .map(drop)
}

/// Has a pod send from an address that is not its own.
fn forge(cluster: &Cluster) -> Result<()> {
    let pod = first_pod(cluster)?;
    // A neighbour's address in the network: a packet to its own would not leave the pod.
    let target = Ipv4Addr::from_bits(pod.address.to_bits() ^ 1);
    pod.inside(|| {
        run_command(Command::new("ip").args(["address", "replace", &format!("{FORGED}/32"), "dev", "eth0"]))?;
        let socket = UdpSocket::bind((FORGED, 0))?;
        let begin = Instant::now();
        // The counter must differ between two scrapes.
        while begin.elapsed() < FORGING {
            socket.send_to(b"forged", (target, 9))?;
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    })
}

fn stop_forging(cluster: &Cluster) -> Result<()> {
    first_pod(cluster)?.inside(|| {
        run_command(Command::new("ip").args(["address", "del", &format!("{FORGED}/32"), "dev", "eth0"]))
    })
}

fn lose_pod(cluster: &Cluster) -> Result<()> {
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": LOST_POD, "namespace": "red", "annotations": {"thuban.dev/network": "nowhere"}},
        "spec": {"terminationGracePeriodSeconds": 0,
            "containers": [{"name": "pause", "image": images::PAUSE}]}});
    cluster.kubectl_apply(&pod.to_string()).map(drop)
}

fn delete_pod(cluster: &Cluster) -> Result<()> {
    cluster
        .kubectl(&[
            "delete",
            "pod",
            "-n",
            "red",
            LOST_POD,
            "--ignore-not-found",
            "--now",
        ])
        .map(drop)
}

fn cut_off(cluster: &Cluster) -> Result<()> {
    cluster.cut_off(CUT_OFF, true)
}

fn join_again(cluster: &Cluster) -> Result<()> {
    cluster.cut_off(CUT_OFF, false)?;
    cluster.wait_nodes_ready(READY_TIMEOUT)?;
    rolled_out(cluster, TRANSITD)
}

/// A transitd that starts while there is no operator is not ready. It puts the broken file aside.
fn remove_operator(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["scale", "-n", NAMESPACE, OPERATOR, "--replicas=0"])?;
    let selector = "app.kubernetes.io/name=thuban-operator";
    wait_for("the end of the operator", READY_TIMEOUT, POLL, || {
        let pods = cluster.kubectl(&["get", "pods", "-n", NAMESPACE, "-l", selector, "-o", "name"])?;
        Ok(pods.trim().is_empty())
    })?;
    cluster.exec_on_node(KILLED, &["sh", "-c", &format!("echo broken > {TORN}.json")])?;
    cluster.signal(KILLED, "transitd", "KILL")
}

fn start_operator(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["scale", "-n", NAMESPACE, OPERATOR, "--replicas=2"])?;
    cluster.exec_on_node(KILLED, &["sh", "-c", &format!("rm -f {TORN}.json {TORN}.torn")])?;
    rolled_out(cluster, OPERATOR)?;
    rolled_out(cluster, TRANSITD)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::FAULTS;

    #[test]
    fn eight_alerts_or_more_are_fired_by_faults() {
        let rules = crate::build::root().join("charts/thuban/files/alerts.yaml");
        let rules = std::fs::read_to_string(rules).unwrap();
        let all: Vec<&str> = FAULTS.iter().flat_map(|fault| fault.alerts).copied().collect();
        let different: BTreeSet<&str> = all.iter().copied().collect();
        assert!(different.len() >= 8 && different.len() == all.len(), "{all:?}");
        for alert in all {
            assert!(rules.contains(&format!("- alert: {alert}\n")), "{alert}");
        }
    }
}

//! The runtime of pods dies, or asks: kubelet, containerd, and the verb STATUS on the one node whose containerd calls
//! it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use thuban_cluster::Cluster;

use crate::flows::none_lost_while;
use crate::scrape::of_node;
use crate::support::{apply, condition, delete, get, netexec_manifest, running};
use crate::tenants::tenants;

/// The node whose containerd is of version 2 (`xtask/src/cluster.rs`).
const ASKED: &str = "node-b";
/// The node whose containerd is Debian's, of version 1.6.
const NOT_ASKED: &str = "node-a";
const STATUSES: &str = r#"thuban_transitd_cni_total{verb="STATUS",code="0"}"#;
const RUN: &str = "/run/thuban";
/// The files without which the plugin finds no transitd, and no sign that a transitd has served in this boot.
const FILES: [&str; 2] = ["cni.sock", "served"];

/// Returns for each pod on a node that isn't about to end how often its containers were started, and whether it is
/// ready.
fn states(cluster: &Cluster, node: &str) -> Result<BTreeMap<String, (u64, bool)>> {
    let selector = format!("--field-selector=spec.nodeName={node}");
    let pods = get(cluster, &["pods", "-A", &selector])?;
    let state = |pod: &Value| {
        let statuses = pod["status"]["containerStatuses"].as_array()?;
        let restarts = statuses
            .iter()
            .filter_map(|status| status["restartCount"].as_u64());
        let is_ready = condition(pod, "Ready")?["status"] == "True";
        Some((pod["metadata"]["uid"].to_string(), (restarts.sum(), is_ready)))
    };
    Ok(pods["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null())
        .filter_map(state)
        .collect())
}

/// Ends a process of the node while flows go on, waits until pods can be made there again, and asserts that existing
/// pods are unchanged.
fn restarts(node: &str, what: &str, end: impl FnOnce(&Cluster) -> Result<()>) {
    let cluster = &tenants().cluster;
    let before = states(cluster, node).unwrap();
    assert!(before.values().all(|(_, is_ready)| *is_ready), "{before:?}");
    none_lost_while(what, &tenants().ring("red-web"), || {
        end(cluster)?;
        apply(cluster, &[netexec_manifest("red", "restarted", node, None)])?;
        running(cluster, "red", "restarted")?;
        delete(cluster, &["pod", "-n", "red", "restarted"])
    });
    let after = states(cluster, node).unwrap();
    assert_eq!(before, after, "{what}");
}

#[test]
fn a_restart_of_kubelet_is_noticed_by_no_pod() {
    restarts("node-a", "kubelet restarts", |cluster| {
        cluster.signal("node-a", "kubelet", "KILL")?;
        // This is longer than the periods of probes.
        std::thread::sleep(Duration::from_secs(12));
        cluster.start_kubelet("node-a")
    });
}

#[test]
fn a_restart_of_containerd_is_noticed_by_no_pod() {
    for node in [NOT_ASKED, ASKED] {
        restarts(node, &format!("containerd of {node} restarts"), |cluster| {
            cluster.signal(node, "containerd", "KILL")
        });
    }
}

/// Hides the node's transitd from the plugin until this is dropped. For all others transitd goes on.
struct Away<'a>(&'a Cluster, &'a str);

impl<'a> Away<'a> {
    fn new(cluster: &'a Cluster, node: &'a str) -> Result<Self> {
        let away = Self(cluster, node);
        away.rename("", ".aside")?;
        Ok(away)
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        for file in FILES {
            let path = |suffix: &str| format!("{RUN}/{file}{suffix}");
            self.0.exec_on_node(self.1, &["mv", &path(from), &path(to)])?;
        }
        Ok(())
    }
}

impl Drop for Away<'_> {
    fn drop(&mut self) {
        let _ = self.rename(".aside", "");
    }
}

/// Returns whether the node takes pods, and its message about that.
fn readiness(cluster: &Cluster, node: &str) -> Result<(bool, String)> {
    let node = get(cluster, &["node", node])?;
    let ready = condition(&node, "Ready").context("no condition")?;
    let message = ready["message"].as_str().unwrap_or_default();
    Ok((ready["status"] == "True", message.to_owned()))
}

#[test]
fn containerd_2_status_makes_node_unready_without_transitd() {
    let cluster = &tenants().cluster;
    let asked = || of_node(cluster, ASKED).map(|seen| seen.get(STATUSES).copied().unwrap_or_default());
    let before = asked().unwrap();
    cluster
        .wait_for("more STATUS calls", Duration::from_secs(30), || {
            Ok(asked()? > before)
        })
        .unwrap();
    none_lost_while("no transitd for the plugin", &tenants().ring("red-web"), || {
        let _away = [Away::new(cluster, ASKED)?, Away::new(cluster, NOT_ASKED)?];
        cluster.wait_for("the node says why", Duration::from_secs(45), || {
            let (is_ready, message) = readiness(cluster, ASKED)?;
            Ok(!is_ready && message.contains("transitd"))
        })?;
        eprintln!("{ASKED}: {}", readiness(cluster, ASKED)?.1);
        ensure!(
            readiness(cluster, NOT_ASKED)?.0,
            "containerd 1.6 doesn't call STATUS, and yet {NOT_ASKED} isn't ready"
        );
        Ok(())
    });
    cluster
        .wait_for("the node takes pods", Duration::from_mins(1), || {
            Ok(readiness(cluster, ASKED)?.0 && readiness(cluster, NOT_ASKED)?.0)
        })
        .unwrap();
}

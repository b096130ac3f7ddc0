//! The leading operator dies or stops: the time until the next one serves all droplets is bounded, and traffic is not
//! affected.

use std::time::Instant;

use anyhow::{Result, ensure};
use thuban_cluster::Cluster;

use crate::flows::none_lost_while;
use crate::leadership::{BOUND, LASTING, leader, pod_of, wait_led, wait_served};
use crate::tenants::tenants;

const SYSTEM: &str = "thuban-system";

fn replaced(what: &str, end: impl FnOnce(&Cluster, &str, &str) -> Result<()>) {
    let cluster = &tenants().cluster;
    let ways = tenants().ring("red-web");
    wait_led(cluster, LASTING).unwrap();
    none_lost_while(what, &ways, || {
        let (holder, epoch) = leader(cluster)?;
        let (pod, node) = pod_of(cluster, &holder)?;
        let since = Instant::now();
        end(cluster, &pod, &node)?;
        let [leads, serves] = wait_served(cluster, epoch, since)?;
        eprintln!("{what}: the next one leads after {leads:.1?}, serves all droplets after {serves:.1?}");
        ensure!(serves < BOUND);
        Ok(())
    });
    cluster
        .kubectl(&[
            "rollout",
            "status",
            "-n",
            SYSTEM,
            "deployment/thuban-operator",
            "--timeout=120s",
        ])
        .unwrap();
}

#[test]
fn a_leader_that_is_killed_is_replaced_and_traffic_flows() {
    replaced("the leader is killed", |cluster, _, node| {
        cluster.signal(node, "thuban-operator", "KILL")
    });
}

#[test]
fn a_leader_that_stops_hands_over_and_traffic_flows() {
    replaced("the leader stops", |cluster, pod, _| {
        cluster
            .kubectl(&["delete", "pod", "-n", SYSTEM, pod, "--wait=false"])
            .map(|_| ())
    });
}

//! transitd and operator restart; packets still arrive, and new connections to Services work.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use thuban_cluster::Cluster;

use crate::flows::none_lost_while;
use crate::service_objects::{made, manifest, serves, wait_endpoint};
use crate::support::{NOT_REACHED, Pod, REACHED, delete};
use crate::tenants::{SELECTOR, tenants};

/// Counts unanswered pings of all pairs of red's web pods while `work` runs.
fn lost_while(work: impl FnOnce()) -> (usize, usize) {
    let pods = tenants().network("red-web");
    for client in &pods {
        for server in &pods {
            client.ping(server.address, REACHED).unwrap();
        }
    }
    let stop = AtomicBool::new(false);
    let (sent, lost) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for client in &pods {
            let (stop, sent, lost, pods) = (&stop, &sent, &lost, &pods);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    for server in pods {
                        sent.fetch_add(1, Ordering::Relaxed);
                        if client.ping(server.address, NOT_REACHED / 4).is_err() {
                            lost.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
        }
        work();
        stop.store(true, Ordering::Relaxed);
    });
    (sent.into_inner(), lost.into_inner())
}

/// Restarts both, one after the other; waits each time until all its pods are new and ready.
fn restart_all(cluster: &Cluster) -> Result<()> {
    for workload in ["daemonset/transitd", "deployment/thuban-operator"] {
        cluster.kubectl(&["rollout", "restart", "-n", "thuban-system", workload])?;
        let status = [
            "rollout",
            "status",
            "-n",
            "thuban-system",
            workload,
            "--timeout=180s",
        ];
        cluster.kubectl(&status)?;
    }
    Ok(())
}

#[test]
fn traffic_flows_on_while_transitd_and_operator_restart() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let address = made(
        cluster,
        &manifest("red", "steady", &json!({SELECTOR.0: SELECTOR.1})),
    )
    .unwrap();
    let count = tenants.vpc("red").len() as u64;
    wait_endpoint(cluster, "red", "steady", "all backends", serves(count));
    let web = tenants.network("red-web");
    let ways: Vec<(&Pod, Ipv4Addr)> = web.iter().map(|pod| (*pod, address)).collect();
    let mut pings = (0, 0);
    none_lost_while("restarts under a Service", &ways, || {
        let mut restarted = Ok(());
        pings = lost_while(|| restarted = restart_all(cluster));
        restarted
    });
    delete(cluster, &["service", "-n", "red", "steady"]).unwrap();
    let (sent, lost) = pings;
    assert!(sent > 100, "only {sent} pings were sent");
    assert_eq!(lost, 0, "{lost} of {sent} pings were lost");
}

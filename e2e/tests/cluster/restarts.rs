//! The parts that steer may die; packets flow on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{NOT_REACHED, REACHED};
use crate::tenants::tenants;

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

#[test]
fn traffic_flows_on_while_transitd_and_operator_restart() {
    let cluster = &tenants().cluster;
    let (sent, lost) = lost_while(|| {
        cluster
            .kubectl(&["rollout", "restart", "-n", "thuban-system", "daemonset/transitd"])
            .unwrap();
        cluster
            .kubectl(&[
                "rollout",
                "status",
                "-n",
                "thuban-system",
                "daemonset/transitd",
                "--timeout=180s",
            ])
            .unwrap();
        cluster
            .kubectl(&[
                "rollout",
                "restart",
                "-n",
                "thuban-system",
                "deployment/thuban-operator",
            ])
            .unwrap();
        cluster
            .kubectl(&[
                "rollout",
                "status",
                "-n",
                "thuban-system",
                "deployment/thuban-operator",
                "--timeout=180s",
            ])
            .unwrap();
    });
    assert!(sent > 100, "only {sent} pings were sent");
    assert_eq!(lost, 0, "{lost} of {sent} pings were lost");
}

//! The control plane is away for a while: traffic goes on, and afterwards everything works again.

use std::time::{Duration, Instant};

use anyhow::Result;
use thuban_cluster::Cluster;

use crate::audit::wait_sound;
use crate::flows::none_lost_while;
use crate::leadership::{leader, wait_served};
use crate::support::{apply, delete, netexec_manifest, running};
use crate::tenants::tenants;

/// Returns how long the API server is away: 20 s, or `THUBAN_E2E_OUTAGE` seconds.
fn outage() -> Duration {
    let seconds = std::env::var("THUBAN_E2E_OUTAGE").ok();
    Duration::from_secs(seconds.and_then(|text| text.parse().ok()).unwrap_or(20))
}

fn away(what: &str, components: &[&str], time: Duration) {
    let cluster = &tenants().cluster;
    let ways = tenants().ring("red-web");
    none_lost_while(what, &ways, || {
        let (holder, epoch) = leader(cluster)?;
        cluster.stop_control_plane(components)?;
        std::thread::sleep(time);
        cluster.resume_control_plane(components)?;
        let since = Instant::now();
        comes_up(cluster)?;
        eprintln!(
            "{what}: a new pod is ready {:.1?} after the API server is",
            since.elapsed()
        );
        if leader(cluster)?.0 != holder {
            wait_served(cluster, epoch, since)?;
        }
        Ok(())
    });
    wait_sound(cluster);
}

/// Makes a pod and removes it again.
fn comes_up(cluster: &Cluster) -> Result<()> {
    apply(cluster, &[netexec_manifest("red", "after", "node-b", None)])?;
    running(cluster, "red", "after")?;
    delete(cluster, &["pod", "-n", "red", "after"])
}

#[test]
fn traffic_flows_and_all_goes_on_after_the_api_server_was_away() {
    away("API server away", &["apiserver"], outage());
}

#[test]
fn traffic_flows_and_all_goes_on_after_etcd_restarts() {
    away("etcd restarted", &["etcd", "apiserver"], Duration::from_secs(2));
}

//! Answers load balancers that ask whether this node has backends of a Service whose traffic stays on its node. Each
//! such Service has a port, which answers as kube-proxy's does: 200 with a count, or 503.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use thuban_telemetry::{Answer, Pages, StatusCode};
use tokio::task::JoinHandle;

use crate::node::Node;
use crate::state::State;

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let mut changes = node.watch();
    let mut serving: BTreeMap<u16, (String, JoinHandle<()>)> = BTreeMap::new();
    loop {
        let wanted = wanted(&node.state());
        serving.retain(|port, (service, task)| {
            let stays = wanted.get(port) == Some(service);
            if !stays {
                task.abort();
            }
            stays
        });
        for (port, service) in wanted {
            serving.entry(port).or_insert_with(|| {
                let address = SocketAddr::from((everywhere(), port));
                let pages = Health {
                    node: Arc::clone(&node),
                    service: service.clone(),
                };
                let setting = "healthCheckNodePort of a Service";
                (
                    service,
                    tokio::spawn(thuban_telemetry::serve(address, setting, pages)),
                )
            });
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Returns the unspecified address: of both families if the node has IPv6.
fn everywhere() -> IpAddr {
    if Path::new("/proc/sys/net/ipv6").exists() {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    }
}

/// Returns the Service of each port.
fn wanted(state: &State) -> BTreeMap<u16, String> {
    let exposed = state.program.exposed();
    let ports = exposed.filter_map(|exposed| Some((exposed.health_port?, exposed.service.clone())));
    ports.collect()
}

struct Health {
    node: Arc<Node>,
    /// namespace/name
    service: String,
}

impl Pages for Health {
    async fn answer(&self, _: &str) -> Answer {
        let count = backends(&self.node.state(), &self.service);
        let (namespace, name) = self.service.split_once('/').unwrap_or_default();
        let body = json!({
            "service": {"namespace": namespace, "name": name},
            "localEndpoints": count,
        });
        let status = if count > 0 {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        Answer::Json(status, body.to_string())
    }
}

/// Returns how many addresses of this node take traffic for a Service and aren't ending, of the family that has more.
fn backends(state: &State, service: &str) -> usize {
    let exposed = state
        .program
        .exposed()
        .filter(|exposed| exposed.service == service);
    let counts = exposed.map(|exposed| exposed.staying().len());
    counts.max().unwrap_or_default()
}

//! Registers this node's Droplet and keeps its heartbeat Lease fresh.
//!
//! Writes its own Droplet's spec and its own Lease, nothing else. After an API error the task waits and tries again,
//! and never ends: the data plane needs neither object.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client, Error};
use thiserror::Error;
use thuban_api::{Droplet, DropletSpec, HEARTBEAT_NAMESPACE};
use tracing::{info, warn};

use crate::dataplane::hooks::AgentHook;
use crate::netlink::shaper;
use crate::node::Node;

/// The time between renewals of the heartbeat, and so between looks at the Droplet.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// How many seconds without renewal the heartbeat may be old before it counts as gone.
const LEASE_SECONDS: i32 = 40;
/// How long one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Error)]
enum RegisterError {
    #[error("cannot {operation} {object}")]
    Api {
        operation: &'static str,
        object: String,
        source: Box<Error>,
    },
    #[error("the API server does not answer")]
    Timeout,
}

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>, client: Client) {
    let droplets: Api<Droplet> = Api::all(client.clone());
    let leases: Api<Lease> = Api::namespaced(client, HEARTBEAT_NAMESPACE);
    let mut interval = tokio::time::interval(HEARTBEAT);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        for result in [
            bounded(register(&node, &droplets)).await,
            bounded(renew(&node, &leases)).await,
        ] {
            if let Err(error) = result {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "not registered, tried again"
                );
            }
        }
    }
}

async fn bounded(work: impl Future<Output = Result<(), RegisterError>>) -> Result<(), RegisterError> {
    tokio::time::timeout(REQUEST_TIMEOUT, work)
        .await
        .unwrap_or(Err(RegisterError::Timeout))
}

fn desired(node: &Node) -> DropletSpec {
    DropletSpec {
        node: node.settings.node_name.clone(),
        ip: node.uplink.address.to_string(),
        interface: node.uplink.name.clone(),
        mtu: node.uplink.mtu,
        transit_hook: node.transit_hook.name().into(),
        agent_hook: match node.settings.agent_hook {
            AgentHook::Tc => "tc".into(),
            AgentHook::Xdp => "xdp".into(),
        },
        limit_queue: shaper::queue().unwrap_or_default().into(),
        program_version: env!("CARGO_PKG_VERSION").into(),
    }
}

async fn register(node: &Node, droplets: &Api<Droplet>) -> Result<(), RegisterError> {
    let name = &node.settings.node_name;
    let failed = |operation| {
        let object = format!("Droplet {name}");
        move |source| RegisterError::Api {
            operation,
            object,
            source: Box::new(source),
        }
    };
    let mut spec = desired(node);
    match droplets.get_opt(name).await.map_err(failed("read"))? {
        None => {
            droplets
                .create(&PostParams::default(), &Droplet::new(name, spec))
                .await
                .map_err(failed("create"))?;
            info!(droplet = name, "Droplet created");
        }
        Some(mut droplet) => {
            if spec.limit_queue.is_empty() {
                // A limit that an earlier transitd set has told it.
                spec.limit_queue.clone_from(&droplet.spec.limit_queue);
            }
            if droplet.spec == spec {
                return Ok(());
            }
            droplet.spec = spec;
            // The update carries the resourceVersion that was read.
            droplets
                .replace(name, &PostParams::default(), &droplet)
                .await
                .map_err(failed("update"))?;
            info!(droplet = name, "Droplet updated");
        }
    }
    Ok(())
}

async fn renew(node: &Node, leases: &Api<Lease>) -> Result<(), RegisterError> {
    let name = format!("droplet-{}", node.settings.node_name);
    let failed = |operation| {
        let object = format!("Lease {name}");
        move |source| RegisterError::Api {
            operation,
            object,
            source: Box::new(source),
        }
    };
    let spec = LeaseSpec {
        holder_identity: Some(node.settings.node_name.clone()),
        lease_duration_seconds: Some(LEASE_SECONDS),
        renew_time: Some(MicroTime(Timestamp::now())),
        ..Default::default()
    };
    match leases.get_opt(&name).await.map_err(failed("read"))? {
        None => {
            let metadata = ObjectMeta {
                name: Some(name.clone()),
                ..Default::default()
            };
            let lease = Lease {
                metadata,
                spec: Some(spec),
            };
            leases
                .create(&PostParams::default(), &lease)
                .await
                .map_err(failed("create"))?;
        }
        Some(mut lease) => {
            lease.spec = Some(spec);
            leases
                .replace(&name, &PostParams::default(), &lease)
                .await
                .map_err(failed("update"))?;
        }
    }
    Ok(())
}

//! Registers this node's Droplet.
//!
//! Writes its own Droplet's spec, nothing else. At rest there are no requests. The Droplet is read with each new
//! stream, when the node's facts change, and every ten seconds while there is no stream. If somebody deletes the
//! Droplet of a node with a stream, the operator ends the stream, and the next one makes the Droplet again. A stream
//! lives no longer than its token, so no Droplet stays unread.
//!
//! After an API error the task waits and tries again, and never ends: the data plane does not need the object.

use std::sync::Arc;
use std::time::Duration;

use kube::api::PostParams;
use kube::{Api, Client, Error};
use thiserror::Error;
use thuban_api::{Droplet, DropletSpec};
use thuban_client::jitter::around;
use tokio::sync::Notify;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use crate::dataplane::hooks::AgentHook;
use crate::netlink::shaper;
use crate::node::Node;

/// The time between looks at the node's own facts, between attempts after an error, and between reads without a stream.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How long after the beginning of a stream its Droplet is read, about: all droplets get a stream when a new operator
/// leads.
const SPREAD: Duration = Duration::from_secs(3);
/// How long one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Error)]
enum RegisterError {
    #[error("cannot {operation} Droplet {droplet}")]
    Api {
        operation: &'static str,
        droplet: String,
        source: Box<Error>,
    },
    #[error("the API server does not answer")]
    Timeout,
}

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>, client: Client) {
    let has_stream = || node.state().stream.is_some();
    keep(|| desired(&node), has_stream, &node.opened, &Api::all(client)).await;
}

/// Keeps a Droplet as it is wanted, and never returns. `opened` is notified when a stream begins.
pub async fn keep(
    wanted: impl Fn() -> DropletSpec,
    has_stream: impl Fn() -> bool,
    opened: &Notify,
    droplets: &Api<Droplet>,
) {
    let mut registered = None;
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = looks.tick() => {}
            () = opened.notified() => {
                tokio::time::sleep(around(SPREAD)).await;
                registered = None;
            }
        }
        let spec = wanted();
        if has_stream() && registered.as_ref() == Some(&spec) {
            continue;
        }
        let result = tokio::time::timeout(REQUEST_TIMEOUT, register(&spec, droplets)).await;
        match result.unwrap_or(Err(RegisterError::Timeout)) {
            Ok(()) => registered = Some(spec),
            Err(error) => {
                registered = None;
                warn!(
                    error = &error as &dyn std::error::Error,
                    "not registered, tried again"
                );
            }
        }
    }
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

async fn register(wanted: &DropletSpec, droplets: &Api<Droplet>) -> Result<(), RegisterError> {
    let name = &wanted.node;
    let failed = |operation| {
        let droplet = name.clone();
        move |source| RegisterError::Api {
            operation,
            droplet,
            source: Box::new(source),
        }
    };
    let mut spec = wanted.clone();
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

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use serde_json::Value;
    use thuban_client::played::{self, Answer, Method, Request};
    use tokio::time::sleep;

    use super::*;

    /// An API server with at most one Droplet.
    #[derive(Clone, Default)]
    struct Server(Arc<Mutex<Played>>);

    #[derive(Default)]
    struct Played {
        droplet: Option<Value>,
        is_away: bool,
        methods: Vec<String>,
    }

    impl Server {
        fn client(&self) -> Client {
            let server = self.clone();
            played::client(move |request| ready(server.answer(&request)))
        }

        fn answer(&self, request: &Request) -> Answer {
            let mut server = self.0.lock().unwrap();
            if request.method != Method::GET {
                server.droplet = Some(serde_json::from_slice(&request.body).unwrap());
            }
            server.methods.push(request.method.to_string());
            match &server.droplet {
                _ if server.is_away => played::status(503, "ServiceUnavailable", "ServiceUnavailable"),
                Some(droplet) => (200, droplet.to_string()),
                None => played::status(404, "NotFound", "NotFound"),
            }
        }

        /// Waits until all that is to be done is done, and returns the requests since the last call.
        async fn methods(&self) -> Vec<String> {
            sleep(LOOK_EVERY + 2 * SPREAD).await;
            std::mem::take(&mut self.0.lock().unwrap().methods)
        }
    }

    fn spec() -> DropletSpec {
        DropletSpec {
            node: "a".into(),
            ip: "192.0.2.1".into(),
            interface: "eth0".into(),
            mtu: 1500,
            transit_hook: "tc".into(),
            agent_hook: "tc".into(),
            limit_queue: String::new(),
            program_version: "1".into(),
        }
    }

    /// A transitd that keeps its Droplet.
    struct Transitd {
        wanted: Mutex<DropletSpec>,
        has_stream: AtomicBool,
        opened: Notify,
    }

    impl Transitd {
        /// Begins with a stream.
        fn start(server: &Server) -> Arc<Self> {
            let transitd = Arc::new(Self {
                wanted: Mutex::new(spec()),
                has_stream: AtomicBool::new(true),
                opened: Notify::new(),
            });
            let (kept, droplets) = (Arc::clone(&transitd), Api::all(server.client()));
            tokio::spawn(async move {
                let wanted = || kept.wanted.lock().unwrap().clone();
                let has_stream = || kept.has_stream.load(Ordering::Relaxed);
                keep(wanted, has_stream, &kept.opened, &droplets).await;
            });
            transitd
        }

        fn want_queue(&self, limit_queue: &str) {
            self.wanted.lock().unwrap().limit_queue = limit_queue.into();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_droplet_at_rest_costs_no_request() {
        let server = Server::default();
        let transitd = Transitd::start(&server);
        assert_eq!(server.methods().await, ["GET", "POST"]);
        sleep(Duration::from_hours(1)).await;
        assert!(server.methods().await.is_empty());
        transitd.opened.notify_one();
        assert_eq!(server.methods().await, ["GET"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deleted_droplet_is_made_again_by_the_next_stream() {
        let server = Server::default();
        let transitd = Transitd::start(&server);
        assert_eq!(server.methods().await, ["GET", "POST"]);
        server.0.lock().unwrap().droplet = None;
        assert!(server.methods().await.is_empty());
        transitd.opened.notify_one();
        assert_eq!(server.methods().await, ["GET", "POST"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_droplet_deleted_without_a_stream_is_made_again() {
        let server = Server::default();
        let transitd = Transitd::start(&server);
        assert_eq!(server.methods().await, ["GET", "POST"]);
        transitd.has_stream.store(false, Ordering::Relaxed);
        let methods = server.methods().await;
        assert!(!methods.is_empty() && methods.iter().all(|method| method == "GET"));
        server.0.lock().unwrap().droplet = None;
        assert!(server.methods().await.contains(&"POST".to_owned()));
        transitd.has_stream.store(true, Ordering::Relaxed);
        assert!(server.methods().await.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_fact_that_changes_is_written() {
        let server = Server::default();
        let transitd = Transitd::start(&server);
        assert_eq!(server.methods().await, ["GET", "POST"]);
        transitd.want_queue("fifo");
        assert_eq!(server.methods().await, ["GET", "PUT"]);
        // A transitd that starts again does not know it, and leaves it.
        transitd.want_queue("");
        transitd.opened.notify_one();
        assert_eq!(server.methods().await, ["GET"]);
        let droplet = server.0.lock().unwrap().droplet.clone().unwrap();
        assert_eq!(droplet["spec"]["limitQueue"], "fifo");
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_is_away_is_asked_again() {
        let server = Server::default();
        server.0.lock().unwrap().is_away = true;
        let _transitd = Transitd::start(&server);
        let methods = server.methods().await;
        assert!(!methods.is_empty() && methods.iter().all(|method| method == "GET"));
        server.0.lock().unwrap().is_away = false;
        assert_eq!(server.methods().await, ["GET", "POST"]);
        assert!(server.methods().await.is_empty());
    }
}

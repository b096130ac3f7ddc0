//! The mode Tunnel behind a router that checks sources: the router takes packets from the load balancer's address only
//! from the node to which the router leads the address.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use thuban_cluster::Cluster;
use thuban_cluster::command::run;
use thuban_cluster::router::{NODES_ASN, Router};

use super::announcing::wait_for_next_hops;
use super::fronts::{Connections, ensure_own_address};
use super::{Made, SOON, TENANT, install, routed, wait_for_address, wait_for_processes, wait_for_reason};
use crate::support::{NOT_REACHED, REACHED, apply, http_hostname_at, running};
use crate::tenants::tenants;

const NAME: &str = "tunnelled";
const RANGE: &str = "203.0.113.72/29";
const SERVICE: [&str; 4] = ["service", "-n", TENANT, NAME];
const FRONT: &str = "thuban.dev/Front";
const MODE: &str = "thuban.dev/load-balancer-mode";

/// Has the router drop packets from an address, unless they come from this node.
fn check_sources(cluster: &Cluster, router: &Router, address: IpAddr, node: &str) -> Result<()> {
    let link = cluster.exec_on_node(node, &["ip", "-br", "link", "show", "eth0"])?;
    let place = link
        .split_whitespace()
        .nth(2)
        .context("the node's Ethernet address")?;
    let rules = format!(
        "add table ip sources; add chain ip sources check {{ type filter hook prerouting priority -300; }}; \
         add rule ip sources check iifname eth0 ip saddr {address} ether saddr != {place} counter drop"
    );
    router.at_router(|| run("nft", &[&rules])).map(drop)
}

/// Whether the router has dropped a packet because of its source.
fn has_dropped(router: &Router) -> Result<bool> {
    let rules = router.at_router(|| run("nft", &["list", "table", "ip", "sources"]))?;
    Ok(!rules.contains("counter packets 0 "))
}

fn trust_sources(router: &Router) -> Result<()> {
    let command = ["delete", "table", "ip", "sources"];
    router.at_router(|| run("nft", &command)).map(drop)
}

/// Returns how many answers of other nodes' backends a front has sent to clients.
fn returned(cluster: &Cluster, front: &str) -> Result<u64> {
    let counters = cluster.counters(front)?;
    Ok(counters.get("front_returned").copied().unwrap_or_default())
}

#[test]
fn answers_of_mode_tunnel_pass_a_router_that_checks_sources() -> Result<()> {
    let cluster = &tenants().cluster;
    install(cluster)?;
    let router = Router::start(cluster, None)?;
    let _made = Made {
        cluster,
        label: "test=tunnelled",
        needed: &[&["bgppeer", NAME], &["ippool", NAME]],
    };
    wait_for_processes(cluster)?;
    let nodes = cluster.nodes()?;
    let (home, front) = (&nodes[0], &nodes[1]);
    apply(cluster, &routed::pool_and_peer(NAME, RANGE, &router, NODES_ASN))?;
    let service = routed::balanced_service(NAME, &[(MODE, "Tunnel")]);
    apply(cluster, &[service, routed::backend(NAME, home)])?;
    running(cluster, TENANT, NAME)?;
    let address = wait_for_address(cluster, NAME)?;
    wait_for_reason(cluster, &SERVICE, FRONT, "Tunnel")?;
    wait_for_next_hops(cluster, &router, address, nodes.len())?;
    router.route(address, &[cluster.node_address(front)?])?;
    check_sources(cluster, &router, address, front)?;

    let server = SocketAddr::new(address, 80);
    let before = returned(cluster, front)?;
    cluster.wait_for("an answer that the front returns", SOON, || {
        router.at_client(|| http_hostname_at(server, REACHED))?;
        Ok(returned(cluster, front)? > before)
    })?;
    ensure_own_address(&router, server)?;
    let mut held = Connections::open(cluster, &router, server)?;
    held.ask("in the mode Tunnel")?;
    assert!(!has_dropped(&router)?, "nothing leaves from the backend's node");

    let mode = format!("{MODE}=Dsr");
    cluster.kubectl(&["annotate", "service", "-n", TENANT, NAME, &mode, "--overwrite"])?;
    wait_for_reason(cluster, &SERVICE, FRONT, "Dsr")?;
    // From now on answers leave from the backend's node, and the router drops them.
    cluster.wait_for("an answer from the backend's node", SOON, || {
        let _ = router.at_client(|| http_hostname_at(server, NOT_REACHED));
        has_dropped(&router)
    })?;
    trust_sources(&router)?;
    held.ask("in the mode Dsr").map(drop)
}

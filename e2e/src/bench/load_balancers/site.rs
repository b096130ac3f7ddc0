//! One cluster with its router, the client behind the router, and servers in pods.

use std::{
    net::{IpAddr, Ipv4Addr},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use thuban_cluster::{
    Cluster, NODES,
    router::{CLIENT, Router},
};

use super::objects::{self, POOL, READY_TIMEOUT, SPACE, Wanted};
use crate::bench::{
    pods::{self, Pod},
    services::traffic::{self, ANSWERS, Taken},
    traffic::PORTS,
};

/// Servers on each node.
const EACH: usize = 2;
/// The node whose server alone takes streams and datagrams, and which dies as a front.
pub const LAST: &str = NODES[2];
/// The node by which the client's router sends streams and datagrams, which is neither the client's nor the server's.
pub const VIA: &str = NODES[1];
/// The port of connections that stay open.
pub const ECHO: u16 = 7002;

/// How long to wait for BFD, how often to look, and how long its sessions need until they send at their interval.
const BFD_TIMEOUT: Duration = Duration::from_secs(30);
const BFD_LOOK: Duration = Duration::from_millis(200);
const BFD_SETTLES: Duration = Duration::from_secs(2);

/// The labels of backends: all servers, the one on [`LAST`], and those on the other nodes.
const ALL: (&str, &str) = ("servers", "all");
const ONE: (&str, &str) = ("one", "yes");
const OTHERS: (&str, &str) = ("others", "yes");

pub struct Site {
    pub cluster: Cluster,
    pub router: Router,
    pub client: Pod,
    /// The servers, on nodes in turns.
    pub servers: Vec<Pod>,
}

impl Site {
    /// Makes the tenant, its pods and the pools.
    pub fn of_thuban(name: &str) -> Result<Self> {
        let cluster = Cluster::named(name)?;
        objects::make_tenant(&cluster)?;
        let site = Self::up(cluster)?;
        objects::make_pools(&site.cluster, &site.router)?;
        Ok(site)
    }

    /// Makes the pods of the other cluster.
    pub fn of_peer(name: &str) -> Result<Self> {
        Self::up(Cluster::named(name)?)
    }

    fn up(cluster: Cluster) -> Result<Self> {
        let wanted: Vec<(String, &str)> = (0..EACH * NODES.len())
            .map(|index| (format!("server-{index}"), node_of(index)))
            .collect();
        let servers = pods::up(&cluster, SPACE, &wanted)?;
        for (index, (name, node)) in wanted.iter().enumerate() {
            let role = match (*node == LAST, index < NODES.len()) {
                (true, true) => Some(ONE),
                (true, false) => None,
                (false, _) => Some(OTHERS),
            };
            let labels: Vec<String> = [Some(ALL), role]
                .into_iter()
                .flatten()
                .map(|(label, value)| format!("{label}={value}"))
                .collect();
            let mut command = vec!["label", "pod", "-n", SPACE, name, "--overwrite"];
            command.extend(labels.iter().map(String::as_str));
            cluster.kubectl(&command)?;
        }
        let router = Router::start(&cluster, None)?;
        let taken = Taken::default();
        for (number, pod) in (0..).zip(&servers) {
            traffic::serve(pod, number, &taken)?;
            traffic::echo(pod, ECHO)?;
        }
        Ok(Self {
            client: Pod::of(router.client_path(), CLIENT),
            cluster,
            router,
            servers,
        })
    }

    /// Makes a Service by Thuban. Waits for its address, and until all nodes announce it.
    pub fn balance(&self, wanted: &Wanted) -> Result<Ipv4Addr> {
        objects::apply(&self.cluster, &[wanted.of_thuban()])?;
        let address = objects::address(&self.cluster, &wanted.name)?;
        self.await_routes(address)?;
        Ok(address)
    }

    /// Waits until the router's routes to an address lead to all nodes.
    pub fn await_routes(&self, address: Ipv4Addr) -> Result<()> {
        self.cluster
            .wait_for(&format!("all routes to {address}"), READY_TIMEOUT, || {
                Ok(self.router.next_hops(address.into())?.len() == NODES.len())
            })
    }

    /// Waits until the router would notice the death of any node by BFD, which begins some seconds after a session of
    /// BGP. Returns of how many nodes it would, for the time of the wait is limited.
    pub fn await_bfd(&self) -> Result<usize> {
        let start = Instant::now();
        loop {
            let sessions = self.router.bfd_sessions()?;
            if sessions >= NODES.len() {
                thread::sleep(BFD_SETTLES);
                return Ok(sessions);
            }
            if start.elapsed() > BFD_TIMEOUT {
                return Ok(sessions);
            }
            thread::sleep(BFD_LOOK);
        }
    }

    /// Makes a Service as MetalLB does: an address in its status, and a router's routes to all nodes.
    pub fn balance_by_hand(&self, wanted: &Wanted, address: Ipv4Addr) -> Result<()> {
        objects::apply(&self.cluster, &[wanted.of_peer()])?;
        objects::give_address(&self.cluster, &wanted.name, address)?;
        let nodes = NODES.map(|node| self.cluster.node_address(node));
        let nodes = nodes.into_iter().collect::<Result<Vec<_>>>()?;
        self.router.route(address.into(), &nodes)
    }

    /// Has the router send what is for an address to [`VIA`] alone.
    pub fn route_by_one(&self, address: Ipv4Addr) -> Result<()> {
        let via = self.cluster.node_address(VIA)?;
        self.router.route(IpAddr::V4(address), &[via])
    }

    /// Returns the server on [`LAST`] that takes streams and datagrams.
    pub fn last(&self) -> &Pod {
        &self.servers[NODES.len() - 1]
    }
}

/// Returns the node of a server.
pub fn node_of(index: usize) -> &'static str {
    NODES[index % NODES.len()]
}

fn wanted(name: &str, label: (&'static str, &'static str), ports: &[(u16, &'static str)]) -> Wanted {
    Wanted {
        name: name.to_owned(),
        label: Some(label),
        ports: ports.to_vec(),
        pool: POOL,
        by_node: false,
    }
}

/// Returns the Service of short connections to all servers.
pub fn answers(name: &str) -> Wanted {
    wanted(name, ALL, &[(ANSWERS, "TCP")])
}

/// Returns the Service of streams and datagrams to one server.
pub fn one(name: &str) -> Wanted {
    wanted(name, ONE, &PORTS)
}

/// Returns the Service whose backends are not on the node that dies.
pub fn others(name: &str) -> Wanted {
    wanted(name, OTHERS, &[(ANSWERS, "TCP"), (ECHO, "TCP")])
}

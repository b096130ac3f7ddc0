//! Internal BGP: a router of the nodes' own autonomous system learns of an address, and leads clients to the nodes.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use anyhow::Result;
use thuban_cluster::router::{ASN, Router};

use super::OwnSpeakers;
use crate::side_by_side::load_balancers::announcing::{wait_for_answers, wait_for_next_hops};
use crate::side_by_side::load_balancers::{Made, TENANT, routed, wait_for_address, wait_for_processes};
use crate::support::{apply, delete, running};
use crate::tenants::tenants;

const NAME: &str = "internal";
const RANGE: &str = "203.0.113.80/29";

#[test]
fn a_router_of_the_nodes_own_system_leads_clients_to_them() -> Result<()> {
    let cluster = &tenants().cluster;
    let _speakers = OwnSpeakers::new(cluster)?;
    let router = Router::start_internal(cluster)?;
    let _made = Made {
        cluster,
        label: "test=internal",
        needed: &[&["bgppeer", NAME], &["ippool", NAME]],
    };
    wait_for_processes(cluster)?;
    let nodes = cluster.nodes()?;
    apply(cluster, &routed::pool_and_peer(NAME, RANGE, &router, ASN))?;
    let service = routed::balanced_service(NAME, &[]);
    apply(cluster, &[service, routed::backend(NAME, &nodes[0])])?;
    running(cluster, TENANT, NAME)?;
    let address = wait_for_address(cluster, NAME)?;
    wait_for_next_hops(cluster, &router, address, nodes.len())?;
    let mut own = Vec::new();
    for node in &nodes {
        own.push(cluster.node_address(node)?.to_string());
    }
    own.sort();
    assert_eq!(router.next_hops(address)?, own);
    let pods = BTreeSet::from([NAME.to_owned()]);
    wait_for_answers(cluster, &router, SocketAddr::new(address, 80), &pods)?;
    delete(cluster, &["service", "-n", TENANT, NAME])?;
    wait_for_next_hops(cluster, &router, address, 0)
}

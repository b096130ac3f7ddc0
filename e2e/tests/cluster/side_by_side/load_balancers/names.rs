//! The name of a Vip: a client outside finds the address by the name. When the Vip is deleted, the name goes first, and
//! nodes announce the address for some time longer.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::router::{NODES_ASN, Router};

use super::announcing::{answers, wait_for_answers, wait_for_next_hops};
use super::name_server::NameServer;
use super::{Made, SOON, TENANT, install, routed, wait_for_processes, wait_for_reason};
use crate::side_by_side::dns::NXDOMAIN;
use crate::support::{PORT, apply, get, running};
use crate::tenants::tenants;

const NAME: &str = "titled";
const RANGE: &str = "203.0.113.88/29";
const ZONE: &str = "apps.example";
/// The name in the tenant's part of the zone.
const HOST: &str = "shop.red.apps.example";
const VIP: [&str; 4] = ["vip", "-n", TENANT, NAME];

/// Returns a Service, and a Vip for it that has a name.
fn service_and_vip() -> [Value; 2] {
    let web = format!("{NAME}-web");
    let mut of_web = routed::metadata(NAME);
    of_web["name"] = json!(web);
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": of_web, "spec": {
        "selector": {"app": NAME}, "ports": [{"port": 80, "targetPort": PORT}]}});
    let vip = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip", "metadata": routed::metadata(NAME), "spec": {
        "service": web, "pool": NAME, "dns": {"name": HOST}}});
    [service, vip]
}

/// Takes some 20 s more than others: lbaasd removes a name twice, 15 s apart.
#[test]
fn a_name_goes_before_the_routes_to_its_address() -> Result<()> {
    let cluster = &tenants().cluster;
    install(cluster)?;
    let router = Router::start(cluster, None)?;
    let server = NameServer::start(cluster, &router, ZONE)?;
    let _made = Made {
        cluster,
        label: "test=titled",
        needed: &[
            &["dnszone", NAME],
            &["secret", "-n", "thuban-dns", NAME],
            &["bgppeer", NAME],
            &["ippool", NAME],
        ],
    };
    wait_for_processes(cluster)?;
    let nodes = cluster.nodes()?;
    apply(cluster, &routed::pool_and_peer(NAME, RANGE, &router, NODES_ASN))?;
    apply(cluster, &server.objects(NAME))?;
    let [service, vip] = service_and_vip();
    apply(cluster, &[service, vip, routed::backend(NAME, &nodes[0])])?;
    running(cluster, TENANT, NAME)?;
    wait_for_reason(cluster, &["dnszone", NAME], "Ready", "Answered")?;
    wait_for_reason(cluster, &VIP, "DnsReady", "Published")?;
    let address = get(cluster, &VIP)?["status"]["addresses"][0].clone();
    let address: Ipv4Addr = address.as_str().context("an address")?.parse()?;
    assert_eq!(server.resolve(&router, HOST)?, (0, vec![address]));
    wait_for_next_hops(cluster, &router, address.into(), nodes.len())?;
    let at = SocketAddr::new(address.into(), 80);
    let pods = BTreeSet::from([NAME.to_owned()]);
    wait_for_answers(cluster, &router, at, &pods)?;

    cluster.kubectl(&["delete", "vip", "-n", TENANT, NAME, "--wait=false"])?;
    cluster.wait_for("the end of the name", SOON, || {
        Ok(server.resolve(&router, HOST)?.0 == NXDOMAIN)
    })?;
    // Resolvers may still have the name: nodes announce the address, and the backend answers.
    assert_eq!(router.next_hops(address.into())?.len(), nodes.len());
    assert_eq!(answers(&router, at)?, pods);
    let service = get(cluster, &["service", "-n", TENANT, NAME])?;
    let told = &service["status"]["loadBalancer"]["ingress"][0]["ip"];
    assert_eq!(told, &json!(address));
    assert!(get(cluster, &VIP)?["status"]["withdrawnAt"].is_null());
    wait_for_next_hops(cluster, &router, address.into(), 0)?;
    cluster.wait_for("the end of the lease", SOON, || {
        Ok(get(cluster, &["iplease", &address.to_string()]).is_err())
    })
}

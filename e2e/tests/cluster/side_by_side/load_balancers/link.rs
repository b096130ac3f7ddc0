//! An address of L2: a client on the nodes' link finds the one node that answers ARP, and the next one when the first
//! is silent.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use thuban_cluster::Cluster;
use thuban_cluster::command::output;
use thuban_cluster::router::Router;

use super::{Made, SOON, TENANT, install, pool_on_link, wait_for_address, wait_for_processes};
use crate::support::{PORT, REACHED, apply, delete, get, http_hostname_at, netexec_manifest, running};
use crate::tenants::tenants;

/// The goal is 3 s. Machines that run tests are busy.
const TAKEOVER: Duration = Duration::from_secs(10);
const NAME: &str = "on-link";
const SPEAKER: &str = "thuban-speaker";
/// The last byte of the first address of the pool, which no node has.
const FIRST: u8 = 200;

/// Returns the node that holds the Vip's addresses.
fn owner(cluster: &Cluster) -> Result<Option<String>> {
    let vip = get(cluster, &["vip", "-n", TENANT, NAME])?;
    let announcers = vip["status"]["announcers"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    ensure!(announcers.len() <= 1, "two owners: {announcers:?}");
    let owner = announcers.first().and_then(|owner| owner["node"].as_str());
    Ok(owner.map(str::to_owned))
}

fn objects(node: &str) -> [Value; 2] {
    let labels = json!({"app": NAME, "test": "on-link"});
    let service = json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": NAME, "namespace": TENANT, "labels": labels}, "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "thuban.dev/vip", "selector": {"app": NAME},
            "ports": [{"port": 80, "targetPort": PORT}]}});
    let mut pod = netexec_manifest(TENANT, NAME, node, None);
    pod["metadata"]["labels"] = labels;
    [service, pod]
}

/// A host on the nodes' link.
struct Neighbour<'a>(&'a Router);

impl Neighbour<'_> {
    fn ask(&self, server: SocketAddr) -> Result<String> {
        self.0.at_router(|| http_hostname_at(server, REACHED))
    }

    fn ip(&self, arguments: &[&str]) -> Result<String> {
        let namespace = self.0.path();
        let name = namespace.file_name().context("a name")?;
        output(Command::new("ip").arg("-n").arg(name).args(arguments))
    }

    /// Returns the Ethernet address of who answers ARP now.
    fn resolve(&self, server: SocketAddr) -> Result<String> {
        let address = server.ip().to_string();
        // There may be no entry.
        let _ = self.ip(&["neigh", "del", &address, "dev", "eth0"]);
        self.ask(server)?;
        let entry = self.ip(&["neigh", "show", &address, "dev", "eth0"])?;
        let words: Vec<&str> = entry.split_whitespace().collect();
        let found = words.windows(2).find(|pair| pair[0] == "lladdr");
        Ok(found.context("an entry")?[1].to_owned())
    }
}

#[test]
fn a_neighbour_finds_the_owner_of_an_address_of_l2() -> Result<()> {
    let cluster = &tenants().cluster;
    install(cluster)?;
    let router = Router::start(cluster, None)?;
    let _made = Made {
        cluster,
        label: "test=on-link",
        needed: &[&["ippool", NAME]],
    };
    wait_for_processes(cluster)?;
    apply(cluster, &[pool_on_link(cluster, NAME, FIRST, &[])])?;
    let nodes = cluster.nodes()?;
    let mut made = objects(&nodes[0]);
    made[0]["metadata"]["annotations"] = json!({"thuban.dev/ip-pool": NAME});
    apply(cluster, &made)?;
    running(cluster, TENANT, NAME)?;
    let server = SocketAddr::new(wait_for_address(cluster, NAME)?, 80);
    let neighbour = Neighbour(&router);
    cluster.wait_for("an answer", SOON, || Ok(neighbour.ask(server).is_ok()))?;
    let before = owner(cluster)?.context("an owner")?;
    let place = neighbour.resolve(server)?;
    // The speaker is stopped, and not ended: it may come back with what it had.
    cluster.signal(&before, SPEAKER, "STOP")?;
    let stopped = Instant::now();
    let taken = cluster.wait_for("another owner", TAKEOVER, || {
        Ok(owner(cluster)?.is_some_and(|owner| owner != before))
    });
    let answered = taken.and_then(|()| {
        cluster.wait_for("an answer of the new owner", TAKEOVER, || {
            Ok(neighbour.resolve(server).is_ok_and(|found| found != place))
        })
    });
    println!("another node answers after {:.1?}", stopped.elapsed());
    cluster.signal(&before, SPEAKER, "CONT")?;
    answered?;
    // Who comes back does not answer.
    let places: BTreeSet<String> = (0..10)
        .map(|_| {
            std::thread::sleep(Duration::from_millis(300));
            neighbour.resolve(server)
        })
        .collect::<Result<_>>()?;
    assert!(
        places.len() == 1 && !places.contains(&place),
        "{places:?}, {place}"
    );
    // The end: withdrawn, then released.
    delete(cluster, &["service", "-n", TENANT, NAME])?;
    cluster.wait_for("the end of the lease", SOON, || {
        Ok(get(cluster, &["iplease", &server.ip().to_string()]).is_err())
    })?;
    assert!(neighbour.resolve(server).is_err(), "nobody answers");
    Ok(())
}

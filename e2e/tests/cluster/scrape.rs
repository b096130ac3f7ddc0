//! Metrics and probes of operator and transitd, read as Prometheus and kubelet do.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};
use thuban_cluster::Cluster;

use crate::support::get;

pub const PORT: u16 = 6083;

pub const TRANSITD_PORT: u16 = 6084;

pub fn http(address: &str, path: &str) -> Result<String> {
    ask(SocketAddr::new(address.parse()?, PORT), path)
}

pub fn ask(address: SocketAddr, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(3))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: thuban\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Returns the addresses of the operator's replicas.
pub fn replicas(cluster: &Cluster) -> Vec<String> {
    let selector = "app.kubernetes.io/name=thuban-operator";
    let pods = get(cluster, &["pods", "-n", "thuban-system", "-l", selector]).unwrap();
    let running =
        pods["items"].as_array().unwrap().iter().filter(|pod| {
            pod["status"]["phase"] == "Running" && pod["metadata"]["deletionTimestamp"].is_null()
        });
    running
        .map(|pod| pod["status"]["podIP"].as_str().unwrap().to_owned())
        .collect()
}

/// Returns series and their values.
pub fn metrics(address: &str) -> Result<BTreeMap<String, f64>> {
    series(&http(address, "/metrics")?)
}

/// Returns the metrics of transitd, as scraped on its node.
pub fn of_node(cluster: &Cluster, node: &str) -> Result<BTreeMap<String, f64>> {
    series(&page_of_node(cluster, node)?)
}

/// Returns the answer with these metrics.
pub fn page_of_node(cluster: &Cluster, node: &str) -> Result<String> {
    let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), TRANSITD_PORT);
    cluster.in_node(node, || ask(address, "/metrics"))
}

pub fn series(answer: &str) -> Result<BTreeMap<String, f64>> {
    let (_, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    let lines = body.lines().filter(|line| !line.starts_with('#'));
    Ok(lines
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(series, value)| Some((series.to_owned(), value.parse().ok()?)))
        .collect())
}

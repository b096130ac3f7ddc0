//! What operator and transitd say about themselves: metrics, and probes.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};
use thuban_cluster::Cluster;

use crate::support::{REACHED, get};
use crate::tenants::tenants;

const PORT: u16 = 6083;
const TRANSITD_PORT: u16 = 6084;

fn http(address: &str, path: &str) -> Result<String> {
    ask(SocketAddr::new(address.parse()?, PORT), path)
}

fn ask(address: SocketAddr, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(3))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: thuban\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Of the operator that leads, as scraped on the underlay.
pub fn of_leader(cluster: &Cluster) -> Result<BTreeMap<String, f64>> {
    let all = replicas(cluster).into_iter().map(|address| metrics(&address));
    let leader = all
        .flatten()
        .find(|series| series.get("thuban_operator_leader") == Some(&1.0));
    leader.context("no replica leads")
}

/// Addresses of the operator's replicas.
fn replicas(cluster: &Cluster) -> Vec<String> {
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

/// Series and their values.
fn metrics(address: &str) -> Result<BTreeMap<String, f64>> {
    series(&http(address, "/metrics")?)
}

/// Of transitd, as scraped on its node.
pub fn of_node(cluster: &Cluster, node: &str) -> Result<BTreeMap<String, f64>> {
    let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), TRANSITD_PORT);
    series(&cluster.in_node(node, || ask(address, "/metrics"))?)
}

fn series(answer: &str) -> Result<BTreeMap<String, f64>> {
    let (_, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    let lines = body.lines().filter(|line| !line.starts_with('#'));
    Ok(lines
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(series, value)| Some((series.to_owned(), value.parse().ok()?)))
        .collect())
}

#[test]
fn one_replica_leads_and_counts_what_it_does() {
    let cluster = &tenants().cluster;
    let replicas = replicas(cluster);
    assert_eq!(replicas.len(), 2);
    let all: Vec<_> = replicas.iter().map(|address| metrics(address).unwrap()).collect();
    let leaders: Vec<_> = all
        .iter()
        .filter(|series| series["thuban_operator_leader"] > 0.0)
        .collect();
    assert_eq!(leaders.len(), 1, "{all:#?}");
    let leader = leaders[0];
    let value = |name: &str| {
        leader
            .get(&format!("thuban_operator_{name}"))
            .copied()
            .unwrap_or(-1.0)
    };
    assert!(value(r#"droplets{state="connected"}"#) >= 3.0, "{leader:#?}");
    assert!(value(r#"droplets{state="suspect"}"#).abs() < 0.1, "{leader:#?}");
    let pods = f64::from(u32::try_from(tenants().pods.len()).unwrap());
    assert!(
        value(r#"objects{kind="Endpoint",phase="Provisioned"}"#) >= pods,
        "{leader:#?}"
    );
    assert!(
        value(r#"objects{kind="Vpc",phase="Provisioned"}"#) >= 4.0,
        "{leader:#?}"
    );
    for series in [
        "epoch",
        r#"reconciles_total{kind="Endpoint",result="ok",reason=""}"#,
        r#"reconcile_seconds_count{kind="Droplet"}"#,
        r#"rows_sent_total{change="upsert"}"#,
        "snapshots_sent_total",
        "ack_seconds_count",
    ] {
        assert!(value(series) > 0.0, "{series}: {leader:#?}");
    }
    let names: Vec<String> = tenants().pods.iter().map(|pod| pod.name.clone()).collect();
    for series in leader.keys() {
        assert!(
            !names.iter().any(|name| series.contains(name.as_str())),
            "{series}"
        );
        assert!(!series.contains("red"), "{series} names a tenant");
    }
}

#[test]
fn leader_and_standby_are_ready_and_alive() {
    let cluster = &tenants().cluster;
    for address in replicas(cluster) {
        for path in ["/readyz", "/healthz"] {
            let answer = http(&address, path).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{address}{path}: {answer}");
        }
    }
}

#[test]
fn transitd_of_each_node_counts_what_it_has() {
    let cluster = &tenants().cluster;
    for (pod, address) in tenants().ring("red-web") {
        pod.ping(address, REACHED).unwrap();
    }
    for node in cluster.nodes().unwrap() {
        let seen = of_node(cluster, &node).unwrap();
        let value = |name: &str| {
            seen.get(&format!("thuban_transitd_{name}"))
                .copied()
                .unwrap_or(-1.0)
        };
        let own = tenants().pods.iter().filter(|pod| pod.node == node).count();
        let own = f64::from(u32::try_from(own).unwrap());
        assert!(value("attachments") >= own, "{node}: {seen:#?}");
        assert!(
            value(r#"rows{table="LOCAL_ENDPOINTS"}"#) >= own,
            "{node}: {seen:#?}"
        );
        for series in ["stream", "ready", "attachments_without_agent"] {
            let wanted = if series == "attachments_without_agent" {
                0.0
            } else {
                1.0
            };
            assert!(
                (value(series) - wanted).abs() < 0.1,
                "{node}: {series}: {seen:#?}"
            );
        }
        for series in [
            "epoch",
            r#"packets_total{reason="delivered"}"#,
            r#"cni_total{verb="ADD",code="0"}"#,
            "snapshots_total",
        ] {
            assert!(value(series) > 0.0, "{node}: {series}: {seen:#?}");
        }
        let names = || {
            tenants()
                .pods
                .iter()
                .map(|pod| pod.name.as_str())
                .chain(["red-web", "blue"])
        };
        let is_named = |series: &String| names().any(|name| series.contains(name));
        assert!(!seen.keys().any(is_named), "{node}: a tenant is named: {seen:#?}");
    }
}

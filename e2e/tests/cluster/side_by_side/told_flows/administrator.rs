//! What an administrator sees of all namespaces: by `kubectl thuban flows`, and on the page.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Answer, Running, fresh_outside, fresh_ports, installed, kubeconfig, plant_drops, with_kubectl};
use crate::support::{Pod, REACHED, lock};
use crate::tenants::tenants;

/// From the start of the plugin to a connection by its names.
const NAMED: Duration = Duration::from_secs(10);
/// From a dropped packet to the line or edge that tells of it.
const TOLD: Duration = Duration::from_secs(5);
/// How long the plugin may take until it has found thuban-observe.
const STARTED: Duration = Duration::from_secs(20);

/// Connects two pods, and returns the server's port, which no earlier connection had.
fn connects(client: &Pod, server: &Pod) -> Result<u16> {
    let listener = server.inside(|| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?))?;
    let port = listener.local_addr()?.port();
    let address = SocketAddr::from((server.address, port));
    client.inside(move || Ok(TcpStream::connect_timeout(&address, REACHED)?))?;
    Ok(port)
}

#[test]
fn flows_name_a_connection_and_a_drop_within_seconds() {
    let cluster = installed();
    let _red = lock(cluster, "vpc-red").unwrap();
    let (web, db) = (tenants().network("red-web")[0], tenants().network("red-db")[1]);
    let from = format!("red/{}:", web.name);
    let line = with_kubectl(cluster, "flows -A -f -o wide");
    let flows = Running::start(&kubeconfig(cluster), &line).unwrap();
    // The plugin tells of what comes after its own start, so the first connection may be too early.
    cluster
        .wait_for("a connection by its names", NAMED, || {
            let port = connects(web, db)?;
            let to = format!("red/{}:{port} ", db.name);
            flows.line(&[&from, &to, " tcp "], Duration::from_secs(2))?;
            Ok(true)
        })
        .unwrap();
    let (address, port) = (fresh_outside(), fresh_ports(1));
    plant_drops(web, address, port..port + 1).unwrap();
    let to = format!("{address}:{port} ");
    let dropped = flows.line(&[&from, &to, "DROPPED outside_vpc: "], TOLD).unwrap();
    for word in [" udp ", "no way out", "spec.egress"] {
        assert!(dropped.contains(word), "{word}: {dropped}");
    }
}

/// Asks as a browser on this machine does.
fn browse(url: &str, cookie: Option<&str>) -> Result<Answer> {
    let mut curl = Command::new("curl");
    curl.args([
        "--silent",
        "--show-error",
        "--include",
        "--http1.1",
        "--max-time",
        "20",
    ]);
    if let Some(cookie) = cookie {
        curl.arg("--header").arg(format!("Cookie: {cookie}"));
    }
    let output = curl.arg(url).output().context("starting curl")?;
    let text = String::from_utf8_lossy(&output.stdout);
    Answer::read(&text).with_context(|| format!("{url}: {}", String::from_utf8_lossy(&output.stderr)))
}

/// Returns the edges of a graph that end at an address outside.
fn edges_to(url: &str, cookie: &str, address: Ipv4Addr) -> Result<Vec<Value>> {
    let answer = browse(&format!("{url}/v1/graph?all=true"), Some(cookie))?;
    ensure!(answer.status == 200, "{answer:?}");
    let graph: Value = serde_json::from_str(&answer.body)?;
    let edges = graph["edges"].as_array().context("edges")?;
    let to = format!("outside:{address}");
    Ok(edges.iter().filter(|edge| edge["to"] == to).cloned().collect())
}

#[test]
fn the_page_opens_by_its_key_alone_and_shows_a_drop() {
    let cluster = installed();
    let _red = lock(cluster, "vpc-red").unwrap();
    let page = Running::start(&kubeconfig(cluster), &with_kubectl(cluster, "ui -A --port 0")).unwrap();
    let entry = page.line(&["http://127.0.0.1:", "/?key="], STARTED).unwrap();
    let (url, _) = entry.split_once("/?key=").unwrap();
    for (target, cookie) in [
        ("/", None),
        ("/?key=0", None),
        ("/v1/graph?all=true", None),
        ("/v1/graph?all=true", Some("thuban-ui=0")),
    ] {
        let answer = browse(&format!("{url}{target}"), cookie).unwrap();
        assert_eq!(answer.status, 403, "{target}: {answer:?}");
    }
    let entered = browse(&entry, None).unwrap();
    let set = entered
        .head
        .lines()
        .find_map(|line| line.strip_prefix("set-cookie: "));
    let (cookie, _) = set.unwrap().split_once(';').unwrap();
    let answer = browse(&format!("{url}/?all=true"), Some(cookie)).unwrap();
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.body.contains("<title>Thuban"), "{answer:?}");
    let policy = "content-security-policy: default-src 'none'; script-src 'self';";
    assert!(answer.head.contains(policy), "{}", answer.head);

    let web = tenants().network("red-web")[0];
    let (address, port) = (fresh_outside(), fresh_ports(1));
    let before = edges_to(url, cookie, address).unwrap();
    assert!(before.is_empty(), "{before:?}");
    plant_drops(web, address, port..port + 1).unwrap();
    let mut edges = Vec::new();
    cluster
        .wait_for("the drop in the graph", TOLD, || {
            edges = edges_to(url, cookie, address)?;
            Ok(!edges.is_empty())
        })
        .unwrap();
    let [edge] = &edges[..] else { panic!("{edges:?}") };
    assert_eq!(edge["from"], format!("pod:red/{}", web.name), "{edge}");
    assert_eq!(edge["dropped"], 1, "{edge}");
    assert_eq!(edge["reasons"][0]["reason"], "outside_vpc", "{edge}");
    let remedy = edge["reasons"][0]["remedy"].as_str().unwrap();
    assert!(remedy.contains("spec.egress"), "{edge}");
}

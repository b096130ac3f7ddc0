//! The ways that packets take: first by a bouncer or divider, later direct; seen on the wire and in the counters.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use thuban_cluster::Cluster;

use crate::packets::{Captured, read_capture};
use crate::support::{Pod, REACHED, apply, delete, get, netexec_manifest, running};
use crate::tenants::tenants;

/// Returns the Geneve frames on the cluster's bridge while `work` runs.
fn capture(cluster: &Cluster, work: impl FnOnce()) -> Result<Vec<Captured>> {
    let file = std::env::temp_dir().join(format!("thuban-capture-{}.pcap", std::process::id()));
    let mut tcpdump = Command::new("tcpdump")
        .args(["-i", cluster.bridge(), "--immediate-mode", "-U", "-w"])
        .arg(&file)
        .args(["udp", "port", "6081"])
        .stderr(Stdio::piped())
        .spawn()?;
    // tcpdump prints a line when it captures. The pipe stays open, because it may print more.
    let mut said = BufReader::new(tcpdump.stderr.take().context("tcpdump has no stderr")?);
    let mut line = String::new();
    while !line.contains("listening on") {
        line.clear();
        ensure!(said.read_line(&mut line)? > 0, "tcpdump ended before it captured");
    }
    work();
    std::thread::sleep(Duration::from_millis(300));
    tcpdump.kill()?;
    tcpdump.wait()?;
    let frames = read_capture(&std::fs::read(&file)?);
    std::fs::remove_file(&file)?;
    Ok(frames)
}

/// Returns the Geneve frames while a pod pings another one 20 times, and once more after a while.
fn capture_pings(client: &Pod, server: &Pod) -> Vec<Captured> {
    let pings = || {
        for _ in 0..20 {
            client.ping(server.address, REACHED).unwrap();
            std::thread::sleep(Duration::from_millis(25));
        }
        // The operator may be busy with other tests.
        std::thread::sleep(Duration::from_secs(2));
        client.ping(server.address, REACHED).unwrap();
    };
    capture(&tenants().cluster, pings).unwrap()
}

fn nodes_but(one: &str) -> Vec<String> {
    let mut nodes = tenants().cluster.nodes().unwrap();
    nodes.retain(|node| node != one);
    nodes
}

/// Makes two new pods, so that no agent knows anything about their addresses yet.
fn fresh_pair(first: (&str, &str), second: (&str, &str)) -> (Pod, Pod) {
    let cluster = &tenants().cluster;
    let manifests = [first, second].map(|(network, node)| {
        netexec_manifest("red", &format!("fresh-{network}-{node}"), node, Some(network))
    });
    apply(cluster, &manifests).unwrap();
    let [first, second] = [first, second]
        .map(|(network, node)| running(cluster, "red", &format!("fresh-{network}-{node}")).unwrap());
    (first, second)
}

fn drop_pair(pair: &(Pod, Pod)) {
    let cluster = &tenants().cluster;
    delete(cluster, &["pod", "-n", "red", &pair.0.name, &pair.1.name]).unwrap();
}

/// Returns the node that carries a role object.
fn role_node(kind: &str, name: &str) -> String {
    get(&tenants().cluster, &[kind, name]).unwrap()["spec"]["droplet"]
        .as_str()
        .unwrap()
        .to_owned()
}

fn vni(vpc: &str) -> u32 {
    u32::try_from(
        get(&tenants().cluster, &["vpc", vpc]).unwrap()["status"]["vni"]
            .as_u64()
            .unwrap(),
    )
    .unwrap()
}

fn hops(frames: &[Captured], source: Ipv4Addr, destination: Ipv4Addr) -> Vec<(Ipv4Addr, Ipv4Addr)> {
    frames
        .iter()
        .filter(|frame| frame.inner_source == source && frame.inner_destination == destination)
        .map(|frame| (frame.outer_source, frame.outer_destination))
        .collect()
}

#[test]
fn wire_shows_vpc_vni_and_bouncer_first_then_direct_path() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let bouncer = role_node("bouncers.thuban.dev", "red-web-b0");
    let others = nodes_but(&bouncer);
    let (client, server) = fresh_pair(("red-web", &others[0]), ("red-web", &others[1]));
    let [client_node, server_node, bouncer_node] =
        [&client.node, &server.node, &bouncer].map(|node| cluster.node_address(node).unwrap());
    let frames = capture_pings(&client, &server);
    let way = hops(&frames, client.address, server.address);
    assert_eq!(
        way.first(),
        Some(&(client_node, bouncer_node)),
        "the first packet goes to the bouncer: {way:?}"
    );
    assert_eq!(
        way.get(1),
        Some(&(bouncer_node, server_node)),
        "the bouncer sends it on in its own name: {way:?}"
    );
    assert_eq!(
        way.last(),
        Some(&(client_node, server_node)),
        "the last packet goes direct: {way:?}"
    );
    let expected = vni("red");
    assert_ne!(expected, vni("blue"));
    for frame in frames.iter().filter(|frame| frame.inner_source == client.address) {
        assert_eq!(frame.vni, expected, "{frame:?}");
    }
    drop_pair(&(client, server));
}

#[test]
fn other_network_is_reached_by_divider_first_then_direct() {
    let cluster = &tenants().cluster;
    let divider = role_node("dividers.thuban.dev", "red-d0");
    let others = nodes_but(&divider);
    let (client, server) = fresh_pair(("red-web", &others[0]), ("red-db", &others[1]));
    let [client_node, server_node, divider_node] =
        [&client.node, &server.node, &divider].map(|node| cluster.node_address(node).unwrap());
    let before = cluster.counters(&divider).unwrap();
    let frames = capture_pings(&client, &server);
    let way = hops(&frames, client.address, server.address);
    assert_eq!(
        way.first(),
        Some(&(client_node, divider_node)),
        "the first packet goes to the divider: {way:?}"
    );
    assert_eq!(
        way.last(),
        Some(&(client_node, server_node)),
        "the last packet goes direct: {way:?}"
    );
    let after = cluster.counters(&divider).unwrap();
    // A divider that is a bouncer of the network too needs no other one.
    let passed_on = |counters: &BTreeMap<String, u64>| counters["divided"] + counters["bounced"];
    assert!(
        passed_on(&after) > passed_on(&before),
        "the divider counted nothing: {before:?} {after:?}"
    );
    drop_pair(&(client, server));
}

#[test]
fn each_droplet_reports_transit_hook_and_both_are_used() {
    let cluster = &tenants().cluster;
    let mut hooks: Vec<String> = Vec::new();
    for node in cluster.nodes().unwrap() {
        let droplet = get(cluster, &["droplet", &node]).unwrap();
        hooks.push(
            droplet["spec"]["transitHook"]
                .as_str()
                .unwrap_or("unknown")
                .to_owned(),
        );
    }
    assert!(
        hooks.iter().any(|hook| hook == "xdp") && hooks.iter().any(|hook| hook == "tc"),
        "{hooks:?}"
    );
}

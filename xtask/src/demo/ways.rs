//! The ways that packets take: what the droplets counted for the first packet of two strangers, and for later ones.

use std::{collections::BTreeMap, thread::sleep, time::Duration};

use anyhow::{Context, Result, ensure};
use thuban_cluster::Cluster;

use super::pods::{self, Pod, Wanted};
use crate::install::{get, wait};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Counters that say which way a packet took.
const WAYS: [&str; 6] = [
    "sent_to_divider",
    "divided",
    "sent_to_bouncer",
    "bounced",
    "sent_direct",
    "delivered",
];

/// Number by node and counter.
type Counts = BTreeMap<String, BTreeMap<String, u64>>;

/// Two networks, and the role that lies between strangers in them.
struct Case {
    client: &'static str,
    server: &'static str,
    role: &'static str,
    role_object: &'static str,
    /// The counter of the first packet.
    first: &'static str,
}

const CASES: [Case; 2] = [
    Case {
        client: "red-web",
        server: "red-web",
        role: "bouncer",
        role_object: "bouncers.thuban.dev/red-web-b0",
        first: "bounced",
    },
    Case {
        client: "red-web",
        server: "red-db",
        role: "divider",
        role_object: "dividers.thuban.dev/red-d0",
        first: "divided",
    },
];

/// Makes new pods, lets them talk, prints, and returns whether the ways were the expected ones.
pub fn show(cluster: &Cluster) -> Result<bool> {
    println!(
        "\nBy which way packets went (new pods: nothing is known of them yet; UDP, one packet and one answer each)"
    );
    let mut is_expected = true;
    for case in &CASES {
        is_expected &= show_case(cluster, case)?;
    }
    Ok(is_expected)
}

fn show_case(cluster: &Cluster, case: &Case) -> Result<bool> {
    let role_node = get(cluster, &[case.role_object])?["spec"]["droplet"]
        .as_str()
        .with_context(|| format!("{} has no droplet", case.role_object))?
        .to_owned();
    let nodes: Vec<String> = cluster
        .nodes()?
        .into_iter()
        .filter(|node| *node != role_node)
        .collect();
    ensure!(nodes.len() >= 2, "this needs three nodes");
    let wanted = [
        Wanted::new("red", case.client, &nodes[0], "first-"),
        Wanted::new("red", case.server, &nodes[1], "second-"),
    ];
    remove(cluster, &wanted)?;
    pods::apply(cluster, &wanted)?;
    wait("new pods", || pods::readiness(cluster, &wanted))?;
    let pair = pods::find(cluster, &wanted)?;
    println!(
        "\n  {} on {} to {} on {}; the {} is {role_node}",
        case.client, nodes[0], case.server, nodes[1], case.role
    );
    let first = counted(cluster, &pair, 1)?;
    print_counts("first packet", &first);
    let next = counted(cluster, &pair, 20)?;
    print_counts("next 20", &next);
    let later = counted(cluster, &pair, 20)?;
    print_counts("20 more", &later);
    // The matrix must not see these pods.
    remove(cluster, &wanted)?;
    let is_expected = sum(&first, case.first) > 0
        && on(&first, &nodes[0], "sent_direct") == 0
        && sum(&later, "sent_direct") >= 40
        && sum(&later, "bounced") == 0
        && sum(&later, "divided") == 0;
    let verdict = if is_expected {
        "as expected"
    } else {
        "NOT AS EXPECTED"
    };
    println!(
        "  {verdict}: the client's first packet {}, later ones direct both ways",
        case.first
    );
    remove(cluster, &wanted)?;
    Ok(is_expected)
}

/// Returns what all droplets counted while the first pod asked the second.
fn counted(cluster: &Cluster, pair: &[Pod], packets: usize) -> Result<Counts> {
    let before = read(cluster)?;
    let mut answered = 0;
    for _ in 0..packets {
        let answer = pair[0].ask_udp(pair[1].address, ANSWER_TIMEOUT);
        answered += usize::from(answer.is_ok_and(|name| name == pair[1].name));
        sleep(Duration::from_millis(30));
    }
    ensure!(
        answered == packets,
        "{answered} of {packets} packets were answered"
    );
    let after = read(cluster)?;
    let difference = |node: &String, counters: BTreeMap<String, u64>| {
        let old = |name: &String| before.get(node).and_then(|old| old.get(name)).copied();
        counters
            .into_iter()
            .map(|(name, new)| {
                let grown = new.saturating_sub(old(&name).unwrap_or(0));
                (name, grown)
            })
            .collect()
    };
    Ok(after
        .into_iter()
        .map(|(node, counters)| {
            let grown = difference(&node, counters);
            (node, grown)
        })
        .collect())
}

fn read(cluster: &Cluster) -> Result<Counts> {
    let nodes = cluster.nodes()?;
    nodes
        .into_iter()
        .map(|node| Ok((node.clone(), cluster.counters(&node)?)))
        .collect()
}

fn on(counts: &Counts, node: &str, name: &str) -> u64 {
    counts
        .get(node)
        .and_then(|counters| counters.get(name))
        .copied()
        .unwrap_or(0)
}

fn sum(counts: &Counts, name: &str) -> u64 {
    counts.values().filter_map(|counters| counters.get(name)).sum()
}

fn print_counts(title: &str, counts: &Counts) {
    let mut title = title;
    for (node, counters) in counts {
        let ways: Vec<String> = WAYS
            .iter()
            .filter_map(|way| Some((way, *counters.get(*way)?)))
            .filter(|(_, number)| *number > 0)
            .map(|(way, number)| format!("{way} {number}"))
            .collect();
        let text = if ways.is_empty() {
            "-".to_owned()
        } else {
            ways.join(", ")
        };
        println!("    {title:<13}{node}: {text}");
        title = "";
    }
}

fn remove(cluster: &Cluster, wanted: &[Wanted]) -> Result<()> {
    let mut arguments = vec![
        "delete",
        "pod",
        "-n",
        "red",
        "--ignore-not-found",
        "--wait",
        "--timeout=60s",
    ];
    arguments.extend(wanted.iter().map(|pod| pod.name.as_str()));
    cluster.kubectl(&arguments).map(|_| ())
}

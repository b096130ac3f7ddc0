//! The underlay: a bridge, and for each node a network namespace with one NIC on that bridge.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::{
    command::run,
    instance::{Instance, NODES},
    uplink,
};

/// Makes the bridge with the control plane's address.
pub fn create_bridge(instance: &Instance) -> Result<()> {
    let bridge = instance.bridge();
    run("ip", &["link", "add", bridge, "type", "bridge"])?;
    run(
        "ip",
        &[
            "addr",
            "add",
            &format!("{}/24", instance.gateway()),
            "dev",
            bridge,
        ],
    )?;
    run("ip", &["link", "set", bridge, "up"])?;
    Ok(())
}

/// Makes a node's network namespace and its uplink `eth0`. `whole_gso` leaves the veth's offloads as they are, like a
/// NIC that segments tunnels by itself; without it the uplink segments, as XDP on the far side needs it.
pub fn create_node(instance: &Instance, node: &str, whole_gso: bool) -> Result<()> {
    let (namespace, link) = (instance.network_namespace(node), instance.uplink(node));
    let namespace = namespace.as_str();
    run("ip", &["netns", "add", namespace])?;
    run("ip", &["-n", namespace, "link", "set", "lo", "up"])?;
    connect(instance, node, namespace)?;
    run(
        "ip",
        &[
            "-n",
            namespace,
            "route",
            "add",
            "default",
            "via",
            &instance.gateway().to_string(),
        ],
    )?;
    run(
        "ip",
        &[
            "netns",
            "exec",
            namespace,
            "sysctl",
            "-qw",
            "net.ipv4.ip_forward=1",
        ],
    )?;
    if !whole_gso {
        let ethtool = ["ethtool", "-K"];
        run(
            "ip",
            &[
                &["netns", "exec", namespace][..],
                &ethtool,
                &["eth0"],
                &uplink::SEGMENTED,
            ]
            .concat(),
        )
        .with_context(|| format!("segmenting eth0 of {node}"))?;
        run(
            "ethtool",
            &[&["-K", link.as_str()][..], &uplink::SEGMENTED].concat(),
        )
        .with_context(|| format!("segmenting {link}"))?;
        uplink::attach_pass(&link).with_context(|| format!("an XDP program that passes all on {link}"))?;
    }
    Ok(())
}

/// Makes the uplink `eth0` with a node's address in a network namespace that exists.
pub fn connect(instance: &Instance, node: &str, namespace: &str) -> Result<()> {
    let link = instance.uplink(node);
    run(
        "ip",
        &[
            "link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", namespace,
        ],
    )?;
    run("ip", &["link", "set", &link, "master", instance.bridge(), "up"])?;
    let address = format!("{}/24", instance.node_address(node)?);
    run("ip", &["-n", namespace, "addr", "add", &address, "dev", "eth0"])?;
    run("ip", &["-n", namespace, "link", "set", "eth0", "up"])?;
    Ok(())
}

/// Takes a node's uplink off the bridge, or puts it back. The node sees its link up all the time. For all others it
/// falls silent, like a node whose switch has failed.
pub fn cut_off(instance: &Instance, node: &str, is_cut: bool) -> Result<()> {
    let link = instance.uplink(node);
    let place: &[&str] = if is_cut {
        &["nomaster"]
    } else {
        &["master", instance.bridge()]
    };
    run("ip", &[&["link", "set", &link], place].concat()).map(drop)
}

/// Removes all links and namespaces of the instance that exist.
pub fn remove(instance: &Instance) -> Result<()> {
    for node in NODES {
        let link = instance.uplink(node);
        if exists(&link) {
            run("ip", &["link", "del", &link])?;
        }
        let namespace = instance.network_namespace(node);
        if namespace_path(&namespace).exists() {
            run("ip", &["netns", "del", &namespace])?;
        }
    }
    if exists(instance.bridge()) {
        run("ip", &["link", "del", instance.bridge()])?;
    }
    Ok(())
}

/// Returns the links and namespaces that still exist, described.
pub fn leftovers(instance: &Instance) -> Vec<String> {
    let mut found = Vec::new();
    for node in NODES {
        let (link, namespace) = (instance.uplink(node), instance.network_namespace(node));
        if exists(&link) {
            found.push(format!("link {link}"));
        }
        if namespace_path(&namespace).exists() {
            found.push(format!("network namespace {namespace}"));
        }
    }
    if exists(instance.bridge()) {
        found.push(format!("link {}", instance.bridge()));
    }
    found
}

/// Returns the file by which a process enters a named network namespace.
pub fn namespace_path(namespace: &str) -> PathBuf {
    PathBuf::from("/run/netns").join(namespace)
}

fn exists(link: &str) -> bool {
    PathBuf::from("/sys/class/net").join(link).exists()
}

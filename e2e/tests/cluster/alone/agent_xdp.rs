//! The agent at XDP, behind its flag: new pods get it, and notice no difference.

use std::time::Duration;

use crate::support::{Pod, REACHED, apply, delete, get, netexec_manifest, nobody_reaches, running};
use crate::tenants::tenants;

fn set_agent_hook(hook: &str) {
    let cluster = &tenants().cluster;
    let value = format!("THUBAN_AGENT_HOOK={hook}");
    cluster
        .kubectl(&["set", "env", "-n", "thuban-system", "daemonset/transitd", &value])
        .unwrap();
    cluster
        .kubectl(&[
            "rollout",
            "status",
            "-n",
            "thuban-system",
            "daemonset/transitd",
            "--timeout=180s",
        ])
        .unwrap();
}

fn check() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let mut manifests = Vec::new();
    for network in ["red-web", "red-db", "blue-web"] {
        for node in cluster.nodes().unwrap() {
            let namespace = network.split('-').next().unwrap();
            let mut pod = netexec_manifest(namespace, &format!("xdp-{network}-{node}"), &node, Some(network));
            pod["metadata"]["labels"]["agent"] = "xdp".into();
            manifests.push(pod);
        }
    }
    apply(cluster, &manifests).unwrap();
    let pods: Vec<Pod> = manifests
        .iter()
        .map(|pod| {
            running(
                cluster,
                pod["metadata"]["namespace"].as_str().unwrap(),
                pod["metadata"]["name"].as_str().unwrap(),
            )
            .unwrap()
        })
        .collect();
    let mut at_xdp = 0;
    for node in cluster.nodes().unwrap() {
        let droplet = get(cluster, &["droplet", &node]).unwrap();
        // Agents need a NIC that takes XDP frames: where transit is at tc they stay at tc too.
        assert_eq!(
            droplet["spec"]["agentHook"], droplet["spec"]["transitHook"],
            "{node}"
        );
        if droplet["spec"]["agentHook"] == "xdp" {
            let links = cluster
                .exec_on_node(&node, &["sh", "-c", "ls /sys/fs/bpf/thuban/layout_*/links"])
                .unwrap();
            assert!(
                links.lines().filter(|link| link.starts_with("agent_xdp")).count() >= 3,
                "{node}: {links}"
            );
            at_xdp += 1;
        }
    }
    assert_eq!(at_xdp, 2);
    for client in &pods {
        for server in pods
            .iter()
            .chain(tenants.network("red-web"))
            .filter(|server| server.namespace == client.namespace)
        {
            let pair = format!("{} -> {} {}", client.name, server.name, server.address);
            assert_eq!(
                client
                    .tcp(server.address, REACHED)
                    .unwrap_or_else(|error| panic!("TCP {pair}: {error:#}")),
                server.name,
                "{pair}"
            );
            assert_eq!(
                client
                    .udp(server.address, REACHED)
                    .unwrap_or_else(|error| panic!("UDP {pair}: {error:#}")),
                server.name,
                "{pair}"
            );
            client
                .ping(server.address, REACHED)
                .unwrap_or_else(|error| panic!("ICMP {pair}: {error:#}"));
        }
        let green = tenants.network("green-web");
        nobody_reaches(green.iter().map(|green| (client, green.address)));
    }
    crate::transfer::echo(&pods[0], &pods[1], 4 << 20).unwrap();
}

#[test]
fn with_the_agent_at_xdp_pods_reach_the_same_and_no_more() {
    set_agent_hook("xdp");
    std::thread::sleep(Duration::from_secs(1));
    let result = std::panic::catch_unwind(check);
    for vpc in ["red", "blue"] {
        delete(&tenants().cluster, &["pod", "-n", vpc, "-l", "agent=xdp"]).unwrap();
    }
    set_agent_hook("tc");
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
}

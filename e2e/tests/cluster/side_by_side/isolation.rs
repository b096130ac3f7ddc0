//! The attacks of a malicious tenant or underlay host. Every attack has its positive control: the same packet without
//! the lie arrives, so that silence proves the defence and not a broken test.

use std::net::Ipv4Addr;

use crate::intruder::Intruder;
use crate::packets::{arrives, geneve_packet, send_raw, udp_packet};
use crate::support::{
    NOT_REACHED, REACHED, apply, delete, get, http_hostname, netexec_manifest, nobody_reaches, running,
};
use crate::tenants::tenants;

#[test]
fn hand_set_routes_lead_nowhere() {
    let tenants = tenants();
    let blue = tenants.network("blue-web")[0];
    let green = tenants.network("green-web");
    for (gateway, interface) in [("10.0.1.1", "eth0"), ("10.0.1.200", "eth0")] {
        blue.command(&[
            "ip",
            "route",
            "replace",
            "10.1.0.0/16",
            "via",
            gateway,
            "dev",
            interface,
            "onlink",
        ])
        .unwrap();
        nobody_reaches(green.iter().map(|pod| (blue, pod.address)));
    }
    blue.command(&[
        "ip",
        "route",
        "replace",
        "10.1.0.0/16",
        "dev",
        "eth0",
        "scope",
        "link",
    ])
    .unwrap();
    nobody_reaches(green.iter().map(|pod| (blue, pod.address)));
    blue.command(&["ip", "route", "del", "10.1.0.0/16"]).unwrap();
}

#[test]
fn a_forged_source_address_is_dropped() {
    let tenants = tenants();
    let pods = tenants.network("red-web");
    for (sender, receiver) in [(pods[0], pods[1]), (pods[0], pods[2]), (pods[2], pods[1])] {
        let try_from = |source: Ipv4Addr| {
            let packet = udp_packet(source, receiver.address, 9000, b"forged?");
            arrives(receiver, 9000, b"forged?", || sender.inside(|| send_raw(&packet))).unwrap()
        };
        assert!(try_from(sender.address), "control: a true source must arrive");
        let neighbour = pods
            .iter()
            .find(|pod| pod.node != sender.node && pod.node != receiver.node)
            .unwrap_or(&receiver);
        for forged in [
            neighbour.address,
            Ipv4Addr::new(10, 0, 2, 2),
            Ipv4Addr::new(10, 1, 1, 2),
            Ipv4Addr::new(8, 8, 8, 8),
        ] {
            assert!(
                !try_from(forged),
                "{} sent as {forged} and arrived at {}",
                sender.name,
                receiver.name
            );
        }
    }
}

#[test]
fn a_second_address_or_another_mac_of_a_pod_is_of_no_use() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let peer = tenants.network("blue-db")[1];
    apply(
        cluster,
        &[netexec_manifest("blue", "liar", "node-a", Some("blue-db"))],
    )
    .unwrap();
    let liar = &running(cluster, "blue", "liar").unwrap();
    liar.tcp(peer.address, REACHED).expect("control");
    let mac = liar.command(&["cat", "/sys/class/net/eth0/address"]);
    // sysfs of the root namespace may answer for another interface; ip asks the kernel by netlink.
    drop(mac);
    let link: serde_json::Value =
        serde_json::from_str(&liar.command(&["ip", "-j", "link", "show", "eth0"]).unwrap()).unwrap();
    let true_mac = link[0]["address"].as_str().unwrap().to_owned();
    liar.command(&["ip", "link", "set", "eth0", "address", "02:00:00:00:00:99"])
        .unwrap();
    let answer = liar.tcp(peer.address, NOT_REACHED);
    liar.command(&["ip", "link", "set", "eth0", "address", &true_mac])
        .unwrap();
    assert!(answer.is_err(), "another MAC was let through: {answer:?}");
    liar.tcp(peer.address, REACHED)
        .expect("control: the true MAC works again");
    delete(cluster, &["pod", "-n", "blue", "liar"]).unwrap();
}

#[test]
fn tenants_reach_neither_their_node_nor_the_underlay() {
    let tenants = tenants();
    let nodes = get(&tenants.cluster, &["nodes"]).unwrap();
    let node_addresses: Vec<Ipv4Addr> = nodes["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| {
            node["status"]["addresses"][0]["address"]
                .as_str()
                .unwrap()
                .parse()
                .unwrap()
        })
        .collect();
    let intruder = Intruder::new(&tenants.cluster).unwrap();
    for pod in [tenants.network("red-web")[0], tenants.network("green-web")[1]] {
        for address in node_addresses
            .iter()
            .chain([&intruder.address, &Ipv4Addr::new(169, 254, 169, 254)])
        {
            assert!(
                pod.ping(*address, NOT_REACHED).is_err(),
                "{} pings {address}",
                pod.name
            );
            let kubelet = pod.inside(|| {
                Ok(
                    std::net::TcpStream::connect_timeout(&(*address, 10250).into(), NOT_REACHED)
                        .map(|_| ())?,
                )
            });
            assert!(kubelet.is_err(), "{} reaches the kubelet at {address}", pod.name);
        }
    }
}

#[test]
fn the_node_reaches_its_own_pods_and_no_others() {
    let tenants = tenants();
    for pod in &tenants.pods {
        let answer = tenants
            .cluster
            .in_node(&pod.node, || http_hostname(pod.address, REACHED))
            .unwrap();
        assert_eq!(answer, pod.name, "the node reaches its own pod");
    }
    let pods = tenants.network("green-web");
    for pod in &pods {
        let other = pods.iter().find(|other| other.node != pod.node).unwrap();
        let answer = tenants
            .cluster
            .in_node(&pod.node, || http_hostname(other.address, NOT_REACHED));
        assert!(
            answer.is_err(),
            "{} reaches a tenant's pod of another node: {answer:?}",
            pod.node
        );
    }
}

#[test]
fn an_underlay_host_with_routes_to_pods_gets_no_answer() {
    let tenants = tenants();
    let intruder = Intruder::new(&tenants.cluster).unwrap();
    for pod in tenants
        .network("red-web")
        .into_iter()
        .chain(tenants.network("green-web"))
    {
        let node = tenants.cluster.node_address(&pod.node).unwrap();
        intruder
            .command(&[
                "ip",
                "route",
                "replace",
                &pod.address.to_string(),
                "via",
                &node.to_string(),
            ])
            .unwrap();
        let answer = intruder.inside(|| http_hostname(pod.address, NOT_REACHED));
        assert!(answer.is_err(), "the underlay reaches {}: {answer:?}", pod.name);
        let packet = udp_packet(intruder.address, pod.address, 9001, b"plain");
        assert!(
            !arrives(pod, 9001, b"plain", || intruder.inside(|| send_raw(&packet))).unwrap(),
            "plain IP delivered"
        );
    }
}

#[test]
fn geneve_from_an_underlay_host_that_is_no_droplet_is_dropped() {
    let tenants = tenants();
    let intruder = Intruder::new(&tenants.cluster).unwrap();
    let pods = tenants.network("red-web");
    let vpc = get(&tenants.cluster, &["vpc", "red"]).unwrap();
    let vni = u32::try_from(vpc["status"]["vni"].as_u64().unwrap()).unwrap();
    for receiver in &pods {
        let node = tenants.cluster.node_address(&receiver.node).unwrap();
        let sender = pods.iter().find(|pod| pod.node != receiver.node).unwrap();
        let inner = udp_packet(sender.address, receiver.address, 9002, b"geneve");
        let honest = geneve_packet(intruder.address, node, vni, &inner);
        assert!(
            !arrives(receiver, 9002, b"geneve", || intruder
                .inside(|| send_raw(&honest)))
            .unwrap(),
            "Geneve of a stranger was delivered to {}",
            receiver.name
        );
        // The droplet's address is forged as well; the inner source does not live on that droplet.
        let third = pods
            .iter()
            .find(|pod| pod.node != receiver.node && pod.node != sender.node)
            .unwrap();
        let third = tenants.cluster.node_address(&third.node).unwrap();
        for wrong_vni in [vni + 1000, 0, 0xff_ffff] {
            let packet = geneve_packet(third, node, wrong_vni, &inner);
            assert!(
                !arrives(receiver, 9002, b"geneve", || intruder
                    .inside(|| send_raw(&packet)))
                .unwrap(),
                "VNI {wrong_vni}"
            );
        }
    }
}

//! Node ports whose traffic stays on the node, and ports that another plugin made, in both families and by TCP and UDP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::mpsc::Receiver;

use thuban_common::tables::{HOST_SOURCE, HOST_SOURCE_V6, HOST_TRACKED, HOST_TRACKED_V6};
use thuban_proto::transit::NetworkRow;
use thuban_proto::transit::row::Row;

use super::world::{
    FAR6, NODE_PORT, NODE6, SERVER, SERVICE6, STRANGER6, TCP, UDP, ask, exposed_of, rig, send_from, serve,
    socket_at, tenants,
};
use crate::policies::{FAR, SERVICE, STRANGER, pod};
use crate::rig::{NODE, Rig};
use crate::tcp;

/// The port of the other plugin.
const HOST_PORT: u16 = 8053;

/// A pod's servers, which report the clients that they see.
struct Servers {
    tcp: Receiver<IpAddr>,
    udp: Receiver<SocketAddr>,
    own: u8,
}

impl Servers {
    fn new(rig: &Rig, name: &str, own: u8) -> Self {
        Self {
            tcp: tcp::serve_at(&pod(rig, name), Ipv6Addr::UNSPECIFIED.into(), SERVER, own),
            udp: serve(&pod(rig, name), SERVER, own),
            own,
        }
    }

    /// Asks by both protocols. Returns the clients that the servers see, by TCP and by UDP.
    fn ask(&self, namespace: &str, to: SocketAddr) -> [IpAddr; 2] {
        let mut stream = tcp::connect_to(namespace, to).unwrap_or_else(|error| panic!("{to}: {error}"));
        assert_eq!(tcp::ask(&mut stream), self.own, "{to}");
        assert_eq!(ask(namespace, to, 1), Some(self.own), "{to}");
        let by_udp = self.udp.recv_timeout(tcp::ANSWER_TIMEOUT).unwrap();
        [self.tcp.recv_timeout(tcp::ANSWER_TIMEOUT).unwrap(), by_udp.ip()]
    }
}

/// The node as tenants' pods see it by TCP and by UDP, in each family.
fn nodes() -> [[IpAddr; 2]; 2] {
    [
        [HOST_SOURCE, HOST_TRACKED].map(IpAddr::from),
        [HOST_SOURCE_V6, HOST_TRACKED_V6].map(IpAddr::from),
    ]
}

/// Returns the node port that leads to these addresses of a pod: by both protocols in both families.
fn ports(vni: u32, (v4, v6): (Ipv4Addr, Ipv6Addr)) -> Vec<Row> {
    let services = [(SERVICE.into(), IpAddr::from(v4)), (SERVICE6.into(), v6.into())];
    let rows = services.map(|(service, backend)| {
        let [Row::Exposed(mut tcp), Row::Exposed(udp)] =
            [TCP, UDP].map(|protocol| exposed_of(vni, service, protocol, backend))
        else {
            panic!("exposed rows")
        };
        tcp.ports.extend(udp.ports);
        Row::Exposed(tcp)
    });
    rows.into()
}

fn networks(rig: &Rig, vni: u32, private: bool) {
    let rows = rig.operator.shared.lock().unwrap().rows.clone();
    let rows = rows.into_iter().filter_map(|row| match row {
        Row::Network(network) if network.vni == vni => Some(Row::Network(NetworkRow { private, ..network })),
        _ => None,
    });
    rig.operator.push_and_wait(rows.collect(), vec![]);
}

#[test]
fn tenants_local_node_port_works_in_both_families() {
    let rig = rig();
    let tenants_servers = Servers::new(&rig, "p3", 3);
    rig.operator.push_and_wait(ports(8, tenants(7)), vec![]);
    let to = [SocketAddr::from((NODE, NODE_PORT)), (NODE6, NODE_PORT).into()];
    let strangers = [IpAddr::from(STRANGER), STRANGER6.into()].map(|stranger| [stranger; 2]);
    let all = |namespace: &str| to.map(|to| tenants_servers.ask(namespace, to));
    assert_eq!(all(rig.node()), nodes());
    send_from(&rig, FAR, FAR6);
    assert_eq!(all(rig.far()), nodes(), "a range that is closed to the VPC");
    send_from(&rig, STRANGER, STRANGER6);
    assert_eq!(all(rig.far()), strangers);
    networks(&rig, 8, true);
    assert_eq!(all(rig.far()), nodes(), "a private network");
    networks(&rig, 8, false);
    assert_eq!(all(rig.far()), strangers);

    // Tenants reach no node, and no row leads to a pod of another VPC.
    for to in to {
        for name in ["p3", "p4"] {
            assert!(tcp::connect_to(&pod(&rig, name), to).is_err(), "{name} to {to}");
            assert_eq!(ask(&pod(&rig, name), to, 1), None, "{name} to {to}");
        }
    }
    let _other = Servers::new(&rig, "p4", 4);
    rig.operator.push_and_wait(ports(8, tenants(8)), vec![]);
    for to in to {
        assert!(tcp::connect_to(rig.far(), to).is_err(), "{to}");
        assert_eq!(ask(rig.far(), to, 1), None, "{to}");
    }
}

#[test]
fn pods_of_the_nodes_vpc_see_clients_in_both_families() {
    let rig = rig();
    let servers = Servers::new(&rig, "p1", 1);
    let own = (Ipv4Addr::new(10, 0, 1, 5), "fd00:1::5".parse().unwrap());
    rig.operator.push_and_wait(ports(7, own), vec![]);
    send_from(&rig, FAR, FAR6);
    let to = [SocketAddr::from((NODE, NODE_PORT)), (NODE6, NODE_PORT).into()];
    let all = || to.map(|to| servers.ask(rig.far(), to));
    assert_eq!(all(), [[IpAddr::from(FAR); 2], [FAR6.into(); 2]]);
    // Nobody outside has an address of the VPC.
    for forged in [IpAddr::from([10, 0, 1, 77]), "fd00:1::77".parse().unwrap()] {
        rig.on_far(&format!("ip address add {forged} dev lo"));
        let to = to
            .into_iter()
            .find(|to| to.is_ipv4() == forged.is_ipv4())
            .unwrap();
        let client = socket_at(rig.far(), forged, 0);
        client.send_to(b"?", to).unwrap();
        assert!(
            servers.udp.recv_timeout(tcp::ANSWER_TIMEOUT / 3).is_err(),
            "{forged}"
        );
    }
    // The agent lets these pods send anything to their node, but a link-local address is not answered by UDP.
    let [_, nodes6] = nodes();
    networks(&rig, 7, true);
    assert_eq!(all(), [[IpAddr::from(HOST_SOURCE); 2], nodes6]);
    assert_eq!(servers.ask(rig.node(), (own.1, SERVER).into()), nodes6);
}

#[test]
fn ports_of_another_plugin_lead_to_tenants_in_both_families() {
    let rig = rig();
    let servers = Servers::new(&rig, "p3", 3);
    let (v4, v6) = tenants(7);
    rig.on_node("nft add table inet ports");
    for (chain, hook) in [
        ("in", "prerouting priority dstnat"),
        ("own", "output priority -100"),
    ] {
        rig.on_node(&format!(
            "nft 'add chain inet ports {chain} {{ type nat hook {hook}; }}'"
        ));
        for (family, to) in [("ip", v4.to_string()), ("ip6", format!("[{v6}]"))] {
            rig.on_node(&format!(
                "nft add rule inet ports {chain} fib daddr type local meta l4proto {{ tcp, udp }} th dport {HOST_PORT} \
                 dnat {family} to {to}:{SERVER}"
            ));
        }
    }
    send_from(&rig, STRANGER, STRANGER6);
    let to = [SocketAddr::from((NODE, HOST_PORT)), (NODE6, HOST_PORT).into()];
    for namespace in [rig.node(), rig.far()] {
        assert_eq!(to.map(|to| servers.ask(namespace, to)), nodes());
    }
    for to in to {
        assert!(tcp::connect_to(&pod(&rig, "p4"), to).is_err(), "{to}");
        assert_eq!(ask(&pod(&rig, "p4"), to, 1), None, "{to}");
    }
}

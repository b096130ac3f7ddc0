//! What a node sends on to the backends of other droplets.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use thuban_common::tables::{HOST_TRACKED, HOST_TRACKED_V6};
use thuban_proto::transit::row::Row;
use thuban_proto::transit::{DropletRow, LocalRow};

use super::world::{
    FAR6, NODE_PORT, NODE6, SECOND, SERVER, SERVICE6, STRANGER6, TCP, UDP, ask, bytes, exposed, rig,
    send_from, serve, serve_at, tenants,
};
use crate::policies::{FAR, SERVICE, STRANGER, pod};
use crate::rig::{NODE, Rig};
use crate::tcp;

/// Returns the row of another droplet, by both families.
fn droplet6(address: Ipv4Addr, address6: Ipv6Addr) -> Row {
    Row::Droplet(DropletRow {
        address: address.octets().to_vec(),
        address6: bytes(address6),
    })
}

/// Returns the row of the node's own endpoint, once the operator knows the node's IPv6 address.
fn own_endpoint(rig: &Rig, underlay6: Option<Ipv6Addr>) -> Row {
    let rows = rig.operator.shared.lock().unwrap().rows.clone();
    let mut locals = rows.into_iter().filter_map(|row| match row {
        Row::Local(local) if local.host => Some(local),
        _ => None,
    });
    let underlay6 = underlay6.map(bytes).unwrap_or_default();
    Row::Local(LocalRow {
        underlay6,
        ..locals.next().unwrap()
    })
}

fn droplet(address: Ipv4Addr) -> Row {
    Row::Droplet(DropletRow {
        address: address.octets().to_vec(),
        ..DropletRow::default()
    })
}

fn told(here: &[IpAddr], peers: &[Ipv4Addr]) -> Row {
    exposed(SERVICE.into(), UDP, here, peers)
}

#[test]
fn datagrams_are_relayed_once_to_droplets_with_backends() {
    let rig = rig();
    let node = Ipv4Addr::from(NODE);
    let port = SocketAddr::from((node, NODE_PORT));
    let clients = serve(&pod(&rig, "p3"), SERVER, 3);
    let others = serve_at(rig.far(), FAR, NODE_PORT, 9);
    let here = [tenants(7).0.into()];
    rig.operator
        .push_and_wait(vec![droplet(FAR), told(&[], &[FAR])], vec![]);
    send_from(&rig, STRANGER, STRANGER6);
    for namespace in [rig.far(), rig.node()] {
        for length in [1, 4000] {
            assert_eq!(ask(namespace, port, length), Some(9));
            assert_eq!(others.recv().unwrap().ip(), IpAddr::from(node));
        }
    }
    // What comes from a droplet goes no farther.
    send_from(&rig, FAR, STRANGER6);
    assert_eq!(ask(rig.far(), port, 1), None);
    assert!(others.try_recv().is_err());

    rig.operator
        .push_and_wait(vec![told(&here, &[FAR, node])], vec![]);
    for _ in 0..20 {
        assert_eq!(ask(rig.far(), port, 1), Some(3));
        assert_eq!(clients.recv().unwrap().ip(), IpAddr::from(HOST_TRACKED));
    }
    send_from(&rig, STRANGER, STRANGER6);
    let answers: BTreeSet<_> = (0..40).map(|_| ask(rig.far(), port, 1)).collect();
    assert_eq!(answers, [Some(3), Some(9)].into());
}

/// A droplet sends on nothing that comes from another one. So a node sends by itself where the other one would.
#[test]
fn a_nodes_process_reaches_backends_by_any_nodes_port() {
    let rig = rig();
    let node = Ipv4Addr::from(NODE);
    let _here = serve(&pod(&rig, "p3"), SERVER, 3);
    let first = serve_at(rig.far(), FAR, NODE_PORT, 9);
    let second = serve_at(rig.far(), SECOND, NODE_PORT, 10);
    let here = [tenants(7).0.into()];
    let ask_first = || ask(rig.node(), (FAR, NODE_PORT), 1);
    rig.operator
        .push_and_wait(vec![droplet(FAR), droplet(SECOND)], vec![]);

    rig.operator.push_and_wait(vec![told(&[], &[SECOND])], vec![]);
    assert_eq!(ask_first(), Some(10), "the backends of a third node");
    assert_eq!(second.recv().unwrap().ip(), IpAddr::from(node));
    assert_eq!(ask(rig.node(), (FAR, NODE_PORT + 1), 1), None, "no such port");
    rig.operator
        .push_and_wait(vec![told(&here, &[SECOND, node])], vec![]);
    let answers: BTreeSet<_> = (0..40).map(|_| ask_first()).collect();
    assert_eq!(answers, [Some(3), Some(10)].into());
    // Pods of the node are not the node.
    assert_eq!(ask(&pod(&rig, "p1"), (FAR, NODE_PORT), 1), Some(9));
    assert_eq!(ask(&pod(&rig, "p4"), (FAR, NODE_PORT), 1), None);
    while first.try_recv().is_ok() {}

    // With the policy Local, and without a lease, the other node decides.
    rig.operator.push_and_wait(vec![told(&here, &[])], vec![]);
    assert_eq!(ask_first(), Some(9));
    assert_eq!(first.recv().unwrap().ip(), IpAddr::from(node));
    rig.operator
        .push_and_wait(vec![told(&here, &[SECOND, node])], vec![]);
    for _ in 0..10 {
        // transitd renews the lease from time to time.
        rig.on_node("nft flush set inet thuban lease");
        assert_eq!(ask_first(), Some(9));
    }
}

#[test]
fn ports_are_relayed_once_by_ipv6_between_droplets_that_have_it() {
    let rig = rig();
    let port = SocketAddr::from((NODE6, NODE_PORT));
    let clients = serve(&pod(&rig, "p3"), SERVER, 3);
    let others = serve_at(rig.far(), FAR6, NODE_PORT, 9);
    let by_tcp = tcp::serve_at(rig.far(), FAR6.into(), NODE_PORT, 9);
    let told = |here: &[IpAddr], peers: &[Ipv4Addr]| {
        let [Row::Exposed(mut row), Row::Exposed(tcp)] =
            [UDP, TCP].map(|protocol| exposed(SERVICE6.into(), protocol, here, peers))
        else {
            panic!("exposed rows")
        };
        row.ports.extend(tcp.ports);
        Row::Exposed(row)
    };
    let (node, here) = (Ipv4Addr::from(NODE), [tenants(7).1.into()]);
    send_from(&rig, STRANGER, STRANGER6);
    // Neither a droplet without IPv6 nor a node whose address others don't know has a part in it.
    rig.operator
        .push_and_wait(vec![droplet(FAR), told(&[], &[FAR])], vec![]);
    assert_eq!(ask(rig.far(), port, 1), None);
    rig.operator.push_and_wait(vec![droplet6(FAR, FAR6)], vec![]);
    assert_eq!(ask(rig.far(), port, 1), None);
    rig.operator
        .push_and_wait(vec![own_endpoint(&rig, Some(NODE6))], vec![]);
    for namespace in [rig.far(), rig.node()] {
        assert_eq!(ask(namespace, port, 4000), Some(9));
        assert_eq!(others.recv().unwrap().ip(), IpAddr::from(NODE6));
        assert_eq!(tcp::ask(&mut tcp::connect_to(namespace, port).unwrap()), 9);
        assert_eq!(by_tcp.recv().unwrap(), IpAddr::from(NODE6));
    }
    // What comes from a droplet goes no farther.
    send_from(&rig, FAR, FAR6);
    assert_eq!(ask(rig.far(), port, 1), None);
    assert!(tcp::connect_to(rig.far(), port).is_err());
    assert!(others.try_recv().is_err() && by_tcp.try_recv().is_err());

    rig.operator
        .push_and_wait(vec![told(&here, &[FAR, node])], vec![]);
    for _ in 0..20 {
        assert_eq!(ask(rig.far(), port, 1), Some(3));
        assert_eq!(clients.recv().unwrap().ip(), IpAddr::from(HOST_TRACKED_V6));
    }
    send_from(&rig, STRANGER, STRANGER6);
    let answers: BTreeSet<_> = (0..40).map(|_| ask(rig.far(), port, 1)).collect();
    assert_eq!(answers, [Some(3), Some(9)].into());
    // The node's own process at the other droplet's port.
    let answers: BTreeSet<_> = (0..40).map(|_| ask(rig.node(), (FAR6, NODE_PORT), 1)).collect();
    assert_eq!(answers, [Some(3), Some(9)].into());

    // An address of a pod is no droplet's, whatever a row says: the node's packets would go to the pod.
    let (_, of_pod) = tenants(8);
    let _pods = serve(&pod(&rig, "p4"), NODE_PORT, 4);
    rig.operator.push_and_wait(vec![droplet6(FAR, of_pod)], vec![]);
    for namespace in [rig.node(), rig.far()] {
        for _ in 0..20 {
            assert_eq!(ask(namespace, port, 1), Some(3));
        }
    }
}

//! What a node sends on to the backends of other droplets.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use thuban_common::tables::HOST_TRACKED;
use thuban_proto::transit::DropletRow;
use thuban_proto::transit::row::Row;

use super::world::{
    NODE_PORT, SECOND, SERVER, STRANGER6, UDP, ask, exposed, rig, send_from, serve, serve_at, tenants,
};
use crate::policies::{FAR, SERVICE, STRANGER, pod};
use crate::rig::NODE;

fn droplet(address: Ipv4Addr) -> Row {
    Row::Droplet(DropletRow {
        address: address.octets().to_vec(),
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
    rig.on_node("nft flush set inet thuban lease");
    for _ in 0..10 {
        assert_eq!(ask_first(), Some(9));
    }
}

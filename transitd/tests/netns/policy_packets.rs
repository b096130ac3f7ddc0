//! Network policy in the packets of a node: between its pods, out of their VPC, and in from outside.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use thuban_common::tables::HOST_SOURCE;
use thuban_proto::transit::row::Row;
use thuban_proto::transit::{
    ClassRow, PolicyAction, PolicyBlock, PolicyPort, PolicyRule, PolicySetRow, PolicyTier,
};
use thuban_testkit::wait::uninterrupted;

use crate::policies::{FAR, STRANGER, exposed, pod, rig_with};
use crate::rig::{self, NODE, Rig, in_namespace, local};
use crate::tcp::{ANSWER_TIMEOUT, ask, connect, connect_with_option, serve};

const FIRST: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 5);
const SECOND: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 6);
const GROUP: u64 = 0x77;
const FRIEND: u32 = 3;
const STRANGE: u32 = 4;
const SET: u32 = 9;

fn class(id: u32, groups: &[u64]) -> Row {
    Row::Class(ClassRow {
        vni: 7,
        id,
        groups: groups.to_vec(),
        ..ClassRow::default()
    })
}

/// Returns a set that accepts TCP to port 8080, of the group and of a range.
fn set(id: u32, egress: bool, block: &str) -> Row {
    let rule = PolicyRule {
        tier: PolicyTier::NetworkPolicy.into(),
        action: PolicyAction::Accept.into(),
        policy: "ns/web".into(),
        groups: vec![GROUP],
        blocks: vec![PolicyBlock {
            cidr: block.into(),
            ..PolicyBlock::default()
        }],
        ports: vec![PolicyPort {
            protocol: 6,
            first: 8080,
            last: 8080,
            ..PolicyPort::default()
        }],
        ..PolicyRule::default()
    };
    Row::PolicySet(PolicySetRow {
        vni: 7,
        id,
        egress,
        isolated: true,
        rules: vec![rule],
    })
}

/// Returns a pod's row with a class and sets.
fn judged(uid: &str, last: u8, class: u32, sets: [u32; 2]) -> Row {
    rig::judged(local(7, uid, last), class, sets)
}

fn reaches(rig: &Rig, from: &str, to: Ipv4Addr, port: u16) -> bool {
    connect(&pod(rig, from), to, port).is_ok_and(|mut stream| ask(&mut stream) > 0)
}

#[test]
fn an_isolated_pod_is_reached_by_whom_its_rules_name() {
    let mut rig = rig_with(vec![]);
    let _servers = [8080, 8081].map(|port| serve(&pod(&rig, "p1"), FIRST, port, 1));
    let _own = serve(&pod(&rig, "p2"), SECOND, 8080, 2);
    let mut stream = connect(&pod(&rig, "p2"), FIRST, 8081).unwrap();
    assert_eq!(ask(&mut stream), 1);
    let rows = vec![
        class(FRIEND, &[GROUP]),
        class(STRANGE, &[]),
        set(SET, false, "192.0.2.0/24"),
        judged("p1", 5, STRANGE, [SET, 0]),
        judged("p2", 6, FRIEND, [0, 0]),
    ];
    rig.operator.push_and_wait(rows, vec![]);
    assert!(reaches(&rig, "p2", FIRST, 8080) && !reaches(&rig, "p2", FIRST, 8081));
    assert!(!rig.ping("p2", &FIRST.to_string()));
    assert!(rig.counter("policy_ingress") > 0);
    // An open connection follows, the isolated pod gets answers, and its node reaches it always.
    assert!(crate::tcp::try_ask(&mut stream).is_err());
    assert!(reaches(&rig, "p1", SECOND, 8080) && rig.ping("p1", &SECOND.to_string()));
    assert!(rig.ping_from_node(&FIRST.to_string()));
    // It stays so without transitd, and after it.
    rig.kill();
    assert!(reaches(&rig, "p2", FIRST, 8080) && !reaches(&rig, "p2", FIRST, 8081));
    rig.start();
    rig.operator.wait_for_ack();
    assert!(reaches(&rig, "p2", FIRST, 8080) && !reaches(&rig, "p2", FIRST, 8081));
    // Other labels.
    rig.operator
        .push_and_wait(vec![judged("p2", 6, STRANGE, [0, 0])], vec![]);
    assert!(!reaches(&rig, "p2", FIRST, 8080));
    rig.operator
        .push_and_wait(vec![judged("p1", 5, STRANGE, [0, 0])], vec![]);
    assert!(reaches(&rig, "p2", FIRST, 8081));
}

#[test]
fn an_egress_set_is_held_outside_and_answers_leave() {
    let rig = rig_with(vec![]);
    let _far = [8080, 8081].map(|port| serve(rig.far(), FAR, port, 9));
    let _stranger = serve(rig.far(), STRANGER, 8080, 8);
    let _node = serve(rig.node(), NODE.into(), 8081, 7);
    let mut stream = connect(&pod(&rig, "p1"), FAR, 8081).unwrap();
    assert_eq!(ask(&mut stream), 9);
    rig.operator.push_and_wait(vec![exposed(7, &[FIRST])], vec![]);
    let clients = serve(&pod(&rig, "p1"), FIRST, 8080, 1);
    let rows = vec![
        class(STRANGE, &[]),
        set(SET, true, "192.0.2.2/32"),
        judged("p1", 5, STRANGE, [0, SET]),
        judged("p2", 6, STRANGE, [0, 0]),
    ];
    rig.operator.push_and_wait(rows, vec![]);
    assert!(reaches(&rig, "p1", FAR, 8080), "what the block allows");
    assert!(!reaches(&rig, "p1", FAR, 8081), "another port");
    assert!(!reaches(&rig, "p1", STRANGER, 8080), "another address");
    assert!(
        crate::tcp::try_ask(&mut stream).is_err(),
        "an open connection follows"
    );
    assert!(reaches(&rig, "p1", NODE.into(), 8081), "its own node");
    assert!(
        !reaches(&rig, "p1", NODE.into(), 30080),
        "a port of the node leads to pods"
    );
    assert!(reaches(&rig, "p2", STRANGER, 8080), "a pod without a set");
    // A client outside is answered, although the pod may not ask it.
    let mut client = connect(rig.far(), NODE.into(), 30080).unwrap();
    assert_eq!(ask(&mut client), 1);
    assert_eq!(clients.recv_timeout(ANSWER_TIMEOUT).unwrap(), IpAddr::from(FAR));
    // With an ingress set, too, if that accepts the client.
    for (block, is_accepted) in [("192.0.2.0/24", true), ("198.51.100.0/24", false)] {
        let ingress = SET + 1 + u32::from(is_accepted);
        let rows = vec![
            set(ingress, false, block),
            judged("p1", 5, STRANGE, [ingress, SET]),
        ];
        rig.operator.push_and_wait(rows, vec![]);
        let connected = connect(rig.far(), NODE.into(), 30080);
        assert_eq!(connected.is_ok(), is_accepted, "{block}");
        assert_eq!(crate::tcp::try_ask(&mut client).is_ok(), is_accepted, "{block}");
        assert!(reaches(&rig, "p1", FAR, 8080), "an answer from outside: {block}");
    }
}

#[test]
fn a_rule_that_denies_a_node_holds_for_the_pods_own() {
    let rig = rig_with(vec![]);
    let _far = serve(rig.far(), FAR, 8080, 9);
    let _node = serve(rig.node(), Ipv4Addr::UNSPECIFIED, 8081, 7);
    let clients = serve(&pod(&rig, "p1"), FIRST, 8080, 1);
    let mut stream = connect(&pod(&rig, "p1"), NODE.into(), 8081).unwrap();
    assert_eq!(ask(&mut stream), 7);
    let node = IpAddr::from(NODE).to_string();
    let by_option = || connect_with_option(&pod(&rig, "p1"), NODE.into(), 8081);
    // A checksum that the NIC is to write, behind an option, is refused whatever policies say.
    assert!(rig.in_pod("p1", "ethtool -K eth0 tx off"));
    assert!(by_option().is_ok());
    assert!(reaches(&rig, "p1", HOST_SOURCE.into(), 8081));
    let rule = PolicyRule {
        tier: PolicyTier::Admin.into(),
        action: PolicyAction::Deny.into(),
        policy: "no-nodes".into(),
        blocks: vec![PolicyBlock {
            cidr: format!("{node}/32"),
            ..PolicyBlock::default()
        }],
        ..PolicyRule::default()
    };
    let set = Row::PolicySet(PolicySetRow {
        vni: 7,
        id: SET,
        egress: true,
        isolated: false,
        rules: vec![rule],
    });
    let rows = vec![
        class(STRANGE, &[]),
        set,
        judged("p1", 5, STRANGE, [0, SET]),
        exposed(7, &[FIRST]),
    ];
    rig.operator.push_and_wait(rows, vec![]);
    assert!(!reaches(&rig, "p1", NODE.into(), 8081) && !rig.ping("p1", &node));
    assert!(by_option().is_err(), "an option of IP hides the ports");
    assert!(
        !reaches(&rig, "p1", HOST_SOURCE.into(), 8081)
            && !rig.ping("p1", &Ipv4Addr::from(HOST_SOURCE).to_string()),
        "the node's address towards pods takes answers alone"
    );
    assert!(
        crate::tcp::try_ask(&mut stream).is_err(),
        "an open connection follows"
    );
    assert!(reaches(&rig, "p2", NODE.into(), 8081), "a pod without a set");
    assert!(reaches(&rig, "p1", FAR, 8080), "what no rule denies");
    // The node and a client outside are answered.
    assert!(rig.ping_from_node(&FIRST.to_string()));
    assert!(connect(rig.node(), FIRST, 8080).is_ok_and(|mut stream| ask(&mut stream) == 1));
    let mut client = connect(rig.far(), NODE.into(), 30080).unwrap();
    assert_eq!(ask(&mut client), 1);
    assert!(clients.try_iter().any(|client| client == IpAddr::from(FAR)));
    assert!(answers_by_udp(&rig, "p1", FIRST));
    // A set that the node doesn't know denies all.
    rig.operator
        .push_and_wait(vec![judged("p1", 5, STRANGE, [0, SET + 1])], vec![]);
    assert!(!reaches(&rig, "p1", FAR, 8080) && !reaches(&rig, "p1", NODE.into(), 8081));
    assert!(answers_by_udp(&rig, "p1", FIRST));
}

/// Whether a pod answers a datagram of its node.
fn answers_by_udp(rig: &Rig, name: &str, address: Ipv4Addr) -> bool {
    let bound = |namespace: &str, address: Ipv4Addr| {
        let socket = in_namespace(namespace, move || UdpSocket::bind((address, 0)).unwrap());
        socket.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
        socket
    };
    let server = bound(&pod(rig, name), address);
    let client = bound(rig.node(), Ipv4Addr::UNSPECIFIED);
    client.send_to(b"?", server.local_addr().unwrap()).unwrap();
    let (_, from) = uninterrupted(|| server.recv_from(&mut [0; 8])).unwrap();
    server.send_to(b"!", from).unwrap();
    uninterrupted(|| client.recv_from(&mut [0; 8])).is_ok()
}

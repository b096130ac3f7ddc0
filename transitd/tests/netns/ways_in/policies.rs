//! What ingress policies say of clients outside, whom a node port or a port of a host leads to a pod: by the client's
//! own address, whatever address the pod sees. And what egress policies say of hosts outside, in both families.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use thuban_proto::transit::row::Row;
use thuban_proto::transit::{
    ExposedRow, PolicyAction, PolicyBlock, PolicyPort, PolicyRule, PolicySetRow, PolicyTier, VpcRow,
};
use thuban_testkit::wait::uninterrupted;

use super::world::{
    FAR6, NODE_PORT, NODE6, SERVER, SERVICE6, STRANGER6, TCP, UDP, ask, exposed_of, rig, send_from, serve,
    socket_at, tenants, tenants_pod, tenants_vpcs,
};
use crate::policies::{FAR, SERVICE, STRANGER, pod};
use crate::rig::{self, NODE, Rig, dual, eventually};
use crate::tcp;

/// A port of the host that leads to p3's servers.
const HOST_PORT: u16 = 8053;
const TO: [(IpAddr, u16); 2] = [
    (IpAddr::V4(Ipv4Addr::from_octets(NODE)), NODE_PORT),
    (IpAddr::V6(NODE6), NODE_PORT),
];

/// Returns an ingress set that accepts these protocols to the servers' port, of these ranges and without exceptions.
fn set(vni: u32, id: u32, protocols: &[u32], blocks: &[(&str, &[&str])]) -> Row {
    let block = |(cidr, except): &(&str, &[&str])| PolicyBlock {
        cidr: (*cidr).into(),
        except: except.iter().map(|except| (*except).into()).collect(),
    };
    let port = |protocol: &u32| PolicyPort {
        protocol: *protocol,
        first: SERVER.into(),
        last: SERVER.into(),
        ..PolicyPort::default()
    };
    let rule = PolicyRule {
        tier: PolicyTier::NetworkPolicy.into(),
        action: PolicyAction::Accept.into(),
        policy: "ns/web".into(),
        blocks: blocks.iter().map(block).collect(),
        ports: protocols.iter().map(port).collect(),
        ..PolicyRule::default()
    };
    Row::PolicySet(PolicySetRow {
        vni,
        id,
        egress: false,
        isolated: true,
        rules: vec![rule],
    })
}

fn judged(row: Row, ingress_set: u32) -> Row {
    rig::judged(row, 0, [ingress_set, 0])
}

/// Returns the rows of the node port, by TCP and UDP and in both families.
fn node_port(vni: u32, [v4, v6]: [IpAddr; 2]) -> Vec<Row> {
    let rows = [(SERVICE.into(), v4), (SERVICE6.into(), v6)].map(|(service, backend)| {
        let [tcp, udp] = [TCP, UDP].map(|protocol| {
            let Row::Exposed(row) = exposed_of(vni, service, protocol, backend) else {
                panic!("an exposed row")
            };
            row
        });
        let ports = [tcp.ports.clone(), udp.ports].concat();
        Row::Exposed(ExposedRow { ports, ..tcp })
    });
    rows.into()
}

/// Whether servers are reached by TCP and by UDP, the same in both families.
fn reached(rig: &Rig) -> [bool; 2] {
    let [v4, v6] = reached_by_family(rig);
    assert_eq!(v4, v6, "by IPv4 and by IPv6");
    v4
}

/// Whether servers are reached by TCP and by UDP, by IPv4 and by IPv6.
fn reached_by_family(rig: &Rig) -> [[bool; 2]; 2] {
    let by_tcp =
        |to| tcp::connect_to(rig.far(), to).is_ok_and(|mut stream| tcp::try_ask(&mut stream).is_ok());
    let by_udp = |to| ask(rig.far(), to, 1).is_some();
    // What is not reached takes its time to say so.
    std::thread::scope(|scope| {
        let both = TO
            .map(SocketAddr::from)
            .map(|to| (scope.spawn(move || by_tcp(to)), scope.spawn(move || by_udp(to))));
        both.map(|(tcp, udp)| [tcp.join().unwrap(), udp.join().unwrap()])
    })
}

/// Runs both servers of a pod.
fn serve_both(rig: &Rig, name: &str) {
    let _ = tcp::serve_at(&pod(rig, name), Ipv6Addr::UNSPECIFIED.into(), SERVER, 3);
    std::mem::forget(serve(&pod(rig, name), SERVER, 3));
}

#[test]
fn a_client_outside_is_judged_by_its_own_address() {
    let rig = rig();
    for (vni, name) in [(7, "p1"), (8, "p3")] {
        serve_both(&rig, name);
        let (row, addresses) = if vni == 7 {
            let own = (
                Ipv4Addr::new(10, 0, 1, 5),
                Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 5),
            );
            (dual(7, name, 5), [own.0.into(), own.1.into()])
        } else {
            let (v4, v6) = tenants(7);
            (tenants_pod(8, name, 7), [v4.into(), v6.into()])
        };
        let strangers = [("198.51.100.0/24", &[][..]), ("2001:db8:9::/64", &[])];
        let but_them = [
            ("0.0.0.0/0", &["198.51.100.8/29"][..]),
            ("::/0", &["2001:db8:9::8/125"]),
        ];
        let sets = [
            set(vni, 1, &[TCP, UDP], &strangers),
            set(vni, 2, &[TCP, UDP], &but_them),
            set(vni, 3, &[UDP], &strangers),
        ];
        rig.operator.push_and_wait(node_port(vni, addresses), vec![]);
        rig.operator.push_and_wait(vec![judged(row.clone(), 0)], vec![]);
        // IPv6 neighbours take their time.
        send_from(&rig, STRANGER, STRANGER6);
        eventually("both families", || reached_by_family(&rig) == [[true; 2]; 2]);
        rig.operator.push_and_wait(sets.into(), vec![]);
        for (set, from_stranger, from_far) in [
            (1, [true, true], [false, false]),
            (2, [false, false], [true, true]),
            (3, [false, true], [false, false]),
            (0, [true, true], [true, true]),
            // Nobody knows what the set says.
            (99, [false, false], [false, false]),
        ] {
            rig.operator.push_and_wait(vec![judged(row.clone(), set)], vec![]);
            for (source, expected) in [((STRANGER, STRANGER6), from_stranger), ((FAR, FAR6), from_far)] {
                send_from(&rig, source.0, source.1);
                assert_eq!(reached(&rig), expected, "{name} by set {set} from {source:?}");
            }
        }
        // Its rules come after the pod's row.
        rig.operator
            .push_and_wait(vec![set(vni, 99, &[UDP], &but_them)], vec![]);
        assert_eq!(reached(&rig), [false, true], "{name} by rules that came later");
    }
}

#[test]
fn an_egress_set_is_held_outside_in_both_families() {
    let rig = rig();
    let _servers =
        [SERVER, SERVER + 1].map(|port| tcp::serve_at(rig.far(), Ipv6Addr::UNSPECIFIED.into(), port, 9));
    let reaches = |hosts: [IpAddr; 2], port: u16| {
        hosts.map(|host| tcp::connect_to(&pod(&rig, "p1"), (host, port).into()).is_ok())
    };
    let strangers = [IpAddr::from(STRANGER), STRANGER6.into()];
    let beside = [IpAddr::from(FAR), FAR6.into()];
    eventually("both families", || {
        [strangers, beside].map(|hosts| reaches(hosts, SERVER)) == [[true; 2]; 2]
    });
    serve_both(&rig, "p1");
    let own = [IpAddr::from([10, 0, 1, 5]), "fd00:1::5".parse().unwrap()];
    rig.operator.push_and_wait(node_port(7, own), vec![]);
    let blocks = [("198.51.100.0/24", &[][..]), ("2001:db8:9::/64", &[])];
    let Row::PolicySet(set) = set(7, 1, &[TCP], &blocks) else {
        panic!("a set")
    };
    let set = Row::PolicySet(PolicySetRow { egress: true, ..set });
    let row = rig::judged(dual(7, "p1", 5), 0, [0, 1]);
    rig.operator.push_and_wait(vec![set, row], vec![]);
    assert_eq!(reaches(strangers, SERVER), [true; 2], "what the blocks allow");
    assert_eq!(reaches(strangers, SERVER + 1), [false; 2], "another port");
    assert_eq!(reaches(beside, SERVER), [false; 2], "other addresses");
    send_from(&rig, FAR, FAR6);
    assert_eq!(reached(&rig), [true; 2], "clients outside are answered");
}

#[test]
fn open_connections_and_host_ports_follow_the_policies() {
    let mut rig = rig();
    serve_both(&rig, "p3");
    let (v4, v6) = tenants(7);
    rig.on_node("nft add table ip ports");
    rig.on_node("nft 'add chain ip ports in { type nat hook prerouting priority -100; }'");
    rig.on_node(&format!(
        "nft add rule ip ports in fib daddr type local tcp dport {HOST_PORT} dnat to {v4}:{SERVER}"
    ));
    let strangers = [("198.51.100.9/32", &[][..]), ("2001:db8:9::9/128", &[])];
    let strangers = set(8, 1, &[TCP, UDP], &strangers);
    let tcp_of_all = set(8, 2, &[TCP], &[("0.0.0.0/0", &[])]);
    rig.operator
        .push_and_wait(node_port(8, [v4.into(), v6.into()]), vec![]);
    let host_port = SocketAddr::from((NODE, HOST_PORT));
    send_from(&rig, FAR, FAR6);
    let [mut to_node_port, mut to_host_port] =
        [SocketAddr::from(TO[0]), host_port].map(|to| tcp::connect_to(rig.far(), to).unwrap());
    let mut of_node = tcp::connect(rig.node(), NODE.into(), NODE_PORT).unwrap();
    let by_set = |set| judged(tenants_pod(8, "p3", 7), set);
    rig.operator
        .push_and_wait(vec![strangers, tcp_of_all, by_set(2)], vec![]);
    assert_eq!(tcp::ask(&mut to_node_port), 3);
    assert_eq!(tcp::ask(&mut to_host_port), 3);
    rig.operator.push_and_wait(vec![by_set(1)], vec![]);
    for stream in [&mut to_node_port, &mut to_host_port] {
        assert!(tcp::try_ask(stream).is_err(), "an open connection follows");
    }
    assert_eq!(
        tcp::ask(&mut of_node),
        3,
        "the node itself reaches its pods always"
    );
    let is_closed = || tcp::connect_to(rig.far(), host_port).unwrap_err() == ErrorKind::TimedOut;
    assert!(is_closed());
    // Without transitd it stays so, and a new one keeps it.
    rig.kill();
    send_from(&rig, FAR, FAR6);
    assert_eq!(reached(&rig), [false, false]);
    rig.flags = vec!["--metrics-port".into(), "6084".into()];
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(reached(&rig), [false, false]);
    let dropped = rig.metrics()[r#"drops_total{reason="policy_from_outside"}"#];
    assert!(dropped > 3, "{dropped}");
    rig.on_node("nft delete table inet thuban-policy");
    eventually("the table is there again", || {
        rig.on_node("nft list tables").contains("thuban-policy")
    });
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(reached(&rig), [false, false]);
    send_from(&rig, STRANGER, STRANGER6);
    assert_eq!(reached(&rig), [true, true]);
}

#[test]
fn clients_outside_hear_that_a_vpc_rejects_them() {
    let rig = rig();
    serve_both(&rig, "p3");
    let (v4, v6) = tenants(7);
    rig.on_node("nft add table ip ports");
    rig.on_node("nft 'add chain ip ports in { type nat hook prerouting priority -100; }'");
    rig.on_node(&format!(
        "nft add rule ip ports in fib daddr type local tcp dport {HOST_PORT} dnat to {v4}:{SERVER}"
    ));
    let strangers = [("198.51.100.9/32", &[][..]), ("2001:db8:9::9/128", &[])];
    let mut rows = node_port(8, [v4.into(), v6.into()]);
    rows.push(set(8, 1, &[TCP, UDP], &strangers));
    rows.push(judged(tenants_pod(8, "p3", 7), 0));
    rig.operator.push_and_wait(rows, vec![]);
    send_from(&rig, FAR, FAR6);
    eventually("both families", || reached_by_family(&rig) == [[true; 2]; 2]);
    let host_port = SocketAddr::from((NODE, HOST_PORT));
    let ways: [SocketAddr; 3] = [TO[0].into(), TO[1].into(), host_port];
    let mut open = ways.map(|to| tcp::connect_to(rig.far(), to).unwrap());
    rig.operator
        .push_and_wait(vec![judged(tenants_pod(8, "p3", 7), 1)], vec![]);
    let heard = || ways.map(|to| tcp::connect_to(rig.far(), to).unwrap_err());
    assert_eq!(heard(), [ErrorKind::TimedOut; 3]);
    let rejects = |vni, reject| {
        let vpcs = tenants_vpcs().into_iter().filter(|vpc| vpc.vni == vni);
        let vpcs = vpcs.map(|vpc| Row::Vpc(VpcRow { reject, ..vpc }));
        rig.operator.push_and_wait(vpcs.collect(), vec![]);
    };
    rejects(9, true);
    assert_eq!(heard(), [ErrorKind::TimedOut; 3], "another VPC rejects");
    rejects(8, true);
    // The answer comes from the port that was asked: the client would not believe another one.
    eventually("the client hears", || {
        heard() == [ErrorKind::ConnectionRefused; 3]
    });
    for stream in &mut open {
        let kind = tcp::try_ask(stream).unwrap_err().kind();
        assert_eq!(kind, ErrorKind::WouldBlock, "an open connection hears nothing");
    }
    assert!(ask(rig.far(), TO[0], 1).is_none());
    send_from(&rig, STRANGER, STRANGER6);
    assert_eq!(reached(&rig), [true, true], "whom the policy accepts");
    // Who sends by the address of another VPC's pod has that pod hear nothing.
    rig.on_node("sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.up0.rp_filter=0");
    let (other, _) = tenants(8);
    rig.on_far(&format!("ip address add {other}/32 dev lo"));
    send_from(&rig, other, FAR6);
    let heard_by_liar = tcp::connect_to(rig.far(), TO[0].into()).unwrap_err();
    assert_eq!(heard_by_liar, ErrorKind::TimedOut);
    let astray = rig.on_node("nft list chain inet thuban-policy astray");
    let silent = astray.matches("counter packets 0 ").count();
    assert_eq!(silent, 1, "dropped on the way to the pod alone: {astray}");
    send_from(&rig, FAR, FAR6);
    rejects(8, false);
    eventually("silence", || heard() == [ErrorKind::TimedOut; 3]);
}

#[test]
fn an_error_about_what_a_pod_answers_reaches_it() {
    let rig = rig();
    let (v4, v6) = tenants(7);
    let strangers = set(8, 1, &[UDP], &[("198.51.100.9/32", &[])]);
    rig.operator
        .push_and_wait(node_port(8, [v4.into(), v6.into()]), vec![]);
    rig.operator
        .push_and_wait(vec![strangers, judged(tenants_pod(8, "p3", 7), 1)], vec![]);
    send_from(&rig, STRANGER, STRANGER6);
    let server = socket_at(&pod(&rig, "p3"), Ipv4Addr::UNSPECIFIED, SERVER);
    let client = socket_at(rig.far(), STRANGER, 0);
    client.send_to(b"?", SocketAddr::from(TO[0])).unwrap();
    let (_, from) = uninterrupted(|| server.recv_from(&mut [0])).unwrap();
    server.connect(from).unwrap();
    drop(client);
    server.send(b"!").unwrap();
    let error = uninterrupted(|| server.recv(&mut [0])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

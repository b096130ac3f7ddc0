//! The cluster's DNS of tenants' pods, at their node.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use thuban_proto::transit::row::Row;
use thuban_proto::transit::{ServicePort, ServiceRow};
use thuban_testkit::wait::uninterrupted;

use crate::operator::IN_THE_END;
use crate::rig::{NODE, Rig, base_rows, dual, dual_rows, eventually, in_namespace, local};

const DNS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const DNS6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 0xa);
/// The number of queries that a pod may send at once after a rest.
const BURST: usize = 1024;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns VPC 7's row of the cluster's DNS at an address.
fn node_service(address: IpAddr) -> Row {
    let port = |protocol| ServicePort {
        protocol,
        port: 53,
        ..ServicePort::default()
    };
    let address = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    Row::NodeService(ServiceRow {
        vni: 7,
        address: address.octets().to_vec(),
        ports: vec![port(6), port(17)],
        inside: true,
        names: true,
    })
}

/// Returns a rig where p1, p3 and p4 are of VPC 7, which shares the cluster's DNS.
pub fn prepare() -> Rig {
    let mut rows = base_rows();
    for row in &mut rows {
        if let Row::Vpc(vpc) = row {
            vpc.service_cidrs.push("10.96.0.0/16".into());
        }
    }
    rows.push(node_service(DNS.into()));
    rows.extend([local(7, "p1", 5), local(7, "p3", 7), local(7, "p4", 8)]);
    let mut rig = Rig::prepare(rows);
    rig.environment = vec![("THUBAN_CLUSTER_DNS".into(), DNS.to_string())];
    rig
}

/// Starts the rig with p1 and p3.
pub fn start(rig: &mut Rig) {
    rig.start();
    rig.operator.wait_for_ack();
    rig.on_node(&format!(
        "ip route add default via {}",
        Ipv4Addr::from([192, 0, 2, 2])
    ));
    for pod in ["p1", "p3"] {
        rig.add_pod(pod);
    }
}

fn rig() -> Rig {
    let mut rig = prepare();
    start(&mut rig);
    rig
}

pub fn socket(rig: &Rig, pod: &str) -> UdpSocket {
    let socket = in_namespace(&format!("{}-{pod}", rig.name), || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket.connect((DNS, 53)).unwrap();
        socket
    });
    socket.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    socket
}

/// Returns a socket of a pod that asks the cluster's DNS by IPv6.
fn socket6(rig: &Rig, pod: &str) -> UdpSocket {
    let socket = in_namespace(&format!("{}-{pod}", rig.name), || {
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap();
        socket.connect((DNS6, 53)).unwrap();
        socket
    });
    socket.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    socket
}

/// Whether an answer over TCP says that there is no such name.
fn asks_by_tcp(rig: &Rig, pod: &str, server: IpAddr) -> bool {
    in_namespace(&format!("{}-{pod}", rig.name), move || {
        let mut stream = TcpStream::connect_timeout(&(server, 53).into(), ANSWER_TIMEOUT).unwrap();
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
        let query = query();
        let length = u16::try_from(query.len()).unwrap().to_be_bytes();
        stream.write_all(&[&length[..], &query].concat()).unwrap();
        let mut answer = [0; 14];
        stream.read_exact(&mut answer).is_ok() && answer[5] & 0xf == 3
    })
}

/// Returns a query for a name of the cluster that the VPC does not have: the node answers it alone.
fn query() -> Vec<u8> {
    let mut query = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in ["web", "hidden", "svc", "cluster", "local"] {
        query.push(label.len() as u8);
        query.extend(label.bytes());
    }
    query.extend([0, 0, 1, 0, 1]);
    query
}

/// Whether the answer says that there is no such name.
pub fn asks(socket: &UdpSocket) -> bool {
    let mut answer = [0; 512];
    socket.send(&query()).unwrap();
    matches!(uninterrupted(|| socket.recv(&mut answer)), Ok(length) if length > 12 && answer[3] & 0xf == 3)
}

fn dropped(rig: &Rig) -> usize {
    dropped_each(rig).iter().sum()
}

/// Returns the number of queries that the rate limit has dropped, by address of the cluster's DNS.
fn dropped_each(rig: &Rig) -> Vec<usize> {
    let output = Rig::try_in(rig.node(), "nft list chain inet thuban track");
    let text = String::from_utf8(output.stdout).unwrap();
    let rules = text.lines().filter(|line| line.contains("@askers"));
    let counts = rules.map(|rule| {
        let (_, after) = rule.rsplit_once("counter packets ").unwrap();
        let count = after.split(' ').next().unwrap();
        count.parse::<usize>().unwrap()
    });
    counts.collect()
}

#[test]
fn a_pod_that_asks_without_end_takes_its_own_share_of_dns_alone() {
    let rig = rig();
    let (loud, quiet) = (socket(&rig, "p1"), socket(&rig, "p3"));
    assert!(asks(&quiet) && asks(&loud), "{NODE:?} answers");
    let is_over = Arc::new(AtomicBool::new(false));
    let flood = std::thread::spawn({
        let is_over = Arc::clone(&is_over);
        move || {
            let query = query();
            let mut sent = 0;
            while sent < 32 * BURST || !is_over.load(Ordering::Relaxed) {
                sent += usize::from(loud.send(&query).is_ok());
            }
            sent
        }
    });
    let answered = (0..100).filter(|_| asks(&quiet)).count();
    is_over.store(true, Ordering::Relaxed);
    let sent = flood.join().unwrap();
    assert!(dropped(&rig) > sent / 2, "{} of {sent}", dropped(&rig));
    // In the burst the socket may be full for a moment.
    assert!(answered > 90, "{answered} of 100");
}

#[test]
fn tenants_ask_by_both_families_over_udp_and_tcp() {
    let mut rows = dual_rows();
    for row in &mut rows {
        if let Row::Vpc(vpc) = row {
            vpc.service_cidrs = vec!["10.96.0.0/16".into(), "fd00:96::/112".into()];
        }
    }
    rows.extend([
        node_service(DNS.into()),
        node_service(DNS6.into()),
        dual(7, "p1", 5),
    ]);
    let mut rig = Rig::prepare(rows);
    rig.environment = vec![("THUBAN_CLUSTER_DNS".into(), format!("{DNS},{DNS6}"))];
    rig.start();
    rig.operator.wait_for_ack();
    rig.on_node("ip route add default via 192.0.2.2; sysctl -qw net.ipv6.conf.all.forwarding=1");
    rig.add_pod("p1");
    let (by_v4, by_v6) = (socket(&rig, "p1"), socket6(&rig, "p1"));
    eventually("DNS by IPv4", || asks(&by_v4));
    eventually("DNS by IPv6", || asks(&by_v6));
    for server in [IpAddr::from(DNS), DNS6.into()] {
        assert!(asks_by_tcp(&rig, "p1", server), "{server}");
    }
    // The listener itself answers nobody, by no address of the node.
    rig.on_node("ip address add fd00:9::1/128 dev lo nodad");
    for address in ["fd00:9::1", "fe80::5468:7562:6101%eth0"] {
        let output = rig.in_pod_text(
            "p1",
            &format!("timeout 1 bash -c 'exec 3<>/dev/tcp/{address}/6085' && echo open || echo closed"),
        );
        assert_eq!(output, "closed\n", "{address}");
    }
    let output =
        rig.on_node("timeout 1 bash -c 'exec 3<>/dev/tcp/fd00:9::1/6085' && echo open || echo closed");
    assert_eq!(output, "closed\n", "of the node's own processes neither");
    // A pod's queries count together, whatever their family.
    for (socket, count) in [(&by_v6, 3 * BURST), (&by_v4, BURST / 2)] {
        for _ in 0..count {
            let _ = socket.send(&query());
        }
    }
    let dropped = dropped_each(&rig);
    assert!(dropped.iter().all(|count| *count > 0), "{dropped:?}");
}

/// Cuts the operator off: its answers don't arrive any more.
pub fn cut_off(rig: &Rig) {
    let (_, port) = rig.operator.address.rsplit_once(':').unwrap();
    rig.on_node(&format!(
        "nft add table ip cut && nft 'add chain ip cut out {{ type filter hook output priority -300; }}' \
         && nft add rule ip cut out tcp dport {port} drop"
    ));
}

#[test]
fn tenants_have_dns_soon_after_a_crash_and_without_the_operator() {
    let mut rig = rig();
    let pod = socket(&rig, "p1");
    eventually("DNS", || asks(&pod));
    cut_off(&rig);
    let mut gaps = Vec::new();
    for _ in 0..5 {
        rig.kill();
        let killed = Instant::now();
        // To a socket that asked before, late answers to repeated queries may come still.
        let pod = socket(&rig, "p1");
        // While nobody listens a query is lost without a word, and is asked again: an error would end the resolver's
        // patience.
        pod.send(&query()).unwrap();
        pod.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let heard = uninterrupted(|| pod.recv(&mut [0; 512])).map_err(|error| error.kind());
        assert_eq!(heard, Err(ErrorKind::WouldBlock));
        rig.start();
        pod.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        while !asks(&pod) {
            assert!(killed.elapsed() < IN_THE_END, "{}", rig.log());
        }
        gaps.push(killed.elapsed());
        assert!(
            rig.operator.hellos().is_empty(),
            "the operator has not been asked"
        );
    }
    gaps.sort_unstable();
    println!("DNS of tenants is away for {gaps:?}, 50 ms of them before the start");
    // A resolver of libc asks again after 5 s.
    assert!(gaps[gaps.len() / 2] < Duration::from_secs(5), "{gaps:?}");
}

//! The kernel's table of neighbours: all namespaces of a node share one, so no pod may fill it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use nix::sys::socket::{setsockopt, sockopt};

use crate::rig::{Rig, dual, dual_rows, eventually, in_namespace};

/// Four times as many as the kernel's table has room for.
const SCANNED: u32 = 4_096;
/// Addresses on the underlay that the node asks for beside the scan.
const NEW: u8 = 20;

fn rig() -> Rig {
    let mut rows = dual_rows();
    rows.push(dual(7, "p1", 5));
    let mut rig = Rig::new(rows);
    rig.add_pod("p1");
    rig
}

#[test]
fn a_pods_only_neighbour_is_its_gateway_for_good() {
    let rig = rig();
    let routes = rig.in_pod_text("p1", "ip route; ip -6 route");
    for prefix in ["10.0.1.0/24", "fd00:1::/64"] {
        assert!(!routes.contains(prefix), "{prefix} is on the link: {routes}");
    }
    assert!(rig.in_pod_text("p1", "ip -o link show eth0").contains("NOARP"));
    for neighbours in ["ip -4 neighbour", "ip -6 neighbour"] {
        let neighbours = rig.in_pod_text("p1", neighbours);
        let lines: Vec<&str> = neighbours.lines().collect();
        assert!(
            matches!(&lines[..], [one] if one.contains("02:54:68:75:62:61 PERMANENT")),
            "{neighbours}"
        );
    }
}

/// Opens a socket of the pod's that sends past the routes; no privilege is needed for it.
fn past_the_routes(rig: &Rig, local: IpAddr) -> UdpSocket {
    in_namespace(&format!("{}-p1", rig.name), move || {
        let socket = UdpSocket::bind((local, 0)).unwrap();
        setsockopt(&socket, sockopt::BindToDevice, &"eth0".into()).unwrap();
        setsockopt(&socket, sockopt::DontRoute, &true).unwrap();
        socket
    })
}

fn scanned(number: u32, is_v6: bool) -> SocketAddr {
    if is_v6 {
        let [_, _, high, low] = number.to_be_bytes();
        let address = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 1, u16::from_be_bytes([high, low]));
        // The scope is the device to which the socket is bound.
        return SocketAddrV6::new(address, 9, 0, 0).into();
    }
    let [_, _, high, low] = number.to_be_bytes();
    (Ipv4Addr::new(10, 0, 128 | high, low), 9).into()
}

#[test]
fn a_scan_past_the_routes_leaves_the_node_room() {
    let rig = rig();
    let (is_over, sent) = (AtomicBool::new(false), AtomicU32::new(0));
    let sockets = [
        (past_the_routes(&rig, Ipv4Addr::UNSPECIFIED.into()), false),
        (past_the_routes(&rig, Ipv6Addr::UNSPECIFIED.into()), true),
    ];
    for number in 0..NEW {
        rig.on_far(&format!("ip address add 192.0.2.{}/24 dev far", 100 + number));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                for (socket, is_v6) in &sockets {
                    if socket.send_to(b"?", scanned(number % SCANNED, *is_v6)).is_ok() {
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        });
        let unanswered: Vec<u8> = {
            eventually("scanned", || sent.load(Ordering::Relaxed) > 4 * SCANNED);
            let is_silent = |number: &u8| !rig.ping_from_node(&format!("192.0.2.{}", 100 + number));
            (0..NEW).filter(is_silent).collect()
        };
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(unanswered, Vec::<u8>::new(), "new neighbours of the node");
    });
}

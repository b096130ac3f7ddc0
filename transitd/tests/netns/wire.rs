//! Frames of other droplets, made by hand and sent from the other end of the uplink.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use thuban_testkit::packets::{header, udp};

use crate::flow::word;
use crate::rig::{NODE, Rig, in_namespace};

/// A droplet beside the node, with an address of its own at the other end of the uplink.
pub struct Peer {
    socket: UdpSocket,
}

impl Peer {
    /// 192.0.2.`last`, not 1.
    pub fn new(rig: &Rig, last: u8) -> Self {
        let address = Ipv4Addr::new(192, 0, 2, last);
        let far = rig.far().to_owned();
        if last != 2 {
            rig.on_far(&format!("ip address add {address}/24 dev far"));
        }
        let socket = in_namespace(&far, move || UdpSocket::bind((address, 6081)).unwrap());
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        Self { socket }
    }

    /// Sends a UDP datagram of an endpoint to port 7 of another one, encapsulated, to the node.
    pub fn send(&self, vni: u32, source: IpAddr, destination: IpAddr) {
        let frame = frame(vni, source, destination, *b"thub");
        self.socket.send_to(&frame, (Ipv4Addr::from(NODE), 6081)).unwrap();
    }

    /// As [`Self::send`], of numbers after a mark: 9 to what must not come, else the one that [`Self::receiver`] has not.
    pub fn sender(&self, vni: u32, mark: u8, source: &str, destination: &str) -> Box<dyn FnMut(u32) + Send> {
        let (socket, source, destination) = (
            self.socket.try_clone().unwrap(),
            source.parse().unwrap(),
            destination.parse().unwrap(),
        );
        Box::new(move |number| {
            let frame = frame(vni, source, destination, word(mark, number));
            let _ = socket.send_to(&frame, (Ipv4Addr::from(NODE), 6081));
        })
    }

    /// The first four bytes of each UDP datagram that the node sends here.
    pub fn receiver(&self) -> Box<dyn FnMut() -> Option<[u8; 4]> + Send> {
        let socket = self.socket.try_clone().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        setsockopt(&socket, sockopt::RcvBufForce, &(8 << 20)).unwrap();
        Box::new(move || {
            loop {
                let mut buffer = [0; 2048];
                let length = socket.recv(&mut buffer).ok()?;
                let inner = buffer[..length].get(8 + 14..).unwrap_or_default();
                // Pings before the flows are no part of them.
                if inner.get(9) == Some(&17) {
                    return Some(
                        inner
                            .get(28..32)
                            .and_then(|w| w.try_into().ok())
                            .unwrap_or_default(),
                    );
                }
            }
        })
    }

    /// Whether something came from the node within half a second: the inner packet's destination.
    pub fn received(&self) -> Option<IpAddr> {
        let mut buffer = [0; 2048];
        let length = self.socket.recv(&mut buffer).ok()?;
        let inner = &buffer[8 + 14..length];
        Some(if inner[0] >> 4 == 4 {
            IpAddr::from(<[u8; 4]>::try_from(&inner[16..20]).unwrap())
        } else {
            IpAddr::from(<[u8; 16]>::try_from(&inner[24..40]).unwrap())
        })
    }
}

/// Geneve, Ethernet, IP, UDP and four bytes.
fn frame(vni: u32, source: IpAddr, destination: IpAddr, word: [u8; 4]) -> Vec<u8> {
    let [_, vni @ ..] = vni.to_be_bytes();
    let udp = udp(12345, 7, &word);
    let (ethertype, ip) = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            ([8, 0], header(0, udp.len(), 0, 64, 17, source, destination))
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut ip = vec![0x60, 0, 0, 0, 0, 12, 17, 64];
            ip.extend(source.octets());
            ip.extend(destination.octets());
            ([0x86, 0xdd], ip)
        }
        mixed => panic!("{mixed:?}"),
    };
    let geneve = [0, 0, 0x65, 0x58, vni[0], vni[1], vni[2], 0];
    [&geneve[..], &[2; 12], &ethertype, &ip, &udp].concat()
}

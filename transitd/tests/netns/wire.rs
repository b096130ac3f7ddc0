//! Frames of other droplets, made by hand and sent from the other end of the uplink.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use thuban_testkit::packets::{header, probe, udp};
use thuban_testkit::wait::uninterrupted;

use crate::flow::word;
use crate::rig::{NODE, Rig, in_namespace};

/// A droplet beside the node, with an address of its own at the other end of the uplink.
pub struct Peer {
    socket: UdpSocket,
}

impl Peer {
    /// Makes the droplet 192.0.2.`last`; `last` is not 1.
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

    /// Sends numbers like [`Self::send`], each after a mark: 9 for datagrams that must not arrive, otherwise the mark
    /// that [`Self::receiver`] does not get.
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

    /// Returns the first four bytes of each UDP datagram that the node sends to this droplet.
    pub fn receiver(&self) -> Box<dyn FnMut() -> Option<[u8; 4]> + Send> {
        let socket = self.socket.try_clone().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        setsockopt(&socket, sockopt::RcvBufForce, &(8 << 20)).unwrap();
        Box::new(move || {
            loop {
                let mut buffer = [0; 2048];
                let length = uninterrupted(|| socket.recv(&mut buffer)).ok()?;
                let inner = buffer[..length].get(8 + 14..).unwrap_or_default();
                // Pings that come before the flows do not belong to them.
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

    /// Plays the droplet until the result is dropped; `died` tells whether the droplet has died.
    pub fn play(&self, died: Arc<AtomicBool>) -> Played {
        Played::new(&self.socket, died)
    }

    /// Asks the node whether it lives; returns whether the node answers within half a second.
    pub fn probes(&self) -> bool {
        let secret = 0x0102_0304_0506_0708;
        self.socket
            .send_to(&control(2, secret), (Ipv4Addr::from(NODE), 6081))
            .unwrap();
        let mut buffer = [0; 2048];
        loop {
            let Ok(length) = self.socket.recv(&mut buffer) else {
                return false;
            };
            if buffer[..length] == control(3, secret) {
                return true;
            }
        }
    }

    /// Returns the inner packet's destination if a packet came from the node within half a second.
    pub fn received(&self) -> Option<IpAddr> {
        let mut buffer = [0; 2048];
        let length = loop {
            let length = self.socket.recv(&mut buffer).ok()?;
            if !is_control(&buffer) {
                break length;
            }
        };
        let inner = &buffer[8 + 14..length];
        Some(if inner[0] >> 4 == 4 {
            IpAddr::from(<[u8; 4]>::try_from(&inner[16..20]).unwrap())
        } else {
            IpAddr::from(<[u8; 16]>::try_from(&inner[24..40]).unwrap())
        })
    }
}

/// A droplet that answers probes and takes endpoints' datagrams until it dies. Then it does neither.
pub struct Played {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    words: Receiver<[u8; 4]>,
    /// Number of probes that came, answered or not.
    pub questions: Arc<AtomicU64>,
}

impl Played {
    fn new(socket: &UdpSocket, died: Arc<AtomicBool>) -> Self {
        let socket = socket.try_clone().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        setsockopt(&socket, sockopt::RcvBufForce, &(8 << 20)).unwrap();
        let (stop, questions) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (sender, words) = channel();
        let (stopped, asked) = (Arc::clone(&stop), Arc::clone(&questions));
        let thread = std::thread::spawn(move || {
            let mut buffer = [0; 2048];
            while !stopped.load(Ordering::Relaxed) {
                let Ok((length, from)) = uninterrupted(|| socket.recv_from(&mut buffer)) else {
                    continue;
                };
                let is_question = is_control(&buffer) && buffer[8..10] == [0, 2];
                asked.fetch_add(u64::from(is_question), Ordering::Relaxed);
                if died.load(Ordering::Relaxed) {
                    continue;
                }
                if is_question {
                    buffer[9] = 3;
                    let _ = socket.send_to(&buffer[..length], (from.ip(), 6081));
                } else if let Some(word) = buffer[..length].get(8 + 14 + 28..8 + 14 + 32) {
                    let _ = sender.send(word.try_into().unwrap());
                }
            }
        });
        Self {
            stop,
            thread: Some(thread),
            words,
            questions,
        }
    }

    /// Returns the first four bytes of the next datagram of an endpoint, if one came.
    pub fn word(&self) -> Option<[u8; 4]> {
        self.words.try_recv().ok()
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Whether this is a message between droplets, without a frame of an endpoint.
fn is_control(geneve: &[u8]) -> bool {
    geneve[1] & 0x80 != 0
}

/// Returns the Geneve packet of a probe.
fn control(kind: u16, secret: u64) -> Vec<u8> {
    [&[0, 0x80, 0x88, 0xb5, 0, 0, 0, 0][..], &probe(kind, secret)].concat()
}

/// Returns Geneve, Ethernet, IP, UDP and four bytes.
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

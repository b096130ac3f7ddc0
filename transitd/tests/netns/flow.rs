//! Flows whose losses are all counted: numbered datagrams at a thousand a second, and a TCP stream whose bytes are all
//! known.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use thuban_testkit::wait::uninterrupted;

use crate::rig::in_namespace;

/// The time between datagrams.
const STEP: Duration = Duration::from_millis(1);
/// How long datagrams that are still under way may take when a flow ends.
const DRAIN: Duration = Duration::from_millis(700);

/// The result of a flow.
#[derive(Debug)]
pub struct Outcome {
    pub sent: u64,
    pub lost: u64,
    /// Datagrams that do not belong to this flow.
    pub foreign: u64,
}

type Sender = Box<dyn FnMut(u32) + Send>;
type Receiver = Box<dyn FnMut() -> Option<[u8; 4]> + Send>;

/// A flow of numbers from one place to another until it is stopped.
pub struct Flow {
    stop: Arc<AtomicBool>,
    sending: JoinHandle<u64>,
    receiving: JoinHandle<(BTreeSet<u32>, u64)>,
}

/// Returns a socket in a namespace, with room for datagrams that come while nobody reads.
pub fn socket(namespace: &str, port: u16) -> UdpSocket {
    in_namespace(namespace, move || {
        let socket = UdpSocket::bind(("0.0.0.0", port)).unwrap();
        setsockopt(&socket, sockopt::RcvBufForce, &(8 << 20)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        socket
    })
}

/// Sends each number as a datagram, after this mark.
pub fn datagrams(namespace: &str, to: &str, mark: u8) -> Sender {
    let (socket, to): (_, SocketAddr) = (socket(namespace, 0), to.parse().unwrap());
    Box::new(move |number| {
        // There may be an error while a neighbour is looked up or the way is refused: that counts as a loss.
        let _ = socket.send_to(&word(mark, number), to);
    })
}

/// Returns the datagrams that come to a port.
pub fn port(namespace: &str, port: u16) -> Receiver {
    let socket = socket(namespace, port);
    Box::new(move || {
        let mut buffer = [0; 64];
        let length = uninterrupted(|| socket.recv(&mut buffer)).ok()?;
        Some(buffer[..length].try_into().unwrap_or_default())
    })
}

/// Returns a mark and 24 bits of a number.
pub fn word(mark: u8, number: u32) -> [u8; 4] {
    let [_, a, b, c] = number.to_be_bytes();
    [mark, a, b, c]
}

impl Flow {
    pub fn start(mark: u8, mut send: Sender, mut receive: Receiver) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let sending = std::thread::spawn(move || {
            let (start, mut sent) = (Instant::now(), 0);
            while !ended.load(Ordering::Relaxed) {
                send(sent);
                sent += 1;
                std::thread::sleep((start + STEP * sent).saturating_duration_since(Instant::now()));
            }
            u64::from(sent)
        });
        let ended = Arc::clone(&stop);
        let receiving = std::thread::spawn(move || {
            let (mut seen, mut foreign, mut end) = (BTreeSet::new(), 0, None);
            loop {
                match receive() {
                    Some([of, number @ ..]) if of == mark => {
                        let [a, b, c] = number;
                        seen.insert(u32::from_be_bytes([0, a, b, c]));
                    }
                    Some(_) => foreign += 1,
                    None => {}
                }
                if ended.load(Ordering::Relaxed)
                    && *end.get_or_insert(Instant::now() + DRAIN) < Instant::now()
                {
                    return (seen, foreign);
                }
            }
        });
        Self {
            stop,
            sending,
            receiving,
        }
    }

    pub fn stop(self) -> Outcome {
        self.stop.store(true, Ordering::Relaxed);
        let sent = self.sending.join().unwrap();
        let (seen, foreign) = self.receiving.join().unwrap();
        let lost = sent - seen.len() as u64;
        Outcome { sent, lost, foreign }
    }
}

/// A TCP connection that carries a known text one way until it is stopped.
pub struct Stream {
    stop: Arc<AtomicBool>,
    writing: JoinHandle<u64>,
    reading: JoinHandle<u64>,
}

impl Stream {
    /// Starts a stream from one namespace to an address of another one.
    pub fn start(from: &str, to: &str, address: &str) -> Self {
        let listener = in_namespace(to, || TcpListener::bind("0.0.0.0:0").unwrap());
        let address = SocketAddr::new(address.parse().unwrap(), listener.local_addr().unwrap().port());
        let reading = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let (mut total, mut buffer) = (0_u64, [0; 4096]);
            loop {
                let length = uninterrupted(|| stream.read(&mut buffer)).expect("the stream broke");
                for byte in &buffer[..length] {
                    assert_eq!(*byte, total as u8, "byte {total}");
                    total += 1;
                }
                if length == 0 {
                    return total;
                }
            }
        });
        let mut stream = in_namespace(from, move || {
            TcpStream::connect_timeout(&address, Duration::from_secs(10)).unwrap()
        });
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let writing = std::thread::spawn(move || {
            let text: Vec<u8> = (0..=255).collect();
            let mut total = 0;
            while !ended.load(Ordering::Relaxed) {
                stream.write_all(&text).expect("the stream broke");
                total += text.len() as u64;
                std::thread::sleep(Duration::from_millis(1));
            }
            total
        });
        Self {
            stop,
            writing,
            reading,
        }
    }

    /// Returns the number of bytes that were sent; all of them arrived.
    pub fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let written = self.writing.join().unwrap();
        assert_eq!(self.reading.join().unwrap(), written);
        written
    }
}

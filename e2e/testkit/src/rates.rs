//! Limits of bandwidth, measured by a stream between two network namespaces.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use thuban_cluster::wait::uninterrupted;

use crate::namespace::inside;

const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The limits that are measured, in bytes per second: 1, 10 and 100 Mb/s, and 1 Gb/s.
static ALL: [u64; 4] = [125_000, 1_250_000, 12_500_000, 125_000_000];

/// Which limits are measured, and how far off streams may be.
pub struct Bounds {
    pub limits: &'static [u64],
    /// Thousandths of the limit.
    least: u64,
    most: u64,
}

impl Bounds {
    /// With `THUBAN_RATES_WITHIN`, a number of percent, all limits are measured, and streams are no farther off.
    /// Without it one limit is, and only that no stream has more: load takes away from it.
    pub fn from_env() -> Self {
        let within = std::env::var("THUBAN_RATES_WITHIN").ok();
        let within: Option<u64> = within.map(|text| text.parse().unwrap());
        Self {
            limits: if within.is_some() { &ALL[..] } else { &ALL[2..3] },
            least: within.map_or(0, |within| 1000 - 10 * within),
            most: 1000 + 10 * within.unwrap_or(15),
        }
    }

    /// Measures the first second of a stream from one namespace to an address of another. Returns what is off.
    /// `mtu`: of the end that has the limit.
    pub fn check(
        &self,
        way: &str,
        ends: [&str; 2],
        address: Ipv4Addr,
        limit: u64,
        mtu: u64,
    ) -> Option<String> {
        let measured = stream(ends, address, Duration::from_secs(1));
        // Limits count whole frames. A stream of TCP has 52 bytes of headers behind that of Ethernet.
        let permille = measured * 1000 * (mtu + 14) / (mtu - 52) / limit;
        let told = format!("{} kb/s {way}: {permille} permille", limit / 125);
        println!("{told}");
        (!(self.least..=self.most).contains(&permille)).then_some(told)
    }
}

/// Returns how many bytes per second a stream carries from one namespace to an address of another, from its first byte
/// on.
pub fn stream([from, to]: [&str; 2], address: Ipv4Addr, time: Duration) -> u64 {
    let file = |name: &str| File::open(format!("/run/netns/{name}")).unwrap();
    let listener = inside(file(to), || Ok(TcpListener::bind((address, 0))?)).unwrap();
    let to = listener.local_addr().unwrap();
    let sending = inside(file(from), || {
        Ok(TcpStream::connect_timeout(&to, ANSWER_TIMEOUT)?)
    })
    .unwrap();
    let (mut receiving, _) = listener.accept().unwrap();
    receiving.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    sending.set_write_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    let sender = thread::spawn(move || send(sending));
    let (mut buffer, mut bytes, mut start) = (vec![0; 64 << 10], 0, None);
    let took = loop {
        let length = uninterrupted(|| receiving.read(&mut buffer)).unwrap() as u64;
        let elapsed = start.get_or_insert_with(Instant::now).elapsed();
        if elapsed >= time {
            break elapsed;
        }
        bytes += length;
    };
    drop(receiving);
    sender.join().unwrap();
    bytes * 1000 / took.as_millis() as u64
}

/// Sends until the receiver has seen enough.
fn send(mut stream: TcpStream) {
    let zeros = vec![0; 64 << 10];
    loop {
        match uninterrupted(|| stream.write(&zeros)) {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

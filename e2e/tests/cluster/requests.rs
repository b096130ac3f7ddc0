//! Endless requests. Each has a connection of its own, and the server answers with its name. The answers are counted by
//! name, and failures are reported.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpStream, UdpSocket};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use std::{fmt, fs};

use anyhow::{Context, Result, anyhow, ensure};
use thuban_cluster::wait::uninterrupted;

use crate::support::{PORT, Pod, ask_slowly, http_answer};

/// An answer that takes longer is late.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);
/// How long a load waits for a late answer if nothing may be lost: a busy machine leaves servers without CPU for
/// seconds, and the network has lost nothing then.
pub const LATE: Duration = Duration::from_secs(30);
/// How long a request by [`Way::SlowTcp`] is under way.
const SLOW: Duration = Duration::from_secs(2);
/// How often the machine is checked for a standstill. A standstill spoils the requests of its time: their answers may
/// have come, and nobody read them.
const PULSE: Duration = Duration::from_millis(20);
const STANDSTILL: Duration = Duration::from_secs(1);
/// A sender that loses this many requests in a row reaches nobody.
const MAX_IN_A_ROW: u32 = 50;

#[derive(Clone, Debug)]
pub enum Way {
    /// HTTP.
    Tcp,
    /// HTTP, by a connection that is open for [`SLOW`] before the request is complete.
    SlowTcp,
    Udp,
    /// Datagrams from these ports, one after the other, again and again.
    UdpFrom(Range<u16>),
}

/// One sender.
#[derive(Clone, Debug)]
pub struct Load<'a> {
    pub pod: &'a Pod,
    pub address: Ipv4Addr,
    pub way: Way,
    /// The pause between an answer and the next request.
    pub pause: Duration,
    /// How long the sender waits for an answer: [`ANSWER_TIMEOUT`] where requests may be lost, else [`LATE`].
    pub waits: Duration,
}

pub struct Failure {
    /// The time from the beginning of the load to the beginning of the request.
    pub at: Duration,
    took: Duration,
    why: String,
    /// Whether the request was one datagram.
    pub is_datagram: bool,
}

/// Times in which this process did not run at all, since the load began: begin and end.
type Standstills = Vec<(Duration, Duration)>;

/// Returns the standstills that a thread sees that only sleeps.
fn standstills(begin: Instant, is_over: &AtomicBool) -> Standstills {
    let mut all = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let before = begin.elapsed();
        thread::sleep(PULSE);
        let after = begin.elapsed();
        if after.saturating_sub(before) >= STANDSTILL {
            all.push((before, after));
        }
    }
    all
}

/// The results of one sender's requests.
#[derive(Debug, Default)]
pub struct Tally {
    pub answers: BTreeMap<String, u64>,
    pub failures: Vec<Failure>,
}

impl fmt::Debug for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "at {:.3} s: {}", self.at.as_secs_f64(), self.why)
    }
}

impl Tally {
    pub fn answered(&self) -> u64 {
        self.answers.values().sum()
    }

    /// Removes the failures of times in which the machine stood still.
    fn excuse(&mut self, still: &Standstills) {
        self.failures.retain(|failure| {
            let end = failure.at + failure.took;
            let is_spoilt = still.iter().any(|(from, to)| *from < end && failure.at < *to);
            if is_spoilt {
                eprintln!("  not counted, for the machine stood still: {failure:?}");
            }
            !is_spoilt
        });
    }
}

/// Ends what runs until the flag is set, also when a test fails.
pub struct Ends<'a>(pub &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sends requests while `work` runs. `work` may read the tallies, one for each load.
pub fn under_load(
    loads: &[Load<'_>],
    work: impl FnOnce(&[Mutex<Tally>]) -> Result<()>,
) -> Result<Vec<Tally>> {
    let tallies: Vec<Mutex<Tally>> = loads.iter().map(|_| Mutex::default()).collect();
    let (begin, is_over) = (Instant::now(), AtomicBool::new(false));
    thread::scope(|scope| {
        // This also runs when `work` panics.
        let ends = Ends(&is_over);
        let pulse = scope.spawn(|| standstills(begin, &is_over));
        let senders: Vec<_> = loads
            .iter()
            .zip(&tallies)
            .map(|(load, tally)| {
                let is_over = &is_over;
                scope.spawn(move || load.pod.inside(|| load.send(begin, tally, is_over)))
            })
            .collect();
        let worked = work(&tallies);
        drop(ends);
        for sender in senders {
            sender.join().map_err(|_| anyhow!("a sender panicked"))??;
        }
        let still = pulse.join().map_err(|_| anyhow!("the pulse panicked"))?;
        for tally in &tallies {
            tally.lock().unwrap().excuse(&still);
        }
        worked
    })?;
    Ok(tallies
        .into_iter()
        .map(|tally| tally.into_inner().unwrap())
        .collect())
}

impl Load<'_> {
    fn send(&self, begin: Instant, tally: &Mutex<Tally>, is_over: &AtomicBool) -> Result<()> {
        let mut lost = 0;
        for number in 0.. {
            if is_over.load(Ordering::Relaxed) {
                break;
            }
            let at = begin.elapsed();
            let answer = self.ask(number);
            let tally = &mut *tally.lock().unwrap();
            match answer {
                Ok(name) => {
                    lost = 0;
                    let took = begin.elapsed().saturating_sub(at);
                    if took >= ANSWER_TIMEOUT + SLOW {
                        let (pod, way) = (&self.pod.name, &self.way);
                        eprintln!(
                            "  late, at {at:.3?}: {pod} by {way:?}, answered by {name} after {took:.3?}"
                        );
                    }
                    *tally.answers.entry(name).or_default() += 1;
                }
                Err(error) => {
                    lost += 1;
                    let took = begin.elapsed().saturating_sub(at);
                    let after = took.as_secs_f64();
                    let why = format!(
                        "{} by {:?}: {error:#} after {after:.3} s",
                        self.pod.name, self.way
                    );
                    let is_datagram = matches!(self.way, Way::Udp | Way::UdpFrom(_));
                    tally.failures.push(Failure {
                        at,
                        took,
                        why,
                        is_datagram,
                    });
                }
            }
            ensure!(
                lost < MAX_IN_A_ROW,
                "{lost} requests in a row failed, the last one {:?}",
                tally.failures.last()
            );
            thread::sleep(self.pause);
        }
        Ok(())
    }

    fn ask(&self, number: usize) -> Result<String> {
        match &self.way {
            Way::Tcp => self.http_hostname(Duration::ZERO),
            Way::SlowTcp => self.http_hostname(SLOW),
            Way::Udp => self.udp_hostname(0),
            Way::UdpFrom(ports) => {
                let port = ports.clone().nth(number % ports.len());
                self.udp_hostname(port.unwrap_or_default())
            }
        }
    }

    /// Asks for the name by UDP. A datagram is sent once, so that a late answer proves that none was lost.
    fn udp_hostname(&self, port: u16) -> Result<String> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
        socket.set_read_timeout(Some(self.waits))?;
        socket.connect((self.address, PORT))?;
        socket.send(b"hostname")?;
        let mut buffer = [0; 256];
        let length = uninterrupted(|| socket.recv(&mut buffer))?;
        Ok(String::from_utf8_lossy(&buffer[..length]).trim().to_owned())
    }

    /// Asks for the name by HTTP. TCP sends lost segments again. So a late answer counts only if the server's kernel
    /// acknowledged all of the request in time.
    fn http_hostname(&self, pause: Duration) -> Result<String> {
        let stream = ask_slowly((self.address, PORT).into(), "/hostname", ANSWER_TIMEOUT, pause)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        if let Err(error) = uninterrupted(|| stream.peek(&mut [0])) {
            ensure!(
                error.kind() == ErrorKind::WouldBlock && self.waits > ANSWER_TIMEOUT,
                error
            );
            let left = unacknowledged(&stream)?;
            ensure!(left == 0, "{error}, {left} bytes of the request not acknowledged");
        }
        stream.set_read_timeout(Some(self.waits))?;
        http_answer(stream)
    }
}

/// Returns how many bytes this connection has sent that the other end has not acknowledged.
fn unacknowledged(stream: &TcpStream) -> Result<u32> {
    let local = format!(":{:04X}", stream.local_addr()?.port());
    let remote = format!(":{:04X}", stream.peer_addr()?.port());
    let table = fs::read_to_string("/proc/thread-self/net/tcp")?;
    let rows = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let queue = rows
        .filter(|row| row.len() > 4 && row[1].ends_with(&local) && row[2].ends_with(&remote))
        .find_map(|row| row[4].split_once(':').map(|(sent, _)| sent.to_owned()))
        .with_context(|| format!("{stream:?} is not in /proc/net/tcp"))?;
    Ok(u32::from_str_radix(&queue, 16)?)
}

//! A front falls silent, and no sign of it reaches the router but BFD's silence. Clients go on to connect, and others
//! have connections open. Backends are on the other nodes. No node dies before BFD watches it: until then the router
//! would notice the death only by the end of BGP's hold time.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use thuban_cluster::Cluster;

use super::{
    Plan,
    objects::Wanted,
    site::{self, ECHO, LAST, Site},
};
use crate::bench::{
    float, go_on,
    results::{Results, Sample},
    services::traffic::ANSWERS,
};

/// Names of the cases: with fronts, and with the nodes' own stack.
const CASES: [(&str, bool); 2] = [(FRONT_DIES, false), (NODE_DIES, true)];
pub const FRONT_DIES: &str = "front-dies";
pub const NODE_DIES: &str = "node-dies";

/// The time between two attempts to connect.
const STEP: Duration = Duration::from_millis(10);
/// Attempts under way at once: more than begin while one may last.
const WORKERS: u32 = 36;
/// How long a client waits for each step of an attempt.
const WITHIN: Duration = Duration::from_millis(150);
/// How long attempts go on before and after the death.
const BEFORE: Duration = Duration::from_secs(1);
const AFTER: Duration = Duration::from_secs(4);
/// How long the answer to an open connection may take after the death. TCP repeats a lost packet several times until
/// then.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// What a client saw of one death.
struct Seen {
    /// From the death until the last attempt began that nobody answered.
    new: Duration,
    /// Attempts that nobody answered although all nodes were there.
    failed_before: usize,
    /// Open connections that were reset or had no answer.
    lost: usize,
}

pub fn measure(site: &Site, plan: &Plan, results: &mut Results) -> Result<()> {
    let mut cases = Vec::new();
    for (name, by_node) in CASES {
        let address = site.balance(&Wanted {
            by_node,
            ..site::others(name)
        })?;
        cases.push((name, address));
    }
    for death in 1..=plan.deaths {
        for (name, address) in &cases {
            go_on()?;
            site.await_routes(*address)?;
            let by_bfd = site.await_bfd()?;
            let seen = die(site, *address, plan.held)?;
            println!(
                "death {death} of {}, {name:<11} new connections after {:.2} s, lost {} of {}, {by_bfd} nodes by BFD",
                plan.deaths,
                seen.new.as_secs_f32(),
                seen.lost,
                plan.held
            );
            results.add(
                name,
                &[
                    Sample::new("new_connections_ms", "ms", seen.new.as_secs_f64() * 1e3),
                    Sample::new("bfd_sessions", "sessions", float(by_bfd as u64)),
                    Sample::new("held", "connections", float(plan.held as u64)),
                    Sample::new("held_lost", "connections", float(seen.lost as u64)),
                    Sample::new("failed_before", "connections", float(seen.failed_before as u64)),
                ],
            );
        }
    }
    Ok(())
}

/// A node that is cut off from the others until this is dropped.
struct Silent<'a>(&'a Cluster);

impl<'a> Silent<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let silent = Self(cluster);
        cluster.cut_off(LAST, true)?;
        Ok(silent)
    }
}

impl Drop for Silent<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.cut_off(LAST, false) {
            eprintln!("{error:#}");
        }
    }
}

fn die(site: &Site, address: Ipv4Addr, count: usize) -> Result<Seen> {
    let client = &site.client;
    let mut held = client.run(|| Held::open(SocketAddr::from((address, ECHO)), count))?;
    ensure!(held.ask()? == 0, "open connections have no answer");
    let server = SocketAddr::from((address, ANSWERS));
    let is_over = AtomicBool::new(false);
    let start = Instant::now();
    let (death, lost, failed) = thread::scope(|scope| {
        let attempts: Vec<_> = (0..WORKERS)
            .map(|worker| {
                let is_over = &is_over;
                scope.spawn(move || client.run(|| Ok(attempt(server, start, worker, is_over))))
            })
            .collect();
        thread::sleep(BEFORE);
        let death = Instant::now();
        let silent = Silent::new(&site.cluster);
        let lost = held.ask();
        thread::sleep(AFTER.saturating_sub(death.elapsed()));
        is_over.store(true, Ordering::Relaxed);
        drop(silent?);
        let mut failed = Vec::new();
        for attempt in attempts {
            failed.extend(attempt.join().map_err(|_| anyhow!("a client panicked"))??);
        }
        anyhow::Ok((death, lost?, failed))
    })?;
    // An attempt that began shortly before the death is the death's.
    let failed_before = failed.iter().filter(|began| **began + 2 * WITHIN < death).count();
    let last = failed.into_iter().max().unwrap_or(death);
    Ok(Seen {
        new: last.saturating_duration_since(death),
        failed_before,
        lost,
    })
}

/// Connects again and again, as one of the workers. Returns when those attempts began that nobody answered.
fn attempt(server: SocketAddr, start: Instant, worker: u32, is_over: &AtomicBool) -> Vec<Instant> {
    let mut failed = Vec::new();
    for number in (worker..).step_by(WORKERS as usize) {
        let begins = start + STEP * number;
        thread::sleep(begins.saturating_duration_since(Instant::now()));
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        let began = Instant::now();
        if ask(server, WITHIN).is_err() {
            failed.push(began);
        }
    }
    failed
}

/// Connects, sends one byte and reads one.
pub fn ask(server: SocketAddr, within: Duration) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&server, within)?;
    stream.set_read_timeout(Some(within))?;
    stream.write_all(&[1])?;
    Ok(stream.read_exact(&mut [0])?)
}

/// Connections that stay open.
struct Held(Vec<TcpStream>);

impl Held {
    fn open(server: SocketAddr, count: usize) -> Result<Self> {
        let open = |_| {
            let stream = TcpStream::connect_timeout(&server, Duration::from_secs(3)).context("connecting")?;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        Ok(Self((0..count).map(open).collect::<Result<_>>()?))
    }

    /// Sends a byte by each connection; returns the number of those that bring none back.
    fn ask(&mut self) -> Result<usize> {
        let end = Instant::now() + ANSWERED_WITHIN;
        let sent: Vec<bool> = self
            .0
            .iter_mut()
            .map(|stream| stream.write_all(&[1]).is_ok())
            .collect();
        let mut lost = 0;
        for (stream, is_sent) in self.0.iter_mut().zip(sent) {
            let left = end.saturating_duration_since(Instant::now());
            stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            lost += usize::from(!is_sent || stream.read_exact(&mut [0]).is_err());
        }
        Ok(lost)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    /// Returns a server that gives back one byte of each connection but those whose numbers are given, which it ends.
    fn server(silent: &'static [usize]) -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let mut open = Vec::new();
            for (number, stream) in listener.incoming().flatten().enumerate() {
                let (mut stream, mut byte) = (stream, [0]);
                if !silent.contains(&number) && stream.read_exact(&mut byte).is_ok() {
                    stream.write_all(&byte).unwrap();
                    open.push(stream);
                }
            }
        });
        address
    }

    #[test]
    fn a_connection_that_ends_is_lost() {
        let mut held = Held::open(server(&[1]), 3).unwrap();
        assert_eq!(held.ask().unwrap(), 1);
    }

    #[test]
    fn attempts_that_nobody_answers_are_told() {
        let is_over = AtomicBool::new(false);
        let attempts = |server| {
            let start = Instant::now();
            is_over.store(false, Ordering::Relaxed);
            thread::scope(|scope| {
                let attempts = scope.spawn(|| attempt(server, start, 0, &is_over));
                thread::sleep(STEP * WORKERS / 2);
                is_over.store(true, Ordering::Relaxed);
                attempts.join().unwrap()
            })
        };
        assert!(attempts(server(&[])).is_empty());
        assert_eq!(attempts(server(&[0])).len(), 1);
    }
}

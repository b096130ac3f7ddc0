//! Datagrams of 64 bytes, one system call each, as fast as one core sends them: the datagrams that arrive are counted,
//! and the whole machine's CPU time for one of them.
//!
//! Sending costs the whole way up to the receiver's socket, and this is the measured cost. Receiving is another core's
//! work.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use thuban_cluster::wait::uninterrupted;

use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};

use super::{Ends, within};
use crate::bench::{
    float,
    machine::busy_ms,
    process::{CLIENT_CORE, SERVER_CORE, pin},
    results::Sample,
};

pub const PORT: u16 = 7001;
/// Size of the receiver's buffer in bytes: enough for the moments in which its core does something else.
const BUFFER: usize = 8 << 20;
const SIZE: usize = 64;
/// How long it takes until queues and caches are stable.
const WARM_UP: Duration = Duration::from_millis(300);

pub fn per_second(ends: Ends, time: Duration) -> Result<Vec<Sample>> {
    let address = SocketAddr::from((ends.address, PORT));
    let server = within(ends.server, || {
        UdpSocket::bind((ends.own, PORT)).context("binding the server")
    })?;
    server.set_read_timeout(Some(Duration::from_millis(100)))?;
    setsockopt(&server, RcvBufForce, &BUFFER).context("a large buffer")?;
    let client = within(ends.client, || {
        let client = UdpSocket::bind("0.0.0.0:0").context("binding the client")?;
        client.connect(address).context("connecting")?;
        Ok(client)
    })?;
    let done = AtomicBool::new(false);
    let (sent, received) = (AtomicU64::new(0), AtomicU64::new(0));
    let count = || (sent.load(Ordering::Relaxed), received.load(Ordering::Relaxed));
    let (start, end, elapsed, busy) = thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            pin(SERVER_CORE)?;
            let mut buffer = [0; SIZE + 1];
            while !done.load(Ordering::Relaxed) {
                if uninterrupted(|| server.recv(&mut buffer)).is_ok_and(|length| length == SIZE) {
                    received.fetch_add(1, Ordering::Relaxed);
                }
            }
            anyhow::Ok(())
        });
        let sender = scope.spawn(|| {
            pin(CLIENT_CORE)?;
            let message = [0x55; SIZE];
            while !done.load(Ordering::Relaxed) {
                if client.send(&message).is_ok() {
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            }
            anyhow::Ok(())
        });
        thread::sleep(WARM_UP);
        let (clock, start, before) = (Instant::now(), count(), busy_ms()?);
        thread::sleep(time);
        let (end, elapsed, busy) = (count(), clock.elapsed(), busy_ms()? - before);
        done.store(true, Ordering::Relaxed);
        for thread in [receiver, sender] {
            thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        anyhow::Ok((start, end, elapsed, busy))
    })?;
    let [sent, received] = [end.0 - start.0, end.1 - start.1].map(float);
    ensure!(received > 1000.0, "only {received} of {sent} datagrams arrived");
    Ok(vec![
        Sample::new("udp64_pps", "1/s", received / elapsed.as_secs_f64()),
        Sample::new("udp64_loss", "share", (1.0 - received / sent).max(0.0)),
        Sample::new("udp64_cpu_us", "us", busy * 1e3 / received),
    ])
}

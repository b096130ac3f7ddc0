//! Ping-pong of 64 bytes over one TCP connection: round-trip times, from sending to the whole answer.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};

use super::{Ends, within};
use crate::bench::{
    process::{CLIENT_CORE, SERVER_CORE, pin},
    results::Sample,
    stats::{quantile, sorted},
};

pub const PORT: u16 = 6000;
const SIZE: usize = 64;
const WAIT: Duration = Duration::from_secs(3);
/// How long it takes until both ends and their caches are stable.
const WARM_UP: Duration = Duration::from_millis(200);

pub fn round_trips(ends: Ends, time: Duration) -> Result<Vec<Sample>> {
    let address = SocketAddr::from((ends.address, PORT));
    let listener = within(ends.server, || {
        TcpListener::bind((ends.own, PORT)).context("listening")
    })?;
    let times = thread::scope(|scope| {
        let client = within(ends.client, || {
            TcpStream::connect_timeout(&address, WAIT).context("connecting")
        })?;
        let server = scope.spawn(|| answer(&listener));
        let times = scope.spawn(move || ask(client, time)).join();
        // The client has closed, which ends the server.
        server.join().map_err(|_| anyhow!("the server panicked"))??;
        times.map_err(|_| anyhow!("the client panicked"))?
    })?;
    ensure!(times.len() > 100, "only {} round trips", times.len());
    let micros = sorted(times.iter().map(|time| time.as_secs_f64() * 1e6));
    Ok(vec![
        Sample::new("rr_p50_us", "us", quantile(&micros, 0.50)),
        Sample::new("rr_p99_us", "us", quantile(&micros, 0.99)),
    ])
}

fn ask(mut stream: TcpStream, time: Duration) -> Result<Vec<Duration>> {
    pin(CLIENT_CORE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(WAIT))?;
    let mut message = [0x55; SIZE];
    let mut times = Vec::new();
    let start = Instant::now();
    while start.elapsed() < WARM_UP + time {
        let sent = Instant::now();
        stream.write_all(&message)?;
        stream
            .read_exact(&mut message)
            .with_context(|| format!("no answer after {} round trips", times.len()))?;
        if start.elapsed() > WARM_UP {
            times.push(sent.elapsed());
        }
    }
    Ok(times)
}

fn answer(listener: &TcpListener) -> Result<()> {
    pin(SERVER_CORE)?;
    let (mut stream, _) = listener.accept().context("accepting")?;
    stream.set_nodelay(true)?;
    let mut message = [0; SIZE];
    // The end of the connection is the end of the measurement. An earlier failure is the client's error.
    while stream.read_exact(&mut message).is_ok() {
        if stream.write_all(&message).is_err() {
            break;
        }
    }
    Ok(())
}

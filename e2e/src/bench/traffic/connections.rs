//! Connections that connect, ask one byte, get one byte, and close: the number of these a second, one at a time.
//!
//! The server closes first, so that waiting sockets are the server's and the client's ports are free again at once.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::{
    socket::{setsockopt, sockopt::ReceiveTimeout},
    time::{TimeVal, TimeValLike},
};
use thuban_cluster::wait::uninterrupted;

use super::{Ends, within};
use crate::bench::{
    process::{CLIENT_CORE, SERVER_CORE, pin},
    results::Sample,
};

pub const PORT: u16 = 7000;
const WAIT: Duration = Duration::from_secs(3);

pub fn per_second(ends: Ends, time: Duration) -> Result<Vec<Sample>> {
    let address = SocketAddr::from((ends.address, PORT));
    let listener = within(ends.server, || {
        TcpListener::bind((ends.own, PORT)).context("listening")
    })?;
    setsockopt(&listener, ReceiveTimeout, &TimeVal::milliseconds(200))?;
    let done = AtomicBool::new(false);
    let rate = thread::scope(|scope| {
        let server = scope.spawn(|| serve(&listener, &done));
        let rate = within(ends.client, || {
            pin(CLIENT_CORE)?;
            ask(address, time)
        });
        done.store(true, Ordering::Relaxed);
        server.join().map_err(|_| anyhow!("the server panicked"))??;
        rate
    })?;
    Ok(vec![Sample::new("crr_per_s", "1/s", rate)])
}

fn ask(address: SocketAddr, time: Duration) -> Result<f64> {
    let start = Instant::now();
    let mut count = 0.0;
    while start.elapsed() < time {
        let mut stream = TcpStream::connect_timeout(&address, WAIT).context("connecting")?;
        stream.set_nodelay(true)?;
        stream.write_all(&[1])?;
        let mut answer = [0; 2];
        ensure!(uninterrupted(|| stream.read(&mut answer))? == 1, "no answer");
        ensure!(
            uninterrupted(|| stream.read(&mut answer))? == 0,
            "more than an answer"
        );
        count += 1.0;
    }
    Ok(count / start.elapsed().as_secs_f64())
}

fn serve(listener: &TcpListener, done: &AtomicBool) -> Result<()> {
    pin(SERVER_CORE)?;
    while !done.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((mut stream, _)) => {
                stream.set_nodelay(true)?;
                let mut byte = [0];
                // A client that went away reports its own error.
                let _ = stream
                    .read_exact(&mut byte)
                    .and_then(|()| stream.write_all(&byte));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("accepting"),
        }
    }
    Ok(())
}

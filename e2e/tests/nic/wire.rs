//! The other end of a card's cable: frames in and out, byte by byte.

use std::{
    os::unix::net::UnixDatagram,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use thuban_cluster::wait::uninterrupted;
use thuban_e2e::rig::capture::Wire;

pub enum Cable {
    /// Each datagram is a frame.
    Socket(UnixDatagram),
    /// A tap device of a namespace.
    Tap(Wire),
}

impl Cable {
    /// Makes a cable from a socket.
    pub fn socket(socket: UnixDatagram) -> Result<Self> {
        socket
            .set_read_timeout(Some(Duration::from_millis(50)))
            .context("setting a time limit")?;
        Ok(Self::Socket(socket))
    }

    pub fn send(&self, frame: &[u8]) -> Result<()> {
        match self {
            Self::Socket(socket) => socket.send(frame).map(|_| ()).context("sending a frame"),
            Self::Tap(wire) => wire.inject(frame),
        }
    }

    /// Returns the next frame that the filter wants, if one comes within the time.
    pub fn receive(&self, time: Duration, wanted: impl Fn(&[u8]) -> bool) -> Option<Vec<u8>> {
        let end = Instant::now() + time;
        loop {
            if let Some(frame) = self.next().filter(|frame| wanted(frame)) {
                return Some(frame);
            }
            if Instant::now() >= end {
                return None;
            }
        }
    }

    fn next(&self) -> Option<Vec<u8>> {
        match self {
            Self::Socket(socket) => {
                let mut buffer = vec![0; 70000];
                let length = uninterrupted(|| socket.recv(&mut buffer)).ok()?;
                buffer.truncate(length);
                Some(buffer)
            }
            Self::Tap(wire) => wire.next(),
        }
    }
}

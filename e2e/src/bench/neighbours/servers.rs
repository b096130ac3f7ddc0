//! The servers that tenants ask: servers that echo a byte, and a DNS server that answers some names and is silent about
//! others.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result};
use thuban_cluster::wait::uninterrupted;

use crate::rig::namespace::Namespace;

/// Names under this are never answered.
pub const SILENT: &str = "silent";
/// How often a server checks whether it must end.
const LOOK: Duration = Duration::from_millis(50);

/// A server that ends when dropped.
pub struct Server {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(serve: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&is_over);
        Self {
            is_over,
            thread: Some(thread::spawn(move || serve(&told))),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Starts a server that answers each byte of a connection with itself.
pub fn echo(namespace: &Namespace, address: impl Into<SocketAddr>) -> Result<Server> {
    let address = address.into();
    let listener = namespace.run(|| Ok(TcpListener::bind(address)?));
    let listener = listener.with_context(|| format!("listening at {address}"))?;
    listener.set_nonblocking(true)?;
    Ok(Server::start(move |is_over| {
        while !is_over.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((mut stream, _)) => {
                    let _ = stream.set_nonblocking(false);
                    thread::spawn(move || {
                        let mut byte = [0];
                        while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
                    });
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    thread::sleep(Duration::from_micros(200));
                }
                Err(_) => return,
            }
        }
    }))
}

/// Starts the cluster's DNS: one address for every name, except for names that begin with [`SILENT`].
pub fn names(namespace: &Namespace, address: impl Into<SocketAddr>) -> Result<Server> {
    let address = address.into();
    let socket = namespace.run(|| Ok(UdpSocket::bind(address)?));
    let socket = socket.with_context(|| format!("listening at {address}"))?;
    socket.set_read_timeout(Some(LOOK))?;
    Ok(Server::start(move |is_over| {
        let mut buffer = [0; 1500];
        while !is_over.load(Ordering::Relaxed) {
            let Ok((length, from)) = uninterrupted(|| socket.recv_from(&mut buffer)) else {
                continue;
            };
            if let Some(answer) = answer(&buffer[..length]) {
                let _ = socket.send_to(&answer, from);
            }
        }
    }))
}

/// Returns a socket for datagrams that nobody reads: what comes for it is neither answered nor refused.
pub fn unread(namespace: &Namespace, port: u16) -> Result<UdpSocket> {
    let socket = namespace.run(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?));
    socket.with_context(|| format!("listening at port {port}"))
}

/// Returns a query for the address of a name.
pub fn query(identifier: u16, labels: &[&str]) -> Vec<u8> {
    let mut query = identifier.to_be_bytes().to_vec();
    // Recursion desired, one question.
    query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in labels {
        query.push(label.len() as u8);
        query.extend(label.bytes());
    }
    // Address, Internet.
    query.extend([0, 0, 1, 0, 1]);
    query
}

fn answer(query: &[u8]) -> Option<Vec<u8>> {
    let name = query.get(13..)?;
    if name.starts_with(SILENT.as_bytes()) {
        return None;
    }
    let length = query.get(12..)?.iter().position(|byte| *byte == 0)?;
    let question = query.get(12..12 + length + 5)?;
    let mut answer = query[..2].to_vec();
    // A response, recursion available; one question, one answer.
    answer.extend([0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
    answer.extend(question);
    // The name of the question, address, Internet, 30 s, 192.0.2.9.
    answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 30, 0, 4, 192, 0, 2, 9]);
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::{SILENT, answer, query};

    #[test]
    fn names_are_answered_but_for_the_silent_ones() {
        let asked = query(7, &["web", "example"]);
        let told = answer(&asked).unwrap();
        assert_eq!(told[..2], [0, 7]);
        assert_eq!(told[12..asked.len()], asked[12..], "the question");
        assert_eq!(told[told.len() - 4..], [192, 0, 2, 9]);
        assert_eq!(answer(&query(7, &[SILENT, "example"])), None);
        assert_eq!(answer(&[0; 4]), None);
    }
}

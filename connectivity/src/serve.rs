//! Answers with a name: to every TCP connection, and to every datagram that asks for it.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::thread;
use std::time::Duration;

/// The datagram that asks. Others get no answer: two servers never answer each other.
pub const DATAGRAM: &[u8] = b"who";
/// How long a client may take to accept some bytes.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause after an error, such as too many open files.
const ERROR_PAUSE: Duration = Duration::from_millis(10);

/// Sockets that answer with a name.
#[derive(Debug)]
pub struct Server {
    name: String,
    listeners: Vec<TcpListener>,
    sockets: Vec<UdpSocket>,
}

impl Server {
    /// Listens at TCP and UDP ports.
    pub fn bind(name: &str, addresses: &[SocketAddr]) -> io::Result<Self> {
        let listeners: io::Result<Vec<TcpListener>> = addresses.iter().map(TcpListener::bind).collect();
        let sockets: io::Result<Vec<UdpSocket>> = addresses.iter().map(UdpSocket::bind).collect();
        Ok(Self {
            name: name.to_owned(),
            listeners: listeners?,
            sockets: sockets?,
        })
    }

    /// Answers for ever.
    pub fn run(&self) {
        let name = self.name.as_str();
        thread::scope(|scope| {
            for listener in &self.listeners {
                scope.spawn(move || answer_connections(listener, name));
            }
            for socket in &self.sockets {
                scope.spawn(move || answer_datagrams(socket, name));
            }
        });
    }
}

fn answer_connections(listener: &TcpListener, name: &str) {
    for stream in listener.incoming() {
        match stream {
            Ok(mut stream) => {
                // A client that went away is no matter of the others.
                let _ = stream.set_write_timeout(Some(WRITE_TIMEOUT));
                let _ = stream.write_all(name.as_bytes());
            }
            Err(_) => thread::sleep(ERROR_PAUSE),
        }
    }
}

fn answer_datagrams(socket: &UdpSocket, name: &str) {
    let mut buffer = [0; 64];
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((length, client)) if buffer.get(..length) == Some(DATAGRAM) => {
                let _ = socket.send_to(name.as_bytes(), client);
            }
            Ok(_) => {}
            Err(_) => thread::sleep(ERROR_PAUSE),
        }
    }
}

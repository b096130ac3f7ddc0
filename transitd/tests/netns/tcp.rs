//! Servers that answer with a byte of their own, and their clients.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use crate::rig::in_namespace;

pub const ANSWER_TIMEOUT: Duration = Duration::from_millis(1500);

/// Runs a server that answers each byte with its own, and reports the clients that connect.
pub fn serve(namespace: &str, address: Ipv4Addr, port: u16, own: u8) -> Receiver<IpAddr> {
    serve_at(namespace, address.into(), port, own)
}

pub fn serve_at(namespace: &str, address: IpAddr, port: u16, own: u8) -> Receiver<IpAddr> {
    let listener = in_namespace(namespace, move || TcpListener::bind((address, port)).unwrap());
    let (sender, clients) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = sender.send(stream.peer_addr().unwrap().ip().to_canonical());
            std::thread::spawn(move || {
                while stream.read_exact(&mut [0]).is_ok() && stream.write_all(&[own]).is_ok() {}
            });
        }
    });
    clients
}

pub fn connect(namespace: &str, to: Ipv4Addr, port: u16) -> Result<TcpStream, ErrorKind> {
    connect_to(namespace, (to, port).into())
}

pub fn connect_to(namespace: &str, address: SocketAddr) -> Result<TcpStream, ErrorKind> {
    let stream = in_namespace(namespace, move || {
        TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)
    });
    let stream = stream.map_err(|error| error.kind())?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    Ok(stream)
}

/// Does what [`connect`] does, by packets with an option of IP: nothing but a no-operation (RFC 791 section 3.1).
#[allow(unsafe_code)]
pub fn connect_with_option(namespace: &str, to: Ipv4Addr, port: u16) -> Result<TcpStream, ErrorKind> {
    let option: [u8; 4] = [1; 4];
    let connected = in_namespace(namespace, move || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        // SAFETY: the pointer and the length are those of an array that lives during the call.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_IP,
                libc::IP_OPTIONS,
                option.as_ptr().cast(),
                option.len() as libc::socklen_t,
            )
        };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
        socket.connect_timeout(&SocketAddr::from((to, port)).into(), ANSWER_TIMEOUT)?;
        Ok(TcpStream::from(socket))
    });
    let stream = connected.map_err(|error: std::io::Error| error.kind())?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    Ok(stream)
}

pub fn ask(stream: &mut TcpStream) -> u8 {
    try_ask(stream).unwrap()
}

/// Does what [`ask`] does, on a connection that may be cut.
pub fn try_ask(stream: &mut TcpStream) -> std::io::Result<u8> {
    let mut answer = [0];
    stream.write_all(&[1])?;
    stream.read_exact(&mut answer)?;
    Ok(answer[0])
}

//! Traffic between pods by plain sockets: ping, datagrams, and bulk TCP whose bytes are compared.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::{
    socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, SockaddrIn6, recv, sendto,
        setsockopt, socket, sockopt::ReceiveTimeout,
    },
    time::{TimeVal, TimeValLike},
};
use thuban_cluster::wait::uninterrupted;
use thuban_testkit::packets::checksum;

use super::namespace::Namespace;

/// One end of an exchange: a namespace and an address in it.
#[derive(Clone, Copy)]
pub struct End<'a> {
    pub namespace: &'a Namespace,
    pub address: IpAddr,
}

const WAIT: Duration = Duration::from_secs(5);
/// The next port. Each exchange has a port of its own: a socket that was closed may live on for a moment in a process
/// that is being started.
static NEXT_PORT: AtomicU16 = AtomicU16::new(7600);

/// Pings once with a payload of `size` bytes and returns whether the same came back within a second.
pub fn ping(from: &Namespace, to: impl Into<IpAddr>, size: usize) -> Result<bool> {
    let to = to.into();
    let (family, protocol, request_type) = match to {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp, 8),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6, 128),
    };
    let socket = from.run(|| Ok(socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?))?;
    setsockopt(&socket, ReceiveTimeout, &TimeVal::milliseconds(100))?;
    let mut request = vec![request_type, 0, 0, 0, 0x74, 0x68, 0, 1];
    request.extend((0..size).map(|index| index as u8));
    // The kernel writes the checksum of ICMPv6, because it covers the addresses.
    if to.is_ipv4() {
        let sum = checksum(&request);
        request[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    let flags = MsgFlags::empty();
    let socket = socket.as_raw_fd();
    match to {
        IpAddr::V4(to) => sendto(
            socket,
            &request,
            &SockaddrIn::from(SocketAddrV4::new(to, 0)),
            flags,
        ),
        IpAddr::V6(to) => sendto(
            socket,
            &request,
            &SockaddrIn6::from(SocketAddrV6::new(to, 0, 0, 0)),
            flags,
        ),
    }?;
    let end = Instant::now() + Duration::from_secs(1);
    let mut buffer = vec![0; 65536];
    // An IPv4 answer begins with its IP header, without options.
    let header = if to.is_ipv4() { 20 } else { 0 };
    while Instant::now() < end {
        if let Ok(length) = recv(socket, &mut buffer, flags)
            && length == header + request.len()
            && buffer[header] == (if to.is_ipv4() { 0 } else { 129 })
            && buffer[header + 4..length] == request[4..]
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Sends a datagram and its echo back, from fresh sockets. Returns `Ok(false)` when no echo came.
pub fn echo_udp(from: End, to: End, size: usize) -> Result<bool> {
    let port = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
    echo_udp_by(from, to, port, SocketAddr::from((to.address, port)), size)
}

/// Does the same with a server at this port, which the client knows as `seen`: only answers from there count.
pub fn echo_udp_by(from: End, to: End, port: u16, seen: SocketAddr, size: usize) -> Result<bool> {
    let server = when_free(|| to.namespace.run(|| Ok(UdpSocket::bind((to.address, port))?)))?;
    server.set_read_timeout(Some(WAIT))?;
    let client = from.namespace.run(|| Ok(UdpSocket::bind((from.address, 0))?))?;
    client.set_read_timeout(Some(Duration::from_secs(2)))?;
    from.namespace.run(|| Ok(client.connect(seen)?))?;
    let payload: Vec<u8> = (0..size).map(|index| index as u8 ^ 0x5a).collect();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = vec![0; 65536];
            if let Ok((length, peer)) = uninterrupted(|| server.recv_from(&mut buffer)) {
                let _ = server.send_to(&buffer[..length], peer);
            }
        });
        client.send(&payload)?;
        let mut buffer = vec![0; 65536];
        let answer =
            uninterrupted(|| client.recv(&mut buffer)).is_ok_and(|length| buffer[..length] == payload[..]);
        if !answer {
            // This frees the server's thread.
            let _ = to.namespace.run(|| {
                UdpSocket::bind((to.address, 0))?.send_to(&[0], (to.address, port))?;
                Ok(())
            });
        }
        Ok(answer)
    })
}

/// Binds, and tries again for a while: the port's last socket may live on, see [`NEXT_PORT`].
fn when_free<T>(bind: impl Fn() -> Result<T>) -> Result<T> {
    let end = Instant::now() + WAIT;
    loop {
        match bind() {
            Err(_) if Instant::now() < end => thread::sleep(Duration::from_millis(10)),
            bound => return bound,
        }
    }
}

/// Sends `bytes` in one direction and as many back over one connection, compares every byte, and returns how long it
/// took.
pub fn transfer(from: End, to: End, bytes: usize) -> Result<Duration> {
    let port = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
    transfer_by(from, to, port, SocketAddr::from((to.address, port)), bytes)
}

/// Does the same with a server at this port, which the client knows as `seen`.
pub fn transfer_by(from: End, to: End, port: u16, seen: SocketAddr, bytes: usize) -> Result<Duration> {
    let listener = when_free(|| to.namespace.run(|| Ok(TcpListener::bind((to.address, port))?)))?;
    let start = Instant::now();
    thread::scope(|scope| {
        let server = scope.spawn(|| -> Result<()> {
            let (mut stream, _) = listener.accept()?;
            stream.set_read_timeout(Some(WAIT))?;
            receive(&mut stream, bytes, 1).context("client to server")?;
            send(&mut stream, bytes, 2)?;
            Ok(())
        });
        let client = || -> Result<()> {
            let mut stream = from
                .namespace
                .run(|| Ok(TcpStream::connect_timeout(&seen, WAIT)?))?;
            stream.set_read_timeout(Some(WAIT))?;
            stream.set_write_timeout(Some(WAIT))?;
            send(&mut stream, bytes, 1)?;
            receive(&mut stream, bytes, 2).context("server to client")
        };
        if let Err(error) = client() {
            // This frees a server that still waits in accept.
            let _ = to.namespace.run(|| Ok(TcpStream::connect((to.address, port))?));
            let _ = server.join();
            return Err(error);
        }
        server.join().map_err(|_| anyhow!("the server panicked"))?
    })?;
    Ok(start.elapsed())
}

/// Returns one period of the pattern that transfers carry: longer than any segment and no divisor of one.
fn pattern(seed: u32) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(99_991).collect()
}

fn send(stream: &mut TcpStream, bytes: usize, seed: u32) -> Result<()> {
    let pattern = pattern(seed);
    let mut left = bytes;
    while left > 0 {
        let length = left.min(pattern.len());
        stream.write_all(&pattern[..length])?;
        left -= length;
    }
    Ok(())
}

fn receive(stream: &mut TcpStream, bytes: usize, seed: u32) -> Result<()> {
    let pattern = pattern(seed);
    let mut buffer = vec![0; pattern.len()];
    let mut offset = 0;
    while offset < bytes {
        // The chunk never passes the end of a period.
        let at = offset % pattern.len();
        let length = uninterrupted(|| stream.read(&mut buffer[at..]))
            .with_context(|| format!("after {offset} bytes"))?;
        ensure!(
            length != 0,
            "the connection ended after {offset} of {bytes} bytes"
        );
        ensure!(
            buffer[at..at + length] == pattern[at..at + length],
            "bytes differ after {offset}"
        );
        offset += length;
    }
    Ok(())
}

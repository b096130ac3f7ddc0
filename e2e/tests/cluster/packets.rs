//! Packets made by hand: echo requests, datagrams with a forged source, Geneve frames; and a reader of captures.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, recv, sendto, setsockopt, socket,
    sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use thuban_cluster::wait::uninterrupted;
pub use thuban_testkit::packets::send_raw;
use thuban_testkit::packets::{Tunnel, checksum, datagram, ethernet};

use crate::support::Pod;

fn raw_icmp() -> Result<OwnedFd> {
    let fd = socket(
        AddressFamily::Inet,
        SockType::Raw,
        SockFlag::empty(),
        SockProtocol::Icmp,
    )?;
    setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::milliseconds(200))?;
    Ok(fd)
}

/// Sends echo requests until one is answered or patience ends.
pub fn ping(address: Ipv4Addr, patience: Duration) -> Result<()> {
    let fd = raw_icmp()?;
    let identifier =
        (std::process::id() as u16) ^ u16::from_be_bytes([address.octets()[2], address.octets()[3]]);
    let mut request = vec![8, 0, 0, 0];
    request.extend(identifier.to_be_bytes());
    request.extend([0, 1]);
    request.extend([0x5a; 32]);
    let sum = checksum(&request).to_be_bytes();
    request[2..4].copy_from_slice(&sum);
    let end = Instant::now() + patience;
    let mut buffer = [0; 256];
    while Instant::now() < end {
        let target = SockaddrIn::from(SocketAddrV4::new(address, 0));
        sendto(fd.as_raw_fd(), &request, &target, MsgFlags::empty()).context("send echo")?;
        while let Ok(length) = recv(fd.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            let header = usize::from(buffer[0] & 0xf) * 4;
            let reply = length >= header + 8
                && buffer[12..16] == address.octets()
                && buffer[header] == 0
                && buffer[header + 4..header + 6] == identifier.to_be_bytes();
            if reply {
                return Ok(());
            }
        }
    }
    bail!("no echo reply from {address}")
}

/// Returns one UDP datagram as an IPv4 packet with any source.
pub fn udp_packet(source: Ipv4Addr, destination: Ipv4Addr, port: u16, payload: &[u8]) -> Vec<u8> {
    let (from, to) = (
        SocketAddrV4::new(source, 40_000),
        SocketAddrV4::new(destination, port),
    );
    datagram(from, to, payload)
}

/// Returns Geneve of `vni` around an inner IPv4 packet.
pub fn geneve_packet(source: Ipv4Addr, destination: Ipv4Addr, vni: u32, inner: &[u8]) -> Vec<u8> {
    Tunnel::new(source, destination, vni).packet(&ethernet(inner))
}

/// A Geneve frame of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Captured {
    pub outer_source: Ipv4Addr,
    pub outer_destination: Ipv4Addr,
    pub vni: u32,
    pub inner_source: Ipv4Addr,
    pub inner_destination: Ipv4Addr,
}

/// Returns the Geneve frames of a pcap file (as tcpdump writes it: little endian, Ethernet).
pub fn read_capture(bytes: &[u8]) -> Vec<Captured> {
    let mut frames = Vec::new();
    let mut rest = bytes.get(24..).unwrap_or_default();
    while rest.len() >= 16 {
        let length = u32::from_le_bytes([rest[8], rest[9], rest[10], rest[11]]) as usize;
        let Some(frame) = rest.get(16..16 + length) else {
            break;
        };
        frames.extend(parse(frame));
        rest = &rest[16 + length..];
    }
    frames
}

fn parse(frame: &[u8]) -> Option<Captured> {
    let address = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(frame.get(at..at + 4)?).ok()?));
    let geneve =
        frame.get(12..14)? == [8, 0] && frame.get(23)? == &17 && frame.get(36..38)? == 6081_u16.to_be_bytes();
    let inner_ipv4 = frame.get(62..64)? == [8, 0];
    (geneve && inner_ipv4).then_some(())?;
    Some(Captured {
        outer_source: address(26)?,
        outer_destination: address(30)?,
        vni: u32::from_be_bytes([0, *frame.get(46)?, *frame.get(47)?, *frame.get(48)?]),
        inner_source: address(76)?,
        inner_destination: address(80)?,
    })
}

/// Whether a datagram with this payload arrives at `port` of the pod while `send` runs.
pub fn arrives(receiver: &Pod, port: u16, payload: &[u8], send: impl Fn() -> Result<()>) -> Result<bool> {
    let socket = receiver.inside(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?))?;
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    let mut buffer = [0; 2048];
    for _ in 0..4 {
        send()?;
        while let Ok(length) = uninterrupted(|| socket.recv(&mut buffer)) {
            if &buffer[..length] == payload {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

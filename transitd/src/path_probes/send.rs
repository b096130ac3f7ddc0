//! Sends the packet of a probe. Runs on a thread in the pod's network namespace.
//!
//! Untrusted: all that answers. Nothing of an answer is read but that there is one.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, socket};
use thuban_common::packet::ipv4::{TCP, UDP};
use thuban_proto::transit::ProbeAnswer;
use tokio::net::{TcpSocket, UdpSocket};
use tokio::time::timeout;

use super::flow::Flow;

/// How long an answer may take. TCP sends its packet again once in this time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The types of an echo's request: RFC 792, and RFC 4443, section 4.1.
const ECHO_V4: u8 = 8;
const ECHO_V6: u8 = 128;

/// Sends the packet, and waits for the answer.
pub async fn send(flow: Flow) -> ProbeAnswer {
    let (from, to) = flow.ends();
    let sent = match flow.protocol {
        TCP => connect(from, to).await,
        UDP => ask(from, to).await,
        _ => echo(from, to).await,
    };
    sent.unwrap_or_else(|error| answer(&error))
}

async fn connect(from: SocketAddr, to: SocketAddr) -> io::Result<ProbeAnswer> {
    let socket = if to.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.bind(from)?;
    let Ok(connected) = timeout(ANSWER_TIMEOUT, socket.connect(to)).await else {
        return Ok(ProbeAnswer::Silent);
    };
    // A reset ends the connection, so that the port is free at once.
    connected?.set_zero_linger()?;
    Ok(ProbeAnswer::Answered)
}

async fn ask(from: SocketAddr, to: SocketAddr) -> io::Result<ProbeAnswer> {
    let socket = UdpSocket::bind(from).await?;
    socket.connect(to).await?;
    socket.send(&[]).await?;
    receive(&socket).await
}

/// Sends an echo by a socket that needs no right to send raw packets; the kernel writes identifier and checksum.
async fn echo(from: SocketAddr, to: SocketAddr) -> io::Result<ProbeAnswer> {
    let (family, protocol, kind) = if to.is_ipv4() {
        (AddressFamily::Inet, SockProtocol::Icmp, ECHO_V4)
    } else {
        (AddressFamily::Inet6, SockProtocol::IcmpV6, ECHO_V6)
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let Ok(socket) = socket(family, SockType::Datagram, flags, protocol) else {
        // The namespace's net.ipv4.ping_group_range does not have root's group.
        return Ok(ProbeAnswer::Failed);
    };
    // From another address of the pod, droplets would not know the packet, and another network may carry it.
    bind(socket.as_raw_fd(), &SockaddrStorage::from(from))?;
    let socket = UdpSocket::from_std(std::net::UdpSocket::from(socket))?;
    socket.connect(to).await?;
    socket.send(&[kind, 0, 0, 0, 0, 0, 0, 1]).await?;
    receive(&socket).await
}

async fn receive(socket: &UdpSocket) -> io::Result<ProbeAnswer> {
    let mut buffer = [0; 1];
    match timeout(ANSWER_TIMEOUT, socket.recv(&mut buffer)).await {
        Ok(received) => received.map(|_| ProbeAnswer::Answered),
        Err(_) => Ok(ProbeAnswer::Silent),
    }
}

fn answer(error: &io::Error) -> ProbeAnswer {
    match error.kind() {
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => ProbeAnswer::Refused,
        // ICMPv6's "administratively prohibited" comes as a lack of permission.
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::PermissionDenied => {
            ProbeAnswer::Unreachable
        }
        ErrorKind::TimedOut => ProbeAnswer::Silent,
        _ => ProbeAnswer::Failed,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use thuban_common::packet::ipv4::{ICMP, mapped};
    use thuban_proto::transit::Probe;

    use super::*;

    async fn sent(protocol: u8, port: u16) -> ProbeAnswer {
        // A port that is free at this moment.
        let free = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let source_port = free.local_addr().unwrap().port();
        drop(free);
        let loopback = mapped([127, 0, 0, 1]).to_vec();
        let asked = Probe {
            source: loopback.clone(),
            destination: loopback,
            protocol: protocol.into(),
            source_port: source_port.into(),
            port: port.into(),
            ..Probe::default()
        };
        send(Flow::read(&asked).unwrap()).await
    }

    #[tokio::test]
    async fn a_port_answers_or_refuses() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(sent(TCP, port).await, ProbeAnswer::Answered);
        drop(listener);
        assert_eq!(sent(TCP, port).await, ProbeAnswer::Refused);
    }

    #[tokio::test]
    async fn a_datagram_is_answered_refused_or_nothing() {
        let server = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = server.local_addr().unwrap().port();
        let answering = server.try_clone().unwrap();
        let answered = std::thread::spawn(move || {
            let (length, client) = answering.recv_from(&mut [0; 8]).unwrap();
            answering.send_to(b"here", client).unwrap();
            length
        });
        assert_eq!(sent(UDP, port).await, ProbeAnswer::Answered);
        assert_eq!(answered.join().unwrap(), 0, "the datagram is empty");
        assert_eq!(sent(UDP, port).await, ProbeAnswer::Silent);
        drop(server);
        assert_eq!(sent(UDP, port).await, ProbeAnswer::Refused);
    }

    #[tokio::test]
    async fn an_echo_leaves_by_the_asked_address_alone() {
        let asked = Probe {
            // Nobody has an address of TEST-NET-1 here (RFC 5737).
            source: mapped([192, 0, 2, 1]).to_vec(),
            destination: mapped([127, 0, 0, 1]).to_vec(),
            protocol: ICMP.into(),
            ..Probe::default()
        };
        let flow = Flow::read(&asked).unwrap();
        assert_eq!(send(flow).await, ProbeAnswer::Failed);
    }
}

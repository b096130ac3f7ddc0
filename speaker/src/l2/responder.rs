//! The thread that answers ARP and neighbour discovery at the uplink, by packet sockets.
//!
//! The node's stack never learns of the addresses: fronts and the rules of transitd take the packets for them, as they
//! do for routes of BGP. Each frame is sent only after a look at the deadline. If the thread can't go on, the process
//! ends: no address stays with a node that does not answer for it.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::bind;
use socket2::{Domain, Protocol, SockFilter, Socket, Type};
use thiserror::Error;
use tracing::{debug, info, warn};

use super::Shared;
use super::frames::{self, ARP, IPV6};
use super::link::{Link, LinkError, Subnets};
use crate::deadlines::now;

/// How often neighbours are told what is due, in milliseconds.
const TICK: u8 = 50;
/// How often the uplink is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// The most frames that are read from a socket before the other one has its turn.
const FRAMES: usize = 64;
/// Bytes that are read of a frame.
const FRAME: usize = 256;
/// The place at which a filter finds what is known of a frame beside its bytes (SKF_AD_OFF).
const BESIDE: u32 = 0xffff_f000;
const PACKET_TYPE: u32 = BESIDE + 4;
const HAS_VLAN_TAG: u32 = BESIDE + 48;
/// A frame for another host.
const OTHER_HOST: u32 = 3;
/// Codes of filters.
const LOAD_BYTE: u16 = 0x30;
const LOAD_HALF: u16 = 0x28;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

#[derive(Debug, Error)]
pub enum ResponderError {
    #[error("opening a packet socket (CAP_NET_RAW): {0}")]
    Open(#[source] io::Error),
    #[error("binding a packet socket to {link}: {source}")]
    Bind { link: String, source: Errno },
    #[error("waiting for frames: {0}")]
    Wait(#[source] Errno),
    #[error("reading a frame: {0}")]
    Read(#[source] io::Error),
    #[error("sending a frame: {0}")]
    Send(#[source] io::Error),
    #[error("{0} is another interface now, or has another MAC: the process starts again")]
    Changed(String),
}

/// Accepts frames for this host or for all, without a VLAN tag, that have these values at these bytes.
fn filter(values: &[(u16, u32, u32)]) -> Vec<SockFilter> {
    // Jumps count instructions up to the last one, which refuses.
    let after = |left: usize| (left * 2 + 1) as u8;
    let count = values.len();
    let mut program = vec![
        SockFilter::new(LOAD_BYTE, 0, 0, PACKET_TYPE),
        SockFilter::new(JUMP_IF_EQUAL, after(count + 1), 0, OTHER_HOST),
        SockFilter::new(LOAD_BYTE, 0, 0, HAS_VLAN_TAG),
        SockFilter::new(JUMP_IF_EQUAL, 0, after(count), 0),
    ];
    for (index, (load, at, value)) in values.iter().enumerate() {
        program.push(SockFilter::new(*load, 0, 0, *at));
        program.push(SockFilter::new(
            JUMP_IF_EQUAL,
            0,
            after(count - index - 1),
            *value,
        ));
    }
    program.push(SockFilter::new(RETURN, 0, 0, u32::MAX));
    program.push(SockFilter::new(RETURN, 0, 0, 0));
    program
}

/// Opens a socket that gets frames of a kind at the uplink.
fn open(link: &Link, kind: u16, values: &[(u16, u32, u32)]) -> Result<Socket, ResponderError> {
    let protocol = Protocol::from(i32::from(kind.to_be()));
    let opened = Socket::new(Domain::PACKET, Type::RAW, Some(protocol)).and_then(|socket| {
        // Until it is bound, frames of all interfaces would come.
        socket.attach_filter(&[SockFilter::new(RETURN, 0, 0, 0)])?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    });
    let socket = opened.map_err(ResponderError::Open)?;
    bind(socket.as_raw_fd(), &link.address).map_err(|source| ResponderError::Bind {
        link: link.name.clone(),
        source,
    })?;
    while (&socket).read(&mut [0; FRAME]).is_ok() {}
    socket
        .attach_filter(&filter(values))
        .map_err(ResponderError::Open)?;
    Ok(socket)
}

/// The groups that neighbours ask in, joined as long as an address needs them.
#[derive(Debug, Default)]
struct Groups {
    /// Joins them. The kernel tells the NIC and switches.
    socket: Option<UdpSocket>,
    joined: BTreeSet<Ipv6Addr>,
}

impl Groups {
    fn sync(&mut self, wanted: &BTreeSet<Ipv6Addr>, index: u32) -> io::Result<()> {
        if self.joined == *wanted {
            return Ok(());
        }
        let socket = match self.socket.take() {
            Some(socket) => socket,
            None => UdpSocket::bind((Ipv6Addr::LOCALHOST, 0))?,
        };
        let socket = self.socket.insert(socket);
        for group in self.joined.difference(wanted) {
            // The interface may have lost it.
            let _ = socket.leave_multicast_v6(group, index);
        }
        self.joined.retain(|group| wanted.contains(group));
        let mut result = Ok(());
        for group in wanted {
            if !self.joined.contains(group) {
                match socket.join_multicast_v6(group, index) {
                    Ok(()) => drop(self.joined.insert(*group)),
                    Err(error) => result = Err(error),
                }
            }
        }
        result
    }
}

#[derive(Debug)]
pub struct Responder {
    link: Link,
    arp: Socket,
    discovery: Socket,
    groups: Groups,
    /// Whether the last attempt to join groups failed.
    is_failing: bool,
    node_ips: Vec<IpAddr>,
    /// When the uplink is looked at next, and whether the last look found none.
    next_look: Duration,
    is_lost: bool,
    shared: Arc<Shared>,
}

impl Responder {
    pub fn new(link: Link, node_ips: Vec<IpAddr>, shared: Arc<Shared>) -> Result<Self, ResponderError> {
        // ARP's operation is a request.
        let arp = open(&link, ARP, &[(LOAD_HALF, 20, 1)])?;
        // The next header is ICMPv6, and its type a solicitation.
        let discovery = open(&link, IPV6, &[(LOAD_BYTE, 20, 58), (LOAD_BYTE, 54, 135)])?;
        Ok(Self {
            link,
            arp,
            discovery,
            groups: Groups::default(),
            is_failing: false,
            node_ips,
            next_look: Duration::ZERO,
            is_lost: false,
            shared,
        })
    }

    /// Answers until that is impossible.
    pub fn run(mut self) -> ResponderError {
        loop {
            if let Err(error) = self.pass() {
                return error;
            }
        }
    }

    fn pass(&mut self) -> Result<(), ResponderError> {
        self.shared.beat(now());
        self.look()?;
        self.join();
        let due = self.shared.owned().due(now());
        for (address, is_new) in due {
            if is_new {
                info!(%address, link = self.link.name, "neighbours are told that the address is here");
            }
            let socket = if address.is_ipv4() {
                &self.arp
            } else {
                &self.discovery
            };
            for frame in frames::announcements(address, self.link.mac) {
                if self.shared.owned().answers(address, now()) {
                    send(socket, &frame)?;
                }
            }
        }
        let mut sockets = [
            PollFd::new(self.arp.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.discovery.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut sockets, TICK) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(ResponderError::Wait(error)),
        }
        self.answer(&self.arp)?;
        self.answer(&self.discovery)
    }

    /// Answers the requests that a socket has.
    fn answer(&self, mut socket: &Socket) -> Result<(), ResponderError> {
        let mut buffer = [0; FRAME];
        for _ in 0..FRAMES {
            let length = match socket.read(&mut buffer) {
                Ok(length) => length,
                Err(error) if is_passing(&error) => return Ok(()),
                Err(error) => return Err(ResponderError::Read(error)),
            };
            let request = buffer.get(..length).and_then(frames::request);
            if let Some(request) = request
                && let Some(frame) = frames::reply(&request, self.link.mac)
                && self.shared.owned().answers(request.target, now())
            {
                send(socket, &frame)?;
            }
        }
        Ok(())
    }

    /// Looks at the uplink now and then. Subnets may change. Sockets and frames are of the interface of the beginning.
    fn look(&mut self) -> Result<(), ResponderError> {
        if now() < self.next_look {
            return Ok(());
        }
        self.next_look = now().saturating_add(LOOK);
        let subnets = match Link::find(&self.node_ips) {
            Ok(found) if found.is_same(&self.link) => found.subnets,
            Err(error @ LinkError::NoUplink(_)) => {
                if !self.is_lost {
                    warn!(%error, "the node gets no addresses of L2 meanwhile");
                }
                self.is_lost = true;
                *self.shared.subnets() = Subnets::default();
                return Ok(());
            }
            Ok(_) | Err(LinkError::NoEthernet(_)) => {
                return Err(ResponderError::Changed(self.link.name.clone()));
            }
            Err(error @ LinkError::List(_)) => {
                debug!(%error, "the uplink is looked at later");
                return Ok(());
            }
        };
        self.is_lost = false;
        *self.shared.subnets() = subnets;
        Ok(())
    }

    /// Joins the groups of the IPv6 addresses. What can't be joined is tried again.
    fn join(&mut self) {
        let wanted = self.shared.owned().v6().map(frames::solicited_group).collect();
        let index = u32::try_from(self.link.address.ifindex()).unwrap_or_default();
        let joined = self.groups.sync(&wanted, index);
        if let Err(error) = &joined
            && !self.is_failing
        {
            warn!(%error, "neighbours' questions for IPv6 addresses may not arrive, trying again");
        }
        self.is_failing = joined.is_err();
    }
}

/// Whether a socket can be used later: there is no frame or no room, or the link is down. Then frames are lost, as a
/// link may lose them.
fn is_passing(error: &io::Error) -> bool {
    let kinds = [io::ErrorKind::WouldBlock, io::ErrorKind::NetworkDown];
    kinds.contains(&error.kind()) || error.raw_os_error() == Some(Errno::ENOBUFS as i32)
}

/// Sends a frame. What can't be sent now is lost.
fn send(socket: &Socket, frame: &[u8]) -> Result<(), ResponderError> {
    match socket.send(frame) {
        Err(error) if !is_passing(&error) => Err(ResponderError::Send(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_is_down_only_loses_frames() {
        let is_passing = |errno: Errno| is_passing(&io::Error::from_raw_os_error(errno as i32));
        assert!(
            [Errno::EAGAIN, Errno::ENETDOWN, Errno::ENOBUFS]
                .into_iter()
                .all(is_passing)
        );
        assert!(
            ![Errno::ENODEV, Errno::ENXIO, Errno::EBADF]
                .into_iter()
                .any(is_passing)
        );
    }
}

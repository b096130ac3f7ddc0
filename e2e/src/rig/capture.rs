//! Frames on a wire: captured and injected by packet sockets.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::{
    socket::{
        AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrLike, bind, recv, send,
        setsockopt, socket, sockopt::ReceiveTimeout,
    },
    time::{TimeVal, TimeValLike},
};
use thuban_cluster::wait::uninterrupted;

use super::namespace::Namespace;

/// A packet socket bound to one interface.
pub struct Wire {
    socket: OwnedFd,
}

impl Wire {
    pub fn open(namespace: &Namespace, interface: &str) -> Result<Self> {
        let index = namespace.interface(interface)?;
        let socket = namespace.run(|| {
            let socket = socket(
                AddressFamily::Packet,
                SockType::Raw,
                SockFlag::SOCK_CLOEXEC,
                SockProtocol::EthAll,
            )?;
            bind(socket.as_raw_fd(), &link_address(index)?).context("binding a packet socket")?;
            Ok(socket)
        })?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::milliseconds(50))?;
        Ok(Self { socket })
    }

    /// Does what [`Self::open`] does, for [`Self::inject_unfinished`] alone.
    pub fn open_for_unfinished(namespace: &Namespace, interface: &str) -> Result<Self> {
        let wire = Self::open(namespace, interface)?;
        let on: libc::c_int = 1;
        // SAFETY: the option's value is an int of the length given.
        #[allow(unsafe_code)]
        let result = unsafe {
            libc::setsockopt(
                wire.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_VNET_HDR,
                (&raw const on).cast(),
                size_of_val(&on) as libc::socklen_t,
            )
        };
        Errno::result(result).context("PACKET_VNET_HDR")?;
        Ok(wire)
    }

    /// Puts a frame on the wire whose checksum the NIC is to write: `offset` bytes behind `start`, where the sum
    /// begins.
    pub fn inject_unfinished(&self, frame: &[u8], start: u16, offset: u16) -> Result<()> {
        // `struct virtio_net_hdr` of linux/virtio_net.h: needs a checksum, no segments.
        let mut whole = vec![1, 0, 0, 0, 0, 0];
        whole.extend(start.to_ne_bytes());
        whole.extend(offset.to_ne_bytes());
        whole.extend(frame);
        self.inject(&whole)
    }

    /// Returns the next frame that passes within 50 ms.
    pub fn next(&self) -> Option<Vec<u8>> {
        let mut buffer = vec![0; 70000];
        let descriptor = self.socket.as_raw_fd();
        let length = uninterrupted(|| Ok(recv(descriptor, &mut buffer, MsgFlags::empty())?)).ok()?;
        buffer.truncate(length);
        Some(buffer)
    }

    /// Returns the frames that pass within the time and that the filter wants.
    pub fn collect(&self, time: Duration, mut wanted: impl FnMut(&[u8]) -> bool) -> Vec<Vec<u8>> {
        let end = Instant::now() + time;
        let mut frames = Vec::new();
        let mut buffer = vec![0; 70000];
        while Instant::now() < end {
            if let Ok(length) = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())
                && wanted(&buffer[..length])
            {
                frames.push(buffer[..length].to_vec());
            }
        }
        frames
    }

    /// Puts a frame on the wire.
    pub fn inject(&self, frame: &[u8]) -> Result<()> {
        send(self.socket.as_raw_fd(), frame, MsgFlags::empty()).context("injecting a frame")?;
        Ok(())
    }
}

fn link_address(index: u32) -> Result<LinkAddr> {
    let raw = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
        sll_ifindex: index.cast_signed(),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: a whole sockaddr_ll of the length given.
    #[allow(unsafe_code)]
    let address = unsafe { LinkAddr::from_raw((&raw const raw).cast(), Some(size_of_val(&raw) as u32)) };
    address.context("packet address")
}

/// Returns the VNI of a Geneve frame without outer IP options.
pub fn vni(frame: &[u8]) -> Option<u32> {
    let is_geneve =
        frame.len() >= 50 && frame[12..14] == [8, 0] && frame[23] == 17 && frame[36..38] == [0x17, 0xc1];
    is_geneve.then(|| u32::from_be_bytes([0, frame[46], frame[47], frame[48]]))
}

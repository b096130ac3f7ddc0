//! Hears of changes of nftables by netlink (include/uapi/linux/netfilter/nfnetlink.h), whoever makes them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};
use tokio::io::unix::AsyncFd;

/// NFNLGRP_NFTABLES, as a bit.
const GROUP: u32 = 1 << (7 - 1);

#[derive(Debug)]
pub struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    pub fn new() -> io::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkNetFilter,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, GROUP))?;
        Ok(Self(AsyncFd::new(socket)?))
    }

    /// Waits for a change, and takes all that is known of by then.
    pub async fn changed(&self) -> io::Result<()> {
        let mut ready = self.0.readable().await?;
        let mut buffer = [0; 8192];
        loop {
            match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                // More than the socket holds: that it changed is all that counts.
                Ok(_) | Err(Errno::ENOBUFS | Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    ready.clear_ready();
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

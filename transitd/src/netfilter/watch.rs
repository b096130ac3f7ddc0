//! Receives notices of changes of nftables by netlink (include/uapi/linux/netfilter/nfnetlink.h), no matter who makes
//! them.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, NetlinkAddr, bind, recv};
use tokio::sync::Notify;

use super::netlink;

/// NFNLGRP_NFTABLES, as a bit.
const GROUP: u32 = 1 << (7 - 1);

/// Returns a [`Notify`] that is notified of each change from now on, by a thread that ends with the process.
pub fn changes() -> io::Result<Arc<Notify>> {
    let socket = netlink()?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, GROUP))?;
    let changed = Arc::new(Notify::new());
    let notify = Arc::clone(&changed);
    thread::Builder::new().name("nftables".into()).spawn(move || {
        let mut buffer = [0; 8192];
        loop {
            match recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                // There may be more notices than the socket holds. It counts only that something changed.
                Ok(_) | Err(Errno::ENOBUFS) => notify.notify_one(),
                Err(Errno::EINTR) => {}
                Err(_) => return,
            }
        }
    })?;
    Ok(changed)
}

//! Ends what conntrack remembers of an attachment, by one request of its netlink protocol
//! (include/uapi/linux/netfilter/nfnetlink_conntrack.h).

use std::io;
use std::os::fd::AsRawFd;

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};
use thuban_common::tables::{MARK_EGRESS, MARK_EGRESS_HOST, mark_of};

/// NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE.
const DELETE: u16 = 1 << 8 | 2;
const CTA_MARK: u16 = 8;
const CTA_MARK_MASK: u16 = 21;
/// Of nlmsghdr and of nfgenmsg behind it.
const HEADERS: usize = 16 + 4;

/// Removes every connection that came from the attachment with this interface at the host's end. Later answers to them find
/// nobody.
pub fn forget(ifindex: u32) -> io::Result<()> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?;
    // The one bit in which the two kinds differ is left out.
    let mask = !(MARK_EGRESS ^ MARK_EGRESS_HOST);
    let request = request(mark_of(ifindex, MARK_EGRESS) & mask, mask);
    sendto(
        socket.as_raw_fd(),
        &request,
        &NetlinkAddr::new(0, 0),
        MsgFlags::empty(),
    )?;
    let mut answer = [0; 256];
    let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    // An nlmsghdr, and in it an error number, negative or 0.
    let code = answer.get(16..20).filter(|_| length >= 20);
    let code = code.and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
    match code.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        // No entry has the mark.
        Some(code) if -code == libc::ENOENT => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(-code)),
        None => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
    }
}

fn request(mark: u32, mask: u32) -> Vec<u8> {
    let attributes = [(CTA_MARK, mark), (CTA_MARK_MASK, mask)];
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    let length = (HEADERS + attributes.len() * 8) as u32;
    let mut request = Vec::with_capacity(length as usize);
    request.extend(length.to_ne_bytes());
    request.extend(DELETE.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    // Sequence and port; then any family, version 0, no resource.
    request.extend([0; 8]);
    request.extend([0; 4]);
    for (kind, value) in attributes {
        request.extend(8_u16.to_ne_bytes());
        request.extend(kind.to_ne_bytes());
        request.extend(value.to_be_bytes());
    }
    request
}

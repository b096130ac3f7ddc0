//! Ends what conntrack remembers of an attachment, by one request of its netlink protocol
//! (include/uapi/linux/netfilter/nfnetlink_conntrack.h).

use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};
use thuban_common::tables::{MARK_EGRESS, MARK_EGRESS_HOST, mark_of};

/// NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE.
const DELETE: u16 = 1 << 8 | 2;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_MARK: u16 = 8;
const CTA_MARK_MASK: u16 = 21;
const CTA_FILTER: u16 = 25;
/// In CTA_TUPLE_REPLY.
const CTA_TUPLE_IP: u16 = 1;
/// In CTA_TUPLE_IP.
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V6_SRC: u16 = 3;
/// In CTA_FILTER.
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
/// NLA_F_NESTED.
const NESTED: u16 = 1 << 15;
/// Of nlmsghdr and of nfgenmsg behind it.
const HEADERS: usize = 16 + 4;

/// `CTA_FILTER_F_CTA_IP_SRC`.
const BY_SOURCE: u32 = 1;

/// Removes every connection that came from the attachment with this interface at the host's end. Later answers to them find
/// nobody.
pub fn forget(ifindex: u32) -> io::Result<()> {
    // The one bit in which the two kinds differ is left out.
    let mask = !(MARK_EGRESS ^ MARK_EGRESS_HOST);
    let mark = (mark_of(ifindex, MARK_EGRESS) & mask).to_be_bytes();
    let attributes = [
        attribute(CTA_MARK, &mark),
        attribute(CTA_MARK_MASK, &mask.to_be_bytes()),
    ];
    ask(libc::AF_UNSPEC as u8, &attributes.concat())
}

/// Removes every connection that an endpoint with this address answers: what came to a port of the node and was led there.
/// Who has the address next would get the rest of it.
pub fn forget_answered_by(address: IpAddr) -> io::Result<()> {
    let (family, kind, bytes) = match address {
        IpAddr::V4(v4) => (libc::AF_INET, CTA_IP_V4_SRC, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6, CTA_IP_V6_SRC, v6.octets().to_vec()),
    };
    let source = attribute(CTA_TUPLE_IP | NESTED, &attribute(kind, &bytes));
    let flags = attribute(CTA_FILTER_REPLY_FLAGS, &BY_SOURCE.to_ne_bytes());
    let attributes = [
        attribute(CTA_TUPLE_REPLY | NESTED, &source),
        attribute(CTA_FILTER | NESTED, &flags),
    ];
    ask(family as u8, &attributes.concat())
}

/// Sends a request to delete what attributes describe, and waits for its answer.
fn ask(family: u8, attributes: &[u8]) -> io::Result<()> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?;
    sendto(
        socket.as_raw_fd(),
        &request(family, attributes),
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
        // There is none.
        Some(code) if -code == libc::ENOENT => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(-code)),
        None => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
    }
}

fn request(family: u8, attributes: &[u8]) -> Vec<u8> {
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    let length = (HEADERS + attributes.len()) as u32;
    let mut request = Vec::with_capacity(length as usize);
    request.extend(length.to_ne_bytes());
    request.extend(DELETE.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    // Sequence and port.
    request.extend([0; 8]);
    // Version 0, no resource.
    request.extend([family, 0, 0, 0]);
    request.extend(attributes);
    request
}

/// An nlattr, padded.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut attribute = Vec::with_capacity(value.len() + 4);
    attribute.extend((value.len() as u16 + 4).to_ne_bytes());
    attribute.extend(kind.to_ne_bytes());
    attribute.extend(value);
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    attribute
}

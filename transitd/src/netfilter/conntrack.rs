//! Removes connections of an attachment from conntrack, by requests of conntrack's netlink protocol
//! (include/uapi/linux/netfilter/nfnetlink_conntrack.h).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;

use nix::sys::socket::{MsgFlags, NetlinkAddr, recv, sendto};
use thuban_common::{
    host_stack::{MARK_EGRESS, MARK_EGRESS_HOST, mark_of},
    packet::ipv4::UDP,
};

use super::netlink;

/// NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET.
const GET: u16 = 1 << 8 | 1;
/// NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE.
const DELETE: u16 = 1 << 8 | 2;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_MARK: u16 = 8;
const CTA_MARK_MASK: u16 = 21;
const CTA_FILTER: u16 = 25;
/// Attribute in CTA_TUPLE_REPLY.
const CTA_TUPLE_IP: u16 = 1;
/// Attribute in CTA_TUPLE_IP.
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V6_SRC: u16 = 3;
/// Attribute in CTA_FILTER.
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
/// NLA_F_NESTED.
const NESTED: u16 = 1 << 15;
/// Bytes of nlmsghdr and of nfgenmsg behind it.
const HEADERS: usize = 16 + 4;

/// Attribute in CTA_TUPLE_REPLY.
const CTA_TUPLE_PROTO: u16 = 2;
/// Attribute in CTA_TUPLE_PROTO.
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
/// `CTA_FILTER_F_CTA_IP_SRC`.
const BY_SOURCE: u32 = 1;
/// `CTA_FILTER_F_CTA_PROTO_NUM`.
const BY_PROTOCOL: u32 = 1 << 3;
/// `CTA_FILTER_F_CTA_PROTO_SRC_PORT`.
const BY_SOURCE_PORT: u32 = 1 << 4;

/// Removes every connection that came from the attachment with this interface at the host's end. Later answers to
/// these connections reach nobody.
pub fn forget(ifindex: u32) -> io::Result<()> {
    // The mask leaves out the one bit in which the two kinds differ.
    let mask = !(MARK_EGRESS ^ MARK_EGRESS_HOST);
    let mark = (mark_of(ifindex, MARK_EGRESS) & mask).to_be_bytes();
    let attributes = [
        attribute(CTA_MARK, &mark),
        attribute(CTA_MARK_MASK, &mask.to_be_bytes()),
    ];
    let request = request(DELETE, 0, libc::AF_UNSPEC as u8, &attributes.concat());
    exchange(&request, |_| {})
}

/// Removes every connection that an endpoint with this address answers: connections to a port of the node that were
/// led to the endpoint. The next endpoint with the address would get the rest of them. Kernels before 6.12 delete
/// nothing by a part of a tuple, so the connections are listed and deleted one by one.
pub fn forget_answered_by(address: IpAddr) -> io::Result<()> {
    forget_answered(address, &[], BY_SOURCE)
}

/// Removes every connection whose answers come from an address, and have what else the filter names of their tuple.
fn forget_answered(address: IpAddr, protocol: &[u8], filter: u32) -> io::Result<()> {
    let (family, kind, bytes) = match address {
        IpAddr::V4(v4) => (libc::AF_INET as u8, CTA_IP_V4_SRC, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6 as u8, CTA_IP_V6_SRC, v6.octets().to_vec()),
    };
    let source = attribute(CTA_TUPLE_IP | NESTED, &attribute(kind, &bytes));
    let flags = attribute(CTA_FILTER_REPLY_FLAGS, &filter.to_ne_bytes());
    let attributes = [
        attribute(CTA_TUPLE_REPLY | NESTED, &[source.as_slice(), protocol].concat()),
        attribute(CTA_FILTER | NESTED, &flags),
    ];
    let mut names = Vec::new();
    let dump = libc::NLM_F_DUMP as u16;
    exchange(&request(GET, dump, family, &attributes.concat()), |connection| {
        names.push(name_of(connection));
    })?;
    for name in names {
        exchange(&request(DELETE, 0, family, &name), |_| {})?;
    }
    Ok(())
}

/// Removes every flow of UDP that a place answers: its clients would send there for as long as the flows last.
pub fn forget_datagrams(place: SocketAddr) -> io::Result<()> {
    let port = attribute(CTA_PROTO_SRC_PORT, &place.port().to_be_bytes());
    let protocol = [attribute(CTA_PROTO_NUM, &[UDP]), port].concat();
    let protocol = attribute(CTA_TUPLE_PROTO | NESTED, &protocol);
    forget_answered(place.ip(), &protocol, BY_SOURCE | BY_PROTOCOL | BY_SOURCE_PORT)
}

/// Returns those of a connection's attributes by which it is deleted.
fn name_of(connection: &[u8]) -> Vec<u8> {
    let mut name = Vec::new();
    let mut rest = connection;
    while let Some((kind, length)) = header(rest) {
        let padded = length.next_multiple_of(4).min(rest.len());
        let (own, more) = rest.split_at(padded);
        if [CTA_TUPLE_ORIG, CTA_ZONE, CTA_ID].contains(&(kind & !NESTED)) {
            name.extend(own);
        }
        rest = more;
    }
    name
}

/// Returns the type and length of the first nlattr, its header included.
fn header(attributes: &[u8]) -> Option<(u16, usize)> {
    let [a, b, c, d] = *attributes.first_chunk()?;
    let length = usize::from(u16::from_ne_bytes([a, b]));
    (4..=attributes.len())
        .contains(&length)
        .then_some((u16::from_ne_bytes([c, d]), length))
}

/// Sends a request and reads its answers: the attributes of each connection. Ends at the acknowledgement, or at the
/// end of the list.
fn exchange(request: &[u8], mut listed: impl FnMut(&[u8])) -> io::Result<()> {
    let socket = netlink()?;
    sendto(
        socket.as_raw_fd(),
        request,
        &NetlinkAddr::new(0, 0),
        MsgFlags::empty(),
    )?;
    // A part of a dump is at most 32 KiB (NLMSG_GOODSIZE's bound).
    let mut answer = vec![0; 1 << 16];
    loop {
        let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        let mut rest = answer.get(..length).unwrap_or_default();
        while let Some((kind, body, more)) = message(rest) {
            rest = more;
            match i32::from(kind) {
                libc::NLMSG_DONE => return Ok(()),
                libc::NLMSG_ERROR => return acknowledged(body),
                _ => listed(body.get(4..).unwrap_or_default()),
            }
        }
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Returns the first message's type, what follows its nlmsghdr, and the bytes after the message.
fn message(messages: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(*messages.first_chunk()?) as usize;
    let (own, _) = messages.split_at_checked(length).filter(|_| length >= 16)?;
    let kind = u16::from_ne_bytes([own[4], own[5]]);
    let next = length.next_multiple_of(4).min(messages.len());
    Some((kind, &own[16..], &messages[next..]))
}

/// Reads an acknowledgement's error number, negative or 0.
fn acknowledged(body: &[u8]) -> io::Result<()> {
    let code = body.first_chunk().copied().map(i32::from_ne_bytes);
    match code {
        Some(0) => Ok(()),
        // There is no such connection.
        Some(code) if -code == libc::ENOENT => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(-code)),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Returns a request. A request without flags of its own is acknowledged.
fn request(kind: u16, flags: u16, family: u8, attributes: &[u8]) -> Vec<u8> {
    let acknowledged = if flags == 0 { libc::NLM_F_ACK as u16 } else { 0 };
    let flags = libc::NLM_F_REQUEST as u16 | flags | acknowledged;
    let length = (HEADERS + attributes.len()) as u32;
    let mut request = Vec::with_capacity(length as usize);
    request.extend(length.to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    // Sequence and port.
    request.extend([0; 8]);
    // Version 0, no resource.
    request.extend([family, 0, 0, 0]);
    request.extend(attributes);
    request
}

/// Returns an nlattr, padded.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut attribute = Vec::with_capacity(value.len() + 4);
    attribute.extend((value.len() as u16 + 4).to_ne_bytes());
    attribute.extend(kind.to_ne_bytes());
    attribute.extend(value);
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    attribute
}

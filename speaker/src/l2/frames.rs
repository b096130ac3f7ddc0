//! The frames of ARP (RFC 826) and neighbour discovery (RFC 4861), by bytes. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An Ethernet address.
pub type Mac = [u8; 6];

pub const ARP: u16 = 0x0806;
pub const IPV6: u16 = 0x86dd;
const BROADCAST: Mac = [0xff; 6];
/// All nodes of a link (RFC 4291).
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Where the message of a frame begins.
const ETHERNET: usize = 14;
const IPV6_HEADER: usize = 40;
/// The first bytes of ARP for IPv4 over Ethernet.
const ARP_KIND: [u8; 6] = [0, 1, 0x08, 0, 6, 4];
/// Operations of ARP.
const REQUEST: u8 = 1;
const REPLY: u8 = 2;
const ICMPV6: u8 = 58;
/// Routers don't send on messages of neighbour discovery: they have this hop limit.
const HOP_LIMIT: u8 = 255;
/// Types of ICMPv6.
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// The option of an advertisement with the sender's Ethernet address, in units of 8 bytes.
const TARGET_ADDRESS: [u8; 2] = [2, 1];
/// Flags of an advertisement.
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

/// A question of a neighbour who has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    mac: Mac,
    /// Unspecified if the neighbour is about to take the address.
    sender: IpAddr,
    pub target: IpAddr,
}

/// Reads a frame. `None`: it asks nothing.
pub fn request(frame: &[u8]) -> Option<Request> {
    let request = match u16::from_be_bytes(array(frame, 12)?) {
        ARP => arp_request(frame.get(ETHERNET..)?)?,
        IPV6 => solicitation(frame)?,
        _ => return None,
    };
    // Answers go to one neighbour.
    (request.mac[0] & 1 == 0).then_some(request)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

fn arp_request(message: &[u8]) -> Option<Request> {
    let sender = Ipv4Addr::from(array::<4>(message, 14)?);
    let target = Ipv4Addr::from(array::<4>(message, 24)?);
    let is_request = message.starts_with(&ARP_KIND) && message[6..8] == [0, REQUEST];
    // Somebody who says what it has asks nothing.
    (is_request && sender != target).then_some(Request {
        mac: array(message, 8)?,
        sender: sender.into(),
        target: target.into(),
    })
}

fn solicitation(frame: &[u8]) -> Option<Request> {
    let header: [u8; IPV6_HEADER] = array(frame, ETHERNET)?;
    let length = usize::from(u16::from_be_bytes(array(&header, 4)?));
    let begin = ETHERNET + IPV6_HEADER;
    let message = frame.get(begin..begin + length)?;
    let (sender, destination) = (
        Ipv6Addr::from(array::<16>(&header, 8)?),
        Ipv6Addr::from(array::<16>(&header, 24)?),
    );
    let target = Ipv6Addr::from(array::<16>(message, 8)?);
    let is_solicitation = header[0] >> 4 == 6
        && header[6..8] == [ICMPV6, HOP_LIMIT]
        && message[..2] == [SOLICITATION, 0]
        && checksum(sender, destination, message) == 0;
    is_solicitation.then_some(Request {
        mac: array(frame, 6)?,
        sender: sender.into(),
        target: target.into(),
    })
}

/// Returns the frame that says that the target is here.
pub fn reply(request: &Request, mac: Mac) -> Option<Vec<u8>> {
    match (request.target, request.sender) {
        (IpAddr::V4(target), IpAddr::V4(sender)) => {
            Some(arp(REPLY, (mac, target), (request.mac, sender), request.mac))
        }
        (IpAddr::V6(target), IpAddr::V6(sender)) if sender.is_unspecified() => Some(advertisement(
            target,
            mac,
            (multicast(ALL_NODES), ALL_NODES),
            OVERRIDE,
        )),
        (IpAddr::V6(target), IpAddr::V6(sender)) => Some(advertisement(
            target,
            mac,
            (request.mac, sender),
            SOLICITED | OVERRIDE,
        )),
        _ => None,
    }
}

/// Returns the frames that tell all neighbours that an address is here now.
pub fn announcements(address: IpAddr, mac: Mac) -> Vec<Vec<u8>> {
    match address {
        // Some neighbours heed the one, some the other (RFC 5227).
        IpAddr::V4(address) => vec![
            arp(REQUEST, (mac, address), ([0; 6], address), BROADCAST),
            arp(REPLY, (mac, address), (BROADCAST, address), BROADCAST),
        ],
        IpAddr::V6(address) => vec![advertisement(
            address,
            mac,
            (multicast(ALL_NODES), ALL_NODES),
            OVERRIDE,
        )],
    }
}

/// Returns the group to which neighbours send their questions about an address (RFC 4291, section 2.7.1).
pub fn solicited_group(address: Ipv6Addr) -> Ipv6Addr {
    let [.., high, low] = address.segments();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | (high & 0xff), low)
}

/// Returns the Ethernet address of a group (RFC 2464).
fn multicast(group: Ipv6Addr) -> Mac {
    let [.., a, b, c, d] = group.octets();
    [0x33, 0x33, a, b, c, d]
}

fn ethernet(destination: Mac, source: Mac, kind: u16) -> Vec<u8> {
    [destination.as_slice(), &source, &kind.to_be_bytes()].concat()
}

fn arp(operation: u8, sender: (Mac, Ipv4Addr), target: (Mac, Ipv4Addr), to: Mac) -> Vec<u8> {
    let mut frame = ethernet(to, sender.0, ARP);
    frame.extend(ARP_KIND);
    frame.extend([0, operation]);
    for (mac, address) in [sender, target] {
        frame.extend(mac);
        frame.extend(address.octets());
    }
    frame
}

fn advertisement(address: Ipv6Addr, mac: Mac, to: (Mac, Ipv6Addr), flags: u8) -> Vec<u8> {
    let mut message = vec![ADVERTISEMENT, 0, 0, 0, flags, 0, 0, 0];
    message.extend(address.octets());
    message.extend(TARGET_ADDRESS);
    message.extend(mac);
    let sum = checksum(address, to.1, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut frame = ethernet(to.0, mac, IPV6);
    frame.extend([0x60, 0, 0, 0, 0, message.len() as u8, ICMPV6, HOP_LIMIT]);
    frame.extend(address.octets());
    frame.extend(to.1.octets());
    frame.extend(message);
    frame
}

/// Returns the checksum of an ICMPv6 message (RFC 4443, section 2.3). 0 if the message has the right one.
fn checksum(source: Ipv6Addr, destination: Ipv6Addr, message: &[u8]) -> u16 {
    let length = (message.len() as u32).to_be_bytes();
    let summed = [
        source.octets().as_slice(),
        &destination.octets(),
        &length,
        &[0, 0, 0, ICMPV6],
        message,
    ]
    .concat();
    let words = summed.chunks(2).map(|pair| match *pair {
        [high, low] => u32::from(u16::from_be_bytes([high, low])),
        [high] => u32::from(high) << 8,
        _ => 0,
    });
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Mac = [2, 0, 0, 0, 0, 1];
    const CLIENT: Mac = [2, 0, 0, 0, 0, 9];

    /// Who has 192.0.2.7? Tell 192.0.2.9.
    fn who_has() -> Vec<u8> {
        let mut frame = vec![0xff; 6];
        frame.extend(CLIENT);
        frame.extend([0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1]);
        frame.extend(CLIENT);
        frame.extend([192, 0, 2, 9, 0, 0, 0, 0, 0, 0, 192, 0, 2, 7]);
        frame
    }

    /// Who has 2001:db8::7? Tell fe80::9. The checksum is written by hand.
    fn solicited() -> Vec<u8> {
        let mut frame = vec![0x33, 0x33, 0xff, 0, 0, 7];
        frame.extend(CLIENT);
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 24, 58, 255]);
        frame.extend("fe80::9".parse::<Ipv6Addr>().unwrap().octets());
        frame.extend("ff02::1:ff00:7".parse::<Ipv6Addr>().unwrap().octets());
        frame.extend([135, 0, 0x4e, 0x57, 0, 0, 0, 0]);
        frame.extend("2001:db8::7".parse::<Ipv6Addr>().unwrap().octets());
        frame
    }

    #[test]
    fn an_arp_request_is_answered_to_its_sender() {
        let request = request(&who_has()).unwrap();
        assert_eq!(request.target, IpAddr::from([192, 0, 2, 7]));
        let mut wanted = CLIENT.to_vec();
        wanted.extend(OWN);
        wanted.extend([0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 2]);
        wanted.extend(OWN);
        wanted.extend([192, 0, 2, 7]);
        wanted.extend(CLIENT);
        wanted.extend([192, 0, 2, 9]);
        assert_eq!(reply(&request, OWN).unwrap(), wanted);
    }

    #[test]
    fn what_asks_nothing_is_no_request() {
        for (at, byte, why) in [
            (21, 2, "a reply"),
            (15, 6, "not Ethernet"),
            (12, 0x86, "not ARP"),
            (31, 7, "an announcement"),
            (22, 3, "of a group"),
        ] {
            let mut frame = who_has();
            frame[at] = byte;
            assert_eq!(request(&frame), None, "{why}");
        }
        for length in 0..42 {
            assert_eq!(request(&who_has()[..length]), None, "{length} bytes");
        }
    }

    #[test]
    fn a_solicitation_is_answered_to_its_sender() {
        let request = request(&solicited()).unwrap();
        assert_eq!(request.target, "2001:db8::7".parse::<IpAddr>().unwrap());
        let frame = reply(&request, OWN).unwrap();
        assert_eq!(frame[..14], [CLIENT.as_slice(), &OWN, &[0x86, 0xdd]].concat());
        assert_eq!(frame[14..22], [0x60, 0, 0, 0, 0, 32, 58, 255]);
        assert_eq!(frame[54..56], [136, 0]);
        assert_eq!(frame[58..62], [0x60, 0, 0, 0], "solicited, and overrides");
        assert_eq!(frame[78..], [[2, 1].as_slice(), &OWN].concat());
        let (own, client) = ("2001:db8::7".parse().unwrap(), "fe80::9".parse().unwrap());
        assert_eq!(checksum(own, client, &frame[54..]), 0);
    }

    #[test]
    fn a_bad_solicitation_is_no_request() {
        for (at, byte, why) in [
            (21, 254, "from another link"),
            (54, 136, "an advertisement"),
            (56, 0, "a wrong checksum"),
            (19, 255, "longer than its frame"),
            (14, 0x40, "not IPv6"),
        ] {
            let mut frame = solicited();
            frame[at] = byte;
            assert_eq!(request(&frame), None, "{why}");
        }
        for length in 0..78 {
            assert_eq!(request(&solicited()[..length]), None, "{length} bytes");
        }
    }

    #[test]
    fn an_address_is_told_to_all_neighbours() {
        let frames = announcements(IpAddr::from([192, 0, 2, 7]), OWN);
        assert_eq!(frames.len(), 2);
        for (frame, operation) in frames.iter().zip([1, 2]) {
            assert_eq!((&frame[..6], frame[21]), (BROADCAST.as_slice(), operation));
            assert_eq!(
                (&frame[28..32], &frame[38..42]),
                (&[192, 0, 2, 7][..], &[192, 0, 2, 7][..])
            );
        }
        let frames = announcements("2001:db8::7".parse().unwrap(), OWN);
        assert_eq!(frames[0][..6], [0x33, 0x33, 0, 0, 0, 1]);
        assert_eq!(frames[0][58], 0x20, "not solicited");
    }

    #[test]
    fn a_group_has_the_last_24_bits_of_an_address() {
        let group = solicited_group("2001:db8::1234:5678".parse().unwrap());
        assert_eq!(group, "ff02::1:ff34:5678".parse::<Ipv6Addr>().unwrap());
    }
}

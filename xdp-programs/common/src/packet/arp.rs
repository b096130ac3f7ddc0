//! ARP for IPv4 over Ethernet (RFC 826) as the agent serves it: the answer to any request is the gateway's MAC.

use super::{Header, bytes4, words2, words3};
use crate::{counters::Counter, tables::GATEWAY_MAC};

const REQUEST: u16 = 1_u16.to_be();
const REPLY: u16 = 2_u16.to_be();

/// Body of an ARP packet, raw words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArpPacket {
    pub hardware: u16,
    pub protocol: u16,
    pub lengths: u16,
    pub operation: u16,
    pub sender_mac: [u16; 3],
    pub sender: [u16; 2],
    pub target_mac: [u16; 3],
    pub target: [u16; 2],
}

// SAFETY: repr(C), u16 only.
unsafe impl Header for ArpPacket {}

impl ArpPacket {
    /// Returns the reply to a request of the endpoint (`mac`, `address`), or why there is none. A request for the
    /// endpoint's own address gets no answer, and probes (sender 0.0.0.0) get none: duplicate address detection must
    /// find the address free (RFC 5227).
    #[inline(always)]
    pub fn answer(&self, mac: [u8; 6], address: [u8; 4]) -> Result<Self, Counter> {
        let lengths = u16::from_ne_bytes([6, 4]);
        if self.hardware != 1_u16.to_be() || self.protocol != super::ethernet::IPV4 || self.lengths != lengths
        {
            return Err(Counter::BadHeader);
        }
        if self.sender_mac != words3(mac) {
            return Err(Counter::SpoofedArp);
        }
        let sender = bytes4(self.sender);
        if sender != address && sender != [0; 4] {
            return Err(Counter::SpoofedArp);
        }
        if sender == [0; 4] || self.operation != REQUEST || self.target == words2(address) {
            return Err(Counter::ArpIgnored);
        }
        Ok(Self {
            operation: REPLY,
            sender_mac: words3(GATEWAY_MAC),
            sender: self.target,
            target_mac: self.sender_mac,
            target: self.sender,
            ..*self
        })
    }
}

const _: () = assert!(size_of::<ArpPacket>() == 28);

#[cfg(test)]
mod tests {
    use super::ArpPacket;
    use crate::{
        counters::Counter,
        packet::{ethernet, words2, words3},
        tables::GATEWAY_MAC,
    };

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
    const ADDRESS: [u8; 4] = [10, 0, 0, 9];

    fn request(sender: [u8; 4], target: [u8; 4]) -> ArpPacket {
        ArpPacket {
            hardware: 1_u16.to_be(),
            protocol: ethernet::IPV4,
            lengths: u16::from_ne_bytes([6, 4]),
            operation: 1_u16.to_be(),
            sender_mac: words3(MAC),
            sender: words2(sender),
            target_mac: [0; 3],
            target: words2(target),
        }
    }

    #[test]
    fn any_other_address_is_at_the_gateway() {
        let reply = request(ADDRESS, [10, 0, 0, 1]).answer(MAC, ADDRESS).unwrap();
        assert_eq!(
            (reply.operation, reply.sender_mac),
            (2_u16.to_be(), words3(GATEWAY_MAC))
        );
        assert_eq!(
            (reply.sender, reply.target),
            (words2([10, 0, 0, 1]), words2(ADDRESS))
        );
        assert_eq!(reply.target_mac, words3(MAC));
    }

    #[test]
    fn own_address_and_probes_get_no_answer() {
        assert_eq!(
            request(ADDRESS, ADDRESS).answer(MAC, ADDRESS),
            Err(Counter::ArpIgnored)
        );
        assert_eq!(
            request([0; 4], ADDRESS).answer(MAC, ADDRESS),
            Err(Counter::ArpIgnored)
        );
        assert_eq!(
            request([0; 4], [10, 0, 0, 1]).answer(MAC, ADDRESS),
            Err(Counter::ArpIgnored)
        );
    }

    #[test]
    fn foreign_senders_are_forged() {
        assert_eq!(
            request([10, 0, 0, 8], [10, 0, 0, 1]).answer(MAC, ADDRESS),
            Err(Counter::SpoofedArp)
        );
        let other = [2, 0, 0, 0, 0, 8];
        assert_eq!(
            request(ADDRESS, [10, 0, 0, 1]).answer(other, ADDRESS),
            Err(Counter::SpoofedArp)
        );
    }

    #[test]
    fn other_hardware_is_refused() {
        let odd = ArpPacket {
            hardware: 6_u16.to_be(),
            ..request(ADDRESS, [10, 0, 0, 1])
        };
        assert_eq!(odd.answer(MAC, ADDRESS), Err(Counter::BadHeader));
    }
}

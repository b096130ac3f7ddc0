//! Writes new addresses and ports into a packet, and updates its checksums. Only at tc: the stack may have left a
//! checksum to the NIC, and only the helpers of tc know.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM},
    helpers::{bpf_csum_diff, bpf_l3_csum_replace, bpf_l4_csum_replace, bpf_skb_store_bytes},
};
use thuban_common::{
    counters::Counter,
    packet::{ip::IpPacket, ipv4, ipv6},
    tables::Address,
};

use crate::{fragments, frame::tc::TcFrame};

/// The addresses and ports (raw) that a packet is to have.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Flow {
    pub source: Address,
    pub destination: Address,
    pub ports: [u16; 2],
}

/// A checksum that covers addresses.
struct Sum {
    skb: *mut __sk_buff,
    /// The offset; `None`: SCTP's CRC32c covers no addresses, and a later fragment has no checksum.
    at: Option<u32>,
    /// The helper's flags. UDP's zero means that there is no checksum, and stays so.
    flags: u64,
}

/// The side whose address is written.
#[derive(Clone, Copy)]
enum Side {
    Source,
    Destination,
}

/// Writes the differences into the packet whose IP header lies at `offset`. It must show its ports, or be a fragment.
#[inline(never)]
pub fn rewrite(frame: &TcFrame, offset: u32, packet: &IpPacket, to: &Flow) -> Result<(), Counter> {
    let skb = frame.skb();
    let (packet, length) = if packet.is_fragment() {
        fragments::shape().ok_or(Counter::ServiceUnreadable)?
    } else if packet.is_v6() {
        (packet, ipv6::LENGTH as u32)
    } else {
        (packet, ipv4::LENGTH as u32)
    };
    let has_transport = length != 0;
    let transport = offset + length;
    let (at, flags) = match packet.protocol {
        // The first fragment has the datagram's checksum.
        _ if !has_transport => (None, 0),
        ipv4::TCP => (Some(transport + 16), 0),
        ipv4::UDP => (Some(transport + 6), u64::from(BPF_F_MARK_MANGLED_0)),
        _ if packet.ports != to.ports => return Err(Counter::ServicePortFixed),
        _ => (None, 0),
    };
    let sum = Sum { skb, at, flags };
    sum.address(offset, packet.is_v6(), Side::Source, &packet.source, &to.source)?;
    sum.address(
        offset,
        packet.is_v6(),
        Side::Destination,
        &packet.destination,
        &to.destination,
    )?;
    if !has_transport {
        return Ok(());
    }
    sum.port(transport, packet.ports[0], to.ports[0])?;
    sum.port(transport + 2, packet.ports[1], to.ports[1])
}

impl Sum {
    #[inline(always)]
    fn address(
        &self,
        offset: u32,
        is_v6: bool,
        side: Side,
        old: &Address,
        new: &Address,
    ) -> Result<(), Counter> {
        if old == new {
            return Ok(());
        }
        if is_v6 {
            let place = match side {
                Side::Source => 8,
                Side::Destination => 24,
            };
            self.address6(offset + place, old, new)
        } else {
            let place = match side {
                Side::Source => 12,
                Side::Destination => 16,
            };
            self.address4(offset, place, word(old), word(new))
        }
    }

    #[inline(always)]
    fn address4(&self, offset: u32, place: u32, old: u32, new: u32) -> Result<(), Counter> {
        let (from, to) = (u64::from(old), u64::from(new));
        // SAFETY: helpers on the program's own context, which check the offsets.
        done(unsafe { bpf_l3_csum_replace(self.skb, offset + 10, from, to, 4) })?;
        if let Some(at) = self.at {
            let flags = u64::from(BPF_F_PSEUDO_HDR) | self.flags | 4;
            // SAFETY: as above.
            done(unsafe { bpf_l4_csum_replace(self.skb, at, from, to, flags) })?;
        }
        store(self.skb, offset + place, &new, 0)
    }

    #[inline(always)]
    fn address6(&self, place: u32, old: &Address, new: &Address) -> Result<(), Counter> {
        if let Some(at) = self.at {
            let (from, to) = (old.as_ptr().cast_mut().cast(), new.as_ptr().cast_mut().cast());
            // SAFETY: 16 bytes each, which the helper only reads; then a helper on the program's own context.
            done(unsafe {
                let difference = bpf_csum_diff(from, 16, to, 16, 0);
                let flags = u64::from(BPF_F_PSEUDO_HDR) | self.flags;
                bpf_l4_csum_replace(self.skb, at, 0, difference as u64, flags)
            })?;
        }
        // The NIC's sum over the whole packet changes twice, and so stays as it was.
        store(self.skb, place, new, u64::from(BPF_F_RECOMPUTE_CSUM))
    }

    #[inline(always)]
    fn port(&self, place: u32, old: u16, new: u16) -> Result<(), Counter> {
        if old == new {
            return Ok(());
        }
        if let Some(at) = self.at {
            // SAFETY: helper on the program's own context.
            done(unsafe {
                bpf_l4_csum_replace(self.skb, at, u64::from(old), u64::from(new), self.flags | 2)
            })?;
        }
        store(self.skb, place, &new, 0)
    }
}

/// Returns the IPv4 address of a mapped one, raw.
#[inline(always)]
pub fn word(address: &Address) -> u32 {
    let [.., a, b, c, d] = *address;
    u32::from_ne_bytes([a, b, c, d])
}

#[inline(always)]
pub fn store<T>(skb: *mut __sk_buff, place: u32, value: &T, flags: u64) -> Result<(), Counter> {
    let from = core::ptr::from_ref(value).cast();
    // SAFETY: the helper reads as many bytes as the value has.
    done(unsafe { bpf_skb_store_bytes(skb, place, from, size_of::<T>() as u32, flags) })
}

#[inline(always)]
pub fn done(result: i64) -> Result<(), Counter> {
    if result == 0 {
        Ok(())
    } else {
        Err(Counter::Truncated)
    }
}

//! Frames at tc ingress: whole GSO frames, neighbours resolved by the kernel, the pod's end of a veth in one step.

use core::{
    mem::{MaybeUninit, zeroed},
    ptr::{from_mut, null_mut},
};

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_CSUM_LEVEL_RESET, BPF_F_ADJ_ROOM_DECAP_L3_IPV4, BPF_F_ADJ_ROOM_DECAP_L3_IPV6,
        BPF_F_ADJ_ROOM_ENCAP_L2_ETH, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L4_UDP,
        BPF_F_ADJ_ROOM_FIXED_GSO, TC_ACT_OK, TC_ACT_SHOT, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
        bpf_redir_neigh,
    },
    bpf_f_adj_room_encap_l2,
    helpers::{
        bpf_csum_diff, bpf_csum_level, bpf_probe_read_kernel, bpf_redirect, bpf_redirect_neigh,
        bpf_redirect_peer, bpf_skb_adjust_room, bpf_skb_change_tail, bpf_skb_change_type, bpf_skb_load_bytes,
        bpf_skb_pull_data,
    },
    programs::TcContext,
};
use thuban_common::{
    counters::Counter,
    packet::{
        Header,
        ethernet::{IPV6, LENGTH},
        ipv4, ipv6,
    },
    skb::{CHECKSUM_PARTIAL, SPAN, SkbLayout},
    tables::{
        ConfigEntry, DropletAddress, ENCAPSULATION_LENGTH, LOCAL_HOST, LOCAL_SHAPED, LocalEntry,
        TRANSIT_MAGIC, TransitMetadata,
    },
};

use super::{Frame, Verdict};
use crate::maps;

/// Flags for making and for removing room: GSO sizes are the inner frame's, whatever headers are around it.
const FIXED: u64 = BPF_F_ADJ_ROOM_FIXED_GSO as u64;
/// Flags that tell what the room is for, so that the kernel can segment and checksum the inner frame.
const ENCAPSULATION: u64 = FIXED
    | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 as u64
    | BPF_F_ADJ_ROOM_ENCAP_L4_UDP as u64
    | BPF_F_ADJ_ROOM_ENCAP_L2_ETH as u64
    | bpf_f_adj_room_encap_l2(LENGTH as u64);
/// errno EALREADY: the frame is marked as encapsulated.
const ALREADY: i64 = 114;
/// Bytes of a TCP header without options: the part of an answer that services read.
const LEAST_TCP: usize = 20;
/// AF_INET of linux/socket.h.
const AF_INET: u32 = 2;
/// PACKET_HOST of linux/if_packet.h.
const PACKET_HOST: u32 = 0;

pub struct TcNextHop {
    uplink: u32,
    /// The droplet, if no gateway is on the way to it.
    on_link: Option<DropletAddress>,
}

pub struct TcFrame {
    context: TcContext,
}

impl TcFrame {
    #[inline(always)]
    pub fn new(context: TcContext) -> Self {
        Self { context }
    }

    #[inline(always)]
    pub fn skb(&self) -> *mut __sk_buff {
        self.context.skb.skb
    }

    /// Takes the metadata of a frame that XDP transit decapsulated. Must be called only where transit is at XDP: then
    /// it is the only program that can write metadata here. The metadata is read once: a frame that the stack forwards
    /// keeps its metadata, even over a veth to the next machine.
    #[inline(always)]
    pub fn take_metadata(&mut self) -> Option<TransitMetadata> {
        // SAFETY: fields of the context; the kernel bounds them.
        let (start, end) = unsafe { ((*self.skb()).data_meta as usize, (*self.skb()).data as usize) };
        if start + size_of::<TransitMetadata>() > end {
            return None;
        }
        // SAFETY: bounds checked; metadata is 4-aligned.
        let metadata = unsafe { *(start as *const TransitMetadata) };
        if metadata.magic != TRANSIT_MAGIC {
            return None;
        }
        // SAFETY: as above; programs at tc may write what is before the frame.
        unsafe { (*(start as *mut TransitMetadata)).magic = 0 };
        Some(metadata)
    }

    /// Sets the packet's mark for the host's stack, whose rules match on it.
    #[inline(always)]
    pub fn mark(&mut self, mark: u32) {
        // SAFETY: a field of the context that programs may write.
        unsafe { (*self.skb()).mark = mark };
    }

    /// Forgets that a checksum was verified. After XDP removed the outer headers, that statement was about the outer
    /// packet.
    #[inline(always)]
    pub fn distrust_checksum(&mut self) {
        // SAFETY: helper on our own context. Of a frame that nobody verified it changes nothing.
        unsafe { bpf_csum_level(self.skb(), u64::from(BPF_CSUM_LEVEL_RESET)) };
    }

    /// Cuts a frame after so many bytes. It makes a GSO frame a plain one.
    #[inline(always)]
    fn trim(&mut self, length: u32) -> bool {
        // SAFETY: helper on our own context.
        let result = unsafe { bpf_skb_change_tail(self.skb(), length, 0) };
        // The kernel cuts nothing that it takes for a tunnel's: what came from a neighbour by a veth. Then the rest
        // stays as padding behind the IP packet.
        result == 0 || result == NOT_SUPPORTED && self.segment_size() == 0 && self.length() >= length
    }

    /// Gives a frame to the pod's end of the veth. XDP transit may have written the pod's MAC; the stack then took the
    /// frame for another host's.
    #[inline(always)]
    pub fn to_peer(&mut self, interface: u32) -> Verdict {
        // SAFETY: helpers on our own context.
        unsafe {
            bpf_skb_change_type(self.skb(), PACKET_HOST);
            bpf_redirect_peer(interface, 0) as Verdict
        }
    }

    /// Sends a frame out of the node by the uplink. The kernel routes it and resolves the neighbour. The source may be
    /// no address of the node.
    #[inline(always)]
    pub fn leave(&mut self, config: &ConfigEntry) -> Verdict {
        // SAFETY: without parameters the helper routes by the packet's own header.
        unsafe { bpf_redirect_neigh(config.uplink, null_mut(), 0, 0) as Verdict }
    }

    /// Sends a frame out by the host's end of a veth. It passes that end's queueing discipline, which a redirect to the
    /// peer doesn't. The node's own end is reached by this way alone: the kernel accepts no redirect to a peer of the
    /// same network namespace.
    #[inline(always)]
    pub fn out_by(&mut self, interface: u32) -> Verdict {
        // SAFETY: helper without pointers.
        unsafe { bpf_redirect(interface, 0) as Verdict }
    }
}

/// The frame is IPv4 from here on.
const TO_IPV4: u64 = BPF_F_ADJ_ROOM_DECAP_L3_IPV4 as u64;
/// ENOTSUPP of the kernel's linux/errno.h.
const NOT_SUPPORTED: i64 = -524;
/// [`checksum_place`]: the NIC is to write no checksum. Frames are shorter.
const NO_CHECKSUM: u32 = u32::MAX;
/// [`checksum_place`]: nobody knows the place. No checksum may have this one.
const NOWHERE: u32 = 0;

/// Does what [`Frame::checksum_place`] does, with a stack of its own. `skb`: here the context is the kernel's
/// `sk_buff`.
#[inline(never)]
fn checksum_place(skb: *const u8) -> u32 {
    let layout = maps::skb_layout();
    if layout == SkbLayout::UNKNOWN {
        return NOWHERE;
    }
    // SAFETY: the helper takes any address; the layout is the running kernel's.
    let part = unsafe { bpf_probe_read_kernel(skb.add(layout.part as usize).cast::<[u8; SPAN]>()) };
    let Ok(part) = part else {
        return NOWHERE;
    };
    let byte = |at: u32| part.get(at as usize).copied().unwrap_or(u8::MAX);
    let word = |at: u32| u32::from(u16::from_ne_bytes([byte(at), byte(at + 1)]));
    if byte(layout.ip_summed) >> layout.ip_summed_bit & CHECKSUM_PARTIAL != CHECKSUM_PARTIAL {
        return NO_CHECKSUM;
    }
    let end = word(layout.csum_start) + word(layout.csum_start + 2);
    end.checked_sub(word(layout.mac_header)).unwrap_or(NOWHERE)
}

impl Frame for TcFrame {
    const PASS: Verdict = TC_ACT_OK as Verdict;
    const DROP: Verdict = TC_ACT_SHOT as Verdict;
    const IS_LAST: bool = true;
    type NextHop = TcNextHop;

    #[inline(always)]
    fn tc(&mut self) -> Option<&mut TcFrame> {
        Some(self)
    }

    #[inline(always)]
    fn load<H: Header>(&self, offset: usize) -> Option<H> {
        let start = self.context.data() + offset;
        if start + size_of::<H>() > self.context.data_end() {
            return None;
        }
        // SAFETY: bounds checked; headers are 2-aligned in frames, and any bytes are valid.
        Some(unsafe { *(start as *const H) })
    }

    #[inline(always)]
    fn load_far<H: Header>(&self, offset: u32) -> Option<H> {
        let mut header = MaybeUninit::<H>::uninit();
        // SAFETY: the helper writes all bytes or fails.
        unsafe {
            let result = bpf_skb_load_bytes(
                self.skb().cast(),
                offset,
                header.as_mut_ptr().cast(),
                size_of::<H>() as u32,
            );
            (result == 0).then(|| header.assume_init())
        }
    }

    #[inline(always)]
    fn store<H: Header>(&mut self, offset: usize, header: &H) -> Option<()> {
        let start = self.context.data() + offset;
        if start + size_of::<H>() > self.context.data_end() {
            return None;
        }
        // SAFETY: as in `load`.
        unsafe { *(start as *mut H) = *header };
        Some(())
    }

    #[inline(always)]
    fn make_linear(&mut self, length: u32) -> bool {
        if self.context.data() + length as usize > self.context.data_end() {
            let whole = self.length();
            let length = if length < whole { length } else { whole };
            // SAFETY: helper on our own context. If it fails, loads do.
            unsafe { bpf_skb_pull_data(self.skb(), length) };
        }
        true
    }

    #[inline(always)]
    fn length(&self) -> u32 {
        self.context.len()
    }

    #[inline(always)]
    fn interface(&self) -> u32 {
        // SAFETY: field of the context.
        unsafe { (*self.skb()).ifindex }
    }

    #[inline(always)]
    fn segment_size(&self) -> u32 {
        // SAFETY: field of the context.
        unsafe { (*self.skb()).gso_size }
    }

    #[inline(always)]
    fn checksum_place(&self) -> Option<u32> {
        Some(checksum_place(self.skb().cast())).filter(|place| *place != NO_CHECKSUM)
    }

    #[inline(always)]
    fn is_for_node(&self) -> bool {
        // SAFETY: field of the context.
        unsafe { (*self.skb()).pkt_type == PACKET_HOST }
    }

    #[inline(always)]
    fn is_vlan_tagged(&self) -> bool {
        // SAFETY: field of the context.
        unsafe { (*self.skb()).vlan_present != 0 }
    }

    #[inline(always)]
    fn next_hop(&self, config: &ConfigEntry, droplet: DropletAddress) -> Option<TcNextHop> {
        Some(TcNextHop {
            uplink: config.uplink,
            on_link: maps::is_on_link(droplet).then_some(droplet),
        })
    }

    #[inline(always)]
    fn grow(&mut self, protocol: u8) -> Result<(), Counter> {
        let room = ENCAPSULATION_LENGTH as i32;
        // SAFETY: helpers on our own context.
        let mut result = unsafe { bpf_skb_adjust_room(self.skb(), room, BPF_ADJ_ROOM_MAC, ENCAPSULATION) };
        // Frames that a pod sends on after decapsulation, and tunnels of pods, are marked already. Without GSO nothing
        // needs the mark. A frame that begins with TCP is no tunnel: if it has GSO, it was marked when it was
        // encapsulated the first time, and its inner headers are still where the kernel noted them then.
        if result == -ALREADY {
            if self.segment_size() != 0 && protocol != ipv4::TCP {
                return Err(Counter::TunnelSegments);
            }
            // SAFETY: as above, and fields of the context.
            result = unsafe {
                if (*self.skb()).protocol == u32::from(IPV6) {
                    // The kernel goes on taking it for IPv6, unless four bytes that are too many are removed again.
                    match bpf_skb_adjust_room(self.skb(), room + 4, BPF_ADJ_ROOM_MAC, FIXED) {
                        0 => bpf_skb_adjust_room(self.skb(), -4, BPF_ADJ_ROOM_MAC, FIXED | TO_IPV4),
                        error => error,
                    }
                } else {
                    bpf_skb_adjust_room(self.skb(), room, BPF_ADJ_ROOM_MAC, FIXED)
                }
            };
        }
        if result != 0 {
            aya_log_ebpf::warn!(&self.context, "no room for outer headers: error {}", result);
            return Err(Counter::AdjustRoomFailed);
        }
        self.make_linear((ENCAPSULATION_LENGTH + LENGTH) as u32);
        Ok(())
    }

    #[inline(always)]
    fn send(&mut self, next_hop: &TcNextHop) -> Result<Verdict, Counter> {
        let Some(droplet) = next_hop.on_link else {
            // SAFETY: without parameters the helper routes by the outer header; it resolves the neighbour.
            return Ok(unsafe { bpf_redirect_neigh(next_hop.uplink, null_mut(), 0, 0) } as Verdict);
        };
        // SAFETY: integers: zeros are valid.
        let mut hop: bpf_redir_neigh = unsafe { zeroed() };
        hop.nh_family = AF_INET;
        hop.__bindgen_anon_1.ipv4_nh = u32::from_ne_bytes(droplet);
        let length = size_of::<bpf_redir_neigh>() as i32;
        // SAFETY: the structure is ours and as long as we say. The helper resolves this neighbour.
        Ok(unsafe { bpf_redirect_neigh(next_hop.uplink, from_mut(&mut hop), length, 0) } as Verdict)
    }

    #[inline(always)]
    fn reply(&mut self) -> Option<Verdict> {
        // SAFETY: helper without pointers.
        Some(unsafe { bpf_redirect(self.interface(), 0) } as Verdict)
    }

    #[inline(always)]
    fn deliver(&mut self, local: &LocalEntry) -> Verdict {
        if local.flags & (LOCAL_HOST | LOCAL_SHAPED) == 0 {
            self.to_peer(local.ifindex)
        } else {
            self.out_by(local.ifindex)
        }
    }

    #[inline(always)]
    fn cut(&mut self, length: u32) -> Option<()> {
        let is_cut = self.trim(length);
        self.make_linear(length);
        is_cut.then_some(())
    }

    #[inline(always)]
    fn quote(&mut self, keep: u32, room: u32) -> Option<()> {
        let is_cut = self.trim(keep);
        // SAFETY: helper on our own context.
        let room_made =
            unsafe { bpf_skb_adjust_room(self.skb(), room.cast_signed(), BPF_ADJ_ROOM_MAC, FIXED) };
        self.make_linear(keep + room);
        (is_cut && room_made == 0).then_some(())
    }

    #[inline(always)]
    fn sum<const N: usize>(&self, offset: usize) -> Option<u32> {
        let start = self.context.data() + offset;
        if start + N > self.context.data_end() {
            return None;
        }
        // SAFETY: bounds checked; the helper only reads.
        let sum = unsafe { bpf_csum_diff(null_mut(), 0, start as *mut u32, N as u32, 0) };
        // An unfolded 32-bit sum, or an error, which no caller with N a multiple of 4 gets.
        let sum = u32::try_from(sum).ok()?;
        Some((sum & 0xffff) + (sum >> 16))
    }

    #[inline(always)]
    fn decapsulate(
        &mut self,
        length: u32,
        is_v6: bool,
        _vni: u32,
        _local: &LocalEntry,
    ) -> Result<bool, Counter> {
        // Otherwise the kernel would keep taking the frame for IPv4, as the outer packet was.
        let inner = if is_v6 {
            BPF_F_ADJ_ROOM_DECAP_L3_IPV6 as u64
        } else {
            0
        };
        // SAFETY: helper on our own context.
        let result = unsafe {
            bpf_skb_adjust_room(
                self.skb(),
                -(length.cast_signed()),
                BPF_ADJ_ROOM_MAC,
                FIXED | inner,
            )
        };
        if result != 0 {
            return Err(Counter::AdjustRoomFailed);
        }
        self.make_linear((LENGTH + ipv6::LENGTH + LEAST_TCP) as u32);
        Ok(true)
    }
}

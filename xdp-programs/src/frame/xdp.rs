//! Frames at XDP: before the stack, segmented, maybe in several buffers. Frames that need the stack (unknown
//! neighbours, headers outside the first buffer) are passed on to tc unchanged.

use core::mem::{MaybeUninit, zeroed};

use aya_ebpf::{
    EbpfContext,
    bindings::{
        BPF_FIB_LOOKUP_OUTPUT, bpf_fib_lookup as FibLookup,
        xdp_action::{XDP_DROP, XDP_PASS, XDP_TX},
    },
    helpers::{
        bpf_fib_lookup, bpf_redirect, bpf_xdp_adjust_head, bpf_xdp_adjust_meta, bpf_xdp_get_buff_len,
        bpf_xdp_load_bytes,
    },
    programs::XdpContext,
};
use thuban_common::{
    counters::Counter,
    packet::{
        Header,
        ethernet::{self, EthernetHeader},
    },
    tables::{ConfigEntry, DropletAddress, ENCAPSULATION_LENGTH, LocalEntry, TRANSIT_MAGIC, TransitMetadata},
};

use super::{Frame, Verdict, tc::TcFrame};

/// AF_INET of linux/socket.h.
const AF_INET: u8 = 2;

pub struct XdpFrame {
    context: XdpContext,
}

/// Interface and Ethernet header towards a droplet.
pub struct XdpNextHop {
    interface: u32,
    ethernet: EthernetHeader,
}

impl XdpFrame {
    #[inline(always)]
    pub fn new(context: XdpContext) -> Self {
        Self { context }
    }

    #[inline(always)]
    fn write_metadata(&mut self, metadata: TransitMetadata) -> Option<()> {
        let start = self.context.metadata();
        if start + size_of::<TransitMetadata>() > self.context.data() {
            return None;
        }
        // SAFETY: bounds checked; metadata is 4-aligned.
        unsafe { *(start as *mut TransitMetadata) = metadata };
        Some(())
    }
}

impl Frame for XdpFrame {
    const PASS: Verdict = XDP_PASS as Verdict;
    const DROP: Verdict = XDP_DROP as Verdict;
    const IS_LAST: bool = false;
    type NextHop = XdpNextHop;

    #[inline(always)]
    fn tc(&mut self) -> Option<&mut TcFrame> {
        None
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
            let result = bpf_xdp_load_bytes(
                self.context.ctx,
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
        let linear = (self.context.data_end() - self.context.data()) as u32;
        linear >= length || linear >= self.length()
    }

    #[inline(always)]
    fn length(&self) -> u32 {
        // SAFETY: helper on our own context.
        unsafe { bpf_xdp_get_buff_len(self.context.ctx) as u32 }
    }

    #[inline(always)]
    fn interface(&self) -> u32 {
        self.context.ingress_ifindex() as u32
    }

    #[inline(always)]
    fn segment_size(&self) -> u32 {
        0
    }

    /// A frame that XDP sends on has lost what the NIC was to do.
    #[inline(always)]
    fn checksum_place(&self) -> Option<u32> {
        None
    }

    #[inline(always)]
    fn is_for_node(&self) -> bool {
        true
    }

    #[inline(always)]
    fn is_vlan_tagged(&self) -> bool {
        false
    }

    #[inline(always)]
    fn next_hop(&self, config: &ConfigEntry, droplet: DropletAddress) -> Option<XdpNextHop> {
        // SAFETY: integers and arrays: zeros are valid.
        let mut fib: FibLookup = unsafe { zeroed() };
        fib.family = AF_INET;
        fib.l4_protocol = thuban_common::packet::ipv4::UDP;
        fib.ifindex = config.uplink;
        fib.__bindgen_anon_3.ipv4_src = u32::from_ne_bytes(config.droplet);
        fib.__bindgen_anon_4.ipv4_dst = u32::from_ne_bytes(droplet);
        // SAFETY: the structure is ours and as long as we say.
        let result = unsafe {
            bpf_fib_lookup(
                self.context.as_ptr(),
                &raw mut fib,
                size_of::<FibLookup>() as i32,
                BPF_FIB_LOOKUP_OUTPUT as u32,
            )
        };
        if result != 0 {
            return None;
        }
        let ethernet = EthernetHeader::new(fib.dmac, fib.smac, ethernet::IPV4);
        Some(XdpNextHop {
            interface: fib.ifindex,
            ethernet,
        })
    }

    #[inline(always)]
    fn grow(&mut self, _protocol: u8) -> Result<(), Counter> {
        // SAFETY: helper on our own context.
        match unsafe { bpf_xdp_adjust_head(self.context.ctx, -(ENCAPSULATION_LENGTH as i32)) } {
            0 => Ok(()),
            _ => Err(Counter::AdjustRoomFailed),
        }
    }

    #[inline(always)]
    fn send(&mut self, next_hop: &XdpNextHop) -> Result<Verdict, Counter> {
        self.store(0, &next_hop.ethernet).ok_or(Counter::Truncated)?;
        if next_hop.interface == self.interface() {
            return Ok(XDP_TX as Verdict);
        }
        // SAFETY: helper without pointers.
        Ok(unsafe { bpf_redirect(next_hop.interface, 0) } as Verdict)
    }

    /// Replies by XDP_TX. At a veth that needs a program at the pod's end, which belongs to the pod.
    #[inline(always)]
    fn reply(&mut self) -> Option<Verdict> {
        None
    }

    #[inline(always)]
    fn deliver(&mut self, local: &LocalEntry) -> Verdict {
        // SAFETY: helper without pointers.
        unsafe { bpf_redirect(local.ifindex, 0) as Verdict }
    }

    #[inline(always)]
    fn cut(&mut self, _length: u32) -> Option<()> {
        None
    }

    #[inline(always)]
    fn quote(&mut self, _keep: u32, _room: u32) -> Option<()> {
        None
    }

    #[inline(always)]
    fn sum<const N: usize>(&self, _offset: usize) -> Option<u32> {
        None
    }

    /// Hands the inner frame to tc, so that the stack can aggregate segments before. Its MAC is the pod's: if no
    /// program of ours is behind, the stack drops the frame as another host's.
    #[inline(always)]
    fn decapsulate(
        &mut self,
        length: u32,
        _is_v6: bool,
        vni: u32,
        local: &LocalEntry,
    ) -> Result<bool, Counter> {
        let metadata = TransitMetadata {
            magic: TRANSIT_MAGIC,
            vni,
            ifindex: local.ifindex,
        };
        // SAFETY: helper on our own context. Drivers without metadata fail: tc then does it all.
        if unsafe { bpf_xdp_adjust_meta(self.context.ctx, -(size_of::<TransitMetadata>() as i32)) } != 0 {
            return Ok(false);
        }
        self.write_metadata(metadata).ok_or(Counter::AdjustRoomFailed)?;
        // SAFETY: helper on our own context; it moves the metadata along.
        if unsafe { bpf_xdp_adjust_head(self.context.ctx, length.cast_signed()) } != 0 {
            return Err(Counter::AdjustRoomFailed);
        }
        Ok(true)
    }
}

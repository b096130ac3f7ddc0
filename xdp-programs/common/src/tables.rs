//! Keys and entries of the pinned maps, as they lie in memory.
//!
//! Invariant: `repr(C)`, integers and arrays only, explicit padding, sizes asserted; any change of a layout raises
//! [`LAYOUT_VERSION`], because running programs of the old version may share the maps. Numbers are host order unless
//! the doc says otherwise; addresses are network order.
//!
//! The kernel gives a hash map's removed element to the next key at once, while programs still read it. So an entry
//! that could lead a packet into another VPC begins with its owner, in one aligned word of 8 bytes. The kernel copies
//! values forwards. A program that reads that word last knows the owner of the other words.

mod seen;

use core::mem::offset_of;

use crate::policy::{STAMP_GUARDED, Stamp};

pub use seen::{
    ANNOUNCEMENTS_PER_SECOND, AnnouncedEntry, DROPS_CAPACITY, DirectWanted, DropKey, LOAD_OF_DIVIDER,
    LoadKey, MISSES_CAPACITY, MissEntry, NO_COUNTER, NOTED_PER_WINDOW, NOTED_WINDOW, TracePoint, TraceRecord,
};

/// Version of everything under `thuban/layout_N` in bpffs.
pub const LAYOUT_VERSION: u32 = 2;
/// The most bouncers of a network, and the most dividers of a VPC.
pub const MAX_MEMBERS: usize = 8;
/// MAC of every gateway and of the host's end of every veth: 02:54:68:75:62:61.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x54, 0x68, 0x75, 0x62, 0x61];
/// Source address of the host towards pods of its own node (link-local, never routed): 169.254.64.1.
pub const HOST_SOURCE: [u8; 4] = [169, 254, 64, 1];
/// The same for IPv6, and every pod's IPv6 gateway: fe80::5468:7562:6101.
pub const HOST_SOURCE_V6: Address = [
    0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0x54, 0x68, 0x75, 0x62, 0x61, 0x01,
];
/// Source address of the host towards tenants' pods by protocols whose answers only conntrack can tell: UDP and SCTP.
/// Nobody has the address. conntrack translates answers to it; what else is sent there finds no one: 169.254.64.2.
pub const HOST_TRACKED: [u8; 4] = [169, 254, 64, 2];
/// The same for IPv6, of the range of which all is discarded (RFC 6666): 100::5468:7562:6102. A link-local address
/// would not do, because a server that is bound to no address would answer it from the pod's own link-local address.
pub const HOST_TRACKED_V6: Address = [
    0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x54, 0x68, 0x75, 0x62, 0x61, 0x02,
];
/// UDP port of Geneve (RFC 8926).
pub const GENEVE_PORT: u16 = 6081;
/// Outer Ethernet + IPv4 + UDP + Geneve: bytes between two frames' starts.
pub const ENCAPSULATION_LENGTH: usize = 14 + 20 + 8 + 8;

/// IPv6, or IPv4 mapped (`::ffff:a.b.c.d`), network order.
pub type Address = [u8; 16];
/// IPv4 of a droplet on the underlay, network order.
pub type DropletAddress = [u8; 4];

/// Key of ENDPOINTS, MISSES and TRACED.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EndpointKey {
    pub vni: u32,
    pub address: Address,
}

/// Data of the LPM key of SUBNETS. The VNI is network order, so that prefixes of 32 + n bits cover it whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubnetKey {
    pub vni: [u8; 4],
    pub address: Address,
}

/// Data of the LPM key of `SOURCE_RANGES`: the first 160 bits are a front, the others a range of its clients. The VNI
/// is that of the front's backends, in network order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceKey {
    pub vni: [u8; 4],
    pub front: Address,
    pub client: Address,
}

/// Bits of a [`SourceKey`] before the client's address.
pub const SOURCE_FRONT_BITS: u32 = 160;

/// Entry of `SOURCE_RANGES`: whether clients of the range may send to the front. One that holds all clients, and says
/// no, stands for each front that has ranges.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceEntry {
    pub admits: u32,
}

/// CONFIG[0]: written before any program is attached.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigEntry {
    pub droplet: DropletAddress,
    pub uplink: u32,
    /// MTU of the uplink, bytes.
    pub mtu: u32,
    pub flags: u32,
    /// What [`MissEntry::place`] mixes in, so that nobody chooses whose place in MISSES a packet takes. The same as
    /// long as the tables live.
    pub seed: u32,
}

/// ON_LINK[0]: the range of droplets that the uplink reaches without a gateway. Their packets need no look-up of a
/// route. Written by transitd, which follows the node's routes.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnLinkEntry {
    pub network: DropletAddress,
    /// Zeros: no droplet is in the range.
    pub mask: DropletAddress,
}

impl OnLinkEntry {
    pub const NONE: Self = Self {
        network: [0; 4],
        mask: [0; 4],
    };

    #[inline(always)]
    pub const fn has(&self, droplet: DropletAddress) -> bool {
        let mask = u32::from_ne_bytes(self.mask);
        mask != 0 && u32::from_ne_bytes(droplet) & mask == u32::from_ne_bytes(self.network)
    }
}

/// ATTACHMENTS[ifindex of the host's end]: what the agent holds the pod to, and what network policy says of it.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachmentEntry {
    /// The key's interface. Together with the VNI it is the word that says whose the entry is.
    pub ifindex: u32,
    pub vni: u32,
    pub address: Address,
    pub network: u32,
    pub mac: [u8; 6],
    pub flags: u8,
    /// The DSCP of outer headers, as [`outer_dscp`] makes it; 0: the inner one.
    pub outer_dscp: u8,
    /// See [`crate::policy`].
    pub class: u32,
    /// What applies to packets to the endpoint; 0: nothing.
    pub ingress_set: u32,
    /// What applies to packets from it; 0: nothing.
    pub egress_set: u32,
}

/// Returns the form of a DSCP in [`AttachmentEntry::outer_dscp`]. `None`: outer headers have the inner one.
#[inline(always)]
pub const fn outer_dscp(dscp: Option<u8>) -> u8 {
    match dscp {
        Some(dscp) => dscp + 1,
        None => 0,
    }
}

impl AttachmentEntry {
    /// Returns DSCP and ECN of the outer header of a packet. ECN is always the packet's (RFC 6040).
    #[inline(always)]
    pub const fn outer_class(&self, inner: u8) -> u8 {
        match self.outer_dscp.checked_sub(1) {
            Some(dscp) => dscp << 2 | inner & 3,
            None => inner,
        }
    }

    /// Returns what packets to other droplets say of the endpoint.
    #[inline(always)]
    pub const fn stamp(&self) -> Stamp {
        Stamp {
            class: self.class,
            egress_set: self.egress_set,
            flags: if self.ingress_set == 0 { 0 } else { STAMP_GUARDED },
        }
    }
}

/// The part of an [`EndpointEntry`] that says where to deliver on this droplet.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalEntry {
    /// The key's VNI. Together with the interface it is the word that says whose the entry is.
    pub vni: u32,
    /// The host's end of the veth; 0: the endpoint isn't on this droplet.
    pub ifindex: u32,
    pub mac: [u8; 6],
    pub flags: u16,
}

/// ENDPOINTS[(vni, address)]: everything that this droplet knows of an endpoint. One row of each kind shares the entry,
/// so that a packet's address is looked up once. A droplet of zeros stands for a row that isn't there.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointEntry {
    pub local: LocalEntry,
    /// Direct row: the droplet that holds the endpoint.
    pub direct: DropletAddress,
    /// Bouncer row: the same, of endpoints whose network has a bouncer here.
    pub bouncer: DropletAddress,
    /// Forward row: the droplet to which the endpoint moved from here.
    pub forward: DropletAddress,
    /// Forwarder: the droplet that held the endpoint before, and may send on packets that it got for the endpoint.
    pub forwarder: DropletAddress,
    /// Whether the direct row was used: set to 1 by agents, cleared by transitd's idle scan.
    pub used: u32,
    pub padding: u32,
}

impl EndpointEntry {
    /// Returns an entry without any row.
    pub const fn new(vni: u32) -> Self {
        Self {
            local: LocalEntry {
                vni,
                ifindex: 0,
                mac: [0; 6],
                flags: 0,
            },
            direct: NO_DROPLET,
            bouncer: NO_DROPLET,
            forward: NO_DROPLET,
            forwarder: NO_DROPLET,
            used: 0,
            padding: 0,
        }
    }

    /// Returns the droplet of a row.
    pub const fn remote(&mut self, row: RemoteRow) -> &mut DropletAddress {
        match row {
            RemoteRow::Direct => &mut self.direct,
            RemoteRow::Bouncer => &mut self.bouncer,
            RemoteRow::Forward => &mut self.forward,
            RemoteRow::Forwarder => &mut self.forwarder,
        }
    }

    /// Whether the endpoint is on this droplet.
    #[inline(always)]
    pub const fn is_here(&self) -> bool {
        self.local.ifindex != 0
    }

    /// Whether it has no row: then there is no such entry.
    pub fn is_empty(&self) -> bool {
        let droplets = [self.direct, self.bouncer, self.forward, self.forwarder];
        !self.is_here() && droplets == [NO_DROPLET; 4]
    }
}

/// The rows of an [`EndpointEntry`] that name a droplet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RemoteRow {
    Direct,
    Bouncer,
    Forward,
    Forwarder,
}

impl RemoteRow {
    pub const ALL: [Self; 4] = [Self::Direct, Self::Bouncer, Self::Forward, Self::Forwarder];
}

/// The droplet of a row that isn't there.
pub const NO_DROPLET: DropletAddress = [0; 4];

/// Droplets that carry a role, sorted: the first `count`. Behind them are those that will carry it or did. They are
/// never picked, but may pass packets on, because not all droplets learn of a change at the same moment. Then zeros.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Members {
    pub count: u32,
    pub droplets: [DropletAddress; MAX_MEMBERS],
}

/// SUBNETS[(vni, cidr)]: the network that an address belongs to; `network` 0 is the VPC's own range.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubnetEntry {
    pub network: u32,
    pub flags: u32,
    pub bouncers: Members,
}

/// VPCS[vni].
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VpcEntry {
    /// The key. Together with the flags it is the word that says whose the entry is.
    pub vni: u32,
    pub flags: u32,
    pub dividers: Members,
    pub padding: u32,
}

impl VpcEntry {
    pub const fn new(vni: u32, flags: u32, dividers: Members) -> Self {
        Self {
            vni,
            flags,
            dividers,
            padding: 0,
        }
    }
}

/// DROPLETS[underlay address]: a known droplet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropletEntry {
    pub flags: u32,
}

/// PATH_MTUS[droplet], LRU: the MTU that a router on the underlay reported for the way to a droplet. Written by
/// transit.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathMtuEntry {
    /// When it was reported, ns since boot; forgotten after [`PATH_MTU_LIFE`].
    pub time: u64,
    /// The MTU: bytes of the outer IP packet.
    pub mtu: u32,
    pub padding: u32,
}

/// PROBES[droplet]: a member of a role that this droplet asks whether it lives. transitd makes and removes the entries
/// and writes all but `heard`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeEntry {
    /// When transit got an answer, ns since boot; 0: never. If this droplet's entry was removed at that moment, the
    /// time may be written into another droplet's entry, which then counts as heard once more.
    pub heard: u64,
    /// The number that an answer must repeat. Never 0.
    pub secret: u64,
    /// Whether the droplet is silent (1), for the next transitd.
    pub silent: u32,
    pub padding: u32,
}

/// How long a path's MTU is believed, ns: ten minutes (RFC 1191 section 6.3).
pub const PATH_MTU_LIFE: u64 = 600_000_000_000;
/// The least path MTU that is believed: 576 (RFC 791) and the encapsulation.
pub const LEAST_PATH_MTU: u32 = 576 + ENCAPSULATION_LENGTH as u32;
/// Endpoints that ENDPOINTS has room for. transitd writes no more rows of a kind than its part of the table, so that no
/// kind takes another one's room.
pub const ENDPOINTS_CAPACITY: u32 = LOCAL_ROWS + DIRECT_ROWS + BOUNCER_ROWS + FORWARD_ROWS + FORWARDER_ROWS;
/// The most endpoints of this droplet.
pub const LOCAL_ROWS: u32 = 4096;
/// The most direct rows.
pub const DIRECT_ROWS: u32 = 49_152;
/// The most bouncer rows.
pub const BOUNCER_ROWS: u32 = 196_608;
/// The most forward rows.
pub const FORWARD_ROWS: u32 = 8192;
/// The most forwarders.
pub const FORWARDER_ROWS: u32 = 4096;
/// [`ConfigEntry::flags`]: transit is at XDP, so that frame metadata at the uplink's tc hook is its own.
pub const CONFIG_TRANSIT_AT_XDP: u32 = 1;
/// [`ConfigEntry::flags`]: TRACED has entries.
pub const CONFIG_TRACE: u32 = 2;
/// [`ConfigEntry::flags`]: programs tell of packets that they drop, see [`crate::flow_events`].
pub const CONFIG_FLOW_DROPS: u32 = 4;
/// [`ConfigEntry::flags`]: programs tell of packets that agents send and that are delivered.
pub const CONFIG_FLOWS: u32 = 8;
/// [`LocalEntry::flags`]: the pod's end takes frames that XDP redirects to it (its GRO is on, so it has NAPI).
pub const LOCAL_TAKES_XDP: u16 = 1;
/// [`LocalEntry::flags`]: the endpoint is the node itself. Its end of the veth is in the host's own network namespace,
/// to which a redirect to the peer may not lead.
pub const LOCAL_HOST: u16 = 2;
/// [`LocalEntry::flags`]: the endpoint's attachment has an ingress or an egress set.
pub const LOCAL_HAS_POLICY: u16 = 4;
/// [`LocalEntry::flags`]: what the endpoint receives is limited. The limit is at the host's end of the veth, so frames
/// go out by that end. The flags have no [`LOCAL_TAKES_XDP`] then.
pub const LOCAL_SHAPED: u16 = 8;
/// [`LocalEntry::flags`]: who is denied by policy hears so, see [`ATTACHMENT_REJECTS`]. tc does it: programs at XDP
/// leave it what policy judges.
pub const LOCAL_REJECTS: u16 = 16;
/// [`AttachmentEntry::flags`]: the endpoint is the node itself, as with [`LOCAL_HOST`].
pub const ATTACHMENT_HOST: u8 = 1;
/// [`AttachmentEntry::flags`]: what the endpoint receives is limited, as with [`LOCAL_SHAPED`].
pub const ATTACHMENT_SHAPED: u8 = 2;
/// [`AttachmentEntry::flags`]: what the endpoint sends is limited, METERS has an entry for it.
pub const ATTACHMENT_METERED: u8 = 4;
/// [`AttachmentEntry::flags`]: what the VPC sends out of this droplet is limited, METERS has an entry for it.
pub const ATTACHMENT_VPC_METERED: u8 = 8;
/// [`AttachmentEntry::flags`]: who is denied by policy in this VPC hears so, by a TCP reset or an ICMP error.
pub const ATTACHMENT_REJECTS: u8 = 16;
/// [`SubnetEntry::flags`]: this droplet is a bouncer of the network.
pub const SUBNET_BOUNCER_HERE: u32 = 1;
/// [`SubnetEntry::flags`]: the range has addresses of services, which no endpoint has; `network` is 0.
pub const SUBNET_SERVICES: u32 = 2;
/// [`SubnetEntry::flags`]: the node's own stack serves the range for the VPC; `network` is 0.
pub const SUBNET_BY_NODE: u32 = 4;
/// [`SubnetEntry::flags`]: the range is outside of the VPC, and closed to it even if it may go out; `network` is 0.
pub const SUBNET_CLOSED: u32 = 8;
/// [`SubnetEntry::flags`]: packets of the network's endpoints to outside the VPC are dropped, whatever the VPC's flags.
pub const SUBNET_PRIVATE: u32 = 16;
/// The flags of ranges in which no endpoint of the VPC has an address.
pub const SUBNET_FOREIGN: u32 = SUBNET_SERVICES | SUBNET_BY_NODE | SUBNET_CLOSED;
/// [`VpcEntry::flags`]: this droplet is a divider of the VPC.
pub const VPC_DIVIDER_HERE: u32 = 1;
/// [`VpcEntry::flags`]: packets to outside the VPC go to the host's stack.
pub const VPC_HOST_ACCESS: u32 = 2;
/// [`VpcEntry::flags`]: packets to outside the VPC leave in their node's name; without [`VPC_HOST_ACCESS`] they don't
/// go to nodes.
pub const VPC_EGRESS: u32 = 4;

/// [`TransitMetadata::magic`]: "thub".
pub const TRANSIT_MAGIC: u32 = 0x7468_7562;

/// Frame metadata from XDP transit (decapsulated, checked) to the tc program behind it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransitMetadata {
    pub magic: u32,
    pub vni: u32,
    /// The host's end of the target's veth.
    pub ifindex: u32,
}

const _: () = {
    assert!(size_of::<EndpointKey>() == 20);
    assert!(size_of::<SubnetKey>() == 20);
    assert!(size_of::<SourceKey>() == 36);
    assert!(size_of::<SourceEntry>() == 4);
    assert!(size_of::<ConfigEntry>() == 20);
    assert!(size_of::<OnLinkEntry>() == 8);
    assert!(size_of::<AttachmentEntry>() == 48 && offset_of!(AttachmentEntry, ifindex) == 0);
    assert!(size_of::<LocalEntry>() == 16 && offset_of!(LocalEntry, vni) == 0);
    assert!(size_of::<EndpointEntry>() == 40 && offset_of!(EndpointEntry, local) == 0);
    assert!(size_of::<Members>() == 36);
    assert!(size_of::<SubnetEntry>() == 44);
    assert!(size_of::<VpcEntry>() == 48 && offset_of!(VpcEntry, vni) == 0);
    assert!(size_of::<TransitMetadata>() == 12);
    assert!(size_of::<LoadKey>() == 8);
    assert!(size_of::<PathMtuEntry>() == 16);
    assert!(size_of::<AnnouncedEntry>() == 16);
    assert!(size_of::<ProbeEntry>() == 24);
    assert!(size_of::<TraceRecord>() == 72);
    assert!(size_of::<DropKey>() == 8);
};

#[cfg(feature = "user")]
mod pod {
    use super::{
        AnnouncedEntry, AttachmentEntry, ConfigEntry, DropKey, DropletEntry, EndpointEntry, EndpointKey,
        LoadKey, MissEntry, OnLinkEntry, PathMtuEntry, ProbeEntry, SourceEntry, SourceKey, SubnetEntry,
        SubnetKey, TraceRecord, VpcEntry,
    };
    macro_rules! pod {
        ($($t:ty),*) => {
            // SAFETY: repr(C) of integers and arrays without implicit padding (sizes asserted above).
            $(unsafe impl aya::Pod for $t {})*
        };
    }
    pod!(
        AttachmentEntry,
        ConfigEntry,
        DropKey,
        DropletEntry,
        EndpointEntry,
        EndpointKey,
        MissEntry
    );
    pod!(
        SubnetEntry,
        SubnetKey,
        SourceKey,
        SourceEntry,
        VpcEntry,
        LoadKey,
        OnLinkEntry,
        PathMtuEntry,
        ProbeEntry,
        AnnouncedEntry,
        TraceRecord
    );
}

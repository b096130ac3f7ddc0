//! Keys and entries of the pinned maps, as they lie in memory.
//!
//! Invariant: `repr(C)`, integers and arrays only, explicit padding, sizes asserted; any change of a layout raises
//! [`LAYOUT_VERSION`], because running programs of the old version may share the maps.
//! Numbers are host order unless the doc says otherwise; addresses are network order.

/// Version of everything under `thuban/layout_N` in bpffs.
pub const LAYOUT_VERSION: u32 = 1;
/// Most bouncers of a network, and most dividers of a VPC.
pub const MAX_MEMBERS: usize = 8;
/// MAC of every gateway and of the host's end of every veth: 02:54:68:75:62:61.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x54, 0x68, 0x75, 0x62, 0x61];
/// Source address of the host towards pods of its own node (link-local, never routed): 169.254.64.1.
pub const HOST_SOURCE: [u8; 4] = [169, 254, 64, 1];
/// The same for IPv6, and every pod's IPv6 gateway: fe80::5468:7562:6101.
pub const HOST_SOURCE_V6: Address = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0x54, 0x68, 0x75, 0x62, 0x61, 0x01];
/// UDP port of Geneve (RFC 8926).
pub const GENEVE_PORT: u16 = 6081;
/// Outer Ethernet + IPv4 + UDP + Geneve: bytes between two frames' starts.
pub const ENCAPSULATION_LENGTH: usize = 14 + 20 + 8 + 8;

/// IPv6, or IPv4 mapped (`::ffff:a.b.c.d`), network order.
pub type Address = [u8; 16];
/// IPv4 of a droplet on the underlay, network order.
pub type DropletAddress = [u8; 4];

/// Key of LOCAL_ENDPOINTS, DIRECT_ROWS, BOUNCER_ROWS, FORWARD_ROWS and MISSES.
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

/// CONFIG[0]: written before any program is attached.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigEntry {
    pub droplet: DropletAddress,
    pub uplink: u32,
    /// MTU of the uplink, bytes.
    pub mtu: u32,
    pub flags: u32,
}

/// ATTACHMENTS[ifindex of the host's end]: what the agent holds the pod to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachmentEntry {
    pub vni: u32,
    pub network: u32,
    pub address: Address,
    pub mac: [u8; 6],
    pub flags: u16,
}

/// LOCAL_ENDPOINTS[(vni, address)]: where to deliver on this droplet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalEntry {
    /// Host's end of the veth.
    pub ifindex: u32,
    pub network: u32,
    pub mac: [u8; 6],
    pub flags: u16,
}

/// DIRECT_ROWS, BOUNCER_ROWS, FORWARD_ROWS: which droplet holds the endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteEntry {
    pub droplet: DropletAddress,
    /// DIRECT_ROWS: set to 1 by the agent when used, cleared by transitd's idle scan. Else 0.
    pub used: u32,
}

/// Droplets that carry a role, sorted, the first `count` valid.
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
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VpcEntry {
    pub flags: u32,
    pub dividers: Members,
}

/// DROPLETS[underlay address]: a known droplet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropletEntry {
    pub flags: u32,
}

/// MISSES[(vni, address)], LRU: packets that an agent sent by way of a bouncer or divider.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissEntry {
    pub packets: u32,
}

/// [`LocalEntry::flags`]: the pod's end takes frames that XDP redirects to it (its GRO is on, so it has NAPI).
pub const LOCAL_TAKES_XDP: u16 = 1;
/// [`SubnetEntry::flags`]: this droplet is a bouncer of the network.
pub const SUBNET_BOUNCER_HERE: u32 = 1;
/// [`VpcEntry::flags`]: this droplet is a divider of the VPC.
pub const VPC_DIVIDER_HERE: u32 = 1;
/// [`VpcEntry::flags`]: packets to outside the VPC go to the host's stack.
pub const VPC_HOST_ACCESS: u32 = 2;

/// Record of the ring buffer DIRECT_WANTED: transitd subscribes to this address.
pub type DirectWanted = EndpointKey;

/// [`TransitMetadata::magic`]: "thub".
pub const TRANSIT_MAGIC: u32 = 0x7468_7562;

/// Frame metadata from XDP transit (decapsulated, checked) to the tc program behind it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransitMetadata {
    pub magic: u32,
    pub vni: u32,
    /// Host's end of the target's veth.
    pub ifindex: u32,
}

const _: () = {
    assert!(size_of::<EndpointKey>() == 20);
    assert!(size_of::<SubnetKey>() == 20);
    assert!(size_of::<ConfigEntry>() == 16);
    assert!(size_of::<AttachmentEntry>() == 32);
    assert!(size_of::<LocalEntry>() == 16);
    assert!(size_of::<RemoteEntry>() == 8);
    assert!(size_of::<Members>() == 36);
    assert!(size_of::<SubnetEntry>() == 44);
    assert!(size_of::<VpcEntry>() == 40);
    assert!(size_of::<TransitMetadata>() == 12);
};

#[cfg(feature = "user")]
mod pod {
    use super::{
        AttachmentEntry, ConfigEntry, DropletEntry, EndpointKey, LocalEntry, MissEntry, RemoteEntry,
        SubnetEntry, SubnetKey, VpcEntry,
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
        DropletEntry,
        EndpointKey,
        LocalEntry,
        MissEntry,
        RemoteEntry
    );
    pod!(SubnetEntry, SubnetKey, VpcEntry);
}

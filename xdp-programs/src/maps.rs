//! The tables. Names and layouts are the contract with user space (`thuban_common::tables`), which pins and fills
//! them; lookups here copy nothing but keys.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    macros::map,
    maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, PerCpuHashMap, RingBuf, lpm_trie::Key},
};
use thuban_common::{
    counters::COUNTERS_CAPACITY,
    packet::ipv6,
    services::{
        AffinityEntry, AffinityKey, BackendEntry, BackendKey, CHUNK, ConnectionEntry, ConnectionKey,
        GatesEntry, PendingEntry, PendingKey, ServiceEntry, ServiceKey, SlotsEntry, SlotsKey,
    },
    tables::{
        Address, AnnouncedEntry, AttachmentEntry, ConfigEntry, DropletAddress, DropletEntry, EndpointKey,
        LoadKey, LocalEntry, MissEntry, PathMtuEntry, RemoteEntry, SubnetEntry, SubnetKey, VpcEntry,
    },
};

#[map]
static CONFIG: Array<ConfigEntry> = Array::with_max_entries(1, 0);
#[map]
static ATTACHMENTS: HashMap<u32, AttachmentEntry> = HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);
#[map]
static LOCAL_ENDPOINTS: HashMap<EndpointKey, LocalEntry> = HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);
#[map]
static DIRECT_ROWS: HashMap<EndpointKey, RemoteEntry> = HashMap::with_max_entries(65536, BPF_F_NO_PREALLOC);
#[map]
static BOUNCER_ROWS: HashMap<EndpointKey, RemoteEntry> =
    HashMap::with_max_entries(262_144, BPF_F_NO_PREALLOC);
#[map]
static FORWARD_ROWS: HashMap<EndpointKey, RemoteEntry> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);
#[map]
static FORWARDERS: HashMap<EndpointKey, RemoteEntry> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);
#[map]
static SUBNETS: LpmTrie<SubnetKey, SubnetEntry> = LpmTrie::with_max_entries(65536, BPF_F_NO_PREALLOC);
#[map]
static VPCS: HashMap<u32, VpcEntry> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);
#[map]
static DROPLETS: HashMap<DropletAddress, DropletEntry> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);
#[map]
pub static MISSES: LruHashMap<EndpointKey, MissEntry> = LruHashMap::with_max_entries(16384, 0);
#[map]
pub static ANNOUNCED: LruHashMap<u32, AnnouncedEntry> = LruHashMap::with_max_entries(1024, 0);
#[map]
pub static PATH_MTUS: LruHashMap<DropletAddress, PathMtuEntry> = LruHashMap::with_max_entries(4096, 0);
/// Until when (ns since boot) packets of an endpoint are traced.
#[map]
pub static TRACED: HashMap<EndpointKey, u64> = HashMap::with_max_entries(64, BPF_F_NO_PREALLOC);
#[map]
pub static TRACE: RingBuf = RingBuf::with_byte_size(1 << 18, 0);
#[map]
pub static DIRECT_WANTED: RingBuf = RingBuf::with_byte_size(65536, 0);
#[map]
pub static LOADS: PerCpuHashMap<LoadKey, u64> = PerCpuHashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);
#[map]
pub static SERVICES: HashMap<ServiceKey, ServiceEntry> =
    HashMap::with_max_entries(131_072, BPF_F_NO_PREALLOC);
#[map]
static SLOTS: HashMap<SlotsKey, SlotsEntry> = HashMap::with_max_entries(262_144, BPF_F_NO_PREALLOC);
#[map]
static BACKENDS: HashMap<BackendKey, BackendEntry> = HashMap::with_max_entries(262_144, BPF_F_NO_PREALLOC);
#[map]
pub static CONNECTIONS: HashMap<ConnectionKey, ConnectionEntry> =
    HashMap::with_max_entries(524_288, BPF_F_NO_PREALLOC);
/// Entries of CONNECTIONS that a client has, and, by [`thuban_common::services::ALL_CONNECTIONS`] and
/// [`thuban_common::services::ALL_PENDING`], all clients of a VPC.
#[map]
pub static SHARES: HashMap<EndpointKey, u32> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);
#[map]
pub static AFFINITY: LruHashMap<AffinityKey, AffinityEntry> = LruHashMap::with_max_entries(16384, 0);
#[map]
pub static PENDING: LruHashMap<PendingKey, PendingEntry> = LruHashMap::with_max_entries(16384, 0);
#[map]
pub static GATES: Array<GatesEntry> = Array::with_max_entries(1, 0);
#[map]
pub static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(COUNTERS_CAPACITY, 0);

#[inline(always)]
pub const fn key(vni: u32, address: Address) -> EndpointKey {
    EndpointKey { vni, address }
}

/// CONFIG, unless user space hasn't written it.
#[inline(always)]
pub fn config() -> Option<&'static ConfigEntry> {
    CONFIG.get(0).filter(|config| config.uplink != 0)
}

#[inline(always)]
pub fn attachment(interface: u32) -> Option<&'static AttachmentEntry> {
    // SAFETY: NO_PREALLOC: an element stays until a grace period after its removal. So below.
    unsafe { ATTACHMENTS.get(&interface) }
}

#[inline(always)]
pub fn local(key: &EndpointKey) -> Option<&'static LocalEntry> {
    // SAFETY: as in `attachment`.
    unsafe { LOCAL_ENDPOINTS.get(key) }
}

/// Where a direct row says the endpoint is.
#[inline(always)]
pub fn direct(key: &EndpointKey) -> Option<DropletAddress> {
    // SAFETY: as in `attachment`.
    unsafe { DIRECT_ROWS.get(key) }.map(|row| row.droplet)
}

/// As [`direct`], and marks the row as used. The mark is written once, to keep the cache line shared.
#[inline(always)]
pub fn use_direct(key: &EndpointKey) -> Option<DropletAddress> {
    let row = DIRECT_ROWS.get_ptr_mut(key)?;
    // SAFETY: as in `attachment`; `used` is a single word that user space clears.
    unsafe {
        if (*row).used == 0 {
            (*row).used = 1;
        }
        Some((*row).droplet)
    }
}

#[inline(always)]
pub fn bouncer_row(key: &EndpointKey) -> Option<DropletAddress> {
    // SAFETY: as in `attachment`.
    unsafe { BOUNCER_ROWS.get(key) }.map(|row| row.droplet)
}

#[inline(always)]
pub fn forward_row(key: &EndpointKey) -> Option<DropletAddress> {
    // SAFETY: as in `attachment`.
    unsafe { FORWARD_ROWS.get(key) }.map(|row| row.droplet)
}

/// Which droplet may forward packets for an endpoint of this one.
#[inline(always)]
pub fn forwarder(key: &EndpointKey) -> Option<DropletAddress> {
    // SAFETY: as in `attachment`.
    unsafe { FORWARDERS.get(key) }.map(|row| row.droplet)
}

/// The longest prefix of the VPC's networks that holds the address.
#[inline(always)]
pub fn subnet(vni: u32, address: Address) -> Option<&'static SubnetEntry> {
    SUBNETS.get(Key::new(
        160,
        SubnetKey {
            vni: vni.to_be_bytes(),
            address,
        },
    ))
}

#[inline(always)]
pub fn vpc(vni: u32) -> Option<&'static VpcEntry> {
    // SAFETY: as in `attachment`.
    unsafe { VPCS.get(&vni) }
}

#[inline(always)]
pub fn is_droplet(address: DropletAddress) -> bool {
    // SAFETY: as in `attachment`.
    unsafe { DROPLETS.get(&address) }.is_some()
}

/// Whether an address as packets have it is a known droplet's.
#[inline(always)]
pub fn is_droplet_at(address: &Address) -> bool {
    let [.., a, b, c, d] = *address;
    ipv6::is_mapped(address) && is_droplet([a, b, c, d])
}

#[inline(always)]
pub fn service(key: &ServiceKey) -> Option<&'static ServiceEntry> {
    // SAFETY: as in `attachment`.
    unsafe { SERVICES.get(key) }
}

/// The backend's index in a slot of a table.
#[inline(always)]
pub fn slot(table: u32, slot: u32) -> Option<u32> {
    let chunk = slot / CHUNK as u32;
    // SAFETY: as in `attachment`.
    let slots = unsafe { SLOTS.get(&SlotsKey { table, chunk }) }?;
    slots
        .backends
        .get(slot as usize % CHUNK)
        .map(|index| u32::from(*index))
}

#[inline(always)]
pub fn backend(service: u32, index: u32) -> Option<&'static BackendEntry> {
    // SAFETY: as in `attachment`.
    unsafe { BACKENDS.get(&BackendKey { service, index }) }
}

#[inline(always)]
pub fn connection(key: &ConnectionKey) -> Option<&'static mut ConnectionEntry> {
    // SAFETY: as in `attachment`. Programs on several CPUs may write words of one entry; each is right by itself.
    CONNECTIONS.get_ptr_mut(key).map(|entry| unsafe { &mut *entry })
}

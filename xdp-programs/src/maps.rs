//! The tables. Names and layouts are the contract with user space (`thuban_common::tables`), which pins and fills
//! them.
//!
//! A pointer to a hash map's element is good for as long as the program runs, but the key that it was found by isn't.
//! The kernel (since 6.1, `bpf_mem_cache_free`) puts a removed or replaced element into a free list and gives it to
//! the next key at once. Its memory stays one of the map's elements: the kernel waits for a grace period before it
//! uses it for anything else. Elements that an LRU map evicts are used again in the same way. Nodes of a trie are not:
//! they wait for a grace period (`kfree_rcu`, `bpf_mem_cache_free_rcu`).
//!
//! Invariant: an entry that could lead a packet into another VPC, or out of its VPC, is copied, and the copy is
//! believed only if its first word names the right owner. These are entries of ATTACHMENTS, ENDPOINTS, VPCS, HOMES,
//! CONNECTIONS and FRAGMENTS. The same holds for what policy says: entries of GRANTS and FLOWS. User space removes
//! entries of LISTS after a grace period, when no program reads them any more. Other entries are used within the VNI
//! of the packet alone: members of a role, services and backends. If such an entry is another's, the packet is lost
//! or goes to an address of its own VPC.

use core::{
    mem::MaybeUninit,
    sync::atomic::{Ordering, compiler_fence},
};

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    macros::map,
    maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, PerCpuHashMap, RingBuf, lpm_trie::Key},
};
use thuban_common::{
    counters::COUNTERS_CAPACITY,
    flow_events::{
        FLOW_BUDGETS_CAPACITY, FlowBudgetEntry, FlowBudgetKey, SEEN_FLOWS_CAPACITY, SeenFlowEntry,
        SeenFlowKey,
    },
    meter::{METERS_CAPACITY, MeterEntry, MeterKey},
    packet::ipv6,
    policy::{
        BLOCKS_CAPACITY, BlockKey, DENIALS_CAPACITY, DenialEntry, DenialKey, FLOWS_CAPACITY, FlowEntry,
        GRANTS_CAPACITY, Grant, GrantKey, LISTS_CAPACITY, ListEntry, ListKey, Lookups,
    },
    services::{
        self, AffinityEntry, AffinityKey, BackendEntry, BackendKey, CHUNK, CONNECTIONS_CAPACITY,
        ConnectionEntry, ConnectionKey, FRAGMENTS_CAPACITY, FragmentEntry, FragmentKey, GATES_OF_INTERFACES,
        GatesEntry, HOMES_CAPACITY, HomeEntry, PendingEntry, PendingKey, ServiceEntry, ServiceKey,
        SlotsEntry, SlotsKey,
    },
    skb::SkbLayout,
    tables::{
        Address, AnnouncedEntry, AttachmentEntry, ConfigEntry, DROPS_CAPACITY, DropKey, DropletAddress,
        DropletEntry, ENDPOINTS_CAPACITY, EndpointEntry, EndpointKey, LoadKey, LocalEntry, MISSES_CAPACITY,
        Members, MissEntry, NO_DROPLET, OnLinkEntry, PathMtuEntry, ProbeEntry, SOURCE_FRONT_BITS,
        SourceEntry, SourceKey, SubnetEntry, SubnetKey, VpcEntry,
    },
};

#[map]
static CONFIG: Array<ConfigEntry> = Array::with_max_entries(1, 0);
#[map]
static ATTACHMENTS: HashMap<u32, AttachmentEntry> = HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);
#[map]
static ENDPOINTS: HashMap<EndpointKey, EndpointEntry> =
    HashMap::with_max_entries(ENDPOINTS_CAPACITY, BPF_F_NO_PREALLOC);
#[map]
static SUBNETS: LpmTrie<SubnetKey, SubnetEntry> = LpmTrie::with_max_entries(65536, BPF_F_NO_PREALLOC);
#[map]
static SOURCE_RANGES: LpmTrie<SourceKey, SourceEntry> = LpmTrie::with_max_entries(262_144, BPF_F_NO_PREALLOC);
#[map]
static VPCS: HashMap<u32, VpcEntry> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);
#[map]
static DROPLETS: HashMap<DropletAddress, DropletEntry> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);
#[map]
pub static PROBES: HashMap<DropletAddress, ProbeEntry> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);
#[map]
pub static MISSES: Array<MissEntry> = Array::with_max_entries(MISSES_CAPACITY, 0);
#[map]
pub static ANNOUNCED: LruHashMap<u32, AnnouncedEntry> = LruHashMap::with_max_entries(2048, 0);
#[map]
pub static PATH_MTUS: LruHashMap<DropletAddress, PathMtuEntry> = LruHashMap::with_max_entries(4096, 0);
/// The end (ns since boot) of the time for which packets of an endpoint are traced.
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
static SLOTS: HashMap<SlotsKey, SlotsEntry> = HashMap::with_max_entries(65_536, BPF_F_NO_PREALLOC);
#[map]
static BACKENDS: HashMap<BackendKey, BackendEntry> = HashMap::with_max_entries(262_144, BPF_F_NO_PREALLOC);
#[map]
static HOMES: HashMap<BackendKey, HomeEntry> = HashMap::with_max_entries(HOMES_CAPACITY, BPF_F_NO_PREALLOC);
/// Whether SERVICES has fronts (1). User space writes it.
#[map]
static FRONTED: Array<u32> = Array::with_max_entries(1, 0);
#[map]
pub static CONNECTIONS: HashMap<ConnectionKey, ConnectionEntry> =
    HashMap::with_max_entries(CONNECTIONS_CAPACITY, BPF_F_NO_PREALLOC);
/// Entries of CONNECTIONS that a client has, and, by [`thuban_common::services::ALL_CONNECTIONS`] and
/// [`thuban_common::services::ALL_PENDING`], all clients of a VPC; by [`thuban_common::services::ALL_FLOWS`] its FLOWS.
#[map]
pub static SHARES: HashMap<EndpointKey, u32> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);
/// Counts, indexed by [`thuban_common::services::QUOTA_HELD`] and the constants behind it. Programs write the
/// numbers of held entries, user space each element by itself.
#[map]
pub static QUOTAS: Array<u32> = Array::with_max_entries(services::QUOTAS, 0);
#[map]
pub static AFFINITY: LruHashMap<AffinityKey, AffinityEntry> = LruHashMap::with_max_entries(16384, 0);
#[map]
pub static PENDING: LruHashMap<PendingKey, PendingEntry> = LruHashMap::with_max_entries(16384, 0);
#[map]
pub static FRAGMENTS: HashMap<FragmentKey, FragmentEntry> =
    HashMap::with_max_entries(FRAGMENTS_CAPACITY, BPF_F_NO_PREALLOC);
#[map]
static GRANTS: HashMap<GrantKey, Grant> = HashMap::with_max_entries(GRANTS_CAPACITY, BPF_F_NO_PREALLOC);
#[map]
static LISTS: HashMap<ListKey, ListEntry> = HashMap::with_max_entries(LISTS_CAPACITY, BPF_F_NO_PREALLOC);
#[map]
static BLOCKS: LpmTrie<BlockKey, Grant> = LpmTrie::with_max_entries(BLOCKS_CAPACITY, BPF_F_NO_PREALLOC);
#[map]
pub static FLOWS: HashMap<ConnectionKey, FlowEntry> =
    HashMap::with_max_entries(FLOWS_CAPACITY, BPF_F_NO_PREALLOC);
/// The number of changes of GRANTS, LISTS, BLOCKS and of attachments' classes and sets. User space raises it behind
/// each.
#[map]
static POLICY: Array<u32> = Array::with_max_entries(1, 0);
#[map]
pub static DENIALS: LruHashMap<DenialKey, DenialEntry> = LruHashMap::with_max_entries(DENIALS_CAPACITY, 0);
#[map]
pub static DENIED: RingBuf = RingBuf::with_byte_size(1 << 18, 0);
/// The end (ns since boot) of the time for which somebody reads DENIED.
#[map]
pub static FOLLOWED: Array<u64> = Array::with_max_entries(1, 0);
#[map]
pub static METERS: HashMap<MeterKey, MeterEntry> =
    HashMap::with_max_entries(METERS_CAPACITY, BPF_F_NO_PREALLOC);
#[map]
pub static GATES: Array<GatesEntry> = Array::with_max_entries(1 + GATES_OF_INTERFACES, 0);
/// Whether PATH_MTUS ever had an entry (1). Written by transit.
#[map]
pub static PATH_MTU_LEARNT: Array<u32> = Array::with_max_entries(1, 0);
#[map]
static ON_LINK: Array<OnLinkEntry> = Array::with_max_entries(1, 0);
#[map]
pub static DROPS: LruHashMap<DropKey, u64> = LruHashMap::with_max_entries(DROPS_CAPACITY, 0);
/// The loader gives it fewer entries if programs don't tell of all flows.
#[map]
pub static SEEN_FLOWS: LruHashMap<SeenFlowKey, SeenFlowEntry> =
    LruHashMap::with_max_entries(SEEN_FLOWS_CAPACITY, 0);
#[map]
pub static FLOW_BUDGETS: LruHashMap<FlowBudgetKey, FlowBudgetEntry> =
    LruHashMap::with_max_entries(FLOW_BUDGETS_CAPACITY, 0);
#[map]
pub static FLOW_EVENTS: RingBuf = RingBuf::with_byte_size(1 << 18, 0);
#[map]
pub static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(COUNTERS_CAPACITY, 0);

/// The running kernel's layout, which the loader writes.
#[unsafe(no_mangle)]
static SKB_LAYOUT: SkbLayout = SkbLayout::UNKNOWN;

#[inline(always)]
pub fn skb_layout() -> SkbLayout {
    // SAFETY: a constant of this program. The compiler must not know its value.
    unsafe { core::ptr::read_volatile(&raw const SKB_LAYOUT) }
}

#[inline(always)]
pub fn is_on_link(droplet: DropletAddress) -> bool {
    // Ranges that transitd writes one after the other hold each other, or one is empty. So a mixture of two is a part
    // of one of them, or empty.
    ON_LINK.get(0).is_some_and(|range| (*range).has(droplet))
}

#[inline(always)]
pub const fn key(vni: u32, address: Address) -> EndpointKey {
    EndpointKey { vni, address }
}

/// Returns CONFIG, unless user space hasn't written it.
#[inline(always)]
pub fn config() -> Option<&'static ConfigEntry> {
    CONFIG.get(0).filter(|config| config.uplink != 0)
}

/// Copies an entry word by word, the first word last. The kernel fills elements forwards: if the first word is the one
/// that was looked for, so are the others.
///
/// # Safety
///
/// `from` is an element of a map, whose words are aligned. Another CPU may write it.
#[inline(always)]
unsafe fn snapshot<T>(from: *const T, to: *mut T) {
    const { assert!(size_of::<T>() % 8 == 0 && align_of::<T>() == 8) };
    let (from, to) = (from.cast::<u64>(), to.cast::<u64>());
    let mut word = size_of::<T>() / 8;
    while word > 0 {
        word -= 1;
        // SAFETY: by the caller; `word` is within both.
        unsafe { to.add(word).write(from.add(word).read_volatile()) };
    }
}

/// Copies the attachment of an interface: the limits that its pod is held to. Returns false if there is no entry, or
/// none any more.
#[inline(always)]
pub fn read_attachment(interface: u32, to: &mut AttachmentEntry) -> bool {
    let Some(entry) = ATTACHMENTS.get_ptr(&interface) else {
        return false;
    };
    // SAFETY: an element of a map, see the module.
    unsafe { snapshot(entry, to) };
    to.ifindex == interface
}

/// Copies an entry of FRAGMENTS. Returns false if there is none.
#[inline(always)]
pub fn read_fragment(key: &FragmentKey, to: &mut FragmentEntry) -> bool {
    let Some(entry) = FRAGMENTS.get_ptr(key) else {
        return false;
    };
    // SAFETY: an element of a map, see the module.
    unsafe { snapshot(entry, to) };
    true
}

/// Returns the flags of an interface's attachment, if it is of this VPC.
#[inline(always)]
pub fn attachment_flags(interface: u32, vni: u32) -> Option<u8> {
    let entry = ATTACHMENTS.get_ptr(&interface)?;
    // SAFETY: an element of a map, see the module; the first word last.
    let (flags, ifindex, is_of) = unsafe {
        let flags = (&raw const (*entry).flags).read_volatile();
        let word = entry.cast::<u64>().read_volatile();
        let [ifindex, is_of] = core::mem::transmute::<u64, [u32; 2]>(word);
        (flags, ifindex, is_of)
    };
    (ifindex == interface && is_of == vni).then_some(flags)
}

/// Returns the VPC of an interface's attachment.
#[inline(always)]
pub fn vpc_of(interface: u32) -> Option<u32> {
    let entry = ATTACHMENTS.get_ptr(&interface)?;
    // SAFETY: an element of a map, see the module. Both numbers are one word.
    let [ifindex, vni] =
        unsafe { core::mem::transmute::<u64, [u32; 2]>(entry.cast::<u64>().read_volatile()) };
    (ifindex == interface).then_some(vni)
}

/// An endpoint, as its entry said when it was looked up.
pub struct Endpoint {
    pub entry: EndpointEntry,
    /// The element of the map; it may be another endpoint's by now.
    element: *mut EndpointEntry,
}

/// Returns what this droplet knows of an endpoint.
#[inline(always)]
pub fn endpoint(key: &EndpointKey) -> Option<Endpoint> {
    let element = ENDPOINTS.get_ptr_mut(key)?;
    let mut copy = MaybeUninit::<EndpointEntry>::uninit();
    // SAFETY: an element of a map, see the module; all of the copy is written.
    let entry = unsafe {
        snapshot(element, copy.as_mut_ptr());
        copy.assume_init()
    };
    (entry.local.vni == key.vni).then_some(Endpoint { entry, element })
}

/// Returns the rows of an endpoint; an entry without any, if this droplet knows nothing of it.
#[inline(always)]
pub fn rows(key: &EndpointKey) -> EndpointEntry {
    endpoint(key).map_or(const { EndpointEntry::new(0) }, |endpoint| endpoint.entry)
}

impl Endpoint {
    /// Returns its place on this droplet.
    #[inline(always)]
    pub fn local(&self) -> Option<LocalEntry> {
        self.entry.is_here().then_some(self.entry.local)
    }

    /// Returns the droplet on which a direct row says that it is, and marks the row as used. The mark is written once,
    /// to keep the cache line shared.
    #[inline(always)]
    pub fn use_direct(&self) -> Option<DropletAddress> {
        let droplet = row(self.entry.direct)?;
        if self.entry.used == 0 {
            // SAFETY: an element of a map, see the module; a single word that user space clears. A mark on another
            // row keeps that one for a scan more.
            unsafe { (*self.element).used = 1 };
        }
        Some(droplet)
    }

    /// Returns the droplet on which a row says that it is.
    #[inline(always)]
    pub fn home(&self) -> Option<DropletAddress> {
        row(self.entry.direct).or(row(self.entry.bouncer))
    }
}

/// Returns the droplet of a row, if there is one.
#[inline(always)]
pub fn row(droplet: DropletAddress) -> Option<DropletAddress> {
    (droplet != NO_DROPLET).then_some(droplet)
}

/// Returns the entry of the longest prefix of the VPC's networks that holds the address.
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

/// Whether a client may send to a front.
#[inline(always)]
pub fn admits(vni: u32, front: Address, client: Address) -> bool {
    let key = SourceKey {
        vni: vni.to_be_bytes(),
        front,
        client,
    };
    let entry = SOURCE_RANGES.get(Key::new(SOURCE_FRONT_BITS + 128, key));
    entry.is_none_or(|entry| entry.admits != 0)
}

/// A VPC, as its entry said when it was looked up.
pub struct Vpc {
    pub flags: u32,
    /// The dividers; they may be another VPC's, see the module.
    pub dividers: &'static Members,
}

#[inline(always)]
pub fn vpc(vni: u32) -> Option<Vpc> {
    let entry = VPCS.get_ptr(&vni)?;
    // SAFETY: an element of a map, see the module. Both numbers are one word.
    let [is_of, flags] = unsafe {
        let word = entry.cast::<u64>().read_volatile();
        core::mem::transmute::<u64, [u32; 2]>(word)
    };
    // SAFETY: as above.
    let dividers = unsafe { &(*entry).dividers };
    (is_of == vni).then_some(Vpc { flags, dividers })
}

#[inline(always)]
pub fn is_droplet(address: DropletAddress) -> bool {
    // SAFETY: only whether it is there.
    unsafe { DROPLETS.get(&address) }.is_some()
}

/// Whether an address, in the form that packets have, is a known droplet's.
#[inline(always)]
pub fn is_droplet_at(address: &Address) -> bool {
    let [.., a, b, c, d] = *address;
    ipv6::is_mapped(address) && is_droplet([a, b, c, d])
}

#[inline(always)]
pub fn service(key: &ServiceKey) -> Option<&'static ServiceEntry> {
    // SAFETY: an element of a map, see the module.
    unsafe { SERVICES.get(key) }
}

/// Returns the backend's index in a slot of a table.
#[inline(always)]
pub fn slot(table: u32, slot: u32) -> Option<u32> {
    let chunk = slot / CHUNK as u32;
    // SAFETY: an element of a map, see the module.
    let slots = unsafe { SLOTS.get(&SlotsKey { table, chunk }) }?;
    slots
        .backends
        .get(slot as usize % CHUNK)
        .map(|index| u32::from(*index))
}

#[inline(always)]
pub fn backend(service: u32, index: u32) -> Option<&'static BackendEntry> {
    // SAFETY: an element of a map, see the module.
    unsafe { BACKENDS.get(&BackendKey { service, index }) }
}

/// Copies the entry of HOMES of a front's backend. Returns false if there is none.
#[inline(always)]
pub fn read_home(key: &BackendKey, to: &mut HomeEntry) -> bool {
    let Some(entry) = HOMES.get_ptr(key) else {
        return false;
    };
    // SAFETY: an element of a map, see the module.
    unsafe { snapshot(entry, to) };
    [to.service, to.index] == [key.service, key.index]
}

/// Whether any address outside has a front.
#[inline(always)]
pub fn has_fronts() -> bool {
    FRONTED.get(0).is_some_and(|fronts| *fronts != 0)
}

#[inline(always)]
pub fn connection(key: &ConnectionKey) -> Option<&'static mut ConnectionEntry> {
    // SAFETY: an element of a map, see the module. Programs on several CPUs may write words of one entry; each is
    // right by itself.
    CONNECTIONS.get_ptr_mut(key).map(|entry| unsafe { &mut *entry })
}

/// The other side of a connection.
pub struct OtherSide {
    pub address: Address,
    pub port: u16,
    /// The client's port, as the other side sees it.
    pub client_port: u16,
}

/// Returns the other side of a connection, if its entry is still of this VPC.
#[inline(always)]
pub fn other_side(entry: &ConnectionEntry, vni: u32) -> Option<OtherSide> {
    let side = OtherSide {
        address: entry.address,
        port: entry.port,
        client_port: entry.client_port,
    };
    // Earlier reads stay before this one: CPUs that the images are for keep loads in order.
    compiler_fence(Ordering::Acquire);
    // SAFETY: an element of a map, see the module.
    let is_of = unsafe { (&raw const entry.vni).read_volatile() };
    (is_of == vni).then_some(side)
}

/// Returns the number of the last change of policy.
#[inline(always)]
pub fn policy_epoch() -> u32 {
    let epoch = POLICY.get(0).copied().unwrap_or(0);
    // What is read behind it is of this change, or of a later one.
    compiler_fence(Ordering::Acquire);
    epoch
}

/// Copies an entry of FLOWS. Returns false if there is none.
#[inline(always)]
pub fn read_flow(key: &ConnectionKey, to: &mut FlowEntry) -> bool {
    let Some(entry) = FLOWS.get_ptr(key) else {
        return false;
    };
    // SAFETY: an element of a map, see the module.
    unsafe { snapshot(entry, to) };
    to.tag == FlowEntry::tag(key)
}

/// The tables of policy.
pub struct PolicyTables;

impl Lookups for PolicyTables {
    #[inline(always)]
    fn grant(&self, key: &GrantKey) -> Option<Grant> {
        let entry = GRANTS.get_ptr(key)?;
        // SAFETY: an element of a map, see the module. The grant is one word.
        let grant = unsafe { core::mem::transmute::<u64, Grant>(entry.cast::<u64>().read_volatile()) };
        grant.read(key)
    }

    #[inline(always)]
    fn block(&self, key: &BlockKey) -> Option<Grant> {
        BLOCKS.get(Key::new(192, *key)).copied()
    }

    #[inline(always)]
    fn part(&self, key: &ListKey) -> Option<&ListEntry> {
        // SAFETY: an element of a map, see the module.
        unsafe { LISTS.get(key) }
    }
}

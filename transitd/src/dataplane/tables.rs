//! The pinned maps as typed tables, with a mirror of what they hold.
//!
//! Invariant: the mirror equals the maps, except for what programs write: the `used` word of direct rows and the
//! counts of LOADS. So only differences are written. Must not decide what rows there should be: `program` does.

use std::collections::HashMap;
use std::path::Path;

use aya::Pod;
use aya::maps::lpm_trie::Key as LpmKey;
use aya::maps::{Array, HashMap as BpfHash, LpmTrie, Map, MapData, MapError, MapInfo, PerCpuHashMap};
use thiserror::Error;
use thuban_common::tables::{
    Address, AttachmentEntry, ConfigEntry, DropletAddress, DropletEntry, EndpointKey, LoadKey, LocalEntry,
    MissEntry, RemoteEntry, SubnetEntry, SubnetKey, VpcEntry,
};

use super::loads::Loads;

#[derive(Debug, Error)]
pub enum TableError {
    #[error("cannot open pinned map {name}")]
    Open { name: &'static str, source: MapError },
    #[error("table {name} is full")]
    Full { name: &'static str },
    #[error("the VPC has used up its share of table {name}")]
    Share { name: &'static str },
    #[error("cannot {operation} table {name}")]
    Access {
        operation: &'static str,
        name: &'static str,
        source: MapError,
    },
    #[error("an entry of another table was given for {name}")]
    Mismatch { name: &'static str },
}

/// A row's place: table and key. Numbers in host order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TableKey {
    Attachment(u32),
    Local(EndpointKey),
    Direct(EndpointKey),
    Bouncer(EndpointKey),
    Forward(EndpointKey),
    Forwarder(EndpointKey),
    /// `prefix` counts bits of the 128-bit address.
    Subnet {
        vni: u32,
        address: Address,
        prefix: u8,
    },
    Vpc(u32),
    Droplet(DropletAddress),
    Load(LoadKey),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableEntry {
    Attachment(AttachmentEntry),
    Local(LocalEntry),
    Remote(RemoteEntry),
    Subnet(SubnetEntry),
    Vpc(VpcEntry),
    Droplet(DropletEntry),
    /// An entry to count in; [`Tables::loads`] reads the count.
    Load,
}

/// Every table, by its map's name.
pub const NAMES: [&str; 10] = [
    "ATTACHMENTS",
    "LOCAL_ENDPOINTS",
    "DIRECT_ROWS",
    "BOUNCER_ROWS",
    "FORWARD_ROWS",
    "FORWARDERS",
    "SUBNETS",
    "VPCS",
    "DROPLETS",
    "LOADS",
];

pub(super) type Hash<K, V> = BpfHash<MapData, K, V>;

/// All tables that user space writes.
#[derive(Debug)]
pub struct Tables {
    attachments: Hash<u32, AttachmentEntry>,
    local: Hash<EndpointKey, LocalEntry>,
    direct: Hash<EndpointKey, RemoteEntry>,
    misses: Hash<EndpointKey, MissEntry>,
    bouncer: Hash<EndpointKey, RemoteEntry>,
    forward: Hash<EndpointKey, RemoteEntry>,
    forwarders: Hash<EndpointKey, RemoteEntry>,
    subnets: LpmTrie<MapData, SubnetKey, SubnetEntry>,
    vpcs: Hash<u32, VpcEntry>,
    droplets: Hash<DropletAddress, DropletEntry>,
    loads: Loads,
    mirror: HashMap<TableKey, TableEntry>,
}

impl Tables {
    /// Opens the pinned maps and reads back what they hold.
    pub fn open(maps: &Path) -> Result<Self, TableError> {
        let mut tables = Self {
            attachments: hash(maps, "ATTACHMENTS")?,
            local: hash(maps, "LOCAL_ENDPOINTS")?,
            direct: hash(maps, "DIRECT_ROWS")?,
            misses: lru(maps, "MISSES")?,
            bouncer: hash(maps, "BOUNCER_ROWS")?,
            forward: hash(maps, "FORWARD_ROWS")?,
            forwarders: hash(maps, "FORWARDERS")?,
            subnets: LpmTrie::try_from(Map::LpmTrie(data(maps, "SUBNETS")?)).map_err(open("SUBNETS"))?,
            vpcs: hash(maps, "VPCS")?,
            droplets: hash(maps, "DROPLETS")?,
            loads: PerCpuHashMap::try_from(Map::PerCpuHashMap(data(maps, "LOADS")?))
                .map(Loads::new)
                .map_err(open("LOADS"))?,
            mirror: HashMap::new(),
        };
        tables.mirror = tables.read_back()?;
        Ok(tables)
    }

    /// Returns the rows that the tables hold, from the mirror.
    pub fn held(&self) -> impl Iterator<Item = (&TableKey, &TableEntry)> {
        self.mirror.iter()
    }

    pub fn get(&self, key: &TableKey) -> Option<&TableEntry> {
        self.mirror.get(key)
    }

    /// Reads the kernel's entry for an interface, whatever the mirror says.
    pub fn attachment_in_kernel(&self, ifindex: u32) -> Result<Option<AttachmentEntry>, TableError> {
        lookup("ATTACHMENTS", self.attachments.get(&ifindex, 0))
    }

    /// Reads the kernel's entry for an address, whatever the mirror says.
    pub fn local_in_kernel(&self, key: &EndpointKey) -> Result<Option<LocalEntry>, TableError> {
        lookup("LOCAL_ENDPOINTS", self.local.get(key, 0))
    }

    /// Writes a row unless it is there already.
    pub fn set(&mut self, key: TableKey, entry: TableEntry) -> Result<(), TableError> {
        if self.mirror.get(&key) == Some(&entry) {
            return Ok(());
        }
        match (key, entry) {
            (TableKey::Attachment(k), TableEntry::Attachment(v)) => {
                put(&mut self.attachments, "ATTACHMENTS", k, v)
            }
            (TableKey::Local(k), TableEntry::Local(v)) => put(&mut self.local, "LOCAL_ENDPOINTS", k, v),
            (TableKey::Direct(k), TableEntry::Remote(v)) => {
                // The count starts from zero after the row has gone again. An old count would delay the announcement.
                put(&mut self.direct, "DIRECT_ROWS", k, v).and_then(|()| take(&mut self.misses, "MISSES", &k))
            }
            (TableKey::Bouncer(k), TableEntry::Remote(v)) => put(&mut self.bouncer, "BOUNCER_ROWS", k, v),
            (TableKey::Forward(k), TableEntry::Remote(v)) => put(&mut self.forward, "FORWARD_ROWS", k, v),
            (TableKey::Forwarder(k), TableEntry::Remote(v)) => put(&mut self.forwarders, "FORWARDERS", k, v),
            (TableKey::Subnet { vni, address, prefix }, TableEntry::Subnet(v)) => self
                .subnets
                .insert(&lpm(vni, address, prefix), v, 0)
                .map_err(access("write", "SUBNETS")),
            (TableKey::Vpc(k), TableEntry::Vpc(v)) => put(&mut self.vpcs, "VPCS", k, v),
            (TableKey::Droplet(k), TableEntry::Droplet(v)) => put(&mut self.droplets, "DROPLETS", k, v),
            (TableKey::Load(k), TableEntry::Load) => self.loads.begin(k).map_err(access("write", "LOADS")),
            (other, _) => Err(TableError::Mismatch { name: other.table() }),
        }?;
        self.mirror.insert(key, entry);
        Ok(())
    }

    /// Removes a row; a missing row is success.
    pub fn remove(&mut self, key: &TableKey) -> Result<(), TableError> {
        let result = match key {
            TableKey::Attachment(k) => self.attachments.remove(k),
            TableKey::Local(k) => self.local.remove(k),
            TableKey::Direct(k) => self.direct.remove(k),
            TableKey::Bouncer(k) => self.bouncer.remove(k),
            TableKey::Forward(k) => self.forward.remove(k),
            TableKey::Forwarder(k) => self.forwarders.remove(k),
            TableKey::Subnet { vni, address, prefix } => self.subnets.remove(&lpm(*vni, *address, *prefix)),
            TableKey::Vpc(k) => self.vpcs.remove(k),
            TableKey::Droplet(k) => self.droplets.remove(k),
            TableKey::Load(k) => self.loads.remove(*k),
        };
        match result {
            Err(error) if !is_missing(&error) => return Err(access("remove from", key.table())(error)),
            _ => {}
        }
        self.mirror.remove(key);
        Ok(())
    }

    /// Whether a direct row was used since the last call; clears the mark.
    pub fn take_used(&mut self, key: &EndpointKey) -> Result<bool, TableError> {
        let entry = match self.direct.get(key, 0) {
            Ok(entry) => entry,
            Err(MapError::KeyNotFound) => return Ok(false),
            Err(error) => return Err(access("read", "DIRECT_ROWS")(error)),
        };
        if entry.used != 0 {
            put(
                &mut self.direct,
                "DIRECT_ROWS",
                *key,
                RemoteEntry { used: 0, ..entry },
            )?;
        }
        Ok(entry.used != 0)
    }

    /// Returns the packets that each role of this droplet has passed on since it came.
    pub fn loads(&self) -> Result<Vec<(LoadKey, u64)>, TableError> {
        self.loads
            .totals()
            .collect::<Result<_, _>>()
            .map_err(access("read", "LOADS"))
    }

    fn read_back(&self) -> Result<HashMap<TableKey, TableEntry>, TableError> {
        let mut rows = HashMap::new();
        read(
            &mut rows,
            "ATTACHMENTS",
            self.attachments.iter(),
            TableKey::Attachment,
            TableEntry::Attachment,
        )?;
        read(
            &mut rows,
            "LOCAL_ENDPOINTS",
            self.local.iter(),
            TableKey::Local,
            TableEntry::Local,
        )?;
        let remote = |entry: RemoteEntry| TableEntry::Remote(RemoteEntry { used: 0, ..entry });
        read(
            &mut rows,
            "DIRECT_ROWS",
            self.direct.iter(),
            TableKey::Direct,
            remote,
        )?;
        read(
            &mut rows,
            "BOUNCER_ROWS",
            self.bouncer.iter(),
            TableKey::Bouncer,
            remote,
        )?;
        read(
            &mut rows,
            "FORWARD_ROWS",
            self.forward.iter(),
            TableKey::Forward,
            remote,
        )?;
        read(
            &mut rows,
            "FORWARDERS",
            self.forwarders.iter(),
            TableKey::Forwarder,
            remote,
        )?;
        read(&mut rows, "LOADS", self.loads.totals(), TableKey::Load, |_| {
            TableEntry::Load
        })?;
        let subnet = |key: LpmKey<SubnetKey>| {
            let SubnetKey { vni, address } = key.data();
            let prefix = key.prefix_len().saturating_sub(32) as u8;
            TableKey::Subnet {
                vni: u32::from_be_bytes(vni),
                address,
                prefix,
            }
        };
        read(
            &mut rows,
            "SUBNETS",
            self.subnets.iter(),
            subnet,
            TableEntry::Subnet,
        )?;
        read(
            &mut rows,
            "VPCS",
            self.vpcs.iter(),
            TableKey::Vpc,
            TableEntry::Vpc,
        )?;
        read(
            &mut rows,
            "DROPLETS",
            self.droplets.iter(),
            TableKey::Droplet,
            TableEntry::Droplet,
        )?;
        Ok(rows)
    }
}

impl TableKey {
    /// Returns the map's name.
    pub fn table(&self) -> &'static str {
        match self {
            Self::Attachment(_) => "ATTACHMENTS",
            Self::Local(_) => "LOCAL_ENDPOINTS",
            Self::Direct(_) => "DIRECT_ROWS",
            Self::Bouncer(_) => "BOUNCER_ROWS",
            Self::Forward(_) => "FORWARD_ROWS",
            Self::Forwarder(_) => "FORWARDERS",
            Self::Subnet { .. } => "SUBNETS",
            Self::Vpc(_) => "VPCS",
            Self::Droplet(_) => "DROPLETS",
            Self::Load(_) => "LOADS",
        }
    }
}

/// Returns how many rows a table holds.
pub fn capacity(maps: &Path, name: &'static str) -> Result<u32, TableError> {
    MapInfo::from_pin(maps.join(name))
        .map(|info| info.max_entries())
        .map_err(open(name))
}

/// Writes CONFIG[0], before any program is attached.
pub fn write_config(maps: &Path, entry: ConfigEntry) -> Result<(), TableError> {
    let mut config: Array<MapData, ConfigEntry> =
        Array::try_from(Map::Array(data(maps, "CONFIG")?)).map_err(open("CONFIG"))?;
    config.set(0, entry, 0).map_err(access("write", "CONFIG"))
}

fn read<K, V>(
    rows: &mut HashMap<TableKey, TableEntry>,
    name: &'static str,
    entries: impl Iterator<Item = Result<(K, V), MapError>>,
    key: impl Fn(K) -> TableKey,
    value: impl Fn(V) -> TableEntry,
) -> Result<(), TableError> {
    for entry in entries {
        let (k, v) = entry.map_err(access("read", name))?;
        rows.insert(key(k), value(v));
    }
    Ok(())
}

pub(super) fn data(maps: &Path, name: &'static str) -> Result<MapData, TableError> {
    MapData::from_pin(maps.join(name)).map_err(open(name))
}

pub(super) fn hash<K: Pod, V: Pod>(maps: &Path, name: &'static str) -> Result<Hash<K, V>, TableError> {
    BpfHash::try_from(Map::HashMap(data(maps, name)?)).map_err(open(name))
}

/// Does what [`hash`] does, for a map that evicts.
pub(super) fn lru<K: Pod, V: Pod>(maps: &Path, name: &'static str) -> Result<Hash<K, V>, TableError> {
    BpfHash::try_from(Map::LruHashMap(data(maps, name)?)).map_err(open(name))
}

pub(super) fn lookup<V>(name: &'static str, found: Result<V, MapError>) -> Result<Option<V>, TableError> {
    match found {
        Ok(entry) => Ok(Some(entry)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) => Err(access("read", name)(error)),
    }
}

fn put<K: Pod, V: Pod>(map: &mut Hash<K, V>, name: &'static str, key: K, value: V) -> Result<(), TableError> {
    map.insert(key, value, 0).map_err(access("write", name))
}

fn lpm(vni: u32, address: Address, prefix: u8) -> LpmKey<SubnetKey> {
    LpmKey::new(
        32 + u32::from(prefix),
        SubnetKey {
            vni: vni.to_be_bytes(),
            address,
        },
    )
}

/// Removes an entry. A missing entry is success.
pub(super) fn take<K: Pod, V: Pod>(
    map: &mut Hash<K, V>,
    name: &'static str,
    key: &K,
) -> Result<(), TableError> {
    match map.remove(key) {
        Err(error) if !is_missing(&error) => Err(access("remove from", name)(error)),
        _ => Ok(()),
    }
}

pub(super) fn open(name: &'static str) -> impl FnOnce(MapError) -> TableError {
    move |source| TableError::Open { name, source }
}

pub(super) fn access(operation: &'static str, name: &'static str) -> impl FnOnce(MapError) -> TableError {
    move |source| match error_number(&source) {
        // Hash maps return E2BIG, tries ENOSPC, memory limits ENOMEM.
        Some(libc::E2BIG | libc::ENOSPC | libc::ENOMEM) => TableError::Full { name },
        _ => TableError::Access {
            operation,
            name,
            source,
        },
    }
}

pub(super) fn is_missing(error: &MapError) -> bool {
    matches!(error, MapError::KeyNotFound | MapError::ElementNotFound)
        || error_number(error) == Some(libc::ENOENT)
}

fn error_number(error: &MapError) -> Option<i32> {
    match error {
        MapError::SyscallError(error) => error.io_error.raw_os_error(),
        MapError::IoError(error) => error.raw_os_error(),
        _ => None,
    }
}

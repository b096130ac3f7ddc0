//! The pinned maps as typed tables, with a mirror of what they hold.
//!
//! Invariant: the mirror equals the maps, except for what programs write: the mark of used direct rows, the counts of
//! LOADS and what METERS have let through. So only differences are written. Must not decide what rows there should be:
//! `program` does.

use std::collections::HashMap;
use std::path::Path;

use aya::Pod;
use aya::maps::lpm_trie::Key as LpmKey;
use aya::maps::{Array, HashMap as BpfHash, LpmTrie, Map, MapData, MapError, MapInfo, PerCpuHashMap};
use thiserror::Error;
use thuban_common::meter::{METER_OF_ENDPOINT, MeterEntry, MeterKey};
use thuban_common::tables::{
    Address, AttachmentEntry, ConfigEntry, DropletAddress, DropletEntry, EndpointEntry, EndpointKey, LoadKey,
    LocalEntry, NO_DROPLET, OnLinkEntry, RemoteRow, SourceEntry, SourceKey, SubnetEntry, SubnetKey, VpcEntry,
};

use super::endpoints::{Endpoints, Kind};
use super::loads::Loads;
use super::misses::Misses;

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
    Remote(RemoteRow, EndpointKey),
    /// `prefix` counts bits of the 128-bit address.
    Subnet {
        vni: u32,
        address: Address,
        prefix: u8,
    },
    /// `prefix` counts bits of the whole key.
    Source {
        key: SourceKey,
        prefix: u32,
    },
    Vpc(u32),
    Droplet(DropletAddress),
    Load(LoadKey),
    Meter(MeterKey),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableEntry {
    Attachment(AttachmentEntry),
    Local(LocalEntry),
    Remote(DropletAddress),
    Subnet(SubnetEntry),
    Source(SourceEntry),
    Vpc(VpcEntry),
    Droplet(DropletEntry),
    /// An entry to count in; [`Tables::loads`] reads the count.
    Load,
    /// Bytes per second.
    Meter(u64),
}

/// Every table, by the name of its map, or of the kind of rows that share ENDPOINTS.
pub const NAMES: [&str; 12] = [
    "ATTACHMENTS",
    Kind::Local.name(),
    Kind::Remote(RemoteRow::Direct).name(),
    Kind::Remote(RemoteRow::Bouncer).name(),
    Kind::Remote(RemoteRow::Forward).name(),
    Kind::Remote(RemoteRow::Forwarder).name(),
    "SUBNETS",
    "SOURCE_RANGES",
    "VPCS",
    "DROPLETS",
    "LOADS",
    "METERS",
];

/// Flag of an update: writes only an entry that is there (`BPF_EXIST`).
pub(super) const IS_THERE: u64 = 2;
pub(super) type Hash<K, V> = BpfHash<MapData, K, V>;

/// All tables that user space writes.
#[derive(Debug)]
pub struct Tables {
    attachments: Hash<u32, AttachmentEntry>,
    endpoints: Endpoints,
    misses: Misses,
    subnets: LpmTrie<MapData, SubnetKey, SubnetEntry>,
    sources: LpmTrie<MapData, SourceKey, SourceEntry>,
    vpcs: Hash<u32, VpcEntry>,
    droplets: Hash<DropletAddress, DropletEntry>,
    loads: Loads,
    meters: Hash<MeterKey, MeterEntry>,
    mirror: HashMap<TableKey, TableEntry>,
}

impl Tables {
    /// Opens the pinned maps and reads back what they hold.
    pub fn open(maps: &Path) -> Result<Self, TableError> {
        let (endpoints, entries) = Endpoints::open(maps)?;
        let mut tables = Self {
            attachments: hash(maps, "ATTACHMENTS")?,
            endpoints,
            misses: Misses::open(maps)?,
            subnets: lpm_trie(maps, "SUBNETS")?,
            sources: lpm_trie(maps, "SOURCE_RANGES")?,
            vpcs: hash(maps, "VPCS")?,
            droplets: hash(maps, "DROPLETS")?,
            loads: PerCpuHashMap::try_from(Map::PerCpuHashMap(data(maps, "LOADS")?))
                .map(Loads::new)
                .map_err(open("LOADS"))?,
            meters: hash(maps, "METERS")?,
            mirror: HashMap::new(),
        };
        tables.mirror = tables.read_back(entries)?;
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
        self.endpoints.local(key)
    }

    /// Writes a row unless it is there already.
    pub fn set(&mut self, key: TableKey, entry: TableEntry) -> Result<(), TableError> {
        if self.mirror.get(&key) == Some(&entry) {
            return Ok(());
        }
        match (key, entry) {
            (TableKey::Attachment(k), TableEntry::Attachment(v)) => {
                insert(&mut self.attachments, "ATTACHMENTS", k, v)
            }
            (TableKey::Local(k), TableEntry::Local(v)) => self.endpoints.set_local(k, v),
            (TableKey::Remote(row, k), TableEntry::Remote(v)) => {
                self.endpoints.set_remote(row, k, v).and_then(|()| match row {
                    // The count starts from zero after the row has gone again. An old count would delay the
                    // announcement.
                    RemoteRow::Direct => self.misses.forget(&k),
                    _ => Ok(()),
                })
            }
            (TableKey::Subnet { vni, address, prefix }, TableEntry::Subnet(v)) => self
                .subnets
                .insert(&lpm(vni, address, prefix), v, 0)
                .map_err(access("write", "SUBNETS")),
            (TableKey::Source { key, prefix }, TableEntry::Source(v)) => self
                .sources
                .insert(&LpmKey::new(prefix, key), v, 0)
                .map_err(access("write", "SOURCE_RANGES")),
            (TableKey::Vpc(k), TableEntry::Vpc(v)) => insert(&mut self.vpcs, "VPCS", k, v),
            (TableKey::Droplet(k), TableEntry::Droplet(v)) => insert(&mut self.droplets, "DROPLETS", k, v),
            (TableKey::Load(k), TableEntry::Load) => self.loads.begin(k).map_err(access("write", "LOADS")),
            (TableKey::Meter(k), TableEntry::Meter(rate)) => {
                // Another rate brings no new burst.
                let used = self.meters.get(&k, 0).map_or(0, |meter| meter.next);
                insert(&mut self.meters, "METERS", k, MeterEntry { rate, next: used })
            }
            (other, _) => Err(TableError::Mismatch { name: other.table() }),
        }?;
        self.mirror.insert(key, entry);
        Ok(())
    }

    /// Removes a row; a missing row is success.
    pub fn remove(&mut self, key: &TableKey) -> Result<(), TableError> {
        let result = match key {
            TableKey::Attachment(k) => self.attachments.remove(k),
            TableKey::Local(k) => return self.remove_of_endpoint(Kind::Local, key, *k),
            TableKey::Remote(row, k) => return self.remove_of_endpoint(Kind::Remote(*row), key, *k),
            TableKey::Subnet { vni, address, prefix } => self.subnets.remove(&lpm(*vni, *address, *prefix)),
            TableKey::Source { key, prefix } => self.sources.remove(&LpmKey::new(*prefix, *key)),
            TableKey::Vpc(k) => self.vpcs.remove(k),
            TableKey::Droplet(k) => self.droplets.remove(k),
            TableKey::Load(k) => self.loads.remove(*k),
            TableKey::Meter(k) => self.meters.remove(k),
        };
        match result {
            Err(error) if !is_missing(&error) => return Err(access("remove from", key.table())(error)),
            _ => {}
        }
        self.mirror.remove(key);
        Ok(())
    }

    fn remove_of_endpoint(&mut self, kind: Kind, key: &TableKey, of: EndpointKey) -> Result<(), TableError> {
        self.endpoints.remove(kind, of)?;
        self.mirror.remove(key);
        Ok(())
    }

    /// Whether a direct row was used since the last call; clears the mark.
    pub fn take_used(&mut self, key: &EndpointKey) -> Result<bool, TableError> {
        self.endpoints.take_used(key)
    }

    /// Returns the packets that each role of this droplet has passed on since it came.
    pub fn loads(&self) -> Result<Vec<(LoadKey, u64)>, TableError> {
        self.loads
            .totals()
            .collect::<Result<_, _>>()
            .map_err(access("read", "LOADS"))
    }

    /// Returns the rows that the maps hold. `endpoints`: the entries of ENDPOINTS.
    fn read_back(
        &self,
        endpoints: Vec<(EndpointKey, EndpointEntry)>,
    ) -> Result<HashMap<TableKey, TableEntry>, TableError> {
        let endpoints = endpoints.into_iter();
        let mut rows: HashMap<_, _> = endpoints.flat_map(|(key, entry)| rows_of(key, entry)).collect();
        read(
            &mut rows,
            "ATTACHMENTS",
            self.attachments.iter(),
            TableKey::Attachment,
            TableEntry::Attachment,
        )?;
        read(&mut rows, "LOADS", self.loads.totals(), TableKey::Load, |_| {
            TableEntry::Load
        })?;
        read(
            &mut rows,
            "METERS",
            self.meters.iter(),
            TableKey::Meter,
            |entry| TableEntry::Meter(entry.rate),
        )?;
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
        let source = |key: LpmKey<SourceKey>| TableKey::Source {
            key: key.data(),
            prefix: key.prefix_len(),
        };
        read(
            &mut rows,
            "SOURCE_RANGES",
            self.sources.iter(),
            source,
            TableEntry::Source,
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
    /// Returns the interface whose attachment the row is of; none: it is no attachment's.
    pub const fn interface(&self) -> Option<u32> {
        match self {
            Self::Attachment(ifindex)
            | Self::Meter(MeterKey {
                kind: METER_OF_ENDPOINT,
                id: ifindex,
            }) => Some(*ifindex),
            _ => None,
        }
    }

    /// Returns the name in [`NAMES`].
    pub fn table(&self) -> &'static str {
        match self {
            Self::Attachment(_) => "ATTACHMENTS",
            Self::Local(_) => Kind::Local.name(),
            Self::Remote(row, _) => Kind::Remote(*row).name(),
            Self::Subnet { .. } => "SUBNETS",
            Self::Source { .. } => "SOURCE_RANGES",
            Self::Vpc(_) => "VPCS",
            Self::Droplet(_) => "DROPLETS",
            Self::Load(_) => "LOADS",
            Self::Meter(_) => "METERS",
        }
    }
}

/// Returns the rows that an entry of ENDPOINTS holds.
fn rows_of(key: EndpointKey, mut entry: EndpointEntry) -> Vec<(TableKey, TableEntry)> {
    let local = (TableKey::Local(key), TableEntry::Local(entry.local));
    let mut rows: Vec<_> = entry.is_here().then_some(local).into_iter().collect();
    for row in RemoteRow::ALL {
        let droplet = *entry.remote(row);
        if droplet != NO_DROPLET {
            rows.push((TableKey::Remote(row, key), TableEntry::Remote(droplet)));
        }
    }
    rows
}

/// Returns how many rows a table holds.
pub fn capacity(maps: &Path, name: &'static str) -> Result<u32, TableError> {
    if let Some(part) = Kind::capacity_of(name) {
        return Ok(part);
    }
    MapInfo::from_pin(maps.join(name))
        .map(|info| info.max_entries())
        .map_err(open(name))
}

/// Writes CONFIG[0], before any program is attached.
///
/// The seed stays, if there is one.
pub fn write_config(maps: &Path, mut entry: ConfigEntry) -> Result<(), TableError> {
    let mut config: Array<MapData, ConfigEntry> =
        Array::try_from(Map::Array(data(maps, "CONFIG")?)).map_err(open("CONFIG"))?;
    let before = config.get(&0, 0).map_err(access("read", "CONFIG"))?;
    if before.seed != 0 {
        entry.seed = before.seed;
    }
    config.set(0, entry, 0).map_err(access("write", "CONFIG"))
}

/// Writes ON_LINK[0].
pub fn write_on_link(maps: &Path, entry: OnLinkEntry) -> Result<(), TableError> {
    let mut on_link: Array<MapData, OnLinkEntry> =
        Array::try_from(Map::Array(data(maps, "ON_LINK")?)).map_err(open("ON_LINK"))?;
    on_link.set(0, entry, 0).map_err(access("write", "ON_LINK"))
}

/// Writes FRONTED[0]: whether SERVICES has fronts.
pub fn write_fronted(maps: &Path, has_fronts: bool) -> Result<(), TableError> {
    let mut fronted: Array<MapData, u32> =
        Array::try_from(Map::Array(data(maps, "FRONTED")?)).map_err(open("FRONTED"))?;
    fronted
        .set(0, u32::from(has_fronts), 0)
        .map_err(access("write", "FRONTED"))
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

fn lpm_trie<K: Pod, V: Pod>(maps: &Path, name: &'static str) -> Result<LpmTrie<MapData, K, V>, TableError> {
    LpmTrie::try_from(Map::LpmTrie(data(maps, name)?)).map_err(open(name))
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

pub(super) fn insert<K: Pod, V: Pod>(
    map: &mut Hash<K, V>,
    name: &'static str,
    key: K,
    value: V,
) -> Result<(), TableError> {
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

//! The tables of services in the kernel, without a daemon: services that find no room, and changes that a crash cut
//! short.

mod fronts;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use aya::Pod;
use aya::maps::{Array, HashMap, Map, MapData};
use thuban_common::services::{
    BackendEntry, BackendKey, CHUNK, HomeEntry, ServiceEntry, ServiceKey, SlotsEntry, SlotsKey,
};
use thuban_common::tables::{EndpointKey, LAYOUT_VERSION, MissEntry};
use thuban_rows::{Backend, Port, Service, builders};
use transitd::dataplane::bpffs::PinSettings;
use transitd::dataplane::loader;
use transitd::dataplane::services::{Marks, Services};
use transitd::dataplane::tables::TableError;
use transitd::settings::FlowMode;

use crate::pressure::shrink;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// Pinned maps of the programs.
pub struct Pinned {
    directory: PathBuf,
    programs: PathBuf,
    pins: PinSettings,
    pub maps: PathBuf,
}

impl Pinned {
    /// Opens the maps, one of them smaller.
    pub fn new(map: &str, entries: u32) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("thm{}-{number}", std::process::id()));
        let bpffs = directory.join("bpf");
        std::fs::create_dir_all(&bpffs).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "bpf", "none"])
            .arg(&bpffs)
            .status();
        assert!(mounted.unwrap().success());
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bpf/thuban-programs.o");
        let shrunk = directory.join("shrunk.o");
        shrink(&programs, map, entries, &shrunk);
        let layout = LAYOUT_VERSION;
        let pins = PinSettings { bpffs, layout };
        let pinned = Self {
            directory,
            programs: shrunk,
            maps: pins.maps(),
            pins,
        };
        pinned.load(FlowMode::Off);
        pinned
    }

    /// Opens the maps as a transitd does that starts in a mode of flows.
    pub fn load(&self, flows: FlowMode) {
        loader::load(&self.programs, &self.pins, flows).unwrap();
    }

    fn open(&self) -> Services {
        Services::open(&self.maps).unwrap()
    }

    pub fn map<K: Pod, V: Pod>(&self, name: &str) -> HashMap<MapData, K, V> {
        let data = MapData::from_pin(self.maps.join(name)).unwrap();
        let map = if ["PENDING", "AFFINITY"].contains(&name) {
            Map::LruHashMap(data)
        } else {
            Map::HashMap(data)
        };
        HashMap::try_from(map).unwrap()
    }

    pub fn array<V: Pod>(&self, name: &str) -> Array<MapData, V> {
        let data = MapData::from_pin(self.maps.join(name)).unwrap();
        Array::try_from(Map::Array(data)).unwrap()
    }

    fn entry(&self, of: EndpointKey) -> Option<ServiceEntry> {
        let map = self.map::<ServiceKey, ServiceEntry>("SERVICES");
        map.get(&port_key(of), 0).ok()
    }

    /// Returns how many rows SERVICES, SLOTS, BACKENDS and HOMES hold.
    fn counts(&self) -> [usize; 4] {
        [
            self.map::<ServiceKey, ServiceEntry>("SERVICES").keys().count(),
            self.map::<SlotsKey, SlotsEntry>("SLOTS").keys().count(),
            self.map::<BackendKey, BackendEntry>("BACKENDS").keys().count(),
            self.map::<BackendKey, HomeEntry>("HOMES").keys().count(),
        ]
    }

    /// Returns the last bytes of the backends that a service's slots lead to.
    fn leads_to(&self, of: EndpointKey) -> BTreeSet<u16> {
        self.table_leads_to(port_key(of)).unwrap()
    }

    /// Does the same for one of the tables of a port, if it is there.
    fn table_leads_to(&self, key: ServiceKey) -> Option<BTreeSet<u16>> {
        let entry = self
            .map::<ServiceKey, ServiceEntry>("SERVICES")
            .get(&key, 0)
            .ok()?;
        let (slots, backends) = (self.map::<SlotsKey, SlotsEntry>("SLOTS"), self.map("BACKENDS"));
        let index = |slot: u32| {
            let (table, chunk) = (entry.table, slot / CHUNK as u32);
            slots.get(&SlotsKey { table, chunk }, 0).unwrap().backends[slot as usize % CHUNK]
        };
        let backend = |index: u16| -> BackendEntry {
            let (service, index) = (entry.service, u32::from(index));
            backends.get(&BackendKey { service, index }, 0).unwrap()
        };
        let led = (0..entry.slots).map(|slot| backend(index(slot)).address);
        let numbers = led.map(|address| u16::from_be_bytes([address[14], address[15]]));
        Some(numbers.collect())
    }

    /// Returns the VNI and the last byte of the droplet of each backend of fronts, by the backend's last byte.
    fn homes(&self) -> BTreeMap<u8, (u32, u8)> {
        let backends = self.map::<BackendKey, BackendEntry>("BACKENDS");
        let homes = self.map::<BackendKey, HomeEntry>("HOMES");
        let homes = homes.iter().map(|entry| {
            let (key, home) = entry.unwrap();
            let backend = backends.get(&key, 0).unwrap();
            assert_eq!([home.service, home.index], [key.service, key.index]);
            assert_eq!(home.backend, backend);
            (backend.address[15], (home.vni, home.droplet[3]))
        });
        homes.collect()
    }

    fn has_fronts(&self) -> bool {
        self.array::<u32>("FRONTED").get(&0, 0).unwrap() == 1
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.directory.join("bpf")).status();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn at(vni: u32, last: u8) -> EndpointKey {
    let address = Ipv4Addr::new(10, 96, 0, last).to_ipv6_mapped().octets();
    EndpointKey { vni, address }
}

fn port_key(of: EndpointKey) -> ServiceKey {
    ServiceKey {
        vni: of.vni,
        address: of.address,
        port: 80_u16.to_be(),
        protocol: 6,
        former: 0,
    }
}

/// Returns a service with backends 10.0.x.y, by the number x.y.
fn service(of: EndpointKey, backends: impl IntoIterator<Item = u16>) -> Service {
    let backend = |number: u16| {
        let [high, low] = number.to_be_bytes();
        Backend {
            address: Ipv4Addr::new(10, 0, high, low).into(),
            port: 8080,
        }
    };
    let port = Port {
        protocol: 6,
        port: 80,
        affinity: 0,
        local: false,
        backends: backends.into_iter().map(backend).collect(),
    };
    Service {
        vni: builders::vni(of.vni),
        address: Ipv6Addr::from(of.address).to_canonical(),
        ports: vec![port],
    }
}

fn is_over_share(written: &Result<(), TableError>) -> bool {
    matches!(written, Err(TableError::Share { name: "SLOTS" }))
}

#[test]
fn vpc_cannot_fill_table_and_waiting_rows_enter_with_room() {
    // A VPC has at most 128 rows and a reserve of 2, and 64 rows are for reserves.
    let pinned = Pinned::new("SLOTS", 256);
    let mut services = pinned.open();
    // Two backends are one row of slots, five are four.
    let mut fill = |vni, count, why| {
        for last in 1..=count {
            services.set(&service(at(vni, last), [1, 2])).unwrap();
        }
        let more = services.set(&service(at(vni, count + 1), [1, 2]));
        assert!(is_over_share(&more), "{why}: {more:?}");
    };
    fill(7, 128, "half is its");
    fill(8, 64, "a quarter is for reserves");
    // Behind 16 VPCs a reserve is smaller.
    for vni in 9..=22 {
        fill(vni, 2, "its reserve");
    }
    // The existing service stays, even when there is no room for a moment.
    let mut slots = pinned.map::<SlotsKey, SlotsEntry>("SLOTS");
    let strays: Vec<_> = (0..36)
        .map(|chunk| SlotsKey {
            table: u32::MAX,
            chunk,
        })
        .collect();
    let none = SlotsEntry { backends: [0; CHUNK] };
    for stray in &strays {
        slots.insert(stray, none, 0).unwrap();
    }
    let (before, counts) = (pinned.entry(at(9, 1)), pinned.counts());
    assert_eq!(counts, [440, 256, 440, 0]);
    assert!(is_over_share(&services.set(&service(at(9, 1), [1, 2, 3, 4, 5]))));
    let changed = services.set(&service(at(9, 1), [2, 3]));
    assert!(
        matches!(changed, Err(TableError::Full { name: "SLOTS" })),
        "{changed:?}"
    );
    assert_eq!((pinned.entry(at(9, 1)), pinned.counts()), (before, counts));
    assert_eq!(pinned.leads_to(at(9, 1)), [1, 2].into());
    for stray in &strays {
        slots.remove(stray).unwrap();
    }

    services.retry();
    assert_eq!(pinned.entry(at(8, 65)), None);
    // The usage is known again after a restart.
    drop(services);
    let mut services = pinned.open();
    for waiting in [service(at(7, 129), [1, 2]), service(at(8, 65), [1, 2])] {
        assert!(is_over_share(&services.set(&waiting)));
    }
    services.remove(&at(7, 1)).unwrap();
    services.retry();
    assert_eq!(pinned.entry(at(7, 129)), None, "more than its reserve");
    for last in 2..=63 {
        services.remove(&at(7, last)).unwrap();
    }
    services.retry();
    for of in [at(7, 129), at(8, 65)] {
        assert_eq!(pinned.leads_to(of), [1, 2].into());
    }
    services.keep(|_| false).unwrap();
    assert_eq!((pinned.counts(), services.rows().0), ([0; 4], [0; 4]));
}

#[test]
fn a_change_that_a_crash_cut_short_is_made_at_the_next_start() {
    let pinned = Pinned::new("SLOTS", 1024);
    let mut services = pinned.open();
    services.set(&service(at(7, 1), [1, 2])).unwrap();
    let entry = pinned.entry(at(7, 1)).unwrap();
    drop(services);
    // `set` had come this far: the backends are there, and some of the new table's slots.
    let mut backends = pinned.map::<BackendKey, BackendEntry>("BACKENDS");
    let key = |index| BackendKey {
        service: entry.service,
        index,
    };
    let new = BackendEntry {
        address: Ipv4Addr::new(10, 0, 0, 3).to_ipv6_mapped().octets(),
        ..backends.get(&key(0), 0).unwrap()
    };
    backends.insert(key(2), new, 0).unwrap();
    let slots = SlotsKey {
        table: entry.table + 1,
        chunk: 0,
    };
    let none = SlotsEntry { backends: [0; CHUNK] };
    pinned.map("SLOTS").insert(slots, none, 0).unwrap();

    let mut services = pinned.open();
    assert_eq!(pinned.counts(), [2, 1, 2, 0], "nothing leads to them");
    services.set(&service(at(7, 1), [1, 2, 3])).unwrap();
    assert_eq!(pinned.leads_to(at(7, 1)), [1, 2, 3].into());
    let counts = pinned.counts();
    services.set(&service(at(7, 1), [1, 2, 3])).unwrap();
    assert_eq!(pinned.counts(), counts);
    // All backends change: the old table leads to the old ones until the end.
    services.set(&service(at(7, 1), [4, 5])).unwrap();
    assert_eq!(pinned.leads_to(at(7, 1)), [4, 5].into());
    assert_eq!(pinned.counts(), [2, 1, 2, 0]);
}

#[test]
fn a_service_that_comes_is_announced_anew_once_it_has_gone() {
    let pinned = Pinned::new("SLOTS", 1024);
    let mut misses = pinned.array::<MissEntry>("MISSES");
    let place = |last| MissEntry::place(&at(7, last), 0);
    for (place, tag) in [1, 2].map(place) {
        misses.set(place, MissEntry { tag, packets: 5 }, 0).unwrap();
    }
    pinned.open().set(&service(at(7, 1), [1])).unwrap();
    let counts = [1, 2].map(|last| misses.get(&place(last).0, 0).unwrap().packets);
    assert_eq!(counts, [0, 5], "another's stays");
}

#[test]
fn a_mark_of_use_is_taken_once_and_brings_nothing_back() {
    let pinned = Pinned::new("SLOTS", 1024);
    let (mut services, mut marks) = (pinned.open(), Marks::open(&pinned.maps).unwrap());
    services.set(&service(at(7, 1), [1])).unwrap();
    let mut take = || marks.take(&at(7, 1)).unwrap();
    assert!(take() && !take());
    services.remove(&at(7, 1)).unwrap();
    assert!(!take());
    assert_eq!(pinned.counts(), [0; 4]);
}

#[test]
fn the_largest_service_is_written_and_changed() {
    let pinned = Pinned::new("PENDING", 1024);
    let mut services = pinned.open();
    let mut timed = |what: &str, backends: std::ops::Range<u16>| {
        let begun = Instant::now();
        services.set(&service(at(7, 1), backends)).unwrap();
        println!("{what}: {:?}", begun.elapsed());
    };
    timed("16,383 backends written", 1..16384);
    timed("one more", 1..16385);
    assert_eq!(pinned.counts(), [2, 1024, 16384, 0]);
    assert_eq!(pinned.leads_to(at(7, 1)).len(), 16384);
}

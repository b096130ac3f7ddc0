//! ENDPOINTS in the kernel: rows of five kinds that share entries. METERS, of which agents write a part.

use std::net::Ipv4Addr;

use thuban_common::meter::{MeterEntry, MeterKey};
use thuban_common::tables::{EndpointEntry, EndpointKey, LOCAL_ROWS, LocalEntry, RemoteRow};
use transitd::dataplane::tables::{TableEntry, TableError, TableKey, Tables, capacity};

use crate::service_tables::Pinned;

fn key(number: u32) -> EndpointKey {
    EndpointKey {
        vni: 7,
        address: Ipv4Addr::from(0x0a00_0000 + number).to_ipv6_mapped().octets(),
    }
}

fn local(number: u32) -> (TableKey, TableEntry) {
    let entry = LocalEntry {
        vni: 7,
        ifindex: 1 + number,
        mac: [2; 6],
        flags: 1,
    };
    (TableKey::Local(key(number)), TableEntry::Local(entry))
}

fn remote(row: RemoteRow, number: u32) -> (TableKey, TableEntry) {
    let droplet = [192, 0, 2, 1 + row as u8];
    (TableKey::Remote(row, key(number)), TableEntry::Remote(droplet))
}

fn all(number: u32) -> Vec<(TableKey, TableEntry)> {
    let remotes = RemoteRow::ALL.map(|row| remote(row, number));
    std::iter::once(local(number)).chain(remotes).collect()
}

#[test]
fn rows_of_an_address_come_and_go_one_by_one() {
    let pinned = Pinned::new("SLOTS", 256);
    let mut tables = Tables::open(&pinned.maps).unwrap();
    let entries = || {
        pinned
            .map::<EndpointKey, EndpointEntry>("ENDPOINTS")
            .keys()
            .count()
    };
    for (row, entry) in all(1).into_iter().chain(all(2)) {
        tables.set(row, entry).unwrap();
    }
    assert_eq!(entries(), 2);
    // Another transitd finds all of them.
    let mut tables = Tables::open(&pinned.maps).unwrap();
    assert_eq!(tables.held().count(), 10);
    for (gone, (row, _)) in (1..).zip(all(1)) {
        tables.remove(&row).unwrap();
        tables.remove(&row).unwrap();
        assert_eq!(entries(), if gone < 5 { 2 } else { 1 });
        let found = Tables::open(&pinned.maps).unwrap();
        for (place, (row, entry)) in all(1).into_iter().chain(all(2)).enumerate() {
            let there = (place >= gone).then_some(&entry);
            assert_eq!(found.get(&row), there, "{row:?} after {gone}");
        }
    }
}

#[test]
fn the_mark_of_use_outlasts_changes_of_other_rows() {
    let pinned = Pinned::new("SLOTS", 256);
    let mut tables = Tables::open(&pinned.maps).unwrap();
    let (direct, to) = remote(RemoteRow::Direct, 1);
    tables.set(direct, to).unwrap();
    let mark = || {
        let mut map = pinned.map::<EndpointKey, EndpointEntry>("ENDPOINTS");
        let entry = map.get(&key(1), 0).unwrap();
        map.insert(key(1), EndpointEntry { used: 1, ..entry }, 0).unwrap();
    };
    mark();
    let (bouncer, to_bouncer) = remote(RemoteRow::Bouncer, 1);
    tables.set(bouncer, to_bouncer).unwrap();
    assert!(tables.take_used(&key(1)).unwrap() && !tables.take_used(&key(1)).unwrap());
    mark();
    tables.remove(&direct).unwrap();
    tables.set(direct, to).unwrap();
    assert!(!tables.take_used(&key(1)).unwrap(), "a new row is not used yet");
}

#[test]
fn a_kind_of_rows_that_is_full_leaves_others_their_room() {
    let pinned = Pinned::new("SLOTS", 256);
    let mut tables = Tables::open(&pinned.maps).unwrap();
    assert_eq!(capacity(&pinned.maps, "LOCAL_ENDPOINTS").unwrap(), LOCAL_ROWS);
    for number in 0..LOCAL_ROWS {
        let (row, entry) = local(number);
        tables.set(row, entry).unwrap();
    }
    // The count is the kernel's after a restart.
    let mut tables = Tables::open(&pinned.maps).unwrap();
    let (beyond, entry) = local(LOCAL_ROWS);
    let refused = tables.set(beyond, entry);
    assert!(
        matches!(
            refused,
            Err(TableError::Full {
                name: "LOCAL_ENDPOINTS"
            })
        ),
        "{refused:?}"
    );
    for row in RemoteRow::ALL {
        let (row, entry) = remote(row, LOCAL_ROWS);
        tables.set(row, entry).unwrap();
    }
    let (first, changed) = (local(0).0, local(5).1);
    tables.set(first, changed).unwrap();
    tables.remove(&first).unwrap();
    tables.set(beyond, entry).unwrap();
}

#[test]
fn another_rate_brings_no_new_burst() {
    let pinned = Pinned::new("SLOTS", 256);
    let mut tables = Tables::open(&pinned.maps).unwrap();
    let key = MeterKey::of_endpoint(9);
    let mut set = |rate| tables.set(TableKey::Meter(key), TableEntry::Meter(rate)).unwrap();
    let meters = || pinned.map::<MeterKey, MeterEntry>("METERS");
    set(1000);
    let used = MeterEntry { rate: 1000, next: 77 };
    meters().insert(key, used, 0).unwrap();
    set(2000);
    assert_eq!(
        meters().get(&key, 0).unwrap(),
        MeterEntry { rate: 2000, next: 77 }
    );
}

//! Tables of fronts: what leads to their backends now, and what led to them before the last change.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use thuban_common::services::{
    BackendEntry, BackendKey, CHUNK, FRONTS, SERVICE_TUNNEL, ServiceEntry, ServiceKey, SlotsEntry, SlotsKey,
};
use thuban_common::tables::EndpointKey;
use thuban_rows::{Backend, Front, FrontPort, builders};
use transitd::dataplane::services::Services;
use transitd::dataplane::tables::TableError;

use super::{Pinned, at, service};

const FRONT: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);

/// Returns the key of a table of the front: the one in use, or the one before it.
fn front_key(former: u8) -> ServiceKey {
    ServiceKey {
        vni: FRONTS,
        address: FRONT.to_ipv6_mapped().octets(),
        port: 80_u16.to_be(),
        protocol: 6,
        former,
    }
}

/// Returns a front with backends 10.0.0.x on droplets 172.16.0.y, by pairs of x and y.
fn front<const N: usize>(vni: u32, backends: [(u8, u8); N]) -> Front {
    let backend = |(last, droplet): (u8, u8)| {
        let address = Ipv4Addr::new(10, 0, 0, last).into();
        (Backend { address, port: 8080 }, builders::underlay(droplet))
    };
    Front {
        vni: builders::vni(vni),
        address: FRONT.into(),
        ports: vec![FrontPort {
            protocol: 6,
            port: 80,
            affinity: 0,
            backends: backends.into_iter().map(backend).collect(),
            resting: BTreeSet::new(),
        }],
        clients: None,
        service: "red/web".into(),
        check: None,
        tunnel: false,
    }
}

#[test]
fn a_fronts_address_says_whether_it_has_backends() {
    let pinned = Pinned::new("SLOTS", 1024);
    let mut services = pinned.open();
    let own_key = ServiceKey {
        port: 0,
        protocol: 0,
        ..front_key(0)
    };
    let entries = || pinned.map::<ServiceKey, ServiceEntry>("SERVICES");
    let own = || entries().get(&own_key, 0).ok();
    let of = |ports| Some(ServiceEntry::own(7, ports));
    services.set(&front(7, [(1, 1)])).unwrap();
    assert_eq!(own(), of(1));
    let mut two = front(7, [(1, 1)]);
    two.ports.push(FrontPort {
        port: 81,
        ..two.ports[0].clone()
    });
    services.set(&two).unwrap();
    assert_eq!(own(), of(2));
    services.set(&front(7, [])).unwrap();
    assert_eq!(own(), of(0));
    // An entry of a version that did not tell is written anew.
    services.set(&front(7, [(1, 1)])).unwrap();
    drop(services);
    entries().insert(own_key, ServiceEntry::own(0, 0), 0).unwrap();
    let mut services = pinned.open();
    services.set(&front(7, [(1, 1)])).unwrap();
    assert_eq!(own(), of(1));
    services.set(&front(8, [(1, 1)])).unwrap();
    assert_eq!(own(), Some(ServiceEntry::own(8, 1)));
    services.keep(|_| false).unwrap();
    assert_eq!(own(), None);
}

#[test]
fn a_front_keeps_the_table_before_its_last_change() {
    let pinned = Pinned::new("SLOTS", 1024);
    let mut services = pinned.open();
    let tables = || [0, 1].map(|former| pinned.table_leads_to(front_key(former)));
    let of = |backends: &[u16]| Some(backends.iter().copied().collect::<BTreeSet<_>>());
    assert!(!pinned.has_fronts());
    services.set(&front(7, [(1, 1), (2, 2)])).unwrap();
    assert!(pinned.has_fronts());
    assert_eq!(tables(), [of(&[1, 2]), None]);
    assert_eq!(pinned.homes(), [(1, (7, 1)), (2, (7, 2))].into());
    services.set(&front(7, [(1, 1), (3, 2)])).unwrap();
    assert_eq!(tables(), [of(&[1, 3]), of(&[1, 2])]);
    assert_eq!(pinned.counts(), [3, 2, 3, 3]);
    // The same once more is no change, and neither is another affinity.
    services.set(&front(7, [(1, 1), (3, 2)])).unwrap();
    assert_eq!(tables(), [of(&[1, 3]), of(&[1, 2])]);
    // Both tables are known again after a restart, and what a crash left goes.
    drop(services);
    let strays = pinned.homes();
    let mut services = pinned.open();
    assert_eq!((tables(), pinned.homes()), ([of(&[1, 3]), of(&[1, 2])], strays));
    services.set(&front(7, [(3, 2), (4, 1)])).unwrap();
    assert_eq!(tables(), [of(&[3, 4]), of(&[1, 3])]);
    assert_eq!(pinned.counts(), [3, 2, 3, 3], "nothing of the first table stays");
    // A backend that moved to another droplet is another backend.
    services.set(&front(7, [(3, 1), (4, 1)])).unwrap();
    assert_eq!(tables(), [of(&[3, 4]), of(&[3, 4])]);
    assert_eq!(pinned.counts(), [3, 2, 3, 3]);
    let rows = services.rows();
    drop(services);
    assert_eq!(pinned.open().rows(), rows);
    // Of another VPC there is no former table.
    let mut services = pinned.open();
    services.set(&front(8, [(3, 1)])).unwrap();
    assert_eq!(tables(), [of(&[3]), None]);
    assert_eq!(pinned.homes(), [(3, (8, 1))].into());
    services.keep(|_| false).unwrap();
    assert_eq!((pinned.counts(), services.rows().0), ([0; 4], [0; 4]));
    assert!(!pinned.has_fronts());
}

#[test]
fn affinity_that_comes_or_goes_leaves_a_former_table() {
    let pinned = Pinned::new("SLOTS", 1024);
    let mut services = pinned.open();
    let mut set = |affinity, backends| {
        let mut front = front(7, backends);
        front.ports[0].affinity = affinity;
        services.set(&front).unwrap();
        let entries = pinned.map::<ServiceKey, ServiceEntry>("SERVICES");
        let entry = entries.get(&front_key(1), 0);
        entry
            .ok()
            .map(|entry| (entry.affinity, pinned.table_leads_to(front_key(1)).unwrap()))
    };
    let former = |affinity, backends: [u16; 2]| Some((affinity, BTreeSet::from(backends)));
    assert_eq!(set(0, [(1, 1), (2, 2)]), None);
    assert_eq!(set(0, [(1, 1), (3, 2)]), former(0, [1, 2]));
    // Slots of packets differ, so nothing of the table before counts.
    assert_eq!(set(60, [(1, 1), (3, 2)]), former(0, [1, 3]));
    assert_eq!(set(90, [(1, 1), (3, 2)]), former(0, [1, 3]), "slots are the same");
    assert_eq!(set(90, [(1, 1), (4, 2)]), former(90, [1, 3]));
    assert_eq!(set(0, [(1, 1), (4, 2)]), former(90, [1, 4]));
    assert_eq!(pinned.counts(), [3, 2, 2, 2]);
}

#[test]
fn a_former_table_that_a_crash_left_goes_at_the_next_start() {
    let pinned = Pinned::new("SLOTS", 1024);
    let mut services = pinned.open();
    services.set(&front(7, [(1, 1)])).unwrap();
    services.set(&front(7, [(2, 1)])).unwrap();
    drop(services);
    // A removal had come this far.
    let mut entries = pinned.map::<ServiceKey, ServiceEntry>("SERVICES");
    entries.remove(&front_key(0)).unwrap();
    let services = pinned.open();
    assert_eq!(pinned.counts(), [1, 0, 0, 0], "the address's own entry");
    assert_eq!(services.rows().0, [1, 0, 0, 0]);
}

#[test]
fn a_backend_that_rests_has_no_slots_and_stays_the_former_one() {
    let pinned = Pinned::new("SLOTS", 1024);
    let mut services = pinned.open();
    let mut set = |backends: &[(u8, u8)], resting: &[u8]| {
        let mut front = front(7, [(1, 1); 0]);
        let port = &mut front.ports[0];
        for (last, droplet) in backends {
            let address = Ipv4Addr::new(10, 0, 0, *last).into();
            port.backends
                .insert(Backend { address, port: 8080 }, builders::underlay(*droplet));
        }
        port.resting = resting
            .iter()
            .map(|last| Ipv4Addr::new(10, 0, 0, *last).into())
            .collect();
        services.set(&front).unwrap();
        [0, 1].map(|former| pinned.table_leads_to(front_key(former)))
    };
    let of = |backends: &[u16]| Some(backends.iter().copied().collect::<BTreeSet<_>>());
    assert_eq!(set(&[(1, 1), (2, 2)], &[]), [of(&[1, 2]), None]);
    assert_eq!(set(&[(1, 1), (2, 2)], &[2]), [of(&[1]), of(&[1, 2])]);
    // Its connections outlive another change.
    assert_eq!(set(&[(1, 1), (2, 2), (3, 3)], &[2]), [of(&[1, 3]), of(&[1, 2])]);
    assert_eq!(set(&[(1, 1), (2, 2), (3, 3)], &[2, 3])[0], of(&[1]));
    assert_eq!(set(&[(1, 1), (2, 2), (3, 3)], &[])[0], of(&[1, 2, 3]));
    assert_eq!(set(&[(1, 1), (3, 3)], &[])[0], of(&[1, 3]));
    assert_eq!(pinned.homes().len(), 3, "the former table has the third");
}

#[test]
fn fronts_that_lead_to_backends_are_told_with_their_service() {
    let pinned = Pinned::new("SLOTS", 1024);
    let mut services = pinned.open();
    let told = |services: &Services| {
        let fronted = services.fronted().into_iter();
        fronted
            .map(|(address, service)| (address.to_string(), service))
            .collect::<Vec<_>>()
    };
    let named = |name: &str| vec![("203.0.113.1".to_owned(), name.to_owned())];
    services.set(&service(at(7, 9), [80])).unwrap();
    assert_eq!(told(&services), [], "a service of a VPC is no front");
    services.set(&front(7, [(1, 1)])).unwrap();
    assert_eq!(told(&services), named("red/web"));
    services.set(&front(7, [])).unwrap();
    assert_eq!(told(&services), [], "it has no backends");
    services.set(&front(7, [(1, 1)])).unwrap();
    // After a start it is told only when the operator has named it.
    let mut services = pinned.open();
    assert_eq!(told(&services), []);
    services
        .set(&Front {
            service: "red/shop".into(),
            ..front(7, [(1, 1)])
        })
        .unwrap();
    assert_eq!(told(&services), named("red/shop"));
    let address = front_key(0).address;
    services.remove(&EndpointKey { vni: FRONTS, address }).unwrap();
    assert_eq!(told(&services), []);
}

#[test]
fn a_change_of_the_mode_changes_no_backend() {
    let pinned = Pinned::new("SLOTS", 1024);
    let mut services = pinned.open();
    let tables = || [0, 1].map(|former| pinned.table_leads_to(front_key(former)));
    let flags = || {
        let entries = pinned.map::<ServiceKey, ServiceEntry>("SERVICES");
        entries.get(&front_key(0), 0).unwrap().flags
    };
    let of = |tunnel| Front {
        tunnel,
        ..front(7, [(1, 1), (3, 2)])
    };
    services.set(&front(7, [(1, 1), (2, 2)])).unwrap();
    services.set(&of(false)).unwrap();
    let before = tables();
    assert!(flags() == 0 && before[1].is_some());
    for (tunnel, expected) in [(true, SERVICE_TUNNEL), (false, 0)] {
        services.set(&of(tunnel)).unwrap();
        assert_eq!((flags(), tables()), (expected, before.clone()));
    }
    // The mode is known again after a start.
    services.set(&of(true)).unwrap();
    drop(services);
    let mut services = pinned.open();
    services.set(&of(true)).unwrap();
    assert_eq!((flags(), tables()), (SERVICE_TUNNEL, before));
}

#[test]
fn a_front_that_had_no_backends_has_no_former_table() {
    let pinned = Pinned::new("SLOTS", 1024);
    let mut services = pinned.open();
    services.set(&front(7, [(1, 1), (2, 1)])).unwrap();
    services.set(&front(7, [])).unwrap();
    services.set(&front(7, [(3, 1)])).unwrap();
    assert_eq!(pinned.table_leads_to(front_key(0)), Some([3].into()));
    assert_eq!(pinned.table_leads_to(front_key(1)), None);
    assert_eq!(pinned.counts(), [2, 1, 1, 1]);
    drop(services);
    let mut services = pinned.open();
    services.set(&front(7, [(3, 1), (4, 1)])).unwrap();
    assert_eq!(pinned.table_leads_to(front_key(1)), Some([3].into()));
}

#[test]
fn a_front_changes_its_backends_though_nothing_is_free() {
    // A VPC has at most 32 rows and a reserve of 1.
    let pinned = Pinned::new("HOMES", 64);
    let mut services = pinned.open();
    let all: [(u8, u8); 16] = std::array::from_fn(|last| (last as u8 + 1, 1));
    services.set(&front(7, all)).unwrap();
    assert_eq!(services.rows().0[3], 32, "room for the change is taken at once");
    let others = all.map(|(last, droplet)| (last + 100, droplet));
    services.set(&front(7, others)).unwrap();
    assert_eq!(pinned.table_leads_to(front_key(1)).unwrap().len(), 16);
    services.set(&front(7, [(1, 1)])).unwrap();
    let more: [(u8, u8); 17] = std::array::from_fn(|last| (last as u8 + 1, 1));
    let written = services.set(&front(7, more));
    assert!(
        matches!(written, Err(TableError::Share { name: "HOMES" })),
        "{written:?}"
    );
    assert_eq!(pinned.table_leads_to(front_key(0)), Some([1].into()));
}

#[test]
fn connections_go_on_by_the_backend_with_which_they_began() {
    let pinned = Pinned::new("SLOTS", 1024);
    let mut services = pinned.open();
    let slots = |former: u8| -> Vec<u8> {
        let entry = pinned.map::<ServiceKey, ServiceEntry>("SERVICES");
        let entry = entry.get(&front_key(former), 0).unwrap();
        let (slots, backends) = (
            pinned.map::<SlotsKey, SlotsEntry>("SLOTS"),
            pinned.map("BACKENDS"),
        );
        let led = (0..entry.slots).map(|slot| {
            let (table, chunk) = (entry.table, slot / CHUNK as u32);
            let row: SlotsEntry = slots.get(&SlotsKey { table, chunk }, 0).unwrap();
            let index = u32::from(row.backends[slot as usize % CHUNK]);
            let service = entry.service;
            let backend: BackendEntry = backends.get(&BackendKey { service, index }, 0).unwrap();
            backend.address[15]
        });
        led.collect()
    };
    services.set(&front(7, [(1, 1), (2, 2)])).unwrap();
    let first = slots(0);
    services.set(&front(7, [(1, 1), (2, 2), (3, 3)])).unwrap();
    let second = slots(0);
    assert_eq!(slots(1), first);
    // Another transitd makes the next change.
    drop(services);
    let mut services = pinned.open();
    services.set(&front(7, [(1, 1), (2, 2), (3, 3), (4, 4)])).unwrap();
    let (third, former) = (slots(0), slots(1));
    let began = first.iter().zip(&second).zip(third.iter().zip(&former));
    for ((first, second), (third, former)) in began.clone() {
        assert_eq!(former, if second == third { first } else { second });
    }
    let went_on = began.filter(|((first, second), (third, _))| first != second && second == third);
    assert!(went_on.count() > 20);
    // What the front has lost is asked no more.
    services.set(&front(7, [(2, 2), (3, 3), (4, 4)])).unwrap();
    let fourth = slots(0);
    for ((third, fourth), former) in third.iter().zip(&fourth).zip(slots(1)) {
        assert!(former != 1 || third == &1 && fourth != &1);
    }
}

//! Tests of droplets without room for a row.

use std::net::Ipv4Addr;
use std::time::Duration;

use thuban_proto::transit::{NackReason, row};
use thuban_rows::{Kind, Kinds};

use super::{ADDRESS, V4, VNI, endpoint, hub, missing_of, name, received};
use crate::model::rows::Key;

#[tokio::test(start_paused = true)]
async fn a_row_without_room_is_named_and_sent_again_until_acked() {
    let (hub, mut woken) = hub();
    let (id, mut stream) = hub.open("c", &[], &[], Kinds::all());
    assert!(hub.ack("c", id, 1));
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    received(&mut stream);
    let rows = hub.read(|world| world.endpoint_rows(&name()));
    let rows: Vec<_> = rows.into_iter().filter(|(droplet, _)| droplet == "c").collect();
    let local = Key::Local(VNI, V4);
    assert!(rows.contains(&("c".into(), local.clone())));
    let told = || {
        let full = missing_of(&hub, &rows).full;
        full.into_iter()
            .map(|full| (full.droplet, full.kind, full.rows))
            .collect::<Vec<_>>()
    };
    hub.nack("c", id, 2, &local, NackReason::TableFull);
    assert!(hub.ack("c", id, 2));
    assert_eq!(told(), [("c".to_owned(), Kind::Local, 1)]);
    assert_eq!(missing_of(&hub, &rows).reason(), "TableFull");
    let is_full = |droplet, kinds: &[Kind]| hub.is_follower_full(droplet, kinds);
    assert_eq!(is_full("c", &[Kind::Bouncer, Kind::Local]), Some(true));
    assert_eq!(is_full("c", &[Kind::Bouncer]), Some(false));
    assert_eq!(is_full("a", &[Kind::Bouncer]), None, "it has no stream");
    assert!(hub.send_again() && received(&mut stream).is_empty(), "too early");
    tokio::time::advance(Duration::from_secs(10)).await;
    assert!(hub.send_again());
    let programs = received(&mut stream);
    let [program] = programs.as_slice() else {
        panic!("{programs:?}")
    };
    assert_eq!((program.sequence, program.snapshot), (3, false));
    assert!(
        matches!(&program.upserts[0].row, Some(row::Row::Local(row)) if row.address.ends_with(&ADDRESS.octets()))
    );
    assert_eq!(program.upserts.len(), 1);
    assert_eq!(told().len(), 1, "it is under way");
    while woken.try_recv().is_ok() {}
    assert!(missing_of(&hub, &rows).unacked == ["c"] && hub.ack("c", id, 3));
    assert!(woken.try_recv().is_ok(), "the ack wakes who waits");
    assert!(missing_of(&hub, &rows).is_empty() && !hub.send_again());
    assert_eq!(hub.rows_without_room(), 0);
}

#[tokio::test(start_paused = true)]
async fn rows_without_room_go_with_their_objects_and_streams() {
    let (hub, _woken) = hub();
    let (id, mut stream) = hub.open("c", &[], &[], Kinds::all());
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    hub.nack("c", id, 2, &Key::Local(VNI, V4), NackReason::TableFull);
    assert_eq!(hub.rows_without_room(), 1);
    hub.update(|world| world.set_endpoint(&name(), None));
    assert_eq!(hub.rows_without_room(), 0);
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    hub.nack("c", id, 4, &Key::Local(VNI, V4), NackReason::TableFull);
    let (id, mut newer) = hub.open("c", &[], &[], Kinds::all());
    assert_eq!(hub.rows_without_room(), 0, "the snapshot brings all rows");
    assert!(hub.ack("c", id, 1));
    tokio::time::advance(Duration::from_secs(10)).await;
    assert!(!hub.send_again());
    assert_eq!((received(&mut stream).len(), received(&mut newer).len()), (4, 1));
}

#[tokio::test(start_paused = true)]
async fn only_rows_that_a_droplet_should_have_are_sent_again() {
    let (hub, _woken) = hub();
    let (id, mut stream) = hub.open("c", &[], &[], Kinds::all());
    assert!(hub.ack("c", id, 1));
    let refuse = |key: &Key| hub.nack("c", id, 1, key, NackReason::TableFull);
    refuse(&Key::Local(VNI, V4));
    refuse(&Key::Droplet(Ipv4Addr::new(9, 9, 9, 9).into()));
    assert_eq!(hub.rows_without_room(), 0);
    // Droplet `a`, from the snapshot.
    refuse(&Key::Droplet(Ipv4Addr::new(172, 16, 0, 0).into()));
    assert_eq!(hub.rows_without_room(), 1);
    tokio::time::advance(Duration::from_secs(10)).await;
    hub.send_again();
    let programs = received(&mut stream);
    assert!(matches!(&programs[1].upserts[0].row, Some(row::Row::Droplet(_))));
    assert!(hub.ack("c", id, 2) && hub.rows_without_room() == 0);
    hub.nack("c", id, 2, &Key::Local(VNI, V4), NackReason::Invalid);
    assert_eq!(hub.rows_without_room(), 0);
}

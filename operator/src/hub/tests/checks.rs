//! Tests of what droplets say of the backends that they check: how soon rows follow, and in which words Vips say it.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use thuban_proto::MAX_CHECKS;
use thuban_proto::transit::{CheckFailure, CheckState, Checked, FrontRow, Hello, row};
use thuban_rows::Kinds;
use thuban_rows::builders::health_check;
use tokio::sync::mpsc::UnboundedReceiver;

use super::rests::service;
use super::{VNI, hub, mapped, received, serve};
use crate::hub::{Hub, Outgoing};
use crate::model::world::Service;

const FRONT: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 1));

/// Returns a service with a backend 10.9.0.x on each droplet, and a front with a check.
fn fronted() -> Service {
    let service = service("web", 9, None);
    Service {
        fronts: vec![(FRONT, service.tables[0].1.clone())],
        check: Some(health_check()),
        ..service
    }
}

fn checked(last: u8, failure: Option<CheckFailure>) -> Checked {
    let state = if failure.is_some() {
        CheckState::Failing
    } else {
        CheckState::Passing
    };
    Checked {
        vni: VNI.get(),
        front: mapped(FRONT).to_vec(),
        backend: mapped(Ipv4Addr::new(10, 9, 0, last)).to_vec(),
        state: state.into(),
        failure: failure.unwrap_or_default().into(),
        status: 503,
    }
}

/// Makes a hub with a front that the droplet `a` has the rows of; nobody fails.
fn served() -> (Hub, UnboundedReceiver<Outgoing>) {
    let (hub, _woken) = hub();
    hub.update(|world| world.set_service(&("ns".into(), "s".into()), Some(fronted())));
    let (_, mut stream) = hub.open("a", &[], &[], Kinds::all());
    assert_eq!(fronts(&mut stream), [0]);
    (hub, stream)
}

/// Returns the numbers of resting backends in each row of the front that waits on the stream.
fn fronts(stream: &mut UnboundedReceiver<Outgoing>) -> Vec<usize> {
    let programs = received(stream).into_iter();
    let rows = programs.flat_map(|program| program.upserts);
    let fronts = rows.filter_map(|row| match row.row {
        Some(row::Row::Front(FrontRow { ports, .. })) => Some(ports[0].resting.len()),
        _ => None,
    });
    fronts.collect()
}

#[tokio::test(start_paused = true)]
async fn rows_follow_checks_all_at_once() {
    let (hub, mut stream) = served();
    for _ in 0..10 {
        hub.note_checks("a", &[checked(1, Some(CheckFailure::Refused))]);
        hub.note_checks("a", &[checked(1, None)]);
        hub.note_checks("b", &[checked(2, Some(CheckFailure::Timeout))]);
    }
    assert_eq!(fronts(&mut stream), [0; 0]);
    hub.look_for_suspects();
    assert_eq!(fronts(&mut stream), [1]);
    hub.look_for_suspects();
    assert_eq!(fronts(&mut stream), [0; 0]);
    let unknown = Checked {
        state: CheckState::Unspecified.into(),
        ..checked(2, None)
    };
    hub.note_checks("b", &[unknown]);
    hub.look_for_suspects();
    assert_eq!(fronts(&mut stream), [0]);
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_alternates_changes_rows_seldom() {
    let (hub, mut stream) = served();
    let mut changes = 0;
    for second in 0..60 {
        let failure = (second % 2 == 0).then_some(CheckFailure::Refused);
        hub.note_checks("a", &[checked(1, failure)]);
        hub.look_for_suspects();
        let rows = fronts(&mut stream);
        if second == 0 {
            assert_eq!(rows, [1], "the first failure is followed at once");
        }
        changes += rows.len();
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    assert!((5..=11).contains(&changes), "{changes}");
}

#[tokio::test(start_paused = true)]
async fn a_droplet_is_heard_of_so_many_backends_a_second() {
    let (hub, mut stream) = served();
    for _ in 0..4 {
        hub.note_checks("a", &vec![checked(9, None); MAX_CHECKS]);
    }
    hub.note_checks("a", &[checked(1, Some(CheckFailure::Refused))]);
    hub.note_checks("b", &[checked(2, Some(CheckFailure::Timeout))]);
    hub.look_for_suspects();
    assert_eq!(fronts(&mut stream), [1], "the other droplet's");
    tokio::time::advance(Duration::from_secs(1)).await;
    hub.note_checks("a", &[checked(1, Some(CheckFailure::Refused))]);
    hub.look_for_suspects();
    assert_eq!(fronts(&mut stream), [2]);
}

#[tokio::test(start_paused = true)]
async fn words_that_are_too_many_are_heard_in_turns() {
    let (hub, mut stream) = served();
    for _ in 0..4 {
        hub.note_checks("a", &vec![checked(9, None); MAX_CHECKS]);
    }
    let mut words = vec![checked(9, None); MAX_CHECKS];
    words[MAX_CHECKS - 1] = checked(1, Some(CheckFailure::Refused));
    for _ in 0..5 {
        tokio::time::advance(Duration::from_secs(1)).await;
        hub.note_checks("a", &words);
    }
    hub.look_for_suspects();
    assert_eq!(fronts(&mut stream), [1], "the last one, too");
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_knows_what_fails_by_the_hello() {
    let (hub, _woken) = hub();
    hub.hold_back(Duration::ZERO);
    hub.update(|world| world.set_service(&("ns".into(), "s".into()), Some(fronted())));
    let hello = |last| Hello {
        checks: vec![checked(last, Some(CheckFailure::Timeout))],
        ..Hello::default()
    };
    let (_, mut stream) = hub.open_after(&hello(1), "a", &[], Kinds::all());
    let (_, _other) = hub.open_after(&hello(2), "b", &[], Kinds::all());
    // No time passes: nobody has looked yet.
    serve(&hub);
    assert_eq!(fronts(&mut stream), [2], "no connection goes there for a moment");
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_hears_droplets_before_it_serves() {
    let (hub, _woken) = hub();
    hub.hold_back(Duration::ZERO);
    hub.update(|world| world.set_service(&("ns".into(), "s".into()), Some(fronted())));
    let (_, mut stream) = hub.open("a", &[], &[], Kinds::all());
    hub.note_checks("a", &[checked(1, Some(CheckFailure::Status))]);
    hub.look_for_suspects();
    assert!(hub.take_members().is_empty(), "other droplets are still to say");
    serve(&hub);
    assert_eq!(fronts(&mut stream), [1], "no connection goes there for a moment");
    let (name, members) = hub.take_members().remove(0);
    assert_eq!(name, ("ns".to_owned(), "web".to_owned()));
    assert_eq!((members.count, members.failing), (3, 1));
    assert_eq!(members.listed[0].why, "the answer has the status 503");
    hub.give_members_back(name);
    assert_eq!(hub.take_members().len(), 1);
    assert_eq!(hub.take_members().len(), 0);
}

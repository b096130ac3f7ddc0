//! Tests of what droplets acked, hold and owe.

use thuban_rows::Kinds;
use thuban_rows::builders::VNI;

use super::{ACK_TIMEOUT, Acks, JUDGING_DELAY, Key};
use crate::model::rows::{self, PackedRow};
use crate::model::world::Delta;

fn key(last: u8) -> Key {
    Key::Bouncer(VNI, std::net::IpAddr::from([10, 0, 0, last]))
}

fn delta(added: &[u8], removed: &[u8]) -> Delta {
    let row = rows::droplet([1, 1, 1, 1].into(), None);
    let added = added.iter().map(|last| (key(*last), Some(PackedRow::new(&row))));
    added
        .chain(removed.iter().map(|last| (key(*last), None)))
        .collect()
}

fn is_gone(acks: &Acks, key: &Key) -> bool {
    acks.holding(key, 0).next().is_none()
}

/// Returns what `holding` returns, by going through all sessions.
fn holding_by_session(acks: &Acks, key: &Key) -> Vec<String> {
    let droplets = acks.sessions.keys().filter(|droplet| acks.may_hold(droplet, key));
    let mut names: Vec<String> = droplets.cloned().collect();
    names.sort();
    names
}

/// Returns what `holding_vni` returns for the only number, by going through all sessions.
fn holding_number_by_session(acks: &Acks) -> Vec<String> {
    let holds = |(name, session): &(&String, &super::Session)| {
        let mut keys = session.rows.keys().chain(session.removed.keys());
        session.acked == 0 && !acks.is_overdue(name, 0) || keys.any(|key| key.vni() == Some(VNI))
    };
    let mut names: Vec<String> = acks
        .sessions
        .iter()
        .filter(holds)
        .map(|(name, _)| name.clone())
        .collect();
    names.sort();
    names
}

#[test]
fn who_holds_a_row_is_known_without_asking_all() {
    let mut acks = Acks::new(0);
    let gone = Key::Droplet([1, 1, 1, 1].into());
    let mut seed: u32 = 1;
    let mut random = |below: u32| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 16) % below
    };
    for step in 0..5000_u64 {
        let droplet = ["a", "b", "c"][random(3) as usize];
        let (one, two) = (random(4) as u8, random(4) as u8);
        let session = acks.sessions.get(droplet);
        let (id, sequence) = session.map_or((0, 0), |session| (session.id, session.sequence));
        match random(12) {
            0 => drop(acks.open(
                droplet,
                (step, Kinds::all()),
                [&key(one), &key(two)].into_iter(),
                0,
            )),
            1 => drop(acks.close(droplet, id, step)),
            2..5 => drop(acks.send(droplet, &delta(&[one], &[two]), 0)),
            5 => drop(acks.send(droplet, &delta(&[], &[one, two]), 0)),
            6 => drop(acks.send(droplet, &Delta::from([(gone.clone(), None)]), 0)),
            7 => {
                let row = rows::droplet([1, 1, 1, 1].into(), None);
                acks.send(
                    droplet,
                    &Delta::from([(gone.clone(), Some(PackedRow::new(&row)))]),
                    0,
                );
            }
            8 => drop(acks.nack(droplet, id, sequence, &key(one))),
            _ => drop(acks.ack(droplet, id, sequence.saturating_sub(random(3).into()), 0)),
        }
        for key in (0..4).map(key).chain([gone.clone()]) {
            let mut holding: Vec<&str> = acks.holding(&key, 0).collect();
            holding.sort_unstable();
            assert_eq!(holding, holding_by_session(&acks, &key), "step {step}");
        }
        let mut holding: Vec<&str> = acks.holding_vni(VNI, 0).collect();
        holding.sort_unstable();
        assert_eq!(holding, holding_number_by_session(&acks), "step {step}");
    }
    for droplet in ["a", "b", "c"] {
        let id = acks.sessions.get(droplet).map_or(0, |session| session.id);
        acks.close(droplet, id, 0);
    }
    let holders = &acks.holders;
    assert!(holders.of.is_empty() && holders.unknown.is_empty() && holders.unaware.is_empty());
    assert!(holders.numbers.is_empty());
}

#[test]
fn a_row_counts_only_once_its_sequence_is_acked() {
    let mut acks = Acks::new(0);
    assert!(!acks.is_acked("a", &key(1)));
    assert_eq!(acks.open("a", (1, Kinds::all()), [&key(1)].into_iter(), 0), 1);
    assert!(
        !acks.is_acked("a", &key(1)) && !is_gone(&acks, &key(9)),
        "the snapshot isn't acked yet"
    );
    assert!(acks.ack("a", 1, 1, 0));
    assert!(acks.is_acked("a", &key(1)) && is_gone(&acks, &key(9)));
    assert_eq!(acks.send("a", &delta(&[1, 2], &[]), 0), Some(2));
    assert!(!acks.is_acked("a", &key(1)), "it was changed since");
    assert!(acks.ack("a", 1, 2, 0) && acks.is_acked("a", &key(2)));
    acks.send("a", &delta(&[], &[2]), 0);
    assert_eq!(acks.holding(&key(2), 0).collect::<Vec<_>>(), ["a"]);
    assert!(acks.ack("a", 1, 3, 0) && is_gone(&acks, &key(2)));
}

#[test]
fn acks_of_an_old_stream_or_of_the_future_count_for_nothing() {
    let mut acks = Acks::new(0);
    acks.open("a", (1, Kinds::all()), [].into_iter(), 0);
    acks.open("a", (2, Kinds::all()), [&key(1)].into_iter(), 0);
    assert!(!acks.ack("a", 1, 1, 0) && !acks.ack("a", 2, 5, 0));
    assert!(!acks.close("a", 1, 0) && acks.is_connected("a"));
    assert!(acks.ack("a", 2, 1, 0));
    assert!(!acks.nack("a", 2, 0, &key(1)), "sent again since");
    assert!(!acks.nack("a", 2, 1, &key(5)), "never sent");
    assert!(acks.nack("a", 2, 1, &key(1)));
    assert!(!acks.is_acked("a", &key(1)));
}

#[test]
fn nobody_is_judged_too_early_or_while_too_many_are_missing() {
    let mut acks = Acks::new(100);
    let names: Vec<String> = (0..10).map(|number| format!("d{number}")).collect();
    for (id, name) in names.iter().enumerate() {
        acks.open(name, (id as u64, Kinds::all()), [].into_iter(), 0);
        acks.ack(name, id as u64, 1, 0);
    }
    assert!(!acks.is_judging(names.iter(), 99 + JUDGING_DELAY));
    assert!(acks.is_judging(names.iter(), 100 + JUDGING_DELAY));
    for (id, name) in names.iter().enumerate().take(3) {
        acks.close(name, id as u64, 50);
    }
    assert!(acks.is_judging(names.iter(), 100 + JUDGING_DELAY), "3 of 10");
    acks.close("d3", 3, 50);
    assert!(!acks.is_judging(names.iter(), 100 + JUDGING_DELAY), "4 of 10");
    let two = [String::from("d0"), String::from("d9")];
    assert!(acks.is_judging(two.iter(), 100 + JUDGING_DELAY), "one of two");
    assert_eq!(acks.lost_for("d0", 60), Some(10));
    assert_eq!(acks.lost_for("d9", 60), None);
    assert_eq!(acks.lost_for("never seen", 160), Some(60));
}

/// The droplet acks a row now and then, and always too few.
#[test]
fn a_droplet_is_judged_by_the_oldest_row_that_it_has_not_acked() {
    let mut acks = Acks::new(0);
    acks.open("a", (1, Kinds::all()), [].into_iter(), 0);
    acks.ack("a", 1, 1, 0);
    for (number, sent) in [(1, 1_000), (2, 2_000), (3, 3_000)] {
        acks.send("a", &delta(&[number], &[]), sent);
    }
    acks.ack("a", 1, 2, 0);
    assert!(!acks.is_overdue("a", 1_999 + ACK_TIMEOUT) && !is_gone(&acks, &key(2)));
    let late = 2_000 + ACK_TIMEOUT;
    assert!(acks.is_overdue("a", late) && acks.is_silent("a", 1, late));
    assert_eq!(acks.lost_for("a", late), Some(ACK_TIMEOUT));
    assert_eq!(acks.holding(&key(2), late).count(), 0, "nobody waits for it");
    assert!(acks.may_hold("a", &key(2)), "it has the row all the same");
    acks.ack("a", 1, 3, 0);
    assert!(!acks.is_overdue("a", late), "the next is a second younger");
    acks.ack("a", 1, 4, 0);
    assert!(!acks.is_overdue("a", late + 2 * ACK_TIMEOUT) && acks.lost_for("a", late).is_none());
}

/// The droplet dials again before anything finds it silent.
#[test]
fn what_a_droplet_owes_is_older_than_its_stream() {
    let mut acks = Acks::new(0);
    let dial = |acks: &mut Acks, id: u64, now: u64| {
        acks.open("a", (id, Kinds::all()), [&key(1)].into_iter(), now);
    };
    dial(&mut acks, 1, 0);
    for (id, now) in [(2, 20_000), (3, 40_000)] {
        acks.close("a", id - 1, now - 1_000);
        dial(&mut acks, id, now);
    }
    dial(&mut acks, 4, 50_000);
    assert!(!acks.is_overdue("a", ACK_TIMEOUT - 1) && !is_gone(&acks, &key(1)));
    assert!(acks.is_overdue("a", ACK_TIMEOUT) && acks.holding(&key(1), ACK_TIMEOUT).next().is_none());
    assert!(
        !acks.is_silent("a", 4, 50_000 + ACK_TIMEOUT - 1),
        "its stream is young"
    );
    assert!(acks.is_silent("a", 4, 50_000 + ACK_TIMEOUT));
    acks.close("a", 4, ACK_TIMEOUT);
    assert!(acks.is_overdue("a", ACK_TIMEOUT), "without a stream too");
    dial(&mut acks, 5, 90_000);
    acks.ack("a", 5, 1, 0);
    assert!(!acks.is_overdue("a", 90_000) && acks.lost_for("a", 90_000).is_none());
    acks.close("a", 5, 91_000);
    assert_eq!(acks.lost_for("a", 95_000), Some(4_000), "it owes nothing");
}

/// The droplet acks at the last moment, and dials again in that moment.
#[test]
fn what_a_droplet_acks_late_is_held_against_its_next_stream() {
    let mut acks = Acks::new(0);
    let dial = |acks: &mut Acks, id: u64, now: u64| {
        acks.open("a", (id, Kinds::all()), [&key(1)].into_iter(), now);
    };
    dial(&mut acks, 1, 0);
    acks.ack("a", 1, 1, 20_000);
    dial(&mut acks, 2, 20_000);
    acks.ack("a", 2, 1, 59_000);
    acks.send("a", &delta(&[2], &[]), 59_500);
    acks.ack("a", 2, 2, 59_500);
    dial(&mut acks, 3, 60_000);
    assert!(!acks.is_overdue("a", 60_999) && !is_gone(&acks, &key(9)));
    assert!(
        acks.is_overdue("a", 62_000),
        "59 s less the second that it owed nothing"
    );
    assert!(acks.holding(&key(9), 62_000).next().is_none());
    assert_eq!(acks.lost_for("a", 62_000), Some(60_000));
    acks.ack("a", 3, 1, 70_000);
    assert!(!acks.is_overdue("a", 70_000), "it owes nothing");
    // It has been punctual for as long as it was late.
    dial(&mut acks, 4, 140_000);
    assert!(!acks.is_overdue("a", 139_999 + ACK_TIMEOUT) && acks.is_overdue("a", 140_000 + ACK_TIMEOUT));
}

/// A bouncer that subscribes to an address and gives it back, again and again, acks each row late.
#[test]
fn a_droplet_has_acked_all_whatever_it_keeps_asking_for() {
    let mut acks = Acks::new(0);
    acks.open("a", (1, Kinds::all()), [].into_iter(), 0);
    assert!(!acks.has_acked_all("a"));
    acks.ack("a", 1, 1, 0);
    let direct = Key::Direct(VNI, std::net::IpAddr::from([10, 0, 0, 1]));
    acks.send("a", &Delta::from([(direct.clone(), None)]), 0);
    assert!(acks.has_acked_all("a"), "it asked for the row");
    let both = [(direct.clone(), None), (key(1), None)];
    acks.send("a", &Delta::from(both), 0);
    acks.send("a", &Delta::from([(direct, None)]), 0);
    acks.ack("a", 1, 2, 0);
    assert!(!acks.has_acked_all("a"), "another row is among them");
    acks.ack("a", 1, 3, 0);
    assert!(acks.has_acked_all("a"));
}

#[test]
fn a_droplet_is_known_once_its_introduction_is_acked() {
    let mut acks = Acks::new(0);
    let new = Key::Droplet([1, 1, 1, 1].into());
    let row = rows::droplet([1, 1, 1, 1].into(), None);
    acks.open("a", (1, Kinds::all()), [&new].into_iter(), 0);
    assert!(!acks.is_synced("a"));
    acks.ack("a", 1, 1, 0);
    assert!(acks.is_synced("a") && acks.unaware(&new).next().is_none());
    acks.send("a", &Delta::from([(new.clone(), Some(PackedRow::new(&row)))]), 0);
    assert_eq!(acks.unaware(&new).collect::<Vec<_>>(), ["a"]);
    acks.ack("a", 1, 1, 0);
    assert!(acks.unaware(&new).next().is_some(), "an older ack");
    acks.ack("a", 1, 2, 0);
    assert!(acks.unaware(&new).next().is_none());
    acks.send("a", &Delta::from([(new.clone(), Some(PackedRow::new(&row)))]), 0);
    acks.send("a", &Delta::from([(new.clone(), None)]), 0);
    assert!(acks.unaware(&new).next().is_none(), "it left again");
}

#[test]
fn a_droplet_that_another_has_no_room_for_is_not_known_there() {
    let mut acks = Acks::new(0);
    let new = Key::Droplet([1, 1, 1, 1].into());
    let row = rows::droplet([1, 1, 1, 1].into(), None);
    let introduction = || Delta::from([(new.clone(), Some(PackedRow::new(&row)))]);
    acks.open("a", (1, Kinds::all()), [].into_iter(), 0);
    acks.send("a", &introduction(), 0);
    assert!(acks.nack("a", 1, 2, &new) && acks.ack("a", 1, 2, 0));
    assert_eq!(acks.unaware(&new).collect::<Vec<_>>(), ["a"]);
    acks.send("a", &introduction(), 0);
    assert!(acks.ack("a", 1, 3, 0));
    assert!(acks.unaware(&new).next().is_none());
}

#[test]
fn the_removal_of_a_known_droplet_is_pending_until_it_is_acked() {
    let mut acks = Acks::new(0);
    let gone = Key::Droplet([1, 1, 1, 1].into());
    acks.open("a", (1, Kinds::all()), [&gone].into_iter(), 0);
    assert_eq!(acks.forgetting(0).count(), 1, "its snapshot is not acked");
    acks.ack("a", 1, 1, 0);
    assert!(acks.forgetting(0).count() == 0 && acks.has_acked_all("a"));
    acks.send("a", &Delta::from([(gone.clone(), None)]), 0);
    assert!(acks.forgetting(0).count() == 1 && !acks.has_acked_all("a"));
    acks.ack("a", 1, 2, 0);
    assert!(acks.forgetting(0).count() == 0 && acks.has_acked_all("a"));
}

#[test]
fn nothing_is_remembered_of_classes_and_sets() {
    let mut acks = Acks::new(0);
    let set = Key::PolicySet(VNI, thuban_rows::PolicyId::PLAIN);
    let row = PackedRow::new(&rows::droplet([1, 1, 1, 1].into(), None));
    acks.open("a", (1, Kinds::all()), [&set].into_iter(), 0);
    acks.ack("a", 1, 1, 0);
    for row in [Some(row), None] {
        acks.send("a", &Delta::from([(set.clone(), row)]), 0);
        let session = &acks.sessions["a"];
        assert!(session.rows.is_empty() && session.introduced.is_empty() && session.removed.is_empty());
        assert!(acks.holders.of.is_empty() && acks.holders.unaware.is_empty());
        assert!(
            !acks.has_acked_all("a"),
            "it is waited for with all that was sent"
        );
        let sequence = session.sequence;
        acks.ack("a", 1, sequence, 0);
    }
    assert!(
        acks.nack("a", 1, 3, &set),
        "the droplet has another set by this id"
    );
    assert!(!acks.nack("a", 2, 3, &set), "another stream");
    assert!(!acks.nack("a", 1, 4, &set), "no such program");
}

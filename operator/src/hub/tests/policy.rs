//! Steps of network policy, as droplets see them.

use std::sync::Arc;

use serde_json::json;
use thuban_proto::transit::Row;
use thuban_rows::LocalEndpoint;

use super::*;
use crate::model::policy::Profile;

/// Droplets with endpoints: `db` on `a`, `web` on `c`.
const DROPLETS: [&str; 3] = ["a", "b", "c"];

pub struct Droplet {
    pub id: u64,
    pub stream: UnboundedReceiver<Outgoing>,
    pub sequence: u64,
}

/// Returns the kinds of the rows that a droplet is sent, in order: what it gets and what it loses.
fn take(droplet: &mut Droplet) -> (Vec<Row>, usize) {
    let programs = received(&mut droplet.stream);
    droplet.sequence += programs.len() as u64;
    let lost = programs.iter().map(|program| program.deletes.len()).sum();
    (
        programs.into_iter().flat_map(|program| program.upserts).collect(),
        lost,
    )
}

fn kinds(rows: &[Row]) -> Vec<Kind> {
    read(rows).iter().map(|row| row.key().kind()).collect()
}

fn read(rows: &[Row]) -> Vec<thuban_rows::Row> {
    let rows = rows.iter().map(|row| thuban_rows::Row::try_from(row.clone()));
    rows.collect::<Result<_, _>>().unwrap()
}

/// Lets all droplets ack everything. Returns the rows that they are sent, and how many they lose.
pub fn ack_all(hub: &Hub, droplets: &mut BTreeMap<&'static str, Droplet>) -> (Vec<thuban_rows::Row>, usize) {
    let (mut all, mut lost) = (Vec::new(), 0);
    for _ in 0..10 {
        hub.roll_out();
        for (name, droplet) in &mut *droplets {
            let (rows, gone) = take(droplet);
            all.extend(read(&rows));
            lost += gone;
            assert!(hub.ack(name, droplet.id, droplet.sequence));
        }
    }
    (all, lost)
}

pub fn play(kinds: &Kinds) -> (Hub, BTreeMap<&'static str, Droplet>) {
    let (hub, _) = hub();
    hub.hold_back(Duration::ZERO);
    for (number, (droplet, app)) in [("a", "db"), ("c", "web")].into_iter().enumerate() {
        let labels = [("app".to_owned(), app.to_owned())].into();
        let profile = Profile {
            labels,
            ..Profile::default()
        };
        let mut endpoint = endpoint();
        endpoint.droplet = droplet.into();
        endpoint.profile = Some(Arc::new(profile));
        endpoint.pod.uid = app.into();
        endpoint.ready = true;
        if let Membership::Member(address) = &mut endpoint.membership {
            address.address = Ipv4Addr::new(10, 0, 1, 2 + number as u8);
            address.address6 = None;
        }
        hub.update(|world| world.set_endpoint(&("red".to_owned(), app.to_owned()), Some(endpoint)));
    }
    let streams = DROPLETS.map(|name| {
        let (id, stream) = hub.open(name, &[], &[], kinds.clone());
        (name, id, stream)
    });
    serve(&hub);
    let droplets = streams.map(|(name, id, stream)| {
        let sequence = 0;
        let mut droplet = Droplet { id, stream, sequence };
        take(&mut droplet);
        assert!(hub.ack(name, id, 1));
        (name, droplet)
    });
    (hub, droplets.into())
}

pub fn set(hub: &Hub) {
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "db"}},
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "web"}}}]}],
    });
    let spec = serde_json::from_value(spec).unwrap();
    hub.update(|world| world.set_network_policy("red", "db", 0, Some(&spec)).unwrap());
}

/// Rolls out, and returns the kinds of rows that each droplet is sent.
fn sent(hub: &Hub, droplets: &mut BTreeMap<&'static str, Droplet>) -> [Vec<Kind>; 3] {
    hub.roll_out();
    DROPLETS.map(|name| kinds(&take(droplets.get_mut(name).unwrap()).0))
}

#[tokio::test(start_paused = true)]
async fn a_new_policy_goes_step_by_step_as_droplets_ack() {
    let (hub, mut droplets) = play(&Kinds::all());
    let ids: BTreeMap<_, _> = droplets
        .iter()
        .map(|(name, droplet)| (*name, droplet.id))
        .collect();
    let ack = |name: &str, sequence| assert!(hub.ack(name, ids[name], sequence));
    let none = || vec![Vec::new(); 3];
    set(&hub);
    let prepared = vec![Kind::Class, Kind::PolicySet];
    assert_eq!(sent(&hub, &mut droplets), [prepared.clone(), vec![], prepared]);
    assert_eq!(sent(&hub, &mut droplets).to_vec(), none(), "nobody has acked");
    ack("a", 2);
    assert_eq!(sent(&hub, &mut droplets).to_vec(), none(), "one is missing");
    ack("c", 2);
    let local = vec![Kind::Local];
    let classes = [local.clone(), vec![], local.clone()];
    assert_eq!(sent(&hub, &mut droplets), classes, "the classes of both");
    ack("a", 3);
    assert_eq!(sent(&hub, &mut droplets).to_vec(), none());
    ack("c", 3);
    let subject = [local, vec![], vec![]];
    assert_eq!(sent(&hub, &mut droplets), subject, "the set of the subject");
}

#[tokio::test(start_paused = true)]
async fn a_new_endpoint_comes_after_its_class_and_sets() {
    let (hub, mut droplets) = play(&Kinds::all());
    set(&hub);
    // Without a set nobody asks for classes.
    for (number, app) in ["db", "web"].into_iter().enumerate() {
        let labels = [("app".to_owned(), app.to_owned())].into();
        let profile = Profile {
            labels,
            ..Profile::default()
        };
        let mut endpoint = endpoint();
        endpoint.droplet = "b".into();
        endpoint.profile = Some(Arc::new(profile));
        if let Membership::Member(address) = &mut endpoint.membership {
            address.address = Ipv4Addr::new(10, 0, 1, 9 + number as u8);
            address.address6 = None;
        }
        let name = ("red".to_owned(), format!("new-{app}"));
        hub.update(|world| world.set_endpoint(&name, Some(endpoint)));
        let rows = kinds(&take(droplets.get_mut("b").unwrap()).0);
        let place = |kind| rows.iter().position(|row| *row == kind);
        let policy = if app == "web" {
            Kind::Class
        } else {
            Kind::PolicySet
        };
        assert!(place(policy) < place(Kind::Local), "{rows:?}");
        assert!(place(policy).is_some(), "{rows:?}");
        assert!(
            hub.read(|world| world.is_policy_pending(&name)),
            "nobody has acked"
        );
    }
    for _ in 0..4 {
        for (name, droplet) in &mut droplets {
            take(droplet);
            assert!(hub.ack(name, droplet.id, droplet.sequence));
        }
        hub.roll_out();
    }
    for app in ["web", "db"] {
        let name = ("red".to_owned(), format!("new-{app}"));
        assert!(!hub.read(|world| world.is_policy_pending(&name)), "{app}");
    }
}

#[tokio::test(start_paused = true)]
async fn steps_do_not_wait_for_a_suspect_droplet() {
    let (hub, mut droplets) = play(&Kinds::all());
    tokio::time::advance(Duration::from_mins(1)).await;
    hub.close("c", droplets["c"].id);
    tokio::time::advance(Duration::from_secs(5)).await;
    set(&hub);
    hub.roll_out();
    let a = droplets.get_mut("a").unwrap();
    assert_eq!(kinds(&take(a).0), [Kind::Class, Kind::PolicySet]);
    assert!(hub.ack("a", a.id, 2));
    hub.roll_out();
    assert!(take(a).0.is_empty(), "it may come back");
    tokio::time::advance(Duration::from_secs(6)).await;
    hub.roll_out();
    assert_eq!(kinds(&take(a).0), [Kind::Local]);
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_goes_leaves_no_rows() {
    let (hub, mut droplets) = play(&Kinds::all());
    set(&hub);
    assert_eq!(ack_all(&hub, &mut droplets).1, 0);
    hub.update(|world| world.set_network_policy("red", "db", 0, None).unwrap());
    assert_eq!(ack_all(&hub, &mut droplets).1, 0, "packets may be on their way");
    tokio::time::advance(Duration::from_secs(31)).await;
    assert_eq!(ack_all(&hub, &mut droplets).1, 2, "the set, of both droplets");
    tokio::time::advance(Duration::from_secs(31)).await;
    assert_eq!(ack_all(&hub, &mut droplets).1, 2, "the class");
    assert!(!hub.read(world::World::has_policies));
}

#[tokio::test(start_paused = true)]
async fn a_policy_is_provisioned_when_its_last_step_is_acked() {
    let (hub, mut droplets) = play(&Kinds::all());
    let is_provisioned = || hub.policy_standing("red/db").unwrap().is_provisioned();
    let mut take_steps = |count: u32| {
        for step in 1..=count {
            hub.roll_out();
            assert!(!is_provisioned(), "step {step} is not acked");
            for (name, droplet) in &mut droplets {
                take(droplet);
                assert!(hub.ack(name, droplet.id, droplet.sequence));
            }
        }
        hub.roll_out();
        assert!(is_provisioned());
    };
    set(&hub);
    assert!(!is_provisioned());
    take_steps(3);
    let other = serde_json::from_value(json!({"podSelector": {"matchLabels": {"app": "db"}}})).unwrap();
    hub.update(|world| world.set_network_policy("red", "db", 0, Some(&other)).unwrap());
    assert!(!is_provisioned(), "it was, as it was before");
    take_steps(2);
}

#[tokio::test(start_paused = true)]
async fn policies_of_a_set_without_room_are_woken_and_told() {
    let (mut hub, mut droplets) = play(&Kinds::all());
    let mut woken = hub.triggers.network_policies.listen();
    let mut take_woken = || {
        let mut names = BTreeSet::new();
        while let Ok(policy) = woken.try_recv() {
            names.insert(policy.name);
        }
        names
    };
    set(&hub);
    ack_all(&hub, &mut droplets);
    let standing = || hub.policy_standing("red/db").unwrap();
    assert!(standing().is_provisioned() && !standing().is_full);
    take_woken();
    // The pod is selected once more, so that it needs a further set.
    let more = serde_json::from_value(json!({"podSelector": {}})).unwrap();
    hub.update(|world| world.set_network_policy("red", "more", 0, Some(&more)).unwrap());
    hub.roll_out();
    let c = droplets.get_mut("c").unwrap();
    let sent = ids(&read(&take(c).0), Kind::PolicySet);
    for key in &sent {
        hub.nack("c", c.id, c.sequence, key, NackReason::TableFull);
    }
    assert!(!sent.is_empty() && hub.ack("c", c.id, c.sequence));
    ack_all(&hub, &mut droplets);
    assert_eq!(take_woken(), ["db".to_owned(), "more".to_owned()].into());
    assert!(standing().is_full && !standing().is_provisioned());
    assert!(standing().message().contains("1 of 2 droplets; c: no room"));
    // Who was told is looked at again when there is room.
    tokio::time::advance(Duration::from_secs(10)).await;
    assert!(hub.send_again());
    ack_all(&hub, &mut droplets);
    assert!(take_woken().contains("db"));
    assert!(standing().is_provisioned() && !standing().is_full);
    ack_all(&hub, &mut droplets);
    assert!(take_woken().is_empty(), "nothing is new");
}

/// Returns the ids of the rows of a kind.
fn ids(rows: &[thuban_rows::Row], kind: Kind) -> BTreeSet<Key> {
    let keys = rows.iter().map(thuban_rows::Row::key);
    keys.filter(|key| key.kind() == kind).collect()
}

/// Returns the classes and sets that endpoints are judged by.
fn used(rows: &[thuban_rows::Row]) -> BTreeSet<Key> {
    let mut used = BTreeSet::new();
    for row in rows {
        let thuban_rows::Row::Local(LocalEndpoint {
            class, ingress_set, ..
        }) = row
        else {
            continue;
        };
        used.extend(class.map(|id| Key::Class(VNI, id)));
        used.extend(ingress_set.map(|id| Key::PolicySet(VNI, id)));
    }
    used
}

#[tokio::test(start_paused = true)]
async fn nobody_is_judged_by_an_id_that_a_droplet_refuses() {
    for kind in [Kind::Class, Kind::PolicySet] {
        let (hub, mut droplets) = play(&Kinds::all());
        set(&hub);
        hub.roll_out();
        let c = droplets.get_mut("c").unwrap();
        let refused = ids(&read(&take(c).0), kind).pop_first().unwrap();
        for _ in 0..2 {
            hub.nack("c", c.id, c.sequence, &refused, NackReason::IdTaken);
        }
        assert!(hub.ack("c", c.id, c.sequence));
        let (rows, lost) = ack_all(&hub, &mut droplets);
        let given = ids(&rows, kind).into_iter().find(|key| *key != refused).unwrap();
        let used = used(&rows);
        assert!(used.contains(&given) && !used.contains(&refused), "{used:?}");
        assert!(lost == 0 && hub.policy_standing("red/db").unwrap().is_provisioned());
        tokio::time::advance(Duration::from_secs(31)).await;
        assert_eq!(ack_all(&hub, &mut droplets).1, 2, "it goes from both droplets");
    }
}

#[tokio::test(start_paused = true)]
async fn a_droplet_has_no_say_in_sets_of_a_vpc_without_it() {
    let (hub, mut droplets) = play(&Kinds::all());
    set(&hub);
    ack_all(&hub, &mut droplets);
    let of = |droplet: &str| {
        let program = hub.read(|world| world.program(droplet));
        let keys = program.into_keys();
        keys.filter(|key| matches!(key, Key::Class(..) | Key::PolicySet(..)))
            .collect::<Vec<_>>()
    };
    let keys = of("c");
    assert!(keys.len() > 1 && of("b").is_empty());
    let b = &droplets["b"];
    for key in &keys {
        for reason in [NackReason::IdTaken, NackReason::TableFull] {
            hub.nack("b", b.id, b.sequence, key, reason);
        }
    }
    let (rows, lost) = ack_all(&hub, &mut droplets);
    assert!(rows.is_empty() && lost == 0 && hub.rows_without_room() == 0);
    assert!(hub.policy_standing("red/db").unwrap().is_provisioned());
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_is_pending_while_its_set_is_refused() {
    let (hub, mut droplets) = play(&Kinds::all());
    set(&hub);
    ack_all(&hub, &mut droplets);
    let db = ("red".to_owned(), "db".to_owned());
    let is_pending = || hub.read(|world| world.is_policy_pending(&db));
    // An earlier leader gave the id to another set. If the set is not valid, another id would not help.
    for (reason, gets_another) in [(NackReason::Invalid, false), (NackReason::IdTaken, true)] {
        let (id, stream) = hub.open("a", &[], &[], Kinds::all());
        let sequence = 0;
        let mut a = Droplet { id, stream, sequence };
        let refused = ids(&read(&take(&mut a).0), Kind::PolicySet);
        let refused = refused.first().unwrap();
        assert!(!is_pending());
        hub.nack("a", id, 1, refused, reason);
        assert_eq!(is_pending(), gets_another, "{reason:?}");
        let progress = hub.read(|world| world.policy_progress("red/db").unwrap());
        assert_eq!(progress.is_rolled_out, !gets_another, "{reason:?}");
        assert!(hub.ack("a", id, 1));
        droplets.insert("a", a);
        let (rows, _) = ack_all(&hub, &mut droplets);
        assert_eq!(!used(&rows).is_empty(), gets_another, "{reason:?}");
        assert!(!is_pending() && !used(&rows).contains(refused));
    }
}

#[tokio::test(start_paused = true)]
async fn a_class_that_is_refused_midway_comes_before_sets() {
    let (hub, mut droplets) = play(&Kinds::all());
    set(&hub);
    hub.roll_out();
    for (name, droplet) in &mut droplets {
        take(droplet);
        assert!(hub.ack(name, droplet.id, droplet.sequence));
    }
    // Endpoints get their classes, and a droplet that comes back knows another class by the id.
    hub.roll_out();
    let (id, stream) = hub.open("c", &[], &[], Kinds::all());
    let sequence = 0;
    let mut c = Droplet { id, stream, sequence };
    let refused = ids(&read(&take(&mut c).0), Kind::Class);
    hub.nack("c", id, 1, refused.first().unwrap(), NackReason::IdTaken);
    droplets.insert("c", c);
    // Whether endpoints have sets, in each step.
    let mut steps = Vec::new();
    for _ in 0..8 {
        let mut sets = Vec::new();
        for (name, droplet) in &mut droplets {
            for row in read(&take(droplet).0) {
                if let thuban_rows::Row::Local(local) = row {
                    sets.push(local.ingress_set.is_some());
                }
            }
            assert!(hub.ack(name, droplet.id, droplet.sequence));
        }
        steps.push(sets);
        hub.roll_out();
    }
    steps.retain(|sets| !sets.is_empty());
    assert_eq!(
        steps,
        [[false], [false], [true]],
        "the class of db, that of web, and the set"
    );
}

#[tokio::test(start_paused = true)]
async fn a_droplet_that_does_not_enforce_keeps_a_vpc_open() {
    let (hub, mut droplets) = play(&Kinds::read(&[]));
    set(&hub);
    hub.roll_out();
    assert!(droplets.values_mut().all(|droplet| take(droplet).0.is_empty()));
    for name in DROPLETS {
        let (id, stream) = hub.open(name, &[], &[], Kinds::all());
        let mut droplet = Droplet {
            id,
            stream,
            sequence: 0,
        };
        take(&mut droplet);
        assert!(hub.ack(name, id, 1));
        droplets.insert(name, droplet);
        let standing = hub.policy_standing("red/db").unwrap();
        assert!(!standing.is_provisioned(), "nobody has rows of it: {name}");
        hub.roll_out();
        let has_set = kinds(&take(droplets.get_mut("a").unwrap()).0).contains(&Kind::PolicySet);
        assert_eq!(has_set, name == "c", "{name}");
    }
}

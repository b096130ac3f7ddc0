//! Which of too many policies count, and what the others do.

use std::collections::BTreeSet;

use fastrand::Rng;
use serde_json::{Value, json};
use thuban_rows::PolicyId;

use super::super::set_room::{NoSetRoom, SetRoom};
use super::super::{Applied, Labels, Member, Policies};
use super::{MAX_CLOSED, MAX_ENTRIES, MAX_PEERS, MAX_POLICIES, MAX_SET_ENTRIES, entries};

fn set(policies: &mut Policies, name: &str, created: i64, spec: &Value) {
    let spec = serde_json::from_value(spec.clone()).unwrap();
    policies
        .set_network_policy("red", name, created, Some(&spec))
        .unwrap();
}

fn remove(policies: &mut Policies, name: &str) {
    policies.set_network_policy("red", name, 0, None).unwrap();
}

/// Returns what the policies say of a pod of the namespace.
fn applied(policies: &Policies, namespace: &str, app: &str) -> Applied {
    let labels: Labels = [("app".to_owned(), app.to_owned())].into();
    policies.apply(&Member {
        namespace,
        labels: &labels,
        ports: &BTreeSet::new(),
        vpc: "green",
        network: "front",
        on_host_network: false,
    })
}

/// Returns how many rules accept packets to a pod; none: it is not isolated.
fn rules(policies: &Policies, app: &str) -> Option<usize> {
    let set = applied(policies, "red", app).ingress?;
    let accepting = set
        .rules
        .iter()
        .filter(|rule| rule.anyone || !rule.groups.is_empty());
    Some(accepting.count())
}

/// Lets one pod accept packets from anyone.
fn open(app: &str) -> Value {
    json!({"podSelector": {"matchLabels": {"app": app}}, "ingress": [{}]})
}

fn is_refused(policies: &Policies, name: &str) -> bool {
    policies.refused(&format!("red/{name}")).is_some()
}

#[test]
fn entries_are_peers_times_ports() {
    let values = json!([
        {"key": "a", "operator": "In", "values": ["1", "2", "3"]}, {"key": "b", "operator": "Exists"},
    ]);
    let block = json!({"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}});
    let app = json!({"matchLabels": {"app": "web"}});
    let both = json!({"namespaceSelector": {"matchExpressions": values}, "podSelector": app});
    for (spec, expected) in [
        (json!({}), 0),
        (json!({"podSelector": {"matchLabels": {"a": "1", "b": "2"}}}), 2),
        (json!({"ingress": [{}], "egress": [{}]}), 2),
        (json!({"ingress": [{"ports": [{}, {}, {}]}]}), 3),
        (
            json!({"ingress": [{"from": [{"podSelector": {}}, block], "ports": [{}, {}]}]}),
            6,
        ),
        (json!({"podSelector": app, "egress": [{"to": [both]}]}), 6),
    ] {
        assert_eq!(
            entries(&serde_json::from_value(spec.clone()).unwrap()),
            expected,
            "{spec}"
        );
    }
}

#[test]
fn the_oldest_policies_count_and_others_fail_closed() {
    let count = i64::try_from(MAX_POLICIES).unwrap() + 2;
    for is_reversed in [false, true] {
        let mut policies = Policies::default();
        for number in 0..count {
            let number = if is_reversed { count - 1 - number } else { number };
            let name = format!("p{number}");
            set(&mut policies, &name, number, &open(&name));
        }
        let refused = |policies: &Policies| {
            let numbers = (0..count).filter(|number| is_refused(policies, &format!("p{number}")));
            numbers.collect::<Vec<_>>()
        };
        assert_eq!(refused(&policies), [count - 2, count - 1]);
        assert_eq!(
            (rules(&policies, "p0"), rules(&policies, "p500")),
            (Some(1), Some(0))
        );
        assert_eq!(rules(&policies, "other"), None, "no policy selects the pod");
        let why = policies.refused("red/p500").unwrap().to_string();
        assert!(
            why.contains("more than 500") && why.contains("it selects"),
            "{why}"
        );
        policies.take_rejudged();
        remove(&mut policies, "p0");
        assert_eq!(refused(&policies), [count - 1]);
        assert_eq!(rules(&policies, "p500"), Some(1));
        assert_eq!(policies.take_rejudged(), ["red/p500".into()].into());
        set(&mut policies, "p0", 0, &open("p0"));
        assert_eq!(
            (rules(&policies, "p0"), rules(&policies, "p500")),
            (Some(1), Some(0))
        );
        set(&mut policies, "p0", count, &open("p0"));
        assert_eq!(
            (rules(&policies, "p0"), rules(&policies, "p500")),
            (Some(0), Some(1))
        );
    }
}

#[test]
fn another_namespace_has_limits_of_its_own() {
    let mut policies = Policies::default();
    for number in 0..=MAX_POLICIES {
        set(&mut policies, &format!("p{number}"), 0, &open("web"));
    }
    let spec = serde_json::from_value(open("web")).unwrap();
    policies.set_network_policy("blue", "p", 1, Some(&spec)).unwrap();
    assert!(policies.refused("blue/p").is_none() && policies.refused("guard").is_none());
    assert_eq!(applied(&policies, "blue", "web").ingress.unwrap().rules.len(), 1);
    assert_eq!(rules(&policies, "web"), Some(MAX_POLICIES));
}

/// Returns a policy of a pod with as many ports.
fn with_ports(app: &str, count: usize) -> Value {
    let ports: Vec<Value> = (1..=count).map(|port| json!({"port": port})).collect();
    json!({"podSelector": {"matchLabels": {"app": app}}, "ingress": [{"ports": ports}]})
}

#[test]
fn entries_are_limited_in_all() {
    let mut policies = Policies::default();
    // It takes no room from others, though it is the oldest.
    set(&mut policies, "huge", 0, &with_ports("huge", MAX_ENTRIES));
    set(&mut policies, "large", 1, &with_ports("large", MAX_ENTRIES - 3));
    set(&mut policies, "small", 2, &with_ports("small", 1));
    set(&mut policies, "late", 3, &with_ports("late", 1));
    let open = |policies: &Policies| {
        ["huge", "large", "small", "late"].map(|app| rules(policies, app).unwrap() == 1)
    };
    assert_eq!(open(&policies), [false, true, true, false]);
    assert!(
        policies
            .refused("red/late")
            .unwrap()
            .to_string()
            .contains("20000 entries")
    );
    set(&mut policies, "large", 1, &with_ports("large", 1));
    assert_eq!(open(&policies), [false, true, true, true]);
}

#[test]
fn no_policy_counts_that_is_younger_than_a_refused_one() {
    let mut policies = Policies::default();
    set(&mut policies, "large", 1, &with_ports("large", MAX_ENTRIES - 11));
    set(&mut policies, "wide", 2, &with_ports("wide", 10));
    set(&mut policies, "small", 3, &with_ports("small", 1));
    let open = |policies: &Policies| ["large", "wide", "small"].map(|app| rules(policies, app) == Some(1));
    assert_eq!(
        open(&policies),
        [true, false, false],
        "there would be room for one"
    );
    remove(&mut policies, "wide");
    assert_eq!(open(&policies), [true, false, true]);
}

/// Returns a policy of a pod with peers of its own.
fn with_peers(app: &str, prefix: &str, count: usize) -> Value {
    let peers = (0..count).map(|peer| {
        let label = json!({"key": "x", "operator": "NotIn", "values": [format!("{prefix}{peer}")]});
        json!({"namespaceSelector": {}, "podSelector": {"matchExpressions": [label]}})
    });
    let peers: Vec<Value> = peers.collect();
    json!({"podSelector": {"matchLabels": {"app": app}}, "ingress": [{"from": peers}]})
}

#[test]
fn peers_that_classes_name_are_limited() {
    let mut policies = Policies::default();
    set(&mut policies, "huge", 0, &with_peers("huge", "h", MAX_PEERS + 1));
    assert_eq!(rules(&policies, "huge"), Some(0));
    assert!(applied(&policies, "blue", "web").class.groups.is_empty());
    let most = MAX_PEERS - 1;
    set(&mut policies, "one", 1, &with_peers("one", "a", most));
    set(&mut policies, "same", 2, &with_peers("same", "a", most));
    set(&mut policies, "other", 3, &with_peers("other", "b", 2));
    let open = |policies: &Policies| ["one", "same", "other"].map(|app| rules(policies, app) == Some(1));
    assert_eq!(open(&policies), [true, true, false]);
    assert_eq!(applied(&policies, "blue", "web").class.groups.len(), most);
    // There is room for one more.
    set(&mut policies, "other", 3, &with_peers("other", "b", 1));
    assert_eq!(open(&policies), [true, true, true]);
    set(&mut policies, "other", 3, &with_peers("other", "b", 2));
    remove(&mut policies, "one");
    assert_eq!(open(&policies)[1..], [true, false]);
    remove(&mut policies, "same");
    assert_eq!(open(&policies)[2..], [true]);
}

#[test]
fn far_too_many_policies_close_the_whole_namespace() {
    let mut policies = Policies::default();
    let most = i64::try_from(MAX_POLICIES + MAX_CLOSED).unwrap();
    for number in 0..most {
        set(&mut policies, &format!("p{number}"), number, &open("web"));
    }
    assert_eq!(rules(&policies, "other"), None);
    set(&mut policies, "last", most, &open("other"));
    let closed = applied(&policies, "red", "third");
    for set in [closed.ingress, closed.egress] {
        let set = set.unwrap();
        let names: Vec<&str> = set.rules.iter().map(|rule| &*rule.policy).collect();
        assert!(set.is_isolated && !set.says_anything());
        assert_eq!(names, ["red/*"]);
    }
    assert!(
        policies
            .refused("red/last")
            .unwrap()
            .to_string()
            .contains("all pods")
    );
    assert_eq!(rules(&policies, "web"), Some(MAX_POLICIES), "older ones count");
    let neighbour = applied(&policies, "blue", "web");
    assert_eq!((neighbour.ingress, neighbour.egress), (None, None));
    // However many there are, a pod is matched against few.
    for number in 0..100 {
        set(&mut policies, &format!("more{number}"), most, &open("web"));
    }
    assert_eq!(policies.by_name.len(), MAX_POLICIES + MAX_CLOSED + 1);
    for number in 0..100 {
        remove(&mut policies, &format!("more{number}"));
    }
    remove(&mut policies, "p0");
    assert_eq!(
        (rules(&policies, "third"), rules(&policies, "other")),
        (None, Some(0))
    );
}

#[test]
fn which_policies_count_depends_on_no_order() {
    let mut random = Rng::with_seed(7);
    let mut present = std::collections::BTreeMap::new();
    let mut policies = Policies::default();
    for _ in 0..1_500 {
        let name = format!("p{}", random.usize(..1_200));
        if random.u8(..5) == 0 {
            present.remove(&name);
            remove(&mut policies, &name);
            continue;
        }
        let app = format!("a{}", random.u8(..20));
        let given = (random.i64(..9), with_ports(&app, 1 + random.usize(..60)));
        set(&mut policies, &name, given.0, &given.1);
        present.insert(name, given);
    }
    let mut scratch = Policies::default();
    for (name, (created, spec)) in present.iter().rev() {
        set(&mut scratch, name, *created, spec);
    }
    for name in present.keys() {
        let name = format!("red/{name}");
        assert_eq!(policies.refused(&name), scratch.refused(&name), "{name}");
    }
    for app in 0..20 {
        let app = format!("a{app}");
        assert_eq!(applied(&policies, "red", &app), applied(&scratch, "red", &app));
    }
    for name in present.keys() {
        remove(&mut policies, name);
    }
    assert!(policies.shares.is_empty() && policies.is_empty());
}

#[test]
fn a_set_that_gets_another_id_keeps_its_room() {
    let mut policies = Policies::default();
    set(&mut policies, "large", 0, &with_ports("web", MAX_ENTRIES - 1));
    let large = applied(&policies, "red", "web").ingress.unwrap();
    let mut room = SetRoom::default();
    let most = u32::try_from(MAX_SET_ENTRIES / large.entries()).unwrap();
    let id = |number| PolicyId::new(100 + number).unwrap();
    for number in 0..most {
        assert_eq!(room.admit("red", &large), Ok(()));
        room.take("red", id(number), &large);
    }
    let (old, new) = (id(0), id(most));
    room.rename(old, new);
    assert!(!room.retain(|id| id != old), "nothing has gone");
    assert_eq!(room.admit("red", &large), Err(NoSetRoom));
    assert_eq!(room.admit("blue", &large), Ok(()));
    assert!(room.retain(|id| id != new));
    assert_eq!(room.admit("red", &large), Ok(()));
}

//! Rows of network policy: they reach the maps before the endpoints that they judge, leave after them, and outlive
//! transitd.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use aya::Pod;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapError, MapInfo};
use serde_json::{Value, json};
use thuban_common::policy::{BlockKey, Grant, GrantKey, ListEntry, ListKey, PEER_OUTSIDE, of_vpc};
use thuban_common::tables::LAYOUT_VERSION;
use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::row::Row;
use thuban_proto::transit::{
    self as proto, ClassRow, NackReason, PolicyAction, PolicyBlock, PolicyKey, PolicyPort, PolicyRule,
    PolicySetRow, PolicyTier, RowKey, row_key,
};

use crate::killed::{Armed, boundaries, died};
use crate::pressure::shrunk;
use crate::rig::{self, Rig, base_rows, eventually, local};

pub fn class(id: u32, group: u64) -> Row {
    Row::Class(ClassRow {
        vni: 7,
        id,
        groups: vec![group],
        ..ClassRow::default()
    })
}

/// Returns a set that accepts TCP to the port from the group, and all from 192.0.2.0/24.
pub fn set(id: u32, group: u64, port: u32) -> Row {
    let rule = PolicyRule {
        tier: PolicyTier::NetworkPolicy.into(),
        action: PolicyAction::Accept.into(),
        policy: "red/web".into(),
        ..PolicyRule::default()
    };
    let block = PolicyBlock {
        cidr: "192.0.2.0/24".into(),
        ..PolicyBlock::default()
    };
    let ports = PolicyPort {
        protocol: 6,
        first: port,
        last: port,
        ..PolicyPort::default()
    };
    Row::PolicySet(PolicySetRow {
        vni: 7,
        id,
        isolated: true,
        rules: vec![
            PolicyRule {
                groups: vec![group],
                ports: vec![ports],
                ..rule.clone()
            },
            PolicyRule {
                blocks: vec![block],
                ..rule
            },
        ],
        ..PolicySetRow::default()
    })
}

/// Returns the pod p1 with class 3 and these sets.
fn judged(ingress_set: u32, egress_set: u32) -> Row {
    rig::judged(local(7, "p1", 5), 3, [ingress_set, egress_set])
}

fn key_of(set: u32) -> RowKey {
    let key = PolicyKey { vni: 7, id: set };
    RowKey {
        key: Some(row_key::Key::PolicySet(key)),
    }
}

/// The maps that packets are judged by.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    grants: BTreeMap<GrantKey, Grant>,
    blocks: BTreeMap<(BlockKey, u32), Grant>,
    /// The parts of each list.
    lists: BTreeMap<u32, usize>,
}

impl Held {
    /// Returns the sets that have grants.
    fn sets(&self) -> Vec<u64> {
        let mut sets: Vec<u64> = self.grants.keys().map(|key| key.set & 0xff_ffff).collect();
        sets.dedup();
        sets
    }
}

impl Rig {
    fn maps(&self) -> PathBuf {
        self.directory
            .join(format!("bpf/thuban/layout_{LAYOUT_VERSION}/maps"))
    }

    fn hash_map<K: Pod, V: Pod>(&self, name: &str) -> HashMap<MapData, K, V> {
        let data = MapData::from_pin(self.maps().join(name)).unwrap();
        HashMap::try_from(Map::HashMap(data)).unwrap()
    }

    fn judging(&self) -> Held {
        let grants = self.hash_map::<GrantKey, Grant>("GRANTS");
        let own = |entry: Result<(GrantKey, Grant), MapError>| {
            let (key, grant) = entry.unwrap();
            (key, grant.read(&key).unwrap())
        };
        let data = MapData::from_pin(self.maps().join("BLOCKS")).unwrap();
        let blocks: LpmTrie<MapData, BlockKey, Grant> = LpmTrie::try_from(Map::LpmTrie(data)).unwrap();
        let blocks = blocks.iter().map(|block| {
            let (key, grant) = block.unwrap();
            ((key.data(), key.prefix_len()), grant)
        });
        let mut lists = BTreeMap::new();
        for key in self.hash_map::<ListKey, ListEntry>("LISTS").keys() {
            *lists.entry(key.unwrap().list).or_default() += 1;
        }
        Held {
            grants: grants.iter().map(own).collect(),
            blocks: blocks.collect(),
            lists,
        }
    }

    fn policy_epoch(&self) -> u32 {
        let data = MapData::from_pin(self.maps().join("POLICY")).unwrap();
        let epoch: Array<MapData, u32> = Array::try_from(Map::Array(data)).unwrap();
        epoch.get(&0, 0).unwrap()
    }

    /// Returns class, ingress set and egress set of the only attachment.
    fn attached(&self) -> [Value; 3] {
        let entry = &self.rows("ATTACHMENTS")[0]["entry"];
        ["class", "ingress_set", "egress_set"].map(|field| entry[field].clone())
    }

    fn has_policy(&self) -> bool {
        self.rows("LOCAL_ENDPOINTS")[0]["entry"]["has_policy"] == json!(true)
    }
}

fn rows(more: Vec<Row>) -> Vec<Row> {
    let mut rows = base_rows();
    rows.extend(more);
    rows
}

#[test]
fn policy_rows_come_before_their_endpoints_and_go_after() {
    let mut rig = Rig::new(rows(vec![
        judged(4, 5),
        class(3, 11),
        set(4, 11, 80),
        set(5, 11, 81),
    ]));
    rig.add_pod("p1");
    let first = rig.judging();
    assert_eq!(first.sets(), [4, 5]);
    let own = of_vpc(7, 4);
    let peers: Vec<u64> = first
        .grants
        .keys()
        .filter(|key| key.set == own)
        .map(|key| key.peer)
        .collect();
    assert_eq!(peers, [0, PEER_OUTSIDE, of_vpc(7, 3)]);
    assert_eq!(
        (first.blocks.len(), first.lists.len()),
        (2, 3),
        "blocks share a list"
    );
    assert_eq!(
        rig.attached(),
        [json!("000003"), json!("000004"), json!("000005")]
    );
    assert!(rig.has_policy());
    // A row without a change of policy leaves the epoch.
    let epoch = rig.policy_epoch();
    rig.operator.push_and_wait(vec![local(7, "p2", 6)], vec![]);
    assert_eq!(rig.policy_epoch(), epoch);

    rig.operator
        .push_and_wait(vec![set(6, 11, 82), judged(6, 0)], vec![key_of(4), key_of(5)]);
    assert_eq!(rig.judging().sets(), [6]);
    assert_eq!(rig.attached(), [json!("000003"), json!("000006"), Value::Null]);
    assert!(rig.has_policy() && rig.policy_epoch() > epoch);
    let epoch = rig.policy_epoch();
    rig.operator.push_and_wait(vec![judged(0, 0)], vec![key_of(6)]);
    assert!(!rig.has_policy() && rig.policy_epoch() > epoch);
    let left = rig.judging();
    assert!(left.grants.is_empty() && left.blocks.is_empty(), "{left:?}");
    eventually("lists go after their grace", || rig.judging().lists.is_empty());
}

#[test]
fn what_judges_packets_outlives_transitd_and_is_kept() {
    // Sets before the classes that they judge.
    let all = rows(vec![set(4, 11, 80), set(5, 11, 81), class(3, 11), judged(4, 5)]);
    let mut rig = Rig::new(all);
    rig.add_pod("p1");
    let (before, epoch) = (rig.judging(), rig.policy_epoch());
    rig.kill();
    assert_eq!(rig.judging(), before);
    // No rows come to the next transitd.
    rig.operator.shared.lock().unwrap().epoch = 0;
    rig.start();
    rig.operator
        .wait_for("a hello", |m| matches!(m, Message::Hello(_)));
    eventually("alive", || rig.probe(true).0 == 0);
    // Longer than the grace of lists.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert_eq!(rig.judging(), before);
    assert_eq!(
        rig.policy_epoch(),
        epoch + 1,
        "the last one may have ended before it raised the epoch"
    );
    // The same rows find their entries.
    rig.operator.shared.lock().unwrap().epoch = 2;
    rig.operator.wait_for_ack();
    assert_eq!((rig.judging(), rig.policy_epoch()), (before.clone(), epoch + 1));
    // A set that the snapshot lacks stays for a while: other droplets may still judge by it.
    rig.kill();
    let mut shared = rig.operator.shared.lock().unwrap();
    shared.rows.retain(|row| *row != set(5, 11, 81));
    drop(shared);
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(rig.judging(), before);
    assert_eq!(rig.attached()[1], json!("000004"));
}

#[test]
fn a_set_beyond_its_vpcs_share_is_nacked_by_name() {
    let mut rig = Rig::prepare(rows(vec![class(3, 11), set(4, 11, 80)]));
    // A share is four. A set takes three: of the class, of others and of the outside.
    rig.programs = shrunk(&rig, "GRANTS", 16);
    rig.start();
    rig.operator.wait_for_ack();
    rig.operator.push_and_wait(vec![set(5, 11, 81)], vec![]);
    let is_refusal =
        |message: &Message| matches!(message, Message::Nack(nack) if nack.key == Some(key_of(5)));
    let Message::Nack(nack) = rig.operator.wait_for("a nack", is_refusal) else {
        unreachable!()
    };
    assert_eq!(nack.reason(), NackReason::TableFull);
    assert!(nack.message.contains("share of table GRANTS"), "{}", nack.message);
    assert_eq!(rig.judging().grants.len(), 4, "it denies all by one entry");
    // As often as the operator sends it. Other rows say nothing of it.
    rig.operator.push_and_wait(vec![local(7, "p2", 6)], vec![]);
    rig.operator.push_and_wait(vec![set(5, 11, 81)], vec![]);
    assert_eq!(rig.operator.count(is_refusal), 2);
    // With room it is there at once.
    rig.operator.push_and_wait(vec![], vec![key_of(4)]);
    assert_eq!((rig.judging().sets(), rig.judging().grants.len()), (vec![5], 3));
    rig.operator.push_and_wait(vec![set(5, 11, 81)], vec![]);
    assert_eq!(rig.operator.count(is_refusal), 2);
}

#[test]
fn a_set_without_room_for_a_class_is_nacked_but_stays() {
    let mut rig = Rig::prepare(rows(vec![class(3, 11), set(4, 11, 80)]));
    rig.programs = shrunk(&rig, "GRANTS", 16);
    rig.start();
    rig.operator.wait_for_ack();
    // Two more classes need two more entries.
    rig.operator
        .push_and_wait(vec![class(8, 11), class(9, 11)], vec![]);
    let is_refusal =
        |message: &Message| matches!(message, Message::Nack(nack) if nack.key == Some(key_of(4)));
    assert_eq!(rig.operator.count(is_refusal), 1);
    assert_eq!(rig.judging().grants.len(), 4, "three of before, and one class");
}

#[test]
fn other_content_under_a_known_id_is_refused() {
    let rig = Rig::new(rows(vec![class(3, 11), set(4, 11, 80)]));
    let before = rig.judging();
    rig.operator
        .push_and_wait(vec![set(4, 12, 80), class(3, 12)], vec![]);
    let is_refusal =
        |message: &Message| matches!(message, Message::Nack(nack) if nack.reason() == NackReason::IdTaken);
    assert_eq!(rig.operator.count(is_refusal), 2);
    assert_eq!(rig.judging(), before);
}

/// Returns the changes that strace saw, each as its kind and the map, without repetitions.
fn changes(rig: &Rig, calls: &str, maps: &BTreeMap<u64, &'static str>) -> Vec<String> {
    let mut changes: Vec<String> = Vec::new();
    for line in calls.lines() {
        let kind = match line {
            line if line.contains("BPF_MAP_UPDATE_ELEM") => "write",
            line if line.contains("BPF_MAP_DELETE_ELEM") => "remove",
            _ => continue,
        };
        let (_, rest) = line.split_once("map_fd=").unwrap();
        let descriptor: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let info = format!("/proc/{}/fdinfo/{descriptor}", rig.daemon_id());
        let info = std::fs::read_to_string(info).unwrap_or_default();
        let id = info.lines().find_map(|line| line.strip_prefix("map_id:"));
        let Some(name) = id.and_then(|id| maps.get(&id.trim().parse().unwrap())) else {
            continue;
        };
        let change = format!("{kind} {name}");
        if changes.last() != Some(&change) {
            changes.push(change);
        }
    }
    changes
}

#[test]
fn a_push_writes_sets_then_endpoints_then_removes_sets() {
    let mut rig = Rig::new(rows(vec![judged(4, 0), class(3, 11), set(4, 11, 80)]));
    rig.add_pod("p1");
    let names = ["GRANTS", "LISTS", "BLOCKS", "POLICY", "ATTACHMENTS"];
    let id = |name| MapInfo::from_pin(rig.maps().join(name)).unwrap().id();
    let maps = names.map(|name| (u64::from(id(name)), name)).into();
    let path = rig.directory.join("calls");
    let mut strace = Command::new("/usr/bin/strace");
    strace.args(["-f", "-qq", "-e", "trace=bpf", "-o"]).arg(&path);
    let watching = Armed::attach(strace, rig.daemon_id());
    rig.operator
        .push_and_wait(vec![judged(6, 0), set(6, 11, 81)], vec![key_of(4)]);
    let read = || changes(&rig, &std::fs::read_to_string(&path).unwrap(), &maps);
    eventually("strace has written all", || {
        read().iter().filter(|change| *change == "write POLICY").count() == 3
    });
    let mut seen = read();
    // A list of the removed set goes by itself, after its grace.
    seen.retain(|change| change != "remove LISTS");
    rig.kill();
    watching.wait();
    assert_eq!(
        seen,
        [
            "write BLOCKS",
            "write LISTS",
            "write GRANTS",
            "write POLICY",
            "write ATTACHMENTS",
            "write POLICY",
            "remove GRANTS",
            "remove BLOCKS",
            "write POLICY",
        ]
    );
}

#[test]
fn a_transitd_killed_in_a_push_is_made_good() {
    let earlier = rows(vec![judged(4, 5), class(3, 11), set(4, 11, 80), set(5, 11, 81)]);
    let mut rig = Rig::new(earlier.clone());
    rig.add_pod("p1");
    let mut kills = 0;
    boundaries(&["bpf"], |call, number| {
        // Another set each time: those that snapshots don't name linger.
        let new = 6 + number as u32;
        let later = rows(vec![judged(new, 0), class(3, 11), set(new, 11, 82)]);
        rig.operator.shared.lock().unwrap().rows = later;
        let armed = Armed::new(rig.daemon_id(), call, number);
        let upserts = vec![judged(new, 0), set(new, 11, 82)];
        let upserts = upserts.into_iter().map(|row| proto::Row { row: Some(row) });
        rig.operator
            .push_raw(upserts.collect(), vec![key_of(4), key_of(5)]);
        let has_died = died(&mut rig);
        drop(armed);
        if has_died {
            kills += 1;
            rig.start();
        }
        eventually("the later rows", || {
            let grants = rig.judging().grants;
            let own = grants.keys().filter(|key| key.set == of_vpc(7, new));
            own.count() == 3
        });
        rig.operator.wait_for_ack();
        assert_eq!(rig.attached()[1], json!(format!("{new:06x}")));
        // Back to the earlier rows.
        rig.operator.shared.lock().unwrap().rows.clone_from(&earlier);
        rig.operator.hang_up();
        eventually("the earlier rows", || {
            let sets = rig.judging().sets();
            sets.contains(&4) && sets.contains(&5) && rig.attached()[1] == json!("000004")
        });
        has_died
    });
    println!("transitd was killed at {kills} boundaries of a push");
    assert!(kills >= 2, "only {kills} boundaries");
}

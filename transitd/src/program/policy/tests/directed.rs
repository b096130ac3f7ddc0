//! What random rows say too seldom, or not by name.

use std::sync::Arc;

use ipnet::IpNet;
use thuban_common::host_stack::NFT_POLICY_TABLE;
use thuban_common::policy::{
    Decision, GRANT_ASKS_BLOCKS, GRANT_DENIES, MAX_RANGES, PEER_OTHER, PEER_OUTSIDE, SHARED_SERVICE_CLASS,
    of_vpc,
};
use thuban_rows::{
    Block, Class, PolicyAction, PolicyPorts, PolicyRule, PolicySet, PolicyTier, SHARED_SERVICE_GROUP,
    builders,
};

use super::super::lists::parts;
use super::super::outside::STACK_CAPACITY;
use super::super::store::SHARES;
use super::super::{Change, NoRoom, PolicyTables, Retired, Usage};
use super::maps::Maps;
use super::{VNI, id};
use crate::dataplane::policy::GRANTS;

/// Returns an isolated set that has these rules.
pub fn set(number: u32, rules: Vec<PolicyRule>) -> PolicySet {
    PolicySet {
        vni: VNI,
        id: id(number),
        is_egress: false,
        is_isolated: true,
        rules,
    }
}

/// Returns a rule that accepts nobody's packets.
pub fn rule() -> PolicyRule {
    PolicyRule {
        tier: PolicyTier::NetworkPolicy,
        action: PolicyAction::Accept,
        policy: Arc::from("red/web"),
        index: 0,
        anyone: false,
        groups: [].into(),
        blocks: vec![],
        ports: vec![],
    }
}

pub fn of_group(group: u64) -> PolicyRule {
    PolicyRule {
        groups: [group].into(),
        ..rule()
    }
}

pub fn of_block(range: &str, except: &[&str]) -> PolicyRule {
    let read = |range: &str| range.parse::<IpNet>().unwrap();
    PolicyRule {
        blocks: vec![Block {
            range: read(range),
            except: except.iter().map(|range| read(range)).collect(),
        }],
        ..rule()
    }
}

fn tcp(port: u16) -> PolicyPorts {
    PolicyPorts::Range(6, port, port)
}

/// Returns a class of one group.
pub fn class(number: u32, group: u64) -> Class {
    Class {
        vni: VNI,
        id: id(number),
        groups: [group].into(),
        names: [].into(),
    }
}

pub fn apply(maps: &mut Maps, tables: &mut PolicyTables) -> Retired {
    let (changes, retired) = tables.flush();
    maps.apply_all(&changes);
    retired
}

/// Returns what each change is of.
fn kinds(changes: &[Change]) -> Vec<&'static str> {
    let kind = |change: &Change| match change {
        Change::Grant(key, _) if key.peer == PEER_OTHER => "other",
        Change::Grant(key, _) if key.peer == PEER_OUTSIDE => "outside",
        Change::Grant(..) => "class",
        Change::Block(..) => "block",
        Change::List(..) => "list",
    };
    changes.iter().map(kind).collect()
}

/// Returns the flags of each of a set's grants, by the number of its peer's class.
fn grants(maps: &Maps, number: u32) -> Vec<(u64, u32)> {
    let own = of_vpc(VNI.get(), number);
    let grants = maps.grants.iter().filter(|(key, _)| key.set == own);
    let mut grants: Vec<_> = grants
        .map(|(key, grant)| (key.peer & 0xff_ffff, grant.flags))
        .collect();
    grants.sort_unstable();
    grants
}

#[test]
fn rows_with_other_content_than_before_are_refused() {
    let mut tables = PolicyTables::default();
    tables.put_class(class(3, 1)).unwrap();
    tables.put_class(class(3, 1)).unwrap();
    let error = tables.put_class(class(3, 2)).unwrap_err().to_string();
    assert!(error.starts_with("class 000003 of VPC 7 has other"), "{error}");
    tables.put_set(set(3, vec![])).unwrap();
    tables.put_set(set(3, vec![])).unwrap();
    let error = tables.put_set(set(3, vec![rule()])).unwrap_err().to_string();
    assert!(error.starts_with("set 000003 of VPC 7 has other"), "{error}");
    tables.remove_set(VNI, id(3));
    tables.put_set(set(3, vec![rule()])).unwrap();
    assert!(
        tables.put_class(class(1, 1)).is_err(),
        "the plain class is in no group"
    );
    let plain = Class {
        groups: [].into(),
        ..class(1, 1)
    };
    tables.put_class(plain).unwrap();
}

#[test]
fn what_leads_to_all_of_a_set_is_last_to_come_and_first_to_go() {
    let mut tables = PolicyTables::default();
    tables.put_class(class(3, 1)).unwrap();
    tables
        .put_set(set(4, vec![of_group(1), of_block("10.0.0.0/8", &[])]))
        .unwrap();
    let (changes, _) = tables.flush();
    assert_eq!(
        kinds(&changes),
        ["list", "block", "list", "class", "outside", "other"]
    );
    tables.remove_set(VNI, id(4));
    let (changes, retired) = tables.flush();
    assert_eq!(kinds(&changes), ["other", "outside", "class", "block"]);
    tables.expire(retired);
    assert_eq!(kinds(&tables.flush().0), ["list", "list"]);
}

#[test]
fn a_class_has_no_entry_where_it_is_as_one_without_a_row() {
    let (mut tables, mut maps) = (PolicyTables::default(), Maps::default());
    (3..9).for_each(|n| tables.put_class(class(n, n.into())).unwrap());
    tables.put_set(set(2, vec![of_group(5)])).unwrap();
    let deny = PolicyRule {
        action: PolicyAction::Deny,
        ..of_group(5)
    };
    tables.put_set(set(3, vec![deny])).unwrap();
    apply(&mut maps, &mut tables);
    let flags =
        |peers: &[u64]| -> Vec<(u64, u32)> { peers.iter().map(|peer| (*peer, GRANT_DENIES)).collect() };
    assert_eq!(grants(&maps, 2), flags(&[PEER_OTHER, PEER_OUTSIDE, 5]));
    // 1 is twice: the plain class and the outside.
    let of_all = [0, 1, 1, 3, 4, 6, 7, 8, SHARED_SERVICE_CLASS.into()];
    assert_eq!(grants(&maps, 3), flags(&of_all));
}

#[test]
fn clients_by_a_shared_service_are_a_class_without_a_row() {
    let (mut tables, mut maps) = (PolicyTables::default(), Maps::default());
    let rules = || vec![of_group(SHARED_SERVICE_GROUP)];
    tables.put_set(set(2, rules())).unwrap();
    let egress = PolicySet {
        is_egress: true,
        ..set(3, rules())
    };
    tables.put_set(egress).unwrap();
    tables.put_set(set(4, vec![of_group(5)])).unwrap();
    apply(&mut maps, &mut tables);
    let accepts = |number, class| {
        let set = of_vpc(VNI.get(), number);
        maps.judge(set, of_vpc(VNI.get(), class), [0; 16], 0).0
    };
    assert!(accepts(2, SHARED_SERVICE_CLASS) && !accepts(2, 1) && !accepts(2, 3));
    for number in [3, 4] {
        assert!(!accepts(number, SHARED_SERVICE_CLASS));
        assert_eq!(grants(&maps, number).len(), 2, "no entry where it says nothing");
    }
    let row = class(SHARED_SERVICE_CLASS, 5);
    assert!(tables.put_class(row).is_err(), "its group is known");
}

#[test]
fn blocks_take_no_more_prefixes_than_they_name() {
    let (mut tables, mut maps) = (PolicyTables::default(), Maps::default());
    let rules = vec![
        of_block("0.0.0.0/0", &["10.0.0.0/8", "10.1.2.3/32"]),
        of_block("10.1.0.0/16", &["10.1.2.0/24"]),
        of_block("fd00::/8", &["fd00:1::/64"]),
    ];
    tables.put_set(set(2, rules)).unwrap();
    apply(&mut maps, &mut tables);
    assert_eq!(maps.usage().blocks, 7);
    let admits = |address: &str| {
        let address = match address.parse().unwrap() {
            std::net::IpAddr::V4(address) => address.to_ipv6_mapped(),
            std::net::IpAddr::V6(address) => address,
        };
        maps.judge(of_vpc(VNI.get(), 2), PEER_OUTSIDE, address.octets(), 0)
    };
    let none = thuban_common::policy::NO_RULE;
    assert_eq!(admits("192.0.2.1"), (true, 0));
    assert_eq!(admits("10.2.0.1"), (false, none));
    assert_eq!(admits("10.1.0.1"), (true, 1));
    assert_eq!(admits("10.1.2.1"), (false, none));
    assert_eq!(admits("10.1.2.3"), (false, none));
    assert_eq!(admits("fd00::1"), (true, 2));
    assert_eq!(admits("fd00:1::1"), (false, none));
    assert_eq!(admits("2001:db8::1"), (false, none));
}

#[test]
fn a_block_of_all_ipv6_says_nothing_of_ipv4() {
    let (mut tables, mut maps) = (PolicyTables::default(), Maps::default());
    tables.put_set(set(2, vec![of_block("::/0", &[])])).unwrap();
    apply(&mut maps, &mut tables);
    let judge = |address: [u8; 16]| maps.judge(of_vpc(VNI.get(), 2), PEER_OUTSIDE, address, 0).0;
    assert!(judge("fd00::1".parse::<std::net::Ipv6Addr>().unwrap().octets()));
    assert!(!judge(
        std::net::Ipv4Addr::new(192, 0, 2, 1).to_ipv6_mapped().octets()
    ));
}

#[test]
fn only_blocks_that_speak_of_the_vpc_are_asked_within() {
    let named = PolicyRule {
        ports: vec![PolicyPorts::Named("http".into(), None)],
        ..of_block("10.0.1.0/24", &[])
    };
    let asks = |rule: PolicyRule, ranges: Option<&[&str]>| {
        let (mut tables, mut maps) = (PolicyTables::default(), Maps::default());
        let read = |ranges: &[&str]| ranges.iter().map(|range| range.parse().unwrap()).collect();
        let ranges: Option<Vec<IpNet>> = ranges.map(read);
        tables.put_set(set(2, vec![rule])).unwrap();
        tables.set_ranges(VNI, ranges.as_deref());
        apply(&mut maps, &mut tables);
        let flags = grants(&maps, 2)
            .into_iter()
            .map(|(_, flags)| flags & GRANT_ASKS_BLOCKS != 0);
        let flags: Vec<bool> = flags.collect();
        (flags[0], flags[1])
    };
    let ranges = Some(&["10.0.0.0/16", "fd00:1::/48"][..]);
    assert_eq!(asks(rule(), ranges), (false, false), "no block");
    assert_eq!(asks(of_block("192.0.2.0/24", &[]), ranges), (false, true));
    assert_eq!(
        asks(of_block("192.0.2.0/24", &[]), None),
        (true, true),
        "ranges that aren't known"
    );
    assert_eq!(asks(of_block("192.0.2.0/24", &[]), Some(&[])), (false, true));
    assert_eq!(
        asks(of_block("10.0.1.0/24", &[]), ranges),
        (true, true),
        "a part of the VPC"
    );
    assert_eq!(asks(of_block("10.0.0.0/16", &[]), ranges), (true, true));
    assert_eq!(
        asks(of_block("0.0.0.0/0", &[]), ranges),
        (true, true),
        "all of the VPC"
    );
    assert_eq!(
        asks(of_block("0.0.0.0/0", &["10.0.0.0/8"]), ranges),
        (false, true)
    );
    assert_eq!(
        asks(of_block("0.0.0.0/0", &["10.0.1.0/24"]), ranges),
        (true, true)
    );
    assert_eq!(asks(of_block("::/0", &["fd00:1::/48"]), ranges), (false, true));
    assert_eq!(
        asks(of_block("10.0.0.0/15", &["10.0.0.0/16"]), ranges),
        (false, true)
    );
    assert_eq!(
        asks(named, ranges),
        (false, false),
        "ports with names have no address"
    );
}

#[test]
fn a_list_is_shared_in_a_vpc_and_keeps_its_number_for_a_grace() {
    let (mut tables, mut maps) = (PolicyTables::default(), Maps::default());
    let anyone = || PolicyRule {
        anyone: true,
        ..rule()
    };
    tables.put_set(set(2, vec![anyone()])).unwrap();
    tables.put_set(set(3, vec![anyone()])).unwrap();
    apply(&mut maps, &mut tables);
    assert_eq!(maps.usage().lists, 1);
    tables.remove_set(VNI, id(2));
    assert!(apply(&mut maps, &mut tables).is_empty(), "still in use");
    tables.remove_set(VNI, id(3));
    let first = apply(&mut maps, &mut tables);
    assert!(!first.is_empty());
    // Within the grace the list comes to use again, and goes again: it has another grace.
    tables.put_set(set(2, vec![anyone()])).unwrap();
    apply(&mut maps, &mut tables);
    tables.remove_set(VNI, id(2));
    let second = apply(&mut maps, &mut tables);
    tables.expire(first);
    apply(&mut maps, &mut tables);
    assert_eq!(maps.usage().lists, 1);
    tables
        .put_set(set(
            4,
            vec![PolicyRule {
                ports: vec![tcp(80)],
                ..anyone()
            }],
        ))
        .unwrap();
    apply(&mut maps, &mut tables);
    let number = |maps: &Maps| maps.lists.keys().map(|key| key.list).max();
    assert_eq!(number(&maps), Some(2));
    tables.expire(second);
    apply(&mut maps, &mut tables);
    tables
        .put_set(set(
            5,
            vec![PolicyRule {
                ports: vec![tcp(81)],
                ..anyone()
            }],
        ))
        .unwrap();
    apply(&mut maps, &mut tables);
    assert_eq!(
        (maps.usage().lists, number(&maps)),
        (2, Some(2)),
        "a number is given again"
    );
}

#[test]
fn a_set_with_a_list_of_too_many_ranges_denies_all() {
    let anyone = |ports: Vec<PolicyPorts>| PolicyRule {
        anyone: true,
        ports,
        ..rule()
    };
    let ports = |count: usize| (0..count as u16).map(|n| tcp(2 * n)).collect();
    let (mut tables, mut maps) = (PolicyTables::default(), Maps::default());
    tables.put_set(set(2, vec![anyone(ports(MAX_RANGES))])).unwrap();
    tables
        .put_set(set(3, vec![anyone(ports(MAX_RANGES + 1))]))
        .unwrap();
    apply(&mut maps, &mut tables);
    assert_eq!(tables.full().collect::<Vec<_>>(), [((VNI, id(3)), NoRoom::Set)]);
    assert_eq!(maps.usage().lists, parts(MAX_RANGES));
    let judge = |number, point| {
        maps.judge(of_vpc(VNI.get(), number), of_vpc(VNI.get(), 1), [0; 16], point)
            .0
    };
    assert!(judge(2, 0x1_0000) && !judge(2, 0x1_0001) && !judge(3, 0x1_0000));
}

/// Every block says something else, and everything that is said of all addresses besides.
#[test]
fn a_set_that_says_too_much_of_clients_outside_denies_all() {
    let rules = |blocks: u16| {
        let anyone = PolicyRule {
            anyone: true,
            ports: (0..1000).map(|n| tcp(2 * n)).collect(),
            ..rule()
        };
        let block = |n: u16| PolicyRule {
            ports: vec![tcp(2 * n + 1)],
            ..of_block(&format!("192.0.{}.{}/32", n / 256, n % 256), &[])
        };
        [anyone].into_iter().chain((0..blocks).map(block)).collect()
    };
    let egress = |number, rules| PolicySet {
        is_egress: true,
        ..set(number, rules)
    };
    let mut tables = PolicyTables::default();
    tables.put_set(set(2, rules(60))).unwrap();
    tables.put_set(set(3, rules(61))).unwrap();
    // Nothing of it is for nftables.
    tables.put_set(egress(4, rules(1100))).unwrap();
    assert_eq!(tables.full().collect::<Vec<_>>(), [((VNI, id(3)), NoRoom::Set)]);
    let begun = std::time::Instant::now();
    let outside = tables.outside(VNI, id(2)).unwrap();
    println!("{} ranges in {:?}", outside.ranges.len(), begun.elapsed());
    assert_eq!(outside.ranges.len(), 60);
    assert!(outside.cost() <= STACK_CAPACITY / SHARES);
    assert!(tables.outside(VNI, id(3)).is_none());
}

#[test]
fn a_vpc_that_fills_nftables_keeps_no_set_of_others_closed() {
    let ports = |count: u16| PolicyRule {
        anyone: true,
        ports: (0..count).map(|n| tcp(2 * n)).collect(),
        ..rule()
    };
    let mut tables = PolicyTables::default();
    // Each of a tenant's costs 9,064 and is a list of its own VPC.
    for number in 1..=8 {
        tables.put_set(set(number, vec![ports(9000)])).unwrap();
    }
    let other = |number| PolicySet {
        vni: builders::vni(8),
        ..set(number, vec![ports(9000)])
    };
    tables.put_set(other(1)).unwrap();
    let full = |tables: &PolicyTables| tables.full().collect::<Vec<_>>();
    assert_eq!(full(&tables), [((VNI, id(8)), NoRoom::Share(NFT_POLICY_TABLE))]);
    assert!(tables.outside(VNI, id(8)).is_none());
    assert!(tables.outside(VNI, id(7)).is_some() && tables.outside(builders::vni(8), id(1)).is_some());
    tables.remove_set(VNI, id(1));
    tables.flush();
    assert!(full(&tables).is_empty(), "it has room now");
}

#[test]
fn a_set_that_is_a_flood_of_nested_blocks_denies_all() {
    let two = vec![tcp(1), tcp(3)];
    let wide = |_| PolicyRule {
        ports: two.clone(),
        ..of_block("0.0.0.0/0", &[])
    };
    let narrow = |n: u32| of_block(&format!("{}/32", std::net::Ipv4Addr::from_bits(n)), &[]);
    let mut tables = PolicyTables::default();
    tables
        .put_set(set(2, (0..4000).map(wide).chain((0..4000).map(narrow)).collect()))
        .unwrap();
    assert_eq!(tables.full().count(), 1);
}

#[test]
fn a_full_set_is_there_as_soon_as_there_is_room() {
    let capacity = Usage {
        grants: 16,
        ..Usage::CAPACITY
    };
    let (mut tables, mut maps) = (PolicyTables::new(capacity), Maps::default());
    tables.put_class(class(3, 1)).unwrap();
    tables.put_set(set(2, vec![of_group(1)])).unwrap();
    tables.put_set(set(3, vec![of_group(1)])).unwrap();
    tables.put_set(set(4, vec![of_group(1)])).unwrap();
    apply(&mut maps, &mut tables);
    let full = |tables: &PolicyTables| tables.full().map(|((_, id), _)| id.get()).collect::<Vec<_>>();
    assert_eq!(full(&tables), [3, 4], "three entries and one to deny are all");
    assert_eq!(grants(&maps, 3), [(PEER_OTHER, GRANT_DENIES)]);
    assert!(grants(&maps, 4).is_empty());
    let asked = |maps: &Maps, number| {
        maps.judge(of_vpc(VNI.get(), number), of_vpc(VNI.get(), 3), [0; 16], 0)
            .0
    };
    assert!(asked(&maps, 2) && !asked(&maps, 3) && !asked(&maps, 4));
    tables.remove_set(VNI, id(2));
    apply(&mut maps, &mut tables);
    assert_eq!(full(&tables), [4]);
    assert!(!asked(&maps, 2) && asked(&maps, 3) && !asked(&maps, 4));
    assert_eq!(grants(&maps, 4), [(PEER_OTHER, GRANT_DENIES)]);
    tables.remove_class(VNI, id(3));
    apply(&mut maps, &mut tables);
    assert!(full(&tables).is_empty(), "two entries each are all");
    let other_vpc = PolicySet {
        vni: builders::vni(8),
        ..set(4, vec![])
    };
    tables.put_set(other_vpc).unwrap();
    assert!(full(&tables).is_empty(), "another VPC has a share of its own");
}

#[test]
fn three_vpcs_leave_all_others_a_reserve() {
    // A quarter is 320 grants. It is the most of a VPC, and 32 reserves of up to 16 VPCs.
    let capacity = Usage {
        grants: 1280,
        ..Usage::CAPACITY
    };
    let mut tables = PolicyTables::new(capacity);
    // A set without rules takes two grants.
    for (vpc, sets) in [(1, 161), (2, 160), (3, 160), (4, 6), (5, 5)] {
        for number in 1..=sets {
            let row = PolicySet {
                vni: builders::vni(vpc),
                ..set(number, vec![])
            };
            tables.put_set(row).unwrap();
        }
    }
    let full = tables.full();
    let full: Vec<_> = full.map(|((vni, set), why)| (vni.get(), set, why)).collect();
    let share = NoRoom::Share(GRANTS);
    assert_eq!(full, [(1, id(161), share), (4, id(6), share)]);
}

#[test]
fn a_set_that_comes_to_deny_all_does_so_first() {
    let row = |block| set(2, vec![of_group(1), of_block(block, &[])]);
    let (mut tables, mut maps) = (PolicyTables::default(), Maps::default());
    tables.put_class(class(3, 1)).unwrap();
    tables.put_set(row("192.0.2.0/24")).unwrap();
    apply(&mut maps, &mut tables);
    let capacity = Usage {
        grants: 4,
        ..Usage::CAPACITY
    };
    let mut tables = PolicyTables::import(capacity, maps.entries());
    tables.put_class(class(3, 1)).unwrap();
    tables.put_set(row("198.51.100.0/24")).unwrap();
    assert_eq!(kinds(&tables.flush().0), ["other", "outside", "class", "block"]);
}

#[test]
fn rules_for_the_next_tier_behind_the_last_one_accept() {
    let pass = PolicyRule {
        tier: PolicyTier::Baseline,
        action: PolicyAction::Pass,
        anyone: true,
        ..rule()
    };
    let (mut tables, mut maps) = (PolicyTables::default(), Maps::default());
    let row = PolicySet {
        is_isolated: false,
        ..set(2, vec![pass])
    };
    tables.put_set(row).unwrap();
    apply(&mut maps, &mut tables);
    let judged = maps.judge(of_vpc(VNI.get(), 2), of_vpc(VNI.get(), 1), [0; 16], 0);
    assert_eq!(judged, (true, 0));
    assert_ne!(Decision::NONE.verdict(false), judged);
}

//! Tests with droplets that are played by their streams: what they are sent, and what their answers cause.

mod checks;
mod denials;
mod drops;
mod full;
mod judging;
mod paths;
mod policy;
mod reports;
mod rests;
mod serving;
mod subscriptions;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use kube::runtime::reflector::ObjectRef;
use thuban_api::Endpoint;
use thuban_api::identifiers::{MacAddr, Vni, mapped};
use thuban_proto::transit::{Attachment, Load, NackReason, Program, RoleLoad, operator_message, row};
use thuban_rows::builders::{VNI, network_id};
use thuban_rows::{Kind, Kinds};
use tokio::sync::mpsc::UnboundedReceiver;

use super::{Barrier, Hub, Missing, Outgoing, Report, Triggers, Waiter};
use crate::model::bandwidth::{Bandwidth, Limits};
use crate::model::rows::Key;
use crate::model::world::{self, EndpointName, Membership, Role, RoleKind};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 2);
const ADDRESS6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 2);
/// The addresses in the form that keys have.
const V4: IpAddr = IpAddr::V4(ADDRESS);
const V6: IpAddr = IpAddr::V6(ADDRESS6);

fn name() -> EndpointName {
    ("red".to_owned(), "web-1".to_owned())
}

/// Returns a VPC with 10.0.0.0/16 and nothing else.
fn vpc(vni: Vni) -> world::Vpc {
    world::Vpc {
        cidrs: vec!["10.0.0.0/16".into()],
        ..world::tests::vpc(vni.get())
    }
}

/// Makes a hub with three droplets: `a` divides, `b` bounces, `c` holds the endpoint.
fn hub() -> (Hub, UnboundedReceiver<ObjectRef<Endpoint>>) {
    let mut triggers = Triggers::default();
    let woken = triggers.endpoints.listen();
    let hub = Hub::new(3, triggers);
    hub.update(|world| {
        for (number, droplet) in ["a", "b", "c"].into_iter().enumerate() {
            world.set_droplet(droplet, Some(Ipv4Addr::new(172, 16, 0, number as u8)));
        }
        let cidrs = vec!["10.0.0.0/16".to_owned()];
        world.set_vpc("red", Some(vpc(VNI)));
        world.set_network(
            "web",
            Some(world::Network {
                vpc: "red".into(),
                id: network_id(1),
                cidrs,
                private: false,
                limits: Limits::default(),
            }),
        );
        world.set_role(
            RoleKind::Divider,
            "red-d0",
            Some(Role {
                parent: "red".into(),
                serves_on: Some("a".into()),
                placed_on: Some("a".into()),
                ..Role::default()
            }),
        );
        world.set_role(
            RoleKind::Bouncer,
            "web-b0",
            Some(Role {
                parent: "web".into(),
                serves_on: Some("b".into()),
                placed_on: Some("b".into()),
                ..Role::default()
            }),
        );
    });
    (hub, woken)
}

fn endpoint() -> world::Endpoint {
    world::Endpoint {
        network: "web".into(),
        droplet: "c".into(),
        previous: None,
        pod: world::Pod {
            namespace: "red".into(),
            name: "web".into(),
            uid: "u1".into(),
        },
        profile: None,
        asked: Bandwidth::default(),
        is_host: false,
        membership: Membership::Member(world::Address {
            address: ADDRESS,
            prefix_length: 24,
            gateway: Ipv4Addr::new(10, 0, 1, 1),
            mac: MacAddr::of(ADDRESS),
            address6: Some((ADDRESS6, 64)),
        }),
        ready: false,
    }
}

fn barrier() -> Barrier {
    Barrier::new(Waiter::Endpoint(name()))
}

/// Returns what is missing of the rows; the droplet `c` is never excused.
fn missing_of(hub: &Hub, rows: &[(String, Key)]) -> Missing {
    let barrier = barrier().has(rows.to_vec()).never_excuses(Some("c"));
    hub.missing(&barrier)
}

/// Returns the droplets that may have rows of the addresses; these witnesses must say so themselves.
fn holding(hub: &Hub, addresses: &[IpAddr], witnesses: &[&str]) -> Vec<String> {
    let witnesses = witnesses.iter().map(ToString::to_string);
    let barrier = barrier().lacks_addresses(VNI, addresses).asks(witnesses);
    hub.missing(&barrier).unacked
}

/// Returns all programs that wait on a stream.
fn received(stream: &mut UnboundedReceiver<Outgoing>) -> Vec<Program> {
    let mut programs = Vec::new();
    while let Ok(message) = stream.try_recv() {
        let Some(operator_message::Message::Program(program)) = message.unpack().message else {
            continue;
        };
        programs.push(program);
    }
    programs
}

/// Sends all programs that were held back.
fn serve(hub: &Hub) {
    while hub.serve_some() {}
}

fn attachment() -> Attachment {
    Attachment {
        container_id: "c1".into(),
        ifname: "eth0".into(),
        pod_uid: "u1".into(),
        vni: VNI.get(),
        address: mapped(ADDRESS).to_vec(),
        ..Attachment::default()
    }
}

/// Whether a pod besides this one has the first address, though nothing bears that out.
fn is_live(hub: &Hub, except: &str) -> bool {
    hub.is_live(VNI, V4, except, |_, _| None)
}

#[test]
fn stream_sends_a_snapshot_and_then_deltas_in_sequence() {
    let (hub, _woken) = hub();
    let (_, mut stream) = hub.open("c", &[], &[], Kinds::all());
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    hub.update(|world| world.set_endpoint(&name(), None));
    let programs = received(&mut stream);
    let sequences: Vec<_> = programs
        .iter()
        .map(|program| (program.sequence, program.snapshot, program.epoch))
        .collect();
    assert_eq!(sequences, [(1, true, 3), (2, false, 3), (3, false, 3)]);
    assert_eq!(programs[0].upserts.len(), 2, "the two other droplets");
    let is_local = |row: &thuban_proto::transit::Row| matches!(row.row, Some(row::Row::Local(_)));
    assert!(programs[1].upserts.iter().any(is_local));
    assert_eq!(
        programs[2].deletes.len(),
        3,
        "the endpoint's, its network's and its VPC's row"
    );
}

#[test]
fn endpoint_waits_for_acks_of_its_droplet_and_bouncer() {
    let (hub, mut woken) = hub();
    let streams = ["a", "b", "c"].map(|droplet| (droplet, hub.open(droplet, &[], &[], Kinds::all())));
    for (droplet, (id, _)) in &streams {
        assert!(hub.ack(droplet, *id, 1));
    }
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    let rows = hub.read(|world| world.endpoint_rows(&name()));
    let missing = || missing_of(&hub, &rows).unacked;
    assert_eq!(missing(), ["b", "c"]);
    assert!(hub.ack("b", streams[1].1.0, 2));
    assert!(woken.try_recv().is_ok(), "the ack wakes who waits");
    assert_eq!(missing(), ["c"]);
    assert!(hub.ack("c", streams[2].1.0, 2));
    assert_eq!(missing(), [""; 0]);
}

#[test]
fn an_address_is_held_until_everybody_acked_its_removal() {
    let (hub, _woken) = hub();
    let mut ids = Vec::new();
    for droplet in ["a", "b", "c"] {
        let (id, _) = hub.open(droplet, &[], &[], Kinds::all());
        assert!(hub.ack(droplet, id, 1));
        ids.push(id);
    }
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    assert!(
        hub.subscribe("a", VNI, V4, true),
        "a divider's droplet takes part in the VPC"
    );
    for (droplet, id, sequence) in [("a", ids[0], 2), ("b", ids[1], 2), ("c", ids[2], 2)] {
        assert!(hub.ack(droplet, id, sequence), "{droplet}");
    }
    hub.update(|world| world.set_endpoint(&name(), None));
    let holding = || holding(&hub, &[V4, V6], &["b", "c"]);
    assert_eq!(holding(), ["a", "b", "c"], "subscriber, bouncer and home");
    assert!(hub.ack("a", ids[0], 3) && hub.ack("c", ids[2], 3));
    assert_eq!(holding(), ["b"]);
    hub.close("b", ids[1]);
    assert_eq!(holding(), ["b"], "a bouncer that can't be asked still counts");
    hub.update(|world| world.set_droplet("b", None));
    assert_eq!(
        holding(),
        ["a", "c"],
        "one that is no droplet any more, until nobody knows it"
    );
    assert!(hub.ack("a", ids[0], 4) && hub.ack("c", ids[2], 4));
    assert_eq!(holding(), [""; 0]);
}

#[test]
fn an_ipv6_address_is_held_by_its_subscribers_alone_too() {
    let (hub, _woken) = hub();
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    let mut streams = Vec::new();
    for droplet in ["a", "b", "c"] {
        let (id, stream) = hub.open(droplet, &[], &[], Kinds::all());
        assert!(hub.ack(droplet, id, 1));
        streams.push((id, stream));
    }
    assert!(hub.subscribe("a", VNI, V6, true));
    let rows = received(&mut streams[0].1).remove(1).upserts;
    let Some(row::Row::Direct(direct)) = rows[0].row.clone() else {
        panic!("{rows:?}")
    };
    assert_eq!(direct.address, ADDRESS6.octets());
    assert!(hub.ack("a", streams[0].0, 2));
    hub.update(|world| world.set_endpoint(&name(), None));
    for (droplet, number) in [("b", 1), ("c", 2)] {
        assert!(hub.ack(droplet, streams[number].0, 2));
    }
    let holding = |addresses: &[IpAddr]| holding(&hub, addresses, &["b", "c"]);
    assert_eq!(holding(&[V4, V6]), ["a"], "neither address may be given out");
    assert!(hub.ack("a", streams[0].0, 3));
    assert_eq!(holding(&[V4, V6]), [""; 0]);
}

#[test]
fn a_newer_stream_replaces_the_older_and_its_acks_count_alone() {
    let (hub, _woken) = hub();
    let (first, mut old) = hub.open("c", &[], &[], Kinds::all());
    let (second, _new) = hub.open("c", &[], &[], Kinds::all());
    assert_eq!(received(&mut old).len(), 1);
    assert!(old.is_closed() || old.try_recv().is_err());
    assert!(!hub.ack("c", first, 1) && hub.ack("c", second, 1));
    assert!(!hub.ack("c", second, 9), "what was never sent can't be acked");
}

#[test]
fn address_nacked_as_in_use_is_flagged_for_replacement() {
    let (hub, mut woken) = hub();
    let (id, _stream) = hub.open("c", &[], &[], Kinds::all());
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    hub.nack("c", id, 2, &Key::Local(VNI, V4), NackReason::AddressInUseOnNode);
    assert!(woken.try_recv().is_ok());
    assert!(hub.is_in_use(&name()));
    hub.forget_in_use(&name());
    assert!(!hub.is_in_use(&name()));
    assert!(hub.ack("c", id, 2));
    let rows = hub.read(|world| world.endpoint_rows(&name()));
    assert!(missing_of(&hub, &rows).unacked.contains(&"c".to_owned()));
}

#[test]
fn a_pod_may_be_attached_until_its_droplet_says_otherwise() {
    let (hub, mut woken) = hub();
    assert!(hub.may_be_attached("u1", "c"), "the droplet can't be asked yet");
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    let (_, _stream) = hub.open("c", &[attachment()], &[], Kinds::all());
    assert!(hub.may_be_attached("u1", "c"));
    while woken.try_recv().is_ok() {}
    hub.attach("c", &attachment(), true);
    assert!(!hub.may_be_attached("u1", "c"));
    assert!(
        woken.try_recv().is_ok(),
        "the end of the attachment wakes the endpoint"
    );
    assert!(
        !hub.may_be_attached("u1", "gone"),
        "a node that is no droplet holds nothing"
    );
}

#[tokio::test(start_paused = true)]
async fn new_leader_knows_attachments_after_all_dial_or_time_out() {
    let (hub, _woken) = hub();
    hub.open("a", &[attachment()], &[], Kinds::all());
    hub.open("b", &[], &[], Kinds::all());
    assert!(!hub.is_whole());
    let uid = &attachment().pod_uid;
    assert_eq!(hub.attached_addresses(uid, "a", VNI), [V4]);
    assert!(is_live(&hub, "another") && !is_live(&hub, uid));
    hub.open("c", &[], &[], Kinds::all());
    assert!(hub.is_whole());
    let (hub, _woken) = self::hub();
    tokio::time::advance(Duration::from_secs(10)).await;
    assert!(hub.is_whole(), "one that is down for long is not waited for");
}

#[test]
fn load_is_what_droplets_said_last_and_goes_with_their_stream() {
    let (hub, _woken) = hub();
    let (id, _stream) = hub.open("b", &[], &[], Kinds::all());
    let load = |network, packets_per_second| Load {
        roles: vec![RoleLoad {
            vni: VNI.get(),
            network,
            packets_per_second,
        }],
    };
    let both = || {
        let bouncers = hub.load(VNI, Some(network_id(1)));
        (bouncers, hub.load(VNI, None))
    };
    hub.report("b", &load(1, 500));
    hub.report("a", &load(0, 20));
    assert_eq!(both(), (500, 20));
    hub.report("b", &load(1, 7));
    assert_eq!(both(), (7, 20));
    for (network, vni) in [(0, VNI.get()), (2, VNI.get()), (1, VNI.get() + 1)] {
        let mut made_up = load(network, 9);
        made_up.roles[0].vni = vni;
        hub.report("c", &made_up);
    }
    hub.report("a", &load(1, 9));
    assert_eq!(both(), (7, 0), "only of roles that it has");
    hub.close("b", id);
    assert_eq!(both(), (0, 0));
}

#[test]
fn a_stream_that_is_ended_takes_nothing_with_it() {
    let (hub, _woken) = hub();
    let (id, mut stream) = hub.open("c", &[attachment()], &[], Kinds::all());
    assert!(received(&mut stream)[0].snapshot && !stream.is_closed());
    hub.end_stream("c");
    assert!(stream.is_closed(), "the stream's server hears of it");
    hub.close("c", id);
    assert!(is_live(&hub, ""), "its attachments still count");
    let (_, mut next) = hub.open("c", &[attachment()], &[], Kinds::all());
    assert!(received(&mut next)[0].snapshot);
}

#[test]
fn what_a_droplet_said_goes_with_it() {
    let (hub, _woken) = hub();
    let (_, _stream) = hub.open("c", &[attachment()], &[], Kinds::all());
    assert!(is_live(&hub, ""));
    hub.forget("c");
    assert!(!is_live(&hub, ""), "its addresses are free");
}

#[tokio::test(start_paused = true)]
async fn programs_wait_until_every_attachment_has_its_endpoint() {
    let (hub, _woken) = hub();
    hub.update(|world| world.set_endpoint(&name(), None));
    hub.hold_back(Duration::from_secs(10));
    let (all, bound) = (|_: &str| true, |_: &Report| true);
    let (_, mut bouncer) = hub.open("b", &[], &[], Kinds::all());
    let (_, _divider) = hub.open("a", &[], &[], Kinds::all());
    assert!(!hub.is_adopted(all, bound), "one has not dialled");
    assert!(
        hub.is_adopted(|droplet| droplet != "c", bound),
        "nothing is expected of it"
    );
    let (id, _stream) = hub.open("c", &[attachment()], &[], Kinds::all());
    assert!(hub.is_whole(), "addresses may be given out");
    assert!(
        hub.is_adopted(all, |report| report.droplet != "c"),
        "a pod that is not bound there gets none"
    );
    assert!(!hub.is_adopted(all, bound), "an attachment has no Endpoint");
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    assert!(hub.is_adopted(all, bound) && received(&mut bouncer).is_empty());
    hub.close("c", id);
    assert!(!hub.is_adopted(all, bound), "one went away again");
    tokio::time::advance(Duration::from_secs(3)).await;
    assert!(hub.is_adopted(all, bound), "it is not waited for for ever");
    serve(&hub);
    let programs = received(&mut bouncer);
    assert!(programs.len() == 1 && programs[0].snapshot && !programs[0].upserts.is_empty());
    assert!(hub.is_connected("b") && !hub.is_connected("c"));
}

#[tokio::test(start_paused = true)]
async fn the_time_to_dial_begins_when_all_objects_are_listed() {
    let (hub, _woken) = hub();
    hub.begin_filling();
    hub.hold_back(Duration::from_secs(10));
    tokio::time::advance(Duration::from_secs(40)).await;
    hub.end_filling();
    let is_adopted = || hub.is_adopted(|_| true, |_| true);
    assert!(!is_adopted() && !hub.is_whole(), "nobody could dial yet");
    tokio::time::advance(Duration::from_secs(3)).await;
    assert!(is_adopted() && !hub.is_whole(), "who was to dial has not");
    tokio::time::advance(Duration::from_secs(7)).await;
    assert!(hub.is_whole());
}

/// Returns all kinds but one.
fn without(kind: Kind) -> Kinds {
    Kind::ALL.iter().copied().filter(|known| *known != kind).collect()
}

#[test]
fn a_row_of_an_unknown_kind_is_not_sent_and_counts_as_missing() {
    let (hub, mut woken) = hub();
    let (a, _divider) = hub.open("a", &[], &[], Kinds::all());
    let (b, mut bouncer) = hub.open("b", &[], &[], without(Kind::Bouncer));
    let (c, _home) = hub.open("c", &[], &[], Kinds::all());
    for (droplet, id) in [("a", a), ("b", b), ("c", c)] {
        assert!(hub.ack(droplet, id, 1));
    }
    received(&mut bouncer);
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    assert!(received(&mut bouncer).is_empty(), "there is nothing for it");
    assert!(hub.ack("c", c, 2));
    let rows = hub.read(|world| world.endpoint_rows(&name()));
    let missing = || missing_of(&hub, &rows);
    let outdated = vec![("b".to_owned(), Kind::Bouncer)];
    assert_eq!((missing().unacked, missing().outdated), (Vec::new(), outdated));
    // Other rows reach the droplet, and their acks say nothing about the missing row.
    hub.update(|world| world.set_droplet("d", Some(Ipv4Addr::new(172, 16, 0, 9))));
    assert_eq!(received(&mut bouncer).len(), 1);
    assert!(hub.ack("b", b, 2));
    assert_eq!(missing().reason(), "WaitsForUpgrade");
    // It holds no row that must be removed.
    assert_eq!(holding(&hub, &[V4], &[]), ["c"]);
    while woken.try_recv().is_ok() {}
    // Its transitd has another version now.
    let (b, mut bouncer) = hub.open("b", &[], &[], Kinds::all());
    let is_bouncer = |row: &thuban_proto::transit::Row| matches!(row.row, Some(row::Row::Bouncer(_)));
    assert!(received(&mut bouncer)[0].upserts.iter().any(is_bouncer));
    assert_eq!(missing().unacked, ["b"]);
    assert!(hub.ack("b", b, 1));
    assert!(woken.try_recv().is_ok() && missing().is_empty());
}

#[test]
fn a_snapshot_has_no_rows_that_its_droplet_does_not_understand() {
    let (hub, _woken) = hub();
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    let kinds = |mut stream: UnboundedReceiver<Outgoing>| {
        let snapshot = received(&mut stream).remove(0);
        let rows = snapshot.upserts.into_iter();
        let kinds = rows.map(|row| thuban_rows::Row::try_from(row).unwrap().kind());
        kinds.collect::<BTreeSet<_>>()
    };
    let whole = kinds(hub.open("b", &[], &[], Kinds::read(&[])).1);
    assert!(whole.contains(&Kind::Bouncer) && whole.contains(&Kind::Network));
    let less = kinds(hub.open("b", &[], &[], without(Kind::Bouncer)).1);
    assert!(!less.contains(&Kind::Bouncer) && less.len() == whole.len() - 1);
}

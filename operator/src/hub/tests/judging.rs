//! Tests of which droplets are waited for and which are excused: droplets without a stream, and droplets that ack late,
//! never ack, or dial without end.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use thuban_rows::builders::{VNI, vni};
use thuban_rows::{Kinds, Row};

use super::rests::service;
use super::{V4, V6, barrier, endpoint, holding, hub, missing_of, name};
use crate::hub::{Health, Hub};
use crate::model::rows::Key;
use crate::model::world::{EndpointName, Membership, RoleKind};

#[tokio::test(start_paused = true)]
async fn a_bouncer_without_stream_is_excused_when_it_may_be_judged() {
    let (hub, _woken) = hub();
    let open = |droplet: &str| {
        let (id, _) = hub.open(droplet, &[], &[], Kinds::all());
        assert!(hub.ack(droplet, id, 1));
        id
    };
    let (a, b, c) = (open("a"), open("b"), open("c"));
    assert_eq!(hub.health("b"), Health::Connected);
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    assert!(hub.ack("c", c, 2));
    hub.close("b", b);
    let rows = hub.read(|world| world.endpoint_rows(&name()));
    let missing = || missing_of(&hub, &rows).unacked;
    tokio::time::advance(Duration::from_secs(30)).await;
    assert_eq!(missing(), ["b"], "too early after this leader began");
    assert!(matches!(hub.health("b"), Health::Missing(_)));
    tokio::time::advance(Duration::from_secs(31)).await;
    assert_eq!((missing(), hub.health("b")), (Vec::new(), Health::Suspect));
    hub.close("a", a);
    tokio::time::advance(Duration::from_secs(11)).await;
    assert_eq!(missing(), ["b"], "two of three are missing: nobody is judged");
    hub.close("c", c);
    assert_eq!(missing(), ["b", "c"]);
    open("a");
    open("b");
    tokio::time::advance(Duration::from_secs(11)).await;
    assert_eq!(hub.health("c"), Health::Suspect);
    assert_eq!(missing(), ["c"], "its own droplet is never excused");
}

#[tokio::test(start_paused = true)]
async fn a_bouncer_on_a_node_that_is_gone_is_excused_at_once() {
    let (hub, _woken) = hub();
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    let (id, _stream) = hub.open("c", &[], &[], Kinds::all());
    assert!(hub.ack("c", id, 1));
    let rows = hub.read(|world| world.endpoint_rows(&name()));
    let missing = || missing_of(&hub, &rows).unacked;
    assert_eq!(missing(), ["b"]);
    hub.update(|world| world.set_droplet("b", None));
    assert_eq!(missing(), ["c"], "its network has lost its bouncer");
    assert!(hub.ack("c", id, 2));
    assert_eq!(missing(), [""; 0]);
    hub.update(|world| world.set_droplet("c", None));
    hub.close("c", id);
    assert_eq!(missing(), ["c"], "its own droplet is never excused");
}

#[test]
fn a_vni_is_held_by_droplets_that_this_leader_has_not_heard_of() {
    let (hub, _woken) = hub();
    let holding = |others: &[&str]| {
        let others = others.iter().map(ToString::to_string).collect();
        hub.missing(&barrier().lacks_number(vni(8), others)).unacked
    };
    assert_eq!(holding(&[]), ["a", "b", "c"], "none has a stream");
    for droplet in ["a", "b", "c"] {
        let (id, _) = hub.open(droplet, &[], &[], Kinds::all());
        hub.ack(droplet, id, 1);
    }
    assert!(holding(&["a"]).is_empty());
    assert_eq!(holding(&["a", "new"]), ["new"]);
}

#[tokio::test(start_paused = true)]
async fn a_droplet_that_acks_nothing_holds_up_nobody_but_numbers() {
    let (hub, _woken) = hub();
    let (a, _divider) = hub.open("a", &[], &[], Kinds::all());
    let (b, _bouncer) = hub.open("b", &[], &[], Kinds::all());
    hub.ack("a", a, 1);
    hub.ack("b", b, 1);
    let (c, _stream) = hub.open("c", &[], &[], Kinds::all());
    let numbers = || hub.missing(&barrier().lacks_number(vni(8), Vec::new())).unacked;
    tokio::time::advance(Duration::from_secs(59)).await;
    assert!(!hub.is_silent("c", c) && holding(&hub, &[V4], &[]) == ["c"]);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(hub.is_silent("c", c) && !hub.is_silent("a", a));
    assert_eq!(hub.health("c"), Health::Suspect, "its stream is open");
    hub.close("c", c);
    let (again, _stream) = hub.open("c", &[], &[], Kinds::all());
    assert_eq!(hub.health("c"), Health::Suspect, "until it acks");
    assert!(holding(&hub, &[V4], &[]).is_empty());
    assert_eq!(
        holding(&hub, &[V4], &["c"]),
        ["c"],
        "but where the endpoint lived it is asked"
    );
    assert_eq!(numbers(), ["c"], "its tables stay as they were");
    let vpc = barrier().lacks_number(vni(8), Vec::new()).keeps_number();
    assert!(hub.missing(&vpc).is_empty(), "a VPC goes, its number stays");
    hub.ack("c", again, 1);
    assert_eq!(hub.health("c"), Health::Connected);
    tokio::time::advance(Duration::from_secs(70)).await;
    assert!(!hub.is_silent("c", again), "there is nothing to ack");
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    tokio::time::advance(Duration::from_mins(1)).await;
    assert!(hub.is_silent("c", again) && hub.is_silent("b", b) && !hub.is_silent("a", a));
}

/// Returns the streams of droplets that have acked their snapshots, and about which everything may be judged.
async fn judged(hub: &Hub) -> [u64; 3] {
    let ids = ["a", "b", "c"].map(|droplet| {
        let (id, _) = hub.open(droplet, &[], &[], Kinds::all());
        assert!(hub.ack(droplet, id, 1));
        id
    });
    tokio::time::advance(Duration::from_mins(1)).await;
    ids
}

#[tokio::test(start_paused = true)]
async fn a_droplet_that_acks_a_row_in_59_seconds_is_suspect() {
    let (hub, _woken) = hub();
    let [_, b, c] = judged(&hub).await;
    let mut others: Vec<EndpointName> = Vec::new();
    for number in 3..8 {
        let name = ("red".to_owned(), format!("web-{number}"));
        let mut other = endpoint();
        if let Membership::Member(member) = &mut other.membership {
            member.address = Ipv4Addr::new(10, 0, 1, number);
            member.address6 = None;
        }
        hub.update(|world| world.set_endpoint(&name, Some(other)));
        others.push(name);
    }
    assert!(hub.ack("c", c, 6));
    let rows = hub.read(|world| world.endpoint_rows(&others[4]));
    let missing = || missing_of(&hub, &rows).unacked;
    tokio::time::advance(Duration::from_secs(59)).await;
    assert!(hub.ack("b", b, 2) && missing() == ["b"]);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(missing().is_empty() && hub.is_silent("b", b));
    assert_eq!(hub.health("b"), Health::Suspect, "its stream is open");
    assert!(hub.ack("b", b, 6));
    assert_eq!(hub.health("b"), Health::Connected);
}

#[tokio::test(start_paused = true)]
async fn a_droplet_that_dials_without_end_holds_up_nobody() {
    let (hub, _woken) = hub();
    let [_, mut b, c] = judged(&hub).await;
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    assert!(hub.ack("c", c, 2));
    let rows = hub.read(|world| world.endpoint_rows(&name()));
    for _ in 0..5 {
        hub.close("b", b);
        tokio::time::advance(Duration::from_secs(4)).await;
        b = hub.open("b", &[], &[], Kinds::all()).0;
        assert!(missing_of(&hub, &rows).unacked.contains(&"b".to_owned()));
        assert!(holding(&hub, &[V4], &[]).contains(&"b".to_owned()));
        tokio::time::advance(Duration::from_secs(8)).await;
    }
    assert_eq!(hub.health("b"), Health::Suspect);
    assert!(!hub.is_silent("b", b), "it may still ack its snapshot");
    assert!(!missing_of(&hub, &rows).unacked.contains(&"b".to_owned()));
    assert!(!holding(&hub, &[V4], &[]).contains(&"b".to_owned()));
    assert!(hub.ack("b", b, 1));
    assert_eq!(hub.health("b"), Health::Connected);
}

/// It acks its program at the last moment, and dials again in that moment: nobody finds that it has acked all.
#[tokio::test(start_paused = true)]
async fn a_droplet_that_acks_only_to_dial_again_holds_up_nobody() {
    let (hub, _woken) = hub();
    let [_, _, c] = judged(&hub).await;
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    assert!(hub.ack("c", c, 2));
    let rows = hub.read(|world| world.endpoint_rows(&name()));
    let numbers = || hub.missing(&barrier().lacks_number(vni(8), Vec::new()).keeps_number());
    for _ in 0..3 {
        let (b, _stream) = hub.open("b", &[], &[], Kinds::all());
        tokio::time::advance(Duration::from_secs(19)).await;
        assert!(holding(&hub, &[V6], &[]).contains(&"b".to_owned()), "for a while");
        assert_eq!(numbers().unacked, ["b"]);
        assert!(hub.ack("b", b, 1));
    }
    let _again = hub.open("b", &[], &[], Kinds::all());
    assert_eq!(hub.health("b"), Health::Connected);
    tokio::time::advance(Duration::from_secs(3)).await;
    assert_eq!(hub.health("b"), Health::Suspect, "until it acks");
    assert!(!holding(&hub, &[V6], &[]).contains(&"b".to_owned()));
    assert!(!missing_of(&hub, &rows).unacked.contains(&"b".to_owned()));
    assert!(numbers().is_empty(), "a VPC goes");
}

/// Returns the kinds of roles that don't serve the endpoint, by the rows of each kind.
fn served(hub: &Hub) -> Vec<String> {
    let rows = |kind| hub.read(|world| world.serving_rows(kind, &name()));
    let barrier = barrier()
        .served_by("bouncer".into(), rows(RoleKind::Bouncer))
        .served_by("divider".into(), rows(RoleKind::Divider));
    hub.missing(&barrier).unserved
}

#[tokio::test(start_paused = true)]
async fn a_suspect_is_excused_but_serves_nobody() {
    let (hub, mut woken) = hub();
    let [a, b, _] = judged(&hub).await;
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    assert_eq!(served(&hub), ["bouncer"], "it has not acked the endpoint's row");
    while woken.try_recv().is_ok() {}
    assert!(hub.ack("b", b, 2));
    assert!(woken.try_recv().is_ok(), "the ack wakes who waits");
    assert_eq!(served(&hub), [""; 0]);
    hub.close("b", b);
    tokio::time::advance(Duration::from_secs(11)).await;
    let rows = hub.read(|world| world.endpoint_rows(&name()));
    assert_eq!(missing_of(&hub, &rows).unacked, ["c"], "a suspect is excused");
    assert_eq!(served(&hub), ["bouncer"]);
    let (b, _stream) = hub.open("b", &[], &[], Kinds::all());
    assert_eq!(served(&hub), ["bouncer"], "it has acked nothing yet");
    assert!(hub.ack("b", b, 1));
    assert_eq!(served(&hub), [""; 0]);
    hub.close("a", a);
    assert_eq!(served(&hub), ["divider"]);
}

/// Another machine comes under the name of a bouncer's: no droplet sends to it, and no droplet is told of it, before
/// its address is in force.
#[test]
fn a_droplet_that_is_not_accepted_yet_is_not_waited_for() {
    let (hub, _woken) = hub();
    hub.update(|world| world.set_droplet("b", None));
    let (a, _divider) = hub.open("a", &[], &[], Kinds::all());
    let (b, _bouncer) = hub.open("b", &[], &[], Kinds::all());
    let (c, _home) = hub.open("c", &[], &[], Kinds::all());
    assert!(hub.ack("a", a, 1) && hub.ack("c", c, 1));
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    assert!(hub.ack("c", c, 2));
    let rows = || hub.read(|world| world.endpoint_rows(&name()));
    assert!(rows().iter().any(|(droplet, _)| droplet == "b"), "it has rows");
    assert!(missing_of(&hub, &rows()).is_empty());
    assert_eq!(served(&hub), ["bouncer"], "but it is no bouncer that lives");
    hub.update(|world| world.set_droplet("b", Some(Ipv4Addr::new(172, 16, 0, 7))));
    assert!(missing_of(&hub, &rows()).unacked.contains(&"b".to_owned()));
    for (droplet, id, sequence) in [("a", a, 2), ("b", b, 3), ("c", c, 3)] {
        assert!(hub.ack(droplet, id, sequence), "{droplet}");
    }
    assert!(missing_of(&hub, &rows()).is_empty() && served(&hub).is_empty());
}

#[tokio::test(start_paused = true)]
async fn fronts_lead_past_suspect_droplets_until_they_are_back() {
    let (hub, _woken) = hub();
    let [a, b, _] = judged(&hub).await;
    let front: IpAddr = Ipv4Addr::new(203, 0, 113, 1).into();
    let mut service = service("web", 1, None);
    service.fronts = vec![(front, service.tables[0].1.clone())];
    hub.update(|world| world.set_service(&("ns".to_owned(), "s".to_owned()), Some(service)));
    let resting = || {
        hub.look_for_suspects();
        let row = hub.read(|world| world.row("a", &Key::Front(VNI, front)));
        match Row::try_from(row.unwrap().unpack()).unwrap() {
            Row::Front(front) => front.ports[0].resting.len(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(resting(), 0);
    hub.close("b", b);
    tokio::time::advance(Duration::from_secs(9)).await;
    assert_eq!(resting(), 0, "transitd starts anew, perhaps");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(resting(), 1);
    let (b, _stream) = hub.open("b", &[], &[], Kinds::all());
    assert!(hub.ack("b", b, 1));
    tokio::time::advance(Duration::from_secs(29)).await;
    assert_eq!(resting(), 1, "its stream may end again");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(resting(), 0);
    hub.close("b", b);
    hub.close("a", a);
    tokio::time::advance(Duration::from_secs(20)).await;
    assert_eq!(resting(), 0, "most are missing: the fault may be here");
}

//! A node that has addresses of L2 takes over many more, at an API server that is slow.

use cidrd::client::Grant;
use k8s_openapi::api::coordination::v1::Lease as NodeLease;
use serde_json::json;
use thuban_api::routes::{Announced, Serving};

use super::*;
use crate::routes::l2::NAMESPACE;
use crate::routes::played::{self, Fault, Known, Played, granted};

/// How many Vips node-a has, and how many there are. The others are those of node-b, which is silent.
const OWN: u16 = 20;
const ALL: u16 = 320;
/// After that time a node gives a request up.
const PATIENCE: Duration = Duration::from_secs(1);

fn uid(number: u16) -> String {
    format!("vip-{number}")
}

fn address(number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    IpAddr::from([198, 51, high, low])
}

fn vip(number: u16) -> Vip {
    let node = if number < OWN { "node-a" } else { "node-b" };
    let vip = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
        "metadata": {"name": uid(number), "namespace": "red", "uid": uid(number), "resourceVersion": "1"},
        "spec": {"service": uid(number), "ipFamilies": ["IPv4"]},
        "status": {"addresses": [address(number)], "announce": "L2", "announcedBy": [node],
            "announcers": [{"node": node, "sequence": 1}], "conditions": [{"type": "Accepted", "status": "True",
            "reason": "Valid", "message": "", "lastTransitionTime": ""}]}});
    serde_json::from_value(vip).unwrap()
}

/// Returns the Lease of a node whose request 1 was answered.
fn node_lease(node: &str, expired: u64) -> NodeLease {
    let lease = json!({"metadata": {"name": node, "namespace": NAMESPACE, "resourceVersion": "1",
            "annotations": {"thuban.dev/answered-request": "1", "thuban.dev/expired-request": expired.to_string()}},
        "spec": {"leaseDurationSeconds": 2}});
    serde_json::from_value(lease).unwrap()
}

/// Returns what cidrd leased to a Vip.
fn grant(number: u16) -> Grant {
    granted(uid(number), "office", address(number))
}

/// Returns the part of an lbaasd that nodes ask. Its watches hear nothing any more.
fn speakers(played: &Arc<Played>) -> Speakers {
    let vips: Vec<Vip> = (0..ALL).map(vip).collect();
    let known = Known {
        vips: &vips,
        nodes: &["node-a", "node-b"],
        node_leases: &[node_lease("node-a", 0), node_lease("node-b", 1)],
        ..Known::default()
    };
    let speakers = played::speakers(played, known);
    for number in 0..ALL {
        speakers.leases.note(&uid(number), &[grant(number)]);
    }
    speakers
}

fn report(sequence: u64, held: &BTreeSet<u16>) -> Report {
    let announced = held.iter().map(|number| Announced {
        uid: uid(*number),
        address: address(*number),
    });
    let serving = |number: u16| Serving {
        address: address(number),
        service: format!("red/{}", uid(number)),
        on_link: true,
    };
    Report {
        sequence,
        announced: announced.collect(),
        serves: (0..ALL).map(serving).collect(),
        version: String::new(),
        without_password: Vec::new(),
    }
}

/// Returns the answer to node-a, which comes before the node gives the request up.
async fn ask(speakers: &Speakers, sequence: u64, held: &BTreeSet<u16>) -> Routes {
    let begun = Instant::now();
    let (answer, _) = speakers.answer("node-a", &report(sequence, held)).await;
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    assert_eq!(answer.renew_after_ms, Some(500));
    answer
}

/// Returns the Vips of an answer, with the seconds for which it counts.
fn given(answer: &Routes) -> BTreeMap<u16, Option<u64>> {
    let number = |route: &Route| route.uid.trim_start_matches("vip-").parse().unwrap();
    let routes = answer.routes.iter();
    routes
        .map(|route| (number(route), route.remaining_seconds))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn a_takeover_of_many_lets_nothing_lapse() {
    let played = Arc::new(Played::slow(Duration::from_millis(20)));
    let speakers = speakers(&played);
    let mut held: BTreeSet<u16> = (0..OWN).collect();
    let mut sequence = 1;
    while held.len() < usize::from(ALL) {
        sequence += 1;
        assert!(sequence < 12, "only {} after so many requests", held.len());
        let answer = ask(&speakers, sequence, &held).await;
        let given = given(&answer);
        for number in &held {
            assert_eq!(given.get(number), Some(&Some(2)), "{number} lapses");
        }
        let before = held.len();
        held = given.into_keys().collect();
        assert!(held.len() > before, "no progress");
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_not_written_takes_nothing_away() {
    for fault in [Fault::Error, Fault::Hang] {
        let played = Arc::new(Played::default());
        let speakers = speakers(&played);
        played.set_fault(fault);
        let held: BTreeSet<u16> = (0..OWN).collect();
        let answer = ask(&speakers, 2, &held).await;
        assert!(answer.version.is_empty(), "the answer is not whole");
        // A former answer counts, and nothing is new.
        let expected: BTreeMap<u16, Option<u64>> = held.iter().map(|number| (*number, None)).collect();
        assert_eq!(given(&answer), expected, "{fault:?}");
        played.set_fault(Fault::None);
        let again = given(&ask(&speakers, 3, &held).await);
        assert!(held.iter().all(|number| again[number] == Some(2)));
    }
}

#[test]
fn nodes_write_vips_in_orders_of_their_own() {
    let order = |node: &str| {
        let mut numbers: Vec<u16> = (0..ALL).collect();
        numbers.sort_by_key(|number| place(&uid(*number), node));
        numbers
    };
    assert_eq!(order("node-a"), order("node-a"));
    let (one, other) = (order("node-a"), order("node-b"));
    let equal = one.iter().zip(&other).filter(|(one, other)| one == other);
    assert!(equal.count() < usize::from(ALL) / 10);
}

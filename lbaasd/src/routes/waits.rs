//! For what an answer to a node waits, and for what it does not.

use cidrd::client::Grant;
use serde_json::json;

use super::played::{self, Known, Played, granted};
use super::*;

/// A Vip, by the last byte of its address.
fn uid(number: u8) -> String {
    format!("vip-{number}")
}

fn address(number: u8) -> IpAddr {
    IpAddr::from([203, 0, 113, number])
}

/// Returns a Vip that is announced by BGP. `announcers`: who was let announce it.
fn vip(number: u8, announcers: &[&str]) -> Vip {
    let announcer = |node: &&str| json!({"node": node, "sequence": 1});
    let announcers: Vec<_> = announcers.iter().map(announcer).collect();
    let vip = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
        "metadata": {"name": uid(number), "namespace": "red", "uid": uid(number), "resourceVersion": "1"},
        "spec": {"service": uid(number), "ipFamilies": ["IPv4"]},
        "status": {"addresses": [address(number)], "announcers": announcers, "conditions": [{"type": "Accepted",
            "status": "True", "reason": "Valid", "message": "", "lastTransitionTime": ""}]}});
    serde_json::from_value(vip).unwrap()
}

fn grant(number: u8) -> Grant {
    granted(uid(number), "public", address(number))
}

/// Returns the part of an lbaasd that nodes ask. It knows node-a, a router and these Vips, and of no lease yet.
fn speakers(played: &Arc<Played>, vips: &[Vip]) -> Speakers {
    let peer = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "BgpPeer", "metadata": {"name": "router"},
        "spec": {"address": "192.0.2.1", "asn": 64512, "localAsn": 64513}});
    let known = Known {
        vips,
        nodes: &["node-a"],
        peers: &[serde_json::from_value(peer).unwrap()],
        ..Known::default()
    };
    played::speakers(played, known)
}

/// Has node-a say that it serves these Vips and announces none. Returns the addresses that it gets, whether that is
/// all, and how long the answer took.
async fn ask(speakers: &Speakers, serves: &[u8]) -> (Vec<IpAddr>, bool, Duration) {
    ask_with(speakers, serves, &[]).await
}

/// Has it say the same, and that it announces these.
async fn ask_with(speakers: &Speakers, serves: &[u8], announces: &[u8]) -> (Vec<IpAddr>, bool, Duration) {
    let announced = |number: &u8| Announced {
        uid: uid(*number),
        address: address(*number),
    };
    let serving = |number: &u8| Serving {
        address: address(*number),
        service: format!("red/{}", uid(*number)),
        on_link: false,
    };
    let report = Report {
        sequence: 7,
        announced: announces.iter().map(announced).collect(),
        serves: serves.iter().map(serving).collect(),
        version: String::new(),
        without_password: Vec::new(),
    };
    let begun = Instant::now();
    let (answer, is_whole) = speakers.answer("node-a", &report).await;
    let addresses = answer.routes.iter().map(|route| route.address).collect();
    (addresses, is_whole, begun.elapsed())
}

#[tokio::test(start_paused = true)]
async fn a_new_route_does_not_wait_for_another_lease() {
    let speakers = speakers(&Arc::default(), &[vip(1, &[]), vip(2, &[])]);
    speakers.leases.note(&uid(1), &[grant(1)]);
    let (addresses, is_whole, time) = ask(&speakers, &[1, 2]).await;
    assert_eq!((addresses, is_whole), (vec![address(1)], false));
    assert!(time < Duration::from_millis(100), "{time:?}");
}

#[tokio::test(start_paused = true)]
async fn an_answer_goes_out_as_soon_as_a_lease_is_known() {
    let speakers = speakers(&Arc::default(), &[vip(1, &[])]);
    let learn = async {
        sleep(Duration::from_millis(300)).await;
        speakers.leases.note(&uid(1), &[grant(1)]);
    };
    let ((addresses, is_whole, time), ()) = join(ask(&speakers, &[1]), learn).await;
    assert_eq!((addresses, is_whole), (vec![address(1)], true));
    assert!(time < Duration::from_millis(400), "{time:?}");
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_lacks_everything_comes_after_a_pause() {
    let speakers = speakers(&Arc::default(), &[vip(1, &[])]);
    let (addresses, is_whole, time) = ask(&speakers, &[1]).await;
    assert_eq!((addresses, is_whole), (Vec::new(), false));
    assert!((PAUSE..PAUSE * 2).contains(&time), "{time:?}");
}

#[tokio::test(start_paused = true)]
async fn a_route_that_a_node_was_let_announce_is_no_news() {
    let speakers = speakers(&Arc::default(), &[vip(1, &["node-a"]), vip(2, &[])]);
    speakers.leases.note(&uid(1), &[grant(1)]);
    let (addresses, is_whole, time) = ask(&speakers, &[1, 2]).await;
    assert_eq!((addresses, is_whole), (vec![address(1)], false));
    assert!(time >= PAUSE, "{time:?}");
}

#[tokio::test(start_paused = true)]
async fn what_a_node_announces_is_written_before_new_routes() {
    let (new, announced): (Vec<u8>, Vec<u8>) = ((1..=60).collect(), (201..=208).collect());
    let all = [new, announced.clone()].concat();
    let vips: Vec<Vip> = all
        .iter()
        .map(|number| {
            let mut vip = vip(*number, &[]);
            if let Some(status) = &mut vip.status
                && announced.contains(number)
            {
                // This lbaasd is late: it knows what the node announces, and not that the node was let do so.
                status.announced_by = vec!["node-a".to_owned()];
            }
            vip
        })
        .collect();
    let speakers = speakers(&Arc::new(Played::slow(Duration::from_millis(500))), &vips);
    for number in &all {
        speakers.leases.note(&uid(*number), &[grant(*number)]);
    }
    let (addresses, _, _) = ask_with(&speakers, &all, &announced).await;
    assert!(addresses.len() < all.len(), "the API server is not slow");
    for number in announced {
        assert!(addresses.contains(&address(number)), "{number} is withdrawn");
    }
}

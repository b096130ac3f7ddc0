//! What droplets are asked about denied packets, and what of their reports counts.

use std::sync::Arc;

use serde_json::json;
use thuban_proto::transit::{Denial, Denials, PolicyKey};

use super::policy::{Droplet, ack_all, play, set};
use super::*;
use crate::model::denial_reports::Gathered;
use crate::model::policy::Profile;

const POLICY: &str = "red/db";
/// Where `db` is, which the policy selects, on `a`; and `web`, on `c`.
const DB: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 2);
const WEB: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 3);
/// An address that an endpoint of another VPC has.
const OTHERS: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 9);

/// Returns the sets in the questions to a droplet since the last call. Each question is of drops, too.
fn questions(droplet: &mut Droplet) -> Vec<Vec<PolicyKey>> {
    let mut questions = Vec::new();
    while let Ok(message) = droplet.stream.try_recv() {
        if let Some(operator_message::Message::ReportDenials(asked)) = message.unpack().message {
            assert!(asked.drops);
            questions.push(asked.sets);
        }
    }
    questions
}

/// Looks, and returns the sizes of all questions to `a`, `b` and `c`.
fn asked(hub: &Hub, droplets: &mut BTreeMap<&'static str, Droplet>) -> [Vec<usize>; 3] {
    hub.look_at_denials();
    ["a", "b", "c"].map(|name| {
        let questions = questions(droplets.get_mut(name).unwrap());
        questions.iter().map(Vec::len).collect()
    })
}

/// Makes the VPC `blue` with an endpoint on `b`, which the policy `blue/all` isolates.
fn set_blue(hub: &Hub) {
    hub.update(|world| {
        world.set_vpc("blue", Some(vpc(Vni::new(VNI.get() + 1).unwrap())));
        let network = world::Network {
            vpc: "blue".into(),
            id: network_id(2),
            cidrs: vec!["10.0.0.0/16".into()],
            private: false,
            limits: Limits::default(),
        };
        world.set_network("blue-web", Some(network));
        let mut other = endpoint();
        other.network = "blue-web".into();
        other.droplet = "b".into();
        other.profile = Some(Arc::new(Profile::default()));
        if let Membership::Member(address) = &mut other.membership {
            address.address = OTHERS;
            address.address6 = None;
        }
        world.set_endpoint(&("blue".to_owned(), "web".to_owned()), Some(other));
        let all = serde_json::from_value(json!({"podSelector": {}})).unwrap();
        world.set_network_policy("blue", "all", 0, Some(&all)).unwrap();
    });
}

fn report(denials: Vec<Denial>) -> Denials {
    Denials {
        denials,
        ..Denials::default()
    }
}

fn denial(key: PolicyKey, source: Ipv4Addr) -> Denial {
    Denial {
        vni: key.vni,
        set: key.id,
        rank: 9999,
        packets: 3,
        source: mapped(source).to_vec(),
        destination: mapped(DB).to_vec(),
        protocol: 17,
        port: 53,
        age_ms: 0,
    }
}

#[tokio::test(start_paused = true)]
async fn droplets_are_asked_while_a_policy_is_reported() {
    let (hub, mut droplets) = play(&Kinds::all());
    set(&hub);
    ack_all(&hub, &mut droplets);
    let none = || [const { Vec::<usize>::new() }; 3];
    let drops_alone = [vec![0], vec![0], vec![0]];
    assert_eq!(
        asked(&hub, &mut droplets),
        drops_alone,
        "every droplet is asked of drops"
    );
    assert_eq!(asked(&hub, &mut droplets), none());
    hub.set_reported(POLICY, true);
    assert_eq!(asked(&hub, &mut droplets), [vec![1], vec![], vec![1]]);
    assert_eq!(asked(&hub, &mut droplets), none(), "nothing is new");
    set_blue(&hub);
    ack_all(&hub, &mut droplets);
    hub.set_reported("blue/all", true);
    assert_eq!(
        asked(&hub, &mut droplets),
        [vec![], vec![1], vec![]],
        "the other VPC is the same"
    );
    let spec = json!({"podSelector": {"matchLabels": {"app": "web"}}});
    let spec = serde_json::from_value(spec).unwrap();
    hub.update(|world| world.set_network_policy("red", "web", 0, Some(&spec)).unwrap());
    ack_all(&hub, &mut droplets);
    hub.set_reported(POLICY, false);
    hub.set_reported("red/web", true);
    assert_eq!(
        asked(&hub, &mut droplets),
        [vec![1], vec![], vec![1]],
        "as many sets, but others"
    );
    hub.set_reported("red/web", false);
    hub.set_reported(POLICY, true);
    assert_eq!(asked(&hub, &mut droplets), [vec![1], vec![], vec![1]]);
    hub.set_reported("blue/all", false);
    assert_eq!(asked(&hub, &mut droplets), [vec![], vec![0], vec![]]);
    let (id, stream) = hub.open("a", &[], &[], Kinds::all());
    droplets.insert(
        "a",
        Droplet {
            id,
            stream,
            sequence: 1,
        },
    );
    assert_eq!(
        asked(&hub, &mut droplets),
        [vec![1], vec![], vec![]],
        "a new stream"
    );
    hub.set_reported(POLICY, false);
    assert_eq!(asked(&hub, &mut droplets), [vec![0], vec![], vec![0]]);
    assert_eq!(asked(&hub, &mut droplets), none());
}

#[tokio::test(start_paused = true)]
async fn a_droplet_is_heard_of_what_it_was_asked() {
    let (hub, mut droplets) = play(&Kinds::all());
    set(&hub);
    set_blue(&hub);
    ack_all(&hub, &mut droplets);
    hub.set_reported(POLICY, true);
    hub.set_reported("blue/all", true);
    hub.look_at_denials();
    assert!(!questions(droplets.get_mut("b").unwrap()).is_empty());
    let key = questions(droplets.get_mut("a").unwrap()).remove(0).remove(0);
    let take = || hub.take_denied(POLICY, || true);
    let say = |droplet: &str, denials: Vec<Denial>| hub.note_denials(droplet, &report(denials));

    say("b", vec![denial(key, WEB)]);
    let unknown = PolicyKey {
        id: key.id ^ 1,
        ..key
    };
    say("a", vec![denial(unknown, WEB)]);
    let short = Denial {
        source: vec![1, 2, 3],
        ..denial(key, WEB)
    };
    let empty = Denial {
        destination: vec![],
        ..denial(key, WEB)
    };
    say("a", vec![short, empty]);
    assert_eq!(take(), None);

    say("a", vec![denial(key, OTHERS), denial(key, WEB)]);
    let Gathered { packets, last_peers } = take().unwrap();
    assert_eq!((packets, last_peers.len()), (6, 2));
    for peer in last_peers {
        assert_eq!(peer.pod.as_deref(), Some("red/web"));
        assert_eq!((&*peer.protocol, peer.port), ("UDP", Some(53)));
        let is_known = peer.address == WEB.to_string();
        assert_eq!(
            peer.peer_pod.is_some(),
            is_known,
            "no name of another VPC: {peer:?}"
        );
    }

    tokio::time::advance(Duration::from_mins(1)).await;
    say("a", vec![denial(key, WEB); 2000]);
    assert_eq!(take().unwrap().packets, 3 * 1024, "a report has a bound");
}

/// Makes a policy that is reported, and returns the set of it that `a` was asked of.
fn ask_of(hub: &Hub, droplets: &mut BTreeMap<&'static str, Droplet>) -> PolicyKey {
    set(hub);
    ack_all(hub, droplets);
    hub.set_reported(POLICY, true);
    hub.look_at_denials();
    questions(droplets.get_mut("a").unwrap()).remove(0).remove(0)
}

#[tokio::test(start_paused = true)]
async fn a_droplet_that_reports_too_much_loses_the_rest() {
    let (hub, mut droplets) = play(&Kinds::all());
    let key = ask_of(&hub, &mut droplets);
    let say = |count| {
        let denials = vec![denial(key, WEB); count];
        hub.note_denials("a", &report(denials));
    };
    let told = async || {
        tokio::time::advance(Duration::from_mins(1)).await;
        hub.take_denied(POLICY, || true)
            .map(|gathered| gathered.packets / 3)
    };
    for _ in 0..10 {
        say(1024);
    }
    assert_eq!(told().await, Some(1024));
    say(1024);
    tokio::time::advance(Duration::from_secs(10)).await;
    say(1024);
    assert_eq!(told().await, Some(1024 + 340), "ten seconds later some count");
    for _ in 0..60 {
        say(17);
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    assert_eq!(told().await, Some(60 * 17), "short reports may come often");

    say(1024);
    let (id, stream) = hub.open("a", &[], &[], Kinds::all());
    let again = Droplet {
        id,
        stream,
        sequence: 1,
    };
    droplets.insert("a", again);
    say(1024);
    hub.look_at_denials();
    say(1024);
    assert_eq!(told().await, Some(1024), "a new stream gets no more");
}

#[tokio::test(start_paused = true)]
async fn a_false_report_is_bounded_in_its_numbers() {
    let (hub, mut droplets) = play(&Kinds::all());
    let key = ask_of(&hub, &mut droplets);
    let honest = denial(key, WEB);
    let far = Denial {
        packets: u64::MAX,
        age_ms: u64::MAX,
        port: 0x1_0000,
        ..honest.clone()
    };
    let unknown = Denial {
        protocol: 256 + 17,
        port: 99,
        ..honest.clone()
    };
    let old = Denial {
        age_ms: 1000,
        ..honest.clone()
    };
    let denials = vec![far.clone(), unknown, old, honest, far];
    hub.note_denials("a", &report(denials));
    let Gathered { packets, last_peers } = hub.take_denied(POLICY, || true).unwrap();
    assert_eq!(packets, 1 << 40);
    let ports: Vec<_> = last_peers.iter().map(|peer| peer.port).collect();
    assert_eq!(
        ports,
        [Some(53), None],
        "the honest one is the latest: {last_peers:?}"
    );
    assert!(last_peers[1].time.starts_with("20"), "{last_peers:?}");
}

#[tokio::test(start_paused = true)]
async fn each_policy_has_the_last_peers_of_a_long_report() {
    let (hub, mut droplets) = play(&Kinds::all());
    let spec = json!({"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress"]});
    let spec = serde_json::from_value(spec).unwrap();
    hub.update(|world| world.set_network_policy("red", "more", 0, Some(&spec)).unwrap());
    hub.set_reported("red/more", true);
    let key = ask_of(&hub, &mut droplets);
    let of = |number: u32| Denial {
        age_ms: 10_000 + u64::from(number % 100) * 1000,
        rank: 5000 + number % 7,
        ..denial(key, Ipv4Addr::from(0xc000_0200 + number % 100))
    };
    let denials = (0..1000).map(of).collect();
    hub.note_denials("a", &report(denials));
    for policy in [POLICY, "red/more"] {
        let Gathered { packets, last_peers } = hub.take_denied(policy, || true).unwrap();
        assert_eq!(packets, 3000);
        let addresses: Vec<_> = last_peers.iter().map(|peer| peer.address.as_str()).collect();
        let latest: Vec<_> = (0..10).map(|number| format!("192.0.2.{number}")).collect();
        assert_eq!(addresses, latest, "{policy}");
    }
}

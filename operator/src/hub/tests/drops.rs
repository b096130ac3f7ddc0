//! What of droplets' reports of dropped packets reaches pods.

use thuban_common::counters::Counter;
use thuban_proto::MAX_DROPS;
use thuban_proto::transit::{Denials, Dropped};

use super::policy::play;
use super::*;

/// Where `db` is, on `a`, and `web`, on `c`.
const DB: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 2);
const WEB: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 3);

fn dropped(address: Ipv4Addr) -> Dropped {
    Dropped {
        vni: VNI.get(),
        address: mapped(address).to_vec(),
        reason: Counter::OutsideVpc as u32,
        packets: 1,
    }
}

fn say(hub: &Hub, droplet: &str, drops: Vec<Dropped>) {
    let report = Denials {
        drops,
        ..Denials::default()
    };
    hub.note_denials(droplet, &report);
}

/// Returns what pods are told now: the droplet of each and the words.
fn told(hub: &Hub) -> Vec<(String, String)> {
    let told = hub.take_drops().into_iter().map(|(pod, drops)| {
        assert_eq!(pod, ("red".to_owned(), "web".to_owned()));
        let (_, words) = drops.words().unwrap();
        (drops.droplet, words)
    });
    told.collect()
}

#[tokio::test(start_paused = true)]
async fn a_droplet_is_heard_of_its_own_pods() {
    let (hub, _droplets) = play(&Kinds::all());
    say(&hub, "a", vec![dropped(DB)]);
    assert!(told(&hub).is_empty(), "nobody has asked");
    hub.look_at_denials();
    say(&hub, "c", vec![dropped(DB)]);
    say(&hub, "unknown", vec![dropped(DB)]);
    let wrong = [
        Dropped {
            vni: VNI.get() + 1,
            ..dropped(DB)
        },
        Dropped {
            address: vec![1, 2, 3],
            ..dropped(DB)
        },
        Dropped {
            reason: Counter::ArpIgnored as u32,
            ..dropped(DB)
        },
        Dropped {
            reason: 9999,
            ..dropped(DB)
        },
        dropped(WEB),
        dropped(Ipv4Addr::new(10, 0, 1, 77)),
    ];
    say(&hub, "a", wrong.to_vec());
    assert!(told(&hub).is_empty());
    say(&hub, "a", vec![dropped(DB), dropped(DB)]);
    let told = told(&hub);
    let [(droplet, words)] = &told[..] else {
        panic!("{told:?}")
    };
    assert_eq!(droplet, "a");
    assert!(words.starts_with("dropped 2 of the packets"), "{words}");
}

#[tokio::test(start_paused = true)]
async fn a_false_report_of_drops_is_bounded() {
    let (hub, _droplets) = play(&Kinds::all());
    hub.look_at_denials();
    for _ in 0..10 {
        say(&hub, "a", vec![dropped(DB); 1000]);
    }
    let words = told(&hub).remove(0).1;
    assert!(words.starts_with(&format!("dropped {MAX_DROPS} of")), "{words}");
    tokio::time::advance(Duration::from_mins(1)).await;
    let far = Dropped {
        packets: u64::MAX,
        ..dropped(DB)
    };
    say(&hub, "a", vec![far]);
    let words = told(&hub).remove(0).1;
    assert!(
        words.starts_with(&format!("dropped {} of", 1_u64 << 40)),
        "{words}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_new_stream_is_asked_of_drops_again() {
    let (hub, mut droplets) = play(&Kinds::all());
    hub.look_at_denials();
    let (_, stream) = hub.open("a", &[], &[], Kinds::all());
    droplets.get_mut("a").unwrap().stream = stream;
    say(&hub, "a", vec![dropped(DB)]);
    assert!(told(&hub).is_empty(), "not asked on this stream");
    hub.look_at_denials();
    say(&hub, "a", vec![dropped(DB)]);
    assert_eq!(told(&hub).len(), 1);
}

//! A bouncer's or divider's node that dies silently: the nodes that use it notice, and they do not suspect a node that
//! lives.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use thuban_proto::transit::{DropletRow, NetworkRow, VpcRow, row::Row};

use crate::flow::{Flow, datagrams};
use crate::rig::{NODE, Rig, base_rows, eventually, local};
use crate::wire::{Peer, Played};

/// The documented time is a second; a busy machine looks later.
const GENEROUS: u64 = 5000;
const LASTS: [u8; 2] = [2, 3];
/// A member of the network: a bounced flow goes to it.
const BOUNCED: &str = "10.0.1.99:7";
/// A member of the VPC: a divided flow goes to it.
const DIVIDED: &str = "10.0.2.99:7";

fn droplets() -> Vec<Vec<u8>> {
    LASTS.map(|last| vec![192, 0, 2, last]).to_vec()
}

/// Returns VPC 7 and its network, whose roles are on two other droplets.
fn rows() -> Vec<Row> {
    let droplet = |address| {
        Row::Droplet(DropletRow {
            address,
            ..DropletRow::default()
        })
    };
    let mut rows: Vec<Row> = droplets().into_iter().map(droplet).collect();
    rows.push(droplet(NODE.to_vec()));
    rows.push(Row::Vpc(VpcRow {
        vni: 7,
        cidrs: vec!["10.0.0.0/16".into()],
        dividers: droplets(),
        ..VpcRow::default()
    }));
    rows.push(Row::Network(NetworkRow {
        vni: 7,
        network: 0x0a00_0100,
        cidrs: vec!["10.0.1.0/24".into()],
        bouncers: droplets(),
        ..NetworkRow::default()
    }));
    rows.push(local(7, "p", 5));
    rows
}

/// A node with a pod, and two droplets that have all roles.
struct World {
    rig: Rig,
    played: Vec<Played>,
    died: Vec<Arc<AtomicBool>>,
    _peers: Vec<Peer>,
}

impl World {
    fn new(flags: &[&str]) -> Self {
        let mut rig = Rig::prepare(rows());
        rig.flags = flags.iter().map(ToString::to_string).collect();
        let peers: Vec<Peer> = LASTS.iter().map(|last| Peer::new(&rig, *last)).collect();
        let died: Vec<Arc<AtomicBool>> = LASTS.iter().map(|_| Arc::default()).collect();
        let played = peers.iter().zip(&died);
        let played = played.map(|(peer, died)| peer.play(Arc::clone(died))).collect();
        rig.start();
        rig.operator.wait_for_ack();
        rig.add_pod("p");
        Self {
            rig,
            played,
            died,
            _peers: peers,
        }
    }

    /// Cuts a droplet off from the underlay, or connects it again.
    fn cut(&self, which: usize, is_cut: bool) {
        self.died[which].store(is_cut, Ordering::Relaxed);
    }

    /// Returns the droplets that the tables have picked for each role, by the last number.
    fn picked(&self) -> Vec<Vec<u8>> {
        let tables = [("SUBNETS", "bouncers"), ("VPCS", "dividers")];
        let picked = tables.iter().map(|(table, field)| {
            let rows = self.rig.rows(table);
            let row = rows.iter().find(|row| {
                row["entry"][*field]
                    .as_array()
                    .is_some_and(|list| !list.is_empty())
            });
            let list = row.map_or(Vec::new(), |row| row["entry"][*field].as_array().unwrap().clone());
            let last = |text: &serde_json::Value| {
                text.as_str()
                    .unwrap()
                    .rsplit('.')
                    .next()
                    .unwrap()
                    .parse()
                    .unwrap()
            };
            list.iter().map(last).collect()
        });
        picked.collect()
    }

    fn has_answered(&self, times: u64) -> bool {
        let questions = |played: &Played| played.questions.load(Ordering::Relaxed);
        self.played.iter().all(|played| questions(played) >= times)
    }

    /// Sends a flow, which goes through one of two droplets. Returns how many of its datagrams were lost when that
    /// droplet died.
    fn flow_through_death(&mut self, to: &str) -> u64 {
        let pod = format!("{}-p", self.rig.name);
        let played = std::mem::take(&mut self.played);
        let (sender, carries) = std::sync::mpsc::channel();
        let receive = move || {
            for (which, played) in played.iter().enumerate() {
                if let Some(word) = played.word() {
                    let _ = sender.send(which);
                    return Some(word);
                }
            }
            std::thread::sleep(Duration::from_micros(200));
            None
        };
        let flow = Flow::start(1, datagrams(&pod, to, 1), Box::new(receive));
        // The droplets answer some probes, while packets are sent to them.
        std::thread::sleep(Duration::from_millis(1500));
        let by: Vec<usize> = carries.try_iter().collect();
        let by = *by.first().expect("datagrams came");
        let start = Instant::now();
        self.cut(by, true);
        let other = 1 - by;
        let end = Instant::now() + Duration::from_millis(GENEROUS);
        while Instant::now() < end && carries.recv_timeout(Duration::from_millis(50)) != Ok(other) {}
        let took = start.elapsed();
        eventually("the tables name the other one alone", || {
            self.picked() == vec![vec![LASTS[other]]; 2]
        });
        let outcome = flow.stop();
        println!(
            "{to} by 192.0.2.{}: {outcome:?}, the other one after {took:?}",
            LASTS[by]
        );
        assert_eq!(outcome.foreign, 0);
        outcome.lost
    }
}

fn a_dead_one_loses_little(flags: &[&str], to: &str) {
    let mut world = World::new(flags);
    let lost = world.flow_through_death(to);
    assert!(lost > 0, "it was on the way");
    assert!(lost < GENEROUS, "{lost} datagrams, one a millisecond");
}

#[test]
fn a_bounced_flow_leaves_a_dead_bouncer() {
    a_dead_one_loses_little(&[], BOUNCED);
}

#[test]
fn a_divided_flow_leaves_a_dead_divider_with_transit_at_xdp() {
    a_dead_one_loses_little(&["--transit-hook", "xdp"], DIVIDED);
}

#[test]
fn a_role_that_is_back_is_used_and_all_if_nobody_answers() {
    let world = World::new(&[]);
    let pod = format!("{}-p", world.rig.name);
    let mut send = datagrams(&pod, BOUNCED, 1);
    let mut until = |what: &str, holds: &dyn Fn() -> bool| {
        eventually(what, || {
            send(0);
            holds()
        });
    };
    let both = || vec![LASTS.to_vec(); 2];
    until("answers", &|| world.has_answered(5));
    world.cut(0, true);
    until("others take over", &|| world.picked() == vec![vec![3]; 2]);
    world.cut(1, true);
    until("nobody answers", &|| world.picked() == both());
    world.cut(1, false);
    until("the one that answers", &|| world.picked() == vec![vec![3]; 2]);
    world.cut(0, false);
    until("all answer", &|| world.picked() == both());
}

#[test]
fn who_was_silent_is_so_for_the_next_transitd() {
    let mut world = World::new(&[]);
    let pod = format!("{}-p", world.rig.name);
    let mut send = datagrams(&pod, BOUNCED, 1);
    eventually("answers", || {
        send(0);
        world.has_answered(5)
    });
    world.cut(0, true);
    eventually("others take over", || {
        send(0);
        world.picked() == vec![vec![3]; 2]
    });
    world.rig.kill();
    world.rig.start();
    world.rig.operator.wait_for_ack();
    // A row that the operator repeats changes nothing, then or later.
    for _ in 0..10 {
        assert_eq!(world.picked(), vec![vec![3]; 2]);
        send(0);
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn droplets_that_know_no_probes_are_never_taken_for_dead() {
    let mut rig = Rig::prepare(rows());
    // The droplets take packets, and answer nothing.
    let _peers = LASTS.map(|last| Peer::new(&rig, last));
    rig.start();
    rig.operator.wait_for_ack();
    rig.add_pod("p");
    let pod = format!("{}-p", rig.name);
    let mut send = datagrams(&pod, BOUNCED, 1);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        send(0);
        std::thread::sleep(Duration::from_millis(20));
    }
    let subnets = rig.rows("SUBNETS");
    let all = serde_json::json!(["192.0.2.2", "192.0.2.3"]);
    assert!(
        subnets.iter().any(|row| row["entry"]["bouncers"] == all),
        "{subnets:?}"
    );
    assert!(!rig.log().contains("does not answer"), "{}", rig.log());
}

#[test]
fn a_droplet_answers_without_its_transitd_to_droplets_alone() {
    let mut rows = base_rows();
    rows.push(Row::Droplet(DropletRow {
        address: vec![192, 0, 2, 2],
        ..DropletRow::default()
    }));
    let mut rig = Rig::new(rows);
    let (droplet, stranger) = (Peer::new(&rig, 2), Peer::new(&rig, 9));
    eventually("the way is known", || droplet.probes());
    rig.kill();
    for number in 0..20 {
        assert!(droplet.probes(), "question {number}");
    }
    assert!(!stranger.probes());
    assert!(rig.counter("probes_answered") >= 20);
    assert!(rig.counter("unknown_droplet") >= 1);
}

//! transitd stops, is killed, goes to the next layout of maps and back, under traffic: no packet is lost, and no packet
//! comes through that must not.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use thuban_common::tables::LAYOUT_VERSION;
use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::{
    BouncerRow, DropletRow, PolicyAction, PolicyRule, PolicySetRow, PolicyTier, row::Row,
};

use crate::flow::{Flow, Stream, datagrams, port};
use crate::pressure::shrunk;
use crate::rig::{Rig, base_rows, deny_all, eventually, judged, local, mapped};
use crate::wire::Peer;

/// The layout after this one.
const NEXT: u32 = LAYOUT_VERSION + 1;

/// Number of ends and starts of transitd; `THUBAN_SOAK_RESTARTS` sets another one.
const ROUNDS: usize = 6;

/// Returns sets, a pod that takes what all say, p1, and one that may say nothing.
fn policies() -> [Row; 4] {
    const ALL: u32 = 5;
    const NOTHING: u32 = 6;
    let anyone = PolicyRule {
        tier: PolicyTier::NetworkPolicy.into(),
        action: PolicyAction::Accept.into(),
        policy: "ns/all".into(),
        anyone: true,
        ..PolicyRule::default()
    };
    let all = PolicySetRow {
        vni: 7,
        id: ALL,
        egress: false,
        isolated: true,
        rules: vec![anyone],
    };
    [
        Row::PolicySet(all),
        deny_all(NOTHING, true),
        judged(local(7, "p1", 5), 0, [ALL, 0]),
        judged(local(7, "denied", 8), 0, [0, NOTHING]),
    ]
}

/// Returns a rig with p1 and p2 of VPC 7, q of VPC 8 on this node; 10.0.1.20 of VPC 7 lives on 192.0.2.2.
fn rig(flags: &[&str]) -> Rig {
    let mut rows = base_rows();
    rows.extend(policies());
    rows.extend([local(7, "p2", 6), local(7, "p3", 7), local(8, "q", 9)]);
    rows.push(Row::Droplet(DropletRow {
        address: vec![192, 0, 2, 2],
        ..DropletRow::default()
    }));
    rows.push(Row::Bouncer(BouncerRow {
        vni: 7,
        address: mapped(20),
        droplet: vec![192, 0, 2, 2],
        ..BouncerRow::default()
    }));
    let mut rig = Rig::prepare(rows);
    rig.flags = flags.iter().map(ToString::to_string).collect();
    rig.start();
    rig.operator.wait_for_ack();
    for pod in ["p1", "p2", "q", "denied"] {
        rig.add_pod(pod);
    }
    rig
}

/// Builds programs with maps of another shape, as in the next layout.
fn next_layout(rig: &mut Rig) {
    rig.programs = shrunk(rig, "VPCS", 8192);
    rig.flags.extend(["--layout".into(), NEXT.to_string()]);
}

fn layouts(rig: &Rig) -> Vec<u32> {
    let entries = std::fs::read_dir(rig.directory.join("bpf/thuban")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut versions: Vec<u32> = names
        .map(|name| name.strip_prefix("layout_").unwrap().parse().unwrap())
        .collect();
    versions.sort_unstable();
    versions
}

/// Waits until the next transitd serves.
fn started(rig: &mut Rig) {
    rig.start();
    eventually("ready", || rig.probe(false).0 == 0);
    rig.operator.wait_for_ack();
}

fn terminate(rig: &mut Rig) {
    kill(Pid::from_raw(rig.daemon_id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(rig.wait_for_exit(), Some(0));
    rig.kill();
}

struct Traffic {
    flows: Vec<(&'static str, Flow)>,
    stream: Stream,
    probes: Vec<Flow>,
}

impl Traffic {
    fn start(rig: &Rig) -> Self {
        let of = |pod: &str| format!("{}-{pod}", rig.name);
        let peer = Peer::new(rig, 2);
        let (sending, receiving) = (peer.sender(7, 3, "10.0.1.20", "10.0.1.5"), peer.receiver());
        // Neighbours are resolved before the count begins.
        assert!(rig.ping("p1", "10.0.1.6"));
        rig.send_pings("p1", "10.0.1.20", 3);
        let flows = vec![
            (
                "pod to pod",
                Flow::start(1, datagrams(&of("p1"), "10.0.1.6:7", 1), port(&of("p2"), 7)),
            ),
            (
                "pod to wire",
                Flow::start(2, datagrams(&of("p2"), "10.0.1.20:7", 2), receiving),
            ),
            ("wire to pod", Flow::start(3, sending, port(&of("p1"), 7))),
        ];
        let stream = Stream::start(&of("p2"), &of("p1"), "10.0.1.5");
        // Probes of another VPC, from the wire and from a pod. No flow has mark 9, so each probe that arrives counts as
        // foreign somewhere.
        // Like a socket to which nothing comes: without a wait each of these threads would take a core from the others.
        let silent = || {
            Box::new(|| {
                std::thread::sleep(Duration::from_millis(50));
                None
            })
        };
        let probes = vec![
            Flow::start(9, datagrams(&of("q"), "10.0.1.6:7", 9), silent()),
            // What network policy denies.
            Flow::start(9, datagrams(&of("denied"), "10.0.1.6:7", 9), silent()),
            Flow::start(9, peer.sender(8, 9, "10.0.1.20", "10.0.1.5"), silent()),
            // A probe of this VPC, from a droplet that the source is not on.
            Flow::start(9, peer.sender(7, 9, "10.0.1.5", "10.0.1.6"), silent()),
        ];
        Self {
            flows,
            stream,
            probes,
        }
    }

    /// Returns the numbers of datagrams that were sent, that were lost, and that came though they must not.
    fn stop(self) -> (u64, u64, u64) {
        let probed: u64 = self.probes.into_iter().map(|flow| flow.stop().sent).sum();
        let bytes = self.stream.stop();
        let mut sums = (0, 0, 0);
        for (name, flow) in self.flows {
            let outcome = flow.stop();
            println!("{name}: {outcome:?}");
            sums.0 += outcome.sent;
            sums.1 += outcome.lost;
            sums.2 += outcome.foreign;
        }
        println!("{bytes} bytes by TCP, {probed} probes");
        sums
    }
}

#[test]
fn stops_kills_upgrades_downgrades_lose_and_leak_nothing() {
    restarts(&[]);
}

#[test]
fn nor_do_they_with_transit_at_xdp() {
    restarts(&["--transit-hook", "xdp"]);
}

fn restarts(flags: &[&str]) {
    let rounds = std::env::var("THUBAN_SOAK_RESTARTS").map_or(ROUNDS, |text| text.parse().unwrap());
    let mut rig = rig(flags);
    let (programs, flags) = (rig.programs.clone(), rig.flags.clone());
    let traffic = Traffic::start(&rig);
    let (mut served, mut new) = (Vec::new(), true);
    for round in 0..rounds {
        match round % 3 {
            0 => terminate(&mut rig),
            1 => rig.kill(),
            _ => {
                rig.kill();
                if new {
                    next_layout(&mut rig);
                } else {
                    rig.programs.clone_from(&programs);
                    rig.flags.clone_from(&flags);
                }
                new = !new;
            }
        }
        let start = Instant::now();
        started(&mut rig);
        served.push(start.elapsed());
        let layout = if new { LAYOUT_VERSION } else { NEXT };
        assert_eq!(layouts(&rig), [layout], "round {round}: {}", rig.log());
    }
    let (sent, lost, foreign) = traffic.stop();
    served.sort();
    println!(
        "{rounds} rounds: {sent} sent, {lost} lost, {foreign} let through; ready after {:?} (median), {:?} (longest)",
        served[served.len() / 2],
        served.last().unwrap()
    );
    assert_eq!((lost, foreign), (0, 0));
    assert!(sent > 0);
    rig.add_pod("p3");
    assert!(rig.ping("p3", "10.0.1.5"));
}

#[test]
fn layout_takes_over_only_with_rows_and_resumes_if_killed() {
    // There are two links: of transit at tc and at XDP.
    let mut rig = rig(&["--transit-hook", "xdp"]);
    let flags = rig.flags.clone();
    let traffic = Traffic::start(&rig);
    let (before, names) = (agents(&rig), links(&rig, LAYOUT_VERSION));
    assert_eq!((before.len(), names.len()), (4, 2), "{before:?}, {names:?}");
    rig.kill();
    // No rows come: the old programs stay, with their maps.
    rig.operator.shared.lock().unwrap().epoch = 0;
    let programs = rig.programs.clone();
    next_layout(&mut rig);
    rig.start();
    eventually("alive", || rig.probe(true).0 == 0);
    rig.operator
        .wait_for("a hello", |m| matches!(m, Message::Hello(_)));
    assert_eq!(layouts(&rig), [LAYOUT_VERSION, NEXT]);
    assert_eq!(
        (agents(&rig), links(&rig, LAYOUT_VERSION)),
        (before.clone(), names.clone()),
        "nothing moved"
    );
    assert_eq!(links(&rig, NEXT), [] as [String; 0]);
    // A pod that ends meanwhile is removed with its program; no new pod begins.
    assert_eq!(rig.del("q"), None);
    assert_eq!(agents(&rig).len(), 3);
    rig.pod_namespace("p3");
    let (_, error) = rig.plugin("ADD", "p3", "1.1.0", json!({}));
    assert!(
        error["code"] == 11 && error["msg"].as_str().unwrap().contains("another layout"),
        "{error}"
    );
    // transitd is killed in the middle of taking over: one link is in both places, as between pinning and unpinning,
    // one in the new place.
    rig.kill();
    let (old, new) = (pins(&rig, LAYOUT_VERSION), pins(&rig, NEXT));
    rig.on_node(&format!(
        "bpftool link pin pinned {0}/{2} {1}/{2}; bpftool link pin pinned {0}/{3} {1}/{3} && rm {0}/{3}",
        old.display(),
        new.display(),
        names[0],
        names[1]
    ));
    rig.operator.shared.lock().unwrap().epoch = 3;
    started(&mut rig);
    assert_eq!(layouts(&rig), [NEXT], "{}", rig.log());
    assert_eq!(links(&rig, NEXT), names);
    let after = agents(&rig);
    assert_eq!(after.len(), 3);
    assert!(
        after.iter().all(|agent| !before.contains(agent)),
        "{before:?} {after:?}"
    );
    // Now back to the old layout.
    rig.kill();
    rig.programs = programs;
    rig.flags = flags;
    started(&mut rig);
    assert_eq!(layouts(&rig), [LAYOUT_VERSION]);
    assert_eq!(links(&rig, LAYOUT_VERSION), names);
    let (sent, lost, foreign) = traffic.stop();
    assert_eq!((lost, foreign), (0, 0), "of {sent}");
}

/// Returns interfaces of pods and the ids of the programs in their agents' filters.
fn agents(rig: &Rig) -> Vec<(String, u64)> {
    let links: Value = serde_json::from_str(&rig.on_node("ip -j link show type veth")).unwrap();
    let links = links.as_array().unwrap().iter();
    let names = links.map(|link| link["ifname"].as_str().unwrap().to_owned());
    let mut agents: Vec<_> = names
        .filter(|name| name.starts_with("thb"))
        .filter_map(|name| {
            let filters = rig.on_node(&format!("tc -j filter show dev {name} ingress"));
            let filters: Value = serde_json::from_str(&filters).unwrap();
            let program = filters
                .as_array()
                .unwrap()
                .iter()
                .find_map(|filter| filter["options"]["prog"]["id"].as_u64());
            Some((name, program?))
        })
        .collect();
    agents.sort();
    agents
}

fn pins(rig: &Rig, layout: u32) -> PathBuf {
    rig.directory.join(format!("bpf/thuban/layout_{layout}/links"))
}

fn links(rig: &Rig, layout: u32) -> Vec<String> {
    let entries = std::fs::read_dir(pins(rig, layout)).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

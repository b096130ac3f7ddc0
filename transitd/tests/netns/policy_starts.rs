//! Pods under deny-all that are flooded, and that send, from before their ADD on: no packet passes in either direction.
//!
//! 20 pods, or as many as `THUBAN_STARTS` says.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use thuban_proto::transit::row::Row;
use thuban_proto::transit::{AddressKey, RowKey, row_key::Key};
use thuban_testkit::wait::wait_for;

use crate::rig::{Rig, base_rows, deny_all, in_namespace, judged, local, mapped};

const PORT: u16 = 9;
/// The neighbour, to which no policy applies.
const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 5);
/// The address of each pod in its turn.
const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 20);
/// How many datagrams are sent in each direction after ADD has returned.
const ENOUGH: usize = 100;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
const INGRESS: u32 = 5;
const EGRESS: u32 = 6;

fn pod(name: &str, sets: [u32; 2]) -> Row {
    judged(local(7, name, OWN.octets()[3]), 0, sets)
}

/// Sends datagrams from a namespace until it is told to stop, and counts those that the kernel took.
fn flood(namespace: &str, to: Ipv4Addr, sent: &AtomicUsize, stop: &AtomicBool) {
    let socket = in_namespace(namespace, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap());
    while !stop.load(Ordering::Relaxed) {
        // Errors say that the pod has no interface yet, or are ICMP answers.
        if socket.send_to(&[1], (to, PORT)).is_ok() {
            sent.fetch_add(1, Ordering::Relaxed);
        }
        thread::sleep(Duration::from_micros(200));
    }
}

/// Returns how many datagrams a namespace has received. Errors about what it sent itself are answers.
fn received(namespace: &str) -> u64 {
    let shown = in_namespace(namespace, || {
        std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap()
    });
    let mut lines = shown.lines().filter(|line| line.starts_with("Udp: "));
    let [names, values] = [lines.next(), lines.next()].map(|line| line.unwrap().split(' '));
    let fields = names.zip(values);
    // Those for a socket, and those for none.
    let counts = fields.filter(|(name, _)| matches!(*name, "InDatagrams" | "NoPorts"));
    counts.map(|(_, count)| count.parse::<u64>().unwrap()).sum()
}

/// Starts a pod with these sets while both sides send. Returns what the pod and the neighbour have received.
/// `is_early`: ADD comes before the pod's row.
fn start(rig: &mut Rig, name: &str, sets: [u32; 2], is_early: bool) -> [u64; 2] {
    let netns = rig.pod_namespace(name);
    let own = format!("{}-{name}", rig.name);
    let neighbours = format!("{}-neighbour", rig.name);
    let before = received(&neighbours);
    let row = pod(name, sets);
    let stop = AtomicBool::new(false);
    let counts = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let shared = &*rig;
    thread::scope(|scope| {
        scope.spawn(|| flood(&own, NEIGHBOUR, &counts[0], &stop));
        scope.spawn(|| flood(&neighbours, OWN, &counts[1], &stop));
        let put = || shared.operator.push_and_wait(vec![row], vec![]);
        if is_early {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                put();
            });
        } else {
            put();
        }
        shared.add(name, name, &netns).unwrap();
        let sent = || counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        let at_first = sent();
        let waited = wait_for(
            "datagrams to both",
            ANSWER_TIMEOUT,
            Duration::from_millis(5),
            || {
                let mut both = sent().into_iter().zip(at_first);
                Ok(both.all(|(now, first)| now >= first + ENOUGH))
            },
        );
        assert!(waited.is_ok(), "{waited:?}: {:?}", sent());
        stop.store(true, Ordering::Relaxed);
    });
    let got = [received(&own), received(&neighbours) - before];
    assert_eq!(rig.del(name), None);
    rig.remove_namespace(name);
    let key = AddressKey {
        vni: 7,
        address: mapped(OWN.octets()[3]),
    };
    rig.operator.push_and_wait(
        vec![],
        vec![RowKey {
            key: Some(Key::Local(key)),
        }],
    );
    got
}

#[test]
fn no_packet_passes_while_a_denied_pod_starts() {
    let pods = std::env::var("THUBAN_STARTS").map_or(20, |count| count.parse().unwrap());
    let mut rows = base_rows();
    rows.extend([deny_all(INGRESS, false), deny_all(EGRESS, true)]);
    rows.push(local(7, "neighbour", NEIGHBOUR.octets()[3]));
    let mut rig = Rig::prepare(rows);
    rig.start();
    rig.operator.wait_for_ack();
    rig.add_pod("neighbour");
    for number in 0..pods {
        let got = start(
            &mut rig,
            &format!("p{number}"),
            [INGRESS, EGRESS],
            number % 2 == 1,
        );
        assert_eq!(got, [0, 0], "pod {number}");
    }
    // Each direction by itself, and what is sent arrives where no set denies it.
    for (name, sets) in [("i", [INGRESS, 0]), ("e", [0, EGRESS]), ("f", [0, 0])] {
        let [in_pod, in_neighbour] = start(&mut rig, name, sets, false);
        assert_eq!([in_pod > 0, in_neighbour > 0], sets.map(|set| set == 0), "{name}");
    }
}

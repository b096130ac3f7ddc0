//! Verbs that follow: several at a time, each with its own records, and with the number of those that it lost.

use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, UdpSocket};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use aya::maps::{Array, HashMap, Map, MapData};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use thuban_common::tables::{CONFIG_TRACE, ConfigEntry, EndpointKey};

use crate::policies::{TENANTS, pod, rig_with};
use crate::rig::{Rig, eventually, in_namespace, mapped};

const FIRST: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 5);

/// A verb that says what it sees until its end.
pub struct Follower {
    child: Child,
    said: BufReader<ChildStderr>,
}

impl Follower {
    /// Starts it, and waits until it follows.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command
            .arg("--json")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first = String::new();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        said.read_line(&mut first).unwrap();
        assert!(first.contains("Ctrl-C ends it"), "{first}");
        Self { child, said }
    }

    /// Waits for its end, and returns what it has said.
    pub fn end(self) -> Vec<Value> {
        let output = self.child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let lines = serde_json::Deserializer::from_slice(&output.stdout).into_iter();
        lines.collect::<Result<_, _>>().unwrap()
    }

    /// Waits for its end, and returns why it failed.
    fn fail(mut self) -> String {
        let mut why = String::new();
        self.said.read_to_string(&mut why).unwrap();
        assert!(!self.child.wait().unwrap().success());
        why
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn trace(rig: &Rig, name: &str, seconds: &str) -> Follower {
    let name = format!("ns/{name}");
    Follower::start(rig.verb("trace").args(["--pod", &name, "--seconds", seconds]))
}

/// Returns why a trace is refused.
fn refusal(rig: &Rig) -> String {
    let refused = rig
        .verb("trace")
        .args(["--pod", "ns/p1", "--count", "1"])
        .output();
    let refused = refused.unwrap();
    assert!(!refused.status.success(), "{refused:?}");
    String::from_utf8(refused.stderr).unwrap()
}

fn map(rig: &Rig, name: &str) -> MapData {
    let maps = rig.pins().join("maps");
    MapData::from_pin(maps.join(name)).unwrap()
}

/// Returns the endpoints that the programs trace, if they trace.
fn traced(rig: &Rig) -> Option<Vec<EndpointKey>> {
    let config = Map::Array(map(rig, "CONFIG"));
    let config: Array<MapData, ConfigEntry> = config.try_into().unwrap();
    // In this order, because the flag goes last.
    let is_on = config.get(&0, 0).unwrap().flags & CONFIG_TRACE != 0;
    let endpoints = Map::HashMap(map(rig, "TRACED"));
    let endpoints: HashMap<MapData, EndpointKey, u64> = endpoints.try_into().unwrap();
    let keys: Vec<EndpointKey> = endpoints.keys().map(Result::unwrap).collect();
    assert!(is_on || keys.is_empty(), "{keys:?}");
    is_on.then_some(keys)
}

#[test]
fn traces_at_a_time_have_each_its_own_pods_packets() {
    let rig = rig_with(vec![]);
    let first = trace(&rig, "p1", "6");
    let same = trace(&rig, "p1", "6");
    let tenant = trace(&rig, "p3", "6");
    assert!(rig.ping("p2", "10.0.1.5"));
    rig.send_pings("p3", "10.8.1.99", 2);
    rig.send_pings("p2", "10.0.1.99", 2);
    // Other packets may come before or after all of them trace.
    let pings = |seen: &[Value]| -> Vec<Value> {
        let pings = seen.iter().filter(|line| line["protocol"] == 1);
        pings.cloned().collect()
    };
    let first = first.end();
    assert_ne!(pings(&first), [] as [Value; 0]);
    assert_eq!(pings(&first), pings(&same.end()));
    for (seen, vni, own) in [(first, 7, FIRST), (tenant.end(), 8, TENANTS)] {
        assert!(!seen.is_empty(), "{own}");
        let own = own.to_string();
        let is_own =
            |line: &Value| line["vni"] == vni && (line["source"] == own || line["destination"] == own);
        assert!(seen.iter().all(is_own), "{own}: {seen:#?}");
    }
}

#[test]
fn a_killed_trace_leaves_no_lease() {
    let rig = rig_with(vec![]);
    assert_eq!(traced(&rig), None);
    let key = EndpointKey {
        vni: 7,
        address: mapped(5).try_into().unwrap(),
    };
    let (first, second) = (trace(&rig, "p1", "60"), trace(&rig, "p2", "60"));
    assert_eq!(traced(&rig).map(|keys| keys.len()), Some(2));
    second.kill();
    eventually("the other endpoint is traced alone", || {
        traced(&rig) == Some(vec![key])
    });
    // The lease is longer than the time that this takes.
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(traced(&rig), Some(vec![key]), "it is renewed");
    first.kill();
    eventually("nothing is traced", || traced(&rig).is_none());
}

#[test]
fn only_eight_trace_at_a_time() {
    let rig = rig_with(vec![]);
    let mut all: Vec<Follower> = (0..8).map(|_| trace(&rig, "p1", "60")).collect();
    let why = refusal(&rig);
    assert!(why.contains("8 `transitd trace` run on this node"), "{why}");
    all.pop().unwrap().kill();
    eventually("there is room for another one", || {
        let mut verb = rig.verb("trace");
        let another = verb.args(["--pod", "ns/p1", "--seconds", "0"]).output();
        another.unwrap().status.success()
    });
    for one in all {
        one.kill();
    }
}

#[test]
fn traces_end_with_the_daemon_and_need_it() {
    let mut rig = rig_with(vec![]);
    let ended = trace(&rig, "p1", "60");
    kill(Pid::from_raw(rig.daemon_id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(rig.wait_for_exit(), Some(0), "no trace keeps it");
    let why = ended.fail();
    assert!(why.contains("transitd ended"), "{why}");
    assert_eq!(traced(&rig), None);
    let why = refusal(&rig);
    assert!(why.contains("transitd does not run on this node"), "{why}");

    // What a stopped reader does not take keeps its connection open.
    rig.start();
    rig.operator.wait_for_ack();
    let stopped = trace(&rig, "p1", "60");
    stopped.signal(Signal::SIGSTOP);
    send(&rig, 20_000);
    kill(Pid::from_raw(rig.daemon_id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(rig.wait_for_exit(), Some(0), "nor does one that does not read");
    let log = rig.log();
    assert!(log.contains("its client does not read"), "{log}");
    stopped.signal(Signal::SIGCONT);
    stopped.kill();

    rig.start();
    rig.operator.wait_for_ack();
    let killed = trace(&rig, "p1", "60");
    rig.kill();
    let why = killed.fail();
    assert!(why.contains("transitd ended"), "{why}");
}

/// Sends so many datagrams from p2 to p1, no more at a time than the kernel queues.
fn send(rig: &Rig, count: usize) {
    const AT_A_TIME: usize = 100;
    in_namespace(&pod(rig, "p2"), move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        for _ in 0..count / AT_A_TIME {
            for _ in 0..AT_A_TIME {
                socket.send_to(b"?", (FIRST, 9)).unwrap();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    });
}

#[test]
fn a_slow_reader_hears_how_many_records_are_lost() {
    let rig = rig_with(vec![]);
    let mut slow = trace(&rig, "p1", "40");
    let before = rig.counter("delivered_local");
    slow.signal(Signal::SIGSTOP);
    send(&rig, 20_000);
    std::thread::sleep(Duration::from_millis(200));
    // All of them are from p1 or to it.
    let delivered = rig.counter("delivered_local") - before;
    slow.signal(Signal::SIGCONT);
    let [mut seen, mut by_reader, mut in_ring] = [0; 3];
    for line in BufReader::new(slow.child.stdout.take().unwrap()).lines() {
        let line: Value = serde_json::from_str(&line.unwrap()).unwrap();
        match (line["lost"].as_u64(), line["where"].as_str()) {
            (Some(lost), Some("reader")) => by_reader += lost,
            (Some(lost), Some("ring")) => in_ring += lost,
            (None, None) => seen += 1,
            _ => panic!("{line}"),
        }
        if by_reader > 0 && seen + by_reader + in_ring >= delivered {
            break;
        }
    }
    slow.kill();
    let all = format!("{seen} seen, {by_reader} and {in_ring} lost, {delivered} delivered");
    assert!(by_reader > 0, "{all}");
    assert!(seen + by_reader + in_ring >= delivered, "{all}");
}

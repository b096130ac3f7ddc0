//! The metrics of a whole transitd by HTTP, and its probes.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};

use crate::policy_rows::{class, set};
use crate::rig::{Rig, base_rows, eventually, in_namespace, local};
use crate::tcp::ANSWER_TIMEOUT;

const PORT: u16 = 6084;

impl Rig {
    /// Returns series and their values, as scraped on the node.
    pub fn metrics(&self) -> BTreeMap<String, u64> {
        let text = get(self.node(), Ipv4Addr::LOCALHOST).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(
            head.starts_with("HTTP/1.1 200") && body.ends_with("# EOF\n"),
            "{text}"
        );
        let lines = body.lines().filter(|line| !line.starts_with('#'));
        lines
            .filter_map(|line| {
                let (series, value) = line.rsplit_once(' ')?;
                let series = series.strip_prefix("thuban_transitd_")?;
                Some((series.to_owned(), value.parse().ok()?))
            })
            .collect()
    }

    /// Returns exit code and stderr of `transitd status`.
    pub fn probe(&self, alive: bool) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_transitd"));
        command
            .arg("status")
            .arg("--socket")
            .arg(self.directory.join("run/cni.sock"));
        if alive {
            command.arg("--alive");
        }
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), text)
    }

    /// Asserts that transitd is alive and not ready, for that reason.
    fn assert_unready(&self, reason: &str) {
        let (code, text) = self.probe(false);
        assert!(code == 1 && text.contains(reason), "{reason}: {code} {text}");
        assert_eq!(self.probe(true).0, 0, "a restart would not help");
    }
}

fn get(namespace: &str, address: Ipv4Addr) -> std::io::Result<String> {
    in_namespace(namespace, move || {
        let address = SocketAddr::new(address.into(), PORT);
        // The kernel accepts for a busy transitd too, so only who can't reach it waits.
        let mut stream = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT * 2)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.write_all(
            b"GET /metrics HTTP/1.1\r\nHost: node\r\nAccept: application/openmetrics-text\r\n\r\n",
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    })
}

fn prepare(address: &str) -> Rig {
    let mut rows = base_rows();
    rows.extend([local(7, "p1", 5), local(7, "p2", 6), local(7, "p3", 7)]);
    rows.extend([class(3, 11), set(4, 11, 80)]);
    let mut rig = Rig::prepare(rows);
    let port = PORT.to_string();
    rig.flags = ["--metrics-port", &port, "--metrics-address", address]
        .map(str::to_owned)
        .to_vec();
    rig.start();
    rig.operator.wait_for_ack();
    rig
}

#[test]
fn what_happens_on_the_node_is_counted() {
    let mut rig = prepare("loopback");
    rig.add_pod("p1");
    rig.add_pod("p2");
    rig.pod_namespace("p3");
    let (exit, _) = rig.plugin("ADD", "stranger", "1.1.0", json!({}));
    assert_eq!(exit, 1);
    let before = rig.metrics();
    rig.send_pings("p1", "10.9.9.9", 3);
    let seen = rig.metrics();
    let bytes = r#"bytes_total{interface="pods",direction="sent"}"#;
    // Three pings without data, with their headers of Ethernet, IP and ICMP.
    assert!(seen[bytes] >= before[bytes] + 3 * 42, "{before:#?} {seen:#?}");
    for direction in ["received", "sent"] {
        let bytes = format!(r#"bytes_total{{interface="uplink",direction="{direction}"}}"#);
        assert!(seen[&bytes] >= before[&bytes], "{bytes}: {seen:#?}");
    }
    let expected: &[(&str, u64)] = &[
        ("attachments", 2),
        ("attachments_adopted", 0),
        ("attachments_without_agent", 0),
        (r#"rows{table="LOCAL_ENDPOINTS"}"#, 2),
        (r#"rows{table="ATTACHMENTS"}"#, 2),
        (r#"rows{table="VPCS"}"#, 2),
        (r#"rows{table="DIRECT_ROWS"}"#, 0),
        (r#"rows_capacity{table="LOCAL_ENDPOINTS"}"#, 4096),
        (r#"drops_total{reason="outside_vpc"}"#, 3),
        (r#"cni_total{verb="ADD",code="0"}"#, 2),
        (r#"cni_total{verb="ADD",code="4"}"#, 1),
        (r#"cni_duration_seconds_count{verb="ADD"}"#, 3),
        ("stream", 1),
        ("epoch", 1),
        ("ready", 1),
        ("spooled_dels", 0),
        ("policy_sets", 1),
        ("policy_classes", 1),
        ("policy_flows", 0),
        (r#"rows{table="GRANTS"}"#, 3),
        (r#"rows_capacity{table="FLOWS"}"#, 131_072),
    ];
    for (series, value) in expected {
        assert_eq!(seen.get(*series), Some(value), "{series}: {seen:#?}");
    }
    for series in [
        "snapshots_total",
        "stream_attempts_total",
        "policy_compile_duration_seconds_count",
    ] {
        assert!(seen[series] >= 1, "{series}: {seen:#?}");
    }
    for name in ["p1", "stranger", "vpc-7"] {
        assert!(
            !seen.keys().any(|series| series.contains(name)),
            "{name}: {seen:#?}"
        );
    }

    // A restart finds one attachment with its file, one without, and a DEL that waits.
    rig.kill();
    std::fs::remove_file(rig.directory.join("state/attachments/p2_eth0.json")).unwrap();
    assert_eq!(rig.plugin("DEL", "p1", "1.1.0", json!({})), (0, Value::Null));
    rig.start();
    eventually("the DEL is done", || {
        rig.log().contains("spooled DEL done") && rig.probe(false).0 == 0
    });
    // The operator leads no more: there is no stream, and transitd is ready all the same.
    rig.operator.shared.lock().unwrap().epoch = 0;
    rig.operator.hang_up();
    eventually("the stream is gone", || rig.metrics()["stream"] == 0);
    eventually("it is dialled again", || {
        rig.metrics()["stream_attempts_total"] > 2
    });
    let seen = rig.metrics();
    let expected: &[(&str, u64)] = &[
        ("attachments", 0),
        ("attachments_adopted", 1),
        (r#"reclaimed_total{kind="veth"}"#, 1),
        (r#"reclaimed_total{kind="spooled_del"}"#, 1),
        (r#"drops_total{reason="outside_vpc"}"#, 3),
        ("ready", 1),
    ];
    for (series, value) in expected {
        assert_eq!(seen.get(*series), Some(value), "{series}: {seen:#?}");
    }
}

#[test]
fn metrics_are_served_where_the_setting_says_and_nowhere_else() {
    let node = Ipv4Addr::from(crate::rig::NODE);
    let mut rig = prepare("loopback");
    assert!(get(rig.node(), Ipv4Addr::LOCALHOST).is_ok());
    assert!(get(rig.node(), node).is_err());
    assert!(get(rig.far(), node).is_err());
    rig.kill();
    rig.flags[3] = "node".into();
    rig.start();
    eventually("served", || get(rig.far(), node).is_ok());
    let answer = get(rig.far(), node).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 403") && answer.contains("by https"),
        "{answer}"
    );
    assert!(!answer.contains("thuban_transitd_"), "{answer}");
    rig.add_pod("p1");
    let pod = format!("{}-p1", rig.name);
    assert!(get(&pod, node).is_err(), "tenants' pods do not reach it");
    rig.kill();
    rig.flags.clear();
    rig.start();
    rig.operator.wait_for_ack();
    for address in [node, Ipv4Addr::LOCALHOST] {
        assert!(get(rig.node(), address).is_err(), "none is the default");
    }
}

#[test]
fn probes_report_faults_and_survive_a_lost_operator() {
    let mut rig = prepare("loopback");
    rig.add_pod("p1");
    eventually("ready", || rig.probe(false).0 == 0);
    // The operator is away: transitd serves pods, so it is ready.
    rig.operator.shared.lock().unwrap().epoch = 0;
    rig.operator.hang_up();
    eventually("no stream", || rig.metrics()["stream"] == 0);
    assert_eq!((rig.probe(false).0, rig.probe(true).0), (0, 0));
    // Another program takes transit off the uplink.
    let pin = rig.pins().join("links/transit_tc_up0");
    std::fs::remove_file(pin).unwrap();
    rig.assert_unready("transit_tc is not attached");
    assert_eq!(rig.metrics()["ready"], 0);
    // A restart would repair that, but without an operator transitd has no program.
    rig.kill();
    assert_eq!((rig.probe(false).0, rig.probe(true).0), (1, 1), "no socket");
    rig.start();
    eventually("alive", || rig.probe(true).0 == 0);
    rig.assert_unready("has not sent this node's program");
    rig.operator.shared.lock().unwrap().epoch = 2;
    rig.operator.hang_up();
    eventually("ready", || rig.probe(false).0 == 0);
    rig.on_node("ip link set up0 down");
    rig.assert_unready("uplink is missing or down");
    rig.on_node("ip link set up0 up");
    // A missing agent affects one pod only, and the metrics show it.
    rig.on_node("for link in $(ip -o link | grep -o 'thb[0-9a-f]*'); do tc qdisc del dev $link clsact; done");
    assert_eq!(rig.metrics()["attachments_without_agent"], 1);
    assert_eq!(rig.probe(false).0, 0);
    // A transitd that hangs answers nobody, though the kernel accepts connections for it.
    let daemon = nix::unistd::Pid::from_raw(rig.daemon_id().cast_signed());
    kill(daemon, Signal::SIGSTOP).unwrap();
    let (code, text) = rig.probe(true);
    assert!(code == 1 && text.contains("does not answer"), "{text}");
    kill(daemon, Signal::SIGCONT).unwrap();
    assert_eq!(rig.probe(true).0, 0);
}

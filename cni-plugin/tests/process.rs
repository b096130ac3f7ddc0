//! The binary as a runtime runs it: environment, stdin, exact JSON on stdout, exit code; transitd played on a socket.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use thuban_proto::cni::cni_server::{Cni, CniServer};
use thuban_proto::cni::{
    AddReply, AddRequest, Address, Attached, CniError, DelReply, DelRequest, Route, add_reply,
};
use tonic::{Request, Response, Status};

static NEXT: AtomicU32 = AtomicU32::new(0);

/// transitd, as far as the plugin sees it. Dropping it ends it.
struct Transitd {
    socket: PathBuf,
    requests: Arc<Mutex<Vec<AddRequest>>>,
    _runtime: tokio::runtime::Runtime,
}

struct Service {
    add: add_reply::Result,
    del: Option<CniError>,
    requests: Arc<Mutex<Vec<AddRequest>>>,
}

#[tonic::async_trait]
impl Cni for Service {
    async fn add(&self, request: Request<AddRequest>) -> Result<Response<AddReply>, Status> {
        self.requests.lock().unwrap().push(request.into_inner());
        Ok(Response::new(AddReply {
            result: Some(self.add.clone()),
        }))
    }
    async fn del(&self, _: Request<DelRequest>) -> Result<Response<DelReply>, Status> {
        Ok(Response::new(DelReply {
            error: self.del.clone(),
        }))
    }
}

fn socket_path() -> PathBuf {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("thuban-cni-{}-{number}.sock", std::process::id()))
}

fn transitd(add: add_reply::Result, del: Option<CniError>) -> Transitd {
    let (socket, requests) = (socket_path(), Arc::new(Mutex::new(Vec::new())));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let listener = {
        let _context = runtime.enter();
        tokio::net::UnixListener::bind(&socket).unwrap()
    };
    let service = Service {
        add,
        del,
        requests: Arc::clone(&requests),
    };
    runtime.spawn(
        tonic::transport::Server::builder()
            .add_service(CniServer::new(service))
            .serve_with_incoming(tokio_stream::wrappers::UnixListenerStream::new(listener)),
    );
    Transitd {
        socket,
        requests,
        _runtime: runtime,
    }
}

impl Drop for Transitd {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn attached() -> add_reply::Result {
    add_reply::Result::Attached(Attached {
        host_interface: "thb0123456789a".into(),
        host_mac: "02:54:68:75:62:61".into(),
        pod_mac: "02:00:0a:00:01:05".into(),
        mtu: 1450,
        addresses: vec![
            Address {
                address: "10.0.1.5/24".into(),
                gateway: "10.0.1.1".into(),
            },
            Address {
                address: "fd00:1::5/64".into(),
                gateway: "fe80::5468:7562:6101".into(),
            },
        ],
        routes: vec![
            Route {
                destination: "0.0.0.0/0".into(),
                gateway: "10.0.1.1".into(),
            },
            Route {
                destination: "::/0".into(),
                gateway: "fe80::5468:7562:6101".into(),
            },
        ],
    })
}

/// Exit code and the whole of stdout.
fn run(variables: &[(&str, &str)], input: &str) -> (i32, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_thuban"))
        .env_clear()
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // A bad environment ends the plugin before it reads: what it says counts, not whether it read.
    if let Err(error) = child.stdin.take().unwrap().write_all(input.as_bytes()) {
        assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    }
    let output = child.wait_with_output().unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stdout).unwrap(),
    )
}

fn parsed(variables: &[(&str, &str)], input: &str) -> (i32, Value) {
    let (code, text) = run(variables, input);
    assert_eq!(text.lines().count(), 1, "one document: {text}");
    (code, serde_json::from_str(&text).unwrap())
}

fn config(version: &str, socket: &std::path::Path) -> String {
    json!({"cniVersion": version, "name": "thuban", "type": "thuban", "socket": socket}).to_string()
}

const POD: &str =
    "IgnoreUnknown=1;K8S_POD_NAMESPACE=red;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=u-1";

fn environment(command: &'static str) -> Vec<(&'static str, &'static str)> {
    vec![
        ("CNI_COMMAND", command),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_NETNS", "/run/netns/x"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_ARGS", POD),
        ("CNI_PATH", "/opt/cni/bin"),
    ]
}

#[test]
fn add_prints_the_result_in_the_shape_of_each_version() {
    let transitd = transitd(attached(), None);
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let mut host = json!({"name": "thb0123456789a", "mac": "02:54:68:75:62:61"});
        let mut pod = json!({"name": "eth0", "mac": "02:00:0a:00:01:05", "sandbox": "/run/netns/x"});
        let mut address = json!({"interface": 1, "address": "10.0.1.5/24", "gateway": "10.0.1.1"});
        let mut address6 =
            json!({"interface": 1, "address": "fd00:1::5/64", "gateway": "fe80::5468:7562:6101"});
        match version {
            "0.4.0" => (address["version"], address6["version"]) = (json!("4"), json!("6")),
            "1.1.0" => (host["mtu"], pod["mtu"]) = (json!(1450), json!(1450)),
            _ => {}
        }
        let expected = json!({
            "cniVersion": version,
            "interfaces": [host, pod],
            "ips": [address, address6],
            "routes": [
                {"dst": "0.0.0.0/0", "gw": "10.0.1.1"},
                {"dst": "::/0", "gw": "fe80::5468:7562:6101"},
            ],
            "dns": {},
        });
        assert_eq!(
            parsed(&environment("ADD"), &config(version, &transitd.socket)),
            (0, expected)
        );
    }
    let expected = AddRequest {
        container_id: "c1".into(),
        netns: "/run/netns/x".into(),
        ifname: "eth0".into(),
        pod_namespace: "red".into(),
        pod_name: "web".into(),
        pod_uid: "u-1".into(),
    };
    assert_eq!(transitd.requests.lock().unwrap()[0], expected);
}

#[test]
fn transitds_error_is_printed_with_its_code_and_exit_1() {
    let error = CniError {
        code: 101,
        message: "pod red/web is refused".into(),
        details: "why".into(),
    };
    let transitd = transitd(add_reply::Result::Error(error.clone()), Some(error));
    let expected =
        json!({"cniVersion": "1.0.0", "code": 101, "msg": "pod red/web is refused", "details": "why"});
    for command in ["ADD", "DEL"] {
        assert_eq!(
            parsed(&environment(command), &config("1.0.0", &transitd.socket)),
            (1, expected.clone())
        );
    }
}

#[test]
fn del_prints_nothing_and_needs_no_netns_and_no_pod() {
    let transitd = transitd(attached(), None);
    let variables = [
        ("CNI_COMMAND", "DEL"),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_NETNS", ""),
    ];
    assert_eq!(
        run(&variables, &config("1.0.0", &transitd.socket)),
        (0, String::new())
    );
}

#[test]
fn without_transitd_add_and_del_ask_to_try_again_and_status_keeps_the_node() {
    let socket = socket_path();
    for command in ["ADD", "DEL"] {
        let (code, error) = parsed(&environment(command), &config("1.0.0", &socket));
        assert_eq!((code, &error["code"]), (1, &json!(11)));
        assert!(
            error["msg"]
                .as_str()
                .unwrap()
                .contains("transitd does not answer"),
            "{error}"
        );
    }
    assert_eq!(
        run(&environment("STATUS"), &config("1.1.0", &socket)),
        (0, String::new())
    );
}

#[test]
fn version_tells_what_is_supported() {
    let expected = json!({"cniVersion": "1.1.0", "supportedVersions": ["0.4.0", "1.0.0", "1.1.0"]});
    assert_eq!(
        parsed(&[("CNI_COMMAND", "VERSION")], r#"{"cniVersion":"1.1.0"}"#),
        (0, expected)
    );
}

#[test]
fn bad_configurations_and_environments_name_the_field() {
    let good = r#"{"cniVersion":"1.0.0","name":"n","type":"thuban"}"#;
    let without = |name: &'static str| -> Vec<(&'static str, &'static str)> {
        environment("ADD")
            .into_iter()
            .filter(|(n, _)| *n != name)
            .collect()
    };
    for (variables, input, code, part) in [
        (environment("ADD"), "{", 6, "JSON"),
        (environment("ADD"), r#"{"cniVersion":"1.0.0"}"#, 7, "name"),
        (
            environment("ADD"),
            r#"{"cniVersion":"1.0.0","name":"n","socket":"x"}"#,
            7,
            "socket",
        ),
        (
            environment("ADD"),
            r#"{"cniVersion":"0.1.0","name":"n"}"#,
            1,
            "cniVersion",
        ),
        (without("CNI_COMMAND"), good, 4, "CNI_COMMAND"),
        (without("CNI_CONTAINERID"), good, 4, "CNI_CONTAINERID"),
        (without("CNI_NETNS"), good, 4, "CNI_NETNS"),
        (without("CNI_IFNAME"), good, 4, "CNI_IFNAME"),
        (without("CNI_ARGS"), good, 4, "K8S_POD_UID"),
        (environment("CHECK"), good, 4, "CNI_COMMAND"),
        (environment("GC"), good, 4, "CNI_COMMAND"),
    ] {
        let (exit, error) = parsed(&variables, input);
        assert_eq!(
            (exit, error["code"].as_u64()),
            (1, Some(code)),
            "{input}: {error}"
        );
        assert!(error["msg"].as_str().unwrap().contains(part), "{part}: {error}");
    }
}

//! The binary as a runtime runs it: environment, stdin, exact JSON on stdout, exit code; transitd played on a socket.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use prost::Message;
use serde_json::{Value, json};
use thuban_proto::cni::cni_server::{Cni, CniServer};
use thuban_proto::cni::{
    AddReply, AddRequest, Address, Attached, AttachmentKey, CheckReply, CheckRequest, CniError, DelReply,
    DelRequest, GcReply, GcRequest, Route, SpooledDel, StatusReply, StatusRequest, add_reply,
};
use tonic::{Request, Response, Status};

static NEXT: AtomicU32 = AtomicU32::new(0);

/// transitd, as far as the plugin sees it. Dropping it ends it.
struct Transitd {
    socket: PathBuf,
    folder: Folder,
    requests: Arc<Mutex<Requests>>,
    _runtime: tokio::runtime::Runtime,
}

/// The requests that transitd got.
#[derive(Default)]
struct Requests {
    adds: Vec<AddRequest>,
    checks: Vec<CheckRequest>,
    gcs: Vec<GcRequest>,
}

struct Service {
    add: add_reply::Result,
    /// The answer of every verb but ADD.
    error: Option<CniError>,
    requests: Arc<Mutex<Requests>>,
}

#[tonic::async_trait]
impl Cni for Service {
    async fn add(&self, request: Request<AddRequest>) -> Result<Response<AddReply>, Status> {
        self.requests.lock().unwrap().adds.push(request.into_inner());
        Ok(Response::new(AddReply {
            result: Some(self.add.clone()),
        }))
    }
    async fn del(&self, _: Request<DelRequest>) -> Result<Response<DelReply>, Status> {
        let error = self.error.clone();
        Ok(Response::new(DelReply { error }))
    }
    async fn check(&self, request: Request<CheckRequest>) -> Result<Response<CheckReply>, Status> {
        self.requests.lock().unwrap().checks.push(request.into_inner());
        let error = self.error.clone();
        Ok(Response::new(CheckReply { error }))
    }
    async fn gc(&self, request: Request<GcRequest>) -> Result<Response<GcReply>, Status> {
        self.requests.lock().unwrap().gcs.push(request.into_inner());
        let error = self.error.clone();
        Ok(Response::new(GcReply { error }))
    }
    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let error = self.error.clone();
        Ok(Response::new(StatusReply { error }))
    }
}

/// A folder of one test, with the socket, the spool and what lies beside; removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("thuban-cni-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
    fn socket(&self) -> PathBuf {
        self.0.join("cni.sock")
    }
    fn spooled(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.0.join("spool")) else {
            return vec![];
        };
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn transitd(add: add_reply::Result, error: Option<CniError>) -> Transitd {
    let (folder, requests) = (Folder::new(), Arc::default());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let listener = {
        let _context = runtime.enter();
        tokio::net::UnixListener::bind(folder.socket()).unwrap()
    };
    let service = Service {
        add,
        error,
        requests: Arc::clone(&requests),
    };
    runtime.spawn(
        tonic::transport::Server::builder()
            .add_service(CniServer::new(service))
            .serve_with_incoming(tokio_stream::wrappers::UnixListenerStream::new(listener)),
    );
    Transitd {
        socket: folder.socket(),
        folder,
        requests,
        _runtime: runtime,
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

/// Runs the plugin. Returns its exit code and the whole of stdout.
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
    with(version, socket, json!({}))
}

/// Returns a configuration with more keys.
fn with(version: &str, socket: &std::path::Path, more: Value) -> String {
    let spool = socket.with_file_name("spool");
    let mut config = json!({"cniVersion": version, "name": "thuban", "type": "thuban", "socket": socket, "spool": spool, "x": 1});
    let Value::Object(more) = more else { unreachable!() };
    config.as_object_mut().unwrap().extend(more);
    config.to_string()
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
            "dns": {"nameservers": ["10.0.0.10"], "search": ["svc"]},
        });
        let dns = json!({"dns": {"nameservers": ["10.0.0.10"], "search": ["svc"]}});
        assert_eq!(
            parsed(&environment("ADD"), &with(version, &transitd.socket, dns)),
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
        network: "thuban".into(),
    };
    assert_eq!(transitd.requests.lock().unwrap().adds[0], expected);
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
        json!({"cniVersion": "1.1.0", "code": 101, "msg": "pod red/web is refused", "details": "why"});
    for (command, more) in [
        ("ADD", json!({})),
        ("DEL", json!({})),
        ("CHECK", json!({"prevResult": previous()})),
        ("GC", json!({"cni.dev/valid-attachments": []})),
        ("STATUS", json!({})),
    ] {
        assert_eq!(
            parsed(&environment(command), &with("1.1.0", &transitd.socket, more)),
            (1, expected.clone()),
            "{command}"
        );
    }
    assert_eq!(
        transitd.folder.spooled(),
        Vec::<PathBuf>::new(),
        "a DEL that fails is the runtime's to repeat"
    );
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

/// Returns the result of ADD as a runtime keeps it.
fn previous() -> Value {
    json!({
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "thb0"}, {"name": "eth0", "mac": "02:00:0a:00:01:05", "sandbox": "/run/netns/x"}],
        "ips": [{"interface": 1, "address": "10.0.1.5/24"}],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.1.1"}],
    })
}

#[test]
fn without_transitd_an_add_is_to_be_tried_again() {
    let folder = Folder::new();
    for (command, more) in [("ADD", json!({})), ("CHECK", json!({"prevResult": previous()}))] {
        let (code, error) = parsed(&environment(command), &with("1.0.0", &folder.socket(), more));
        assert_eq!((code, &error["code"]), (1, &json!(11)));
        assert!(
            error["msg"]
                .as_str()
                .unwrap()
                .contains("transitd does not answer"),
            "{error}"
        );
    }
}

#[test]
fn repeated_del_without_transitd_is_spooled_once() {
    let folder = Folder::new();
    // First nobody listens; then somebody listens who never answers.
    for hangs in [false, false, true] {
        let _listener = hangs.then(|| std::os::unix::net::UnixListener::bind(folder.socket()).unwrap());
        let start = std::time::Instant::now();
        assert_eq!(
            run(&environment("DEL"), &config("1.0.0", &folder.socket())),
            (0, String::new())
        );
        assert!(
            start.elapsed() < std::time::Duration::from_secs(2),
            "{:?}",
            start.elapsed()
        );
    }
    let spooled = folder.spooled();
    assert_eq!(spooled, [folder.0.join("spool/c1_eth0.del")]);
    let del = SpooledDel::decode(&*std::fs::read(&spooled[0]).unwrap()).unwrap();
    assert_eq!((del.container_id.as_str(), del.ifname.as_str()), ("c1", "eth0"));
    assert_eq!(del.netns, "/run/netns/x");
    assert!(del.asked_at > 0 && del.boot_id.len() == 36, "{del:?}");
}

#[test]
fn the_spool_is_bounded_and_what_is_in_it_can_still_be_repeated() {
    let folder = Folder::new();
    std::fs::create_dir(folder.0.join("spool")).unwrap();
    for number in 0..1024 {
        std::fs::write(folder.0.join(format!("spool/{number}_eth0.del")), "").unwrap();
    }
    let (exit, error) = parsed(&environment("DEL"), &config("1.0.0", &folder.socket()));
    assert_eq!((exit, &error["code"]), (1, &json!(11)), "{error}");
    assert!(
        !error.to_string().contains("not found"),
        "runtimes take that for success: {error}"
    );
    std::fs::write(folder.0.join("spool/c1_eth0.del"), "").unwrap();
    assert_eq!(run(&environment("DEL"), &config("1.0.0", &folder.socket())).0, 0);
    // Where there can be no spool, the runtime repeats it.
    let nowhere = with("1.0.0", &folder.socket(), json!({"spool": "/dev/null/spool"}));
    let (exit, error) = parsed(&environment("DEL"), &nowhere);
    assert_eq!((exit, &error["code"]), (1, &json!(5)), "{error}");
}

#[test]
fn status_tolerates_brief_absence_if_served_this_boot() {
    let folder = Folder::new();
    let status = || run(&environment("STATUS"), &config("1.1.0", &folder.socket()));
    let code = || {
        let (exit, text) = status();
        assert_eq!(exit, 1);
        serde_json::from_str::<Value>(&text).unwrap()["code"].clone()
    };
    assert_eq!(code(), 50, "never served");
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let boot_id = boot_id.trim();
    std::fs::write(folder.0.join("served"), "another boot").unwrap();
    assert_eq!(code(), 50, "served before the node was started again");
    std::fs::write(folder.0.join("served"), boot_id).unwrap();
    assert_eq!(status(), (0, String::new()));
    assert_eq!(status(), (0, String::new()));
    let away = std::fs::read_to_string(folder.0.join("away")).unwrap();
    let since: u64 = away.trim().split_once(' ').unwrap().1.parse().unwrap();
    std::fs::write(folder.0.join("away"), format!("{boot_id} {}", since - 121)).unwrap();
    assert_eq!(code(), 50, "away for too long");
    std::fs::write(folder.0.join("away"), format!("{boot_id} {}", since - 60)).unwrap();
    assert_eq!(status(), (0, String::new()));
    // A transitd that hangs is away too, and that is found out within a second.
    let _listener = std::os::unix::net::UnixListener::bind(folder.socket()).unwrap();
    let start = std::time::Instant::now();
    assert_eq!(status(), (0, String::new()));
    assert!(start.elapsed() < std::time::Duration::from_millis(1500));
}

#[test]
fn good_status_is_passed_on_and_clears_the_absence() {
    let good = transitd(attached(), None);
    std::fs::write(good.folder.0.join("away"), "x").unwrap();
    assert_eq!(
        run(&environment("STATUS"), &config("1.1.0", &good.socket)),
        (0, String::new())
    );
    assert!(!good.folder.0.join("away").exists());
    let (exit, error) = parsed(&environment("STATUS"), &config("1.0.0", &good.socket));
    assert_eq!((exit, &error["code"]), (1, &json!(1)), "STATUS is not in 1.0.0");
}

#[test]
fn check_tells_transitd_what_the_runtime_remembers() {
    let transitd = transitd(attached(), None);
    let input = with("0.4.0", &transitd.socket, json!({"prevResult": previous()}));
    assert_eq!(run(&environment("CHECK"), &input), (0, String::new()));
    let request = transitd.requests.lock().unwrap().checks[0].clone();
    assert_eq!(
        (request.container_id.as_str(), request.netns.as_str()),
        ("c1", "/run/netns/x")
    );
    let previous = request.previous.unwrap();
    assert_eq!(previous.host_interfaces, ["thb0"]);
    assert_eq!(previous.addresses, ["10.0.1.5/24"]);
}

#[test]
fn gc_needs_a_list_and_an_absent_one_is_not_empty() {
    let transitd = transitd(attached(), None);
    let gc = |more: Value| run(&[("CNI_COMMAND", "GC")], &with("1.1.0", &transitd.socket, more));
    let list = json!([{"containerID": "c1", "ifname": "eth0", "more": 1}]);
    assert_eq!(gc(json!({"cni.dev/valid-attachments": list})), (0, String::new()));
    assert_eq!(gc(json!({"cni.dev/attachments": list})), (0, String::new()));
    assert_eq!(gc(json!({"cni.dev/valid-attachments": []})), (0, String::new()));
    for absent in [json!({}), json!({"cni.dev/valid-attachments": null})] {
        let (exit, text) = gc(absent);
        assert!(
            exit == 1 && text.contains("cni.dev/valid-attachments") && text.contains("\"code\":7"),
            "{text}"
        );
    }
    assert!(
        gc(json!({"cni.dev/valid-attachments": ["c1"]}))
            .1
            .contains("\"code\":6")
    );
    let gcs = &transitd.requests.lock().unwrap().gcs;
    let key = AttachmentKey {
        container_id: "c1".into(),
        ifname: "eth0".into(),
    };
    assert_eq!(gcs.len(), 3, "the others never came to transitd");
    assert_eq!(
        (gcs[0].network.as_str(), &gcs[0].valid, &gcs[1].valid),
        ("thuban", &vec![key.clone()], &vec![key])
    );
    assert!(gcs[2].valid.is_empty());
}

#[test]
fn version_tells_what_is_supported() {
    let expected = json!({"cniVersion": "1.1.0", "supportedVersions": ["0.4.0", "1.0.0", "1.1.0"]});
    assert_eq!(
        parsed(&[("CNI_COMMAND", "VERSION")], r#"{"cniVersion":"1.1.0"}"#),
        (0, expected)
    );
    let (exit, answer) = parsed(&[("CNI_COMMAND", "VERSION")], r#"{"cniVersion":"9.0.0"}"#);
    assert_eq!(
        (exit, &answer["cniVersion"]),
        (0, &json!("9.0.0")),
        "that is the question's"
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
        (environment("CHECK"), good, 7, "prevResult"),
        (environment("GC"), good, 1, "1.1.0"),
        (
            environment("ADD"),
            r#"{"cniVersion":"1.2.0","name":"n"}"#,
            1,
            "0.4.0, 1.0.0, 1.1.0",
        ),
        (
            environment("ADD"),
            r#"{"cniVersion":"1.0.0","name":"n","prevResult":{}}"#,
            7,
            "first plugin",
        ),
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

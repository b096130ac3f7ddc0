//! One node: a network namespace with an uplink, a bpffs, a transitd process, pods as namespaces.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use serde_json::Value;
use thuban_common::tables::LAYOUT_VERSION;
use thuban_proto::cni::cni_client::CniClient;
use thuban_proto::cni::{AddRequest, Attached, CniError, DelRequest, add_reply};
use thuban_proto::transit::row::Row;
use thuban_testkit::namespace::inside;
use thuban_testkit::packets::checksum;
use thuban_testkit::transitd::Files;
use thuban_testkit::wait::{uninterrupted, wait_for, wait_until};
use tonic::transport::{Endpoint, Uri};

use crate::operator::IN_THE_END;
use crate::operator::Operator;
pub use crate::rows::{base_rows, deny_all, dual, dual_rows, judged, local, mapped};

/// How long an answer may take on a busy machine.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(1500);
static NEXT: AtomicU32 = AtomicU32::new(0);
/// The node's address on its uplink.
pub const NODE: [u8; 4] = [192, 0, 2, 1];

pub struct Rig {
    pub name: String,
    pub directory: PathBuf,
    pub operator: Operator,
    pub flags: Vec<String>,
    /// The daemon's environment.
    pub environment: Vec<(String, String)>,
    /// The object file with the programs.
    pub programs: PathBuf,
    files: Files,
    namespaces: Vec<String>,
    daemon: Option<Child>,
}

impl Rig {
    /// Makes a node with its daemon running and the first snapshot applied.
    pub fn new(rows: Vec<Row>) -> Self {
        let mut rig = Self::prepare(rows);
        rig.start();
        rig.operator.wait_for_ack();
        rig
    }

    /// Makes a node without a daemon.
    pub fn prepare(rows: Vec<Row>) -> Self {
        assert!(nix::unistd::Uid::effective().is_root(), "these tests need root");
        let name = format!(
            "thd{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let directory = std::env::temp_dir().join(&name);
        let files = Files::make(&directory).unwrap();
        std::fs::create_dir_all(directory.join("bin")).unwrap();
        std::fs::write(directory.join("plugin"), "#!/bin/sh\n").unwrap();
        sh(&format!("mount -t bpf {name} {}", files.bpffs().display()));
        let node = format!("{name}-n");
        sh(&format!("ip netns add {node} && ip -n {node} link set lo up"));
        sh(&format!(
            "ip netns add {name}-u && ip link add up0 netns {node} type veth peer name far netns {name}-u
             ip -n {node} address add 192.0.2.1/24 dev up0 && ip -n {node} link set up0 up
             ip -n {name}-u address add 192.0.2.2/24 dev far && ip -n {name}-u link set far up
             ip netns exec {node} sysctl -qw net.ipv4.ip_forward=1"
        ));
        let listener = in_namespace(&node, || std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let operator = Operator::start(listener, &directory, rows);
        let namespaces = vec![node, format!("{name}-u")];
        Self {
            name,
            directory,
            files,
            operator,
            flags: vec![],
            environment: vec![],
            programs: Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bpf/thuban-programs.o"),
            namespaces,
            daemon: None,
        }
    }

    pub fn node(&self) -> &str {
        &self.namespaces[0]
    }

    /// Returns the namespace at the other end of the uplink: 192.0.2.2, any other droplet.
    pub fn far(&self) -> &str {
        &self.namespaces[1]
    }

    pub fn start(&mut self) {
        self.operator.forget_received();
        let programs = &self.programs;
        assert!(
            programs.exists(),
            "build the programs first: cargo xtask build-ebpf"
        );
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net=/run/netns/{}", self.node()))
            // The daemon runs as root with the capabilities of the DaemonSet's container and no others.
            .args([
                "setpriv",
                "--bounding-set=-all,+bpf,+net_admin,+perfmon,+sys_admin",
            ])
            .arg(env!("CARGO_BIN_EXE_transitd"))
            .args(
                self.files
                    .arguments(("node-t", "192.0.2.1"), programs, &self.operator),
            )
            .args(["--add-deadline", "8", "--scan-interval", "1"])
            .arg("--cni-binary")
            .arg(self.directory.join("plugin"))
            .arg("--cni-bin-dir")
            .arg(self.directory.join("bin"))
            .args(&self.flags)
            .env("RUST_BACKTRACE", "0")
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(self.files.log().unwrap());
        self.daemon = Some(command.spawn().unwrap());
    }

    /// Kills the daemon with SIGKILL, like a crash.
    pub fn kill(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.kill().unwrap();
            daemon.wait().unwrap();
        }
    }

    /// Whether the daemon has ended.
    pub fn is_dead(&mut self) -> bool {
        self.daemon
            .as_mut()
            .is_none_or(|daemon| daemon.try_wait().unwrap().is_some())
    }

    /// Removes a pod's namespace, as a runtime does with its sandbox.
    pub fn remove_namespace(&mut self, pod: &str) {
        let name = format!("{}-{pod}", self.name);
        sh(&format!("ip netns del {name}"));
        self.namespaces.retain(|other| *other != name);
    }

    pub fn daemon_id(&self) -> u32 {
        self.daemon.as_ref().unwrap().id()
    }

    /// Waits until the daemon ends by itself; returns its exit code.
    pub fn wait_for_exit(&mut self) -> Option<i32> {
        let daemon = self.daemon.as_mut().unwrap();
        let pause = Duration::from_millis(20);
        let ended = wait_until("the daemon's end", IN_THE_END, pause, || Ok(daemon.try_wait()?));
        ended.unwrap().code()
    }

    pub fn log(&self) -> String {
        self.files.read_log()
    }

    /// Makes a namespace for a pod; returns its path.
    pub fn pod_namespace(&mut self, pod: &str) -> String {
        let name = format!("{}-{pod}", self.name);
        sh(&format!("ip netns add {name} && ip -n {name} link set lo up"));
        self.namespaces.push(name.clone());
        format!("/run/netns/{name}")
    }

    pub fn add(&self, container: &str, pod_uid: &str, netns: &str) -> Result<Attached, CniError> {
        let request = AddRequest {
            container_id: container.into(),
            netns: netns.into(),
            ifname: "eth0".into(),
            pod_namespace: "ns".into(),
            pod_name: pod_uid.into(),
            pod_uid: pod_uid.into(),
            network: String::new(),
        };
        match self
            .call(async |mut client| client.add(request).await.unwrap().into_inner())
            .result
            .unwrap()
        {
            add_reply::Result::Attached(attached) => Ok(attached),
            add_reply::Result::Error(error) => Err(error),
        }
    }

    /// Makes a pod with its namespace and attaches it; the container has the pod's name.
    pub fn add_pod(&mut self, uid: &str) -> Attached {
        let netns = self.pod_namespace(uid);
        self.add(uid, uid, &netns)
            .unwrap_or_else(|error| panic!("{error:?}\n{}", self.log()))
    }

    pub fn del(&self, container: &str) -> Option<CniError> {
        let request = DelRequest {
            container_id: container.into(),
            netns: String::new(),
            ifname: "eth0".into(),
        };
        self.call(async |mut client| client.del(request).await.unwrap().into_inner())
            .error
    }

    pub fn call<T>(&self, call: impl AsyncFnOnce(CniClient<tonic::transport::Channel>) -> T) -> T {
        self.call_at(self.directory.join("run/cni.sock"), call)
    }

    pub fn call_at<T>(
        &self,
        socket: PathBuf,
        call: impl AsyncFnOnce(CniClient<tonic::transport::Channel>) -> T,
    ) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let connector = tower::service_fn(move |_: Uri| {
                let socket = socket.clone();
                async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
            });
            let channel = Endpoint::from_static("http://transitd")
                .connect_with_connector(connector)
                .await;
            call(CniClient::new(
                channel.unwrap_or_else(|e| panic!("{e}\n{}", self.log())),
            ))
            .await
        })
    }

    /// Returns the folder of the pins of this layout of maps.
    pub fn pins(&self) -> PathBuf {
        self.directory.join(format!("bpf/thuban/layout_{LAYOUT_VERSION}"))
    }

    /// Runs a command in the node's namespace.
    pub fn on_node(&self, command: &str) -> String {
        let output = Self::try_in(self.node(), command);
        assert!(output.status.success(), "{command}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command at the other end of the uplink.
    pub fn on_far(&self, command: &str) {
        let output = Self::try_in(self.far(), command);
        assert!(output.status.success(), "{command}: {output:?}");
    }

    /// Runs a command in a pod's namespace; returns whether it succeeded.
    pub fn in_pod(&self, pod: &str, command: &str) -> bool {
        Self::try_in(&format!("{}-{pod}", self.name), command)
            .status
            .success()
    }

    pub fn in_pod_text(&self, pod: &str, command: &str) -> String {
        String::from_utf8(Self::try_in(&format!("{}-{pod}", self.name), command).stdout).unwrap()
    }

    /// Whether both of two echo requests of the pod are answered.
    pub fn ping(&self, pod: &str, address: &str) -> bool {
        pings(&format!("{}-{pod}", self.name), None, address)
    }

    /// Sends echo requests to an address that may belong to nobody.
    pub fn send_pings(&self, pod: &str, address: &str, count: u16) {
        let namespace = format!("{}-{pod}", self.name);
        ping(&namespace, None, address, count, Duration::from_millis(100));
    }

    /// Does the same as [`Self::ping`], from another source address of the pod.
    pub fn ping_from(&self, pod: &str, source: &str, address: &str) -> bool {
        let namespace = format!("{}-{pod}", self.name);
        ping(&namespace, Some(source), address, 2, ANSWER_TIMEOUT) > 0
    }

    pub fn ping_from_node(&self, address: &str) -> bool {
        pings(self.node(), None, address)
    }

    /// Whether a pod (none: the node) can open a TCP connection to `address` of the pod `server` that carries a byte
    /// each way.
    pub fn connects(&self, client: Option<&str>, server: &str, address: &str) -> bool {
        use std::io::{Read, Write};
        let address: IpAddr = address.parse().unwrap();
        let server = format!("{}-{server}", self.name);
        let client = client.map_or(self.node().to_owned(), |pod| format!("{}-{pod}", self.name));
        let listener = in_namespace(&server, || {
            std::net::TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap()
        });
        let port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        let connecting = std::thread::spawn(move || {
            in_namespace(&client, move || -> std::io::Result<u8> {
                let mut stream =
                    std::net::TcpStream::connect_timeout(&(address, port).into(), ANSWER_TIMEOUT)?;
                stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
                stream.write_all(&[7])?;
                let mut answer = [0];
                stream.read_exact(&mut answer)?;
                Ok(answer[0])
            })
        });
        let deadline = Instant::now() + ANSWER_TIMEOUT * 2;
        while Instant::now() < deadline && !connecting.is_finished() {
            if let Ok((mut stream, _)) = listener.accept() {
                stream.set_nonblocking(false).unwrap();
                stream.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
                let mut word = [0];
                if stream.read_exact(&mut word).is_ok() {
                    let _ = stream.write_all(&[word[0] + 1]);
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        connecting.join().unwrap().is_ok_and(|answer| answer == 8)
    }

    pub fn try_in(namespace: &str, command: &str) -> Output {
        Command::new("ip")
            .args(["netns", "exec", namespace, "sh", "-c", command])
            .output()
            .unwrap()
    }

    /// Returns the rows of one table, as `transitd rows` prints them.
    pub fn rows(&self, table: &str) -> Vec<Value> {
        let bpffs = self.directory.join("bpf");
        let output = Command::new(env!("CARGO_BIN_EXE_transitd"))
            .arg("rows")
            .arg("--bpffs")
            .arg(bpffs)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let lines = String::from_utf8(output.stdout).unwrap();
        let rows = lines
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        rows.filter(|row| row["table"] == table).collect()
    }

    pub fn counter(&self, name: &str) -> u64 {
        let bpffs = self.directory.join("bpf");
        let output = Command::new(env!("CARGO_BIN_EXE_transitd"))
            .arg("counters")
            .arg("--bpffs")
            .arg(bpffs)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()[name]
            .as_u64()
            .unwrap()
    }

    /// Returns a verb of transitd that looks at this node, in the node's namespace.
    pub fn verb(&self, verb: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net=/run/netns/{}", self.node()))
            .arg(env!("CARGO_BIN_EXE_transitd"))
            .arg(verb)
            .arg("--bpffs")
            .arg(self.files.bpffs())
            .arg("--state-dir")
            .arg(self.files.state())
            .arg("--socket")
            .arg(self.files.socket());
        command
    }

    /// Returns everything that attachments leave, in one list: empty when there is none.
    pub fn traces(&self) -> Vec<String> {
        let mut traces: Vec<String> = Vec::new();
        let mut note = |what: &str, found: Vec<String>| {
            traces.extend(found.iter().map(|line| format!("{what}: {line}")));
        };
        let lines = |command: &str| self.on_node(command).lines().map(ToOwned::to_owned).collect();
        note("link", lines("ip -o link | grep thb[0-9a-f] || true"));
        for family in ["-4", "-6"] {
            note(
                "route",
                lines(&format!("ip {family} route show table 6081 || true")),
            );
            note(
                "neighbour",
                lines(&format!(
                    "ip {family} neighbour show nud permanent | grep thb || true"
                )),
            );
        }
        note(
            "address",
            lines("ip -o -6 address show | grep fe80::5468 || true"),
        );
        for table in ["ATTACHMENTS", "LOCAL_ENDPOINTS"] {
            note("row", self.rows(table).iter().map(ToString::to_string).collect());
        }
        let files = |part: &str| -> Vec<String> {
            let entries = std::fs::read_dir(self.directory.join(part)).unwrap();
            entries
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect()
        };
        note("file", files("state/attachments"));
        let mut pins = files(&format!("bpf/thuban/layout_{LAYOUT_VERSION}/links"));
        pins.retain(|pin| pin.starts_with("agent"));
        note("pin", pins);
        traces
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- transitd's log\n{}", self.log());
        }
        for namespace in &self.namespaces {
            let _ = Command::new("ip").args(["netns", "del", namespace]).status();
        }
        let _ = Command::new("umount").arg(self.files.bpffs()).status();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Runs on a thread of its own in that namespace.
pub fn in_namespace<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let file = File::open(format!("/run/netns/{name}")).unwrap();
    inside(file, || Ok(work())).unwrap()
}

/// Whether two echo requests in a row are answered.
fn pings(namespace: &str, source: Option<&str>, address: &str) -> bool {
    (0..2).all(|_| ping(namespace, source, address, 1, ANSWER_TIMEOUT) == 1)
}

/// Sends ICMP echo requests from a namespace. Returns how many were answered, each within `patience`.
pub fn ping(namespace: &str, source: Option<&str>, address: &str, count: u16, patience: Duration) -> u16 {
    use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, SockaddrIn, bind, socket};
    let target: Ipv4Addr = address.parse().unwrap();
    let source: Option<Ipv4Addr> = source.map(|source| source.parse().unwrap());
    in_namespace(namespace, move || {
        let raw = socket(
            AddressFamily::Inet,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::Icmp,
        )
        .unwrap();
        if let Some(source) = source {
            let [a, b, c, d] = source.octets();
            bind(
                std::os::fd::AsRawFd::as_raw_fd(&raw),
                &SockaddrIn::new(a, b, c, d, 0),
            )
            .unwrap();
        }
        // send_to and recv_from are the same calls for a raw socket.
        let socket = std::net::UdpSocket::from(raw);
        let identifier =
            (std::process::id() as u16 ^ NEXT.fetch_add(1, Ordering::Relaxed) as u16).to_be_bytes();
        let mut answered = 0;
        for sequence in 0..count {
            let number = sequence.to_be_bytes();
            let mut packet = vec![8, 0, 0, 0, identifier[0], identifier[1], number[0], number[1]];
            let sum = checksum(&packet).to_be_bytes();
            packet[2..4].copy_from_slice(&sum);
            let deadline = Instant::now() + patience;
            if socket.send_to(&packet, (target, 0)).is_ok() {
                let mut buffer = [0; 256];
                while let Some(left) = deadline
                    .checked_duration_since(Instant::now())
                    .filter(|left| !left.is_zero())
                {
                    socket.set_read_timeout(Some(left)).unwrap();
                    let Ok((length, from)) = uninterrupted(|| socket.recv_from(&mut buffer)) else {
                        break;
                    };
                    let reply = &buffer[20..length];
                    if from.ip() == target
                        && reply[0] == 0
                        && reply[4..6] == identifier
                        && reply[6..8] == number
                    {
                        answered += 1;
                        break;
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        answered
    })
}

fn sh(script: &str) {
    let status = Command::new("sh").args(["-ec", script]).status().unwrap();
    assert!(status.success(), "{script}");
}

/// Waits until a condition holds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    wait_for(what, IN_THE_END, Duration::from_millis(100), || Ok(holds())).unwrap();
}

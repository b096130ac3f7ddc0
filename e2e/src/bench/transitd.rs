//! transitd and the plugin as images have them, on a node of its own with an uplink, with rows from a played operator.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::json;
use thuban_proto::transit::{droplet_message::Message, row::Row};
use thuban_testkit::{
    operator::{IN_THE_END, Operator},
    transitd::Files,
    wait::wait_until,
};

use super::{
    controlplane::process::usage,
    node::{Bpffs, Folder},
    plugin::Plugin,
};
use crate::{programs, rig::namespace::Namespace};

/// The node's address.
pub const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// Where transitd serves its metrics, in the node's namespace.
const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 6084);
const LOOK: Duration = Duration::from_millis(20);

/// The programs that are run.
#[derive(Clone, Debug, clap::Args)]
pub struct Parts {
    /// Release binary of transitd
    #[arg(long, hide = true)]
    pub transitd: PathBuf,
    /// Release binary of the CNI plugin
    #[arg(long, hide = true)]
    pub plugin: PathBuf,
    /// Object file with the eBPF programs
    #[arg(long, hide = true)]
    pub programs: PathBuf,
}

impl Parts {
    /// Returns what cargo built beside the binary of the calling test.
    pub fn of_tests() -> Result<Self> {
        let test = std::env::current_exe().context("finding this test's binary")?;
        let folder = test
            .ancestors()
            .nth(2)
            .context("the folder of cargo's binaries")?;
        Ok(Self {
            transitd: folder.join("transitd"),
            plugin: folder.join("thuban"),
            programs: programs::object(),
        })
    }
}

pub struct Transitd {
    pub plugin: Plugin,
    pub operator: Operator,
    pub node: Namespace,
    /// The other end of the uplink: interface `far`.
    pub far: Namespace,
    daemon: Child,
    _bpffs: Bpffs,
    files: Files,
    _folder: Folder,
}

impl Transitd {
    /// Brings up a node with these rows, which exist before the first pod, and with variables of its environment.
    pub fn up(parts: &Parts, rows: Vec<Row>, environment: &[(&str, String)]) -> Result<Self> {
        let folder = Folder::new("thuban")?;
        let (node, far) = (Namespace::new("node")?, Namespace::new("far")?);
        node.command(&format!(
            "ip link add up0 type veth peer name far netns {}",
            far.name()
        ))?;
        node.command(&format!("ip address add {NODE}/24 dev up0"))?;
        node.command("ip link set up0 up")?;
        far.command("ip link set far up")?;
        let files = Files::make(folder.path())?;
        let bpffs = Bpffs::new(files.bpffs())?;
        let listener = node.run(|| Ok(TcpListener::bind("127.0.0.1:0")?))?;
        let operator = Operator::start(listener, folder.path(), rows);
        let address = NODE.to_string();
        let mut command = Command::new(&parts.transitd);
        command
            .args(files.arguments(("bench", &address), &parts.programs, &operator))
            .args(["--metrics-port", &METRICS.port().to_string()])
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(files.log()?);
        let daemon = node.run(|| command.spawn().context("starting transitd"))?;
        let configuration = json!({
            "cniVersion": "1.0.0", "name": "thuban", "type": "thuban", "socket": files.socket(), "spool": files.state().join("spool"),
        });
        let mut transitd = Self {
            plugin: Plugin::new(&parts.plugin, &configuration),
            operator,
            node,
            far,
            daemon,
            _bpffs: bpffs,
            files,
            _folder: folder,
        };
        transitd.wait()?;
        Ok(transitd)
    }

    /// Waits until the first snapshot is applied.
    fn wait(&mut self) -> Result<()> {
        wait_until("transitd to apply its rows", IN_THE_END, LOOK, || {
            let is_done = self.operator.count(|message| matches!(message, Message::Ack(_))) > 0;
            if !is_done && let Some(status) = self.daemon.try_wait()? {
                bail!("transitd has ended: {status}\n{}", self.files.read_log());
            }
            Ok(is_done.then_some(()))
        })
    }

    /// Returns transitd's metrics by series, without the prefix that all names have.
    pub fn metrics(&self) -> Result<BTreeMap<String, u64>> {
        let ask = || {
            let mut stream = TcpStream::connect_timeout(&METRICS, IN_THE_END)?;
            stream.set_read_timeout(Some(IN_THE_END))?;
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n")?;
            let mut page = String::new();
            stream.read_to_string(&mut page)?;
            Ok(page)
        };
        let page = self.node.run(ask).context("asking transitd for its metrics")?;
        let series = page.lines().filter_map(|line| {
            let (series, value) = line.strip_prefix("thuban_transitd_")?.rsplit_once(' ')?;
            Some((series.to_owned(), value.parse().ok()?))
        });
        Ok(series.collect())
    }

    pub fn memory_mib(&self) -> Result<f64> {
        Ok(usage(self.daemon.id())?.rss_mib)
    }
}

impl Drop for Transitd {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

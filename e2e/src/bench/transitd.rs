//! transitd and the plugin as images have them, on a node of its own with an uplink, with rows from a played operator.

use std::{
    fs::File,
    net::{Ipv4Addr, TcpListener},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::json;
use thuban_proto::transit::{droplet_message::Message, row::Row};
use thuban_testkit::operator::Operator;

use super::{
    controlplane::process::usage,
    node::{Bpffs, Folder},
    plugin::Plugin,
};
use crate::rig::namespace::Namespace;

/// The node's address.
pub const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

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

pub struct Transitd {
    pub plugin: Plugin,
    pub operator: Operator,
    pub node: Namespace,
    /// The other end of the uplink: interface `far`.
    pub far: Namespace,
    daemon: Child,
    _bpffs: Bpffs,
    folder: Folder,
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
        let bpffs = Bpffs::new(folder.part("bpf")?)?;
        let listener = node.run(|| Ok(TcpListener::bind("127.0.0.1:0")?))?;
        let operator = Operator::start(listener, folder.path(), rows);
        let socket = folder.part("run")?.join("cni.sock");
        let state = folder.part("state")?;
        let token = folder.path().join("token");
        std::fs::write(&token, "a-token\n")?;
        let log = File::create(folder.path().join("log"))?;
        let mut command = Command::new(&parts.transitd);
        command
            .args(["run", "--node-name", "bench", "--node-ip", &NODE.to_string()])
            .arg("--programs")
            .arg(&parts.programs)
            .arg("--bpffs")
            .arg(bpffs.path())
            .arg("--state-dir")
            .arg(&state)
            .arg("--socket")
            .arg(&socket)
            .args(["--operator-address", &operator.address])
            .arg("--operator-ca")
            .arg(&operator.ca)
            .arg("--token-file")
            .arg(&token)
            .arg("--cni-conf-dir")
            .arg(folder.part("conf")?)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let daemon = node.run(|| command.spawn().context("starting transitd"))?;
        let configuration = json!({
            "cniVersion": "1.0.0", "name": "thuban", "type": "thuban", "socket": socket, "spool": state.join("spool"),
        });
        let mut transitd = Self {
            plugin: Plugin::new(&parts.plugin, &configuration),
            operator,
            node,
            far,
            daemon,
            _bpffs: bpffs,
            folder,
        };
        transitd.wait()?;
        Ok(transitd)
    }

    /// Waits until the first snapshot is applied.
    fn wait(&mut self) -> Result<()> {
        for _ in 0..500 {
            if self.operator.count(|message| matches!(message, Message::Ack(_))) > 0 {
                return Ok(());
            }
            if let Some(status) = self.daemon.try_wait()? {
                let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
                bail!("transitd has ended: {status}\n{log}");
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        bail!("transitd has not applied its rows")
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

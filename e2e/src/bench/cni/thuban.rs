//! Thuban: the plugin and transitd as images have them, on a node with an uplink, with rows from a played operator.
//!
//! The rows of all pods are there before, as on a node whose operator is quicker than its runtime: what is measured is
//! the plugin and transitd.

use std::{
    fs::File,
    net::Ipv4Addr,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::json;
use thuban_proto::transit::{DropletRow, LocalRow, NetworkRow, VpcRow, row::Row};
use thuban_testkit::operator::Operator;

use super::{
    Parts,
    contestant::{Contestant, Pod},
    node::{Bpffs, Folder},
    plugin::Plugin,
};
use crate::{bench::controlplane::process::usage, rig::namespace::Namespace};

const NODE: [u8; 4] = [192, 0, 2, 1];
const VNI: u32 = 7;
const NETWORK: u32 = 0x0a00_0000;

pub struct Thuban {
    plugin: Plugin,
    daemon: Child,
    operator: Operator,
    _bpffs: Bpffs,
    node: Namespace,
    _far: Namespace,
    folder: Folder,
}

impl Thuban {
    /// With rows for so many pods.
    pub fn up(parts: &Parts, pods: usize) -> Result<Self> {
        let folder = Folder::new("thuban")?;
        let (node, far) = (Namespace::new("node")?, Namespace::new("far")?);
        node.command(&format!(
            "ip link add up0 type veth peer name far netns {}",
            far.name()
        ))?;
        node.command("ip address add 192.0.2.1/24 dev up0")?;
        node.command("ip link set up0 up")?;
        far.command("ip link set far up")?;
        let bpffs = Bpffs::new(folder.part("bpf")?)?;
        let listener = node.run(|| Ok(std::net::TcpListener::bind("127.0.0.1:0")?))?;
        let operator = Operator::start(listener, folder.path(), rows(pods));
        let socket = folder.part("run")?.join("cni.sock");
        let state = folder.part("state")?;
        let token = folder.path().join("token");
        std::fs::write(&token, "a-token\n")?;
        let log = File::create(folder.path().join("log"))?;
        let mut command = Command::new(&parts.transitd);
        command
            .args(["run", "--node-name", "bench", "--node-ip", "192.0.2.1"])
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
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let daemon = node.run(|| command.spawn().context("starting transitd"))?;
        let configuration = json!({
            "cniVersion": "1.0.0", "name": "thuban", "type": "thuban", "socket": socket, "spool": state.join("spool"),
        });
        let plugin = Plugin::new(&parts.plugin, &configuration);
        let mut thuban = Self {
            plugin,
            daemon,
            operator,
            _bpffs: bpffs,
            node,
            _far: far,
            folder,
        };
        thuban.wait()?;
        Ok(thuban)
    }

    /// Until the first snapshot is applied.
    fn wait(&mut self) -> Result<()> {
        for _ in 0..500 {
            let has_acked = self
                .operator
                .count(|message| matches!(message, thuban_proto::transit::droplet_message::Message::Ack(_)));
            if has_acked > 0 {
                return Ok(());
            }
            if let Some(status) = self.daemon.try_wait()? {
                let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
                bail!("transitd has ended: {status}\n{log}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("transitd has not applied its rows")
    }

    pub fn memory_mib(&self) -> Result<f64> {
        Ok(usage(self.daemon.id())?.rss_mib)
    }
}

impl Drop for Thuban {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Contestant for Thuban {
    fn name(&self) -> &'static str {
        "thuban"
    }

    fn node(&self) -> &Namespace {
        &self.node
    }

    fn add_here(&self, pod: &Pod) -> Result<Duration> {
        self.plugin.call("ADD", pod)
    }

    fn del_here(&self, pod: &Pod) -> Result<Duration> {
        self.plugin.call("DEL", pod)
    }
}

/// One VPC, one network, all roles here.
fn rows(pods: usize) -> Vec<Row> {
    let mut rows = vec![
        Row::Droplet(DropletRow {
            address: NODE.to_vec(),
        }),
        Row::Vpc(VpcRow {
            vni: VNI,
            cidrs: vec!["10.0.0.0/16".into()],
            dividers: vec![NODE.to_vec()],
            divider_here: true,
            ..VpcRow::default()
        }),
        Row::Network(NetworkRow {
            vni: VNI,
            network: NETWORK,
            cidrs: vec!["10.0.0.0/16".into()],
            bouncers: vec![NODE.to_vec()],
            bouncer_here: true,
            ..NetworkRow::default()
        }),
    ];
    rows.extend((0..pods).map(|number| {
        let [high, low] = (number as u16 + 2).to_be_bytes();
        let uid = format!("bench-{number}");
        Row::Local(LocalRow {
            vni: VNI,
            address: Ipv4Addr::new(10, 0, high, low).to_ipv6_mapped().octets().to_vec(),
            network: NETWORK,
            prefix_length: 16,
            gateway: "10.0.0.1".into(),
            mac: vec![2, 7, 10, 0, high, low],
            pod_uid: uid.clone(),
            pod_namespace: "bench".into(),
            pod_name: uid,
            vpc_name: "bench".into(),
            network_name: "bench".into(),
            ready: true,
            ..LocalRow::default()
        })
    }));
    rows
}

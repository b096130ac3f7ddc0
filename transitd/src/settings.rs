//! The daemon's flags. Every one has an environment variable, so that one ConfigMap feeds the DaemonSet.
//!
//! Every path is a flag: tests run a whole transitd inside namespaces of their own.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use thuban_common::tables::LAYOUT_VERSION;

use crate::dns::{self, Domain};
use crate::netfilter::nft::Nft;

/// Where transit runs on the uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransitHookChoice {
    Auto,
    Xdp,
    Tc,
}

/// Where the agent runs on a pod's veth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AgentHook {
    Tc,
    Xdp,
}

/// Whether received segments are aggregated before transit at tc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Aggregation {
    Auto,
    Never,
}

/// Whether destinations of flows that stay are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DirectPaths {
    Auto,
    Never,
}

/// Whom metrics are served to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MetricsAddress {
    /// Processes of this node, at 127.0.0.1.
    Loopback,
    /// Whoever reaches the node's address.
    Node,
}

/// Where the pinned maps and links are.
#[derive(Args, Clone, Debug)]
pub struct PinSettings {
    /// The bpffs of this node.
    #[arg(long, env = "THUBAN_BPFFS", default_value = "/sys/fs/bpf", global = true)]
    pub bpffs: PathBuf,
    /// Number of the layout of maps that the programs were built for; another one than this build's is for tests of
    /// upgrades.
    #[arg(long, env = "THUBAN_LAYOUT", default_value_t = LAYOUT_VERSION, hide = true, global = true)]
    pub layout: u32,
}

impl PinSettings {
    fn layout(&self) -> PathBuf {
        self.bpffs.join("thuban").join(format!("layout_{}", self.layout))
    }
    pub fn maps(&self) -> PathBuf {
        self.layout().join("maps")
    }
    pub fn links(&self) -> PathBuf {
        self.layout().join("links")
    }
    /// Directories of the layouts of other versions that ran on this node, sorted.
    pub fn other_layouts(&self) -> std::io::Result<Vec<PathBuf>> {
        let own = self.layout();
        let entries = match std::fs::read_dir(self.bpffs.join("thuban")) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut others = Vec::new();
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            if path != own && name.is_some_and(|name| name.starts_with("layout_")) {
                others.push(path);
            }
        }
        others.sort();
        Ok(others)
    }
}

#[derive(Args, Clone, Debug)]
pub struct RunSettings {
    /// Name of this node, and of its Droplet.
    #[arg(long, env = "NODE_NAME", default_value = "")]
    pub node_name: String,
    /// The node's InternalIP; the uplink is the interface that holds it. Default: the default route's interface.
    #[arg(long, env = "NODE_IP")]
    pub node_ip: Option<Ipv4Addr>,
    /// The uplink's name, when neither the node's address nor the default route tells it.
    #[arg(long, env = "THUBAN_INTERFACE")]
    pub interface: Option<String>,
    #[arg(long, env = "THUBAN_TRANSIT_HOOK", value_enum, default_value = "auto")]
    pub transit_hook: TransitHookChoice,
    #[arg(long, env = "THUBAN_AGENT_HOOK", value_enum, default_value = "tc")]
    pub agent_hook: AgentHook,
    /// auto: where transit runs at tc and frames arrive segmented, a VXLAN device holds UDP port 6081, so that the kernel
    /// aggregates Geneve segments; never: no such device, and veth uplinks take XDP instead.
    #[arg(long, env = "THUBAN_AGGREGATION", value_enum, default_value = "auto")]
    pub aggregation: Aggregation,
    /// The object file with the eBPF programs.
    #[arg(
        long,
        env = "THUBAN_PROGRAMS",
        default_value = "/usr/lib/thuban/thuban-programs.o"
    )]
    pub programs: PathBuf,
    /// The socket for the CNI plugin; its directory is made private to root.
    #[arg(long, env = "THUBAN_SOCKET", default_value = thuban_proto::DEFAULT_CNI_SOCKET)]
    pub socket: PathBuf,
    /// Attachment files and the epoch.
    #[arg(long, env = "THUBAN_STATE_DIR", default_value = "/var/lib/thuban")]
    pub state_dir: PathBuf,
    /// A writable /proc/sys/net of the node's network namespace.
    #[arg(long, env = "THUBAN_PROC_SYS_NET", default_value = "/proc/sys/net")]
    pub proc_sys_net: PathBuf,
    /// nft, which writes the rules of the tables `inet thuban`, `inet thuban-overlay` and `inet thuban-limits`.
    #[arg(long, env = "THUBAN_NFT", default_value = "nft")]
    nft: PathBuf,
    /// How long one run of nft may take, seconds. Then it is ended, and its rules count as refused until they are tried
    /// again.
    #[arg(long, env = "THUBAN_NFT_PATIENCE", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    nft_patience: u64,
    /// ClusterIP of the cluster's DNS, of the VPC that nodes are in. Pods of other VPCs that share it get a view of it.
    #[arg(long, env = "THUBAN_CLUSTER_DNS")]
    pub cluster_dns: Option<Ipv4Addr>,
    /// The domain that the cluster's names are in.
    #[arg(long, env = "THUBAN_CLUSTER_DOMAIN", default_value = dns::DEFAULT_DOMAIN)]
    pub cluster_domain: Domain,
    /// The CNI binary to install; without it nothing is installed.
    #[arg(long, env = "THUBAN_CNI_BINARY")]
    pub cni_binary: Option<PathBuf>,
    #[arg(long, env = "THUBAN_CNI_BIN_DIR", default_value = "/opt/cni/bin")]
    pub cni_bin_dir: PathBuf,
    #[arg(long, env = "THUBAN_CNI_CONF_DIR", default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
    /// Namespace of the operator's Lease and the heartbeats.
    #[arg(long, env = "THUBAN_NAMESPACE", default_value = "thuban-system")]
    pub namespace: String,
    /// The projected ServiceAccount token for the operator, read again at each connect.
    #[arg(
        long,
        env = "THUBAN_TOKEN_FILE",
        default_value = "/var/run/secrets/thuban/token"
    )]
    pub token_file: PathBuf,
    /// host:port of the operator. With it, no API server is used: no Droplet, no heartbeat, no Lease (tests, trials).
    #[arg(long, env = "THUBAN_OPERATOR_ADDRESS", requires = "operator_ca")]
    pub operator_address: Option<String>,
    /// The CA bundle (PEM) that the operator's certificate must chain to; together with --operator-address.
    #[arg(long, env = "THUBAN_OPERATOR_CA", requires = "operator_address")]
    pub operator_ca: Option<PathBuf>,
    /// never: everything goes by bouncers and dividers, for finding out whether a fault is theirs.
    #[arg(long, env = "THUBAN_DIRECT_PATHS", value_enum, default_value = "auto")]
    pub direct_paths: DirectPaths,
    /// How long an ADD waits for its endpoint, seconds.
    #[arg(long, env = "THUBAN_ADD_DEADLINE", default_value_t = 30)]
    pub add_deadline: u64,
    /// How long ports of tenants' Services are open without the operator, seconds. Less than 200 only where nothing but tests
    /// runs.
    #[arg(long, env = "THUBAN_NODE_PORT_LEASE_SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(2..=86_400))]
    pub node_port_lease: u64,
    /// Time between scans of idle direct rows, and between looks for attachments whose pod is gone, seconds.
    #[arg(long, env = "THUBAN_SCAN_INTERVAL", default_value_t = 30)]
    pub scan_interval: u64,
    /// Time between reports of what this droplet's roles pass on, seconds.
    #[arg(long, env = "THUBAN_LOAD_INTERVAL", default_value_t = 10)]
    pub load_interval: u64,
    /// Port of the metrics; 0 serves none.
    #[arg(long, env = "THUBAN_TRANSITD_METRICS_PORT", default_value_t = 0)]
    pub metrics_port: u16,
    #[arg(
        long,
        env = "THUBAN_TRANSITD_METRICS_ADDRESS",
        value_enum,
        default_value = "loopback"
    )]
    pub metrics_address: MetricsAddress,
    #[command(flatten)]
    pub pins: PinSettings,
}

impl RunSettings {
    /// Returns how nft is run.
    pub fn nft(&self) -> Nft {
        Nft {
            program: self.nft.clone(),
            patience: Duration::from_secs(self.nft_patience),
        }
    }
}

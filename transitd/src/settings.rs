//! The daemon's flags. Every one has an environment variable, so that one ConfigMap feeds the DaemonSet.
//!
//! Every path is a flag: tests run a whole transitd inside namespaces of their own.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use thuban_api::cluster_dns::ClusterDns;

use crate::dataplane::bpffs::PinSettings;
use crate::dataplane::hooks::{AgentHook, TransitHookChoice};
use crate::dns::{self, Domain};
use crate::netfilter::nft::Nft;

/// Whether the kernel aggregates received Geneve segments before transit at tc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Aggregation {
    /// Yes, where transit runs at tc and the NIC delivers segments. A VXLAN device then takes UDP port 6081.
    Auto,
    /// No. Then transit runs at XDP on a veth that delivers segments.
    Never,
}

/// Whether flows that stay go directly to the destination's droplet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DirectPaths {
    /// Yes, as soon as the operator has told the destination's place.
    Auto,
    /// No: all packets go by bouncers and dividers. Use it to find out whether a fault is theirs.
    Never,
}

/// Which flows the node's programs tell thuban-observe of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FlowMode {
    /// None.
    Off,
    /// Packets that are dropped.
    Drops,
    /// Packets that are dropped, that agents send, and that are delivered.
    All,
}

/// Who can read the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MetricsAddress {
    /// Processes of this node only: metrics listen at 127.0.0.1.
    Loopback,
    /// Everybody who reaches the node's address and may `get` the path `/metrics`, by https with a bearer token.
    Node,
}

/// Where a verb finds what it tells of this node.
#[derive(Args, Clone, Debug)]
pub struct NodeSettings {
    /// Folder of the daemon's files. The names of pods are read there.
    #[arg(long, env = "THUBAN_STATE_DIR", default_value = "/var/lib/thuban")]
    pub state_dir: PathBuf,
    /// Unix socket of the daemon, which knows the names of policies.
    #[arg(long, env = "THUBAN_SOCKET", default_value = thuban_proto::DEFAULT_CNI_SOCKET)]
    pub socket: PathBuf,
    #[command(flatten)]
    pub pins: PinSettings,
}

#[derive(Args, Clone, Debug)]
pub struct RunSettings {
    /// Name of this node. The Droplet gets the same name.
    #[arg(long, env = "NODE_NAME", default_value = "")]
    pub node_name: String,
    /// The node's InternalIP (IPv4). The uplink is the interface that has this address.
    /// Default: the address of the interface of the default route.
    #[arg(long, env = "NODE_IP")]
    pub node_ip: Option<Ipv4Addr>,
    /// Name of the uplink. Needed only if neither the node's address nor the default route tells it.
    #[arg(long, env = "THUBAN_INTERFACE")]
    pub interface: Option<String>,
    /// Where the program transit runs on the uplink.
    #[arg(long, env = "THUBAN_TRANSIT_HOOK", value_enum, default_value = "auto")]
    pub transit_hook: TransitHookChoice,
    /// Where the agents of pods run.
    #[arg(long, env = "THUBAN_AGENT_HOOK", value_enum, default_value = "tc")]
    pub agent_hook: AgentHook,
    /// Whether the kernel aggregates received Geneve segments before transit.
    #[arg(long, env = "THUBAN_AGGREGATION", value_enum, default_value = "auto")]
    pub aggregation: Aggregation,
    /// Object file with the eBPF programs.
    #[arg(
        long,
        env = "THUBAN_PROGRAMS",
        default_value = "/usr/lib/thuban/thuban-programs.o"
    )]
    pub programs: PathBuf,
    /// Unix socket for the CNI plugin. transitd makes its folder private to root.
    #[arg(long, env = "THUBAN_SOCKET", default_value = thuban_proto::DEFAULT_CNI_SOCKET)]
    pub socket: PathBuf,
    /// Folder of files that must survive a restart: attachments, endpoints, the operator's epoch.
    #[arg(long, env = "THUBAN_STATE_DIR", default_value = "/var/lib/thuban")]
    pub state_dir: PathBuf,
    /// Path of /proc/sys/net of the node's network namespace. It must be writable.
    #[arg(long, env = "THUBAN_PROC_SYS_NET", default_value = "/proc/sys/net")]
    pub proc_sys_net: PathBuf,
    /// The program nft, which writes the tables `inet thuban`, `inet thuban-overlay`, `inet thuban-limits` and
    /// `inet thuban-policy`.
    #[arg(long, env = "THUBAN_NFT", default_value = "nft")]
    nft: PathBuf,
    /// How long one run of nft may take, seconds. Then transitd ends it, and tries its rules again.
    #[arg(long, env = "THUBAN_NFT_PATIENCE", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    nft_patience: u64,
    /// ClusterIP of the cluster's DNS Service, or one of each family with a comma between them. Pods of VPCs that share
    /// this Service ask it through transitd. Default: none, and only the VPC `default` has cluster DNS.
    #[arg(long, env = "THUBAN_CLUSTER_DNS")]
    pub cluster_dns: Option<ClusterDns>,
    /// Domain of the cluster's names.
    #[arg(long, env = "THUBAN_CLUSTER_DOMAIN", default_value = dns::DEFAULT_DOMAIN)]
    pub cluster_domain: Domain,
    /// CNI plugin that transitd installs on the node. Default: none, and nothing is installed.
    #[arg(long, env = "THUBAN_CNI_BINARY")]
    pub cni_binary: Option<PathBuf>,
    /// Folder into which transitd installs the CNI plugin.
    #[arg(long, env = "THUBAN_CNI_BIN_DIR", default_value = "/opt/cni/bin")]
    pub cni_bin_dir: PathBuf,
    /// Folder into which transitd writes the CNI configuration.
    #[arg(long, env = "THUBAN_CNI_CONF_DIR", default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
    /// Path of the folder --cni-bin-dir on the node, for the script that takes Thuban off the node. Default: the same.
    #[arg(long, env = "THUBAN_CNI_BIN_DIR_ON_NODE")]
    cni_bin_dir_on_node: Option<PathBuf>,
    /// Path of the folder --cni-conf-dir on the node, for the same script. Default: the same.
    #[arg(long, env = "THUBAN_CNI_CONF_DIR_ON_NODE")]
    cni_conf_dir_on_node: Option<PathBuf>,
    /// Namespace of the operator's Lease.
    #[arg(long, env = "THUBAN_NAMESPACE", default_value = "thuban-system")]
    pub namespace: String,
    /// File with the ServiceAccount token for the operator. transitd reads it again for each connection.
    #[arg(
        long,
        env = "THUBAN_TOKEN_FILE",
        default_value = "/var/run/secrets/thuban/token"
    )]
    pub token_file: PathBuf,
    /// Address (host:port) of the operator, for tests and trials. transitd then uses no API server: it writes no
    /// Droplet, and reads no Lease. Needs --operator-ca.
    #[arg(long, env = "THUBAN_OPERATOR_ADDRESS", requires = "operator_ca")]
    pub operator_address: Option<String>,
    /// File (PEM) of the CA that signed the operator's certificate. Needs --operator-address.
    #[arg(long, env = "THUBAN_OPERATOR_CA", requires = "operator_address")]
    pub operator_ca: Option<PathBuf>,
    /// Whether flows that stay go directly to the destination's droplet.
    #[arg(long, env = "THUBAN_DIRECT_PATHS", value_enum, default_value = "auto")]
    pub direct_paths: DirectPaths,
    /// Time in seconds that a CNI ADD waits for its endpoint. Then it fails, and the runtime tries again.
    #[arg(long, env = "THUBAN_ADD_DEADLINE", default_value_t = 30)]
    pub add_deadline: u64,
    /// Time in seconds that NodePorts of tenants' Services stay open without the operator, 2 to 86400. The operator
    /// must have the same value. Use less than 200 for tests only.
    #[arg(long, env = "THUBAN_NODE_PORT_LEASE_SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(2..=86_400))]
    pub node_port_lease: u64,
    /// Time in seconds between two searches for unused direct paths and for attachments whose pod is gone.
    #[arg(long, env = "THUBAN_SCAN_INTERVAL", default_value_t = 30)]
    pub scan_interval: u64,
    /// Time in seconds between two reports to the operator of how much this droplet's roles forward.
    #[arg(long, env = "THUBAN_LOAD_INTERVAL", default_value_t = 10)]
    pub load_interval: u64,
    /// Time in seconds between two reports to the operator of pods' dropped packets, and of what network policies deny,
    /// of those that are to be reported, 1 to 3600.
    #[arg(
        long,
        env = "THUBAN_DENIAL_INTERVAL",
        default_value_t = 60,
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    pub denial_interval: u64,
    /// Which flows the programs tell thuban-observe of. Without --observe-namespace they tell of none.
    #[arg(long, env = "THUBAN_FLOWS", value_enum, default_value = "drops")]
    pub flows: FlowMode,
    /// Namespace of thuban-observe. Default, and if it is empty: there is none, and transitd doesn't look for it.
    #[arg(long, env = "THUBAN_OBSERVE_NAMESPACE")]
    pub observe_namespace: Option<String>,
    /// File with the ServiceAccount token for thuban-observe. transitd reads it again for each connection.
    #[arg(
        long,
        env = "THUBAN_OBSERVE_TOKEN_FILE",
        default_value = "/var/run/secrets/thuban-observe/token"
    )]
    pub observe_token_file: PathBuf,
    /// Address (host:port) of thuban-observe, for tests and trials. transitd then reads no Lease for it. Needs
    /// --observe-ca, and --observe-namespace too.
    #[arg(long, env = "THUBAN_OBSERVE_ADDRESS", requires = "observe_ca")]
    pub observe_address: Option<String>,
    /// File (PEM) of the CA that signed thuban-observe's certificate. Needs --observe-address.
    #[arg(long, env = "THUBAN_OBSERVE_CA", requires = "observe_address")]
    pub observe_ca: Option<PathBuf>,
    /// TCP port of the metrics. 0 turns them off.
    #[arg(long, env = "THUBAN_TRANSITD_METRICS_PORT", default_value_t = 0)]
    pub metrics_port: u16,
    /// Who can read the metrics.
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

    /// Returns the namespace of thuban-observe, if the cluster has it.
    pub fn observe_namespace(&self) -> Option<&str> {
        self.observe_namespace.as_deref().filter(|name| !name.is_empty())
    }

    /// Returns which flows the programs tell of: of none, if nobody would hear of them.
    pub fn flow_mode(&self) -> FlowMode {
        if self.observe_namespace().is_some() {
            self.flows
        } else {
            FlowMode::Off
        }
    }

    /// Returns the folders of the CNI plugin and of its configuration, as the node names them.
    pub fn cni_folders_on_node(&self) -> (&Path, &Path) {
        (
            self.cni_bin_dir_on_node.as_deref().unwrap_or(&self.cni_bin_dir),
            self.cni_conf_dir_on_node.as_deref().unwrap_or(&self.cni_conf_dir),
        )
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{FlowMode, RunSettings};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        settings: RunSettings,
    }

    fn mode(arguments: &[&str]) -> FlowMode {
        let line = ["transitd"].iter().chain(arguments);
        Line::parse_from(line).settings.flow_mode()
    }

    #[test]
    fn no_flow_is_told_without_a_namespace_to_tell() {
        assert_eq!(mode(&["--flows=all"]), FlowMode::Off);
        assert_eq!(mode(&["--flows=all", "--observe-namespace="]), FlowMode::Off);
        assert_eq!(mode(&["--observe-namespace=observe"]), FlowMode::Drops);
        assert_eq!(
            mode(&["--flows=all", "--observe-namespace=observe"]),
            FlowMode::All
        );
        assert_eq!(
            mode(&["--flows=off", "--observe-namespace=observe"]),
            FlowMode::Off
        );
    }
}

//! kube-proxy as benchmarks start it.

use thuban_cluster::Instance;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Iptables,
    Nftables,
}

impl Mode {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        }
    }
}

/// Returns the arguments that kubeadm gives, except that limits of conntrack stay the machine's.
pub fn arguments(instance: &Instance, node: &str, mode: Mode, pods: &str) -> Vec<String> {
    vec![
        format!("--kubeconfig={}", instance.kubeconfig().display()),
        format!("--proxy-mode={}", mode.name()),
        format!("--hostname-override={node}"),
        format!("--cluster-cidr={pods}"),
        "--conntrack-max-per-core=0".to_owned(),
        "--conntrack-min=0".to_owned(),
        "--conntrack-tcp-timeout-established=0s".to_owned(),
        "--conntrack-tcp-timeout-close-wait=0s".to_owned(),
    ]
}

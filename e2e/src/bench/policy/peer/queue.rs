//! The rules that lead packets to the queue of kube-network-policies.
//!
//! The program asks the kernel for a table of nftables with `queue` expressions. A kernel without `CONFIG_NFT_QUEUE`
//! refuses the whole table; the program logs it and goes on. These are its rules for IPv4, at the same hook, priority
//! and in the same order. `jump` to a chain with iptables' target NFQUEUE stands for `queue`; the kernel has the target
//! with `CONFIG_NETFILTER_XT_TARGET_NFQUEUE` and `CONFIG_NFT_COMPAT`. As with its own rules, packets are dropped while
//! nobody listens to the queue.

use std::net::Ipv4Addr;

use anyhow::Result;

use super::super::nft;
use crate::rig::namespace::Namespace;

/// The queue that the program opens.
pub const QUEUE: u16 = 100;

/// Leads new connections of a node's pod to the queue.
pub fn lead(namespace: &Namespace, pod: Ipv4Addr) -> Result<()> {
    namespace.command("iptables-nft -t mangle -N to-queue")?;
    namespace.command(&format!(
        "iptables-nft -t mangle -A to-queue -j NFQUEUE --queue-num {QUEUE}"
    ))?;
    let ruleset = format!(
        "table ip mangle {{\nset podips-v4 {{\ntype ipv4_addr\nelements = {{ {pod} }}\n}}\n\
         chain postrouting {{\ntype filter hook postrouting priority srcnat - 5; policy accept;\n\
         meta skuid 0 accept\nct state established,related accept\n\
         ip saddr @podips-v4 jump to-queue\nip daddr @podips-v4 jump to-queue\n}}\n}}\n"
    );
    nft::apply(namespace, &ruleset)
}

/// Removes the rules.
pub fn remove(namespace: &Namespace) -> Result<()> {
    nft::apply(namespace, "delete table ip mangle\n")
}

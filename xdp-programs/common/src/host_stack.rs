//! The names and numbers by which agents, transit and transitd communicate with the host's own stack, and with each
//! other through it: marks, routing tables, tables of nftables, priorities. `docs/netfilter.md` says which program
//! sets and which reads each, and why a priority has its value.
//!
//! Invariant: each name or number of this kind is defined here and nowhere else.

/// The part of a packet's mark that tells its kind. kubelet, kube-proxy and portmap use none of its bits: theirs are
/// 0x2000, 0x4000 and 0x8000, which they may set beside.
pub const MARK_MASK: u32 = 0x1fff;
/// Low half of the mark of packets from a pod that are to leave in the node's name. [`mark_of`] gives the high half.
pub const MARK_EGRESS: u32 = 0x0054;
/// Low half of the mark of such packets from a pod that may also reach the node itself.
pub const MARK_EGRESS_HOST: u32 = 0x0056;
/// Bit of the marks of packets that network policy lets out as answers alone. With [`MARK_EGRESS`] or
/// [`MARK_EGRESS_HOST`], or as [`MARK_DENIED`].
pub const DENIED: u32 = 0x0008;
/// Bit of the marks with [`DENIED`] of a VPC whose pods hear what policy denies.
pub const REJECTED: u32 = 0x0020;
/// Low half of the mark of such packets from a pod that leaves by its own address.
pub const MARK_DENIED: u32 = 0x0058;
/// Low half of the mark of packets that a rule of network policy denies, of a pod that may otherwise reach the node:
/// they don't reach the node either. An earlier table `inet thuban` takes it for any mark with [`DENIED`].
pub const MARK_FORBIDDEN: u32 = 0x005a;
/// What all marks with [`DENIED`] have, under [`MARK_DENIED_MASK`].
pub const MARK_DENIED_MASK: u32 = MARK_MASK & !(MARK_EGRESS | MARK_EGRESS_HOST | REJECTED) | MARK_DENIED;
/// Mark of answers that transit gives to an agent, in the name of an endpoint whose policies denied a packet. The agent
/// takes it away. Pods set no marks that reach the agent: the kernel clears them between network namespaces.
pub const MARK_REJECTION: u32 = 0x0057;
/// Low half of the mark of answers to such packets: they are routed to pods.
pub const MARK_ANSWER: u32 = 0x0055;
/// Low half of the mark of packets that the node sends on by its own endpoint: they are routed there.
pub const MARK_HOST_ENDPOINT: u32 = 0x0053;
/// The common bits of [`MARK_EGRESS`] and [`MARK_EGRESS_HOST`], under [`MARK_FROM_POD_MASK`].
pub const MARK_FROM_POD: u32 = MARK_EGRESS & MARK_FROM_POD_MASK;
pub const MARK_FROM_POD_MASK: u32 = MARK_MASK & !(MARK_EGRESS ^ MARK_EGRESS_HOST);

/// Mark of a connection that is led to an endpoint of this node, by its address. A pod's connection has its first
/// packet's mark instead.
pub const CONNECTION_LED: u32 = 0x0050;
/// Mark of a connection that is sent on to another droplet and goes to the backends there.
pub const CONNECTION_SENT_ON: u32 = 0x0051;
/// Mark of a connection by a NodePort, or a balancer's address, to backends outside of the VPC.
pub const CONNECTION_EXPOSED: u32 = 0x0052;
/// Mark of a connection from outside that ingress policies deny, and whose client hears so. It ends with the answer.
pub const CONNECTION_REFUSED: u32 = 0x004f;

/// Routing table with routes to pods, and to the VPC of nodes: for packets that the host itself sends, and for
/// [`MARK_ANSWER`].
pub const POD_TABLE: u32 = 6081;
/// Routing table with the same routes except those to pods, for [`MARK_HOST_ENDPOINT`]: packets that the node sends on
/// for others. They go to services for pods of other VPCs and clients outside, and to members for pods of their own
/// VPC that ask for a port of the node.
pub const SERVICE_TABLE: u32 = 6082;
/// Routing table with the addresses that HAProxy serves on this node, and the priority of its rule, which is for TCP
/// alone. The speaker writes both.
pub const PROXY_TABLE: u32 = 6083;
/// Priority of the rules that lead to the tables of pods and services: before the main table (32766), after the local
/// one (0).
pub const RULE_PRIORITY: u32 = 6081;

/// Table with the host stack's rules for pods, services and nodes (ADR 13); family inet.
pub const NFT_TABLE: &str = "thuban";
/// Table with the rules of who may send to the overlay's port (ADR 19); family inet.
pub const NFT_OVERLAY_TABLE: &str = "thuban-overlay";
/// Table with the limits of connections that pods make through the node's own stack; family inet.
pub const NFT_LIMITS_TABLE: &str = "thuban-limits";
/// Table with what ingress policies say of clients outside (ADR 35); family inet.
pub const NFT_POLICY_TABLE: &str = "thuban-policy";

/// The priority of each base chain of [`NFT_TABLE`].
pub mod priority {
    pub const TRACK: &str = "mangle";
    pub const STALE: &str = "filter";
    pub const TRANSLATE: &str = "dstnat";
    /// The priority `dstnat`. nft knows that name at prerouting alone.
    pub const TRANSLATE_OWN: &str = "-100";
    pub const SEND_ON: &str = "dstnat + 10";
    pub const SERVE: &str = "filter";
    pub const GUARD: &str = "filter";
    pub const GONE: &str = "srcnat - 10";
    pub const LEAD: &str = "srcnat - 5";
    pub const LEAVE: &str = "srcnat";
}

/// The priority of each base chain of [`NFT_OVERLAY_TABLE`].
pub mod overlay_priority {
    pub const FORWARDED: &str = "filter + 10";
    pub const SENT: &str = "srcnat + 10";
    pub const RECEIVED: &str = "filter - 10";
}

/// The priority of each base chain of [`NFT_LIMITS_TABLE`].
pub mod limits_priority {
    pub const BEGIN: &str = "mangle - 5";
    /// After [`super::priority::LEAD`], and before [`super::priority::LEAVE`].
    pub const LEAVE: &str = "srcnat - 1";
}

/// The priority of each base chain of [`NFT_POLICY_TABLE`].
pub mod policy_priority {
    pub const ADMIT: &str = "filter";
    pub const ASTRAY: &str = "filter";
}

/// Returns the mark of packets that come from an attachment. Two attachments share a mark if the numbers of their
/// interfaces differ by a multiple of 65536. When one of them goes, this costs the other one connections, and nothing
/// else.
#[inline(always)]
pub const fn mark_of(ifindex: u32, kind: u32) -> u32 {
    ifindex << 16 | kind
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_of_pods_are_told_from_those_of_answers_and_of_others() {
        for kind in [MARK_EGRESS, MARK_EGRESS_HOST] {
            assert_eq!(kind & MARK_FROM_POD_MASK, MARK_FROM_POD);
        }
        for other in [
            0,
            CONNECTION_EXPOSED,
            CONNECTION_LED,
            CONNECTION_REFUSED,
            CONNECTION_SENT_ON,
            MARK_ANSWER,
            MARK_HOST_ENDPOINT,
            MARK_REJECTION,
            0x4000,
            0x8000,
        ] {
            assert_ne!(other & MARK_FROM_POD_MASK, MARK_FROM_POD, "{other:#x}");
        }
        assert_eq!(MARK_MASK & 0xe000, 0, "bits of kubelet, kube-proxy and portmap");
    }
}

//! By what agents, transit and transitd make themselves understood to the host's own stack, and to each other through it:
//! marks, routing tables, tables of nftables, priorities. `docs/netfilter.md` says who sets and who reads each, and why a
//! priority is what it is.
//!
//! Invariant: a number or a name of this kind stands here and nowhere else.

/// The part of a packet's mark that tells its kind. None of its bits is one that kubelet, kube-proxy or portmap use.
pub const MARK_MASK: u32 = 0xffff;
/// Low half of a packet's mark: from a pod, to leave in the node's name. The high half is that of [`mark_of`].
pub const MARK_EGRESS: u32 = 0x0054;
/// The same, of a pod that may also reach the node itself.
pub const MARK_EGRESS_HOST: u32 = 0x0056;
/// Low half of the mark of answers to such packets: they are routed to pods.
pub const MARK_ANSWER: u32 = 0x0055;
/// Low half of the mark of what the node sends on by its own endpoint: it is routed there.
pub const MARK_HOST_ENDPOINT: u32 = 0x0053;
/// What [`MARK_EGRESS`] and [`MARK_EGRESS_HOST`] have in common, under [`MARK_FROM_POD_MASK`].
pub const MARK_FROM_POD: u32 = MARK_EGRESS & MARK_FROM_POD_MASK;
pub const MARK_FROM_POD_MASK: u32 = MARK_MASK & !(MARK_EGRESS ^ MARK_EGRESS_HOST);

/// Mark of a connection that is led to an endpoint of this node, by its address. A pod's connection has its first packet's
/// mark instead.
pub const CONNECTION_LED: u32 = 0x0050;
/// Mark of a connection that is sent on to another droplet, whose backends it goes to.
pub const CONNECTION_SENT_ON: u32 = 0x0051;
/// Mark of a connection by a NodePort, or a balancer's address, to backends outside of the VPC.
pub const CONNECTION_EXPOSED: u32 = 0x0052;

/// Routes to pods, and to the VPC of nodes: for what the host itself sends, and for [`MARK_ANSWER`].
pub const POD_TABLE: u32 = 6081;
/// The same routes without those to pods, for [`MARK_HOST_ENDPOINT`]: what the node sends on for others, to services for pods
/// of other VPCs and clients outside, to members for pods of their own VPC that ask for a port of the node.
pub const SERVICE_TABLE: u32 = 6082;
/// Of the rules that lead to them: before the main table (32766), after the local one (0).
pub const RULE_PRIORITY: u32 = 6081;

/// What the host's stack does for pods, services and nodes (ADR 13); family inet.
pub const NFT_TABLE: &str = "thuban";
/// Who may send to the overlay's port (ADR 19); family inet.
pub const NFT_OVERLAY_TABLE: &str = "thuban-overlay";
/// How many connections pods have by the node's own stack; family inet.
pub const NFT_LIMITS_TABLE: &str = "thuban-limits";

/// Of each base chain of [`NFT_TABLE`].
pub mod priority {
    pub const TRACK: &str = "mangle";
    pub const STALE: &str = "filter";
    pub const TRANSLATE: &str = "dstnat";
    /// `dstnat`, which nft knows by name at prerouting alone.
    pub const TRANSLATE_OWN: &str = "-100";
    pub const SEND_ON: &str = "dstnat + 10";
    pub const SERVE: &str = "filter";
    pub const GUARD: &str = "filter";
    pub const GONE: &str = "srcnat - 10";
    pub const LEAD: &str = "srcnat - 5";
    pub const LEAVE: &str = "srcnat";
}

/// Of each base chain of [`NFT_OVERLAY_TABLE`].
pub mod overlay_priority {
    pub const FORWARDED: &str = "filter + 10";
    pub const SENT: &str = "srcnat + 10";
    pub const RECEIVED: &str = "filter - 10";
}

/// Of each base chain of [`NFT_LIMITS_TABLE`].
pub mod limits_priority {
    pub const BEGIN: &str = "mangle - 5";
}

/// The mark of what comes from an attachment. Two whose interfaces' numbers differ by a multiple of 65536 share one, which
/// costs them connections when one of them goes, and nothing else.
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
            CONNECTION_SENT_ON,
            MARK_ANSWER,
            MARK_HOST_ENDPOINT,
            0x4000,
            0x8000,
        ] {
            assert_ne!(other & MARK_FROM_POD_MASK, MARK_FROM_POD, "{other:#x}");
        }
        assert_eq!(MARK_ANSWER & 0xe000, 0, "bits of kubelet, kube-proxy and portmap");
    }
}

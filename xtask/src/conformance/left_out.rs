//! Tests that this cluster is not made for.

use super::Suite;

/// What tests by SCTP need.
pub const NEEDS_SCTP: &str = "needs a kernel with SCTP sockets";

/// Parts of all of cyclonus's cases, and why they are left out.
pub const CYCLONUS: [(&str, &str); 2] = [
    ("probes by SCTP", NEEDS_SCTP),
    (
        "probes from a pod to itself",
        "a pod always reaches itself, and cyclonus judges it as any peer",
    ),
];

/// A label of tests, and what they need that is not here.
const LABELS: [(&str, &str); 12] = [
    (
        "Disruptive",
        "breaks the cluster for all other tests, or needs SSH on nodes",
    ),
    (
        "Feature:IPv6DualStack",
        "needs a cluster whose nodes and Services have both families",
    ),
    ("Feature:KubeProxyDaemonSetMigration", "needs kube-proxy"),
    ("Feature:KubeProxyNFAcct", "needs kube-proxy"),
    ("Feature:LoadBalancer", "needs a cloud's load balancers"),
    (POLICY, "runs with --suite netpol"),
    ("Feature:Networking-DNS", "needs the Internet"),
    ("Feature:Networking-IPv4", "needs the Internet"),
    ("Feature:Networking-IPv6", "needs the Internet"),
    ("Feature:Networking-Performance", "measures, and tests nothing"),
    (
        "Feature:PerformanceDNS",
        "makes as many Services as the cluster has addresses: hours of load",
    ),
    ("Feature:SCTPConnectivity", NEEDS_SCTP),
];

/// The label of tests of policies, which are a suite of their own.
const POLICY: &str = "Feature:NetworkPolicy";

/// A part of the names of tests, and what they need that is not here.
const NAMES: [(&str, &str); 3] = [
    ("Networking should check kube-proxy urls", "needs kube-proxy"),
    ("KubeProxy should", "needs kube-proxy"),
    (
        "DNS configMap nameserver Forward PTR lookup",
        "needs the Internet",
    ),
];

/// Returns the reason why a test is left out of a suite, if it is.
pub fn reason(suite: Suite, name: &str, labels: &[&str]) -> Option<&'static str> {
    let is_own = |label: &str| suite == Suite::Netpol && label == POLICY;
    let by_label = LABELS
        .iter()
        .find(|(label, _)| labels.contains(label) && !is_own(label));
    let by_name = || NAMES.iter().find(|(part, _)| name.contains(part));
    by_label.or_else(by_name).map(|(_, reason)| *reason)
}

#[cfg(test)]
mod tests {
    use super::{POLICY, Suite};

    fn reason(name: &str, labels: &[&str]) -> Option<&'static str> {
        super::reason(Suite::Network, name, labels)
    }

    #[test]
    fn tests_of_policies_are_of_their_own_suite() {
        let labels = ["sig-network", POLICY];
        assert!(reason("Netpol should deny", &labels).is_some());
        assert_eq!(super::reason(Suite::Netpol, "Netpol should deny", &labels), None);
        let by_sctp = ["sig-network", POLICY, "Feature:SCTPConnectivity"];
        assert!(super::reason(Suite::Netpol, "NetpolSCTP", &by_sctp).is_some());
    }

    #[test]
    fn only_what_has_a_reason_is_left_out() {
        let network = ["sig-network", "Slow"];
        assert_eq!(reason("[sig-network] Services should work", &network), None);
        let balanced = ["sig-network", "Feature:LoadBalancer"];
        assert!(reason("[sig-network] LoadBalancers should work", &balanced).is_some());
        assert!(
            reason(
                "[sig-network] KubeProxy should set TCP CLOSE_WAIT timeout",
                &network
            )
            .is_some()
        );
    }
}

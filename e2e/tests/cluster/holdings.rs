//! The attachments' holdings of a node.

use crate::tenants::tenants;

/// Returns a node's holdings of attachments: veths, map rows of the VPC, files and pins.
pub fn holdings(node: &str, vni: u64) -> [usize; 4] {
    let cluster = &tenants().cluster;
    let lines = |command: &str| {
        let output = cluster.exec_on_node(node, &["sh", "-c", command]).unwrap();
        output
            .trim()
            .parse::<usize>()
            .unwrap_or_else(|_| panic!("{command}: {output}"))
    };
    [
        lines("ip -o link show type veth | grep -c ': thb' || true"),
        cluster.rows(node, vni).unwrap(),
        lines("ls /var/lib/thuban/attachments | wc -l"),
        lines("ls /sys/fs/bpf/thuban/layout_*/links | wc -l"),
    ]
}

//! A plan and a cluster for unit tests.

use std::net::{IpAddr, Ipv4Addr};

use super::checks::{Dns, Facts};
use super::plan::Plan;

/// The ClusterIPs of the two Services.
pub const SERVICES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 96, 0, 7)),
    IpAddr::V4(Ipv4Addr::new(10, 96, 0, 8)),
];

pub fn plan_of(nodes: &[&str]) -> Plan {
    let nodes: Vec<String> = nodes.iter().map(|name| (*name).to_owned()).collect();
    let range = "10.213.0.0/16".parse().unwrap();
    Plan::new("test", "example.test/transitd:1", range, &nodes, "run-1").unwrap()
}

pub fn plan() -> Plan {
    plan_of(&["node-a", "node-b"])
}

pub fn facts() -> Facts {
    Facts {
        kubernetes: Ok("10.96.0.1:443".parse().unwrap()),
        api_servers: vec!["192.0.2.10:6443".parse().unwrap()],
        dns: Ok(Dns {
            server: "10.96.0.10:53".parse().unwrap(),
            domain: "cluster.local".to_owned(),
        }),
    }
}

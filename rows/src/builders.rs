//! Rows that tests begin with: the row of each kind is valid, and has something in every field.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)] // what is written here can be read

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use thuban_api::Dscp;
use thuban_api::identifiers::{MacAddr, NetworkId, Vni};

use crate::{
    Backend, Block, Bouncer, ByteRate, Class, Direct, Droplet, Exposed, ExposedPort, Forward, Front,
    FrontPort, HealthCheck, Kept, Kind, LocalEndpoint, Members, NamedPort, Network, NodeService,
    PolicyAction, PolicyId, PolicyPorts, PolicyRule, PolicySet, PolicyTier, Port, Refused, Row, Service,
    ServiceName, Underlay, Visible, Vpc,
};

/// The VNI of the rows here.
pub const VNI: Vni = vni(7);
/// The network of the rows here.
pub const NETWORK: NetworkId = network_id(0x0a00_0100);

pub const fn vni(number: u32) -> Vni {
    Vni::new(number).unwrap()
}

pub const fn network_id(number: u32) -> NetworkId {
    NetworkId::new(number).unwrap()
}

pub const fn policy_id(number: u32) -> PolicyId {
    PolicyId::new(number).unwrap()
}

pub const fn byte_rate(number: u64) -> ByteRate {
    ByteRate::new(number).unwrap()
}

/// Returns 172.16.0.x.
pub fn underlay(last: u8) -> Underlay {
    [172, 16, 0, last].into()
}

/// Returns a row of the kind.
pub fn row(kind: Kind) -> Row {
    match kind {
        Kind::Droplet => Row::Droplet(Droplet {
            address: underlay(1),
            address6: Some("2001:db8::1".parse().unwrap()),
        }),
        Kind::Vpc => Row::Vpc(vpc()),
        Kind::Network => Row::Network(network()),
        Kind::Local => Row::Local(local()),
        Kind::Bouncer => Row::Bouncer(bouncer()),
        Kind::Direct => Row::Direct(Direct {
            vni: VNI,
            address: "fd00:1::5".parse().unwrap(),
            droplet: underlay(1),
        }),
        Kind::Forward => Row::Forward(Forward {
            vni: VNI,
            address: address(5),
            droplet: underlay(1),
        }),
        Kind::Refused => Row::Refused(Refused {
            pod_uid: "u5".into(),
            reason: "NetworkForbids".into(),
            message: "network web does not admit namespace red".into(),
        }),
        Kind::Service => Row::Service(service()),
        Kind::NodeService => Row::NodeService(NodeService {
            vni: VNI,
            address: Ipv4Addr::new(10, 96, 0, 11).into(),
            ports: service().ports,
            inside: true,
            names: true,
        }),
        Kind::Exposed => Row::Exposed(exposed()),
        Kind::Class => Row::Class(class()),
        Kind::PolicySet => Row::PolicySet(policy_set()),
        Kind::Front => Row::Front(front()),
    }
}

/// Returns 10.0.1.x.
fn address(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 1, last).into()
}

fn members() -> Members {
    Members {
        used: vec![underlay(1), underlay(2)],
        relays: vec![underlay(3)],
    }
}

/// Returns a VPC with 10.0.0.0/16 and fd00:1::/48, and two dividers.
pub fn vpc() -> Vpc {
    Vpc {
        vni: VNI,
        cidrs: vec!["10.0.0.0/16".parse().unwrap(), "fd00:1::/48".parse().unwrap()],
        service_cidrs: vec!["10.96.0.0/16".parse().unwrap(), "fd00:96::/108".parse().unwrap()],
        closed_cidrs: vec!["172.16.0.0/24".parse().unwrap()],
        service_addresses: [address(99)].into(),
        dividers: members(),
        divider_here: true,
        host_access: true,
        egress: true,
        reject: true,
        dscp: Dscp::new(46),
        egress_rate: Some(byte_rate(12_500_000)),
        kept: Kept::Sets,
        visible: Arc::new(Visible {
            namespaces: ["red".to_owned()].into(),
            services: [ServiceName::new("blue", "shared")].into(),
            hidden: [ServiceName::new("red", "moved")].into(),
        }),
    }
}

/// Returns a network with 10.0.1.0/24 and fd00:1::/64, and two bouncers.
pub fn network() -> Network {
    Network {
        vni: VNI,
        id: NETWORK,
        cidrs: vec!["10.0.1.0/24".parse().unwrap(), "fd00:1::/64".parse().unwrap()],
        bouncers: members(),
        bouncer_here: true,
        private: true,
    }
}

/// Returns the endpoint of pod `u5`, with 10.0.1.5 and fd00:1::5.
pub fn local() -> LocalEndpoint {
    let own = Ipv4Addr::new(10, 0, 1, 5);
    LocalEndpoint {
        vni: VNI,
        address: own,
        address6: Some("fd00:1::5/64".parse().unwrap()),
        network: NETWORK,
        prefix_length: 24,
        gateway: Ipv4Addr::new(10, 0, 1, 1),
        mac: MacAddr::of(own),
        pod_uid: "u5".into(),
        pod_namespace: "red".into(),
        pod_name: "web-5".into(),
        vpc_name: "red".into(),
        network_name: "web".into(),
        ready: true,
        moved_from: Some(underlay(9)),
        host: true,
        underlay6: Some("2001:db8::9".parse().unwrap()),
        class: Some(policy_id(3)),
        ingress_set: Some(policy_id(4)),
        egress_set: Some(policy_id(5)),
        egress_rate: Some(byte_rate(1_250_000)),
        ingress_rate: Some(byte_rate(125_000_000)),
    }
}

/// Returns the bouncer's row of the endpoint of [`local`].
pub fn bouncer() -> Bouncer {
    Bouncer {
        vni: VNI,
        address: address(5),
        address6: Some("fd00:1::5".parse().unwrap()),
        droplet: underlay(1),
    }
}

/// Returns a service with TCP port 80 at 10.96.0.10, and a backend.
pub fn service() -> Service {
    Service {
        vni: VNI,
        address: Ipv4Addr::new(10, 96, 0, 10).into(),
        ports: vec![Port {
            protocol: 6,
            port: 80,
            affinity: 60,
            local: true,
            backends: [backend(5)].into(),
        }],
    }
}

/// Returns a backend at port 8080 of 10.0.1.x.
pub fn backend(last: u8) -> Backend {
    Backend {
        address: address(last),
        port: 8080,
    }
}

/// Returns NodePort 30080 of the service of [`service`]. It has two backends here, of which one ends.
pub fn exposed() -> Exposed {
    Exposed {
        vni: VNI,
        address: service().address,
        ports: vec![ExposedPort {
            protocol: 6,
            port: 80,
            node_port: Some(30080),
            local: Some([backend(5), backend(6)].into()),
            ending: [address(6)].into(),
            peers: [underlay(2)].into(),
            affinity: 10_800,
            members: [backend(7)].into(),
        }],
        addresses: [Ipv4Addr::new(192, 0, 2, 1).into()].into(),
        health_port: Some(30100),
        service: "red/web".into(),
        clients: Some(["198.51.100.0/24".parse().unwrap()].into()),
    }
}

/// Returns TCP port 443 of 203.0.113.1, with a backend on this droplet and one on another, and answers by the tunnel.
pub fn front() -> Front {
    Front {
        vni: VNI,
        address: Ipv4Addr::new(203, 0, 113, 1).into(),
        ports: vec![FrontPort {
            protocol: 6,
            port: 443,
            affinity: 10_800,
            backends: [(backend(5), underlay(1)), (backend(6), underlay(2))].into(),
            resting: [backend(6).address].into(),
        }],
        clients: Some(["198.51.100.0/24".parse().unwrap()].into()),
        service: "red/web".into(),
        check: Some(health_check()),
        tunnel: true,
    }
}

/// Returns a check of port 8080 by HTTP.
pub fn health_check() -> HealthCheck {
    HealthCheck {
        port: 8080,
        path: "/healthz".into(),
        interval_ms: 5000,
        rise: 2,
        fall: 3,
    }
}

/// Returns class 3, of two groups, with a port named http.
pub fn class() -> Class {
    Class {
        vni: VNI,
        id: policy_id(3),
        groups: [11, 12].into(),
        names: [NamedPort {
            name: "http".into(),
            protocol: 6,
            port: 8080,
        }]
        .into(),
    }
}

/// Returns set 5, of egress: a rule of each tier, with each form of peers and ports.
pub fn policy_set() -> PolicySet {
    let rule = |tier, action, index| PolicyRule {
        tier,
        action,
        policy: "red/web".into(),
        index,
        anyone: false,
        groups: [11].into(),
        blocks: vec![],
        ports: vec![],
    };
    PolicySet {
        vni: VNI,
        id: policy_id(5),
        is_egress: true,
        is_isolated: true,
        rules: vec![
            PolicyRule {
                ports: vec![PolicyPorts::Named("http".into(), None)],
                ..rule(PolicyTier::Admin, PolicyAction::Pass, 0)
            },
            PolicyRule {
                blocks: vec![Block {
                    range: "192.0.2.0/24".parse().unwrap(),
                    except: vec!["192.0.2.128/25".parse().unwrap()],
                }],
                ports: vec![
                    PolicyPorts::Range(17, 53, 53),
                    PolicyPorts::Named("dns".into(), Some(17)),
                ],
                ..rule(PolicyTier::NetworkPolicy, PolicyAction::Accept, 1)
            },
            PolicyRule {
                anyone: true,
                ..rule(PolicyTier::Baseline, PolicyAction::Deny, 2)
            },
        ],
    }
}

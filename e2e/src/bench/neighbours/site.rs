//! A node with the tenants of a scene: attackers' VPCs with two pods each, and the VPC that measures.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};

use anyhow::{Result, ensure};
use thuban_proto::transit::{
    DropletRow, ExposedPort, ExposedRow, LocalRow, NetworkRow, ServiceBackend, ServicePort, ServiceRow,
    VpcRow, row::Row,
};

use super::{
    flood::FLOOD_WINDOW,
    policies::{Policies, SHARES},
    probe,
    servers::{self, Server},
};
use crate::{
    bench::{
        plugin::Pod,
        transitd::{NODE, Parts, Transitd},
    },
    rig::namespace::Namespace,
};

/// The other end of the uplink: the cluster's DNS, and a droplet that holds everybody's bouncers.
pub const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
pub const DNS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 96, 0, 10), 53);
/// The address of a Service that every VPC has, each its own.
pub const SERVICE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 96, 1, 1), 80);
/// A Service that the node serves for every VPC, like the API server's. Its backend is at the other end of the uplink.
pub const SHARED: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 96, 0, 1), 443);
const SHARED_BACKEND: SocketAddrV4 = SocketAddrV4::new(FAR, 6443);
/// The first addresses of more Services: of the VPC that measures, and of attackers.
const MORE_SERVICES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 96, 16, 0), Ipv4Addr::new(10, 96, 128, 0)];
/// Services by which an attacker tries to fill a table, and ports of each. Two attackers have more than there is room
/// for.
const FILLERS: u32 = 600;
const PORTS: u16 = 128;
/// Where pods listen.
pub const PORT: u16 = 8080;
/// Pods of a VPC: a client, a server, and one that comes and goes.
pub const PODS: u8 = 3;
/// The series of transitd's metrics that counts rows for which a table has no room.
pub const TABLE_FULL: &str = r#"nacks_total{reason="NACK_REASON_TABLE_FULL"}"#;
/// The number of the VPC that measures; attackers have the numbers above.
pub const VICTIM: u8 = 1;

/// A tenant's pods. The last one is not attached.
pub struct Tenant {
    pub vni: u8,
    pub pods: Vec<Pod>,
}

impl Tenant {
    pub fn client(&self) -> &Namespace {
        &self.pods[0].namespace
    }

    pub fn guest(&self) -> &Pod {
        &self.pods[2]
    }

    pub fn address(&self, pod: u8) -> Ipv4Addr {
        address(self.vni, pod)
    }
}

/// Returns an address of nobody, in the upper half of the VPC's network: 32,768 in turn.
pub fn nobody(vni: u8, number: u32) -> Ipv4Addr {
    let [_, _, high, low] = number.to_be_bytes();
    Ipv4Addr::new(10, vni, 128 | high, low)
}

pub fn address(vni: u8, pod: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, vni, 0, 2 + pod)
}

/// Returns the address of the VPC's other pod that is attached.
pub fn other(vni: u8, than: Ipv4Addr) -> Ipv4Addr {
    address(vni, u8::from(than == address(vni, 0)))
}

pub struct Site {
    pub transitd: Transitd,
    pub victim: Tenant,
    pub attackers: Vec<Tenant>,
    _servers: Vec<Server>,
    _unread: Vec<UdpSocket>,
}

impl Site {
    pub fn up(parts: &Parts, attackers: u8, policies: Policies) -> Result<Self> {
        let vnis: Vec<u8> = (VICTIM..=VICTIM + attackers).collect();
        let mut rows = vec![NODE, FAR].into_iter().map(droplet).collect::<Vec<Row>>();
        for vni in &vnis {
            rows.extend(policies.rows(*vni));
            rows.extend(of_tenant(*vni, policies));
        }
        let environment = [("THUBAN_CLUSTER_DNS", DNS.ip().to_string())];
        let transitd = Transitd::up(parts, rows, &environment)?;
        let far = &transitd.far;
        far.command(&format!("ip address add {FAR}/24 dev far"))?;
        far.command(&format!("ip address add {}/32 dev lo", DNS.ip()))?;
        transitd
            .node
            .command(&format!("ip route add default via {FAR}"))?;
        // What tenants send to the shared Service passes the node.
        transitd.node.sysctl("ipv4/ip_forward", "1")?;
        // Attackers' connections stay unanswered: no refusal frees the entries that they take.
        far.command("nft add table ip bench")?;
        far.command("nft add chain ip bench in { type filter hook input priority 0 ; }")?;
        far.command("nft add rule ip bench in udp dport 6081 drop")?;
        far.command(&format!(
            "nft add rule ip bench in tcp window {FLOOD_WINDOW} drop"
        ))?;
        let mut tenants = Vec::new();
        for vni in &vnis {
            tenants.push(tenant(&transitd, *vni)?);
        }
        let victim = tenants.remove(0);
        let servers = vec![
            servers::names(far, DNS)?,
            servers::echo(far, SHARED_BACKEND)?,
            servers::echo(&victim.pods[1].namespace, (victim.address(1), PORT))?,
            servers::echo(victim.client(), (victim.address(0), PORT))?,
        ];
        let pods = tenants.iter().flat_map(|tenant| &tenant.pods);
        let unread = pods.map(|pod| servers::unread(&pod.namespace, PORT));
        let unread: Vec<UdpSocket> = unread.collect::<Result<_>>()?;
        let metrics = transitd.metrics()?;
        let is_full = metrics.get(TABLE_FULL).is_some_and(|count| *count > 0);
        ensure!(
            !is_full || attackers > SHARES,
            "a table has no room for the rows of all tenants"
        );
        probe::works(victim.client(), &[SERVICE, SHARED])?;
        Ok(Self {
            transitd,
            victim,
            attackers: tenants,
            _servers: servers,
            _unread: unread,
        })
    }
}

fn tenant(transitd: &Transitd, vni: u8) -> Result<Tenant> {
    let mut pods = Vec::new();
    for pod in 0..PODS {
        let pod = Pod::new(number(vni, pod))?;
        if pods.len() + 1 < usize::from(PODS) {
            transitd.node.run(|| transitd.plugin.call("ADD", &pod))?;
        }
        pods.push(pod);
    }
    Ok(Tenant { vni, pods })
}

fn number(vni: u8, pod: u8) -> usize {
    usize::from(vni) * usize::from(PODS) + usize::from(pod)
}

fn mapped(address: Ipv4Addr) -> Vec<u8> {
    address.to_ipv6_mapped().octets().to_vec()
}

fn droplet(address: Ipv4Addr) -> Row {
    Row::Droplet(DropletRow {
        address: address.octets().to_vec(),
        ..DropletRow::default()
    })
}

/// Returns a VPC of one network, whose bouncers are elsewhere.
fn of_tenant(vni: u8, policies: Policies) -> Vec<Row> {
    let cidr = format!("10.{vni}.0.0/16");
    let network = u32::from(Ipv4Addr::new(10, vni, 0, 0));
    let mut rows = vec![
        Row::Vpc(VpcRow {
            vni: vni.into(),
            cidrs: vec![cidr.clone()],
            service_cidrs: vec!["10.96.0.0/16".into()],
            dividers: vec![FAR.octets().to_vec()],
            ..VpcRow::default()
        }),
        Row::Network(NetworkRow {
            vni: vni.into(),
            network,
            cidrs: vec![cidr],
            bouncers: vec![FAR.octets().to_vec()],
            ..NetworkRow::default()
        }),
        Row::NodeService(ServiceRow {
            vni: vni.into(),
            address: mapped(*DNS.ip()),
            ports: vec![port(6, DNS.port(), &[]), port(17, DNS.port(), &[])],
            inside: true,
            names: true,
        }),
        Row::NodeService(ServiceRow {
            vni: vni.into(),
            address: mapped(*SHARED.ip()),
            ports: vec![port(6, SHARED.port(), &[SHARED_BACKEND])],
            ..ServiceRow::default()
        }),
        service(vni, 1),
    ];
    rows.extend((0..PODS).map(|pod| local(vni, network, pod, policies)));
    rows
}

/// Returns the VPC's Service, with the server and this many other backends.
pub fn service(vni: u8, backends: u8) -> Row {
    // Backends of attackers do not exist: an entry that is never answered stays longest.
    let address_of = |backend: u8| match vni {
        VICTIM => address(vni, 1 - backend),
        _ => nobody(vni, u32::from(backend) + 1),
    };
    let backends: Vec<SocketAddrV4> = (0..backends)
        .map(|backend| SocketAddrV4::new(address_of(backend), PORT))
        .collect();
    Row::Service(ServiceRow {
        vni: vni.into(),
        address: mapped(*SERVICE.ip()),
        ports: vec![port(6, SERVICE.port(), &backends)],
        ..ServiceRow::default()
    })
}

/// Returns a row of the VPC's Service, which gets and loses a backend in turn.
pub fn changing(vni: u8, number: u32) -> Row {
    service(vni, in_turn(number))
}

const fn in_turn(number: u32) -> u8 {
    1 + (number % 2) as u8
}

/// Returns another Service of the VPC that measures, with its address.
pub fn another(number: u32) -> (Row, SocketAddrV4) {
    let address = SocketAddrV4::new(more(0, number), SERVICE.port());
    let backend = SocketAddrV4::new(self::address(VICTIM, 1), PORT);
    let row = Row::Service(ServiceRow {
        vni: VICTIM.into(),
        address: mapped(*address.ip()),
        ports: vec![port(6, address.port(), &[backend])],
        ..ServiceRow::default()
    });
    (row, address)
}

/// Returns a Service of many ports without backends: it takes room in a table, and little else.
pub fn filler(vni: u8, number: u32) -> Row {
    Row::Service(ServiceRow {
        vni: vni.into(),
        address: mapped(more(1, number % FILLERS)),
        ports: (1..=PORTS).map(|number| port(6, number, &[])).collect(),
        ..ServiceRow::default()
    })
}

fn more(of: usize, number: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(MORE_SERVICES[of]) + number)
}

/// Returns the row of the VPC's Service at a NodePort, whose backends change in the same way: rules of the node's own
/// stack, by nft.
pub fn exposed(vni: u8, number: u32) -> Row {
    let backends: Vec<SocketAddrV4> = (0..in_turn(number))
        .map(|backend| SocketAddrV4::new(address(vni, backend), PORT))
        .collect();
    Row::Exposed(ExposedRow {
        vni: vni.into(),
        address: mapped(*SERVICE.ip()),
        ports: vec![ExposedPort {
            protocol: 6,
            port: SERVICE.port().into(),
            node_port: 30_000 + u32::from(vni),
            local: true,
            backends: as_backends(&backends),
            ..ExposedPort::default()
        }],
        service: "ns/web".into(),
        ..ExposedRow::default()
    })
}

fn as_backends(all: &[SocketAddrV4]) -> Vec<ServiceBackend> {
    let backend = |backend: &SocketAddrV4| ServiceBackend {
        address: mapped(*backend.ip()),
        port: backend.port().into(),
    };
    all.iter().map(backend).collect()
}

fn port(protocol: u32, port: u16, backends: &[SocketAddrV4]) -> ServicePort {
    ServicePort {
        protocol,
        port: port.into(),
        backends: as_backends(backends),
        ..ServicePort::default()
    }
}

fn local(vni: u8, network: u32, pod: u8, policies: Policies) -> Row {
    let uid = format!("bench-{}", number(vni, pod));
    let own = address(vni, pod);
    let (class, ingress_set) = policies.of_pods();
    Row::Local(LocalRow {
        vni: vni.into(),
        address: mapped(own),
        network,
        prefix_length: 16,
        gateway: format!("10.{vni}.0.1"),
        mac: [&[2, vni], &own.octets()[..]].concat(),
        pod_uid: uid.clone(),
        pod_namespace: "bench".into(),
        pod_name: uid,
        vpc_name: format!("vpc-{vni}"),
        network_name: "bench".into(),
        ready: true,
        class,
        ingress_set,
        ..LocalRow::default()
    })
}

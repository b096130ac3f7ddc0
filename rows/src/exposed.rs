//! The part of a service that is reached by way of nodes: at their own addresses, or at addresses outside of the
//! cluster that lead to nodes.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use thuban_api::identifiers::Vni;
use thuban_proto::transit::{self as proto, ExposedRow, ServiceBackend};

use crate::clients;
use crate::droplet::Underlay;
use crate::fields::{self, InvalidRow, invalid};
use crate::service::{Backend, MAX_PORTS, affinity, backends, number, protocol, service_address};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exposed {
    /// The VNI of the node's own endpoint, or of any VPC if all ports are local.
    pub vni: Vni,
    /// The address of the service in its VPC, to which the node translates.
    pub address: IpAddr,
    pub ports: Vec<ExposedPort>,
    /// Addresses besides those of nodes, of the service's family.
    pub addresses: BTreeSet<IpAddr>,
    /// The port where load balancers ask whether there are backends here.
    pub health_port: Option<u16>,
    /// The service as `namespace/name`, told at the health port.
    pub service: String,
    /// The clients that may send to the addresses, at most [`MAX_CLIENTS`](crate::MAX_CLIENTS) ranges; none: all.
    pub clients: Option<BTreeSet<IpNet>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExposedPort {
    /// IP protocol number: 6 TCP, 17 UDP, 132 SCTP.
    pub protocol: u8,
    pub port: u16,
    /// The port at every address of every node.
    pub node_port: Option<u16>,
    /// This droplet's backends, if those of others are not reached from outside.
    pub local: Option<BTreeSet<Backend>>,
    /// Addresses of the local backends that end. They serve as long as no other does, and load balancers are not told
    /// of them.
    pub ending: BTreeSet<IpAddr>,
    /// Droplets with backends. They get a share of the traffic that comes from elsewhere than a droplet; in the VPC of
    /// nodes they get what this node's own processes send, if this droplet has no backend.
    pub peers: BTreeSet<Underlay>,
    /// Seconds for which a client keeps its backend after its last connection; 0: none.
    pub affinity: u32,
    /// Backends wherever they are, among which the node chooses by itself because of the affinity. If there are none,
    /// the node translates to the service's address.
    pub members: BTreeSet<Backend>,
}

impl Exposed {
    /// Returns the backends that are reached by their own addresses.
    pub fn local_backends(&self) -> impl Iterator<Item = &Backend> {
        self.ports.iter().flat_map(|port| port.local.iter().flatten())
    }

    /// Returns the addresses of the local backends that don't end.
    pub fn staying(&self) -> BTreeSet<IpAddr> {
        let staying = self.ports.iter().flat_map(|port| {
            let addresses = port.local.iter().flatten().map(|backend| backend.address);
            addresses.filter(|address| !port.ending.contains(address))
        });
        staying.collect()
    }

    /// Whether all traffic goes to backends of this droplet.
    pub fn is_local(&self) -> bool {
        self.ports.iter().all(|port| port.local.is_some())
    }
}

fn read(of: IpAddr, port: &proto::ExposedPort) -> Result<ExposedPort, InvalidRow> {
    let node_port = (port.node_port != 0).then_some(port.node_port);
    let local = port.local.then(|| backends(of, &port.backends));
    let ending: Option<_> = port
        .ending
        .iter()
        .map(|bytes| fields::read_address(bytes))
        .collect();
    let peers = port.peers.iter().map(|bytes| match fields::read_address(bytes) {
        Some(IpAddr::V4(peer)) => Some(Underlay(peer)),
        _ => None,
    });
    let peers: Option<_> = peers.collect();
    Ok(ExposedPort {
        protocol: protocol(port.protocol)?,
        port: number(port.port, "exposed.port")?,
        node_port: node_port
            .map(|port| number(port, "exposed.node_port"))
            .transpose()?,
        local: local.transpose()?,
        ending: ending.ok_or(invalid("exposed.ending", "addresses, 16 bytes"))?,
        peers: peers.ok_or(invalid("exposed.peers", "IPv4 addresses, 16 bytes"))?,
        affinity: affinity(port.affinity_seconds, "exposed.affinity_seconds")?,
        members: backends(of, &port.members)?,
    })
}

impl TryFrom<ExposedRow> for Exposed {
    type Error = InvalidRow;

    fn try_from(row: ExposedRow) -> Result<Self, InvalidRow> {
        let (vni, address) = (fields::vni(row.vni)?, service_address(&row.address)?);
        if row.ports.len() > MAX_PORTS {
            return Err(invalid("exposed.ports", "at most 128"));
        }
        let ports = row.ports.iter().map(|port| read(address, port));
        let addresses = row.addresses.iter().map(|bytes| {
            let is_usable =
                |outside: &IpAddr| fields::is_usable(*outside) && outside.is_ipv4() == address.is_ipv4();
            fields::read_address(bytes).filter(is_usable).ok_or(invalid(
                "exposed.addresses",
                "unicast addresses of the service's family, 16 bytes",
            ))
        });
        let health_port = (row.health_port != 0).then_some(row.health_port);
        let health_port = health_port.map(|port| number(port, "exposed.health_port"));
        Ok(Self {
            vni,
            address,
            ports: ports.collect::<Result<_, _>>()?,
            addresses: addresses.collect::<Result<_, _>>()?,
            health_port: health_port.transpose()?,
            service: row.service,
            clients: clients::read(address, row.clients)?,
        })
    }
}

impl From<&Exposed> for ExposedRow {
    fn from(row: &Exposed) -> Self {
        let addresses = row.addresses.iter().map(|address| fields::octets(*address));
        Self {
            vni: row.vni.get(),
            address: fields::octets(row.address),
            ports: row.ports.iter().map(proto::ExposedPort::from).collect(),
            addresses: addresses.collect(),
            health_port: row.health_port.unwrap_or_default().into(),
            service: row.service.clone(),
            clients: clients::write(row.clients.as_ref()),
        }
    }
}

impl From<&ExposedPort> for proto::ExposedPort {
    fn from(port: &ExposedPort) -> Self {
        let backends = port.local.iter().flatten();
        Self {
            protocol: port.protocol.into(),
            port: port.port.into(),
            node_port: port.node_port.unwrap_or_default().into(),
            local: port.local.is_some(),
            backends: backends.map(ServiceBackend::from).collect(),
            ending: port
                .ending
                .iter()
                .map(|address| fields::octets(*address))
                .collect(),
            peers: port.peers.iter().map(|peer| fields::octets(peer.0)).collect(),
            affinity_seconds: port.affinity,
            members: port.members.iter().map(ServiceBackend::from).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders;

    #[test]
    fn what_a_node_cannot_take_connections_for_is_refused_by_field() {
        let refused = |change: &dyn Fn(&mut ExposedRow), field: &str| {
            let mut row = ExposedRow::from(&builders::exposed());
            change(&mut row);
            let error = Exposed::try_from(row).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{field}: expected")), "{error}");
        };
        refused(&|row| row.ports[0].port = 0, "exposed.port");
        refused(&|row| row.ports[0].node_port = 65536, "exposed.node_port");
        refused(&|row| row.ports[0].ending = vec![vec![1]], "exposed.ending");
        refused(&|row| row.ports[0].peers = vec![vec![0xfd; 16]], "exposed.peers");
        refused(
            &|row| row.ports[0].affinity_seconds = 86401,
            "exposed.affinity_seconds",
        );
        refused(&|row| row.ports[0].members[0].port = 0, "service.backends.port");
        refused(&|row| row.addresses = vec![vec![0xfd; 16]], "exposed.addresses");
        refused(&|row| row.health_port = 65536, "exposed.health_port");
        refused(
            &|row| row.ports = vec![row.ports[0].clone(); MAX_PORTS + 1],
            "exposed.ports",
        );
    }

    #[test]
    fn backends_that_end_are_not_counted_among_those_that_stay() {
        let row = builders::exposed();
        assert!(row.is_local());
        assert_eq!(row.local_backends().count(), 2);
        assert_eq!(row.staying().len(), 1);
    }
}

//! A load balancer's address, outside of all VPCs, whose packets droplets take at their NICs for backends of one VPC.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use thuban_api::identifiers::Vni;
use thuban_proto::transit::{self as proto, FrontBackend, FrontRow};

use crate::clients;
use crate::droplet::Underlay;
use crate::fields::{self, InvalidRow, invalid};
use crate::health_check::HealthCheck;
use crate::service::{
    Backend, MAX_BACKENDS, MAX_PORTS, affinity, backend, number, protocol, service_address,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Front {
    /// The VNI of the backends' VPC.
    pub vni: Vni,
    pub address: IpAddr,
    /// The ports of the front: at most [`MAX_PORTS`], no two with the same protocol and port.
    pub ports: Vec<FrontPort>,
    /// The clients that may send, at most [`MAX_CLIENTS`](crate::MAX_CLIENTS) ranges; none: all clients.
    pub clients: Option<BTreeSet<IpNet>>,
    /// The service as `namespace/name`, told to who announces the address; empty: nobody is told.
    pub service: String,
    /// The check that each droplet makes of its own backends; none: nothing is checked.
    pub check: Option<HealthCheck>,
    /// Answers go back through the tunnel to the droplet that took the client's packet.
    pub tunnel: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontPort {
    /// IP protocol number: 6 TCP, 17 UDP, 132 SCTP.
    pub protocol: u8,
    pub port: u16,
    /// Not 0: all connections of a client go to one backend.
    pub affinity: u32,
    /// Backends of the front's family, at most [`MAX_BACKENDS`], each with its droplet.
    pub backends: BTreeMap<Backend, Underlay>,
    /// Addresses of those of them that get no new connections, because their droplets are suspect or they fail their
    /// check.
    pub resting: BTreeSet<IpAddr>,
}

impl TryFrom<FrontRow> for Front {
    type Error = InvalidRow;

    fn try_from(row: FrontRow) -> Result<Self, InvalidRow> {
        let (vni, address) = (fields::vni(row.vni)?, service_address(&row.address)?);
        if row.ports.len() > MAX_PORTS {
            return Err(invalid("front.ports", "at most 128"));
        }
        let ports = row.ports.iter().map(|port| read(address, port));
        let ports: Vec<FrontPort> = ports.collect::<Result<_, _>>()?;
        let different: BTreeSet<_> = ports.iter().map(|port| (port.protocol, port.port)).collect();
        if different.len() != ports.len() {
            return Err(invalid("front.ports", "no two with the same protocol and port"));
        }
        Ok(Self {
            vni,
            address,
            ports,
            clients: clients::read(address, row.clients)?,
            service: row.service,
            check: row.check.map(HealthCheck::try_from).transpose()?,
            tunnel: row.tunnel,
        })
    }
}

fn read(of: IpAddr, port: &proto::FrontPort) -> Result<FrontPort, InvalidRow> {
    if port.backends.len() > MAX_BACKENDS {
        return Err(invalid("front.backends", "at most 16384"));
    }
    let backends = port.backends.iter().map(|told| {
        let droplet = Underlay::read(&told.droplet)?;
        Ok((backend(of, &told.address, told.port)?, droplet))
    });
    let resting: Option<_> = port
        .resting
        .iter()
        .map(|told| fields::read_address(told))
        .collect();
    Ok(FrontPort {
        protocol: protocol(port.protocol)?,
        port: number(port.port, "front.port")?,
        affinity: affinity(port.affinity_seconds, "front.affinity_seconds")?,
        backends: backends.collect::<Result<_, _>>()?,
        resting: resting.ok_or(invalid("front.resting", "addresses, 16 bytes"))?,
    })
}

impl From<&Front> for FrontRow {
    fn from(row: &Front) -> Self {
        Self {
            vni: row.vni.get(),
            address: fields::octets(row.address),
            ports: row.ports.iter().map(proto::FrontPort::from).collect(),
            clients: clients::write(row.clients.as_ref()),
            service: row.service.clone(),
            check: row.check.as_ref().map(Into::into),
            tunnel: row.tunnel,
        }
    }
}

impl From<&FrontPort> for proto::FrontPort {
    fn from(port: &FrontPort) -> Self {
        let backends = port.backends.iter().map(|(backend, droplet)| FrontBackend {
            address: fields::octets(backend.address),
            port: backend.port.into(),
            droplet: droplet.octets().to_vec(),
        });
        Self {
            protocol: port.protocol.into(),
            port: port.port.into(),
            affinity_seconds: port.affinity,
            backends: backends.collect(),
            resting: port
                .resting
                .iter()
                .map(|address| fields::octets(*address))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders;

    #[test]
    fn what_no_front_can_have_is_refused_by_field() {
        let refused = |change: &dyn Fn(&mut FrontRow), field: &str| {
            let mut row = FrontRow::from(&builders::front());
            change(&mut row);
            let error = Front::try_from(row).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{field}: expected")), "{error}");
        };
        refused(&|row| row.address = vec![0xff; 16], "service.address");
        refused(&|row| row.ports[0].port = 0, "front.port");
        refused(&|row| row.ports[0].protocol = 1, "service.protocol");
        refused(
            &|row| row.ports[0].affinity_seconds = 86401,
            "front.affinity_seconds",
        );
        refused(&|row| row.ports[0].backends[0].port = 0, "service.backends.port");
        refused(
            &|row| row.ports[0].backends[0].address = vec![0xfd; 16],
            "service.backends.address",
        );
        refused(&|row| row.ports[0].backends[0].droplet = vec![1], "droplet");
        refused(&|row| row.ports[0].resting = vec![vec![1]], "front.resting");
        refused(
            &|row| row.check = Some(proto::HealthCheck::default()),
            "check.interval_ms",
        );
        refused(
            &|row| row.ports = vec![row.ports[0].clone(); MAX_PORTS + 1],
            "front.ports",
        );
        refused(&|row| row.ports = vec![row.ports[0].clone(); 2], "front.ports");
    }
}

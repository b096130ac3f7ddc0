//! A service's address that nodes serve for the pods of one VPC: its backends are outside of that VPC.

use std::net::IpAddr;

use thuban_api::identifiers::Vni;
use thuban_proto::transit::{ServicePort, ServiceRow};

use crate::fields::{self, InvalidRow};
use crate::service::{Port, read_ports, service_address};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeService {
    /// The VNI of the VPC whose pods reach the service.
    pub vni: Vni,
    pub address: IpAddr,
    /// Ports as in [`crate::Service`]; none if the service is `inside`.
    pub ports: Vec<Port>,
    /// The backends are in the VPC of the node's own endpoint, which sends packets for the service on to them.
    pub inside: bool,
    /// The service is the cluster's DNS: pods reach it only by a view.
    pub names: bool,
}

impl TryFrom<ServiceRow> for NodeService {
    type Error = InvalidRow;

    fn try_from(row: ServiceRow) -> Result<Self, InvalidRow> {
        let (vni, address) = (fields::vni(row.vni)?, service_address(&row.address)?);
        Ok(Self {
            vni,
            address,
            ports: read_ports(address, &row.ports)?,
            inside: row.inside,
            names: row.names,
        })
    }
}

impl From<&NodeService> for ServiceRow {
    fn from(row: &NodeService) -> Self {
        Self {
            vni: row.vni.get(),
            address: fields::octets(row.address),
            ports: row.ports.iter().map(ServicePort::from).collect(),
            inside: row.inside,
            names: row.names,
        }
    }
}

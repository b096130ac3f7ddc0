//! Rows of the contract, validated: what cannot be a table row never gets further than this.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use thuban_api::identifiers::mapped;
use thuban_common::tables::{
    Address, DropletAddress, DropletEntry, EndpointKey, GATEWAY_MAC, LOAD_OF_DIVIDER, LoadKey, MAX_MEMBERS,
    Members, RemoteEntry, SUBNET_BOUNCER_HERE, SUBNET_BY_NODE, SUBNET_CLOSED, SUBNET_SERVICES, SubnetEntry,
    VPC_DIVIDER_HERE, VPC_EGRESS, VPC_HOST_ACCESS, VpcEntry,
};
use thuban_proto::transit as proto;

use super::service::{self, Exposed, Service};
use super::visible::visible;
use crate::dataplane::tables::{TableEntry, TableKey};
use crate::dns::Visible;

/// Identifies a row. The order matters: a network's row comes before its VPC's, see `Program::contributions`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RowKey {
    Droplet(DropletAddress),
    Network { vni: u32, network: u32 },
    Vpc(u32),
    Local { vni: u32, address: Address },
    Bouncer { vni: u32, address: Address },
    Direct { vni: u32, address: Address },
    Forward { vni: u32, address: Address },
    Refused(String),
    Service { vni: u32, address: Address },
    NodeService { vni: u32, address: Address },
    Exposed { vni: u32, address: Address },
}

/// An endpoint that lives on this droplet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalEndpoint {
    pub vni: u32,
    pub address: Ipv4Addr,
    /// Its address and the length of its network's prefix.
    pub address6: Option<Ipv6Net>,
    pub network: u32,
    pub prefix_length: u8,
    pub gateway: Ipv4Addr,
    pub mac: [u8; 6],
    pub pod_uid: String,
    pub vpc_name: String,
    pub network_name: String,
    pub ready: bool,
    /// The droplet that had it before and may send on what others still send there.
    pub moved_from: Option<DropletAddress>,
    /// The node itself; not in files of a transitd that knew no such endpoints.
    #[serde(default)]
    pub host: bool,
}

impl LocalEndpoint {
    /// IPv4, then IPv6 if it has it.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let second = self.address6.map(|net| IpAddr::from(net.addr()));
        std::iter::once(self.address.into()).chain(second)
    }

    /// The same as keys of tables.
    pub fn keys(&self) -> impl Iterator<Item = EndpointKey> + use<> {
        let vni = self.vni;
        self.addresses().map(move |address| EndpointKey {
            vni,
            address: mapped(address),
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Row {
    Droplet(DropletAddress),
    Vpc {
        vni: u32,
        cidrs: Vec<IpNet>,
        /// Addresses of services alone.
        service_cidrs: Vec<IpNet>,
        /// Outside, and not to be reached.
        closed_cidrs: Vec<IpNet>,
        /// Of its own, those that services have.
        service_addresses: Vec<IpNet>,
        entry: VpcEntry,
        /// What of the cluster's names its pods find.
        visible: Arc<Visible>,
    },
    Network {
        vni: u32,
        network: u32,
        cidrs: Vec<IpNet>,
        entry: SubnetEntry,
    },
    Local(LocalEndpoint),
    /// Of one endpoint: `key` is its IPv4 address, `key6` its IPv6 address if it has one.
    Bouncer {
        key: EndpointKey,
        key6: Option<EndpointKey>,
        droplet: DropletAddress,
    },
    Direct {
        key: EndpointKey,
        droplet: DropletAddress,
    },
    Forward {
        key: EndpointKey,
        droplet: DropletAddress,
    },
    Refused {
        pod_uid: String,
        reason: String,
        message: String,
    },
    Service(Service),
    /// Served by this node's own stack.
    NodeService(Service),
    Exposed(Exposed),
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidRow {
    #[error("a row or key of a kind that this transitd does not know")]
    UnknownKind,
    #[error("{field}: expected {expected}")]
    Field {
        field: &'static str,
        expected: &'static str,
    },
}

impl TryFrom<proto::Row> for Row {
    type Error = InvalidRow;

    fn try_from(row: proto::Row) -> Result<Self, InvalidRow> {
        use proto::row::Row as Kind;
        Ok(match row.row.ok_or(InvalidRow::UnknownKind)? {
            Kind::Droplet(row) => Self::Droplet(droplet(&row.address)?),
            Kind::Vpc(row) => {
                let flag = |on, bit| if on { bit } else { 0 };
                let flags = flag(row.divider_here, VPC_DIVIDER_HERE)
                    | flag(row.host_access, VPC_HOST_ACCESS)
                    | flag(row.egress, VPC_EGRESS);
                let entry = VpcEntry {
                    flags,
                    dividers: members(&row.dividers, &row.relays)?,
                };
                Self::Vpc {
                    vni: vni(row.vni)?,
                    cidrs: cidrs(&row.cidrs, &row.cidrs6)?,
                    service_cidrs: of_both_families(&row.service_cidrs, "service_cidrs")?,
                    closed_cidrs: of_both_families(&row.closed_cidrs, "closed_cidrs")?,
                    service_addresses: row
                        .service_addresses
                        .iter()
                        .map(|address| service::address(address, "service_addresses"))
                        .collect::<Result<_, _>>()?,
                    entry,
                    visible: Arc::new(visible(
                        row.visible_namespaces,
                        &row.visible_services,
                        &row.hidden_services,
                    )?),
                }
            }
            Kind::Network(row) => {
                let network = network(row.network)?;
                let flags = if row.bouncer_here { SUBNET_BOUNCER_HERE } else { 0 };
                let entry = SubnetEntry {
                    network,
                    flags,
                    bouncers: members(&row.bouncers, &row.relays)?,
                };
                Self::Network {
                    vni: vni(row.vni)?,
                    network,
                    cidrs: cidrs(&row.cidrs, &row.cidrs6)?,
                    entry,
                }
            }
            Kind::Local(row) => Self::Local(local(row)?),
            Kind::Bouncer(row) => Self::Bouncer {
                key: key(row.vni, &row.address)?,
                key6: address6(&row.address6)?.map(|address| EndpointKey {
                    vni: row.vni,
                    address: address.octets(),
                }),
                droplet: droplet(&row.droplet)?,
            },
            Kind::Direct(row) => Self::Direct {
                key: key(row.vni, &row.address)?,
                droplet: droplet(&row.droplet)?,
            },
            Kind::Forward(row) => Self::Forward {
                key: key(row.vni, &row.address)?,
                droplet: droplet(&row.droplet)?,
            },
            Kind::Refused(row) => Self::Refused {
                pod_uid: pod_uid(row.pod_uid)?,
                reason: row.reason,
                message: row.message,
            },
            Kind::Service(row) => Self::Service(Service::try_from(row)?),
            Kind::NodeService(row) => Self::NodeService(Service::try_from(row)?),
            Kind::Exposed(row) => Self::Exposed(Exposed::try_from(row)?),
        })
    }
}

impl Row {
    pub fn key(&self) -> RowKey {
        match self {
            Self::Droplet(address) => RowKey::Droplet(*address),
            Self::Vpc { vni, .. } => RowKey::Vpc(*vni),
            Self::Network { vni, network, .. } => RowKey::Network {
                vni: *vni,
                network: *network,
            },
            Self::Local(e) => RowKey::Local {
                vni: e.vni,
                address: e.address.to_ipv6_mapped().octets(),
            },
            Self::Bouncer { key, .. } => RowKey::Bouncer {
                vni: key.vni,
                address: key.address,
            },
            Self::Direct { key, .. } => RowKey::Direct {
                vni: key.vni,
                address: key.address,
            },
            Self::Forward { key, .. } => RowKey::Forward {
                vni: key.vni,
                address: key.address,
            },
            Self::Refused { pod_uid, .. } => RowKey::Refused(pod_uid.clone()),
            Self::Service(Service { key, .. }) => RowKey::Service {
                vni: key.vni,
                address: key.address,
            },
            Self::NodeService(Service { key, .. }) => RowKey::NodeService {
                vni: key.vni,
                address: key.address,
            },
            Self::Exposed(Exposed { key, .. }) => RowKey::Exposed {
                vni: key.vni,
                address: key.address,
            },
        }
    }

    /// The service, if the node's own stack serves it.
    pub fn served(&self) -> Option<&Service> {
        match self {
            Self::NodeService(service) => Some(service),
            _ => None,
        }
    }

    /// What the row asks of the tables by itself. A service's tables are `dataplane::services`'.
    pub fn table_rows(&self) -> Vec<(TableKey, TableEntry)> {
        let remote = |droplet: &DropletAddress| {
            TableEntry::Remote(RemoteEntry {
                droplet: *droplet,
                used: 0,
            })
        };
        match self {
            Self::Droplet(address) => {
                vec![(
                    TableKey::Droplet(*address),
                    TableEntry::Droplet(DropletEntry { flags: 0 }),
                )]
            }
            Self::Vpc {
                vni,
                cidrs,
                service_cidrs,
                closed_cidrs,
                service_addresses,
                entry,
                ..
            } => {
                let mut rows = vec![(TableKey::Vpc(*vni), TableEntry::Vpc(*entry))];
                let is_here = entry.flags & VPC_DIVIDER_HERE != 0;
                rows.extend(is_here.then(|| load(*vni, LOAD_OF_DIVIDER)));
                // A range that is closed and the VPC's is the VPC's.
                let own = |cidr: &&IpNet| !cidrs.contains(cidr) && !service_cidrs.contains(cidr);
                let closed = closed_cidrs.iter().filter(own);
                let ranges = cidrs.iter().map(|cidr| (cidr, 0));
                let services = service_cidrs.iter().chain(service_addresses);
                let ranges = ranges.chain(services.map(|cidr| (cidr, SUBNET_SERVICES)));
                let ranges = ranges.chain(closed.map(|cidr| (cidr, SUBNET_CLOSED)));
                rows.extend(ranges.map(|(cidr, flags)| (subnet(*vni, *cidr), range(flags))));
                rows
            }
            Self::NodeService(Service { key, .. }) => {
                let key = TableKey::Subnet {
                    vni: key.vni,
                    address: key.address,
                    prefix: 128,
                };
                vec![(key, range(SUBNET_BY_NODE))]
            }
            Self::Network {
                vni,
                network,
                cidrs,
                entry,
            } => {
                let is_here = entry.flags & SUBNET_BOUNCER_HERE != 0;
                let ranges = cidrs
                    .iter()
                    .map(|cidr| (subnet(*vni, *cidr), TableEntry::Subnet(*entry)));
                ranges.chain(is_here.then(|| load(*vni, *network))).collect()
            }
            Self::Local(LocalEndpoint {
                moved_from: Some(droplet),
                vni,
                address,
                address6,
                ..
            }) => {
                let addresses = [Some(address.to_ipv6_mapped()), address6.map(|net| net.addr())];
                let keys = addresses.into_iter().flatten().map(|address| EndpointKey {
                    vni: *vni,
                    address: address.octets(),
                });
                keys.map(|key| (TableKey::Forwarder(key), remote(droplet)))
                    .collect()
            }
            Self::Bouncer { key, key6, droplet } => {
                let keys = [Some(key), key6.as_ref()].into_iter().flatten();
                keys.map(|key| (TableKey::Bouncer(*key), remote(droplet)))
                    .collect()
            }
            Self::Direct { key, droplet } => vec![(TableKey::Direct(*key), remote(droplet))],
            Self::Forward { key, droplet } => vec![(TableKey::Forward(*key), remote(droplet))],
            Self::Local(_) | Self::Refused { .. } | Self::Service(_) | Self::Exposed(_) => Vec::new(),
        }
    }
}

fn local(row: proto::LocalRow) -> Result<LocalEndpoint, InvalidRow> {
    let key = key(row.vni, &row.address)?;
    let unicast = "an IPv4 unicast address, mapped into 16 bytes";
    let address = Ipv6Addr::from(key.address)
        .to_ipv4_mapped()
        .filter(|a| !a.is_unspecified() && !a.is_multicast() && !a.is_broadcast())
        .ok_or(InvalidRow::Field {
            field: "local.address",
            expected: unicast,
        })?;
    let prefix_length = u8::try_from(row.prefix_length)
        .ok()
        .filter(|p| (1..=32).contains(p));
    let mac: Option<[u8; 6]> = row.mac.as_slice().try_into().ok();
    let prefix6 = u8::try_from(row.prefix_length6).unwrap_or_default();
    let with_prefix = |address| {
        let expected = "1 to 128";
        let net = Ipv6Net::new(address, prefix6)
            .ok()
            .filter(|net| net.prefix_len() > 0);
        net.ok_or(InvalidRow::Field {
            field: "local.prefix_length6",
            expected,
        })
    };
    Ok(LocalEndpoint {
        vni: key.vni,
        address,
        address6: address6(&row.address6)?.map(with_prefix).transpose()?,
        network: network(row.network)?,
        prefix_length: prefix_length.ok_or(InvalidRow::Field {
            field: "local.prefix_length",
            expected: "1 to 32",
        })?,
        gateway: row.gateway.parse().map_err(|_| InvalidRow::Field {
            field: "local.gateway",
            expected: "an IPv4 address",
        })?,
        mac: mac
            .filter(|mac| mac[0] & 1 == 0 && *mac != [0; 6] && *mac != GATEWAY_MAC)
            .ok_or(InvalidRow::Field {
                field: "local.mac",
                expected: "6 bytes, a unicast MAC address that is not the gateway's",
            })?,
        pod_uid: pod_uid(row.pod_uid)?,
        vpc_name: row.vpc_name,
        network_name: row.network_name,
        ready: row.ready,
        moved_from: match row.moved_from.as_slice() {
            [] => None,
            address => Some(address.try_into().map_err(|_| InvalidRow::Field {
                field: "local.moved_from",
                expected: "empty, or an IPv4 address of 4 bytes",
            })?),
        },
        host: row.host,
    })
}

pub(super) fn pod_uid(uid: String) -> Result<String, InvalidRow> {
    if uid.is_empty() {
        return Err(InvalidRow::Field {
            field: "pod_uid",
            expected: "the pod's UID",
        });
    }
    Ok(uid)
}

pub(super) fn vni(vni: u32) -> Result<u32, InvalidRow> {
    if vni == 0 || vni >= 1 << 24 {
        return Err(InvalidRow::Field {
            field: "vni",
            expected: "1 to 16777215",
        });
    }
    Ok(vni)
}

pub(super) fn network(network: u32) -> Result<u32, InvalidRow> {
    if network == 0 {
        return Err(InvalidRow::Field {
            field: "network",
            expected: "a network's id, not 0",
        });
    }
    Ok(network)
}

pub(super) fn droplet(address: &[u8]) -> Result<DropletAddress, InvalidRow> {
    address.try_into().map_err(|_| InvalidRow::Field {
        field: "droplet",
        expected: "an IPv4 address of 4 bytes",
    })
}

pub(super) fn key(number: u32, address: &[u8]) -> Result<EndpointKey, InvalidRow> {
    let address = address.try_into().map_err(|_| InvalidRow::Field {
        field: "address",
        expected: "an address of 16 bytes",
    })?;
    Ok(EndpointKey {
        vni: vni(number)?,
        address,
    })
}

/// The IPv6 address of an endpoint: empty is none.
fn address6(bytes: &[u8]) -> Result<Option<Ipv6Addr>, InvalidRow> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let address = <[u8; 16]>::try_from(bytes).ok().map(Ipv6Addr::from);
    let is_usable = |a: &Ipv6Addr| {
        !a.is_unspecified()
            && !a.is_loopback()
            && !a.is_multicast()
            && !a.is_unicast_link_local()
            && a.to_ipv4_mapped().is_none()
    };
    address.filter(is_usable).map(Some).ok_or(InvalidRow::Field {
        field: "address6",
        expected: "empty, or an IPv6 unicast address of 16 bytes that is not link-local",
    })
}

/// `relays` stand behind the members, as many as there is room for.
fn members(list: &[Vec<u8>], relays: &[Vec<u8>]) -> Result<Members, InvalidRow> {
    if list.len() > MAX_MEMBERS {
        return Err(InvalidRow::Field {
            field: "members",
            expected: "at most 8 droplets",
        });
    }
    let mut droplets = [[0; 4]; MAX_MEMBERS];
    for (slot, address) in droplets.iter_mut().zip(list) {
        *slot = droplet(address)?;
    }
    // Every droplet must rank the same list.
    droplets[..list.len()].sort_unstable();
    for (slot, address) in droplets[list.len()..].iter_mut().zip(relays) {
        *slot = droplet(address)?;
    }
    Ok(Members {
        count: list.len() as u32,
        droplets,
    })
}

/// IPv4 ranges and IPv6 ranges, which come in fields of their own.
fn cidrs(list: &[String], list6: &[String]) -> Result<Vec<IpNet>, InvalidRow> {
    let v4 = list.iter().map(|text| {
        text.parse::<Ipv4Net>()
            .ok()
            .filter(|cidr| cidr.addr() == cidr.network())
            .map(IpNet::from)
            .ok_or(InvalidRow::Field {
                field: "cidrs",
                expected: "IPv4 CIDRs whose host bits are 0",
            })
    });
    let v6 = list6.iter().map(|text| {
        text.parse::<Ipv6Net>()
            .ok()
            .filter(|cidr| cidr.addr() == cidr.network() && cidr.addr().to_ipv4_mapped().is_none())
            .map(IpNet::from)
            .ok_or(InvalidRow::Field {
                field: "cidrs6",
                expected: "IPv6 CIDRs whose host bits are 0",
            })
    });
    v4.chain(v6).collect()
}

/// Ranges of both families in one field.
fn of_both_families(list: &[String], field: &'static str) -> Result<Vec<IpNet>, InvalidRow> {
    let read = |text: &String| {
        text.parse::<IpNet>()
            .ok()
            .filter(|cidr| cidr.addr() == cidr.network())
            .filter(|cidr| !matches!(cidr, IpNet::V6(cidr) if cidr.addr().to_ipv4_mapped().is_some()))
            .ok_or(InvalidRow::Field {
                field,
                expected: "CIDRs whose host bits are 0",
            })
    };
    list.iter().map(read).collect()
}

fn load(vni: u32, network: u32) -> (TableKey, TableEntry) {
    (TableKey::Load(LoadKey { vni, network }), TableEntry::Load)
}

/// A range that is no network's.
fn range(flags: u32) -> TableEntry {
    TableEntry::Subnet(SubnetEntry {
        network: 0,
        flags,
        bouncers: Members {
            count: 0,
            droplets: [[0; 4]; MAX_MEMBERS],
        },
    })
}

fn subnet(vni: u32, cidr: IpNet) -> TableKey {
    let (address, prefix) = match cidr {
        IpNet::V4(cidr) => (cidr.network().to_ipv6_mapped(), 96 + cidr.prefix_len()),
        IpNet::V6(cidr) => (cidr.network(), cidr.prefix_len()),
    };
    TableKey::Subnet {
        vni,
        address: address.octets(),
        prefix,
    }
}

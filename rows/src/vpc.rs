//! The row of a VPC: its ranges, the droplets with its dividers, and the outside addresses and names that its pods
//! reach and see.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use thuban_api::Dscp;
use thuban_api::identifiers::Vni;
use thuban_proto::transit::VpcRow;

use crate::byte_rate::ByteRate;
use crate::fields::{self, InvalidRow, invalid};
use crate::members::{self, Members};

#[allow(clippy::struct_excessive_bools)] // each is a fact of its own, none follows from another
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vpc {
    pub vni: Vni,
    /// Ranges of both families, IPv4 first.
    pub cidrs: Vec<IpNet>,
    /// Ranges that only services have addresses in, the same in each VPC.
    pub service_cidrs: Vec<IpNet>,
    /// Ranges outside of the VPC that its pods can't reach.
    pub closed_cidrs: Vec<IpNet>,
    /// Addresses of the VPC that services have.
    pub service_addresses: BTreeSet<IpAddr>,
    pub dividers: Members,
    /// This droplet is one of the dividers, or will be one, or was one until now.
    pub divider_here: bool,
    /// Packets to outside go to the host's stack: this is the VPC that nodes are in.
    pub host_access: bool,
    /// Packets to outside leave in the node's name.
    pub egress: bool,
    /// Who is denied by network policy hears so.
    pub reject: bool,
    /// What outer headers bear; none: what the inner header does.
    pub dscp: Option<Dscp>,
    /// What the VPC's pods may send out of this droplet.
    pub egress_rate: Option<ByteRate>,
    pub kept: Kept,
    /// The names that the VPC's pods see; the owner of a view shares this value.
    pub visible: Arc<Visible>,
}

/// What the VPC's attached endpoints keep of the policy that an earlier operator told of, until the row says less. What
/// their own rows say of it counts then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    #[default]
    Nothing,
    /// Their sets.
    Sets,
    /// Their class and sets.
    All,
}

impl Kept {
    const fn number(self) -> u32 {
        match self {
            Self::Nothing => 0,
            Self::Sets => 1,
            Self::All => 2,
        }
    }

    fn read(number: u32) -> Result<Self, InvalidRow> {
        let all = [Self::Nothing, Self::Sets, Self::All];
        let kept = all.into_iter().find(|kept| kept.number() == number);
        kept.ok_or(invalid("kept", "0 to 2"))
    }
}

/// A Service, on the wire `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceName {
    pub namespace: String,
    pub name: String,
}

impl ServiceName {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

/// The names that a VPC's pods see in the cluster's DNS. Names are as in Kubernetes: lowercase.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Visible {
    /// Namespaces whose pods and Services are in the VPC.
    pub namespaces: BTreeSet<String>,
    /// Services besides those of the namespaces: shared ones, and those that an annotation puts into this VPC.
    pub services: BTreeSet<ServiceName>,
    /// Services that are not in this VPC though their namespace is. `hidden` goes before `services`.
    pub hidden: BTreeSet<ServiceName>,
}

impl Visible {
    fn read(row: &VpcRow) -> Result<Self, InvalidRow> {
        let read = |names: &[String], field| {
            let names = names.iter().map(|name| match name.split_once('/') {
                Some((namespace, name)) => Ok(ServiceName::new(namespace, name)),
                None => Err(invalid(field, "namespace/name")),
            });
            names.collect::<Result<_, _>>()
        };
        Ok(Self {
            namespaces: row.visible_namespaces.iter().cloned().collect(),
            services: read(&row.visible_services, "visible_services")?,
            hidden: read(&row.hidden_services, "hidden_services")?,
        })
    }
}

fn names(services: &BTreeSet<ServiceName>) -> Vec<String> {
    let names = services.iter().map(|of| format!("{}/{}", of.namespace, of.name));
    names.collect()
}

/// Reads a list of unicast addresses.
fn usable(list: &[Vec<u8>], field: &'static str) -> Result<BTreeSet<IpAddr>, InvalidRow> {
    let read = |bytes: &Vec<u8>| {
        let address = fields::read_address(bytes).filter(|address| fields::is_usable(*address));
        address.ok_or(invalid(field, "unicast addresses, 16 bytes"))
    };
    list.iter().map(read).collect()
}

/// Reads a DSCP, to which one was added. 0 is none.
fn read_dscp(number: u32) -> Result<Option<Dscp>, InvalidRow> {
    let Some(dscp) = number.checked_sub(1) else {
        return Ok(None);
    };
    let dscp = u8::try_from(dscp).ok().and_then(Dscp::new);
    dscp.map(Some).ok_or(invalid("dscp", "0 to 64"))
}

impl TryFrom<VpcRow> for Vpc {
    type Error = InvalidRow;

    fn try_from(row: VpcRow) -> Result<Self, InvalidRow> {
        Ok(Self {
            vni: fields::vni(row.vni)?,
            cidrs: fields::cidrs(&row.cidrs, &row.cidrs6)?,
            service_cidrs: fields::of_both_families(&row.service_cidrs, "service_cidrs")?,
            closed_cidrs: fields::of_both_families(&row.closed_cidrs, "closed_cidrs")?,
            service_addresses: usable(&row.service_addresses, "service_addresses")?,
            dividers: Members::read(&row.dividers, &row.relays)?,
            divider_here: row.divider_here,
            host_access: row.host_access,
            egress: row.egress,
            reject: row.reject,
            dscp: read_dscp(row.dscp)?,
            egress_rate: ByteRate::read_option(row.egress_rate, "egress_rate")?,
            kept: Kept::read(row.kept)?,
            visible: Arc::new(Visible::read(&row)?),
        })
    }
}

impl From<&Vpc> for VpcRow {
    fn from(row: &Vpc) -> Self {
        let (cidrs, cidrs6) = fields::by_family(&row.cidrs);
        let addresses = row.service_addresses.iter();
        Self {
            vni: row.vni.get(),
            cidrs,
            cidrs6,
            dividers: members::octets(&row.dividers.used),
            relays: members::octets(&row.dividers.relays),
            divider_here: row.divider_here,
            host_access: row.host_access,
            egress: row.egress,
            reject: row.reject,
            dscp: row.dscp.map_or(0, |dscp| u32::from(dscp.get()) + 1),
            egress_rate: ByteRate::number(row.egress_rate),
            kept: row.kept.number(),
            service_cidrs: fields::texts(&row.service_cidrs),
            closed_cidrs: fields::texts(&row.closed_cidrs),
            service_addresses: addresses.map(|address| fields::octets(*address)).collect(),
            visible_namespaces: row.visible.namespaces.iter().cloned().collect(),
            visible_services: names(&row.visible.services),
            hidden_services: names(&row.visible.hidden),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders;

    #[test]
    fn what_is_no_range_no_address_and_no_name_is_refused_by_field() {
        let refused = |change: &dyn Fn(&mut VpcRow), field: &str| {
            let mut row = VpcRow::from(&builders::vpc());
            change(&mut row);
            let error = Vpc::try_from(row).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{field}: expected")), "{error}");
        };
        for bad in ["10.96.0.1/16", "::ffff:10.96.0.0/112", "x"] {
            refused(&|row| row.service_cidrs = vec![bad.into()], "service_cidrs");
            refused(&|row| row.closed_cidrs = vec![bad.into()], "closed_cidrs");
        }
        refused(
            &|row| row.service_addresses = vec![vec![10, 0, 0, 1]],
            "service_addresses",
        );
        refused(
            &|row| row.service_addresses = vec![vec![0; 16]],
            "service_addresses",
        );
        refused(
            &|row| row.visible_services = vec!["web".into()],
            "visible_services",
        );
        refused(&|row| row.hidden_services = vec!["web".into()], "hidden_services");
        refused(&|row| row.dscp = 65, "dscp");
        refused(&|row| row.egress_rate = 124, "egress_rate");
        refused(&|row| row.kept = 3, "kept");
        refused(&|row| row.vni = 0, "vni");
        refused(&|row| row.vni = 1 << 24, "vni");
    }
}

//! A network of a VPC: its ranges, and the droplets with its bouncers.

use ipnet::IpNet;
use thuban_api::identifiers::{NetworkId, Vni};
use thuban_proto::transit::NetworkRow;

use crate::fields::{self, InvalidRow};
use crate::members::{self, Members};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    pub vni: Vni,
    pub id: NetworkId,
    /// Ranges of both families, IPv4 first.
    pub cidrs: Vec<IpNet>,
    pub bouncers: Members,
    /// This droplet is one of the bouncers, or will be one, or was one until now.
    pub bouncer_here: bool,
    /// Packets of its pods to outside are dropped, whatever the VPC's row says.
    pub private: bool,
}

impl TryFrom<NetworkRow> for Network {
    type Error = InvalidRow;

    fn try_from(row: NetworkRow) -> Result<Self, InvalidRow> {
        Ok(Self {
            vni: fields::vni(row.vni)?,
            id: fields::network(row.network)?,
            cidrs: fields::cidrs(&row.cidrs, &row.cidrs6)?,
            bouncers: Members::read(&row.bouncers, &row.relays)?,
            bouncer_here: row.bouncer_here,
            private: row.private,
        })
    }
}

impl From<&Network> for NetworkRow {
    fn from(row: &Network) -> Self {
        let (cidrs, cidrs6) = fields::by_family(&row.cidrs);
        Self {
            vni: row.vni.get(),
            network: row.id.get(),
            cidrs,
            cidrs6,
            bouncers: members::octets(&row.bouncers.used),
            relays: members::octets(&row.bouncers.relays),
            bouncer_here: row.bouncer_here,
            private: row.private,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders;

    #[test]
    fn ranges_are_read_by_family_and_refused_by_field() {
        let good = NetworkRow::from(&builders::network());
        let with = |cidrs: &[&str], cidrs6: &[&str]| {
            let texts = |list: &[&str]| list.iter().map(ToString::to_string).collect();
            Network::try_from(NetworkRow {
                cidrs: texts(cidrs),
                cidrs6: texts(cidrs6),
                ..good.clone()
            })
        };
        assert_eq!(with(&["10.0.1.0/24"], &["fd00:1::/64"]).unwrap().cidrs.len(), 2);
        for bad in ["10.0.1.1/24", "fd00:1::/64", "x"] {
            let error = with(&[bad], &[]).unwrap_err().to_string();
            assert!(error.starts_with("cidrs: expected"), "{bad}: {error}");
        }
        for bad in ["fd00:1::1/64", "10.0.2.0/24", "::ffff:10.0.0.0/112", "x"] {
            let error = with(&[], &[bad]).unwrap_err().to_string();
            assert!(error.starts_with("cidrs6: expected"), "{bad}: {error}");
        }
    }
}

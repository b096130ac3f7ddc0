//! A class: the endpoints of a VPC that its policies' peers don't tell apart.

use std::collections::BTreeSet;

use thuban_api::identifiers::Vni;
use thuban_proto::transit as proto;

use crate::fields::{self, InvalidRow, invalid};
use crate::policy_id::PolicyId;

/// The only group of the class [`PolicyId::SHARED_SERVICE`]. Other groups have hashes for ids.
pub const SHARED_SERVICE_GROUP: u64 = u64::MAX;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Class {
    pub vni: Vni,
    pub id: PolicyId,
    /// What peers of policies select its endpoints.
    pub groups: BTreeSet<u64>,
    /// The ports of its endpoints that rules name.
    pub names: BTreeSet<NamedPort>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamedPort {
    /// Not empty.
    pub name: String,
    /// TCP, UDP or SCTP.
    pub protocol: u8,
    pub port: u16,
}

/// Reads the number of a protocol that has ports.
pub fn protocol(number: u32, field: &'static str) -> Result<u8, InvalidRow> {
    match number {
        6 | 17 | 132 => Ok(number as u8),
        _ => Err(invalid(field, "6, 17 or 132")),
    }
}

impl TryFrom<proto::ClassRow> for Class {
    type Error = InvalidRow;

    fn try_from(row: proto::ClassRow) -> Result<Self, InvalidRow> {
        let port = |told: proto::NamedPort| {
            Ok(NamedPort {
                name: Some(told.name)
                    .filter(|name| !name.is_empty())
                    .ok_or(invalid("class.names.name", "the name of a port"))?,
                protocol: protocol(told.protocol, "class.names.protocol")?,
                port: u16::try_from(told.port).map_err(|_| invalid("class.names.port", "0 to 65535"))?,
            })
        };
        Ok(Self {
            vni: fields::vni(row.vni)?,
            id: PolicyId::read(row.id)?,
            groups: row.groups.into_iter().collect(),
            names: row.names.into_iter().map(port).collect::<Result<_, _>>()?,
        })
    }
}

impl From<&Class> for proto::ClassRow {
    fn from(row: &Class) -> Self {
        let port = |port: &NamedPort| proto::NamedPort {
            name: port.name.clone(),
            protocol: port.protocol.into(),
            port: port.port.into(),
        };
        Self {
            vni: row.vni.get(),
            id: row.id.get(),
            groups: row.groups.iter().copied().collect(),
            names: row.names.iter().map(port).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders;

    #[test]
    fn a_class_that_no_endpoint_can_have_is_refused_by_field() {
        let refused = |change: &dyn Fn(&mut proto::ClassRow), field: &str| {
            let mut row = proto::ClassRow::from(&builders::class());
            change(&mut row);
            let error = Class::try_from(row).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{field}: expected")), "{error}");
        };
        refused(&|row| row.id = 0, "id");
        refused(&|row| row.id = 1 << 24, "id");
        refused(&|row| row.vni = 0, "vni");
        refused(&|row| row.names[0].name.clear(), "class.names.name");
        refused(&|row| row.names[0].protocol = 1, "class.names.protocol");
        refused(&|row| row.names[0].port = 65_536, "class.names.port");
    }
}

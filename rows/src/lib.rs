//! The contract between operator and droplet: which rows there are, what identifies them, and how they are sent.
//!
//! The operator's model makes rows, and a stream sends them as messages of `transit.proto`. transitd reads them back by
//! `TryFrom`, which validates them: a row that a table can't have never gets further than this crate. transitd alone
//! decides what a row means in a droplet's tables. No I/O, and nothing of eBPF.
//!
//! Invariant: every row that is read is written back as it was read, and a key names one row of one droplet.
//!
//! # To add a field to a kind of row
//!
//! For a field of a network's row:
//! 1. `api/src/network.rs` (spec or status), the operator's `on_network`, and `Network` and `contribute_network` in
//!    `operator/src/model/world/`: where its value comes from.
//! 2. `proto/proto/transit.proto`: a new number in `NetworkRow`. Say what its absence means, for the peer may be older.
//! 3. `rows/src/network.rs`: the field, validated in `TryFrom` and written in `From`; its value in `builders.rs`.
//! 4. `transitd/src/program/table_rows.rs`: what it means in a table. A table's own field is in
//!    `xdp-programs/common/src/tables.rs`.
//!
//! Nothing else names the fields of a network's row. A test here fails if step 3 forgets to write what it reads.
//!
//! # To add a kind of row
//!
//! 1. `proto/proto/transit.proto`: a message, a field of it in `Row` and of its key in `RowKey`, and the same number in
//!    `RowKind`.
//! 2. A file here with its type. From there the compiler leads: [`Row`], [`RowKey`] and [`Kind`] are matched
//!    exhaustively, here and in transitd's `table_rows`.
//!
//! Don't add the kind to [`BASELINE`]: older droplets don't know it and are not sent it. Objects that need it on such a
//! droplet say so (`WaitsForUpgrade`).

mod bouncer;
#[cfg(any(test, feature = "builders"))]
pub mod builders;
mod byte_rate;
mod class;
mod clients;
mod direct;
mod droplet;
mod exposed;
mod fields;
mod forward;
mod front;
mod health_check;
mod key;
mod kind;
mod local;
mod members;
mod network;
mod node_service;
mod policy_id;
mod policy_set;
mod refused;
mod service;
mod vpc;

use thuban_proto::transit as proto;

pub use bouncer::Bouncer;
pub use byte_rate::ByteRate;
pub use class::{Class, NamedPort, SHARED_SERVICE_GROUP};
pub use clients::MAX_CLIENTS;
pub use direct::Direct;
pub use droplet::{Droplet, Underlay};
pub use exposed::{Exposed, ExposedPort};
pub use fields::{InvalidRow, is_unicast6, read_address};
pub use forward::Forward;
pub use front::{Front, FrontPort};
pub use health_check::HealthCheck;
pub use key::{RowKey, proto_key};
pub use kind::{BASELINE, Kind, Kinds};
pub use local::{GATEWAY_MAC, LocalEndpoint};
pub use members::{MAX_MEMBERS, Members};
pub use network::Network;
pub use node_service::NodeService;
pub use policy_id::PolicyId;
pub use policy_set::{Block, MAX_RULES, PolicyAction, PolicyPorts, PolicyRule, PolicySet, PolicyTier};
pub use refused::Refused;
pub use service::{Backend, MAX_BACKENDS, MAX_PORTS, Port, Service};
pub use vpc::{Kept, ServiceName, Visible, Vpc};

/// A row of a droplet's program. The variants are in the order of [`Kind`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Row {
    Droplet(Droplet),
    Vpc(Vpc),
    Network(Network),
    Local(LocalEndpoint),
    Bouncer(Bouncer),
    Direct(Direct),
    Forward(Forward),
    Refused(Refused),
    Service(Service),
    NodeService(NodeService),
    Exposed(Exposed),
    Class(Class),
    PolicySet(PolicySet),
    Front(Front),
}

impl Row {
    pub fn key(&self) -> RowKey {
        match self {
            Self::Droplet(row) => RowKey::Droplet(row.address),
            Self::Vpc(row) => RowKey::Vpc(row.vni),
            Self::Network(row) => RowKey::Network(row.vni, row.id),
            Self::Local(row) => RowKey::Local(row.vni, row.address.into()),
            Self::Bouncer(row) => RowKey::Bouncer(row.vni, row.address),
            Self::Direct(row) => RowKey::Direct(row.vni, row.address),
            Self::Forward(row) => RowKey::Forward(row.vni, row.address),
            Self::Refused(row) => RowKey::Refused(row.pod_uid.clone()),
            Self::Service(row) => RowKey::Service(row.vni, row.address),
            Self::NodeService(row) => RowKey::NodeService(row.vni, row.address),
            Self::Exposed(row) => RowKey::Exposed(row.vni, row.address),
            Self::Class(row) => RowKey::Class(row.vni, row.id),
            Self::PolicySet(row) => RowKey::PolicySet(row.vni, row.id),
            Self::Front(row) => RowKey::Front(row.vni, row.address),
        }
    }

    pub fn kind(&self) -> Kind {
        match self {
            Self::Droplet(_) => Kind::Droplet,
            Self::Vpc(_) => Kind::Vpc,
            Self::Network(_) => Kind::Network,
            Self::Local(_) => Kind::Local,
            Self::Bouncer(_) => Kind::Bouncer,
            Self::Direct(_) => Kind::Direct,
            Self::Forward(_) => Kind::Forward,
            Self::Refused(_) => Kind::Refused,
            Self::Service(_) => Kind::Service,
            Self::NodeService(_) => Kind::NodeService,
            Self::Exposed(_) => Kind::Exposed,
            Self::Class(_) => Kind::Class,
            Self::PolicySet(_) => Kind::PolicySet,
            Self::Front(_) => Kind::Front,
        }
    }
}

impl TryFrom<proto::Row> for Row {
    type Error = InvalidRow;

    fn try_from(row: proto::Row) -> Result<Self, InvalidRow> {
        use proto::row::Row as Told;
        Ok(match row.row.ok_or(InvalidRow::UnknownKind)? {
            Told::Droplet(row) => Self::Droplet(row.try_into()?),
            Told::Vpc(row) => Self::Vpc(row.try_into()?),
            Told::Network(row) => Self::Network(row.try_into()?),
            Told::Local(row) => Self::Local(row.try_into()?),
            Told::Bouncer(row) => Self::Bouncer(row.try_into()?),
            Told::Direct(row) => Self::Direct(row.try_into()?),
            Told::Forward(row) => Self::Forward(row.try_into()?),
            Told::Refused(row) => Self::Refused(row.try_into()?),
            Told::Service(row) => Self::Service(row.try_into()?),
            Told::NodeService(row) => Self::NodeService(row.try_into()?),
            Told::Exposed(row) => Self::Exposed(row.try_into()?),
            Told::Class(row) => Self::Class(row.try_into()?),
            Told::PolicySet(row) => Self::PolicySet(row.try_into()?),
            Told::Front(row) => Self::Front(row.try_into()?),
        })
    }
}

impl From<&Row> for proto::Row {
    fn from(row: &Row) -> Self {
        use proto::row::Row as Told;
        let row = match row {
            Row::Droplet(row) => Told::Droplet(row.into()),
            Row::Vpc(row) => Told::Vpc(row.into()),
            Row::Network(row) => Told::Network(row.into()),
            Row::Local(row) => Told::Local(row.into()),
            Row::Bouncer(row) => Told::Bouncer(row.into()),
            Row::Direct(row) => Told::Direct(row.into()),
            Row::Forward(row) => Told::Forward(row.into()),
            Row::Refused(row) => Told::Refused(row.into()),
            Row::Service(row) => Told::Service(row.into()),
            Row::NodeService(row) => Told::NodeService(row.into()),
            Row::Exposed(row) => Told::Exposed(row.into()),
            Row::Class(row) => Told::Class(row.into()),
            Row::PolicySet(row) => Told::PolicySet(row.into()),
            Row::Front(row) => Told::Front(row.into()),
        };
        Self { row: Some(row) }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    #[test]
    fn a_row_of_each_kind_is_read_back_as_it_was_written() {
        for kind in Kind::ALL {
            let row = builders::row(*kind);
            assert_eq!((row.kind(), row.key().kind()), (*kind, *kind));
            let told = proto::Row::from(&row);
            assert_eq!(
                proto_key(&told),
                Some(proto::RowKey::from(&row.key())),
                "a nack names it"
            );
            assert_eq!(RowKey::try_from(&proto::RowKey::from(&row.key())), Ok(row.key()));
            assert_eq!(Row::try_from(told), Ok(row));
        }
    }

    #[test]
    fn a_kind_has_the_number_of_its_field() {
        for kind in Kind::ALL {
            let row = proto::Row::from(&builders::row(*kind)).encode_to_vec();
            assert_eq!(i32::from(row[0] >> 3), kind.number(), "{kind}");
            let key = proto::RowKey::from(&builders::row(*kind).key()).encode_to_vec();
            assert_eq!(i32::from(key[0] >> 3), kind.number(), "{kind}");
        }
    }

    #[test]
    fn a_row_of_an_unknown_kind_is_told_from_one_that_is_not_valid() {
        assert_eq!(
            Row::try_from(proto::Row { row: None }),
            Err(InvalidRow::UnknownKind)
        );
        assert_eq!(
            RowKey::try_from(&proto::RowKey { key: None }),
            Err(InvalidRow::UnknownKind)
        );
        let bad = proto::row::Row::Droplet(proto::DropletRow {
            address: vec![1],
            ..Default::default()
        });
        let error = Row::try_from(proto::Row { row: Some(bad) }).unwrap_err();
        assert_eq!(error.to_string(), "droplet: expected an IPv4 address of 4 bytes");
    }
}

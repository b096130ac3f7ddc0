//! The key that identifies a row.

use std::net::IpAddr;

use thuban_api::identifiers::{NetworkId, Vni};
use thuban_proto::transit as proto;

use crate::droplet::Underlay;
use crate::fields::{self, InvalidRow};
use crate::kind::Kind;
use crate::policy_id::PolicyId;

/// Identifies a row of one droplet. Ordered, so that programs are compared and sent in a stable order: a network's key
/// comes before its VPC's, see `transitd::program`, and those of classes and sets before those of the endpoints that
/// have them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RowKey {
    Droplet(Underlay),
    Network(Vni, NetworkId),
    Vpc(Vni),
    Class(Vni, PolicyId),
    PolicySet(Vni, PolicyId),
    /// The endpoint's IPv4 address: one row for both of its addresses.
    Local(Vni, IpAddr),
    /// The endpoint's IPv4 address: one row for both of its addresses.
    Bouncer(Vni, IpAddr),
    /// Either address of the endpoint.
    Direct(Vni, IpAddr),
    /// Either address of the endpoint.
    Forward(Vni, IpAddr),
    /// The pod's UID, as kubelet tells it to the CNI plugin.
    Refused(String),
    /// One of the service's addresses.
    Service(Vni, IpAddr),
    /// One of the service's addresses. The VNI is of the VPC whose pods reach the service.
    NodeService(Vni, IpAddr),
    /// One of the service's addresses.
    Exposed(Vni, IpAddr),
    /// The VNI is of the backends' VPC.
    Front(Vni, IpAddr),
}

impl RowKey {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Droplet(_) => Kind::Droplet,
            Self::Network(..) => Kind::Network,
            Self::Vpc(_) => Kind::Vpc,
            Self::Local(..) => Kind::Local,
            Self::Bouncer(..) => Kind::Bouncer,
            Self::Direct(..) => Kind::Direct,
            Self::Forward(..) => Kind::Forward,
            Self::Refused(_) => Kind::Refused,
            Self::Service(..) => Kind::Service,
            Self::NodeService(..) => Kind::NodeService,
            Self::Exposed(..) => Kind::Exposed,
            Self::Class(..) => Kind::Class,
            Self::PolicySet(..) => Kind::PolicySet,
            Self::Front(..) => Kind::Front,
        }
    }

    /// Returns the VNI of the VPC that the row belongs to, if any.
    pub fn vni(&self) -> Option<Vni> {
        match self {
            Self::Droplet(_) | Self::Refused(_) => None,
            Self::Vpc(vni)
            | Self::Network(vni, _)
            | Self::Local(vni, _)
            | Self::Bouncer(vni, _)
            | Self::Direct(vni, _)
            | Self::Forward(vni, _)
            | Self::Service(vni, _)
            | Self::NodeService(vni, _)
            | Self::Exposed(vni, _)
            | Self::Front(vni, _)
            | Self::Class(vni, _)
            | Self::PolicySet(vni, _) => Some(*vni),
        }
    }
}

impl TryFrom<&proto::RowKey> for RowKey {
    type Error = InvalidRow;

    /// Reads the key of a row that may itself be invalid, because a nack names such a row too.
    fn try_from(key: &proto::RowKey) -> Result<Self, InvalidRow> {
        use proto::row_key::Key;
        let pair = |key: &proto::AddressKey| Ok((fields::vni(key.vni)?, fields::address(&key.address)?));
        let of = |make: fn(Vni, IpAddr) -> Self, key| pair(key).map(|(vni, address)| make(vni, address));
        match key.key.as_ref().ok_or(InvalidRow::UnknownKind)? {
            Key::Droplet(address) => Underlay::read(address).map(Self::Droplet),
            Key::Vpc(number) => fields::vni(*number).map(Self::Vpc),
            Key::Network(key) => Ok(Self::Network(
                fields::vni(key.vni)?,
                fields::network(key.network)?,
            )),
            Key::Local(key) => of(Self::Local, key),
            Key::Bouncer(key) => of(Self::Bouncer, key),
            Key::Direct(key) => of(Self::Direct, key),
            Key::Forward(key) => of(Self::Forward, key),
            Key::Refused(uid) => Ok(Self::Refused(uid.clone())),
            Key::Service(key) => of(Self::Service, key),
            Key::NodeService(key) => of(Self::NodeService, key),
            Key::Exposed(key) => of(Self::Exposed, key),
            Key::Front(key) => of(Self::Front, key),
            Key::Class(key) => Ok(Self::Class(fields::vni(key.vni)?, PolicyId::read(key.id)?)),
            Key::PolicySet(key) => Ok(Self::PolicySet(fields::vni(key.vni)?, PolicyId::read(key.id)?)),
        }
    }
}

impl From<&RowKey> for proto::RowKey {
    fn from(key: &RowKey) -> Self {
        use proto::row_key::Key;
        let pair = |vni: &Vni, address: &IpAddr| address_key(vni.get(), &fields::octets(*address));
        let key = match key {
            RowKey::Droplet(address) => Key::Droplet(address.octets().to_vec()),
            RowKey::Vpc(vni) => Key::Vpc(vni.get()),
            RowKey::Network(vni, network) => Key::Network(proto::NetworkKey {
                vni: vni.get(),
                network: network.get(),
            }),
            RowKey::Local(vni, address) => Key::Local(pair(vni, address)),
            RowKey::Bouncer(vni, address) => Key::Bouncer(pair(vni, address)),
            RowKey::Direct(vni, address) => Key::Direct(pair(vni, address)),
            RowKey::Forward(vni, address) => Key::Forward(pair(vni, address)),
            RowKey::Refused(uid) => Key::Refused(uid.clone()),
            RowKey::Service(vni, address) => Key::Service(pair(vni, address)),
            RowKey::NodeService(vni, address) => Key::NodeService(pair(vni, address)),
            RowKey::Exposed(vni, address) => Key::Exposed(pair(vni, address)),
            RowKey::Front(vni, address) => Key::Front(pair(vni, address)),
            RowKey::Class(vni, id) => Key::Class(policy_key(vni.get(), id.get())),
            RowKey::PolicySet(vni, id) => Key::PolicySet(policy_key(vni.get(), id.get())),
        };
        Self { key: Some(key) }
    }
}

fn address_key(vni: u32, address: &[u8]) -> proto::AddressKey {
    let address = address.to_vec();
    proto::AddressKey { vni, address }
}

const fn policy_key(vni: u32, id: u32) -> proto::PolicyKey {
    proto::PolicyKey { vni, id }
}

/// Returns the key of a row as the contract has it, also of a row that is not valid, because a nack must name it.
pub fn proto_key(row: &proto::Row) -> Option<proto::RowKey> {
    use proto::row::Row as Told;
    use proto::row_key::Key;
    let key = match row.row.as_ref()? {
        Told::Droplet(row) => Key::Droplet(row.address.clone()),
        Told::Vpc(row) => Key::Vpc(row.vni),
        Told::Network(row) => Key::Network(proto::NetworkKey {
            vni: row.vni,
            network: row.network,
        }),
        Told::Local(row) => Key::Local(address_key(row.vni, &row.address)),
        Told::Bouncer(row) => Key::Bouncer(address_key(row.vni, &row.address)),
        Told::Direct(row) => Key::Direct(address_key(row.vni, &row.address)),
        Told::Forward(row) => Key::Forward(address_key(row.vni, &row.address)),
        Told::Refused(row) => Key::Refused(row.pod_uid.clone()),
        Told::Service(row) => Key::Service(address_key(row.vni, &row.address)),
        Told::NodeService(row) => Key::NodeService(address_key(row.vni, &row.address)),
        Told::Exposed(row) => Key::Exposed(address_key(row.vni, &row.address)),
        Told::Front(row) => Key::Front(address_key(row.vni, &row.address)),
        Told::Class(row) => Key::Class(policy_key(row.vni, row.id)),
        Told::PolicySet(row) => Key::PolicySet(policy_key(row.vni, row.id)),
    };
    Some(proto::RowKey { key: Some(key) })
}

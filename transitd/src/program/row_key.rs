//! Keys of rows as the contract has them, and ours.

use thuban_common::tables::EndpointKey;
use thuban_proto::transit as proto;

use super::row::{InvalidRow, RowKey, droplet, key, network, pod_uid, vni};
use super::service::service_key;

impl TryFrom<&proto::RowKey> for RowKey {
    type Error = InvalidRow;

    fn try_from(row_key: &proto::RowKey) -> Result<Self, InvalidRow> {
        use proto::row_key::Key;
        let pair = |k: &proto::AddressKey| key(k.vni, &k.address).map(|key| (key.vni, key.address));
        Ok(match row_key.key.as_ref().ok_or(InvalidRow::UnknownKind)? {
            Key::Droplet(address) => Self::Droplet(droplet(address)?),
            Key::Vpc(number) => Self::Vpc(vni(*number)?),
            Key::Network(k) => Self::Network {
                vni: vni(k.vni)?,
                network: network(k.network)?,
            },
            Key::Local(k) => pair(k).map(|(vni, address)| Self::Local { vni, address })?,
            Key::Bouncer(k) => pair(k).map(|(vni, address)| Self::Bouncer { vni, address })?,
            Key::Direct(k) => pair(k).map(|(vni, address)| Self::Direct { vni, address })?,
            Key::Forward(k) => pair(k).map(|(vni, address)| Self::Forward { vni, address })?,
            Key::Refused(uid) => Self::Refused(pod_uid(uid.clone())?),
            Key::Service(k) => service_key(k.vni, &k.address)
                .map(|EndpointKey { vni, address }| Self::Service { vni, address })?,
            Key::NodeService(k) => service_key(k.vni, &k.address)
                .map(|EndpointKey { vni, address }| Self::NodeService { vni, address })?,
            Key::Exposed(k) => service_key(k.vni, &k.address)
                .map(|EndpointKey { vni, address }| Self::Exposed { vni, address })?,
        })
    }
}

/// The key of a row as the contract has it, also of a row that is not valid: a nack must name it.
pub fn proto_key(row: &proto::Row) -> Option<proto::RowKey> {
    use proto::row::Row as Kind;
    use proto::row_key::Key;
    let pair = |vni: u32, address: &[u8]| proto::AddressKey {
        vni,
        address: address.to_vec(),
    };
    let key = match row.row.as_ref()? {
        Kind::Droplet(r) => Key::Droplet(r.address.clone()),
        Kind::Vpc(r) => Key::Vpc(r.vni),
        Kind::Network(r) => Key::Network(proto::NetworkKey {
            vni: r.vni,
            network: r.network,
        }),
        Kind::Local(r) => Key::Local(pair(r.vni, &r.address)),
        Kind::Bouncer(r) => Key::Bouncer(pair(r.vni, &r.address)),
        Kind::Direct(r) => Key::Direct(pair(r.vni, &r.address)),
        Kind::Forward(r) => Key::Forward(pair(r.vni, &r.address)),
        Kind::Refused(r) => Key::Refused(r.pod_uid.clone()),
        Kind::Service(r) => Key::Service(pair(r.vni, &r.address)),
        Kind::NodeService(r) => Key::NodeService(pair(r.vni, &r.address)),
        Kind::Exposed(r) => Key::Exposed(pair(r.vni, &r.address)),
    };
    Some(proto::RowKey { key: Some(key) })
}

//! An endpoint that lives on this droplet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::Ipv6Net;
use serde::{Deserialize, Serialize};
use thuban_api::identifiers::{MacAddr, NetworkId, Vni};
use thuban_proto::transit::LocalRow;

use crate::byte_rate::ByteRate;
use crate::droplet::Underlay;
use crate::fields::{self, InvalidRow, invalid};
use crate::policy_id::PolicyId;

/// The MAC address of every endpoint's gateway; no endpoint has this address itself.
pub const GATEWAY_MAC: MacAddr = MacAddr([0x02, 0x54, 0x68, 0x75, 0x62, 0x61]);

/// An endpoint that lives on this droplet. transitd keeps it in a file across its restarts, so a new field needs a
/// default there.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct LocalEndpoint {
    pub vni: Vni,
    pub address: Ipv4Addr,
    /// The IPv6 address with the prefix length of its network.
    pub address6: Option<Ipv6Net>,
    pub network: NetworkId,
    /// The prefix length of its IPv4 network, 1 to 32.
    pub prefix_length: u8,
    pub gateway: Ipv4Addr,
    /// Unicast, and not [`GATEWAY_MAC`].
    pub mac: MacAddr,
    /// The pod's UID as kubelet tells the CNI plugin; not empty.
    pub pod_uid: String,
    #[serde(default)]
    pub pod_namespace: String,
    #[serde(default)]
    pub pod_name: String,
    pub vpc_name: String,
    pub network_name: String,
    /// The endpoint is Provisioned: ADD may go on.
    pub ready: bool,
    /// The endpoint's previous droplet, which may send on the packets that others still send to it.
    pub moved_from: Option<Underlay>,
    /// The endpoint is the node itself.
    #[serde(default)]
    pub host: bool,
    /// Of the node itself, the IPv6 address by which other droplets know this one.
    #[serde(default)]
    pub underlay6: Option<Ipv6Addr>,
    /// As others' rules see the endpoint; none: unknown.
    #[serde(default)]
    pub class: Option<PolicyId>,
    /// What applies to packets to the endpoint.
    #[serde(default)]
    pub ingress_set: Option<PolicyId>,
    /// What applies to packets from it.
    #[serde(default)]
    pub egress_set: Option<PolicyId>,
    /// How much the endpoint may send; none: no limit.
    #[serde(default)]
    pub egress_rate: Option<ByteRate>,
    /// How much the endpoint may receive; none: no limit.
    #[serde(default)]
    pub ingress_rate: Option<ByteRate>,
}

impl LocalEndpoint {
    /// Yields the IPv4 address, then the IPv6 address if there is one.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let second = self.address6.map(|net| IpAddr::from(net.addr()));
        std::iter::once(self.address.into()).chain(second)
    }
}

impl TryFrom<LocalRow> for LocalEndpoint {
    type Error = InvalidRow;

    fn try_from(row: LocalRow) -> Result<Self, InvalidRow> {
        let vni = fields::vni(row.vni)?;
        let address = match fields::address(&row.address)? {
            IpAddr::V4(a) if !a.is_unspecified() && !a.is_multicast() && !a.is_broadcast() => Ok(a),
            _ => Err(invalid(
                "local.address",
                "an IPv4 unicast address, mapped into 16 bytes",
            )),
        };
        let prefix_length = u8::try_from(row.prefix_length).ok();
        let prefix_length = prefix_length.filter(|length| (1..=32).contains(length));
        let mac: Option<[u8; 6]> = row.mac.as_slice().try_into().ok();
        let is_usable = |mac: &[u8; 6]| mac[0] & 1 == 0 && *mac != [0; 6] && *mac != GATEWAY_MAC.0;
        let prefix6 = u8::try_from(row.prefix_length6).unwrap_or_default();
        let with_prefix = |address| {
            let net = Ipv6Net::new(address, prefix6).ok();
            let net = net.filter(|net| net.prefix_len() > 0);
            net.ok_or(invalid("local.prefix_length6", "1 to 128"))
        };
        Ok(Self {
            vni,
            address: address?,
            address6: fields::address6(&row.address6)?.map(with_prefix).transpose()?,
            network: fields::network(row.network)?,
            prefix_length: prefix_length.ok_or(invalid("local.prefix_length", "1 to 32"))?,
            gateway: row
                .gateway
                .parse()
                .map_err(|_| invalid("local.gateway", "an IPv4 address"))?,
            mac: mac.filter(is_usable).map(MacAddr).ok_or(invalid(
                "local.mac",
                "6 bytes, a unicast MAC address that is not the gateway's",
            ))?,
            pod_uid: fields::pod_uid(row.pod_uid)?,
            pod_namespace: row.pod_namespace,
            pod_name: row.pod_name,
            vpc_name: row.vpc_name,
            network_name: row.network_name,
            ready: row.ready,
            moved_from: match row.moved_from.as_slice() {
                [] => None,
                address => Some(
                    Underlay::read(address)
                        .map_err(|_| invalid("local.moved_from", "empty, or an IPv4 address of 4 bytes"))?,
                ),
            },
            host: row.host,
            underlay6: fields::address6(&row.underlay6)?,
            class: PolicyId::read_option(row.class)?,
            ingress_set: PolicyId::read_option(row.ingress_set)?,
            egress_set: PolicyId::read_option(row.egress_set)?,
            egress_rate: ByteRate::read_option(row.egress_rate, "local.egress_rate")?,
            ingress_rate: ByteRate::read_option(row.ingress_rate, "local.ingress_rate")?,
        })
    }
}

impl From<&LocalEndpoint> for LocalRow {
    fn from(row: &LocalEndpoint) -> Self {
        Self {
            vni: row.vni.get(),
            address: fields::octets(row.address),
            address6: fields::octets6(row.address6.map(|net| net.addr())),
            prefix_length6: row.address6.map_or(0, |net| net.prefix_len().into()),
            network: row.network.get(),
            prefix_length: row.prefix_length.into(),
            gateway: row.gateway.to_string(),
            mac: row.mac.0.to_vec(),
            pod_uid: row.pod_uid.clone(),
            pod_namespace: row.pod_namespace.clone(),
            pod_name: row.pod_name.clone(),
            vpc_name: row.vpc_name.clone(),
            network_name: row.network_name.clone(),
            ready: row.ready,
            moved_from: row
                .moved_from
                .map(|droplet| droplet.octets().to_vec())
                .unwrap_or_default(),
            host: row.host,
            underlay6: fields::octets6(row.underlay6),
            class: PolicyId::number(row.class),
            ingress_set: PolicyId::number(row.ingress_set),
            egress_set: PolicyId::number(row.egress_set),
            egress_rate: ByteRate::number(row.egress_rate),
            ingress_rate: ByteRate::number(row.ingress_rate),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders;

    fn with(change: impl Fn(&mut LocalRow)) -> Result<LocalEndpoint, InvalidRow> {
        let mut row = LocalRow::from(&builders::local());
        change(&mut row);
        LocalEndpoint::try_from(row)
    }

    #[test]
    fn an_ipv6_address_that_no_endpoint_can_have_is_refused() {
        let row = |address6: Vec<u8>, prefix_length6| {
            with(|row| (row.address6, row.prefix_length6) = (address6.clone(), prefix_length6))
        };
        let octets = |text: &str| text.parse::<std::net::Ipv6Addr>().unwrap().octets().to_vec();
        assert!(row(vec![], 0).is_ok() && row(octets("fd00::5"), 64).is_ok());
        for (address, prefix) in [
            ("fe80::5", 64),
            ("ff02::1", 64),
            ("::1", 64),
            ("::", 64),
            ("::ffff:10.0.0.1", 112),
            ("fd00::5", 0),
            ("fd00::5", 129),
        ] {
            let error = row(octets(address), prefix).unwrap_err().to_string();
            assert!(error.contains("6: expected"), "{address}/{prefix}: {error}");
        }
        assert!(row(vec![0xfd; 4], 64).is_err());
    }

    #[test]
    fn what_no_endpoint_can_have_is_refused_by_field() {
        let refused = |change: &dyn Fn(&mut LocalRow), field: &str| {
            let error = with(change).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{field}: expected")), "{error}");
        };
        refused(
            &|row| row.address = fields::octets(Ipv4Addr::BROADCAST),
            "local.address",
        );
        refused(&|row| row.address = vec![0xfd; 16], "local.address");
        refused(&|row| row.address = vec![10, 0, 0, 1], "address");
        refused(&|row| row.prefix_length = 0, "local.prefix_length");
        refused(&|row| row.prefix_length = 33, "local.prefix_length");
        refused(&|row| row.gateway = "x".into(), "local.gateway");
        refused(&|row| row.mac = GATEWAY_MAC.0.to_vec(), "local.mac");
        refused(&|row| row.mac = vec![1, 0, 0, 0, 0, 0], "local.mac");
        refused(&|row| row.pod_uid.clear(), "pod_uid");
        refused(&|row| row.moved_from = vec![1], "local.moved_from");
        refused(&|row| row.network = 0, "network");
        refused(&|row| row.class = 1 << 24, "id");
        refused(&|row| row.egress_set = 1 << 24, "id");
        refused(&|row| row.egress_rate = 124, "local.egress_rate");
        refused(&|row| row.ingress_rate = u64::MAX, "local.ingress_rate");
    }

    #[test]
    fn a_file_of_an_earlier_transitd_is_read() {
        let text = r#"{"vni":7,"address":"10.0.1.5","address6":"fd00:1::5/64","network":167772416,"prefix_length":24,
            "gateway":"10.0.1.1","mac":[2,0,10,0,1,5],"pod_uid":"u","vpc_name":"red","network_name":"web","ready":true,
            "moved_from":[172,16,0,1]}"#;
        let read: LocalEndpoint = serde_json::from_str(text).unwrap();
        assert_eq!(
            (read.vni, read.mac),
            (builders::VNI, MacAddr([2, 0, 10, 0, 1, 5]))
        );
        assert_eq!(read.moved_from, Some([172, 16, 0, 1].into()));
        assert!(read.pod_name.is_empty() && !read.host && read.underlay6.is_none());
        assert_eq!(
            (read.class, read.ingress_set, read.egress_set),
            (None, None, None)
        );
        assert_eq!((read.egress_rate, read.ingress_rate), (None, None));
        let again = serde_json::to_string(&read).unwrap();
        assert!(
            again.contains(r#""moved_from":[172,16,0,1]"#) && again.contains(r#""vni":7,"#),
            "{again}"
        );
        assert!(serde_json::from_str::<LocalEndpoint>(&text.replace("\"vni\":7", "\"vni\":0")).is_err());
    }
}

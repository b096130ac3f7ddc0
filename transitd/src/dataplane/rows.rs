//! The tables as JSON, for people and tests. Observes only.

use std::net::{Ipv4Addr, Ipv6Addr};

use serde_json::{Value, json};
use thuban_common::meter::{METER_OF_VPC, MeterKey};
use thuban_common::tables::{
    ATTACHMENT_METERED, ATTACHMENT_REJECTS, ATTACHMENT_VPC_METERED, Address, EndpointKey, LOCAL_HAS_POLICY,
    LOCAL_SHAPED, LoadKey, Members, SOURCE_FRONT_BITS, SUBNET_BOUNCER_HERE, SUBNET_PRIVATE, VPC_DIVIDER_HERE,
    VPC_EGRESS, VPC_HOST_ACCESS,
};
use thuban_rows::PolicyId;

use super::tables::{TableEntry, TableKey};
use crate::attachments::mac_text;

/// `{"table": …, "key": {…}, "entry": {…}}`
pub fn to_json(key: &TableKey, entry: &TableEntry) -> Value {
    json!({"table": key.table(), "key": key_json(key), "entry": entry_json(entry)})
}

fn key_json(key: &TableKey) -> Value {
    match key {
        TableKey::Attachment(ifindex) => json!({"ifindex": ifindex}),
        TableKey::Local(EndpointKey { vni, address }) | TableKey::Remote(_, EndpointKey { vni, address }) => {
            json!({"vni": vni, "address": text(address)})
        }
        TableKey::Subnet { vni, address, prefix } => {
            json!({"vni": vni, "cidr": cidr(address, (*prefix).into())})
        }
        TableKey::Source { key, prefix } => {
            let range = match prefix.saturating_sub(SOURCE_FRONT_BITS) {
                0 => Value::Null,
                bits => json!(cidr(&key.client, bits)),
            };
            json!({"vni": u32::from_be_bytes(key.vni), "address": text(&key.front), "range": range})
        }
        TableKey::Vpc(vni) => json!({"vni": vni}),
        TableKey::Droplet(address) => json!({"droplet": Ipv4Addr::from(*address).to_string()}),
        TableKey::Meter(MeterKey {
            kind: METER_OF_VPC,
            id,
        }) => json!({"vni": id}),
        TableKey::Meter(MeterKey { id, .. }) => json!({"ifindex": id}),
        TableKey::Load(LoadKey { vni, network: id }) => json!({"vni": vni, "network": network(*id)}),
    }
}

fn cidr(address: &Address, prefix: u32) -> String {
    let ip = Ipv6Addr::from(*address);
    match ip.to_ipv4_mapped() {
        Some(ip) => format!("{ip}/{}", prefix.saturating_sub(96)),
        None => format!("{ip}/{prefix}"),
    }
}

fn entry_json(entry: &TableEntry) -> Value {
    match entry {
        TableEntry::Attachment(e) => {
            json!({
                "vni": e.vni,
                "network": network(e.network),
                "address": text(&e.address),
                "mac": mac_text(e.mac),
                "metered": e.flags & ATTACHMENT_METERED != 0,
                "rejects": e.flags & ATTACHMENT_REJECTS != 0,
                "vpc_metered": e.flags & ATTACHMENT_VPC_METERED != 0,
                "outer_dscp": e.outer_dscp.checked_sub(1),
                "class": policy(e.class),
                "ingress_set": policy(e.ingress_set),
                "egress_set": policy(e.egress_set),
            })
        }
        TableEntry::Local(e) => {
            let has_policy = e.flags & LOCAL_HAS_POLICY != 0;
            let shaped = e.flags & LOCAL_SHAPED != 0;
            let mac = mac_text(e.mac);
            json!({"ifindex": e.ifindex, "mac": mac, "has_policy": has_policy, "shaped": shaped})
        }
        TableEntry::Remote(droplet) => json!({"droplet": Ipv4Addr::from(*droplet).to_string()}),
        TableEntry::Subnet(e) => json!({
            "network": network(e.network),
            "bouncers": members(&e.bouncers),
            "relays": relays(&e.bouncers),
            "bouncer_here": e.flags & SUBNET_BOUNCER_HERE != 0,
            "private": e.flags & SUBNET_PRIVATE != 0,
        }),
        TableEntry::Vpc(e) => json!({
            "dividers": members(&e.dividers),
            "relays": relays(&e.dividers),
            "divider_here": e.flags & VPC_DIVIDER_HERE != 0,
            "host_access": e.flags & VPC_HOST_ACCESS != 0,
            "egress": e.flags & VPC_EGRESS != 0,
        }),
        TableEntry::Source(e) => json!({"admits": e.admits != 0}),
        TableEntry::Meter(rate) => json!({"bytes_per_second": rate}),
        TableEntry::Droplet(_) | TableEntry::Load => json!({}),
    }
}

/// Returns the network. A network's id is its first CIDR's base address; 0 is the VPC's own range.
fn network(id: u32) -> Value {
    if id == 0 { Value::Null } else { json!(id) }
}

/// Returns the class or set as messages name it; 0 is none.
fn policy(id: u32) -> Value {
    PolicyId::new(id).map_or(Value::Null, |id| json!(id.to_string()))
}

fn members(members: &Members) -> Vec<String> {
    let count = members.count as usize;
    members
        .droplets
        .iter()
        .take(count)
        .map(|droplet| Ipv4Addr::from(*droplet).to_string())
        .collect()
}

fn relays(members: &Members) -> Vec<String> {
    let behind = members.droplets.iter().skip(members.count as usize);
    let used = behind.take_while(|droplet| **droplet != [0; 4]);
    used.map(|droplet| Ipv4Addr::from(*droplet).to_string()).collect()
}

fn text(address: &Address) -> String {
    Ipv6Addr::from(*address).to_canonical().to_string()
}

#[cfg(test)]
mod tests {
    use thuban_common::tables::{LocalEntry, MAX_MEMBERS, SubnetEntry, VpcEntry};

    use super::*;

    const NOBODY: Members = Members {
        count: 0,
        droplets: [[0; 4]; MAX_MEMBERS],
    };

    /// Returns the names of what is shown as true.
    fn set(key: &TableKey, entry: TableEntry) -> Vec<String> {
        let shown = to_json(key, &entry);
        let fields = shown["entry"].as_object().unwrap().iter();
        let set = fields.filter(|(_, value)| **value == json!(true));
        set.map(|(name, _)| name.clone()).collect()
    }

    #[test]
    fn each_flag_of_a_network_is_shown_by_its_name() {
        let key = TableKey::Subnet {
            vni: 7,
            address: [0; 16],
            prefix: 0,
        };
        for (flags, name) in [(SUBNET_BOUNCER_HERE, "bouncer_here"), (SUBNET_PRIVATE, "private")] {
            let entry = SubnetEntry {
                network: 5,
                flags,
                bouncers: NOBODY,
            };
            assert_eq!(set(&key, TableEntry::Subnet(entry)), [name]);
        }
    }

    #[test]
    fn each_flag_of_an_endpoint_is_shown_by_its_name() {
        let key = EndpointKey {
            vni: 7,
            address: [0; 16],
        };
        for (flags, name) in [(LOCAL_HAS_POLICY, "has_policy"), (LOCAL_SHAPED, "shaped")] {
            let entry = LocalEntry {
                vni: 7,
                ifindex: 9,
                mac: [2; 6],
                flags,
            };
            assert_eq!(set(&TableKey::Local(key), TableEntry::Local(entry)), [name]);
        }
    }

    #[test]
    fn each_flag_of_a_vpc_is_shown_by_its_name() {
        for (flag, name) in [
            (VPC_DIVIDER_HERE, "divider_here"),
            (VPC_HOST_ACCESS, "host_access"),
            (VPC_EGRESS, "egress"),
        ] {
            let entry = VpcEntry::new(7, flag, NOBODY);
            assert_eq!(set(&TableKey::Vpc(7), TableEntry::Vpc(entry)), [name]);
        }
    }
}

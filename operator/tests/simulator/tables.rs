//! A droplet's tables: rows by what identifies them, applied as transitd does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_proto::transit::{AddressKey, LocalRow, Program, Row, RowKey, row, row_key};

/// Which row.
pub use thuban_operator::model::rows::Key as Slot;

pub fn slot_of_row(row: &Row) -> Slot {
    match row.row.as_ref().expect("a row of a known kind") {
        row::Row::Droplet(row) => Slot::Droplet(underlay(&row.address)),
        row::Row::Vpc(row) => Slot::Vpc(row.vni),
        row::Row::Network(row) => Slot::Network(row.vni, row.network),
        row::Row::Local(row) => Slot::Local(row.vni, address(&row.address)),
        row::Row::Bouncer(row) => Slot::Bouncer(row.vni, address(&row.address)),
        row::Row::Direct(row) => Slot::Direct(row.vni, address(&row.address)),
        row::Row::Forward(row) => Slot::Forward(row.vni, address(&row.address)),
        row::Row::Refused(row) => Slot::Refused(row.pod_uid.clone()),
        row::Row::Service(row) => Slot::Service(row.vni, address(&row.address)),
        row::Row::NodeService(row) => Slot::NodeService(row.vni, address(&row.address)),
        row::Row::Exposed(row) => Slot::Exposed(row.vni, address(&row.address)),
    }
}

fn slot_of_key(key: &RowKey) -> Slot {
    let of = |key: &AddressKey| (key.vni, address(&key.address));
    match key.key.as_ref().expect("a key of a known kind") {
        row_key::Key::Droplet(bytes) => Slot::Droplet(underlay(bytes)),
        row_key::Key::Vpc(vni) => Slot::Vpc(*vni),
        row_key::Key::Network(key) => Slot::Network(key.vni, key.network),
        row_key::Key::Local(key) => Slot::Local(of(key).0, of(key).1),
        row_key::Key::Bouncer(key) => Slot::Bouncer(of(key).0, of(key).1),
        row_key::Key::Direct(key) => Slot::Direct(of(key).0, of(key).1),
        row_key::Key::Forward(key) => Slot::Forward(of(key).0, of(key).1),
        row_key::Key::Refused(uid) => Slot::Refused(uid.clone()),
        row_key::Key::Service(key) => Slot::Service(of(key).0, of(key).1),
        row_key::Key::NodeService(key) => Slot::NodeService(of(key).0, of(key).1),
        row_key::Key::Exposed(key) => Slot::Exposed(of(key).0, of(key).1),
    }
}

pub fn underlay(bytes: &[u8]) -> Ipv4Addr {
    Ipv4Addr::from(<[u8; 4]>::try_from(bytes).expect("4 bytes"))
}

pub fn address(bytes: &[u8]) -> IpAddr {
    Ipv6Addr::from(<[u8; 16]>::try_from(bytes).expect("16 bytes")).to_canonical()
}

#[derive(Debug, Default)]
pub struct Tables {
    pub rows: BTreeMap<Slot, Row>,
}

impl Tables {
    pub fn local(&self, vni: u32, address: IpAddr) -> Option<&LocalRow> {
        match &self.rows.get(&Slot::Local(vni, address))?.row {
            Some(row::Row::Local(row)) => Some(row),
            _ => None,
        }
    }

    pub fn locals(&self) -> impl Iterator<Item = &LocalRow> {
        self.rows.values().filter_map(|row| match &row.row {
            Some(row::Row::Local(row)) => Some(row),
            _ => None,
        })
    }

    /// The row of a pod, if it is ready.
    pub fn ready(&self, pod_uid: &str) -> Option<&LocalRow> {
        self.locals().find(|row| row.pod_uid == pod_uid && row.ready)
    }

    /// Deletes first, then upserts; the local rows whose address is in use in another VPC here are refused.
    pub fn apply(&mut self, program: Program) -> Vec<(u32, IpAddr)> {
        if program.snapshot {
            let wanted: BTreeSet<Slot> = program.upserts.iter().map(slot_of_row).collect();
            self.rows.retain(|slot, _| wanted.contains(slot));
        }
        for key in &program.deletes {
            self.rows.remove(&slot_of_key(key));
        }
        let mut refused = Vec::new();
        for row in program.upserts {
            let slot = slot_of_row(&row);
            if let (Slot::Local(vni, address), Some(row::Row::Local(new))) = (&slot, &row.row) {
                let is_taken = self.locals().any(|other| {
                    other.vni != *vni
                        && (other.address == new.address
                            || !new.address6.is_empty() && other.address6 == new.address6)
                });
                if is_taken {
                    refused.push((*vni, *address));
                    continue;
                }
            }
            self.rows.insert(slot, row);
        }
        refused
    }
}

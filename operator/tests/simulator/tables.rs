//! A droplet's tables: rows by what identifies them, applied as transitd does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_proto::transit::{AddressKey, LocalRow, Program, Row, RowKey, row, row_key};

/// Which row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slot {
    Droplet(Ipv4Addr),
    Vpc(u32),
    Network(u32, u32),
    Local(u32, IpAddr),
    Bouncer(u32, IpAddr),
    Direct(u32, IpAddr),
    Forward(u32, IpAddr),
    Refused(String),
}

impl Slot {
    pub fn vni(&self) -> Option<u32> {
        match self {
            Self::Droplet(_) | Self::Refused(_) => None,
            Self::Vpc(vni)
            | Self::Network(vni, _)
            | Self::Local(vni, _)
            | Self::Bouncer(vni, _)
            | Self::Direct(vni, _)
            | Self::Forward(vni, _) => Some(*vni),
        }
    }

    pub fn of_row(row: &Row) -> Self {
        match row.row.as_ref().expect("a row of a known kind") {
            row::Row::Droplet(row) => Self::Droplet(underlay(&row.address)),
            row::Row::Vpc(row) => Self::Vpc(row.vni),
            row::Row::Network(row) => Self::Network(row.vni, row.network),
            row::Row::Local(row) => Self::Local(row.vni, address(&row.address)),
            row::Row::Bouncer(row) => Self::Bouncer(row.vni, address(&row.address)),
            row::Row::Direct(row) => Self::Direct(row.vni, address(&row.address)),
            row::Row::Forward(row) => Self::Forward(row.vni, address(&row.address)),
            row::Row::Refused(row) => Self::Refused(row.pod_uid.clone()),
        }
    }

    pub fn of_key(key: &RowKey) -> Self {
        let of = |key: &AddressKey| (key.vni, address(&key.address));
        match key.key.as_ref().expect("a key of a known kind") {
            row_key::Key::Droplet(bytes) => Self::Droplet(underlay(bytes)),
            row_key::Key::Vpc(vni) => Self::Vpc(*vni),
            row_key::Key::Network(key) => Self::Network(key.vni, key.network),
            row_key::Key::Local(key) => Self::Local(of(key).0, of(key).1),
            row_key::Key::Bouncer(key) => Self::Bouncer(of(key).0, of(key).1),
            row_key::Key::Direct(key) => Self::Direct(of(key).0, of(key).1),
            row_key::Key::Forward(key) => Self::Forward(of(key).0, of(key).1),
            row_key::Key::Refused(uid) => Self::Refused(uid.clone()),
        }
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
            let wanted: BTreeSet<Slot> = program.upserts.iter().map(Slot::of_row).collect();
            self.rows.retain(|slot, _| wanted.contains(slot));
        }
        for key in &program.deletes {
            self.rows.remove(&Slot::of_key(key));
        }
        let mut refused = Vec::new();
        for row in program.upserts {
            let slot = Slot::of_row(&row);
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

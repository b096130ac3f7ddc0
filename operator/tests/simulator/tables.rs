//! A droplet's tables: rows by their keys, applied as transitd does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_api::identifiers::Vni;
use thuban_proto::transit::{LocalRow, NackReason, Program, Row, row};
use thuban_rows::Kind;

/// The key of a row.
pub use thuban_rows::RowKey as Slot;

/// Returns the key of a row as transitd reads it: the operator sends only valid rows.
pub fn slot_of_row(row: &Row) -> Slot {
    let row = thuban_rows::Row::try_from(row.clone());
    row.expect("a valid row").key()
}

/// Returns the VNI for the number in a VPC's status.
pub fn number(vni: u32) -> Vni {
    Vni::new(vni).expect("a VNI")
}

pub fn underlay(bytes: &[u8]) -> Ipv4Addr {
    Ipv4Addr::from(<[u8; 4]>::try_from(bytes).expect("4 bytes"))
}

pub fn address(bytes: &[u8]) -> IpAddr {
    Ipv6Addr::from(<[u8; 16]>::try_from(bytes).expect("16 bytes")).to_canonical()
}

/// A row that is not applied.
pub type Refused = (Slot, NackReason);

#[derive(Debug, Default)]
pub struct Tables {
    pub rows: BTreeMap<Slot, Row>,
    /// The most rows of a kind; without a number there is always room.
    pub room: BTreeMap<Kind, usize>,
    /// How often a row had no room.
    pub times_full: usize,
    /// How often a class or set had the id of another one.
    pub times_taken: usize,
}

impl Tables {
    pub fn local(&self, vni: u32, address: IpAddr) -> Option<&LocalRow> {
        match &self.rows.get(&Slot::Local(number(vni), address))?.row {
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

    /// Returns the row of a pod, if it is ready.
    pub fn ready(&self, pod_uid: &str) -> Option<&LocalRow> {
        self.locals().find(|row| row.pod_uid == pod_uid && row.ready)
    }

    fn has_room(&self, slot: &Slot) -> bool {
        let kind = slot.kind();
        let used = || self.rows.keys().filter(|slot| slot.kind() == kind).count();
        self.rows.contains_key(slot) || self.room.get(&kind).is_none_or(|room| used() < *room)
    }

    /// Whether the row is of a class or set, and the droplet knows another one by its id.
    fn is_taken(&self, slot: &Slot, row: &Row) -> bool {
        let has_id = matches!(slot, Slot::Class(..) | Slot::PolicySet(..));
        has_id && self.rows.get(slot).is_some_and(|known| known != row)
    }

    /// Applies a program: deletes first, then upserts. Local rows whose address is in use in another VPC here, rows
    /// without room, and other classes and sets under known ids are refused and returned.
    pub fn apply(&mut self, program: Program) -> Vec<Refused> {
        if program.snapshot {
            let wanted: BTreeSet<Slot> = program.upserts.iter().map(slot_of_row).collect();
            self.rows.retain(|slot, _| wanted.contains(slot));
        }
        for key in &program.deletes {
            self.rows.remove(&Slot::try_from(key).expect("a valid key"));
        }
        let mut refused = Vec::new();
        for row in program.upserts {
            let slot = slot_of_row(&row);
            if let (Slot::Local(vni, address), Some(row::Row::Local(new))) = (&slot, &row.row) {
                let is_taken = self.locals().any(|other| {
                    other.vni != new.vni
                        && (other.address == new.address
                            || !new.address6.is_empty() && other.address6 == new.address6)
                });
                if is_taken {
                    refused.push((Slot::Local(*vni, *address), NackReason::AddressInUseOnNode));
                    continue;
                }
            }
            if self.is_taken(&slot, &row) {
                self.times_taken += 1;
                refused.push((slot, NackReason::IdTaken));
            } else if self.has_room(&slot) {
                self.rows.insert(slot, row);
            } else {
                self.times_full += 1;
                refused.push((slot, NackReason::TableFull));
            }
        }
        refused
    }
}

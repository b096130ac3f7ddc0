//! Room in SERVICES, SLOTS and BACKENDS: what each VPC has of it, and whether it may have more.
//!
//! Invariant: up to a quarter of a table is any VPC's; beyond that it takes only while half of the table stays free. So one
//! VPC has at most half, and leaves others a quarter each. Pure.

use std::collections::HashMap;

use thuban_common::services::CHUNK;
use thuban_rows::Service;

use super::tables::TableError;
use crate::program::maglev;

/// The tables, in the order of [`Rows`].
pub const TABLES: [&str; 3] = ["SERVICES", "SLOTS", "BACKENDS"];

/// Rows in each of [`TABLES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows(pub [usize; 3]);

#[derive(Debug)]
pub struct Room {
    capacity: Rows,
    total: Rows,
    of: HashMap<u32, Rows>,
}

impl Rows {
    /// Of an address's own entry.
    pub const OWN: Self = Self([1, 0, 0]);

    /// Of a port with so many backends.
    pub fn of_port(backends: usize) -> Self {
        let chunks = maglev::size(backends).div_ceil(CHUNK as u32);
        Self([1, chunks as usize, backends])
    }

    pub fn of(service: &Service) -> Self {
        let ports = service
            .ports
            .iter()
            .map(|port| Self::of_port(port.backends.len()));
        ports.fold(Self::OWN, Self::plus)
    }

    pub(super) fn plus(self, other: Self) -> Self {
        self.zip(other, |own, other| own + other)
    }

    fn minus(self, other: Self) -> Self {
        self.zip(other, usize::saturating_sub)
    }

    fn zip(mut self, other: Self, by: impl Fn(usize, usize) -> usize) -> Self {
        for (own, other) in self.0.iter_mut().zip(other.0) {
            *own = by(*own, other);
        }
        self
    }
}

impl Room {
    pub fn new(capacity: Rows) -> Self {
        Self {
            capacity,
            total: Rows::default(),
            of: HashMap::new(),
        }
    }

    pub fn total(&self) -> Rows {
        self.total
    }

    /// Whether a VPC may have `new` in the place of `old`. What grows in no table always may.
    pub fn admit(&self, vni: u32, old: Rows, new: Rows) -> Result<(), TableError> {
        let own = self.of.get(&vni).copied().unwrap_or_default();
        let own = own.minus(old).plus(new);
        let total = self.total.minus(old).plus(new);
        for (table, name) in TABLES.into_iter().enumerate() {
            let rows = |of: &Rows| of.0.get(table).copied().unwrap_or_default();
            let capacity = rows(&self.capacity);
            if rows(&new) <= rows(&old) {
                continue;
            }
            if rows(&own) * 4 > capacity && rows(&total) * 2 > capacity {
                return Err(TableError::Share { name });
            }
            if rows(&total) > capacity {
                return Err(TableError::Full { name });
            }
        }
        Ok(())
    }

    pub fn add(&mut self, vni: u32, rows: Rows) {
        self.total = self.total.plus(rows);
        let own = self.of.entry(vni).or_default();
        *own = own.plus(rows);
    }

    pub fn take(&mut self, vni: u32, rows: Rows) {
        self.total = self.total.minus(rows);
        if let Some(own) = self.of.get_mut(&vni) {
            *own = own.minus(rows);
            if *own == Rows::default() {
                self.of.remove(&vni);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_refused(room: &Room, vni: u32, more: Rows) -> Option<&'static str> {
        match room.admit(vni, Rows::default(), more) {
            Err(TableError::Share { name } | TableError::Full { name }) => Some(name),
            _ => None,
        }
    }

    #[test]
    fn a_vpc_alone_has_half_and_leaves_others_a_quarter_each() {
        let mut room = Room::new(Rows([100, 200, 400]));
        assert_eq!(is_refused(&room, 1, Rows([50, 100, 200])), None);
        assert_eq!(is_refused(&room, 1, Rows([51, 0, 0])), Some("SERVICES"));
        assert_eq!(is_refused(&room, 1, Rows([50, 101, 0])), Some("SLOTS"));
        assert_eq!(is_refused(&room, 1, Rows([50, 100, 201])), Some("BACKENDS"));
        room.add(1, Rows([50, 100, 200]));
        for vni in [2, 3] {
            assert_eq!(is_refused(&room, vni, Rows([26, 0, 0])), Some("SERVICES"));
            assert_eq!(is_refused(&room, vni, Rows([25, 50, 100])), None);
            room.add(vni, Rows([25, 50, 100]));
        }
        assert_eq!(is_refused(&room, 4, Rows([1, 0, 0])), Some("SERVICES"), "full");
        room.take(1, Rows([26, 0, 0]));
        assert_eq!(is_refused(&room, 1, Rows([1, 0, 0])), None, "within its quarter");
        assert_eq!(is_refused(&room, 4, Rows([1, 0, 0])), None);
    }

    #[test]
    fn what_shrinks_is_never_refused() {
        let mut room = Room::new(Rows([10, 10, 10]));
        room.add(1, Rows([10, 10, 10]));
        let admit = |old, new| room.admit(1, old, new).is_ok();
        assert!(admit(Rows([5, 5, 5]), Rows([5, 5, 4])));
        assert!(!admit(Rows([5, 5, 5]), Rows([4, 4, 6])));
    }

    #[test]
    fn rows_are_those_of_the_tables() {
        assert_eq!(Rows::of_port(0), Rows([1, 0, 0]));
        assert_eq!(Rows::of_port(2), Rows([1, 4, 2]));
        assert_eq!(Rows::of_port(16384), Rows([1, 4096, 16384]));
    }
}

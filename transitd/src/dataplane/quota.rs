//! The share of each VPC in SERVICES, SLOTS and BACKENDS: how many rows it has, and whether it may have more.
//!
//! Invariant: any VPC may have up to a quarter of a table. Beyond that a VPC takes rows only while half of the table
//! stays free. So one VPC has at most half, and leaves others a quarter each. Pure.

use std::collections::HashMap;

use thuban_common::services::CHUNK;
use thuban_rows::Service;

use super::maglev;
use super::tables::TableError;

/// The tables, in the order of [`Usage`].
pub const TABLES: [&str; 3] = ["SERVICES", "SLOTS", "BACKENDS"];

/// Rows in each of [`TABLES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage(pub [usize; 3]);

#[derive(Debug)]
pub struct Quota {
    capacity: Usage,
    total: Usage,
    of: HashMap<u32, Usage>,
}

impl Usage {
    /// The usage of an address's own entry.
    pub const OWN: Self = Self([1, 0, 0]);

    /// Returns the usage of a port with so many backends.
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

impl Quota {
    pub fn new(capacity: Usage) -> Self {
        Self {
            capacity,
            total: Usage::default(),
            of: HashMap::new(),
        }
    }

    pub fn total(&self) -> Usage {
        self.total
    }

    /// Returns an error unless a VPC may have `new` in the place of `old`. A change that grows in no table is always
    /// allowed.
    pub fn admit(&self, vni: u32, old: Usage, new: Usage) -> Result<(), TableError> {
        let own = self.of.get(&vni).copied().unwrap_or_default();
        let own = own.minus(old).plus(new);
        let total = self.total.minus(old).plus(new);
        for (table, name) in TABLES.into_iter().enumerate() {
            let rows = |of: &Usage| of.0.get(table).copied().unwrap_or_default();
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

    pub fn add(&mut self, vni: u32, rows: Usage) {
        self.total = self.total.plus(rows);
        let own = self.of.entry(vni).or_default();
        *own = own.plus(rows);
    }

    pub fn take(&mut self, vni: u32, rows: Usage) {
        self.total = self.total.minus(rows);
        if let Some(own) = self.of.get_mut(&vni) {
            *own = own.minus(rows);
            if *own == Usage::default() {
                self.of.remove(&vni);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_refused(quota: &Quota, vni: u32, more: Usage) -> Option<&'static str> {
        match quota.admit(vni, Usage::default(), more) {
            Err(TableError::Share { name } | TableError::Full { name }) => Some(name),
            _ => None,
        }
    }

    #[test]
    fn a_vpc_alone_has_half_and_leaves_others_a_quarter_each() {
        let mut quota = Quota::new(Usage([100, 200, 400]));
        assert_eq!(is_refused(&quota, 1, Usage([50, 100, 200])), None);
        assert_eq!(is_refused(&quota, 1, Usage([51, 0, 0])), Some("SERVICES"));
        assert_eq!(is_refused(&quota, 1, Usage([50, 101, 0])), Some("SLOTS"));
        assert_eq!(is_refused(&quota, 1, Usage([50, 100, 201])), Some("BACKENDS"));
        quota.add(1, Usage([50, 100, 200]));
        for vni in [2, 3] {
            assert_eq!(is_refused(&quota, vni, Usage([26, 0, 0])), Some("SERVICES"));
            assert_eq!(is_refused(&quota, vni, Usage([25, 50, 100])), None);
            quota.add(vni, Usage([25, 50, 100]));
        }
        assert_eq!(is_refused(&quota, 4, Usage([1, 0, 0])), Some("SERVICES"), "full");
        quota.take(1, Usage([26, 0, 0]));
        assert_eq!(
            is_refused(&quota, 1, Usage([1, 0, 0])),
            None,
            "within its quarter"
        );
        assert_eq!(is_refused(&quota, 4, Usage([1, 0, 0])), None);
    }

    #[test]
    fn what_shrinks_is_never_refused() {
        let mut quota = Quota::new(Usage([10, 10, 10]));
        quota.add(1, Usage([10, 10, 10]));
        let admit = |old, new| quota.admit(1, old, new).is_ok();
        assert!(admit(Usage([5, 5, 5]), Usage([5, 5, 4])));
        assert!(!admit(Usage([5, 5, 5]), Usage([4, 4, 6])));
    }

    #[test]
    fn rows_are_those_of_the_tables() {
        assert_eq!(Usage::of_port(0), Usage([1, 0, 0]));
        assert_eq!(Usage::of_port(2), Usage([1, 4, 2]));
        assert_eq!(Usage::of_port(16384), Usage([1, 4096, 16384]));
    }
}

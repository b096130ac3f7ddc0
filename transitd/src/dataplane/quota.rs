//! The share of each VPC in SERVICES, SLOTS and BACKENDS: how many rows it has, and whether it may have more.
//!
//! Invariant: a VPC always has room for its reserve. It takes more rows only while half of the table stays free
//! ([`Shared`]). Pure.

use std::collections::HashMap;

use thuban_common::services::CHUNK;
use thuban_rows::Service;

use super::maglev;
use super::reserve::Shared;
use super::tables::TableError;

/// The tables, in the order of [`Usage`].
pub const TABLES: [&str; 3] = ["SERVICES", "SLOTS", "BACKENDS"];

/// The least number of VPCs for which each table has reserves: of SLOTS, the smallest, each gets 4,096 rows. Those are
/// enough for a thousand ports with two backends each.
const LEAST_VPCS: usize = 32;

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
            let shared = Shared {
                capacity,
                least_vpcs: LEAST_VPCS,
            };
            if !shared.is_free(rows(&total)) {
                let held: Vec<usize> = self.of.values().map(rows).collect();
                // Room is kept for VPCs that have no rows yet.
                let vpcs = shared.parts(held.len());
                if rows(&own) > shared.reserve(&held, vpcs, rows(&self.total)) {
                    return Err(TableError::Share { name });
                }
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
    fn who_fills_half_leaves_every_other_vpc_its_reserve() {
        // The reserve is 50, 100 and 200 rows.
        let mut quota = Quota::new(Usage([3200, 6400, 12_800]));
        assert_eq!(is_refused(&quota, 1, Usage([1600, 3200, 6400])), None);
        assert_eq!(is_refused(&quota, 1, Usage([1601, 0, 0])), Some("SERVICES"));
        assert_eq!(is_refused(&quota, 1, Usage([1600, 3201, 0])), Some("SLOTS"));
        assert_eq!(is_refused(&quota, 1, Usage([1600, 3200, 6401])), Some("BACKENDS"));
        quota.add(1, Usage([1600, 3200, 6400]));
        assert_eq!(is_refused(&quota, 1, Usage([1, 0, 0])), Some("SERVICES"));
        for vni in 2..=32 {
            assert_eq!(
                is_refused(&quota, vni, Usage([51, 0, 0])),
                Some("SERVICES"),
                "{vni}"
            );
            assert_eq!(is_refused(&quota, vni, Usage([50, 100, 200])), None, "{vni}");
            quota.add(vni, Usage([50, 100, 200]));
        }
        assert_eq!(is_refused(&quota, 33, Usage([25, 50, 100])), None, "the rest");
        quota.take(1, Usage([1600, 3200, 6400]));
        assert_eq!(is_refused(&quota, 33, Usage([50, 0, 0])), None, "half is free");
    }

    #[test]
    fn a_vpc_that_has_more_than_its_reserve_keeps_what_it_has() {
        let mut quota = Quota::new(Usage([3200, 6400, 12_800]));
        quota.add(1, Usage([1600, 0, 0]));
        quota.add(2, Usage([50, 0, 0]));
        let change = |old, new| quota.admit(1, Usage([old, 0, 0]), Usage([new, 0, 0])).is_ok();
        assert!(change(10, 10) && change(10, 9) && !change(10, 11));
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

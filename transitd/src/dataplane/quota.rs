//! The share of each VPC in SERVICES, SLOTS, BACKENDS and HOMES: how many rows it has, and whether it may have more.
//!
//! Invariant: a VPC always has room for its reserve. It takes more rows, up to half of the table, only while a quarter
//! stays free ([`Shared`]). Pure.

use std::collections::HashMap;

use thuban_common::services::CHUNK;

use super::maglev;
use super::reserve::Shared;
use super::tables::TableError;

/// The tables, in the order of [`Usage`].
pub const TABLES: [&str; 4] = ["SERVICES", "SLOTS", "BACKENDS", "HOMES"];

/// Rows in each of [`TABLES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage(pub [usize; 4]);

#[derive(Debug)]
pub struct Quota {
    capacity: Usage,
    total: Usage,
    of: HashMap<u32, Usage>,
}

impl Usage {
    /// The usage of an address's own entry.
    pub const OWN: Self = Self([1, 0, 0, 0]);

    /// Returns the usage of a table of slots with so many backends, for a port of a service.
    pub fn of_port(backends: usize) -> Self {
        let chunks = maglev::size(backends).div_ceil(CHUNK as u32);
        Self([1, chunks as usize, backends, 0])
    }

    /// Returns the same for a port of a front, whose backends have homes.
    pub fn of_front(backends: usize) -> Self {
        Self::of_port(backends).plus(Self([0, 0, 0, backends]))
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
        let newcomer = (!self.of.contains_key(&vni)).then_some(0_usize);
        for (table, name) in TABLES.into_iter().enumerate() {
            let rows = |of: &Usage| of.0.get(table).copied().unwrap_or_default();
            let capacity = rows(&self.capacity);
            if rows(&new) <= rows(&old) {
                continue;
            }
            if rows(&own) * 2 > capacity {
                return Err(TableError::Share { name });
            }
            let held = || self.of.values().map(rows).chain(newcomer).collect();
            let shared = Shared::quarter_reserved(capacity);
            if !shared.admits(rows(&own), rows(&total), held, rows(&self.total)) {
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
    fn no_vpc_has_more_than_half_and_two_leave_all_others_a_reserve() {
        // The reserve is 25, 50 and 100 rows.
        let mut quota = Quota::new(Usage([3200, 6400, 12_800, 0]));
        assert_eq!(is_refused(&quota, 1, Usage([1600, 3200, 6400, 0])), None);
        assert_eq!(is_refused(&quota, 1, Usage([1601, 0, 0, 0])), Some("SERVICES"));
        assert_eq!(is_refused(&quota, 1, Usage([1600, 3201, 0, 0])), Some("SLOTS"));
        assert_eq!(
            is_refused(&quota, 1, Usage([1600, 3200, 6401, 0])),
            Some("BACKENDS")
        );
        quota.add(1, Usage([1600, 3200, 6400, 0]));
        assert_eq!(is_refused(&quota, 2, Usage([801, 0, 0, 0])), Some("SERVICES"));
        assert_eq!(
            is_refused(&quota, 2, Usage([800, 1600, 3200, 0])),
            None,
            "a quarter"
        );
        quota.add(2, Usage([800, 1600, 3200, 0]));
        for vni in 3..=16 {
            assert_eq!(
                is_refused(&quota, vni, Usage([26, 0, 0, 0])),
                Some("SERVICES"),
                "{vni}"
            );
            assert_eq!(is_refused(&quota, vni, Usage([25, 50, 100, 0])), None, "{vni}");
            quota.add(vni, Usage([25, 50, 100, 0]));
        }
        // The other half of the reserves is for VPCs behind them.
        for (vpcs, reserve) in [(17..=32, [6, 12, 25]), (33..=64, [3, 6, 12])] {
            let [services, slots, backends] = reserve;
            let reserve = Usage([services, slots, backends, 0]);
            for vni in vpcs {
                let more = Usage([services + 1, 0, 0, 0]);
                assert_eq!(is_refused(&quota, vni, more), Some("SERVICES"), "{vni}");
                assert_eq!(is_refused(&quota, vni, reserve), None, "{vni}");
                quota.add(vni, reserve);
            }
        }
        quota.take(2, Usage([800, 1600, 3200, 0]));
        assert_eq!(
            is_refused(&quota, 2, Usage([50, 0, 0, 0])),
            None,
            "a quarter is free"
        );
    }

    #[test]
    fn a_vpc_that_has_more_than_its_reserve_keeps_what_it_has() {
        let mut quota = Quota::new(Usage([3200, 6400, 12_800, 0]));
        quota.add(1, Usage([1600, 0, 0, 0]));
        quota.add(2, Usage([850, 0, 0, 0]));
        let change = |old, new| {
            quota
                .admit(2, Usage([old, 0, 0, 0]), Usage([new, 0, 0, 0]))
                .is_ok()
        };
        assert!(change(10, 10) && change(10, 9) && !change(10, 11));
    }

    #[test]
    fn what_shrinks_is_never_refused() {
        let mut quota = Quota::new(Usage([10, 10, 10, 0]));
        quota.add(1, Usage([10, 10, 10, 0]));
        let admit = |old, new| quota.admit(1, old, new).is_ok();
        assert!(admit(Usage([5, 5, 5, 0]), Usage([5, 5, 4, 0])));
        assert!(!admit(Usage([5, 5, 5, 0]), Usage([4, 4, 6, 0])));
    }

    #[test]
    fn rows_are_those_of_the_tables() {
        assert_eq!(Usage::of_port(0), Usage([1, 0, 0, 0]));
        assert_eq!(Usage::of_port(2), Usage([1, 1, 2, 0]));
        assert_eq!(Usage::of_port(16384), Usage([1, 1024, 16384, 0]));
        assert_eq!(Usage::of_front(2), Usage([1, 1, 2, 2]));
    }
}

//! Maglev's table (Eisenbud et al., NSDI 2016): which backend a slot leads to. All backends have about as many slots.
//! A backend that comes or goes moves few slots of others.
//!
//! Pure, and the same on every droplet: the table depends on the backends alone, in any order.

use thuban_common::services::{BackendEntry, MAX_SLOTS};

/// The sizes of tables. They are primes, each four times as large as the one before, so that the size seldom changes
/// with the number of backends: a change of the size moves nearly all slots.
const SIZES: [u32; 6] = [251, 1021, 4093, 16381, 65521, MAX_SLOTS];
/// The number of slots that a backend should have. With so many, the shares of backends differ by no more than some
/// percent, and a usual service with few backends takes little room.
const SLOTS_A_BACKEND: usize = 60;
/// The mark of a slot that no backend has yet.
const NOBODY: u32 = u32::MAX;

/// Returns the number of slots of a table for so many backends.
pub fn size(backends: usize) -> u32 {
    if backends == 0 {
        return 0;
    }
    let wanted = backends * SLOTS_A_BACKEND;
    SIZES
        .into_iter()
        .find(|size| *size as usize >= wanted)
        .unwrap_or(MAX_SLOTS)
}

/// Returns the slots of a table of that size, each an index into `backends`, which are sorted and different. There are
/// no slots without backends.
pub fn table(backends: &[BackendEntry], size: u32) -> Vec<u32> {
    if backends.is_empty() || size == 0 {
        return Vec::new();
    }
    let mut turns: Vec<Turn> = backends.iter().map(|backend| Turn::new(backend, size)).collect();
    let mut slots = vec![NOBODY; size as usize];
    let mut free = slots.len();
    'full: loop {
        for (index, turn) in turns.iter_mut().enumerate() {
            let slot = turn.next(size, |slot| slots[slot as usize] == NOBODY);
            slots[slot as usize] = index as u32;
            free -= 1;
            if free == 0 {
                break 'full;
            }
        }
    }
    slots
}

/// Where a backend is in its own order of the slots.
struct Turn {
    slot: u32,
    step: u32,
}

impl Turn {
    fn new(backend: &BackendEntry, size: u32) -> Self {
        let hash = hash(backend);
        Self {
            slot: (hash % u64::from(size)) as u32,
            step: ((hash >> 32) % u64::from(size - 1)) as u32 + 1,
        }
    }

    /// Returns the next slot of the order that is free. There is one: the step and the size, a prime, have no common
    /// divisor.
    fn next(&mut self, size: u32, is_free: impl Fn(u32) -> bool) -> u32 {
        loop {
            let slot = self.slot;
            self.slot = (slot + self.step) % size;
            if is_free(slot) {
                return slot;
            }
        }
    }
}

/// Hashes a backend. The hash must never change: droplets of all versions choose alike.
fn hash(backend: &BackendEntry) -> u64 {
    let address = u128::from_be_bytes(backend.address);
    let words = [
        (address >> 64) as u64,
        address as u64,
        u64::from(u16::from_be(backend.port)),
    ];
    words
        .into_iter()
        .fold(0x7468_7562_616e, |hash, word| mix(hash ^ word))
}

/// SplitMix64's finalizer (public domain, Sebastiano Vigna).
fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backends(count: u16) -> Vec<BackendEntry> {
        let backend = |n: u16| {
            let mut address = [0xfd; 16];
            address[14..].copy_from_slice(&n.to_be_bytes());
            BackendEntry {
                address,
                port: 8080_u16.to_be(),
                padding: 0,
            }
        };
        (0..count).map(backend).collect()
    }

    #[test]
    fn backends_have_about_as_many_slots() {
        for count in [1, 2, 3, 10, 37, 100, 600] {
            let slots = table(&backends(count), size(count.into()));
            let mut shares = vec![0_u32; count.into()];
            for index in &slots {
                shares[*index as usize] += 1;
            }
            let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
            assert!(
                most - least <= slots.len() as u32 / u32::from(count) / 20 + 1,
                "{count}: {least} to {most}"
            );
        }
        assert!(table(&[], 0).is_empty());
    }

    #[test]
    fn a_backend_that_goes_moves_few_slots_of_others() {
        for count in [4, 10, 37, 160] {
            let before = backends(count);
            let mut after = before.clone();
            let gone = usize::from(count / 2);
            after.remove(gone);
            let (old, new) = (
                table(&before, size(before.len())),
                table(&after, size(after.len())),
            );
            assert_eq!(old.len(), new.len());
            let moved = old.iter().zip(&new).filter(|(old, new)| {
                before[**old as usize] != after[**new as usize] && **old as usize != gone
            });
            let moved = moved.count();
            assert!(moved * 100 < old.len() * 8, "{count}: {moved} of {}", old.len());
        }
    }

    #[test]
    fn the_table_is_the_one_that_other_droplets_have() {
        let slots = table(&backends(3), size(3));
        let sum = slots
            .iter()
            .fold(0_u64, |sum, index| mix(sum ^ u64::from(*index)));
        assert_eq!(
            (slots.len(), sum),
            (251, 10_634_812_095_740_079_187),
            "other versions would choose other backends"
        );
    }

    #[test]
    fn the_largest_service_has_a_table() {
        let slots = table(&backends(16384), size(16384));
        assert_eq!(slots.len(), MAX_SLOTS as usize);
        let mut shares = vec![0_u32; 16384];
        for index in &slots {
            shares[*index as usize] += 1;
        }
        assert!(shares.iter().all(|share| (15..=17).contains(share)));
    }
}

//! Lists: ranges of points with decisions, and the parts of a tree in which LISTS has them.

use std::collections::HashSet;
use std::sync::Arc;

use thuban_common::policy::{ListEntry, MAX_RANGES, PortRange, RANGES};

use super::store::NoRoom;

/// The ranges of a list: ascending, none touched by another that decides the same. A list without ranges has number 0
/// and no parts.
pub type Content = Arc<[PortRange]>;

/// The contents that a set needs, each of them once.
#[derive(Debug)]
pub struct Contents {
    known: HashSet<Content>,
    parts: usize,
    most_parts: usize,
    /// Ranges and rules that were looked at for the contents.
    pub work: usize,
}

impl Contents {
    pub fn new(most_parts: usize) -> Self {
        Self {
            known: HashSet::new(),
            parts: 0,
            most_parts,
            work: 0,
        }
    }

    /// Returns the content of these ranges. An error: the set alone has more than there is for a VPC.
    pub fn add(&mut self, ranges: Vec<PortRange>) -> Result<Content, NoRoom> {
        self.work += ranges.len();
        if let Some(known) = self.known.get(&*ranges) {
            return Ok(known.clone());
        }
        if ranges.len() > MAX_RANGES {
            return Err(NoRoom::Set);
        }
        let parts = self.parts + parts(ranges.len());
        if parts > self.most_parts {
            return Err(NoRoom::Set);
        }
        self.parts = parts;
        let content = Content::from(ranges);
        self.known.insert(content.clone());
        Ok(content)
    }
}

/// Returns the number of parts that so many ranges take.
pub fn parts(ranges: usize) -> usize {
    let levels = std::iter::successors(Some(ranges), |above| {
        (*above > RANGES).then(|| above.div_ceil(RANGES))
    });
    levels.map(|ranges| ranges.div_ceil(RANGES)).sum()
}

/// Returns the parts of a list, by their numbers.
pub fn tree(content: &[PortRange]) -> Vec<ListEntry> {
    let mut parts = vec![ListEntry::new(&[], 0)];
    let mut level = content.to_vec();
    let mut leads = 0;
    while level.len() > RANGES {
        let above = level.chunks(RANGES).map(|ranges| {
            parts.push(ListEntry::new(ranges, leads));
            PortRange {
                first: ranges[0].first,
                last: ranges[ranges.len() - 1].last,
                decision: parts.len() as u32 - 1,
            }
        });
        level = above.collect();
        leads = 1;
    }
    parts[0] = ListEntry::new(&level, leads);
    parts
}

#[cfg(test)]
mod tests {
    use thuban_common::policy::Action::Accept;
    use thuban_common::policy::{Decision, ListKey, NO_RULE, look_up, ranked};

    use super::*;

    /// Returns ranges of two points with a gap of one point behind each.
    fn ranges(count: u32) -> Vec<PortRange> {
        let range = |n: u32| PortRange {
            first: 3 * n,
            last: 3 * n + 1,
            decision: rule(n).word(),
        };
        (0..count).map(range).collect()
    }

    fn rule(n: u32) -> Decision {
        Decision {
            admin: NO_RULE,
            rest: ranked(n as u16, Accept),
        }
    }

    #[test]
    fn a_list_of_any_size_is_found_in_its_parts() {
        for count in [1, 9, 10, 11, 99, 100, 101, 999, 1000, 1001, MAX_RANGES as u32] {
            let made = tree(&ranges(count));
            assert_eq!(made.len(), parts(count as usize), "{count}");
            let part = |key: &ListKey| made.get(key.part as usize);
            for n in 0..count {
                for (point, expected) in [
                    (3 * n, rule(n)),
                    (3 * n + 1, rule(n)),
                    (3 * n + 2, Decision::NONE),
                ] {
                    assert_eq!(look_up(7, point, part), Some(expected), "{point} of {count}");
                }
            }
        }
        assert_eq!(parts(0), 0);
    }

    #[test]
    fn the_same_ranges_are_one_content_and_too_many_are_none() {
        let mut contents = Contents::new(3);
        let ten = contents.add(ranges(10)).unwrap();
        assert!(Arc::ptr_eq(&ten, &contents.add(ranges(10)).unwrap()));
        contents.add(ranges(9)).unwrap();
        contents.add(ranges(8)).unwrap();
        assert_eq!(contents.add(ranges(7)), Err(NoRoom::Set));
        let mut contents = Contents::new(2000);
        contents.add(ranges(MAX_RANGES as u32)).unwrap();
        assert!(contents.add(ranges(MAX_RANGES as u32 + 1)).is_err());
    }
}

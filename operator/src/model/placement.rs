//! Picks the droplet that carries a divider or bouncer.

/// A droplet that could carry it.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own, none follows from another
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    pub name: String,
    /// Roles that it carries already.
    pub roles: usize,
    /// It carries a role of the same parent.
    pub has_sibling: bool,
    /// Roles of the same parent in its zone.
    pub zone_siblings: usize,
    /// Its Node is labelled for transit.
    pub is_preferred: bool,
    /// Its Node takes no new pods: it is about to be drained.
    pub is_cordoned: bool,
    /// It has had no room for rows of a role lately.
    pub is_full: bool,
}

impl Candidate {
    /// Whether a role that works elsewhere may move here.
    pub fn is_good(&self) -> bool {
        !self.is_full && !self.is_cordoned && !self.has_sibling
    }
}

/// Picks the best candidate: never a full or cordoned droplet, and never a sibling's droplet while another one is free.
/// Then preferred droplets come first, then the zone with the fewest siblings, then the fewest roles, then the name.
pub fn pick(candidates: &[Candidate]) -> Option<&Candidate> {
    let rank = |candidate: &&Candidate| {
        (
            candidate.is_full,
            candidate.is_cordoned,
            candidate.has_sibling,
            !candidate.is_preferred,
            candidate.zone_siblings,
            candidate.roles,
            candidate.name.clone(),
        )
    };
    candidates.iter().min_by_key(rank)
}

/// The least that can be hoped for of a candidate, whoever comes.
#[derive(Clone, Copy, Debug)]
pub struct Hope {
    /// The fewest siblings in any zone.
    pub zone_siblings: usize,
    /// There are preferred droplets.
    pub is_preferred: bool,
}

/// Picks the best of candidates that come in the order of their number of roles and their names: the first that fulfils
/// all hopes, or else the best of all.
pub fn pick_ordered(candidates: impl Iterator<Item = Candidate>, hope: Hope) -> Option<Candidate> {
    let mut seen = Vec::new();
    for candidate in candidates {
        let is_best = candidate.is_good()
            && candidate.is_preferred == hope.is_preferred
            && candidate.zone_siblings == hope.zone_siblings;
        if is_best {
            return Some(candidate);
        }
        seen.push(candidate);
    }
    pick(&seen).cloned()
}

#[cfg(test)]
mod tests {
    use super::{Candidate, Hope, pick, pick_ordered};

    fn candidate(name: &str) -> Candidate {
        Candidate {
            name: name.into(),
            ..Candidate::default()
        }
    }

    fn picked(candidates: &[Candidate]) -> Option<&str> {
        pick(candidates).map(|candidate| candidate.name.as_str())
    }

    #[test]
    fn roles_spread_over_droplets_and_zones_avoiding_siblings() {
        let (a, b) = (candidate("a"), candidate("b"));
        let busy = |roles, candidate: &Candidate| Candidate {
            roles,
            ..candidate.clone()
        };
        let sibling = Candidate {
            has_sibling: true,
            is_preferred: true,
            ..a.clone()
        };
        let cordoned = Candidate {
            is_cordoned: true,
            ..a.clone()
        };
        let same_zone = Candidate {
            zone_siblings: 1,
            ..a.clone()
        };
        let preferred = Candidate {
            is_preferred: true,
            ..busy(5, &b)
        };
        assert_eq!(picked(&[]), None);
        assert_eq!(picked(&[busy(2, &a), busy(1, &b)]), Some("b"));
        assert_eq!(picked(&[sibling.clone(), busy(9, &b)]), Some("b"));
        assert_eq!(picked(&[a.clone(), preferred]), Some("b"));
        assert_eq!(picked(&[same_zone, busy(9, &b)]), Some("b"));
        assert_eq!(
            picked(&[
                cordoned.clone(),
                Candidate {
                    has_sibling: true,
                    ..b
                }
            ]),
            Some("b")
        );
        let full = Candidate {
            is_full: true,
            ..candidate("b")
        };
        assert!(!full.is_good() && !sibling.is_good() && !cordoned.is_good() && a.is_good());
        for other in [&sibling, &cordoned] {
            assert_eq!(
                picked(&[other.clone(), full.clone()]),
                Some("a"),
                "a role does not work there"
            );
        }
        for only in [sibling, cordoned] {
            assert_eq!(picked(&[only]), Some("a"), "better there than nowhere");
        }
        assert_eq!(picked(&[full]), Some("b"), "better there than nowhere");
    }

    #[test]
    fn candidates_in_order_are_picked_as_if_all_were_seen() {
        // Each number stands for a candidate: its digits are its properties.
        let candidate = |number: usize| Candidate {
            name: format!("d{number}"),
            roles: number / 32,
            has_sibling: number.is_multiple_of(7),
            zone_siblings: number / 2 % 3,
            is_preferred: number.is_multiple_of(5),
            is_cordoned: number.is_multiple_of(11),
            is_full: number.is_multiple_of(13),
        };
        for first in 0..200 {
            for number in [0, 1, 2, 40] {
                let mut all: Vec<Candidate> = (first..first + number).map(candidate).collect();
                all.sort_by_key(|candidate| (candidate.roles, candidate.name.clone()));
                let hope = Hope {
                    zone_siblings: all
                        .iter()
                        .map(|candidate| candidate.zone_siblings)
                        .min()
                        .unwrap_or(0),
                    is_preferred: all.iter().any(|candidate| candidate.is_preferred),
                };
                let mut looked = 0;
                let ordered = all.iter().cloned().inspect(|_| looked += 1);
                assert_eq!(pick_ordered(ordered, hope).as_ref(), pick(&all), "{first}");
                assert!(number < 40 || looked < 40, "{first}: all were looked at");
            }
        }
    }
}

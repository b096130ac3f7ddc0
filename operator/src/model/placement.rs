//! Which droplet carries a divider or bouncer.

/// A droplet that could carry it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub name: String,
    /// Roles that it carries already.
    pub roles: usize,
    /// It carries a role of the same parent.
    pub has_sibling: bool,
    /// Its Node is labelled for transit.
    pub is_preferred: bool,
}

/// Never a sibling's droplet while another is free, then preferred ones, then the fewest roles, then by name.
pub fn pick(candidates: &[Candidate]) -> Option<&str> {
    let rank = |candidate: &&Candidate| {
        (
            candidate.has_sibling,
            !candidate.is_preferred,
            candidate.roles,
            candidate.name.clone(),
        )
    };
    candidates
        .iter()
        .min_by_key(rank)
        .map(|candidate| candidate.name.as_str())
}

#[cfg(test)]
mod tests {
    use super::{Candidate, pick};

    fn candidate(name: &str, roles: usize, has_sibling: bool, is_preferred: bool) -> Candidate {
        Candidate {
            name: name.into(),
            roles,
            has_sibling,
            is_preferred,
        }
    }

    #[test]
    fn roles_spread_and_siblings_avoid_each_other() {
        assert_eq!(pick(&[]), None);
        assert_eq!(
            pick(&[candidate("a", 2, false, false), candidate("b", 1, false, false)]),
            Some("b")
        );
        assert_eq!(
            pick(&[candidate("a", 0, true, true), candidate("b", 9, false, false)]),
            Some("b")
        );
        assert_eq!(
            pick(&[candidate("a", 0, false, false), candidate("b", 5, false, true)]),
            Some("b")
        );
        assert_eq!(
            pick(&[candidate("a", 0, true, false)]),
            Some("a"),
            "better there than nowhere"
        );
    }
}

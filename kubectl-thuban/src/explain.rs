//! `explain`: what a reason of a condition or event, or a counter of the programs, means. The texts are those of
//! `thuban_api::reasons` and of the counters themselves.

use std::collections::BTreeSet;

use serde::Serialize;
use thuban_api::reasons;
use thuban_common::counters::Counter;

/// How many other names an error suggests.
const SUGGESTED: usize = 5;
/// How many characters at the beginning of a name make it similar to another one.
const SIMILAR: usize = 5;

/// What a name means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    pub name: &'static str,
    /// The kinds of objects that have the reason, `drop` or `counter`.
    pub of: &'static str,
    pub meaning: String,
    /// Empty if there is nothing to do.
    pub remedy: &'static str,
}

/// Returns all that a name means, in any case.
pub fn explain(name: &str) -> Vec<Explanation> {
    all()
        .filter(|explanation| explanation.name.eq_ignore_ascii_case(name))
        .collect()
}

/// Returns names that resemble one that is unknown.
pub fn similar(name: &str) -> Vec<&'static str> {
    let wanted = name.to_lowercase();
    let beginning: String = wanted.chars().take(SIMILAR).collect();
    let is_similar = |known: &str| {
        let known = known.to_lowercase();
        !wanted.is_empty() && (known.contains(&wanted) || known.starts_with(&beginning))
    };
    let names: BTreeSet<&str> = all().map(|explanation| explanation.name).collect();
    let similar = names.into_iter().filter(|known| is_similar(known));
    similar.take(SUGGESTED).collect()
}

fn all() -> impl Iterator<Item = Explanation> {
    let reasons = reasons::all().map(|reason| Explanation {
        name: reason.name,
        of: reason.kinds,
        meaning: reason.meaning.to_owned(),
        remedy: reason.remedy,
    });
    reasons.chain(Counter::ALL.iter().copied().map(of_counter))
}

fn of_counter(counter: Counter) -> Explanation {
    let meaning = counter.meaning().trim();
    let meaning = meaning.strip_prefix("Drop: ").unwrap_or(meaning);
    Explanation {
        name: counter.name(),
        of: if counter.is_drop() { "drop" } else { "counter" },
        meaning: meaning.trim_end_matches('.').to_owned(),
        remedy: counter.remedy(),
    }
}

#[cfg(test)]
mod tests {
    use super::{explain, similar};

    #[test]
    fn reasons_and_drops_are_explained_in_any_case() {
        let found = explain("networkfull");
        let [full] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(full.name, "NetworkFull");
        assert!(full.remedy.contains("append a range"), "{full:?}");
        let found = explain("outside_vpc");
        let [outside] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(outside.of, "drop");
        assert!(outside.meaning.starts_with("destination outside"), "{outside:?}");
        assert!(explain("AddressTaken").len() > 1);
    }

    #[test]
    fn an_unknown_name_has_similar_ones() {
        assert!(explain("NetworkFul").is_empty());
        assert!(similar("NetworkFul").contains(&"NetworkFull"));
        assert!(similar("").is_empty());
        assert!(similar("qqqqqq").is_empty());
    }
}

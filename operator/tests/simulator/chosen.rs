//! The seeds that are run first: those whose schedules took the longest, and those in which most differed, of very
//! many.
//!
//! `THUBAN_CHOSEN=FILE` writes such a list after a run; `cargo xtask soak --only simulator` does so. The list is
//! committed as `chosen.txt`. A change of code may give a seed another schedule, so the list is made again from time to
//! time.

use std::collections::BTreeSet;

/// The most seeds of each of both kinds.
const EACH: usize = 100;

/// Returns the committed seeds.
pub fn seeds() -> Vec<u64> {
    let lines = include_str!("chosen.txt").lines();
    let lines = lines.filter(|line| !line.starts_with('#'));
    lines
        .map(|line| line.parse().expect("a seed in chosen.txt"))
        .collect()
}

/// How long a schedule took, and how much differed in it.
#[derive(Clone, Copy, Debug)]
pub struct Measure {
    pub seed: u64,
    /// Virtual milliseconds.
    pub length: u64,
    /// How many different pairs of kinds of events followed each other.
    pub pairs: usize,
}

impl Measure {
    pub fn of(seed: u64, trace: &[String]) -> Self {
        let last = trace.last().and_then(|line| line.split_whitespace().next());
        // Times have three digits behind the point.
        let length = last.and_then(|time| time.replace('.', "").parse().ok());
        let kinds: Vec<String> = trace.iter().map(|line| kind(line)).collect();
        let pairs: BTreeSet<_> = kinds.windows(2).collect();
        Self {
            seed,
            length: length.unwrap_or_default(),
            pairs: pairs.len(),
        }
    }
}

/// Returns a line of a trace without its time, names and numbers.
fn kind(line: &str) -> String {
    let words = line.split_whitespace().skip(1);
    let words = words.map(|word| word.split_once('/').map_or(word, |(plural, _)| plural));
    let is_kept = |word: &&str| !word.contains(|letter: char| letter.is_ascii_digit()) || is_code(word);
    words.filter(is_kept).collect::<Vec<_>>().join(" ")
}

/// Whether a word is an answer's code.
fn is_code(word: &str) -> bool {
    word.len() == 3 && word.parse::<u16>().is_ok_and(|code| code >= 200)
}

/// Returns the list for a file.
pub fn choose(mut all: Vec<Measure>) -> String {
    let count = all.len();
    let mut chosen = BTreeSet::new();
    let mut take = |all: &[Measure]| chosen.extend(all.iter().take(EACH).map(|measure| measure.seed));
    all.sort_by_key(|measure| std::cmp::Reverse((measure.length, measure.seed)));
    take(&all);
    all.sort_by_key(|measure| std::cmp::Reverse((measure.pairs, measure.seed)));
    take(&all);
    let mut list =
        format!("# Seeds of {count} schedules: the {EACH} longest, and the {EACH} in which most differs.\n");
    list.extend(chosen.iter().map(|seed| format!("{seed}\n")));
    list
}

#[test]
fn long_and_varied_schedules_are_chosen() {
    let measure = |seed, length, pairs| Measure { seed, length, pairs };
    let mut all: Vec<_> = (1..=500).map(|seed| measure(seed, 10, 10)).collect();
    all.push(measure(1000, 11, 1));
    all.push(measure(1001, 1, 11));
    let list = choose(all);
    assert!(list.starts_with("# Seeds of 502 schedules"), "{list}");
    assert!(list.contains("\n1000\n") && list.contains("\n1001\n"), "{list}");
    assert!(list.lines().count() <= 1 + 2 * EACH);
}

#[test]
fn kinds_of_events_have_no_names_times_or_numbers() {
    let trace = [
        "    1.002 o1 PATCH endpoints/east/p-0a1b/status -> 200 Good",
        "    2.002 o2 PATCH endpoints/west/q-ffff/status -> 200 Good",
        "    3.500 o2 PATCH endpoints/west/q-ffff/status -> 409 Good",
    ];
    let trace = trace.map(str::to_owned);
    assert_eq!(kind(&trace[0]), kind(&trace[1]));
    assert_ne!(kind(&trace[1]), kind(&trace[2]));
    let measure = Measure::of(7, &trace);
    assert_eq!((measure.length, measure.pairs), (3500, 2));
}

//! Parameters of requests: untrusted text becomes questions, or an error that names the parameter.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::str::FromStr;

use thiserror::Error;

use crate::top::By;
use crate::view::{Filter, Peer, Query, Scope};

/// The most flows of an answer, and how many if nothing is said.
const MAX_LAST: usize = 10_000;
const DEFAULT_LAST: usize = 100;
/// The longest time back, in seconds.
const MAX_SINCE: u64 = 86_400;
/// How much of an unknown parameter's name the error repeats.
const SHOWN: usize = 64;

/// What may be asked, by path.
const OF_SCOPE: &[&str] = &["namespace", "all"];
const OF_TOP: &[&str] = &["namespace", "all", "by"];
const OF_FLOWS: &[&str] = &[
    "namespace",
    "all",
    "vpc",
    "pod",
    "verdict",
    "peer",
    "since",
    "last",
    "follow",
];

/// Why the parameters of a request can't be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ParameterError {
    #[error("unknown parameter {name:?}: allowed are {}", .allowed.join(", "))]
    Unknown {
        name: String,
        allowed: &'static [&'static str],
    },
    #[error("the parameter {0} comes twice: send it once")]
    Twice(&'static str),
    #[error("{name}: expected {expected}")]
    Bad {
        name: &'static str,
        expected: &'static str,
    },
}

/// A question of `/v1/flows`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowsQuestion {
    pub query: Query,
    /// Seconds back from now.
    pub since: Option<u64>,
    /// The most flows that there are already.
    pub last: usize,
    pub follow: bool,
}

impl FlowsQuestion {
    pub fn read(query: &str) -> Result<Self, ParameterError> {
        let given = Parameters::read(query, OF_FLOWS)?;
        let scope = given.scope()?;
        let since = given.number("since", 1, MAX_SINCE, "seconds, 1 to 86400")?;
        let most = MAX_LAST as u64;
        let last = given.number("last", 1, most, "a number of flows, 1 to 10000")?;
        let follow = given.truth("follow")?;
        // Who follows without a word about the past wants news alone.
        let usual = match (follow, since) {
            (false, _) => DEFAULT_LAST,
            (true, Some(_)) => MAX_LAST,
            (true, None) => 0,
        };
        let filter = Filter {
            vpc: given.matching("vpc", "the name of a VPC", is_label)?,
            pod: given.matching("pod", "the name of a pod", is_name)?,
            peer: given.peer()?,
            is_dropped: given.dropped()?,
        };
        Ok(Self {
            query: Query { scope, filter },
            since,
            // At most 10,000.
            last: last.map_or(usual, |last| last as usize),
            follow,
        })
    }
}

/// Reads the question of `/v1/graph`, `/v1/graph/events` and `/v1/series`.
pub fn read_scope(query: &str) -> Result<Scope, ParameterError> {
    Parameters::read(query, OF_SCOPE)?.scope()
}

/// Reads the question of `/v1/top`.
pub fn read_top(query: &str) -> Result<(Scope, By), ParameterError> {
    let given = Parameters::read(query, OF_TOP)?;
    let by = By::ALL.into_iter().find(|by| given.get("by") == Some(by.name()));
    let by = by.ok_or(ParameterError::Bad {
        name: "by",
        expected: "pod, network, vpc or reason",
    })?;
    Ok((given.scope()?, by))
}

/// Parameters with known names, each there once.
struct Parameters<'a>(BTreeMap<&'static str, Cow<'a, str>>);

impl<'a> Parameters<'a> {
    fn read(query: &'a str, allowed: &'static [&'static str]) -> Result<Self, ParameterError> {
        let mut given = BTreeMap::new();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let Some(known) = allowed.iter().find(|known| **known == name) else {
                return Err(ParameterError::Unknown {
                    name: name.chars().take(SHOWN).collect(),
                    allowed,
                });
            };
            if given.insert(*known, value).is_some() {
                return Err(ParameterError::Twice(known));
            }
        }
        Ok(Self(given))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|value| &**value)
    }

    fn scope(&self) -> Result<Scope, ParameterError> {
        let namespace = self.matching("namespace", "the name of a namespace", is_label)?;
        match (namespace, self.truth("all")?) {
            (Some(namespace), false) => Ok(Scope::Namespace(namespace)),
            (None, true) => Ok(Scope::All),
            (Some(_), true) | (None, false) => Err(ParameterError::Bad {
                name: "namespace",
                expected: "either namespace=NAME or all=true",
            }),
        }
    }

    fn truth(&self, name: &'static str) -> Result<bool, ParameterError> {
        match self.get(name) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(ParameterError::Bad {
                name,
                expected: "true or false",
            }),
        }
    }

    fn number(
        &self,
        name: &'static str,
        least: u64,
        most: u64,
        expected: &'static str,
    ) -> Result<Option<u64>, ParameterError> {
        let Some(text) = self.get(name) else {
            return Ok(None);
        };
        // `from_str` takes a sign, too.
        let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
        let number = u64::from_str(text)
            .ok()
            .filter(|number| is_plain && (least..=most).contains(number));
        number.map(Some).ok_or(ParameterError::Bad { name, expected })
    }

    fn matching(
        &self,
        name: &'static str,
        expected: &'static str,
        matches: fn(&str) -> bool,
    ) -> Result<Option<String>, ParameterError> {
        match self.get(name) {
            None => Ok(None),
            Some(text) if matches(text) => Ok(Some(text.to_owned())),
            Some(_) => Err(ParameterError::Bad { name, expected }),
        }
    }

    fn dropped(&self) -> Result<Option<bool>, ParameterError> {
        match self.get("verdict") {
            None => Ok(None),
            Some("passed") => Ok(Some(false)),
            Some("dropped") => Ok(Some(true)),
            Some(_) => Err(ParameterError::Bad {
                name: "verdict",
                expected: "passed or dropped",
            }),
        }
    }

    fn peer(&self) -> Result<Option<Peer>, ParameterError> {
        let Some(text) = self.get("peer") else {
            return Ok(None);
        };
        if let Ok(address) = text.parse() {
            return Ok(Some(Peer::Address(address)));
        }
        match text.split_once('/') {
            Some((namespace, name)) if is_label(namespace) && is_name(name) => Ok(Some(Peer::Named {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            })),
            _ => Err(ParameterError::Bad {
                name: "peer",
                expected: "an address, or NAMESPACE/NAME of a pod or Service",
            }),
        }
    }
}

fn has_only(text: &str, more: &str) -> bool {
    let is_plain = |char: char| char.is_ascii_lowercase() || char.is_ascii_digit() || more.contains(char);
    text.chars().all(is_plain)
}

/// Whether the text may be the name of a namespace or VPC (RFC 1123, label).
fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len()) && has_only(text, "-")
}

/// Whether the text may be the name of a pod or Service (RFC 1123, subdomain).
fn is_name(text: &str) -> bool {
    (1..=253).contains(&text.len()) && has_only(text, "-.")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bad(query: &str) -> &'static str {
        match FlowsQuestion::read(query) {
            Err(ParameterError::Bad { name, .. } | ParameterError::Twice(name)) => name,
            other => panic!("{query}: {other:?}"),
        }
    }

    #[test]
    fn a_question_for_flows_is_read() {
        let query =
            "namespace=red&vpc=red&pod=web-0&verdict=dropped&peer=blue%2Fdb-0&since=60&last=7&follow=true";
        let expected = FlowsQuestion {
            query: Query {
                scope: Scope::Namespace("red".to_owned()),
                filter: Filter {
                    vpc: Some("red".to_owned()),
                    pod: Some("web-0".to_owned()),
                    peer: Some(Peer::Named {
                        namespace: "blue".to_owned(),
                        name: "db-0".to_owned(),
                    }),
                    is_dropped: Some(true),
                },
            },
            since: Some(60),
            last: 7,
            follow: true,
        };
        assert_eq!(FlowsQuestion::read(query), Ok(expected));
        let all = FlowsQuestion::read("all=true&peer=fd00::7").unwrap();
        assert_eq!(
            (all.query.scope, all.last, all.follow),
            (Scope::All, DEFAULT_LAST, false)
        );
        assert_eq!(
            all.query.filter.peer,
            Some(Peer::Address("fd00::7".parse().unwrap()))
        );
        let last = |query| FlowsQuestion::read(query).unwrap().last;
        assert_eq!(last("all=true&follow=true"), 0, "news alone");
        assert_eq!(last("all=true&follow=true&since=60"), MAX_LAST);
    }

    #[test]
    fn one_scope_is_named_and_no_more() {
        for query in [
            "",
            "all=false",
            "namespace=red&all=true",
            "namespace=",
            "namespace=Red",
            "namespace=a/b",
        ] {
            assert_eq!(bad(query), "namespace", "{query}");
        }
        assert_eq!(bad("all=yes"), "all");
        assert_eq!(
            read_scope("namespace=red"),
            Ok(Scope::Namespace("red".to_owned()))
        );
    }

    #[test]
    fn a_value_that_makes_no_sense_is_named() {
        for (query, name) in [
            ("vpc=", "vpc"),
            ("pod=a%00b", "pod"),
            ("pod=red/web-0", "pod"),
            ("verdict=maybe", "verdict"),
            ("peer=red", "peer"),
            ("peer=/", "peer"),
            ("peer=10.0.0.0/8/", "peer"),
            ("since=0", "since"),
            ("since=-1", "since"),
            ("since=%2B1", "since"),
            ("since=99999999999999999999", "since"),
            ("last=10001", "last"),
            ("last=", "last"),
            ("follow=1", "follow"),
            ("last=1&last=1", "last"),
        ] {
            assert_eq!(bad(&format!("namespace=red&{query}")), name, "{query}");
        }
        let by = read_top("namespace=red").unwrap_err();
        assert_eq!(by.to_string(), "by: expected pod, network, vpc or reason");
        assert_eq!(read_top("all=true&by=vpc"), Ok((Scope::All, By::Vpc)));
    }

    #[test]
    fn an_unknown_parameter_is_named_with_what_is_allowed() {
        let unknown = read_scope("namespace=red&last=3").unwrap_err();
        assert_eq!(
            unknown.to_string(),
            "unknown parameter \"last\": allowed are namespace, all"
        );
        let long = read_scope(&"x".repeat(10_000)).unwrap_err().to_string();
        assert!(long.len() < 200, "{long}");
    }

    #[test]
    fn any_text_is_read_or_refused() {
        let mut random = fastrand::Rng::with_seed(3);
        let words = [
            "namespace",
            "all",
            "=",
            "&",
            "true",
            "red",
            "peer",
            "%",
            "%2",
            "%ff",
            "/",
            "10.0.0.1",
            "last",
            "since",
            "\u{0}",
            "é",
            "+",
            "9",
            "follow",
            "vpc",
        ];
        let mut read = 0;
        for _ in 0..50_000 {
            let text: String = (0..random.usize(..12))
                .map(|_| words[random.usize(..words.len())])
                .collect();
            read += usize::from(FlowsQuestion::read(&text).is_ok());
            let _ = (read_scope(&text), read_top(&text));
        }
        assert!(read > 0);
    }
}

//! Who sends and loses most in the last minute. Pure.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::Serialize;

use crate::flow::Flow;
use crate::store::Recent;
use crate::view::Scope;

/// The most rows of an answer.
const MAX_ROWS: usize = 100;

/// What the rows of an answer stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Pod,
    Network,
    Vpc,
    Reason,
}

impl By {
    pub const ALL: [Self; 4] = [Self::Pod, Self::Network, Self::Vpc, Self::Reason];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Pod => "pod",
            Self::Network => "network",
            Self::Vpc => "vpc",
            Self::Reason => "reason",
        }
    }
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    pub name: String,
    pub vpc: Option<String>,
    pub packets: u64,
    pub bytes: u64,
    pub dropped: u64,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Top {
    pub window_seconds: u64,
    pub rows: Vec<Row>,
}

/// Adds the flows up, each at the first of its ends that is the reader's and has a name. Of passed packets there are
/// packets and bytes; `dropped` counts the others.
pub fn top(recent: &Recent, scope: &Scope, by: By) -> Top {
    let mut sums: HashMap<(Cow<'_, str>, Option<&str>), [u64; 3]> = HashMap::new();
    for flow in recent.flows.iter().filter(|flow| flow.is_counted()) {
        let Some(name) = name(flow, scope, by) else {
            continue;
        };
        let [packets, bytes, dropped] = sums.entry((name, scope.vpc(flow).map(|vpc| &**vpc))).or_default();
        if flow.is_dropped() {
            *dropped = dropped.saturating_add(flow.packets);
        } else {
            *packets = packets.saturating_add(flow.packets);
            *bytes = bytes.saturating_add(flow.bytes);
        }
    }
    let rows = sums
        .into_iter()
        .map(|((name, vpc), [packets, bytes, dropped])| Row {
            name: name.into_owned(),
            vpc: vpc.map(str::to_owned),
            packets,
            bytes,
            dropped,
        });
    let mut rows: Vec<Row> = rows.collect();
    rows.sort_by(|one, other| {
        let weight = |row: &Row| (row.bytes, row.dropped, row.packets);
        weight(other)
            .cmp(&weight(one))
            .then_with(|| (&one.name, &one.vpc).cmp(&(&other.name, &other.vpc)))
    });
    rows.truncate(MAX_ROWS);
    Top {
        window_seconds: recent.seconds,
        rows,
    }
}

fn name<'a>(flow: &'a Flow, scope: &Scope, by: By) -> Option<Cow<'a, str>> {
    let mut known = [&flow.from, &flow.to]
        .into_iter()
        .filter_map(|end| end.who.as_ref());
    let who = known.find(|who| scope.owns(who))?;
    match by {
        By::Pod => Some(Cow::Owned(who.full_name())),
        By::Network => Some(Cow::Borrowed(&*who.network)),
        By::Vpc => scope.vpc(flow).map(|vpc| Cow::Borrowed(&**vpc)),
        By::Reason => flow.is_dropped().then(|| flow.reason()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use thuban_common::counters::Counter;

    use super::*;
    use crate::flow::tests::{flow, names};

    fn recent() -> Recent {
        let names = names();
        let flows = [
            ("10.0.1.3", "10.0.2.4", Counter::SentDirect),
            ("10.0.1.3", "10.0.2.4", Counter::Delivered),
            ("10.0.1.4", "10.0.1.3", Counter::SentDirect),
            ("10.0.1.4", "8.8.8.8", Counter::OutsideVpc),
            ("10.0.2.4", "10.0.1.4", Counter::SentDirect),
            ("10.0.2.4", "8.8.8.8", Counter::SpoofedSource),
        ];
        let flows = flows.map(|(from, to, verdict)| Arc::new(flow(&names, from, to, verdict)));
        Recent {
            flows: flows.into(),
            seconds: 60,
        }
    }

    fn rows(namespace: Option<&str>, by: By) -> Vec<(String, u64, u64)> {
        let scope = namespace.map_or(Scope::All, |name| Scope::Namespace(name.to_owned()));
        let rows = top(&recent(), &scope, by).rows;
        rows.into_iter()
            .map(|row| (row.name, row.packets, row.dropped))
            .collect()
    }

    #[test]
    fn pods_of_others_are_no_rows() {
        let own = [("red/web-1".to_owned(), 12, 6), ("red/web-0".to_owned(), 6, 0)];
        assert_eq!(rows(Some("red"), By::Pod), own);
        assert_eq!(rows(Some("blue"), By::Pod), [("blue/db-0".to_owned(), 12, 6)]);
        assert!(rows(Some("green"), By::Pod).is_empty());
    }

    #[test]
    fn rows_are_networks_vpcs_and_reasons_too() {
        let networks = [("red-web".to_owned(), 12, 6), ("red-db".to_owned(), 6, 6)];
        assert_eq!(rows(None, By::Network), networks);
        assert_eq!(rows(None, By::Vpc), [("red".to_owned(), 18, 12)]);
        assert_eq!(rows(Some("red"), By::Reason), [("outside_vpc".to_owned(), 0, 6)]);
    }

    #[test]
    fn an_answer_has_a_bounded_number_of_rows() {
        let one = recent().flows[0].clone();
        let flows = (0..500).map(|number| {
            let vpc = Some(format!("vpc-{number}").into());
            Arc::new(Flow {
                vpc,
                ..(*one).clone()
            })
        });
        let recent = Recent {
            flows: flows.collect(),
            seconds: 60,
        };
        assert_eq!(top(&recent, &Scope::All, By::Vpc).rows.len(), MAX_ROWS);
    }
}

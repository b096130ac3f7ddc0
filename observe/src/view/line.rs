//! A flow as one line of JSON, as far as its reader sees it.

use std::borrow::Cow;
use std::net::IpAddr;

use serde::Serialize;
use serde_json::json;

use super::Scope;
use crate::flow::{End, Flow, Lost};
use crate::names::Kind;

/// The flags of TCP, by their bits.
const FLAGS: [(u8, &str); 6] = [
    (1, "FIN"),
    (2, "SYN"),
    (4, "RST"),
    (8, "PSH"),
    (16, "ACK"),
    (32, "URG"),
];
/// IP protocol numbers with names.
const TCP: u8 = 6;
const PROTOCOLS: [(u8, &str); 5] = [
    (1, "icmp"),
    (TCP, "tcp"),
    (17, "udp"),
    (58, "icmpv6"),
    (132, "sctp"),
];

#[derive(Serialize)]
struct Line<'a> {
    time_unix_ms: u64,
    event: &'static str,
    /// None, like the VNI, if the reader has no end there.
    vpc: Option<&'a str>,
    vni: Option<u32>,
    from: EndLine<'a>,
    to: EndLine<'a>,
    protocol: Cow<'static, str>,
    packets: u64,
    bytes: u64,
    tcp_flags: Vec<&'static str>,
    verdict: &'static str,
    reason: Cow<'static, str>,
    /// Empty if the droplet is the place of an end that is withheld.
    droplet: &'a str,
    next: Option<&'a str>,
    denied_by: Option<DenierLine<'a>>,
}

#[derive(Serialize)]
struct DenierLine<'a> {
    policy: &'a str,
    rule: u32,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EndLine<'a> {
    Withheld {
        withheld: bool,
    },
    Shown {
        namespace: Option<&'a str>,
        pod: Option<&'a str>,
        /// Namespace and name.
        #[serde(skip_serializing_if = "Option::is_none")]
        service: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        node: Option<&'a str>,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        outside: bool,
        address: IpAddr,
        port: u16,
        network: Option<&'a str>,
    },
}

impl<'a> EndLine<'a> {
    fn new(end: Option<&'a End>) -> Self {
        let Some(end) = end else {
            return Self::Withheld { withheld: true };
        };
        let name = |kind| end.named(kind).and_then(|who| who.name.as_deref());
        Self::Shown {
            namespace: end.who.as_ref().and_then(|who| who.namespace.as_deref()),
            pod: name(Kind::Pod),
            service: end.named(Kind::Service).map(|who| who.full_name()),
            node: name(Kind::Node),
            outside: end.is_outside,
            address: end.address,
            port: end.port,
            network: end.who.as_ref().map(|who| &*who.network),
        }
    }
}

/// Adds a flow's line, with its end.
pub fn write_line(text: &mut Vec<u8>, flow: &Flow, scope: &Scope) {
    let (from, to) = (scope.shown(&flow.from), scope.shown(&flow.to));
    let is_whole = from.is_some() && to.is_some();
    let denied_by = flow.denied_by.as_deref().filter(|denier| {
        let (asked, of) = (scope.namespace(), denier.namespace());
        asked.is_none() || of.is_none() || of == asked
    });
    let vpc = scope.vpc(flow);
    let line = Line {
        time_unix_ms: flow.time,
        event: flow.event.name(),
        vpc: vpc.map(|vpc| &**vpc),
        vni: (vpc.is_some() || *scope == Scope::All).then_some(flow.vni),
        from: EndLine::new(from),
        to: EndLine::new(to),
        protocol: protocol(flow.protocol),
        packets: flow.packets,
        bytes: flow.bytes,
        tcp_flags: flags(flow),
        verdict: if flow.is_dropped() { "dropped" } else { "passed" },
        reason: flow.reason(),
        droplet: scope.droplet(flow).unwrap_or_default(),
        // The next hop is where the other end is.
        next: flow.next.as_deref().filter(|_| is_whole),
        denied_by: denied_by.map(|denier| DenierLine {
            policy: &denier.policy,
            rule: denier.rule,
        }),
    };
    // Texts and numbers are always JSON.
    if serde_json::to_writer(&mut *text, &line).is_ok() {
        text.push(b'\n');
    }
}

/// Returns the line that says what was lost. The droplet is empty if the reader itself was too slow.
pub fn lost_line(droplet: &str, lost: &Lost) -> String {
    let lost = json!({
        "budget": lost.budget, "table": lost.table, "ring": lost.ring, "stream": lost.stream, "reader": lost.reader,
    });
    format!("{}\n", json!({"lost": lost, "droplet": droplet}))
}

fn protocol(number: u8) -> Cow<'static, str> {
    let known = PROTOCOLS.iter().find(|(known, _)| *known == number);
    known.map_or_else(
        || Cow::Owned(number.to_string()),
        |(_, name)| Cow::Borrowed(*name),
    )
}

fn flags(flow: &Flow) -> Vec<&'static str> {
    if flow.protocol != TCP {
        return Vec::new();
    }
    let set = FLAGS.iter().filter(|(bit, _)| flow.tcp_flags & bit != 0);
    set.map(|(_, name)| *name).collect()
}

//! A trace record in words.

use std::net::Ipv4Addr;

use serde_json::{Value, json};
use thuban_common::counters::Counter;
use thuban_common::tables::TraceRecord;

use crate::program::policy::Denier;
use crate::words::{address, by, denied_by, end, protocol};

/// Returns the record as text. `denier`: of a packet that network policy denies, if the daemon tells. For example
/// `+0.001234 agent_tc thb… vni 100 10.0.1.2:40000 > 10.0.1.3:80 tcp 74 bytes: sent_direct to 172.31.77.3`
pub fn to_text(record: &TraceRecord, start: u64, denier: Option<&Denier>) -> String {
    let micros = record.time.saturating_sub(start) / 1000;
    let [from, to] = ends(record);
    let next = next(record).map_or_else(String::new, |next| format!(" to {next}"));
    let verdict = verdict(record.counter);
    let why = match record.set {
        0 => String::new(),
        set if verdict.is_drop => format!(" {}", denied_by(denier, set)),
        set => format!(", on its way out denied {}", denied_by(denier, set)),
    };
    format!(
        "+{}.{:06} {:<11} {:<15} vni {} {from} > {to} {} {} bytes: {}{why}{next}",
        micros / 1_000_000,
        micros % 1_000_000,
        point(record.point),
        interface(record.interface),
        record.vni,
        protocol(record.protocol),
        record.length,
        verdict.text,
    )
}

/// Does what [`to_text`] does, as JSON.
pub fn to_json(record: &TraceRecord, denier: Option<&Denier>) -> Value {
    json!({
        "monotonicNs": record.time,
        "point": point(record.point),
        "interface": interface(record.interface),
        "vni": record.vni,
        "source": address(record.source).to_string(),
        "destination": address(record.destination).to_string(),
        "protocol": record.protocol,
        "sourcePort": u16::from_be(record.ports[0]),
        "destinationPort": u16::from_be(record.ports[1]),
        "length": record.length,
        "verdict": verdict(record.counter).text,
        "deniedBy": (record.set != 0).then(|| by(denier, record.set)),
        "next": next(record).map(|next| next.to_string()),
    })
}

fn ends(record: &TraceRecord) -> [String; 2] {
    [
        (record.source, record.ports[0]),
        (record.destination, record.ports[1]),
    ]
    .map(|(bytes, port)| end(bytes, port))
}

fn point(number: u8) -> &'static str {
    match number {
        0 => "agent_tc",
        1 => "agent_xdp",
        2 => "transit_tc",
        3 => "transit_xdp",
        _ => "unknown",
    }
}

fn interface(index: u32) -> String {
    nix::net::if_::if_indextoname(index)
        .ok()
        .and_then(|name| name.into_string().ok())
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| format!("interface {index}"))
}

struct Verdict {
    text: String,
    is_drop: bool,
}

fn verdict(number: u32) -> Verdict {
    let counter = Counter::of(number);
    let is_drop = counter.is_some_and(Counter::is_drop);
    let text = match counter {
        Some(counter) if is_drop => format!("dropped, {}", counter.name()),
        Some(counter) => counter.name().to_owned(),
        None => "passed to the next hook".to_owned(),
    };
    Verdict { text, is_drop }
}

fn next(record: &TraceRecord) -> Option<Ipv4Addr> {
    (record.next != [0; 4]).then(|| Ipv4Addr::from(record.next))
}

#[cfg(test)]
mod tests {
    use thuban_common::counters::Counter;
    use thuban_common::packet::ipv4::mapped;
    use thuban_common::tables::{NO_COUNTER, TraceRecord};

    use super::{to_json, to_text};
    use crate::program::policy::Denier;

    fn record(counter: u32) -> TraceRecord {
        TraceRecord {
            time: 5_001_234_000,
            vni: 100,
            interface: 0,
            source: mapped([10, 0, 1, 2]),
            destination: mapped([10, 0, 1, 3]),
            length: 74,
            counter,
            next: [172, 31, 77, 3],
            ports: [40000_u16.to_be(), 80_u16.to_be()],
            protocol: 6,
            point: 0,
            rank: 0,
            set: 0,
        }
    }

    #[test]
    fn a_record_reads_as_a_sentence() {
        assert_eq!(
            to_text(&record(Counter::SentDirect as u32), 5_000_000_000, None),
            "+0.001234 agent_tc    interface 0     vni 100 10.0.1.2:40000 > 10.0.1.3:80 tcp 74 bytes: \
             sent_direct to 172.31.77.3"
        );
        let dropped = TraceRecord {
            next: [0; 4],
            ports: [0; 2],
            ..record(Counter::SpoofedMac as u32)
        };
        let text = to_text(&dropped, 0, None);
        assert!(text.ends_with("10.0.1.2 > 10.0.1.3 tcp 74 bytes: dropped, spoofed_mac"));
        assert!(to_text(&record(NO_COUNTER), 0, None).contains("passed to the next hook"));
    }

    #[test]
    fn what_policy_denies_is_told_with_the_policies() {
        let denied = |counter: Counter| TraceRecord {
            next: [0; 4],
            set: 9,
            ..record(counter as u32)
        };
        let ends = |counter, denier: Option<&Denier>, end: &str| {
            let text = to_text(&denied(counter), 0, denier);
            assert!(text.ends_with(&format!(" bytes: {end}")), "{text}");
        };
        let isolated = Denier::NoRule {
            policies: vec!["shop/default-deny".into(), "shop/within".into()],
            more: 0,
        };
        let rule = Denier::Rule {
            policy: "no-db".into(),
            index: 2,
        };
        let (ingress, egress) = (Counter::PolicyIngress, Counter::PolicyEgress);
        ends(
            ingress,
            Some(&isolated),
            "dropped, policy_ingress by shop/default-deny, shop/within",
        );
        ends(egress, Some(&rule), "dropped, policy_egress by no-db rule 2");
        ends(
            Counter::ToHost,
            Some(&rule),
            "to_host, on its way out denied by no-db rule 2",
        );
        ends(
            ingress,
            None,
            "dropped, policy_ingress by set 000009, whose rules only a running transitd knows",
        );
        let json = to_json(&denied(ingress), Some(&isolated));
        assert_eq!(json["verdict"], "dropped, policy_ingress");
        assert_eq!(
            json["deniedBy"]["policies"],
            serde_json::json!(["shop/default-deny", "shop/within"])
        );
        assert!(to_json(&record(Counter::Delivered as u32), None)["deniedBy"].is_null());
    }

    #[test]
    fn json_has_the_same() {
        let json = to_json(&record(Counter::Delivered as u32), None);
        assert_eq!(json["verdict"], "delivered");
        assert_eq!(
            (&json["destinationPort"], &json["vni"]),
            (&80.into(), &100.into())
        );
    }
}

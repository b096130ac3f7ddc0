//! A trace record in words.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde_json::{Value, json};
use thuban_common::counters::Counter;
use thuban_common::tables::TraceRecord;

/// Returns the record as text, for example
/// `+0.001234 agent_tc thb… vni 100 10.0.1.2:40000 > 10.0.1.3:80 tcp 74 bytes: sent_direct to 172.31.77.3`
pub fn to_text(record: &TraceRecord, start: u64) -> String {
    let micros = record.time.saturating_sub(start) / 1000;
    let [from, to] = ends(record);
    let next = next(record).map_or_else(String::new, |next| format!(" to {next}"));
    format!(
        "+{}.{:06} {:<11} {:<15} vni {} {from} > {to} {} {} bytes: {}{next}",
        micros / 1_000_000,
        micros % 1_000_000,
        point(record.point),
        interface(record.interface),
        record.vni,
        protocol(record.protocol),
        record.length,
        verdict(record.counter),
    )
}

pub fn to_json(record: &TraceRecord) -> Value {
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
        "verdict": verdict(record.counter),
        "next": next(record).map(|next| next.to_string()),
    })
}

fn ends(record: &TraceRecord) -> [String; 2] {
    [
        (record.source, record.ports[0]),
        (record.destination, record.ports[1]),
    ]
    .map(|(bytes, port)| match u16::from_be(port) {
        0 => address(bytes).to_string(),
        port => SocketAddr::new(address(bytes), port).to_string(),
    })
}

fn address(bytes: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(bytes).to_canonical()
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

fn protocol(number: u8) -> String {
    match number {
        1 => "icmp".to_owned(),
        6 => "tcp".to_owned(),
        17 => "udp".to_owned(),
        58 => "icmpv6".to_owned(),
        132 => "sctp".to_owned(),
        number => format!("protocol {number}"),
    }
}

fn verdict(number: u32) -> String {
    match Counter::ALL.iter().find(|counter| **counter as u32 == number) {
        Some(counter) if counter.is_drop() => format!("dropped, {}", counter.name()),
        Some(counter) => counter.name().to_owned(),
        None => "passed to the next hook".to_owned(),
    }
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
            padding: [0; 6],
        }
    }

    #[test]
    fn a_record_reads_as_a_sentence() {
        assert_eq!(
            to_text(&record(Counter::SentDirect as u32), 5_000_000_000),
            "+0.001234 agent_tc    interface 0     vni 100 10.0.1.2:40000 > 10.0.1.3:80 tcp 74 bytes: \
             sent_direct to 172.31.77.3"
        );
        let dropped = TraceRecord {
            next: [0; 4],
            ports: [0; 2],
            ..record(Counter::SpoofedMac as u32)
        };
        assert!(to_text(&dropped, 0).ends_with("10.0.1.2 > 10.0.1.3 tcp 74 bytes: dropped, spoofed_mac"));
        assert!(to_text(&record(NO_COUNTER), 0).contains("passed to the next hook"));
    }

    #[test]
    fn json_has_the_same() {
        let json = to_json(&record(Counter::Delivered as u32));
        assert_eq!(json["verdict"], "delivered");
        assert_eq!(
            (&json["destinationPort"], &json["vni"]),
            (&80.into(), &100.into())
        );
    }
}

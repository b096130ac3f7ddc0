//! What programs tell of flows, in the words of thuban-observe.

use thuban_common::flow_events::{FlowEvent, FlowEventRecord, SeenFlowEntry, SeenFlowKey};
use thuban_common::tables::NO_DROPLET;
use thuban_proto::observe::{DenyingPolicy, Flow};

use crate::boot;
use crate::words::ports;

/// Returns an event. `denied_by`: the policy that denies the packet.
pub fn of_event(record: &FlowEventRecord, denied_by: Option<DenyingPolicy>) -> Flow {
    let [source_port, destination_port] = ports(record.protocol, record.ports).map(port);
    let next = if record.next == NO_DROPLET {
        Vec::new()
    } else {
        record.next.to_vec()
    };
    Flow {
        vni: record.vni,
        source: record.source.to_vec(),
        destination: record.destination.to_vec(),
        source_port,
        destination_port,
        protocol: record.protocol.into(),
        // The numbers are the same.
        event: record.event.into(),
        point: record.point.into(),
        counter: record.counter,
        next,
        packets: record.packets,
        bytes: record.bytes,
        tcp_flags: record.tcp_flags.into(),
        time_unix_ms: unix_ms(record.time),
        from_server: record.from_server != 0,
        denied_by,
    }
}

/// Returns the event of packets that were counted and not told before the flow went silent. Nobody knows the port of
/// their client, nor the droplet that they were sent to. `time`: now, ns of the programs' clock.
pub fn of_rest(key: &SeenFlowKey, entry: &SeenFlowEntry, time: u64) -> Flow {
    let is_from_server = key.from_server != 0;
    let server_port = port(key.server_port);
    let (source_port, destination_port) = if is_from_server {
        (server_port, 0)
    } else {
        (0, server_port)
    };
    Flow {
        vni: key.vni,
        source: key.source.to_vec(),
        destination: key.destination.to_vec(),
        source_port,
        destination_port,
        protocol: key.protocol.into(),
        event: FlowEvent::GoesOn as i32,
        point: key.point.into(),
        counter: key.verdict.into(),
        packets: entry.packets,
        bytes: entry.bytes,
        tcp_flags: entry.tcp_flags.into(),
        time_unix_ms: unix_ms(time),
        from_server: is_from_server,
        ..Flow::default()
    }
}

fn port(in_network_order: u16) -> u32 {
    u16::from_be(in_network_order).into()
}

fn unix_ms(time: u64) -> u64 {
    u64::try_from(boot::wall_clock(time).as_millisecond()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use thuban_common::counters::Counter;
    use thuban_common::packet::ipv4::{ICMP, TCP, UDP, mapped};
    use thuban_common::tables::TracePoint;

    use super::*;

    const FROM: [u8; 16] = mapped([10, 0, 1, 5]);
    const TO: [u8; 16] = mapped([10, 0, 1, 6]);

    fn now() -> u64 {
        boot::monotonic().as_nanos() as u64
    }

    fn record() -> FlowEventRecord {
        FlowEventRecord {
            time: now() - 5_000_000_000,
            packets: 3,
            bytes: 180,
            source: FROM,
            destination: TO,
            vni: 7,
            interface: 9,
            counter: Counter::SentDirect as u32,
            next: [192, 0, 2, 2],
            ports: [40_000_u16.to_be(), 80_u16.to_be()],
            protocol: TCP,
            tcp_flags: 2,
            point: TracePoint::AgentTc as u8,
            event: FlowEvent::First as u8,
            ..FlowEventRecord::default()
        }
    }

    /// Returns how long ago a flow's event was.
    fn age(flow: &Flow) -> Duration {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        now.saturating_sub(Duration::from_millis(flow.time_unix_ms))
    }

    #[test]
    fn an_event_is_told_with_all_that_it_says() {
        let denied_by = DenyingPolicy {
            policy: "red/web".into(),
            rule: 2,
        };
        let flow = of_event(&record(), Some(denied_by.clone()));
        let age = age(&flow);
        assert!((4900..6000).contains(&age.as_millis()), "{age:?}");
        let expected = Flow {
            vni: 7,
            source: FROM.to_vec(),
            destination: TO.to_vec(),
            source_port: 40_000,
            destination_port: 80,
            protocol: 6,
            event: thuban_proto::observe::FlowEvent::First.into(),
            point: 0,
            counter: 1,
            next: vec![192, 0, 2, 2],
            packets: 3,
            bytes: 180,
            tcp_flags: 2,
            time_unix_ms: flow.time_unix_ms,
            from_server: false,
            denied_by: Some(denied_by),
        };
        assert_eq!(flow, expected);
    }

    #[test]
    fn an_event_has_ports_and_a_next_droplet_only_if_it_is_so() {
        let echo = FlowEventRecord {
            protocol: ICMP,
            next: [0; 4],
            from_server: 1,
            ..record()
        };
        let flow = of_event(&echo, None);
        assert_eq!((flow.source_port, flow.destination_port), (0, 0));
        assert!(flow.next.is_empty() && flow.from_server);
    }

    #[test]
    fn kinds_of_events_have_the_protocols_numbers() {
        use thuban_proto::observe::FlowEvent as Told;
        for (event, told) in [
            (FlowEvent::First, Told::First),
            (FlowEvent::Changed, Told::Changed),
            (FlowEvent::Ended, Told::Ended),
            (FlowEvent::GoesOn, Told::GoesOn),
        ] {
            assert_eq!(event as i32, i32::from(told), "{event:?}");
        }
    }

    #[test]
    fn the_rest_of_a_silent_flow_goes_on_with_its_servers_port() {
        let key = SeenFlowKey {
            source: FROM,
            destination: TO,
            vni: 7,
            server_port: 53_u16.to_be(),
            protocol: UDP,
            verdict: Counter::Delivered as u8,
            point: TracePoint::TransitTc as u8,
            ..SeenFlowKey::default()
        };
        let entry = SeenFlowEntry {
            packets: 4,
            bytes: 300,
            ..SeenFlowEntry::default()
        };
        let asked = of_rest(&key, &entry, now());
        assert_eq!((asked.source_port, asked.destination_port), (0, 53));
        assert_eq!((asked.packets, asked.bytes), (4, 300));
        assert_eq!(asked.event(), thuban_proto::observe::FlowEvent::GoesOn);
        assert_eq!((asked.counter, asked.point), (8, 2));
        let answer = SeenFlowKey {
            from_server: 1,
            ..key
        };
        let answered = of_rest(&answer, &entry, now());
        assert_eq!((answered.source_port, answered.destination_port), (53, 0));
        assert!(age(&answered) < Duration::from_secs(1));
    }
}

//! The flow of a probe, and the records of its first packet.

use std::net::{Ipv6Addr, SocketAddr};

use thuban_common::packet::ipv4::{ICMP, TCP, UDP};
use thuban_common::packet::ipv6::ICMPV6;
use thuban_common::tables::{Address, EndpointKey, TraceRecord};
use thuban_proto::MAX_SIGHTINGS;
use thuban_proto::transit::{Probe, Sighting};

/// Packets of a pod that a probe is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    pub source: EndpointKey,
    destination: Address,
    pub protocol: u8,
    /// 0: an echo, which has no ports.
    source_port: u16,
    port: u16,
}

impl Flow {
    /// Reads a flow; none if it is not one that a pod can send.
    pub fn read(asked: &Probe) -> Option<Self> {
        let address = |bytes: &[u8]| Address::try_from(bytes).ok();
        let flow = Self {
            source: EndpointKey {
                vni: asked.vni,
                address: address(&asked.source)?,
            },
            destination: address(&asked.destination)?,
            protocol: asked.protocol.try_into().ok()?,
            source_port: asked.source_port.try_into().ok()?,
            port: asked.port.try_into().ok()?,
        };
        let (from, to) = flow.ends();
        let has_ports = flow.source_port != 0 && flow.port != 0;
        let is_known = match flow.protocol {
            TCP | UDP => has_ports,
            ICMP => to.is_ipv4(),
            ICMPV6 => to.is_ipv6(),
            _ => false,
        };
        (is_known && from.is_ipv4() == to.is_ipv4()).then_some(flow)
    }

    /// Returns both ends.
    pub fn ends(&self) -> (SocketAddr, SocketAddr) {
        let ip = |address: Address| Ipv6Addr::from(address).to_canonical();
        (
            SocketAddr::new(ip(self.source.address), self.source_port),
            SocketAddr::new(ip(self.destination), self.port),
        )
    }

    /// Whether the packet of a record is of the flow, on its way to the destination. A Service's address is not that of
    /// the backend, but the source port stays.
    pub fn has(&self, record: &TraceRecord) -> bool {
        let key = EndpointKey {
            vni: record.vni,
            address: record.source,
        };
        let is_its = if self.source_port == 0 {
            record.destination == self.destination
        } else {
            u16::from_be(record.ports[0]) == self.source_port
        };
        key == self.source && record.protocol == self.protocol && is_its
    }
}

/// The records of one packet, in order.
#[derive(Clone, Debug, Default)]
pub struct Seen(Vec<TraceRecord>);

impl Seen {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a record. Records of later packets of the flow are left out: a program's first record tells the length of
    /// the first packet, and those that follow the begin of a connection are shorter.
    pub fn note(&mut self, record: TraceRecord) {
        let first = self.0.iter().find(|known| known.point == record.point);
        let is_later = first.is_some_and(|first| first.length != record.length);
        if !is_later && self.0.len() < MAX_SIGHTINGS {
            self.0.push(record);
        }
    }

    /// Returns what the operator is told.
    pub fn sightings(&self) -> Vec<Sighting> {
        let start = self.0.first().map_or(0, |first| first.time);
        let tell = |record: &TraceRecord| Sighting {
            point: record.point.into(),
            counter: record.counter,
            next: if record.next == [0; 4] {
                Vec::new()
            } else {
                record.next.to_vec()
            },
            after_ns: record.time.saturating_sub(start),
        };
        self.0.iter().map(tell).collect()
    }
}

#[cfg(test)]
mod tests {
    use thuban_common::counters::Counter;
    use thuban_common::packet::ipv4::mapped;

    use super::*;

    fn asked() -> Probe {
        Probe {
            id: 1,
            vni: 7,
            source: mapped([10, 0, 1, 5]).to_vec(),
            destination: mapped([10, 0, 2, 4]).to_vec(),
            protocol: TCP.into(),
            source_port: 61_000,
            port: 5432,
            send: true,
        }
    }

    fn record(point: u8, length: u32, time: u64) -> TraceRecord {
        TraceRecord {
            time,
            vni: 7,
            interface: 3,
            source: mapped([10, 0, 1, 5]),
            destination: mapped([10, 0, 2, 9]),
            length,
            counter: Counter::SentDirect as u32,
            next: [0; 4],
            ports: [61_000_u16.to_be(), 80_u16.to_be()],
            protocol: TCP,
            point,
            rank: 0,
            set: 0,
        }
    }

    #[test]
    fn only_what_a_pod_can_send_is_a_flow() {
        let flow = Flow::read(&asked()).unwrap();
        let (from, to) = flow.ends();
        assert_eq!(
            (from.to_string(), to.to_string()),
            ("10.0.1.5:61000".into(), "10.0.2.4:5432".into())
        );
        let echo = |protocol: u8| Probe {
            protocol: protocol.into(),
            source_port: 0,
            port: 0,
            ..asked()
        };
        assert!(Flow::read(&echo(ICMP)).is_some());
        for bad in [
            echo(ICMPV6),
            echo(TCP),
            Probe {
                protocol: 132,
                ..asked()
            },
            Probe {
                port: 1 << 16,
                ..asked()
            },
            Probe {
                source: vec![10, 0, 1, 5],
                ..asked()
            },
            Probe {
                destination: vec![0xfd; 16],
                ..asked()
            },
        ] {
            assert_eq!(Flow::read(&bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_packet_to_a_backend_is_known_by_its_source_port() {
        let flow = Flow::read(&asked()).unwrap();
        assert!(flow.has(&record(0, 74, 1)));
        let [mut answer, mut other, mut foreign] = [record(0, 74, 1); 3];
        (answer.source, answer.destination) = (answer.destination, answer.source);
        other.ports[0] = 61_001_u16.to_be();
        foreign.vni = 8;
        for record in [answer, other, foreign] {
            assert!(!flow.has(&record), "{record:?}");
        }
    }

    #[test]
    fn later_packets_of_the_flow_are_left_out() {
        let mut seen = Seen::default();
        for (point, length, time) in [(0, 74, 5_000), (2, 124, 7_000), (0, 66, 8_000), (2, 124, 9_000)] {
            seen.note(record(point, length, time));
        }
        let told = seen.sightings();
        let told: Vec<_> = told.iter().map(|told| (told.point, told.after_ns)).collect();
        assert_eq!(told, [(0, 0), (2, 2_000), (2, 4_000)]);
        for _ in 0..100 {
            seen.note(record(0, 74, 1));
        }
        assert_eq!(seen.sightings().len(), MAX_SIGHTINGS);
    }
}

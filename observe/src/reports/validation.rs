//! Reads flows that droplets report. A droplet has proven which node it is, and no more: any field may have any value.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thiserror::Error;
use thuban_api::identifiers::Vni;
use thuban_common::flow_events::NO_VERDICT;
use thuban_common::tables::NO_COUNTER;
use thuban_proto::observe::{DenyingPolicy, Flow, FlowEvent, FlowMode};

use crate::flow::Event;

/// The longest name of a policy: a namespace, a slash, and a name.
const LONGEST_POLICY: usize = 63 + 1 + 253;
/// The most packets and bytes of one event, so that sums don't overflow: 256 TiB.
const MAX_COUNT: u64 = 1 << 48;
/// The latest time, in milliseconds since 1970: the end of the year 9999.
const MAX_TIME: u64 = 253_402_300_799_999;
/// All flags of TCP that are told.
const TCP_FLAGS: u32 = 0x3f;

/// Which field of a flow can't be believed, and what was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{field}: expected {expected}")]
pub struct FieldError {
    pub field: &'static str,
    pub expected: &'static str,
}

fn refuse<T>(field: &'static str, expected: &'static str) -> Result<T, FieldError> {
    Err(FieldError { field, expected })
}

/// A flow whose fields make sense.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidatedFlow {
    pub vni: u32,
    pub source: IpAddr,
    pub destination: IpAddr,
    pub ports: [u16; 2],
    pub protocol: u8,
    pub event: Event,
    pub verdict: u8,
    pub next: Option<IpAddr>,
    pub packets: u64,
    pub bytes: u64,
    pub tcp_flags: u8,
    pub time: u64,
    pub denied_by: Option<DenyingPolicy>,
}

impl TryFrom<Flow> for ValidatedFlow {
    type Error = FieldError;

    fn try_from(told: Flow) -> Result<Self, FieldError> {
        let Some(vni) = Vni::new(told.vni) else {
            return refuse("vni", "1 to 16777215");
        };
        let ports = [
            port("source_port", told.source_port)?,
            port("destination_port", told.destination_port)?,
        ];
        let Ok(protocol) = u8::try_from(told.protocol) else {
            return refuse("protocol", "0 to 255");
        };
        if told.packets > MAX_COUNT || told.bytes > MAX_COUNT {
            return refuse("packets and bytes", "at most 2^48");
        }
        if told.time_unix_ms > MAX_TIME {
            return refuse("time_unix_ms", "a time before the year 10000");
        }
        if told
            .denied_by
            .as_ref()
            .is_some_and(|denier| !is_policy(&denier.policy))
        {
            return refuse("denied_by", "namespace/name or a name, in a-z, 0-9, - and dots");
        }
        Ok(Self {
            vni: vni.get(),
            source: address("source", &told.source)?,
            destination: address("destination", &told.destination)?,
            ports,
            protocol,
            event: event(told.event)?,
            verdict: verdict(told.counter)?,
            next: next(&told.next)?,
            packets: told.packets,
            bytes: told.bytes,
            // The mask leaves six bits.
            tcp_flags: (told.tcp_flags & TCP_FLAGS) as u8,
            time: told.time_unix_ms,
            denied_by: told.denied_by,
        })
    }
}

fn port(field: &'static str, port: u32) -> Result<u16, FieldError> {
    u16::try_from(port).or_else(|_| refuse(field, "0 to 65535"))
}

fn address(field: &'static str, bytes: &[u8]) -> Result<IpAddr, FieldError> {
    match <[u8; 16]>::try_from(bytes) {
        Ok(bytes) => Ok(IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()),
        Err(_) => refuse(field, "16 bytes, IPv4 mapped into IPv6"),
    }
}

fn next(bytes: &[u8]) -> Result<Option<IpAddr>, FieldError> {
    if bytes.is_empty() {
        return Ok(None);
    }
    match <[u8; 4]>::try_from(bytes) {
        Ok(bytes) => Ok(Some(Ipv4Addr::from(bytes).into())),
        Err(_) => refuse("next", "4 bytes or none"),
    }
}

fn event(number: i32) -> Result<Event, FieldError> {
    match FlowEvent::try_from(number) {
        Ok(FlowEvent::First) => Ok(Event::First),
        Ok(FlowEvent::Changed) => Ok(Event::Changed),
        Ok(FlowEvent::Ended) => Ok(Event::Ended),
        Ok(FlowEvent::GoesOn) => Ok(Event::GoesOn),
        Ok(FlowEvent::Unspecified) | Err(_) => refuse("event", "1 to 4"),
    }
}

fn verdict(counter: u32) -> Result<u8, FieldError> {
    match u8::try_from(counter) {
        Ok(verdict) if verdict != NO_VERDICT => Ok(verdict),
        _ if counter == NO_COUNTER => Ok(NO_VERDICT),
        _ => refuse("counter", "0 to 254, or 4294967295 for none"),
    }
}

fn is_policy(name: &str) -> bool {
    let is_part = |part: &str| {
        part.bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.')
    };
    name.len() <= LONGEST_POLICY
        && match name.split_once('/') {
            Some((namespace, name)) => {
                !namespace.is_empty() && !name.is_empty() && is_part(namespace) && is_part(name)
            }
            None => is_part(name),
        }
}

/// What a droplet's programs tell of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    #[default]
    Off,
    Drops,
    All,
}

impl Mode {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Drops => "drops",
            Self::All => "all",
        }
    }
}

impl From<i32> for Mode {
    fn from(number: i32) -> Self {
        match FlowMode::try_from(number) {
            Ok(FlowMode::Drops) => Self::Drops,
            Ok(FlowMode::All) => Self::All,
            Ok(FlowMode::Unspecified) | Err(_) => Self::Off,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use thuban_api::identifiers::mapped;

    use super::*;

    /// Returns a flow as a droplet tells of it.
    pub fn told() -> Flow {
        Flow {
            vni: 7,
            source: mapped(Ipv4Addr::new(10, 0, 1, 3)).to_vec(),
            destination: mapped(Ipv4Addr::new(10, 0, 2, 4)).to_vec(),
            source_port: 40_112,
            destination_port: 5_432,
            protocol: 6,
            event: FlowEvent::First.into(),
            counter: 1,
            next: vec![192, 0, 2, 3],
            packets: 6,
            bytes: 4_200,
            tcp_flags: 18,
            time_unix_ms: 1_000,
            ..Flow::default()
        }
    }

    fn field_of(change: impl FnOnce(&mut Flow)) -> Option<&'static str> {
        let mut flow = told();
        change(&mut flow);
        ValidatedFlow::try_from(flow).err().map(|error| error.field)
    }

    fn denier(policy: &str) -> DenyingPolicy {
        DenyingPolicy {
            policy: policy.to_owned(),
            rule: 0,
        }
    }

    #[test]
    fn a_flow_of_a_droplet_is_read() {
        let read = ValidatedFlow::try_from(told()).unwrap();
        assert_eq!(read.source, IpAddr::from([10, 0, 1, 3]), "IPv4 is IPv4 again");
        assert_eq!(read.next, Some(IpAddr::from([192, 0, 2, 3])));
        assert_eq!((read.ports, read.verdict), ([40_112, 5_432], 1));
        for policy in ["", "baseline", "red/web", "red/web.v2-x"] {
            assert_eq!(
                field_of(|flow| flow.denied_by = Some(denier(policy))),
                None,
                "{policy}"
            );
        }
        assert_eq!(field_of(|flow| flow.counter = NO_COUNTER), None);
        assert_eq!(field_of(|flow| flow.next.clear()), None);
    }

    #[test]
    fn a_field_that_makes_no_sense_is_named() {
        assert_eq!(field_of(|flow| flow.vni = 0), Some("vni"));
        assert_eq!(field_of(|flow| flow.vni = 1 << 24), Some("vni"));
        assert_eq!(field_of(|flow| flow.source.truncate(15)), Some("source"));
        assert_eq!(field_of(|flow| flow.destination.push(0)), Some("destination"));
        assert_eq!(field_of(|flow| flow.source_port = 1 << 16), Some("source_port"));
        assert_eq!(
            field_of(|flow| flow.destination_port = u32::MAX),
            Some("destination_port")
        );
        assert_eq!(field_of(|flow| flow.protocol = 256), Some("protocol"));
        assert_eq!(field_of(|flow| flow.event = 0), Some("event"));
        assert_eq!(field_of(|flow| flow.event = 5), Some("event"));
        assert_eq!(field_of(|flow| flow.counter = 255), Some("counter"));
        assert_eq!(field_of(|flow| flow.counter = u32::MAX - 1), Some("counter"));
        assert_eq!(field_of(|flow| flow.next = vec![1]), Some("next"));
        assert_eq!(
            field_of(|flow| flow.packets = u64::MAX),
            Some("packets and bytes")
        );
        assert_eq!(field_of(|flow| flow.bytes = u64::MAX), Some("packets and bytes"));
        assert_eq!(
            field_of(|flow| flow.time_unix_ms = u64::MAX),
            Some("time_unix_ms")
        );
        for policy in [
            "/",
            "red/",
            "/web",
            "red/web/more",
            "Red",
            "a b",
            "\n",
            "<script>",
        ] {
            assert_eq!(
                field_of(|flow| flow.denied_by = Some(denier(policy))),
                Some("denied_by"),
                "{policy}"
            );
        }
        let long = "x".repeat(LONGEST_POLICY + 1);
        assert_eq!(
            field_of(|flow| flow.denied_by = Some(denier(&long))),
            Some("denied_by")
        );
    }

    #[test]
    fn any_bytes_are_read_or_refused() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut bytes = |most: usize| -> Vec<u8> {
            let length = random.usize(..=most);
            std::iter::repeat_with(|| random.u8(..)).take(length).collect()
        };
        for _ in 0..20_000 {
            let number = |bytes: Vec<u8>| {
                bytes
                    .iter()
                    .fold(0_u32, |sum, byte| (sum << 8) | u32::from(*byte))
            };
            let flow = Flow {
                vni: number(bytes(4)),
                source: bytes(17),
                destination: bytes(17),
                source_port: number(bytes(3)),
                destination_port: number(bytes(3)),
                protocol: number(bytes(2)),
                event: number(bytes(1)).cast_signed(),
                counter: number(bytes(4)),
                next: bytes(5),
                packets: u64::from(number(bytes(4))) << 20,
                bytes: number(bytes(4)).into(),
                tcp_flags: number(bytes(4)),
                time_unix_ms: number(bytes(4)).into(),
                from_server: false,
                point: number(bytes(4)),
                denied_by: Some(denier(&String::from_utf8_lossy(&bytes(9)))),
            };
            if let Ok(read) = ValidatedFlow::try_from(flow) {
                assert!(read.vni > 0 && read.tcp_flags <= 63 && read.packets <= MAX_COUNT);
            }
        }
    }
}

//! A denial in words.

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use thuban_common::policy::{DENIAL_EGRESS, DENIAL_OUTSIDE, DenialRecord, in_vpc};

use crate::program::policy::Denier;
use crate::words::{address, by, denied_by, end, names, ports, protocol};

/// A record, with what only transitd knows.
pub struct Denial {
    pub record: DenialRecord,
    pub time: Timestamp,
    /// The pods that it is from and to.
    pub names: [Option<String>; 2],
    /// `None`: the daemon gives no answer.
    pub denier: Option<Denier>,
}

impl Denial {
    const fn direction(&self) -> &'static str {
        if self.record.key.flags & DENIAL_EGRESS == 0 {
            "ingress"
        } else {
            "egress"
        }
    }

    const fn is_outside(&self) -> bool {
        self.record.key.flags & DENIAL_OUTSIDE != 0
    }

    /// Returns the denial as text, for example
    /// `2026-01-02T03:04:05.678Z ingress shop/a 10.0.1.5:40000 > 10.0.1.6:80 tcp: denied by no-db rule 0`
    pub fn to_text(&self, is_followed: bool) -> String {
        let entry = &self.record.entry;
        let named = |name: &Option<String>| name.as_ref().map_or_else(String::new, |name| format!("{name} "));
        let ends = [entry.source, entry.destination];
        let [from, to] = [0, 1].map(|n| {
            let end = end(ends[n], ports(entry.protocol, entry.ports)[n]);
            format!("{}{end}", named(&self.names[n]))
        });
        let error = if entry.is_error == 0 { "" } else { " (ICMP error)" };
        let outside = if self.is_outside() { " outside" } else { "" };
        let count = if is_followed {
            String::new()
        } else {
            format!(", packets: {}", entry.packets)
        };
        format!(
            "{:.3} {}{outside} {from} > {to} {}{error}: {}{count}",
            self.time,
            self.direction(),
            protocol(entry.protocol),
            reason(self.denier.as_ref(), in_vpc(self.record.key.set).1),
        )
    }

    pub fn to_json(&self) -> Value {
        let DenialRecord { key, entry } = &self.record;
        let (vni, set) = in_vpc(key.set);
        let [source_port, destination_port] = ports(entry.protocol, entry.ports).map(u16::from_be);
        json!({
            "time": format!("{:.6}", self.time),
            "direction": self.direction(),
            "outside": self.is_outside(),
            "vni": vni,
            "sourcePod": self.names[0],
            "source": address(entry.source).to_string(),
            "destinationPod": self.names[1],
            "destination": address(entry.destination).to_string(),
            "protocol": entry.protocol,
            "sourcePort": source_port,
            "destinationPort": destination_port,
            "icmpError": entry.is_error != 0,
            "packets": entry.packets,
            "by": by(self.denier.as_ref(), set),
        })
    }
}

/// Returns why a packet is denied, as the end of a sentence.
fn reason(denier: Option<&Denier>, set: u32) -> String {
    match denier {
        Some(Denier::NoRule { policies, more }) if !policies.is_empty() => {
            format!("no rule of {} accepts it", names(policies, *more))
        }
        denier => format!("denied {}", denied_by(denier, set)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use thuban_common::packet::ipv4::{TCP, UDP, mapped};
    use thuban_common::policy::{DenialEntry, DenialKey, of_vpc};

    use super::*;

    fn denial(flags: u16, protocol: u8, denier: Option<Denier>) -> Denial {
        let key = DenialKey {
            set: of_vpc(7, 0x2a),
            interface: 5,
            rank: 1,
            flags,
        };
        let entry = DenialEntry {
            packets: 3,
            source: mapped([10, 0, 1, 5]),
            destination: mapped([10, 0, 1, 6]),
            ports: [40_000_u16.to_be(), 80_u16.to_be()],
            protocol,
            ..DenialEntry::default()
        };
        Denial {
            record: DenialRecord { key, entry },
            time: "2026-01-02T03:04:05.678Z".parse().unwrap(),
            names: [Some("shop/a".to_owned()), None],
            denier,
        }
    }

    fn isolated() -> Denier {
        Denier::NoRule {
            policies: vec!["shop/default-deny".into(), "shop/within".into()],
            more: 0,
        }
    }

    #[test]
    fn a_denial_reads_as_a_sentence() {
        let time = "2026-01-02T03:04:05.678Z";
        assert_eq!(
            denial(0, TCP, Some(isolated())).to_text(true),
            format!(
                "{time} ingress shop/a 10.0.1.5:40000 > 10.0.1.6:80 tcp: \
                 no rule of shop/default-deny, shop/within accepts it"
            )
        );
        let rule = Denier::Rule {
            policy: "no-db".into(),
            index: 2,
        };
        assert_eq!(
            denial(DENIAL_EGRESS | DENIAL_OUTSIDE, 1, Some(rule)).to_text(false),
            format!(
                "{time} egress outside shop/a 10.0.1.5 > 10.0.1.6 icmp: denied by no-db rule 2, packets: 3"
            )
        );
        let mut error = denial(DENIAL_EGRESS, UDP, None);
        error.record.entry.is_error = 1;
        assert!(
            error.to_text(true).ends_with(
                "udp (ICMP error): denied by set 00002a, whose rules only a running transitd knows"
            )
        );
    }

    #[test]
    fn json_has_the_same_and_ports_only_of_protocols_with_ports() {
        let shown = denial(0, TCP, Some(isolated())).to_json();
        let expected = json!({
            "time": "2026-01-02T03:04:05.678000Z",
            "direction": "ingress",
            "outside": false,
            "vni": 7,
            "sourcePod": "shop/a",
            "source": "10.0.1.5",
            "destinationPod": null,
            "destination": "10.0.1.6",
            "protocol": 6,
            "sourcePort": 40000,
            "destinationPort": 80,
            "icmpError": false,
            "packets": 3,
            "by": {
                "reason": "NoRule",
                "policies": ["shop/default-deny", "shop/within"],
                "morePolicies": 0,
                "rule": null,
                "set": "00002a",
            },
        });
        assert_eq!(shown, expected);
        let shown = denial(0, 1, Some(Denier::NoRoom)).to_json();
        assert_eq!(
            (&shown["sourcePort"], &shown["by"]["reason"]),
            (&json!(0), &json!("NoRoom"))
        );
    }
}

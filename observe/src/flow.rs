//! A flow as droplets told of it, with the names of that moment.
//!
//! Invariant: a flow keeps the names that it had when it was told, whatever happens to the objects later. Names are
//! shared with the index and with other flows.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use thuban_common::counters::{self, Counter};
use thuban_common::flow_events::NO_VERDICT;

use crate::names::{Holder, Kind, Name, Who};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    First,
    Changed,
    Ended,
    GoesOn,
}

impl Event {
    pub const fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Changed => "changed",
            Self::Ended => "ended",
            Self::GoesOn => "goes_on",
        }
    }
}

/// One end of a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    pub address: IpAddr,
    /// 0 where the protocol has none.
    pub port: u16,
    /// Whether the address is in none of the VPC's ranges, and no Service.
    pub is_outside: bool,
    /// Whether somebody may have the address whose name is not known.
    pub is_doubtful: bool,
    pub who: Option<Arc<Who>>,
}

impl End {
    /// Makes the end of a flow of packets. `is_believed`: whether the packets are known to be of the address' holder.
    pub fn new(address: IpAddr, port: u16, holder: Holder, is_believed: bool) -> Self {
        let is_outside = holder == Holder::Outside;
        let is_doubtful = holder == Holder::Departed || !is_believed && !is_outside;
        Self {
            address,
            port,
            is_outside,
            is_doubtful,
            who: holder.who().filter(|_| is_believed),
        }
    }

    /// Returns the object that has the address, if its name is of this kind.
    pub fn named(&self, kind: Kind) -> Option<&Arc<Who>> {
        self.who.as_ref().filter(|who| who.kind == kind)
    }
}

/// What decides about a flow: a policy and the index of its rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denier {
    /// Namespace and name, the name of a policy without namespace, or nothing: no rule accepts.
    pub policy: Name,
    pub rule: u32,
}

impl Denier {
    /// Returns the policy's namespace; none for a policy that is in none.
    pub fn namespace(&self) -> Option<&str> {
        self.policy.split_once('/').map(|(namespace, _)| namespace)
    }
}

/// Packets of one direction of a flow that a program of a droplet gave one verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// When thuban-observe heard of it, and when it was by the droplet's clock. Milliseconds since 1970.
    pub arrived: u64,
    pub time: u64,
    pub packets: u64,
    pub bytes: u64,
    pub from: End,
    pub to: End,
    /// None for a VNI that no VPC has.
    pub vpc: Option<Name>,
    pub droplet: Name,
    /// The droplet that the packets were sent to.
    pub next: Option<Name>,
    pub denied_by: Option<Arc<Denier>>,
    pub vni: u32,
    /// The number of the verdict's counter, or [`NO_VERDICT`].
    pub verdict: u8,
    pub protocol: u8,
    pub tcp_flags: u8,
    pub event: Event,
}

// The ring has 100,000 of them.
const _: () = assert!(size_of::<Flow>() <= 208);

impl Flow {
    pub fn is_dropped(&self) -> bool {
        is_drop(self.verdict)
    }

    pub fn counter(&self) -> Option<Counter> {
        Counter::of(self.verdict.into())
    }

    /// Returns the word for the verdict: a counter's name.
    pub fn reason(&self) -> Cow<'static, str> {
        reason(self.verdict)
    }

    /// Whether the flow's packets are added up in sums. A packet between two droplets is told of twice, by the agent of
    /// its sender and at its delivery. The delivery counts only where no agent tells: for senders that are no pods, and
    /// are none whose name is not known.
    pub fn is_counted(&self) -> bool {
        let is_delivery = matches!(
            self.counter(),
            Some(Counter::Delivered | Counter::FrontDelivered | Counter::DecapsulatedXdp)
        );
        !is_delivery || !self.from.is_doubtful && self.from.named(Kind::Pod).is_none()
    }
}

/// Whether a verdict drops packets.
pub fn is_drop(verdict: u8) -> bool {
    counters::is_drop(verdict.into())
}

/// Whether the source of packets with this verdict was checked. Otherwise anybody may have written the source.
pub fn is_source_checked(verdict: u8) -> bool {
    !matches!(
        Counter::of(verdict.into()),
        Some(
            Counter::SpoofedMac | Counter::SpoofedSource | Counter::SourceMismatch | Counter::UnknownDroplet
        )
    )
}

/// Returns the word for the number of a verdict.
pub fn reason(verdict: u8) -> Cow<'static, str> {
    match Counter::of(verdict.into()) {
        Some(counter) => Cow::Borrowed(counter.name()),
        None if verdict == NO_VERDICT => Cow::Borrowed("passed_on"),
        None => Cow::Owned(format!("counter_{verdict}")),
    }
}

/// Events that nobody will hear of, by the place where they were lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    pub budget: u64,
    pub table: u64,
    pub ring: u64,
    pub stream: u64,
    /// The reader took its lines too slowly.
    pub reader: u64,
}

impl Lost {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::names::Names;
    use crate::names::tests::{pod, vpc};

    /// Returns a flow of TCP in the VPC with the VNI 7, with the names that the index has.
    pub fn flow(names: &Names, from: &str, to: &str, verdict: Counter) -> Flow {
        let vpc = names.vpc(7).cloned();
        let end = |address: &str, port| {
            let address = address.parse().unwrap();
            let holder = vpc
                .as_ref()
                .map_or(Holder::Nobody, |vpc| names.resolve(vpc, address));
            End::new(address, port, holder, true)
        };
        Flow {
            arrived: 1_000,
            time: 1_000,
            packets: 6,
            bytes: 4_200,
            from: end(from, 40_112),
            to: end(to, 5_432),
            vpc: vpc.clone(),
            droplet: "node-a".into(),
            next: Some("node-c".into()),
            denied_by: None,
            vni: 7,
            verdict: verdict as u8,
            protocol: 6,
            tcp_flags: 18,
            event: Event::First,
        }
    }

    /// Two namespaces in one VPC, and a node of it.
    pub fn names() -> Names {
        let mut names = Names::default();
        names.set_vpc("red", vpc(7, &["10.0.0.0/16"]));
        names.set_network("red-web", "red", Some(252), Some(3));
        names.set_network("red-db", "red", Some(252), Some(1));
        names.set_endpoint("red/web-0", &pod("red", "web-0", "red", "red-web", "10.0.1.3"));
        names.set_endpoint("red/web-1", &pod("red", "web-1", "red", "red-web", "10.0.1.4"));
        names.set_endpoint("blue/db-0", &pod("blue", "db-0", "red", "red-db", "10.0.2.4"));
        names
    }

    #[test]
    fn a_verdict_is_a_drop_as_the_counters_say() {
        for counter in Counter::ALL {
            let told = flow(&names(), "10.0.1.3", "10.0.2.4", *counter);
            assert_eq!(told.is_dropped(), counter.is_drop(), "{counter:?}");
            assert_eq!(told.reason(), counter.name());
        }
        let mut newer = flow(&names(), "10.0.1.3", "10.0.2.4", Counter::SentDirect);
        newer.verdict = 95;
        assert!(newer.is_dropped());
        assert_eq!(newer.reason(), "counter_95");
        newer.verdict = NO_VERDICT;
        assert!(!newer.is_dropped());
    }

    #[test]
    fn a_packet_between_droplets_is_counted_once() {
        let names = names();
        assert!(flow(&names, "10.0.1.3", "10.0.2.4", Counter::SentDirect).is_counted());
        assert!(!flow(&names, "10.0.1.3", "10.0.2.4", Counter::Delivered).is_counted());
        assert!(flow(&names, "8.8.8.8", "10.0.2.4", Counter::Delivered).is_counted());
        assert!(flow(&names, "10.0.1.3", "10.0.2.4", Counter::PolicyIngress).is_counted());
        let mut of_somebody = flow(&names, "10.0.1.99", "10.0.2.4", Counter::Delivered);
        of_somebody.from.is_doubtful = true;
        assert!(!of_somebody.is_counted(), "its agent tells, too");
    }

    #[test]
    fn a_policy_is_of_the_namespace_before_the_slash() {
        let of = |policy: &str| {
            let denier = Denier {
                policy: policy.into(),
                rule: 0,
            };
            denier.namespace().map(str::to_owned)
        };
        assert_eq!(of("red/web").as_deref(), Some("red"));
        assert_eq!(of("baseline"), None);
        assert_eq!(of(""), None);
    }
}

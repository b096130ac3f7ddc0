//! Numbers of the per-CPU array COUNTERS: paths that packets took and reasons of drops.
//!
//! Invariant: append-only. A number is never reused or renamed: running programs, user space and metrics of other
//! versions share the map.

/// The number of entries of COUNTERS. It is larger than the number of counters, so that new counters need no new map.
pub const COUNTERS_CAPACITY: u32 = 128;

/// Whether the counter of a number counts packets that were dropped.
#[inline(always)]
pub const fn is_drop(number: u32) -> bool {
    matches!(number, 32..=95)
}

macro_rules! counters {
    (@remedy) => {
        ""
    };
    (@remedy $remedy:literal) => {
        $remedy
    };
    ($($(#[doc = $doc:literal])+ $variant:ident = $number:literal, $name:literal $(, $remedy:literal)?;)+) => {
        /// Index into COUNTERS.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Counter {
            $($(#[doc = $doc])+ $variant = $number,)+
        }

        impl Counter {
            /// Every counter, in the order of the numbers.
            pub const ALL: &'static [Counter] = &[$(Counter::$variant,)+];

            /// Whether it counts packets that were dropped.
            pub const fn is_drop(self) -> bool {
                is_drop(self as u32)
            }

            /// Returns the stable name in snake_case, as metrics and the CLI print it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Counter::$variant => $name,)+
                }
            }

            /// Returns what was counted, as below. It begins with a blank.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Counter::$variant => concat!($($doc),+),)+
                }
            }

            /// Returns what to do about a drop; nothing for what is no drop.
            pub const fn remedy(self) -> &'static str {
                match self {
                    $(Counter::$variant => counters!(@remedy $($remedy)?),)+
                }
            }
        }
    };
}

counters! {
    /// Agent: to an endpoint on this droplet.
    DeliveredLocal = 0, "delivered_local";
    /// Agent: by a direct row to the endpoint's droplet.
    SentDirect = 1, "sent_direct";
    /// Agent: to a bouncer on another droplet.
    SentToBouncer = 2, "sent_to_bouncer";
    /// Agent: to a divider on another droplet.
    SentToDivider = 3, "sent_to_divider";
    /// Agent: passed to the host's stack.
    ToHost = 4, "to_host";
    /// Agent: ARP requests answered.
    ArpReplies = 5, "arp_replies";
    /// Bouncer (also inline on the sender's droplet): to the endpoint's droplet.
    Bounced = 6, "bounced";
    /// Divider (also inline on the sender's droplet): to a bouncer of the destination's network.
    Divided = 7, "divided";
    /// Transit: from the wire to an endpoint on this droplet.
    Delivered = 8, "delivered";
    /// Transit: by a forward row to the endpoint's new droplet.
    Forwarded = 9, "forwarded";
    /// XDP transit: decapsulated and handed to the tc program (counted there as `delivered` too).
    DecapsulatedXdp = 10, "decapsulated_xdp";
    /// Agent: events put into DIRECT_WANTED.
    DirectWanted = 11, "direct_wanted";
    /// Agent: neighbour solicitations answered (IPv6).
    NeighbourReplies = 12, "neighbour_replies";
    /// Agent: packets too big for the path, dropped and answered by ICMP with the path's MTU.
    TooBigAnswered = 13, "too_big_answered";
    /// Transit: MTUs learnt from ICMP errors about packets to a droplet.
    PathMtuLearnt = 14, "path_mtu_learnt";
    /// Agent: events not put into DIRECT_WANTED, because the VPC asks for too many.
    DirectPaced = 15, "direct_paced";
    /// Agent: connections to services that got an entry.
    ServiceConnections = 16, "service_connections";
    /// Agent: packets to services by a choice that no entry remembers, because there is no room for one.
    ServiceStateless = 17, "service_stateless";
    /// Agent: packets to services that nobody serves, answered by TCP reset or ICMP.
    ServiceRefused = 18, "service_refused";
    /// Delivery: packets that policy lets in, of flows that FLOWS has no room for. Their answers may be dropped.
    PolicyUnvouched = 19, "policy_unvouched";
    /// Front: a packet of a client outside sent to the droplet of a backend.
    Fronted = 20, "fronted";
    /// Front: a packet of a client outside delivered to a backend of this droplet.
    FrontDelivered = 21, "front_delivered";
    /// Agent: a backend's answer sent to a client outside.
    FrontAnswered = 22, "front_answered";
    /// Transit: probes of other droplets answered.
    ProbesAnswered = 24, "probes_answered";
    /// Transit: probes sent to members of roles that this droplet uses.
    ProbesSent = 25, "probes_sent";
    /// Transit: answers to them.
    ProbesHeard = 26, "probes_heard";
    /// Front: echo requests of clients outside answered.
    FrontPings = 27, "front_pings";
    /// Front: ICMP errors about a backend's answers, delivered to the backend on this droplet.
    FrontErrors = 28, "front_errors";
    /// Records of traced packets that were lost, because nobody read TRACE in time.
    TraceLost = 29, "trace_lost";
    /// Records of denied packets that were lost, because nobody read DENIED in time.
    DenialsLost = 30, "denials_lost";
    /// Front: a backend's answer from another droplet, sent to the client outside.
    FrontReturned = 31, "front_returned";

    /// Drop: source MAC is not the endpoint's.
    SpoofedMac = 32, "spoofed_mac",
        "the pod uses a MAC that is not its own: look at the pod";
    /// Drop: source address is not the endpoint's.
    SpoofedSource = 33, "spoofed_source",
        "the pod uses an address that is not its own: look at the pod";
    /// Drop: ARP sender is not the endpoint.
    SpoofedArp = 34, "spoofed_arp",
        "the pod announces an address that is not its own: look at the pod";
    /// Drop: destination outside the VPC, which has no way out.
    OutsideVpc = 35, "outside_vpc",
        "ask the VPC's owner for spec.egress if pods should reach outside; a network with egress: false stays closed";
    /// Drop: no (right) attachment for the interface.
    NoAttachment = 36, "no_attachment",
        "the veth is not set up: look at transitd's log";
    /// Drop: Geneve from an address that is no droplet.
    UnknownDroplet = 37, "unknown_droplet",
        "compare the address with kubectl get droplets; if it is none of yours, filter UDP 6081 on the underlay";
    /// Drop: VNI of no VPC that this droplet knows.
    UnknownVni = 38, "unknown_vni",
        "the sender's rows are newer or older: if it goes on, look at transitd's log there";
    /// Drop: inner source lives on another droplet than the outer source.
    SourceMismatch = 39, "source_mismatch",
        "ends by itself after a pod moved; otherwise somebody on the underlay forges packets";
    /// Drop: nobody here knows the destination.
    NoEndpoint = 40, "no_endpoint",
        "the pod is gone or not known yet: look at its Endpoint and the droplet in its status";
    /// Drop: outer TTL used up, a loop.
    TtlExpired = 41, "ttl_expired",
        "a loop: please report it";
    /// Drop: frame ends before its headers do.
    Truncated = 42, "truncated",
        "look at the pod: it sends broken frames";
    /// Drop: header that contradicts itself or its RFC.
    BadHeader = 43, "bad_header",
        "look at the underlay, and at the versions of transitd";
    /// Drop: Geneve option that we must understand and don't.
    CriticalOption = 44, "critical_option",
        "look at the versions of transitd: kubectl get droplets";
    /// Drop: the kernel could not make or take room for the outer headers.
    AdjustRoomFailed = 45, "adjust_room_failed",
        "look at the node's memory and its NIC's driver";
    /// Drop: the destination's network has no bouncer.
    NoBouncer = 46, "no_bouncer",
        "look at the conditions of the Network, and whether the address is in one of its ranges";
    /// Drop: the VPC has no divider.
    NoDivider = 47, "no_divider",
        "look at the conditions of the Vpc";
    /// Drop: neither IPv4 nor IPv6 nor ARP.
    NotIpv4 = 48, "not_ipv4",
        "look at the pod: VPCs carry IPv4, IPv6 and ARP";
    /// Drop: neighbour and multicast discovery that nobody answers (expected noise).
    Ipv6Discovery = 49, "ipv6_discovery",
        "nothing to do: expected noise";
    /// Drop: VLAN tag on a pod's frame.
    VlanTagged = 50, "vlan_tagged",
        "look at the pod: pods may not send VLAN tags";
    /// Drop: destination that is no single host's (multicast, broadcast, link-local); nothing is flooded.
    NotUnicast = 51, "not_unicast",
        "look at the pod: VPCs carry no multicast and no broadcast";
    /// Drop: to the host, and neither a reply nor allowed by the VPC.
    HostForbidden = 52, "host_forbidden",
        "tenants' pods may only answer their node: use a Service";
    /// Drop: Geneve from a pod to the host's side.
    GeneveForbidden = 53, "geneve_forbidden",
        "look at the pod: UDP 6081 of nodes is the overlay's";
    /// Drop: larger than the path's MTU after encapsulation, and no ICMP error may answer it.
    TooBig = 54, "too_big",
        "look at the pod's MTU";
    /// Drop: the next hop would be the droplet that sent it (a stale row).
    WouldReturn = 55, "would_return",
        "a row is old: look at the Endpoint's droplet; if it does not stop, please report it";
    /// Drop: CONFIG is not written.
    NoConfig = 56, "no_config",
        "the node is not set up: look at transitd's log";
    /// Drop: ARP that is no request of an address for a hardware address, or a probe (expected noise).
    ArpIgnored = 57, "arp_ignored",
        "nothing to do: expected noise";
    /// Drop: what only a router or a DHCP server may say: advertisements, redirects, leases.
    RouterForbidden = 58, "router_forbidden",
        "look at the pod: it acts as a router or a DHCP server";
    /// Drop: marked as congested on the underlay, and its sender knows no marks (RFC 6040).
    CongestionUnknown = 59, "congestion_unknown",
        "look at the underlay: it marks packets that it should drop";
    /// Drop: to a service's address without ports to choose by: options, another protocol, a fragment of anything but
    /// UDP.
    ServiceUnreadable = 60, "service_unreadable",
        "send TCP and SCTP to Services without fragments and IP options";
    /// Drop: to a service that nobody here serves or knows, and no answer may be written.
    NoBackend = 61, "no_backend",
        "look at the Service's EndpointSlices: no backend is ready, or the droplet does not know the Service yet";
    /// Drop: to a service, and the client has such a connection by another one to every backend that was tried; or
    /// refused: to an endpoint itself, and the client has such a connection to it by a service.
    ServiceCollision = 62, "service_collision",
        "let the client use another source port, or one way to the backend: its Service or its address";
    /// Drop: a port would have to change under a checksum that can't be updated (SCTP).
    ServicePortFixed = 63, "service_port_fixed",
        "give the Service the port of its backends";
    /// Drop: a GSO frame of a tunnel that the pod makes itself; the kernel segments one tunnel and no second one.
    TunnelSegments = 64, "tunnel_segments",
        "turn off segmentation offload (TSO, GSO) at the inner tunnel of the pod";
    /// Drop: an answer to a probe that this droplet did not send, or does not wait for any more.
    ProbeUnasked = 72, "probe_unasked",
        "ignore a few; if there are many, somebody on the underlay forges packets";
    /// Drop: to a service, a later fragment of a datagram whose first fragment did not go by here, or was not passed
    /// on.
    FragmentWithoutFirst = 73, "fragment_without_first",
        "a fragment was lost or came out of order: look at the underlay, or send smaller datagrams";
    /// Drop: the destination's ingress policies don't allow the packet.
    PolicyIngress = 74, "policy_ingress",
        "kubectl thuban why SENDER TARGET:PORT says which policy; so does transitd denials, run on the target's node";
    /// Drop: the sender's egress policies don't allow the packet.
    PolicyEgress = 75, "policy_egress",
        "kubectl thuban why SENDER TARGET:PORT says which policy; so does transitd denials, run on the target's node";
    /// Drop: policy applies, and the packet hides its ports: IPv4 options, IPv6 extension headers, a fragment of TCP or
    /// SCTP, a later fragment whose first one was not let in.
    PolicyUnreadable = 76, "policy_unreadable",
        "send without IP options, extension headers and fragments of TCP or SCTP where policies apply";
    /// Drop: the frame has the NIC write a checksum where something else was judged.
    ChecksumMisplaced = 77, "checksum_misplaced",
        "look at the pod: this is an attack, or a driver of its own";
    /// Drop: from a front, and this droplet knows no such front, or no such backend of the VPC.
    FrontUnknown = 79, "front_unknown",
        "ends by itself while rows differ; if it does not stop, look at the conditions of the Vip";
    /// Drop: to a front, and there is no room to remember the connection.
    FrontNoRoom = 80, "front_no_room",
        "the VPC has its share of connections on this node: look at its backends, or at a flood from outside";
    /// Drop: to a front, of a client in none of the ranges that may send to it.
    OutOfSourceRanges = 81, "out_of_source_ranges",
        "add the client to loadBalancerSourceRanges of the Service";
    /// Drop: more than the endpoint may send, or than its VPC may send out of this droplet.
    RateExceeded = 78, "rate_exceeded",
        "raise the pod's or the VPC's limit, or find out what in the pod goes round its queue";
    /// Drop: an ICMP packet by a front, and no error about an answer of a connection that this droplet knows.
    FrontErrorUnknown = 82, "front_error_unknown",
        "ignore a few: their connections have ended; if there are many, somebody outside forges ICMP errors";
    /// Drop: a backend's answer for a client outside, and this droplet has no such front that sends answers.
    FrontAnswerUnknown = 83, "front_answer_unknown",
        "ends by itself while rows differ or the mode changes; otherwise somebody on the underlay forges packets";

    /// Events of flows that were not told, because the VPC had its share of the second.
    FlowsOverBudget = 96, "flows_over_budget";
    /// Events of flows that were lost, because nobody read FLOW_EVENTS in time.
    FlowEventsLost = 97, "flow_events_lost";
    /// Events of flows that were not told, because SEEN_FLOWS had no room.
    FlowTableFull = 98, "flow_table_full";
}

impl Counter {
    /// Returns the counter of a number; none for a number that only a newer version knows.
    pub fn of(number: u32) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|counter| *counter as u32 == number)
    }

    /// Returns why a packet was dropped, within a sentence.
    pub fn reason(self) -> &'static str {
        self.meaning().trim_start_matches(" Drop: ").trim_end_matches('.')
    }

    /// Whether an event tells the pod whose agent drops such packets. Not told are:
    ///
    /// * drops of transit, which are nobody's here;
    /// * noise of every network stack: discovery, ARP, multicast, frames of other protocols, lost fragments;
    /// * what passes by itself: rows that are old, a destination that has just gone;
    /// * what only an administrator can mend: the node's set-up, its memory, the underlay;
    /// * limits of a rate: drops are how they slow senders down;
    /// * what network policies deny: their authors ask for it by an annotation, and the sender's node sees only some of
    ///   these packets.
    pub const fn is_told(self) -> bool {
        matches!(
            self,
            Self::SpoofedMac
                | Self::SpoofedSource
                | Self::SpoofedArp
                | Self::OutsideVpc
                | Self::Truncated
                | Self::NoBouncer
                | Self::NoDivider
                | Self::VlanTagged
                | Self::HostForbidden
                | Self::GeneveForbidden
                | Self::TooBig
                | Self::RouterForbidden
                | Self::ServiceUnreadable
                | Self::NoBackend
                | Self::ServiceCollision
                | Self::ServicePortFixed
                | Self::TunnelSegments
                | Self::ChecksumMisplaced
        )
    }
}

#[cfg(test)]
mod tests {
    use super::{COUNTERS_CAPACITY, Counter};
    use std::collections::HashSet;

    #[test]
    fn numbers_and_names_are_unique_and_fit() {
        let numbers: HashSet<u32> = Counter::ALL.iter().map(|counter| *counter as u32).collect();
        let names: HashSet<&str> = Counter::ALL.iter().map(|counter| counter.name()).collect();
        assert_eq!(numbers.len(), Counter::ALL.len());
        assert_eq!(names.len(), Counter::ALL.len());
        assert!(numbers.iter().all(|number| *number < COUNTERS_CAPACITY));
        for name in names {
            assert!(
                name.chars()
                    .all(|c| c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit()),
                "{name}"
            );
        }
    }

    #[test]
    fn every_drop_has_a_remedy() {
        for counter in Counter::ALL {
            assert_eq!(counter.is_drop(), !counter.remedy().is_empty(), "{counter:?}");
            assert!(counter.meaning().starts_with(' '), "{counter:?}");
        }
    }

    #[test]
    fn what_a_policy_denies_says_where_to_look() {
        for counter in [Counter::PolicyIngress, Counter::PolicyEgress] {
            let remedy = counter.remedy();
            assert!(remedy.contains("kubectl thuban why"), "{remedy}");
            assert!(remedy.contains("on the target's node"), "{remedy}");
        }
    }

    #[test]
    fn a_number_leads_to_its_counter() {
        for counter in Counter::ALL {
            assert_eq!(Counter::of(*counter as u32), Some(*counter));
        }
        assert_eq!(Counter::of(COUNTERS_CAPACITY), None);
    }

    #[test]
    fn only_drops_are_told_and_no_noise() {
        for counter in Counter::ALL.iter().filter(|counter| counter.is_told()) {
            assert!(counter.is_drop(), "{counter:?}");
            let words = [counter.reason(), counter.remedy()];
            assert!(words.iter().all(|words| !words.contains("noise")), "{counter:?}");
        }
        assert!(Counter::OutsideVpc.is_told() && Counter::HostForbidden.is_told());
        let untold = [
            Counter::Ipv6Discovery,
            Counter::ArpIgnored,
            Counter::NotUnicast,
            Counter::RateExceeded,
            Counter::PolicyIngress,
            Counter::UnknownDroplet,
        ];
        assert!(untold.iter().all(|counter| !counter.is_told()));
    }

    #[test]
    fn a_reason_fits_into_a_sentence() {
        assert_eq!(
            Counter::OutsideVpc.reason(),
            "destination outside the VPC, which has no way out"
        );
        for counter in Counter::ALL.iter().filter(|counter| counter.is_drop()) {
            let reason = counter.reason();
            assert!(
                !reason.starts_with([' ', 'D']) && !reason.ends_with('.'),
                "{reason}"
            );
        }
    }
}

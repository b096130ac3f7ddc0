//! How long agents' memory of a connection, and transit's memory of a flow, is kept without a packet. Pure.

use std::time::Duration;

use thuban_common::packet::ipv4::UDP;
use thuban_common::policy::{ANSWERED_LIFE, FlowEntry};
use thuban_common::services::{FINISHED, SEEN, has_connections, has_ended};

/// The life of a TCP or SCTP connection of which both sides were heard: as long as in Linux's conntrack.
const ESTABLISHED: Duration = Duration::from_hours(120);
/// The life of a connection that one side has ended.
const HALF_CLOSED: Duration = Duration::from_mins(2);
/// The life of a connection that is not answered yet, or was ended by both sides or a reset.
const TRANSITORY: Duration = Duration::from_mins(1);
/// The life, without a packet, of a TCP or SCTP connection to a backend that its service no longer has.
const ABANDONED: Duration = Duration::from_mins(5);
const DATAGRAMS: Duration = Duration::from_mins(2);
pub const UNANSWERED_DATAGRAM: Duration = Duration::from_secs(30);
/// The life of an unanswered connection of a VPC that crowds the table: a client asks twice in that time.
const UNANSWERED_IN_A_CROWD: Duration = Duration::from_secs(5);
/// The same of a connection that was ended by both sides or a reset: the last packets are said again within that time.
const ENDED_IN_A_CROWD: Duration = Duration::from_secs(10);
/// The longest life of a flow of a VPC that crowds FLOWS. A packet of the client writes it anew.
const FLOW_IN_A_CROWD: Duration = TRANSITORY;

/// The known facts of a connection, by which its life is chosen.
pub struct Seen {
    pub protocol: u8,
    /// [`thuban_common::services::ConnectionEntry::state`] of both directions.
    pub forward: u16,
    pub reverse: u16,
    pub has_backend: bool,
    /// The client sent the last packet, and its next one gets another backend if this one is gone.
    pub awaits_answer: bool,
    /// Its VPC has more than its reserve and its fair part, and the table is crowded.
    pub is_crowding: bool,
}

/// Returns how long a connection may be without a packet.
pub fn life(seen: &Seen) -> Duration {
    let either = seen.forward | seen.reverse;
    let is_answered = seen.reverse & SEEN != 0;
    if seen.is_crowding && !is_answered {
        return if seen.protocol == UDP && !seen.has_backend {
            Duration::ZERO
        } else {
            UNANSWERED_IN_A_CROWD
        };
    }
    if seen.protocol == UDP {
        return match (seen.has_backend, is_answered) {
            // The answer may be on its way, and nobody sends the datagram again.
            (false, _) if seen.awaits_answer => UNANSWERED_DATAGRAM,
            (false, _) => Duration::ZERO,
            (true, true) => DATAGRAMS,
            (true, false) => UNANSWERED_DATAGRAM,
        };
    }
    let is_ended = has_ended(seen.forward, seen.reverse);
    let usual = if is_ended && seen.is_crowding {
        ENDED_IN_A_CROWD
    } else if !is_answered || is_ended {
        TRANSITORY
    } else if either & FINISHED != 0 {
        HALF_CLOSED
    } else {
        ESTABLISHED
    };
    if seen.has_backend {
        usual
    } else {
        usual.min(ABANDONED)
    }
}

/// Returns how long a flow may be without a packet. `is_crowding`: its VPC crowds FLOWS, or has nearly all that it may
/// have there.
pub fn life_of_flow(protocol: u8, entry: &FlowEntry, is_crowding: bool) -> Duration {
    let has_connections = has_connections(protocol);
    let life = life(&Seen {
        // Nothing tells the end of other flows: echo requests, for example.
        protocol: if has_connections { protocol } else { UDP },
        forward: entry.state,
        reverse: entry.answers,
        has_backend: true,
        awaits_answer: false,
        is_crowding,
    });
    if !has_connections {
        // Behind it nothing counts as an answer.
        life.min(Duration::from_nanos(ANSWERED_LIFE))
    } else if is_crowding {
        life.min(FLOW_IN_A_CROWD)
    } else {
        life
    }
}

#[cfg(test)]
mod tests {
    use thuban_common::services::RESET;

    use super::*;

    fn lives(protocol: u8, forward: u16, reverse: u16, has_backend: bool) -> u64 {
        let seen = Seen {
            protocol,
            forward,
            reverse,
            has_backend,
            awaits_answer: false,
            is_crowding: false,
        };
        life(&seen).as_secs()
    }

    #[test]
    fn in_a_crowd_unanswered_and_ended_connections_go_soon() {
        for protocol in [6, 17, 132] {
            let crowding = |forward, reverse| {
                let seen = Seen {
                    protocol,
                    forward,
                    reverse,
                    has_backend: true,
                    awaits_answer: false,
                    is_crowding: true,
                };
                life(&seen).as_secs()
            };
            assert_eq!(crowding(SEEN, 0), 5);
            assert_eq!(crowding(SEEN, SEEN), lives(protocol, SEEN, SEEN, true));
            let (ended, reset) = (SEEN | FINISHED, SEEN | RESET);
            if protocol != UDP {
                assert_eq!([crowding(ended, ended), crowding(SEEN, reset)], [10, 10]);
                assert_eq!(crowding(ended, SEEN), 120, "one side goes on");
            }
        }
    }

    #[test]
    fn connections_live_by_what_both_sides_said() {
        for protocol in [6, 132] {
            assert_eq!(lives(protocol, SEEN, 0, true), 60, "opening");
            assert_eq!(lives(protocol, SEEN, SEEN, true), 432_000);
            assert_eq!(lives(protocol, SEEN | FINISHED, SEEN, true), 120);
            assert_eq!(lives(protocol, SEEN | FINISHED, SEEN | FINISHED, true), 60);
            assert_eq!(lives(protocol, SEEN, SEEN | RESET, true), 60);
            assert_eq!(lives(protocol, SEEN, SEEN, false), 300, "its backend is gone");
        }
        assert_eq!(lives(17, SEEN, 0, true), 30);
        assert_eq!(lives(17, SEEN, SEEN, true), 120);
        assert_eq!(lives(17, SEEN, SEEN, false), 0);
    }

    #[test]
    fn a_datagram_to_a_former_backend_is_answered() {
        let lives = |protocol, reverse, awaits_answer, is_crowding| {
            let seen = Seen {
                protocol,
                forward: SEEN,
                reverse,
                has_backend: false,
                awaits_answer,
                is_crowding,
            };
            life(&seen).as_secs()
        };
        assert_eq!(lives(17, SEEN, true, false), 30);
        assert_eq!(lives(17, 0, true, false), 30);
        assert_eq!(lives(17, SEEN, false, false), 0, "it was answered");
        assert_eq!(lives(17, 0, true, true), 0, "others need the room");
        assert_eq!(lives(6, SEEN, true, false), 300, "TCP sends again");
    }

    #[test]
    fn flows_live_as_connections_and_shorter_in_a_crowd() {
        let flow = |protocol, state: u16, is_crowding| {
            let entry = FlowEntry {
                tag: 0,
                epoch: 1,
                time: 0,
                class: 1,
                egress_set: 0,
                state,
                answers: state & SEEN,
                padding: 0,
            };
            life_of_flow(protocol, &entry, is_crowding).as_secs()
        };
        for protocol in [6, 132] {
            let lives = |state| [flow(protocol, state, false), flow(protocol, state, true)];
            assert_eq!(lives(SEEN), [432_000, 60]);
            assert_eq!(lives(SEEN | FINISHED), [120, 60]);
            assert_eq!(lives(SEEN | RESET), [60, 10]);
        }
        assert_eq!([flow(17, SEEN, false), flow(17, SEEN, true)], [30, 30]);
        assert_eq!(
            [flow(1, SEEN, false), flow(58, SEEN, false)],
            [30; 2],
            "echo requests"
        );
        assert_eq!([flow(6, 0, false), flow(17, 0, false)], [60, 30]);
    }
}

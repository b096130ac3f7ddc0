//! Packets that show no ports, or not all: ICMP, whose errors pass where an answer would, fragments, and packets with
//! headers that nobody reads.

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    policy::{Action, GRANT_DENIES, PEER_OTHER},
};

use super::{
    BY_FRIEND, BY_GUARDED, BY_STRANGER, FAMILIES, FRIEND, HOME, HOOKS, INGRESS, allow, arrive, ensure_in,
    ensure_out, flows, grant, icmp, is_vouched, list, policed, raise_epoch, to_home,
};
use crate::{
    frames::Packet6,
    rows::ip6,
    service_world::{SCTP, Segment, TCP, UDP},
    world::Hook,
};

#[test]
fn an_echo_is_answered_and_asked_for_by_its_rule() -> Result<()> {
    for ((from, to), [ask, answer]) in FAMILIES.into_iter().zip([[8, 0], [128, 129]]) {
        for hook in HOOKS {
            let mut world = policed([INGRESS, 0], [0, 0])?;
            list(&mut world, 5, 0, 0, Action::Accept)?;
            grant(&mut world, INGRESS, PEER_OTHER, 5, GRANT_DENIES)?;
            let request = icmp((from, to), [9; 6], ask, &[0, 7, 0, 1]);
            ensure_in(&arrive(&mut world, hook, BY_GUARDED, &request)?)?;
            let reply = |kind, number| icmp((to, from), HOME.mac(), kind, &[0, number, 0, 1]);
            ensure!(is_vouched(&mut world, hook, &reply(answer, 7))?);
            ensure!(!is_vouched(&mut world, hook, &reply(answer, 8))?, "another echo");
            ensure!(!is_vouched(&mut world, hook, &reply(ask, 7))?, "a question");
            grant(&mut world, INGRESS, PEER_OTHER, 0, GRANT_DENIES)?;
            raise_epoch(&mut world)?;
            ensure_out(
                &arrive(&mut world, hook, BY_GUARDED, &request)?,
                Counter::PolicyIngress,
            )?;
        }
    }
    Ok(())
}

/// Returns the rest of an ICMP error about a frame: the bytes behind the checksum.
fn about(frame: &[u8]) -> Vec<u8> {
    [&[0; 4], &frame[14..]].concat()
}

#[test]
fn an_error_passes_where_an_answer_would() -> Result<()> {
    for ((from, to), kind) in FAMILIES.into_iter().zip([3, 1]) {
        for hook in HOOKS {
            let mut world = policed([INGRESS, 0], [0, 0])?;
            allow(&mut world, INGRESS, FRIEND, (UDP, 80))?;
            let request = to_home(UDP, (from, to), 80);
            let sent = request.answer(HOME.mac());
            // The client tells the server of its answer.
            let error = |about_it: &[u8]| icmp((from, to), [9; 6], kind, about_it);
            for who in [BY_FRIEND, BY_GUARDED] {
                let told = error(&about(&sent.bytes()));
                ensure_in(&arrive(&mut world, hook, who, &told)?)?;
                ensure!(flows(&world)?.is_empty(), "an error is no flow");
            }
            for (who, quoted) in [
                (BY_STRANGER, sent.clone()),
                (BY_FRIEND, sent.sent_from((to, 81))),
                (BY_FRIEND, sent.sent_from((from, 80))),
                (BY_FRIEND, sent.sent_to((to, 40000))),
            ] {
                let outcome = arrive(&mut world, hook, who, &error(&about(&quoted.bytes())))?;
                ensure_out(&outcome, Counter::PolicyIngress)?;
            }
            // The server tells the client of its question.
            ensure_in(&arrive(&mut world, hook, BY_GUARDED, &request.bytes())?)?;
            let error = |about_it: &Segment| icmp((to, from), HOME.mac(), kind, &about(&about_it.bytes()));
            ensure!(is_vouched(&mut world, hook, &error(&request))?);
            let other = request.sent_from((from, 40001));
            ensure!(!is_vouched(&mut world, hook, &error(&other))?, "nobody asked");
        }
    }
    Ok(())
}

#[test]
fn later_fragments_pass_as_the_first_one_did() -> Result<()> {
    for family in FAMILIES {
        let mut world = policed([INGRESS, 0], [0, 0])?;
        allow(&mut world, INGRESS, FRIEND, (UDP, 80))?;
        let datagram = |port| {
            let mut datagram = to_home(UDP, family, port);
            datagram.payload = vec![7; 3000];
            datagram
        };
        let (open, shut) = (datagram(80).fragments(7, 1400), datagram(81).fragments(7, 1400));
        let unreadable = Counter::PolicyUnreadable;
        ensure_out(&arrive(&mut world, Hook::Tc, BY_FRIEND, &open[1])?, unreadable)?;
        for part in &open {
            ensure_in(&arrive(&mut world, Hook::Tc, BY_GUARDED, part)?)?;
            let at_xdp = arrive(&mut world, Hook::Xdp, BY_FRIEND, part)?;
            ensure!(at_xdp.verdict == 2 && at_xdp.counted.is_empty(), "left to tc");
        }
        // The same number once more, for a port that is shut.
        ensure_out(
            &arrive(&mut world, Hook::Tc, BY_FRIEND, &shut[0])?,
            Counter::PolicyIngress,
        )?;
        ensure_out(&arrive(&mut world, Hook::Tc, BY_FRIEND, &shut[1])?, unreadable)?;
        let answers = datagram(80).answer(HOME.mac()).fragments(9, 1400);
        ensure!(!is_vouched(&mut world, Hook::Tc, &answers[1])?, "no first one");
        for part in &answers {
            ensure!(is_vouched(&mut world, Hook::Tc, part)?);
        }
    }
    Ok(())
}

#[test]
fn what_hides_its_ports_is_not_let_in() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    grant(&mut world, INGRESS, PEER_OTHER, 0, 0)?;
    let unreadable = Counter::PolicyUnreadable;
    for protocol in [TCP, SCTP] {
        for family in FAMILIES {
            let mut segment = to_home(protocol, family, 80);
            ensure_in(&arrive(&mut world, Hook::Tc, BY_FRIEND, &segment.bytes())?)?;
            segment.payload = vec![7; 64];
            for part in segment.fragments(7, 32) {
                ensure_out(&arrive(&mut world, Hook::Tc, BY_FRIEND, &part)?, unreadable)?;
            }
        }
    }
    let mut options = to_home(TCP, FAMILIES[0], 80).bytes();
    options[14] = 0x46;
    let plain = Packet6::udp([9; 6], ip6(0, 1, 0x50), HOME.v6);
    let inside = plain
        .clone()
        .carrying(44, &[60, 0, 0, 0, 0, 0, 0, 7, 17, 0, 1, 4, 0, 0, 0, 0]);
    for frame in [
        options,
        plain.extended(60).bytes(),
        plain.extended(0).bytes(),
        inside.bytes(),
    ] {
        ensure_out(&arrive(&mut world, Hook::Tc, BY_FRIEND, &frame)?, unreadable)?;
    }
    Ok(())
}

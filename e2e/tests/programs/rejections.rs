//! VPCs that reject: who is denied by policy hears so, and by nothing else than the answer of whom it asked.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    host_stack::MARK_REJECTION,
    policy::{REJECTIONS_PER_WINDOW, STAMP_REPLY},
    tables::{
        ATTACHMENT_REJECTS, AttachmentEntry, GATEWAY_MAC, LOCAL_HAS_POLICY, LOCAL_REJECTS, LOCAL_TAKES_XDP,
        LocalEntry,
    },
};
use thuban_e2e::programs::key;
use thuban_testkit::packets::checksum;

use crate::{
    frames::Packet,
    policy::{self, BY_STRANGER, FAMILIES, HOME, INGRESS, VNI, flags_sent, policed, to_home},
    rows::{Endpoint, TENANT, ip},
    service_world::{SCTP, Segment, TCP, UDP, ensure_dropped, octets, send},
    world::{Hook, Outcome, Role, World},
};

const SYN: u8 = 0x02;
const FINISHED: u8 = 0x01;
const RESET: u8 = 0x04;
const PUSH: u8 = 0x08;
const ACKNOWLEDGED: u8 = 0x10;
const RESET_ACKNOWLEDGED: u8 = 0x14;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const XDP_PASS: u32 = 2;

/// Makes the endpoints' rows those of a VPC that rejects. Their policies deny all.
fn rejecting() -> Result<World> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    for endpoint in [HOME, TENANT] {
        let interface = world.interfaces[usize::from(endpoint.index)];
        let mut attachment: AttachmentEntry = world.programs.get("ATTACHMENTS", &interface)?;
        attachment.flags = ATTACHMENT_REJECTS;
        world.programs.insert("ATTACHMENTS", interface, attachment)?;
    }
    for address in [IpAddr::V4(HOME.address), IpAddr::V6(HOME.v6)] {
        let local = LocalEntry {
            vni: VNI,
            ifindex: world.interfaces[usize::from(HOME.index)],
            mac: HOME.mac(),
            flags: LOCAL_TAKES_XDP | LOCAL_HAS_POLICY | LOCAL_REJECTS,
        };
        world.programs.set_local(key(VNI, address), local)?;
    }
    Ok(world)
}

fn arrive(world: &mut World, hook: Hook, frame: &[u8]) -> Result<Outcome> {
    policy::arrive(world, hook, BY_STRANGER, frame)
}

/// Checks the answer to a segment, from and to these MACs.
fn ensure_answer(outcome: &Outcome, asked: &Segment, [from, to]: [[u8; 6]; 2]) -> Result<()> {
    let Outcome {
        verdict,
        frame,
        counted,
    } = outcome;
    let is_counted = counted.len() == 1 && counted.contains_key(Counter::PolicyIngress.name());
    ensure!(*verdict == 7 && is_counted, "verdict {verdict}, {counted:?}");
    ensure!(frame[..6] == to && frame[6..12] == from, "{frame:02x?}");
    let is_v6 = asked.from.0.is_ipv6();
    // Where the source is, the protocol, and what is behind the header.
    let (source, protocol, behind) = if is_v6 { (22, 20, 54) } else { (26, 23, 34) };
    let addresses = [octets(asked.to.0), octets(asked.from.0)].concat();
    ensure!(
        frame[source..source + addresses.len()] == addresses,
        "{frame:02x?}"
    );
    let transport = &frame[behind..];
    let mut summed = addresses;
    summed.extend((transport.len() as u32).to_be_bytes());
    summed.extend([0, 0, 0, frame[protocol]]);
    if asked.protocol == TCP {
        ensure!(frame[protocol] == TCP && transport.len() == 20, "{frame:02x?}");
        let ports = [asked.to.1.to_be_bytes(), asked.from.1.to_be_bytes()].concat();
        ensure!(transport[..4] == ports);
        // The payload and the SYN.
        let expected = asked.sequence + 1 + asked.payload.len() as u32;
        ensure!(transport[8..12] == expected.to_be_bytes() && transport[13] == RESET_ACKNOWLEDGED);
        ensure!(checksum(&[&summed[..], transport].concat()) == 0);
        return Ok(());
    }
    let prohibited = if is_v6 { [1, 1] } else { [3, 13] };
    ensure!(frame[protocol] == if is_v6 { ICMPV6 } else { ICMP } && transport[..2] == prohibited);
    let covered = if is_v6 {
        [&summed[..], transport].concat()
    } else {
        transport.to_vec()
    };
    ensure!(checksum(&covered) == 0);
    // The quote is the packet as it came, without its frame.
    let quote = &transport[8..];
    ensure!(quote.len() >= 28 && asked.bytes()[14..].starts_with(&quote[..28]));
    Ok(())
}

#[test]
fn a_sender_elsewhere_hears_of_it_by_the_endpoints_agent() -> Result<()> {
    let mut world = rejecting()?;
    for family in FAMILIES {
        for protocol in [TCP, UDP, SCTP] {
            let asked = to_home(protocol, family, 80).with_flags(SYN);
            let outcome = arrive(&mut world, Hook::Tc, &asked.bytes())?;
            ensure_answer(&outcome, &asked, [HOME.mac(), GATEWAY_MAC])?;
            // The agent gets it with the mark, and vouches for it. A pod has no marks.
            for (mark, flag) in [(MARK_REJECTION, STAMP_REPLY), (0, 0)] {
                world.mark = mark;
                let sent = world.run(Role::Agent(HOME.index), Hook::Tc, &outcome.frame)?;
                ensure!(flags_sent(&sent)? & STAMP_REPLY == flag, "{mark}");
            }
            world.mark = 0;
            let left = arrive(&mut world, Hook::Xdp, &asked.bytes())?;
            ensure!(
                left.verdict == XDP_PASS && left.counted.is_empty(),
                "{:?}",
                left.counted
            );
        }
    }
    Ok(())
}

/// Returns a segment of [`TENANT`] to [`HOME`].
fn within(from: Endpoint, protocol: u8, is_v6: bool) -> Segment {
    let [from_address, to]: [IpAddr; 2] = if is_v6 {
        [from.v6.into(), HOME.v6.into()]
    } else {
        [from.address.into(), HOME.address.into()]
    };
    Segment::new(protocol, from.mac(), (from_address, 40000), (to, 80))
}

#[test]
fn a_sender_on_the_same_droplet_hears_of_it_at_once() -> Result<()> {
    let mut world = rejecting()?;
    for is_v6 in [false, true] {
        for protocol in [TCP, UDP, SCTP] {
            let asked = within(TENANT, protocol, is_v6);
            let outcome = send(&mut world, TENANT.index, &asked)?;
            ensure_answer(&outcome, &asked, [GATEWAY_MAC, TENANT.mac()])?;
            let left = world.run(Role::Agent(TENANT.index), Hook::Xdp, &asked.bytes())?;
            ensure!(
                left.verdict == XDP_PASS && left.counted.is_empty(),
                "{:?}",
                left.counted
            );
        }
    }
    // Where the VPC doesn't say so, nobody hears anything.
    let mut world = policed([INGRESS, 0], [0, 0])?;
    let asked = within(TENANT, TCP, false);
    ensure_dropped(&send(&mut world, TENANT.index, &asked)?, Counter::PolicyIngress)?;
    let frame = to_home(TCP, FAMILIES[0], 80).bytes();
    ensure_dropped(&arrive(&mut world, Hook::Tc, &frame)?, Counter::PolicyIngress)?;
    // A mark means nothing there.
    world.mark = MARK_REJECTION;
    let answer = Segment::new(TCP, HOME.mac(), asked.to, (FAMILIES[0].0, 40000));
    let sent = world.run(Role::Agent(HOME.index), Hook::Tc, &answer.bytes())?;
    ensure!(flags_sent(&sent)? & STAMP_REPLY == 0);
    Ok(())
}

#[test]
fn nothing_answers_answers_and_only_so_much_is_answered() -> Result<()> {
    let mut world = rejecting()?;
    world.enter()?;
    // A reset, and what belongs to an open connection: it may be an answer of which FLOWS has forgotten the question.
    for flags in [
        RESET,
        SYN | ACKNOWLEDGED,
        ACKNOWLEDGED,
        PUSH | ACKNOWLEDGED,
        FINISHED | ACKNOWLEDGED,
    ] {
        let segment = to_home(TCP, FAMILIES[0], 80).with_flags(flags);
        ensure_dropped(
            &arrive(&mut world, Hook::Tc, &segment.bytes())?,
            Counter::PolicyIngress,
        )?;
        let within = within(TENANT, TCP, false).with_flags(flags);
        ensure_dropped(&send(&mut world, TENANT.index, &within)?, Counter::PolicyIngress)?;
    }
    // An error about a datagram that the endpoint never sent.
    let unsent = to_home(UDP, FAMILIES[0], 80).answer(HOME.mac()).bytes();
    let error = [&[3, 3, 0, 0, 0, 0, 0, 0], &unsent[14..42]].concat();
    let error = Packet::udp([9; 6], ip(10, 0, 1, 50), HOME.address).carrying(ICMP, &error);
    ensure_dropped(
        &arrive(&mut world, Hook::Tc, &error.bytes())?,
        Counter::PolicyIngress,
    )?;
    let asked = to_home(UDP, FAMILIES[0], 80);
    let mut answered = 0;
    for _ in 0..3 * REJECTIONS_PER_WINDOW {
        if arrive(&mut world, Hook::Tc, &asked.bytes())?.verdict == 7 {
            answered += 1;
        }
    }
    // The first eleven were noted, too. A second may have ended meanwhile, and on a slow machine another one.
    ensure!(
        (REJECTIONS_PER_WINDOW - 11..3 * REJECTIONS_PER_WINDOW).contains(&answered),
        "{answered}"
    );
    Ok(())
}

//! Network policy: who is let in to an endpoint of this droplet, whose answers an agent vouches for, and what happens
//! to both when policy changes.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, LpmTrie, MapData, lpm_trie::Key};
use thuban_common::{
    counters::Counter,
    host_stack::{MARK_HOST_ENDPOINT, mark_of},
    policy::{
        Action, BlockKey, Decision, FLOWS_OF_VPC, FlowEntry, GRANT_ASKS_BLOCKS, GRANT_DENIES, Grant,
        GrantKey, ListEntry, ListKey, NO_RULE, PEER_OTHER, PortRange, SHARED_SERVICE_CLASS, STAMP_GUARDED,
        STAMP_REPLY, Stamp, of_vpc, point, ranked,
    },
    services::{ALL_FLOWS, ConnectionKey},
    tables::{AttachmentEntry, EndpointKey, LOCAL_HAS_POLICY, LOCAL_TAKES_XDP, LocalEntry},
};
use thuban_e2e::{programs::key, services::Served};
use transitd::boot::monotonic;

use crate::{
    fixture::stamp_bytes,
    frames::{Packet6, Tunnel},
    rows::{BOUNCED, Endpoint, HERE, SECOND, SPREAD, TENANT, ip, ip6},
    service_world::{
        SCTP, SERVICE, SERVICE6, Segment, TCP, UDP, ensure_delivered, ensure_dropped, send, world,
    },
    world::{Hook, Outcome, Role, World},
};

/// The endpoint on this droplet that policies are about, and one on another droplet; both in VPC 100.
pub const HOME: Endpoint = BOUNCED;
const AWAY: IpAddr = IpAddr::V4(ip(10, 0, 1, 50));
const AWAY6: IpAddr = IpAddr::V6(ip6(0, 1, 0x50));
pub const FAMILIES: [(IpAddr, IpAddr); 2] = [(AWAY, IpAddr::V4(HOME.address)), (AWAY6, IpAddr::V6(HOME.v6))];
pub const VNI: u32 = 100;
pub const FRIEND: u32 = 0x11;
pub const STRANGER: u32 = 0x12;
pub const INGRESS: u32 = 0x21;
pub const EGRESS: u32 = 0x22;
pub const HOOKS: [Hook; 2] = [Hook::Tc, Hook::Xdp];

/// What a packet says of its sender.
pub const fn stamp(class: u32, egress_set: u32, flags: u16) -> Stamp {
    Stamp {
        class,
        egress_set,
        flags,
    }
}

pub const BY_FRIEND: Stamp = stamp(FRIEND, 0, 0);
pub const BY_STRANGER: Stamp = stamp(STRANGER, 0, 0);
pub const BY_GUARDED: Stamp = stamp(FRIEND, 0, STAMP_GUARDED);

/// A world in which only [`HOME`] and [`TENANT`] have policies, those that a test gives them.
pub fn policed(home: [u32; 2], tenant: [u32; 2]) -> Result<World> {
    let mut world = world()?;
    set_policies(&mut world, HOME, FRIEND, home)?;
    set_policies(&mut world, TENANT, STRANGER, tenant)?;
    Ok(world)
}

/// Writes an endpoint's class, ingress set and egress set.
pub fn set_policies(world: &mut World, of: Endpoint, class: u32, [ingress, egress]: [u32; 2]) -> Result<()> {
    let interface = world.interfaces[usize::from(of.index)];
    let mut attachment: AttachmentEntry = world.programs.get("ATTACHMENTS", &interface)?;
    (attachment.class, attachment.ingress_set, attachment.egress_set) = (class, ingress, egress);
    world.programs.insert("ATTACHMENTS", interface, attachment)?;
    let flag = if ingress == 0 && egress == 0 {
        0
    } else {
        LOCAL_HAS_POLICY
    };
    for address in [IpAddr::V4(of.address), IpAddr::V6(of.v6)] {
        let key = key(of.vni, address);
        let local = LocalEntry {
            vni: key.vni,
            ifindex: interface,
            mac: of.mac(),
            flags: LOCAL_TAKES_XDP | flag,
        };
        world.programs.set_local(key, local)?;
    }
    raise_epoch(world)
}

pub fn raise_epoch(world: &mut World) -> Result<()> {
    world.programs.raise_epoch()
}

pub fn grant(world: &mut World, set: u32, peer: u64, list: u32, flags: u32) -> Result<()> {
    let key = GrantKey {
        set: of_vpc(VNI, set),
        peer,
    };
    world
        .programs
        .insert("GRANTS", key, Grant { list, flags }.of(&key))
}

/// Writes a list of one range of points, which a rule decides.
fn list(world: &mut World, list: u32, first: u32, last: u32, action: Action) -> Result<()> {
    let range = PortRange {
        first,
        last,
        decision: Decision {
            admin: NO_RULE,
            rest: ranked(0, action),
        }
        .word(),
    };
    let key = ListKey { list, part: 0 };
    world.programs.insert("LISTS", key, ListEntry::new(&[range], 0))
}

/// Writes a set that lets a class in at a port of a protocol, and nothing else.
pub fn allow(world: &mut World, set: u32, class: u32, (protocol, port): (u8, u16)) -> Result<()> {
    let point = point(protocol, port);
    list(world, set, point, point, Action::Accept)?;
    grant(world, set, PEER_OTHER, 0, GRANT_DENIES)?;
    grant(world, set, of_vpc(VNI, class), set, GRANT_DENIES)
}

pub fn arrive(world: &mut World, hook: Hook, stamp: Stamp, frame: &[u8]) -> Result<Outcome> {
    let frame = [&stamp_bytes(stamp), &frame[12..]].concat();
    let frame = Tunnel::new(SECOND, HERE, VNI).around([2; 12], &frame);
    world.run(Role::Transit, hook, &frame)
}

pub fn ensure_in(outcome: &Outcome) -> Result<()> {
    let is_in = outcome.counted.contains_key("delivered") || outcome.counted.contains_key("decapsulated_xdp");
    ensure!(is_in, "verdict {} counted {:?}", outcome.verdict, outcome.counted);
    Ok(())
}

fn ensure_out(outcome: &Outcome, reason: Counter) -> Result<()> {
    let counted = &outcome.counted;
    ensure!(
        counted.len() == 1 && counted.contains_key(reason.name()),
        "verdict {} counted {counted:?}, not {reason:?}",
        outcome.verdict
    );
    Ok(())
}

/// A packet from elsewhere to [`HOME`].
pub fn to_home(protocol: u8, (from, to): (IpAddr, IpAddr), port: u16) -> Segment {
    Segment::new(protocol, [9; 6], (from, 40000), (to, port))
}

/// Returns the flags of the stamp of a packet that went to another droplet.
pub fn flags_sent(outcome: &Outcome) -> Result<u16> {
    ensure!(
        matches!(outcome.verdict, 4 | 7) && outcome.frame.len() > 64,
        "not sent: {} {:?}",
        outcome.verdict,
        outcome.counted
    );
    Ok(u16::from(outcome.frame[56]) & (STAMP_REPLY | STAMP_GUARDED))
}

pub fn is_vouched(world: &mut World, hook: Hook, answer: &[u8]) -> Result<bool> {
    let outcome = world.run(Role::Agent(HOME.index), hook, answer)?;
    Ok(flags_sent(&outcome)? & STAMP_REPLY != 0)
}

fn flows(world: &World) -> Result<Vec<(ConnectionKey, FlowEntry)>> {
    let map = world.programs.ebpf.map("FLOWS").context("FLOWS")?;
    let map: HashMap<&MapData, ConnectionKey, FlowEntry> = map.try_into()?;
    Ok(map.iter().collect::<Result<_, _>>()?)
}

#[test]
fn a_client_by_a_shared_service_has_a_class_of_its_own() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    allow(&mut world, INGRESS, SHARED_SERVICE_CLASS, (TCP, 8080))?;
    let (here, far) = (IpAddr::V4(HOME.address), AWAY);
    let request = |port: u16| {
        let client = IpAddr::V4(TENANT.address);
        Segment::new(TCP, TENANT.mac(), (client, port), (SERVICE, 80))
    };
    let [of_other, of_own] = [SPREAD, HOME].map(|of| world.interfaces[usize::from(of.index)]);
    let sent_on = |interface| mark_of(interface, MARK_HOST_ENDPOINT);
    let mut port = 40000;
    for (is_host, backend) in [(false, here), (false, far), (true, here), (true, far)] {
        if is_host {
            world.be_host(TENANT)?;
        }
        Served::new(VNI, 1, SERVICE, 80, TCP).by(&mut world.programs, &[(backend, 8080)])?;
        // A pod of another VPC, one of this VPC by a node's port, none, and the node itself.
        for mark in [sent_on(of_other), sent_on(of_own), sent_on(0), 0] {
            world.mark = mark;
            port += 1;
            let outcome = send(&mut world, TENANT.index, &request(port))?;
            let is_shared = is_host && mark == sent_on(of_other);
            if backend == far {
                ensure!(outcome.frame.len() > 64, "not sent: {:?}", outcome.counted);
                let class = [0, outcome.frame[57], outcome.frame[58], outcome.frame[59]];
                let expected = if is_shared { SHARED_SERVICE_CLASS } else { STRANGER };
                ensure!(u32::from_be_bytes(class) == expected, "{mark:#x}: {class:?}");
            } else if is_shared {
                ensure!(outcome.counted.contains_key(Counter::DeliveredLocal.name()));
            } else {
                ensure_dropped(&outcome, Counter::PolicyIngress)?;
            }
        }
    }
    Ok(())
}

#[test]
fn an_isolated_endpoint_lets_in_whom_a_rule_allows() -> Result<()> {
    for protocol in [TCP, UDP, SCTP] {
        let mut world = policed([INGRESS, 0], [0, 0])?;
        allow(&mut world, INGRESS, FRIEND, (protocol, 80))?;
        for (family, hook) in FAMILIES
            .into_iter()
            .flat_map(|family| HOOKS.map(|hook| (family, hook)))
        {
            let frame = |port| to_home(protocol, family, port).bytes();
            ensure_in(&arrive(&mut world, hook, BY_FRIEND, &frame(80))?)?;
            ensure!(flows(&world)?.is_empty(), "a flood would fill the table");
            for (who, port) in [
                (BY_FRIEND, 81),
                (BY_STRANGER, 80),
                (stamp(0, 0, 0), 80),
                (stamp(STRANGER, 0, STAMP_GUARDED), 80),
            ] {
                let outcome = arrive(&mut world, hook, who, &frame(port))?;
                ensure_out(&outcome, Counter::PolicyIngress)
                    .with_context(|| format!("{protocol} {family:?} {hook:?} {who:?} {port}"))?;
            }
            // Without a stamp nobody knows the sender.
            let plain = Tunnel::new(SECOND, HERE, VNI).around([2; 12], &frame(80));
            ensure_out(&world.run(Role::Transit, hook, &plain)?, Counter::PolicyIngress)?;
        }
    }
    Ok(())
}

#[test]
fn the_senders_egress_set_is_judged_where_its_packet_ends() -> Result<()> {
    let mut world = policed([0, 0], [0, 0])?;
    allow(&mut world, EGRESS, FRIEND, (TCP, 80))?;
    for hook in HOOKS {
        let frame = |port| to_home(TCP, FAMILIES[0], port).bytes();
        let limited = stamp(STRANGER, EGRESS, 0);
        ensure_in(&arrive(&mut world, hook, limited, &frame(80))?)?;
        ensure_out(
            &arrive(&mut world, hook, limited, &frame(81))?,
            Counter::PolicyEgress,
        )?;
        let unknown = stamp(STRANGER, 0x99, 0);
        ensure_out(
            &arrive(&mut world, hook, unknown, &frame(80))?,
            Counter::PolicyEgress,
        )?;
    }
    // The destination is of another class now.
    set_policies(&mut world, HOME, STRANGER, [0, 0])?;
    let frame = to_home(TCP, FAMILIES[0], 80).bytes();
    let outcome = arrive(&mut world, Hook::Tc, stamp(STRANGER, EGRESS, 0), &frame)?;
    ensure_out(&outcome, Counter::PolicyEgress)
}

#[test]
fn blocks_are_asked_by_the_other_sides_address() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    list(&mut world, 5, point(TCP, 80), point(TCP, 80), Action::Accept)?;
    grant(
        &mut world,
        INGRESS,
        PEER_OTHER,
        0,
        GRANT_DENIES | GRANT_ASKS_BLOCKS,
    )?;
    let frame = to_home(TCP, FAMILIES[0], 80).bytes();
    ensure_out(
        &arrive(&mut world, Hook::Tc, BY_STRANGER, &frame)?,
        Counter::PolicyIngress,
    )?;
    let mut blocks: LpmTrie<_, BlockKey, Grant> = world
        .programs
        .ebpf
        .map_mut("BLOCKS")
        .context("BLOCKS")?
        .try_into()?;
    let set = of_vpc(VNI, INGRESS).to_be_bytes();
    let address = key(VNI, AWAY).address;
    blocks.insert(
        &Key::new(64 + 120, BlockKey { set, address }),
        Grant { list: 5, flags: 0 },
        0,
    )?;
    for hook in HOOKS {
        ensure_in(&arrive(&mut world, hook, BY_STRANGER, &frame)?)?;
    }
    Ok(())
}

#[test]
fn answers_to_a_guarded_client_are_vouched_for() -> Result<()> {
    for protocol in [TCP, UDP, SCTP] {
        let mut world = policed([0, 0], [0, 0])?;
        for (family, hook) in FAMILIES
            .into_iter()
            .flat_map(|family| HOOKS.map(|hook| (family, hook)))
        {
            let request = to_home(protocol, family, 80);
            let answer = request.answer(HOME.mac());
            let other = request.sent_to((family.1, 81)).answer(HOME.mac());
            ensure_in(&arrive(&mut world, hook, BY_FRIEND, &request.bytes())?)?;
            ensure!(
                !is_vouched(&mut world, hook, &answer.bytes())?,
                "an unguarded client needs nobody"
            );
            ensure_in(&arrive(&mut world, hook, BY_GUARDED, &request.bytes())?)?;
            ensure!(
                is_vouched(&mut world, hook, &answer.bytes())?,
                "{protocol} {family:?}"
            );
            ensure!(!is_vouched(&mut world, hook, &other.bytes())?, "another port");
            let flow = flows(&world)?.pop().context("no flow")?;
            world.programs.remove::<_, FlowEntry>("FLOWS", &flow.0)?;
            ensure!(!is_vouched(&mut world, hook, &answer.bytes())?, "forgotten");
        }
    }
    Ok(())
}

#[test]
fn answers_by_datagram_end_after_the_client() -> Result<()> {
    for (protocol, ends) in [(TCP, false), (SCTP, false), (UDP, true)] {
        let mut world = policed([0, 0], [0, 0])?;
        let request = to_home(protocol, FAMILIES[0], 80).bytes();
        let answer = to_home(protocol, FAMILIES[0], 80).answer(HOME.mac()).bytes();
        ensure_in(&arrive(&mut world, Hook::Tc, BY_GUARDED, &request)?)?;
        let age = |world: &mut World, seconds: u64| {
            let (key, mut entry) = flows(world)?.pop().context("no flow")?;
            entry.time = monotonic().as_nanos() as u64 - seconds * 1_000_000_000;
            world.programs.insert("FLOWS", key, entry)?;
            anyhow::Ok(entry.time)
        };
        let time = age(&mut world, 25)?;
        for _ in 0..2 {
            ensure!(is_vouched(&mut world, Hook::Tc, &answer)?, "{protocol}");
            let (_, entry) = flows(&world)?.pop().context("no flow")?;
            ensure!(entry.time == time, "an answer keeps no flow alive");
        }
        age(&mut world, 31)?;
        ensure!(is_vouched(&mut world, Hook::Tc, &answer)? != ends, "{protocol}");
        // The client goes on.
        ensure_in(&arrive(&mut world, Hook::Tc, BY_GUARDED, &request)?)?;
        ensure!(is_vouched(&mut world, Hook::Tc, &answer)?, "{protocol}");
    }
    Ok(())
}

#[test]
fn answers_of_an_endpoint_with_egress_rules_are_vouched_for() -> Result<()> {
    let mut world = policed([0, EGRESS], [0, 0])?;
    let request = to_home(TCP, FAMILIES[0], 80);
    ensure_in(&arrive(&mut world, Hook::Tc, BY_FRIEND, &request.bytes())?)?;
    ensure!(is_vouched(
        &mut world,
        Hook::Tc,
        &request.answer(HOME.mac()).bytes()
    )?);
    Ok(())
}

#[test]
fn a_vouched_packet_passes_unless_it_opens_a_connection() -> Result<()> {
    let vouched = stamp(STRANGER, EGRESS, STAMP_REPLY);
    for hook in HOOKS {
        let mut world = policed([INGRESS, 0], [0, 0])?;
        grant(&mut world, INGRESS, PEER_OTHER, 0, GRANT_DENIES)?;
        for flags in [0x12, 0x10, 0x11, 0x04] {
            let segment = to_home(TCP, FAMILIES[0], 80).with_flags(flags);
            ensure_in(&arrive(&mut world, hook, vouched, &segment.bytes())?)?;
        }
        for flags in [0x02, 0xc2] {
            let segment = to_home(TCP, FAMILIES[0], 80).with_flags(flags);
            let outcome = arrive(&mut world, hook, vouched, &segment.bytes())?;
            ensure_out(&outcome, Counter::PolicyIngress)?;
        }
        let datagram = to_home(UDP, FAMILIES[0], 80).bytes();
        ensure_in(&arrive(&mut world, hook, vouched, &datagram)?)?;
        let init = to_home(SCTP, FAMILIES[0], 80).bytes();
        ensure_out(&arrive(&mut world, hook, vouched, &init)?, Counter::PolicyIngress)?;
    }
    Ok(())
}

#[test]
fn a_connection_follows_a_change_at_its_next_packet() -> Result<()> {
    for hook in HOOKS {
        let mut world = policed([INGRESS, 0], [0, 0])?;
        allow(&mut world, INGRESS, FRIEND, (TCP, 80))?;
        let request = to_home(TCP, FAMILIES[0], 80);
        let answer = request.answer(HOME.mac()).bytes();
        let data = request.clone().with_flags(0x10).bytes();
        ensure_in(&arrive(&mut world, hook, BY_GUARDED, &request.bytes())?)?;
        ensure!(is_vouched(&mut world, hook, &answer)?);
        // A change that leaves the flow alone.
        raise_epoch(&mut world)?;
        ensure!(is_vouched(&mut world, hook, &answer)?);
        ensure_in(&arrive(&mut world, hook, BY_GUARDED, &data)?)?;
        // The sender's labels change.
        let other = stamp(STRANGER, 0, STAMP_GUARDED);
        ensure_out(&arrive(&mut world, hook, other, &data)?, Counter::PolicyIngress)?;
        ensure!(flows(&world)?.is_empty() && !is_vouched(&mut world, hook, &answer)?);
        // The sender gets egress rules, which this droplet doesn't know.
        ensure_in(&arrive(&mut world, hook, BY_GUARDED, &data)?)?;
        let limited = stamp(FRIEND, EGRESS, STAMP_GUARDED);
        ensure_out(&arrive(&mut world, hook, limited, &data)?, Counter::PolicyEgress)?;
        ensure!(flows(&world)?.is_empty() && !is_vouched(&mut world, hook, &answer)?);
        // The rule goes: first the server speaks, then the client.
        ensure_in(&arrive(&mut world, hook, BY_GUARDED, &data)?)?;
        grant(&mut world, INGRESS, of_vpc(VNI, FRIEND), 0, GRANT_DENIES)?;
        raise_epoch(&mut world)?;
        ensure!(!is_vouched(&mut world, hook, &answer)? && flows(&world)?.is_empty());
        ensure_out(
            &arrive(&mut world, hook, BY_GUARDED, &data)?,
            Counter::PolicyIngress,
        )?;
    }
    Ok(())
}

#[test]
fn both_ends_here_are_judged_once_and_answers_come_back() -> Result<()> {
    for hook in HOOKS {
        let mut world = policed([INGRESS, 0], [INGRESS, 0])?;
        allow(&mut world, INGRESS, STRANGER, (TCP, 80))?;
        let (from, to) = (IpAddr::V4(TENANT.address), IpAddr::V4(HOME.address));
        let request = |port| Segment::new(TCP, TENANT.mac(), (from, 40000), (to, port));
        let run = |world: &mut World, of: Endpoint, segment: &Segment| {
            world.run(Role::Agent(of.index), hook, &segment.bytes())
        };
        let answer = request(80).answer(HOME.mac());
        ensure_out(&run(&mut world, HOME, &answer)?, Counter::PolicyIngress)?;
        ensure_out(&run(&mut world, TENANT, &request(81))?, Counter::PolicyIngress)?;
        ensure!(
            run(&mut world, TENANT, &request(80))?
                .counted
                .contains_key("delivered_local")
        );
        ensure!(
            run(&mut world, HOME, &answer)?
                .counted
                .contains_key("delivered_local")
        );
        let back = answer.with_flags(0x02);
        ensure_out(&run(&mut world, HOME, &back)?, Counter::PolicyIngress)?;
    }
    Ok(())
}

#[test]
fn a_services_backend_is_judged_by_its_own_address() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, EGRESS])?;
    Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &[(HOME.address.into(), 8080)])?;
    Served::new(100, 2, SERVICE6, 80, TCP).by(&mut world.programs, &[(HOME.v6.into(), 8080)])?;
    allow(&mut world, INGRESS, STRANGER, (TCP, 8080))?;
    allow(&mut world, EGRESS, FRIEND, (TCP, 8080))?;
    for (client, service, backend) in [
        (IpAddr::V4(TENANT.address), SERVICE, IpAddr::V4(HOME.address)),
        (IpAddr::V6(TENANT.v6), SERVICE6, IpAddr::V6(HOME.v6)),
    ] {
        let request = Segment::new(TCP, TENANT.mac(), (client, 40000), (service, 80));
        let there = request.sent_to((backend, 8080));
        ensure_delivered(&send(&mut world, TENANT.index, &request)?, &there, HOME.mac())?;
        let answer = there.answer(HOME.mac());
        let outcome = send(&mut world, HOME.index, &answer)?;
        ensure_delivered(&outcome, &answer.sent_from((service, 80)), TENANT.mac())?;
    }
    allow(&mut world, EGRESS, FRIEND, (TCP, 80))?;
    raise_epoch(&mut world)?;
    let client = IpAddr::V4(TENANT.address);
    let request = Segment::new(TCP, TENANT.mac(), (client, 40001), (SERVICE, 80));
    ensure_dropped(&send(&mut world, TENANT.index, &request)?, Counter::PolicyEgress)
}

#[test]
fn a_bouncer_judges_whom_it_serves_a_backend_of_its_own() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &[(HOME.address.into(), 8080)])?;
    allow(&mut world, INGRESS, FRIEND, (TCP, 8080))?;
    let request = Segment::new(TCP, [9; 6], (AWAY, 40000), (SERVICE, 80)).bytes();
    ensure_in(&arrive(&mut world, Hook::Tc, BY_FRIEND, &request)?)?;
    let outcome = arrive(&mut world, Hook::Tc, BY_STRANGER, &request)?;
    ensure_out(&outcome, Counter::PolicyIngress)
}

#[test]
fn a_pod_is_let_in_by_itself() -> Result<()> {
    let mut world = policed([INGRESS, EGRESS], [0, 0])?;
    Served::new(100, 1, SERVICE, 80, TCP).by(&mut world.programs, &[(HOME.address.into(), 8080)])?;
    let from = IpAddr::V4(HOME.address);
    for to in [from, SERVICE] {
        let request = Segment::new(TCP, HOME.mac(), (from, 40000), (to, 80));
        let outcome = send(&mut world, HOME.index, &request)?;
        ensure!(
            outcome.counted.contains_key("delivered_local"),
            "{to}: {:?}",
            outcome.counted
        );
    }
    Ok(())
}

/// Returns an ICMP message in a frame of an endpoint.
pub fn icmp((from, to): (IpAddr, IpAddr), mac: [u8; 6], kind: u8, rest: &[u8]) -> Vec<u8> {
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let message = [&[kind, 0, 0, 0][..], rest].concat();
            crate::frames::Packet::udp(mac, from, to)
                .carrying(1, &message)
                .bytes()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut packet = Packet6::udp(mac, from, to).icmp(kind, rest);
            packet.hop_limit = 63;
            packet.bytes()
        }
        _ => unreachable!("one family"),
    }
}

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

#[test]
fn a_vpc_without_room_for_flows_is_let_in_and_not_vouched_for() -> Result<()> {
    let mut world = policed([0, 0], [0, 0])?;
    let share = EndpointKey {
        vni: VNI,
        address: ALL_FLOWS,
    };
    let request = |port| to_home(TCP, FAMILIES[0], port);
    ensure_in(&arrive(&mut world, Hook::Tc, BY_GUARDED, &request(80).bytes())?)?;
    ensure!(world.programs.get::<_, u32>("SHARES", &share)? == 1);
    world.programs.insert("SHARES", share, FLOWS_OF_VPC)?;
    let outcome = arrive(&mut world, Hook::Tc, BY_GUARDED, &request(81).bytes())?;
    ensure!(outcome.counted.contains_key(Counter::PolicyUnvouched.name()));
    ensure_in(&outcome)?;
    let mut answer = request(81).answer(HOME.mac());
    ensure!(!is_vouched(&mut world, Hook::Tc, &answer.bytes())?);
    answer = request(80).answer(HOME.mac());
    ensure!(
        is_vouched(&mut world, Hook::Tc, &answer.bytes())?,
        "it has an entry"
    );
    Ok(())
}

#[test]
fn an_element_that_is_another_keys_by_now_says_nothing() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    let own = GrantKey {
        set: of_vpc(VNI, INGRESS),
        peer: PEER_OTHER,
    };
    let others = GrantKey {
        set: of_vpc(VNI + 1, INGRESS),
        peer: PEER_OTHER,
    };
    let frame = to_home(TCP, FAMILIES[0], 80).bytes();
    let open = Grant { list: 0, flags: 0 };
    world.programs.insert("GRANTS", own, open.of(&others))?;
    let outcome = arrive(&mut world, Hook::Tc, BY_FRIEND, &frame)?;
    ensure_out(&outcome, Counter::PolicyIngress)?;
    world.programs.insert("GRANTS", own, open.of(&own))?;
    ensure_in(&arrive(&mut world, Hook::Tc, BY_GUARDED, &frame)?)?;
    let (key, mut flow) = flows(&world)?.pop().context("no flow")?;
    flow.tag ^= 1;
    world.programs.insert("FLOWS", key, flow)?;
    let answer = to_home(TCP, FAMILIES[0], 80).answer(HOME.mac());
    ensure!(!is_vouched(&mut world, Hook::Tc, &answer.bytes())?);
    Ok(())
}

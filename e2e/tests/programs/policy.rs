//! Network policy: who is let in to an endpoint of this droplet, whose answers an agent vouches for, and what happens
//! to both when policy changes.

mod portless;
mod vouched;

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, LpmTrie, MapData, lpm_trie::Key};
use thuban_common::{
    counters::Counter,
    host_stack::{MARK_HOST_ENDPOINT, mark_of},
    policy::{
        Action, BlockKey, Decision, FlowEntry, GRANT_ASKS_BLOCKS, GRANT_DENIES, Grant, GrantKey, ListEntry,
        ListKey, NO_RULE, PEER_OTHER, PortRange, SHARED_SERVICE_CLASS, STAMP_GUARDED, STAMP_REPLY, Stamp,
        of_vpc, point, ranked,
    },
    services::ConnectionKey,
    tables::{AttachmentEntry, LOCAL_HAS_POLICY, LOCAL_TAKES_XDP, LocalEntry},
};
use thuban_e2e::{programs::key, services::Served};

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

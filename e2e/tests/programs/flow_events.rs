//! What programs tell of flows: which packets are told, once, and no more than a VPC's share.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use aya::{
    Pod,
    maps::{HashMap, MapData, RingBuf},
};
use thuban_common::{
    counters::Counter,
    flow_events::{
        FLOW_EVENTS_PER_SECOND, FlowBudgetEntry, FlowBudgetKey, FlowEvent, FlowEventRecord, SeenFlowEntry,
        SeenFlowKey,
    },
    packet::tcp::{ACK, FIN, RST, SYN},
    policy::NO_RULE,
    tables::{CONFIG_FLOW_DROPS, CONFIG_FLOWS, CONFIG_TRANSIT_AT_XDP, NO_DROPLET, RemoteRow},
};
use thuban_e2e::programs::{address, key};

use crate::{
    frames::{Packet, Packet6, Tunnel, tcp, udp},
    policy::{BY_STRANGER, FAMILIES, FRIEND, INGRESS, allow, arrive, policed, to_home},
    rows::{GUEST, HERE, SECOND, TENANT, THIRD, ip, ip6},
    service_world::TCP,
    world::{Hook, Role, World},
};

const ETHERNET: [u8; 12] = [2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2];
const ALL: u32 = CONFIG_FLOW_DROPS | CONFIG_FLOWS;
const AGENT: Role = Role::Agent(TENANT.index);
const AT: [(Hook, u8); 2] = [(Hook::Tc, 0), (Hook::Xdp, 1)];

fn telling(flags: u32) -> Result<World> {
    let mut world = World::new()?;
    tell(&mut world, flags)?;
    Ok(world)
}

/// Has the programs of a world tell what these flags say.
fn tell(world: &mut World, flags: u32) -> Result<()> {
    world.configure_with(CONFIG_TRANSIT_AT_XDP | flags)?;
    take(world)?;
    Ok(())
}

/// Takes the events out of the ring buffer, without their times.
fn take(world: &mut World) -> Result<Vec<FlowEventRecord>> {
    let map = world
        .programs
        .ebpf
        .map_mut("FLOW_EVENTS")
        .context("FLOW_EVENTS")?;
    let mut ring: RingBuf<_> = map.try_into()?;
    let mut events = Vec::new();
    while let Some(item) = ring.next() {
        ensure!(item.len() == size_of::<FlowEventRecord>(), "{} bytes", item.len());
        // SAFETY: long enough, any bytes are a record, and the record is copied.
        #[allow(unsafe_code)]
        let event = unsafe { item.as_ptr().cast::<FlowEventRecord>().read_unaligned() };
        ensure!(event.time != 0, "no time");
        events.push(FlowEventRecord { time: 0, ..event });
    }
    Ok(events)
}

/// Runs a frame, and returns the events.
fn told(world: &mut World, role: Role, hook: Hook, frame: &[u8]) -> Result<Vec<FlowEventRecord>> {
    world.run(role, hook, frame)?;
    take(world)
}

fn keys<K: Pod, V: Pod>(world: &World, map: &str) -> Result<Vec<K>> {
    let map = world.programs.ebpf.map(map).with_context(|| map.to_owned())?;
    let map: HashMap<&MapData, K, V> = map.try_into()?;
    Ok(map.keys().collect::<Result<_, _>>()?)
}

fn seen(world: &World) -> Result<Vec<SeenFlowKey>> {
    keys::<_, SeenFlowEntry>(world, "SEEN_FLOWS")
}

fn budgets(world: &World) -> Result<Vec<FlowBudgetKey>> {
    keys::<_, FlowBudgetEntry>(world, "FLOW_BUDGETS")
}

/// Returns the event of the first datagram of [`Packet::udp`] that TENANT sends to an address with a direct row.
fn first(world: &World, point: u8, length: usize) -> FlowEventRecord {
    let interface = if point < 2 {
        world.interfaces[usize::from(TENANT.index)]
    } else {
        world.uplink
    };
    FlowEventRecord {
        packets: 1,
        bytes: length as u64,
        source: address(TENANT.address),
        destination: address(ip(10, 0, 1, 50)),
        vni: 100,
        interface,
        counter: Counter::SentDirect as u32,
        next: SECOND.octets(),
        ports: [1234, 80].map(u16::to_be),
        protocol: 17,
        point,
        event: FlowEvent::First as u8,
        ..FlowEventRecord::default()
    }
}

/// Returns the key of the flow of [`first`].
fn key_of(event: &FlowEventRecord) -> SeenFlowKey {
    SeenFlowKey {
        source: event.source,
        destination: event.destination,
        vni: event.vni,
        server_port: 80_u16.to_be(),
        protocol: event.protocol,
        verdict: event.counter as u8,
        point: event.point,
        from_server: event.from_server,
        padding: [0; 2],
    }
}

fn direct() -> Vec<u8> {
    Packet::udp(TENANT.mac(), TENANT.address, ip(10, 0, 1, 50)).bytes()
}

fn outside() -> Vec<u8> {
    Packet::udp(TENANT.mac(), TENANT.address, ip(8, 8, 8, 8)).bytes()
}

/// Returns a segment of TENANT to port 80 of 10.0.1.50.
fn request(flags: u8) -> Vec<u8> {
    let segment = segment([40_000, 80], flags);
    let packet = Packet::udp(TENANT.mac(), TENANT.address, ip(10, 0, 1, 50));
    packet.carrying(TCP, &segment).bytes()
}

/// Returns an answer to it, as it comes by the wire.
fn answer(flags: u8) -> Vec<u8> {
    let segment = segment([80, 40_000], flags);
    let packet = Packet::udp([2; 6], ip(10, 0, 1, 50), TENANT.address);
    Tunnel::new(SECOND, HERE, 100).around(ETHERNET, &packet.carrying(TCP, &segment).bytes())
}

fn segment([from, to]: [u16; 2], flags: u8) -> Vec<u8> {
    let mut bytes = tcp(flags);
    bytes[..2].copy_from_slice(&from.to_be_bytes());
    bytes[2..4].copy_from_slice(&to.to_be_bytes());
    bytes
}

#[test]
fn the_first_packet_of_a_flow_is_told_and_no_second_one() -> Result<()> {
    let mut world = telling(ALL)?;
    let v6 = Packet6::udp(TENANT.mac(), TENANT.v6, ip6(0, 1, 0x90)).bytes();
    for (hook, point) in AT {
        let of_v4 = first(&world, point, direct().len());
        let of_v6 = FlowEventRecord {
            source: address(TENANT.v6),
            destination: address(ip6(0, 1, 0x90)),
            counter: Counter::SentToBouncer as u32,
            next: THIRD.octets(),
            bytes: v6.len() as u64,
            ..of_v4
        };
        for (frame, expected) in [(&direct(), of_v4), (&v6, of_v6)] {
            let events = told(&mut world, AGENT, hook, frame)?;
            ensure!(events == [expected], "{hook:?}: {events:#?}");
            let events = told(&mut world, AGENT, hook, frame)?;
            ensure!(events.is_empty(), "{hook:?}: {events:#?}");
            let entry: SeenFlowEntry = world.programs.get("SEEN_FLOWS", &key_of(&expected))?;
            ensure!(
                (entry.packets, entry.bytes) == (1, frame.len() as u64),
                "{entry:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn what_goes_on_is_told_after_half_a_minute() -> Result<()> {
    let mut world = telling(ALL)?;
    let expected = first(&world, 0, direct().len());
    let key = key_of(&expected);
    for _ in 0..3 {
        world.run(AGENT, Hook::Tc, &direct())?;
    }
    let entry: SeenFlowEntry = world.programs.get("SEEN_FLOWS", &key)?;
    world
        .programs
        .insert("SEEN_FLOWS", key, SeenFlowEntry { told: 0, ..entry })?;
    take(&mut world)?;
    let events = told(&mut world, AGENT, Hook::Tc, &direct())?;
    let goes_on = FlowEventRecord {
        packets: 3,
        bytes: 3 * expected.bytes,
        event: FlowEvent::GoesOn as u8,
        ..expected
    };
    ensure!(events == [goes_on], "{events:#?}");
    ensure!(told(&mut world, AGENT, Hook::Tc, &direct())?.is_empty());
    Ok(())
}

#[test]
fn a_changed_verdict_is_told() -> Result<()> {
    let mut world = telling(ALL)?;
    let expected = first(&world, 0, direct().len());
    ensure!(told(&mut world, AGENT, Hook::Tc, &direct())? == [expected]);
    let endpoint = key(100, ip(10, 0, 1, 50));
    let row = RemoteRow::Direct;
    world.programs.set_remote(row, endpoint, NO_DROPLET.into())?;
    let changed = FlowEventRecord {
        counter: Counter::SentToBouncer as u32,
        next: THIRD.octets(),
        event: FlowEvent::Changed as u8,
        ..expected
    };
    let events = told(&mut world, AGENT, Hook::Tc, &direct())?;
    ensure!(events == [changed], "{events:#?}");
    world.programs.set_remote(row, endpoint, SECOND)?;
    ensure!(told(&mut world, AGENT, Hook::Tc, &direct())?.is_empty());
    Ok(())
}

#[test]
fn the_end_is_told_once_for_each_direction() -> Result<()> {
    let mut world = telling(ALL)?;
    let sent = FlowEventRecord {
        ports: [40_000, 80].map(u16::to_be),
        protocol: TCP,
        ..first(&world, 0, request(SYN).len())
    };
    let delivered = FlowEventRecord {
        source: sent.destination,
        destination: sent.source,
        ports: [80, 40_000].map(u16::to_be),
        interface: world.uplink,
        counter: Counter::Delivered as u32,
        next: NO_DROPLET,
        point: 2,
        from_server: 1,
        ..sent
    };
    let event = |of: FlowEventRecord, tcp_flags, event| FlowEventRecord {
        tcp_flags,
        event: event as u8,
        ..of
    };
    for (role, frame, expected) in [
        (AGENT, request(SYN), event(sent, SYN, FlowEvent::First)),
        (
            Role::Transit,
            answer(SYN | ACK),
            event(delivered, SYN | ACK, FlowEvent::First),
        ),
        (
            AGENT,
            request(FIN | ACK),
            event(sent, FIN | ACK, FlowEvent::Ended),
        ),
        (
            Role::Transit,
            answer(RST),
            event(delivered, RST, FlowEvent::Ended),
        ),
    ] {
        let events = told(&mut world, role, Hook::Tc, &frame)?;
        ensure!(events == [expected], "{events:#?}");
    }
    for flags in [ACK, FIN | ACK, RST] {
        ensure!(told(&mut world, AGENT, Hook::Tc, &request(flags))?.is_empty());
        ensure!(told(&mut world, Role::Transit, Hook::Tc, &answer(flags))?.is_empty());
    }
    Ok(())
}

#[test]
fn drops_alone_are_told_if_passes_are_not_wanted() -> Result<()> {
    let mut world = telling(CONFIG_FLOW_DROPS)?;
    let wire = |to| {
        let inner = Packet::udp([2; 6], ip(10, 0, 1, 40), to).bytes();
        Tunnel::new(SECOND, HERE, 100).around(ETHERNET, &inner)
    };
    for (hook, point) in AT {
        for (role, frame) in [
            (AGENT, direct()),
            (Role::Transit, wire(TENANT.address)),
            (Role::Transit, wire(ip(10, 0, 3, 33))),
        ] {
            let events = told(&mut world, role, hook, &frame)?;
            ensure!(events.is_empty(), "{role:?} {hook:?}: {events:#?}");
        }
        let by_agent = FlowEventRecord {
            destination: address(ip(8, 8, 8, 8)),
            counter: Counter::OutsideVpc as u32,
            next: NO_DROPLET,
            ..first(&world, point, outside().len())
        };
        let by_transit = FlowEventRecord {
            source: address(ip(10, 0, 1, 40)),
            destination: address(ip(10, 0, 2, 90)),
            counter: Counter::NoEndpoint as u32,
            next: NO_DROPLET,
            ..first(&world, point + 2, direct().len())
        };
        for (role, frame, expected) in [
            (AGENT, outside(), by_agent),
            (Role::Transit, wire(ip(10, 0, 2, 90)), by_transit),
        ] {
            let events = told(&mut world, role, hook, &frame)?;
            ensure!(events == [expected], "{hook:?}: {events:#?}");
            ensure!(told(&mut world, role, hook, &frame)?.is_empty());
        }
    }
    Ok(())
}

#[test]
fn a_denied_packet_is_told_with_what_denies_it() -> Result<()> {
    let mut world = policed([INGRESS, 0], [0, 0])?;
    allow(&mut world, INGRESS, FRIEND, (TCP, 80))?;
    tell(&mut world, CONFIG_FLOW_DROPS)?;
    arrive(
        &mut world,
        Hook::Tc,
        BY_STRANGER,
        &to_home(TCP, FAMILIES[0], 80).bytes(),
    )?;
    let events = take(&mut world)?;
    let facts: Vec<_> = events
        .iter()
        .map(|event| (event.counter, event.set, event.rank))
        .collect();
    ensure!(
        facts == [(Counter::PolicyIngress as u32, INGRESS, NO_RULE)],
        "{events:#?}"
    );
    Ok(())
}

#[test]
fn what_is_passed_on_or_has_no_addresses_is_not_told() -> Result<()> {
    let mut world = telling(ALL)?;
    let inner = Packet::udp([2; 6], ip(10, 0, 1, 40), ip(10, 0, 3, 33)).bytes();
    let bounced = Tunnel::new(SECOND, HERE, 100).around(ETHERNET, &inner);
    let forged = Packet::udp([2; 6], TENANT.address, ip(10, 0, 1, 50)).bytes();
    let to_node = Packet::udp([2; 6], TENANT.address, HERE).bytes();
    for hook in [Hook::Tc, Hook::Xdp] {
        // Addresses that the previous packet left behind must not show.
        world.run(AGENT, hook, &direct())?;
        take(&mut world)?;
        for (role, frame) in [
            (Role::Transit, &bounced),
            (Role::Transit, &to_node),
            (AGENT, &forged),
        ] {
            let events = told(&mut world, role, hook, frame)?;
            ensure!(events.is_empty(), "{role:?} {hook:?}: {events:#?}");
        }
    }
    Ok(())
}

#[test]
fn nothing_is_written_without_the_flags() -> Result<()> {
    let mut world = telling(0)?;
    for hook in [Hook::Tc, Hook::Xdp] {
        for frame in [direct(), outside()] {
            ensure!(told(&mut world, AGENT, hook, &frame)?.is_empty());
        }
    }
    ensure!(seen(&world)?.is_empty() && budgets(&world)?.is_empty());
    Ok(())
}

#[test]
fn a_flood_is_told_within_the_budget_and_the_rest_counted() -> Result<()> {
    const FLOWS: u16 = 10_000;
    let mut world = telling(ALL)?;
    world.enter()?;
    let before = world.programs.counter(Counter::FlowsOverBudget)?;
    let begun = Instant::now();
    let mut events = 0;
    for port in 1..=FLOWS {
        let payload = udp(60_000, port, b"hello");
        let packet = Packet::udp(TENANT.mac(), TENANT.address, ip(10, 0, 1, 50));
        let frame = packet.carrying(17, &payload).bytes();
        world.run_uncounted(AGENT, Hook::Tc, &frame, 0)?;
        if port % 500 == 0 {
            events += take(&mut world)?.len();
        }
    }
    let seconds = usize::try_from(begun.elapsed().as_secs())? + 2;
    let share = FLOW_EVENTS_PER_SECOND as usize;
    ensure!(
        events >= share && events <= share * seconds,
        "{events} in {seconds} s"
    );
    let over = world.programs.counter(Counter::FlowsOverBudget)? - before;
    ensure!(
        over + events as u64 == u64::from(FLOWS),
        "{over} beside {events} events"
    );
    // Each flow has an entry for its verdict, and one that says that it is known.
    ensure!(seen(&world)?.len() == 2 * events);
    ensure!(world.programs.counter(Counter::FlowTableFull)? == 0);
    // Drops of the VPC, and another VPC, have budgets of their own.
    ensure!(told(&mut world, AGENT, Hook::Tc, &outside())?.len() == 1);
    let guest = Packet::udp(GUEST.mac(), GUEST.address, ip(8, 8, 8, 8)).bytes();
    ensure!(told(&mut world, Role::Agent(GUEST.index), Hook::Tc, &guest)?.len() == 1);
    Ok(())
}

#[test]
fn unknown_vpcs_of_the_wire_share_one_budget() -> Result<()> {
    let mut world = telling(ALL)?;
    let inner = Packet::udp([2; 6], ip(10, 0, 1, 40), TENANT.address).bytes();
    for vni in 5000..5003 {
        let frame = Tunnel::new(SECOND, HERE, vni).around(ETHERNET, &inner);
        let events = told(&mut world, Role::Transit, Hook::Tc, &frame)?;
        let facts: Vec<_> = events.iter().map(|event| (event.vni, event.counter)).collect();
        ensure!(facts == [(vni, Counter::UnknownVni as u32)], "{events:#?}");
    }
    let expected = FlowBudgetKey {
        vni: 0,
        is_of_drops: 1,
    };
    ensure!(budgets(&world)? == [expected]);
    Ok(())
}

#[test]
fn an_event_without_room_is_counted() -> Result<()> {
    const MOST: u16 = 10_000;
    let mut world = telling(ALL)?;
    world.enter()?;
    let budget = FlowBudgetKey {
        vni: 100,
        is_of_drops: 0,
    };
    let before = world.programs.counter(Counter::FlowEventsLost)?;
    let mut sent = 0;
    while world.programs.counter(Counter::FlowEventsLost)? == before {
        sent += 1;
        ensure!(sent < MOST, "nothing was lost of {sent} events");
        let fresh = FlowBudgetEntry::default();
        world.programs.insert("FLOW_BUDGETS", budget, fresh)?;
        let payload = udp(60_000, sent, b"hello");
        let packet = Packet::udp(TENANT.mac(), TENANT.address, ip(10, 0, 1, 50));
        let frame = packet.carrying(17, &payload).bytes();
        world.run_uncounted(AGENT, Hook::Tc, &frame, 0)?;
    }
    let events = take(&mut world)?.len();
    ensure!(events + 1 == usize::from(sent), "{events} of {sent} events");
    Ok(())
}

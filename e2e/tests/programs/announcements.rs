//! Destinations that an agent announces, so that user space asks for direct rows.

use std::net::Ipv4Addr;

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    tables::{
        ANNOUNCEMENTS_PER_SECOND, AnnouncedEntry, AttachmentEntry, EndpointEntry, MissEntry,
        NOTED_PER_WINDOW, SubnetEntry, VpcEntry,
    },
};
use thuban_e2e::programs::{key, members};

use crate::{
    frames::Packet,
    rows::{Endpoint, SECOND, SPREAD, STRAY, TENANT, ip},
    world::{Hook, Role, World},
};

fn packet(endpoint: Endpoint, to: Ipv4Addr) -> Packet {
    Packet::udp(endpoint.mac(), endpoint.address, to)
}

#[test]
fn flows_that_stay_are_announced() -> Result<()> {
    let mut world = World::new()?;
    let wanted = |world: &mut World| world.programs.take_wanted();
    let frame = packet(TENANT, ip(10, 0, 2, 90)).bytes();
    let mut announced = Vec::new();
    for number in 1..=20 {
        world.run(Role::Agent(TENANT.index), Hook::Tc, &frame)?;
        for event in wanted(&mut world)? {
            ensure!(event == key(100, ip(10, 0, 2, 90)), "{event:?}");
            announced.push(number);
        }
    }
    ensure!(announced == [3, 4, 8, 16], "{announced:?}");
    ensure!(world.programs.counter(Counter::DirectWanted)? == 4);
    // A direct row ends the announcements, and is marked as used.
    let direct = key(100, ip(10, 0, 1, 50));
    for _ in 0..5 {
        world.run(
            Role::Agent(TENANT.index),
            Hook::Tc,
            &packet(TENANT, ip(10, 0, 1, 50)).bytes(),
        )?;
    }
    ensure!(wanted(&mut world)?.is_empty());
    ensure!(world.programs.get::<_, EndpointEntry>("ENDPOINTS", &direct)?.used == 1);
    Ok(())
}

/// Sends the packet that is announced, the third one to its destination, and returns what was counted.
fn announce(world: &mut World, endpoint: Endpoint) -> Result<Option<Counter>> {
    let to = ip(10, 0, 2, 90);
    let (place, tag) = MissEntry::place(&key(endpoint.vni, to), 0);
    world
        .programs
        .set("MISSES", place, MissEntry { tag, packets: 2 })?;
    let before = world.programs.counter(Counter::DirectPaced)?;
    let frame = packet(endpoint, to).bytes();
    world.run(Role::Agent(endpoint.index), Hook::Tc, &frame)?;
    let is_paced = world.programs.counter(Counter::DirectPaced)? > before;
    let events = world.programs.take_wanted()?;
    ensure!(events.len() == usize::from(!is_paced), "{events:?}");
    ensure!(events.iter().all(|event| *event == key(endpoint.vni, to)));
    Ok(is_paced.then_some(Counter::DirectPaced))
}

/// Writes that the VPC had announced this many destinations in the second of its last announcement.
fn had(world: &mut World, vni: u32, events: u32) -> Result<u32> {
    let mut entry: AnnouncedEntry = world.programs.get("ANNOUNCED", &vni)?;
    let second = entry.second;
    entry.events = events;
    world.programs.insert("ANNOUNCED", vni, entry)?;
    Ok(second)
}

#[test]
fn a_vpc_that_scans_is_paced_and_delays_no_other() -> Result<()> {
    let mut world = World::new()?;
    // The test repeats this if a second ended meanwhile.
    for _ in 0..20 {
        ensure!(announce(&mut world, TENANT)?.is_none());
        let second = had(&mut world, TENANT.vni, ANNOUNCEMENTS_PER_SECOND - 1)?;
        let last = announce(&mut world, TENANT)?;
        let beyond = announce(&mut world, TENANT)?;
        let other = announce(&mut world, SPREAD)?;
        if had(&mut world, TENANT.vni, ANNOUNCEMENTS_PER_SECOND)? != second {
            continue;
        }
        ensure!(last.is_none(), "the last of its share");
        ensure!(beyond == Some(Counter::DirectPaced));
        ensure!(other.is_none(), "another VPC's");
        // The next second has a new share.
        let passed = AnnouncedEntry {
            second: second - 1,
            events: u32::MAX - 1,
            window: 0,
            noted: 0,
        };
        world.programs.insert("ANNOUNCED", TENANT.vni, passed)?;
        ensure!(announce(&mut world, TENANT)?.is_none(), "another second");
        return Ok(());
    }
    anyhow::bail!("every second ended too soon")
}

/// VPCs on the interface of [`STRAY`], one at a time, that send to every address.
struct Scanner {
    vni: u32,
    next: u32,
}

impl Scanner {
    fn new(world: &mut World, vni: u32) -> Result<Self> {
        let entry = SubnetEntry {
            network: 0,
            flags: 0,
            bouncers: members(&[]),
        };
        world.programs.insert_subnet(vni, ip(10, 0, 0, 0), 8, entry)?;
        let vpc = VpcEntry::new(vni, 0, members(&[SECOND]));
        world.programs.insert("VPCS", vni, vpc)?;
        Ok(Self { vni, next: 0 })
    }

    /// Sends one packet each to this many addresses to which it never sent before.
    fn scan(&mut self, world: &mut World, addresses: u32) -> Result<()> {
        let interface = world.interfaces[usize::from(STRAY.index)];
        let attachment = AttachmentEntry {
            ifindex: interface,
            vni: self.vni,
            address: key(self.vni, STRAY.address).address,
            network: 1,
            mac: STRAY.mac(),
            flags: 0,
            outer_dscp: 0,
            class: 0,
            ingress_set: 0,
            egress_set: 0,
        };
        world.programs.insert("ATTACHMENTS", interface, attachment)?;
        let mut frame = packet(STRAY, ip(10, 0, 0, 0)).bytes();
        for _ in 0..addresses {
            self.next += 1;
            frame[30..34].copy_from_slice(&(0x0a80_0000 + self.next).to_be_bytes());
            let outcome = world.run_uncounted(Role::Agent(STRAY.index), Hook::Tc, &frame, 0)?;
            ensure!(outcome.verdict == 7, "{}", outcome.verdict);
        }
        Ok(())
    }
}

#[test]
fn slow_flow_is_announced_beside_vpcs_that_scan() -> Result<()> {
    // The test repeats this if a window ended meanwhile: with the shares of two windows, the scans take the place of
    // one address in eight.
    for _ in 0..10 {
        let mut world = World::new()?;
        world.enter()?;
        let (announced, is_one_window) = send_between_scans(&mut world)?;
        if is_one_window {
            ensure!(announced == [3], "{announced:?}");
            ensure!(world.programs.counter(Counter::DirectPaced)? > 0);
            return Ok(());
        }
    }
    anyhow::bail!("every window ended too soon")
}

/// Sends three packets to one address while four VPCs scan. Returns the numbers of those that were announced, and
/// whether all fell into one window.
fn send_between_scans(world: &mut World) -> Result<(Vec<u32>, bool)> {
    let vnis = 200..204;
    let mut scanners = Vec::new();
    for vni in vnis.clone() {
        scanners.push(Scanner::new(world, vni)?);
    }
    let frame = packet(TENANT, ip(10, 0, 2, 90)).bytes();
    let mut announced = Vec::new();
    for number in 1..=3 {
        world.run(Role::Agent(TENANT.index), Hook::Tc, &frame)?;
        for event in world.programs.take_wanted()? {
            ensure!(event == key(100, ip(10, 0, 2, 90)), "packet {number}: {event:?}");
            announced.push(number);
        }
        // This is three seconds at 2,000 packets a second: three times what a VPC may have noted. Beside other tests a
        // longer scan takes longer than a window.
        for scanner in &mut scanners {
            scanner.scan(world, 6_000)?;
        }
    }
    let noted_at =
        |vni: u32| -> Result<u32> { Ok(world.programs.get::<_, AnnouncedEntry>("ANNOUNCED", &vni)?.window) };
    // The first packet took a place in the first window, each scan tried for one in the latest.
    Ok((announced, noted_at(TENANT.vni)? == noted_at(vnis.end - 1)?))
}

#[test]
fn a_vpc_adds_its_share_of_addresses_in_a_window() -> Result<()> {
    let mut world = World::new()?;
    world.run(
        Role::Agent(TENANT.index),
        Hook::Tc,
        &packet(TENANT, ip(10, 0, 2, 90)).bytes(),
    )?;
    // The test repeats this if a window ended meanwhile.
    for last in 100..120 {
        let to = ip(10, 0, 2, last);
        let mut entry: AnnouncedEntry = world.programs.get("ANNOUNCED", &TENANT.vni)?;
        entry.noted = NOTED_PER_WINDOW;
        world.programs.insert("ANNOUNCED", TENANT.vni, entry)?;
        let is_noted = |world: &mut World, endpoint: Endpoint| -> Result<bool> {
            world.run(
                Role::Agent(endpoint.index),
                Hook::Tc,
                &packet(endpoint, to).bytes(),
            )?;
            let (place, tag) = MissEntry::place(&key(endpoint.vni, to), 0);
            let entry: MissEntry = world.programs.element("MISSES", place)?;
            Ok(entry == MissEntry { tag, packets: 1 })
        };
        let paced = world.programs.counter(Counter::DirectPaced)?;
        let beyond = is_noted(&mut world, TENANT)?;
        let other = is_noted(&mut world, SPREAD)?;
        ensure!(other, "another VPC's");
        let now: AnnouncedEntry = world.programs.get("ANNOUNCED", &TENANT.vni)?;
        if now.window != entry.window {
            continue;
        }
        ensure!(!beyond && world.programs.counter(Counter::DirectPaced)? == paced + 1);
        // The next window has a new share.
        let passed = AnnouncedEntry {
            window: entry.window - 1,
            ..entry
        };
        world.programs.insert("ANNOUNCED", TENANT.vni, passed)?;
        ensure!(is_noted(&mut world, TENANT)?, "another window");
        return Ok(());
    }
    anyhow::bail!("every window ended too soon")
}

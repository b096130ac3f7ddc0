//! Destinations that an agent announces, so that user space asks for direct rows.

use std::net::Ipv4Addr;

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    tables::{ANNOUNCEMENTS_PER_SECOND, AnnouncedEntry, MissEntry, RemoteEntry},
};
use thuban_e2e::programs::key;

use crate::{
    frames::Packet,
    rows::{Endpoint, SPREAD, TENANT, ip},
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
    // A direct row ends that, and is marked as used.
    let direct = key(100, ip(10, 0, 1, 50));
    for _ in 0..5 {
        world.run(
            Role::Agent(TENANT.index),
            Hook::Tc,
            &packet(TENANT, ip(10, 0, 1, 50)).bytes(),
        )?;
    }
    ensure!(wanted(&mut world)?.is_empty());
    ensure!(world.programs.get::<_, RemoteEntry>("DIRECT_ROWS", &direct)?.used == 1);
    Ok(())
}

/// Sends the packet that is announced, the third of its destination, and says what was counted.
fn announce(world: &mut World, endpoint: Endpoint) -> Result<Option<Counter>> {
    let to = ip(10, 0, 2, 90);
    let misses = MissEntry { packets: 2 };
    world.programs.insert("MISSES", key(endpoint.vni, to), misses)?;
    let before = world.programs.counter(Counter::DirectPaced)?;
    let frame = packet(endpoint, to).bytes();
    world.run(Role::Agent(endpoint.index), Hook::Tc, &frame)?;
    let is_paced = world.programs.counter(Counter::DirectPaced)? > before;
    let events = world.programs.take_wanted()?;
    ensure!(events.len() == usize::from(!is_paced), "{events:?}");
    ensure!(events.iter().all(|event| *event == key(endpoint.vni, to)));
    Ok(is_paced.then_some(Counter::DirectPaced))
}

/// As if the VPC had announced so many in the second of its last announcement.
fn had(world: &mut World, vni: u32, events: u32) -> Result<u32> {
    let AnnouncedEntry { second, .. } = world.programs.get("ANNOUNCED", &vni)?;
    let entry = AnnouncedEntry { second, events };
    world.programs.insert("ANNOUNCED", vni, entry)?;
    Ok(second)
}

#[test]
fn a_vpc_that_scans_is_paced_and_delays_no_other() -> Result<()> {
    let mut world = World::new()?;
    // Again if a second ended meanwhile.
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
        // The next second is a new share.
        let passed = AnnouncedEntry {
            second: second - 1,
            events: u32::MAX - 1,
        };
        world.programs.insert("ANNOUNCED", TENANT.vni, passed)?;
        ensure!(announce(&mut world, TENANT)?.is_none(), "another second");
        return Ok(());
    }
    anyhow::bail!("every second ended too soon")
}

//! Drops of agents, by interface and reason.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, MapData};
use thuban_common::{counters::Counter, tables::DropKey};

use crate::{
    frames::{Packet, Tunnel},
    rows::{GUEST, HERE, SECOND, TENANT, ip},
    world::{Hook, Role, World},
};

fn drops(world: &World) -> Result<BTreeMap<DropKey, u64>> {
    let map = world.programs.ebpf.map("DROPS").context("DROPS")?;
    let map: HashMap<&MapData, DropKey, u64> = map.try_into()?;
    Ok(map.iter().collect::<Result<_, _>>()?)
}

/// Returns the key of drops of TENANT's agent.
fn of_tenant(world: &World, reason: Counter) -> DropKey {
    DropKey {
        interface: world.interfaces[usize::from(TENANT.index)],
        reason: reason as u32,
    }
}

#[test]
fn an_agent_counts_drops_by_interface_and_reason() -> Result<()> {
    let mut world = World::new()?;
    let tenant = Role::Agent(TENANT.index);
    let outside = Packet::udp(TENANT.mac(), TENANT.address, ip(8, 8, 8, 8)).bytes();
    let spoofed = Packet::udp([2; 6], TENANT.address, ip(10, 0, 1, 12)).bytes();
    for hook in [Hook::Tc, Hook::Xdp] {
        world.run(tenant, hook, &outside)?;
    }
    world.run(tenant, Hook::Tc, &spoofed)?;
    let expected = BTreeMap::from([
        (of_tenant(&world, Counter::OutsideVpc), 2),
        (of_tenant(&world, Counter::SpoofedMac), 1),
    ]);
    let counted = drops(&world)?;
    ensure!(counted == expected, "{counted:?}");
    let stolen = Packet::udp(TENANT.mac(), TENANT.address, ip(8, 8, 8, 8)).bytes();
    world.run(Role::Agent(GUEST.index), Hook::Tc, &stolen)?;
    ensure!(drops(&world)?.len() == 3, "another interface");
    Ok(())
}

#[test]
fn what_passes_and_what_transit_drops_is_nobodys_drop() -> Result<()> {
    let mut world = World::new()?;
    let direct = Packet::udp(TENANT.mac(), TENANT.address, ip(10, 0, 1, 50)).bytes();
    let local = Packet::udp(TENANT.mac(), TENANT.address, ip(10, 0, 1, 12)).bytes();
    let inner = Packet::udp([2, 0, 0, 0, 0, 9], ip(10, 0, 1, 40), ip(8, 8, 8, 8)).bytes();
    let wrapped = Tunnel::new(SECOND, HERE, 100).around([2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2], &inner);
    for hook in [Hook::Tc, Hook::Xdp] {
        world.run(Role::Agent(TENANT.index), hook, &direct)?;
        world.run(Role::Agent(TENANT.index), hook, &local)?;
        let outcome = world.run(Role::Transit, hook, &wrapped)?;
        let is_dropped = outcome.counted.contains_key(Counter::NoEndpoint.name());
        ensure!(is_dropped, "{:?}", outcome.counted);
    }
    let counted = drops(&world)?;
    ensure!(counted.is_empty(), "{counted:?}");
    Ok(())
}

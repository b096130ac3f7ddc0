//! The data plane between three droplets: real sockets over real veths, with every kind of transit.

mod checksums;
mod forger;
mod forwarders;
mod fronts;
mod isolation;
mod limits;
mod moves;
mod offloads;
mod paths;
mod policies;
mod probes;
mod rejections;
mod services;
mod underlay;

use anyhow::Result;
use thuban_common::counters::Counter;
use thuban_e2e::rig::{Transit, topology::Topology};

/// Runs a scenario with every kind of transit.
fn each(scenario: impl Fn(&mut Topology) -> Result<()>) -> Result<()> {
    for transit in Transit::ALL {
        run(&mut Topology::new(transit)?, &scenario)?;
    }
    Ok(())
}

/// Runs a scenario and prints the counters if it fails.
fn run(topology: &mut Topology, scenario: &impl Fn(&mut Topology) -> Result<()>) -> Result<()> {
    let transit = topology.transit;
    scenario(topology).map_err(|error| {
        topology.rig.print_counters();
        error.context(format!("transit at {transit:?}"))
    })
}

/// Returns a counter of a droplet, by its number from 1.
fn counter(topology: &Topology, droplet: usize, counter: Counter) -> Result<u64> {
    topology.rig.droplets[droplet - 1].programs.counter(counter)
}

//! The data plane between three droplets: real sockets over real veths, both ways of transit.

mod isolation;
mod paths;

use thuban_e2e::rig::{Transit, topology::Topology};

/// Runs a scenario with transit at XDP and at tc, and prints the counters of a failing one.
fn both(scenario: impl Fn(&mut Topology) -> anyhow::Result<()>) -> anyhow::Result<()> {
    for transit in [Transit::Xdp, Transit::Tc] {
        let mut topology = Topology::new(transit)?;
        if let Err(error) = scenario(&mut topology) {
            topology.rig.print_counters();
            return Err(error.context(format!("transit at {transit:?}")));
        }
    }
    Ok(())
}

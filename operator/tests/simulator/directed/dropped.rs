//! Dropped packets of pods: a pod is told by an event, if it is its own droplet that dropped them.

use std::time::Duration;

use thuban_common::counters::Counter;
use thuban_proto::transit::{Denials, Dropped};
use tokio::time::sleep;

use super::{begin_in_use, check, end_everything, until};
use crate::droplet::Report;
use crate::simulation::{Simulation, State};

/// Has a droplet report that packets of a pod were dropped.
fn report(simulation: &Simulation, droplet: &str, pod: &str, reason: Counter) {
    simulation.with(|state| {
        let mut locals = state
            .droplets
            .values()
            .flat_map(|droplet| droplet.tables.locals());
        let row = locals.find(|row| row.pod_name == pod).expect("a pod's row");
        let dropped = Dropped {
            vni: row.vni,
            address: row.address.clone(),
            reason: reason as u32,
            packets: 3,
        };
        let report = Denials {
            drops: vec![dropped],
            ..Denials::default()
        };
        let stream = state.droplets[droplet].stream.as_ref().expect("a stream");
        let _ = stream.outbox.send(Report::Denials(report));
    });
}

fn is_told(state: &State, pod: &str) -> bool {
    let told = ["Pod", pod, "PacketsDropped"].map(str::to_owned);
    state.told.contains(&told.into())
}

#[test]
fn a_pod_is_told_of_its_dropped_packets() {
    for seed in 1..=3 {
        check("dropped", seed, async |simulation| {
            begin_in_use(simulation, 1).await;
            // `p` lives on n0, and `q` on n1.
            report(simulation, "n0", "p", Counter::ArpIgnored);
            report(simulation, "n0", "q", Counter::OutsideVpc);
            sleep(Duration::from_mins(1)).await;
            simulation.with(|state| assert!(!is_told(state, "p") && !is_told(state, "q")));
            report(simulation, "n0", "p", Counter::OutsideVpc);
            until(simulation, "the pod is told", |state| is_told(state, "p")).await;
            simulation.with(|state| assert!(!is_told(state, "q")));
            end_everything(simulation).await;
        });
    }
}

//! Tells thuban-observe of the flows that the programs tell of.
//!
//! Invariant: nothing of the node waits for this task. It asks the state only who denies a packet, once for each rule.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use thuban_proto::observe::{Flow, FlowMode as Told};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{error, warn};

use crate::dataplane::untold_flows;
use crate::dial::lease::Locator;
use crate::flows::flow::of_rest;
use crate::flows::queue::{MAX_WAITING, Queue};
use crate::flows::reader;
use crate::flows::relay::{self, Droplet, Pace};
use crate::node::Node;
use crate::settings::FlowMode;
use crate::{boot, metrics};

/// The time between looks for flows that have gone silent before all of them was told.
const REST_INTERVAL: Duration = Duration::from_secs(30);
/// The most of these flows at one look. The queue keeps room for events.
const MAX_RESTS: usize = MAX_WAITING / 2;

/// Runs until the daemon ends. Does nothing if the programs tell of no flows.
pub async fn run(node: Arc<Node>, locator: Locator) {
    let mode = match node.settings.flow_mode() {
        FlowMode::Off => return,
        FlowMode::Drops => Told::Drops,
        FlowMode::All => Told::All,
    };
    let droplet = Droplet {
        name: node.settings.node_name.clone(),
        mode,
        token_file: node.settings.observe_token_file.clone(),
    };
    let maps = node.settings.pins.maps();
    let queue = Queue::new(metrics::flows());
    let denier = |vni, set, rank| node.state().policies.denier(vni, set, rank);
    let pace = Pace::default();
    tokio::select! {
        Err(error) = reader::run(&maps, &queue, denier) => error!(
            error = &error as &dyn std::error::Error,
            "flows of this node are not shown any more, until transitd starts again"
        ),
        () = tell_rests(&maps, &queue) => {}
        () = relay::run(locator, &droplet, &queue, &pace) => {}
    }
    metrics::flows().connected.set(0);
}

/// Adds again and again what is untold of flows that have gone silent.
async fn tell_rests(maps: &Path, queue: &Queue) {
    let mut interval = interval(REST_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let maps = maps.to_owned();
        match tokio::task::spawn_blocking(move || rests(&maps)).await {
            Ok(flows) => queue.add(flows),
            // Events are told on.
            Err(error) => warn!(
                error = &error as &dyn std::error::Error,
                "a look for flows that have gone silent did not end"
            ),
        }
    }
}

/// Takes what is untold of flows that have gone silent. May take milliseconds.
fn rests(maps: &Path) -> Vec<Flow> {
    let now = boot::monotonic().as_nanos() as u64;
    let mut flows = Vec::new();
    let taken = untold_flows::take_rests(maps, now, MAX_RESTS, |key, entry| {
        flows.push(of_rest(key, entry, now));
    });
    if let Err(error) = taken {
        warn!(
            error = &error as &dyn std::error::Error,
            "the last packets of flows that have gone silent are told later"
        );
    }
    flows
}

//! Metrics of the flows that this node tells thuban-observe of.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use thuban_proto::observe::Lost;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Caused {
    cause: &'static str,
}

/// The metrics. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct FlowMetrics {
    pub events: Counter,
    lost: Family<Caused, Counter>,
    /// 1 while thuban-observe answers on a stream.
    pub connected: Gauge,
}

impl FlowMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "flow_events",
            "Events of flows that transitd took from the programs",
            self.events.clone(),
        );
        registry.register(
            "flow_events_lost",
            "Events of flows that thuban-observe does not hear of, by the place where they were lost",
            self.lost.clone(),
        );
        registry.register(
            "observe_connected",
            "1 while the stream to thuban-observe is open",
            self.connected.clone(),
        );
    }

    /// Counts what was lost.
    pub fn loses(&self, lost: Lost) {
        let causes = [
            ("budget", lost.budget),
            ("table", lost.table),
            ("ring", lost.ring),
            ("stream", lost.stream),
        ];
        for (cause, events) in causes {
            if events > 0 {
                self.lost.get_or_create(&Caused { cause }).inc_by(events);
            }
        }
    }

    /// Returns how many events were lost for a cause.
    pub fn lost(&self, cause: &'static str) -> u64 {
        self.lost.get_or_create(&Caused { cause }).get()
    }
}

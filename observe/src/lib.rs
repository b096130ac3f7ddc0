//! thuban-observe: the relay of flows. Droplets dial it and tell of flows; readers ask it, each for a namespace that it
//! may read, and get names in place of addresses.
//!
//! It only reads: nothing that it does changes a packet's fate. It holds no state beyond its memory.
//! See `docs/adr/0050-flows-are-read-at-a-relay.md`.

pub mod announcement;
pub mod api;
pub mod flow;
pub mod graph;
pub mod metrics;
pub mod names;
pub mod page;
pub mod places;
pub mod relay;
pub mod reports;
pub mod series;
pub mod server;
pub mod settings;
pub mod store;
pub mod top;
pub mod view;

use std::env;
use std::sync::LazyLock;

/// Namespace of thuban-observe where nothing else is said.
const DEFAULT_NAMESPACE: &str = "thuban-observe";

/// Returns the namespace of thuban-observe: that of its own pod, which its manifest writes into
/// `THUBAN_OBSERVE_NAMESPACE`. Thuban's own namespace, in which transitd is, is another one.
pub fn namespace() -> &'static str {
    static NAMESPACE: LazyLock<String> = LazyLock::new(|| {
        env::var("THUBAN_OBSERVE_NAMESPACE").unwrap_or_else(|_| DEFAULT_NAMESPACE.to_owned())
    });
    &NAMESPACE
}

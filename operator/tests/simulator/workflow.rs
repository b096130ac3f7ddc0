//! Finds the workflow that makes a request: kube's controller opens a span for the object that it reconciles, and
//! requests are made within that span.

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Span, Subscriber};
use tracing_subscriber::filter::{LevelFilter, filter_fn};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, Registry};
use tracing_subscriber::{EnvFilter, Layer};

/// The name of the span that kube-runtime's controller opens.
const SPAN: &str = "reconciling object";
/// The span's field with the object.
const OBJECT: &str = "object.ref";

/// The object of a span, as kube writes it.
#[derive(Clone, Default)]
struct Reconciled(String);

impl Visit for Reconciled {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == OBJECT {
            self.0 = format!("{value:?}");
        }
    }
}

struct Workflows;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Workflows {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut reconciled = Reconciled::default();
        attributes.record(&mut reconciled);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(reconciled);
        }
    }
}

/// Starts to record spans. With `RUST_LOG` it also writes the log.
pub fn watch() {
    let spans = filter_fn(|metadata| metadata.is_span() && metadata.name() == SPAN);
    let workflows = Workflows.with_filter(spans.with_max_level_hint(LevelFilter::INFO));
    let is_logged = std::env::var_os("RUST_LOG").is_some();
    let log = is_logged.then(|| tracing_subscriber::fmt::layer().with_filter(EnvFilter::from_default_env()));
    let subscriber = tracing_subscriber::registry().with(workflows).with(log);
    tracing::subscriber::set_global_default(subscriber).expect("no other subscriber");
}

/// Returns the object whose workflow is running: `Kind.version.group/name`, with `.namespace` if it has one.
pub fn current() -> Option<String> {
    let found = Span::current().with_subscriber(|(id, dispatch)| {
        let span = dispatch.downcast_ref::<Registry>()?.span(id)?;
        span.scope()
            .find_map(|span| span.extensions().get::<Reconciled>().cloned())
    });
    found.flatten().map(|reconciled| reconciled.0)
}

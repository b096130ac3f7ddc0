//! What small processes have in common: their log, rustls' provider, their end by a signal, addresses of servers,
//! whether they are ready, when their CA expires, and the pages of one registry.

use std::io;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use thiserror::Error;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::json::Lines;
use crate::{Answer, Pages, abort_on_panic, levels};

/// What `/readyz` says of a process that has not read the API server's objects.
pub const OBJECTS_UNREAD: &str = "the API server's objects are not read yet";

static IS_READY: AtomicBool = AtomicBool::new(false);
static CA_EXPIRY: LazyLock<Gauge> = LazyLock::new(Gauge::default);

/// Begins the process with its log on standard output, see [`begin_on`].
pub fn begin(levels: &str) {
    begin_on(levels, io::stdout);
}

/// Begins the log, with the levels that `RUST_LOG` or else `levels` says. With `THUBAN_LOG_FORMAT=json` each line is a
/// JSON object. [`control`](crate::control) changes the levels. From now on a panic ends the process. rustls uses ring.
pub fn begin_on<W>(levels: &str, writer: W)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let asked = std::env::var("RUST_LOG").ok().filter(|levels| !levels.is_empty());
    let asked = asked.filter(|levels| EnvFilter::try_new(levels).is_ok());
    let levels = asked.as_deref().unwrap_or(levels);
    let log = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(levels))
        .with_writer(writer)
        .with_ansi(false);
    if std::env::var("THUBAN_LOG_FORMAT").is_ok_and(|format| format == "json") {
        let log = log.event_format(Lines).with_filter_reloading();
        levels::keep(levels, log.reload_handle());
        log.init();
    } else {
        let log = log.with_filter_reloading();
        levels::keep(levels, log.reload_handle());
        log.init();
    }
    abort_on_panic();
    // The dependency tree has two providers, and rustls would choose none by itself. An error means that there is one
    // already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Does the work until it ends, or SIGTERM or SIGINT comes. As PID 1 a process gets no default handlers.
pub async fn until_signalled<E: From<io::Error>>(work: impl Future<Output = Result<(), E>>) -> Result<(), E> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        result = work => result,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

/// Why the address of a server can't be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum AddressError {
    #[error(
        "kubelet did not know the Service of {0} when it started this container: the container must start again"
    )]
    Unresolved(String),
}

/// Reads the host and port of a server. kubelet leaves `$(NAME)` as it is while it does not know the Service, and tells
/// the address only to a container that it starts later. So the process must end: it would never reach the server.
pub fn server_address(text: &str) -> Result<String, AddressError> {
    if text.contains("$(") {
        return Err(AddressError::Unresolved(text.to_owned()));
    }
    Ok(text.to_owned())
}

/// Notes whether this process can do its work.
pub fn set_ready(is_ready: bool) {
    IS_READY.store(is_ready, Ordering::Relaxed);
}

/// Whether this process can do its work, as it noted last.
pub fn is_ready() -> bool {
    IS_READY.load(Ordering::Relaxed)
}

/// Notes when the CA of this process expires, in seconds since 1970.
pub fn ca_expires(at: u64) {
    CA_EXPIRY.set(i64::try_from(at).unwrap_or(i64::MAX));
}

/// Has a registry show when the CA expires. `help` says which CA.
pub fn register_ca_expiry(registry: &mut Registry, help: &str) {
    registry.register("ca_expiry_timestamp_seconds", help, CA_EXPIRY.clone());
}

/// `/metrics` of a registry, and probes.
pub struct RegistryPages {
    pub registry: &'static Registry,
    /// What `/readyz` says before the process is ready.
    pub unready: &'static str,
}

impl Pages for RegistryPages {
    async fn answer(&self, path: &str) -> Answer {
        match path {
            "/metrics" => {
                let mut text = String::new();
                match encode(&mut text, self.registry) {
                    Ok(()) => Answer::Metrics(text),
                    Err(error) => Answer::Failed(error.to_string()),
                }
            }
            "/healthz" => Answer::Text("ok\n".to_owned()),
            "/readyz" if is_ready() => Answer::Text("ok\n".to_owned()),
            "/readyz" => Answer::Unready(format!("{}\n", self.unready)),
            _ => Answer::Unknown("/metrics, /healthz, /readyz\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use prometheus_client::registry::Registry;

    use super::{AddressError, RegistryPages, ca_expires, register_ca_expiry, server_address, set_ready};
    use crate::{Answer, Pages};

    #[tokio::test]
    async fn pages_say_when_a_process_is_ready_and_its_ca_expires() {
        static REGISTRY: LazyLock<Registry> = LazyLock::new(|| {
            let mut registry = Registry::with_prefix("thuban_test");
            register_ca_expiry(&mut registry, "When the CA of the test expires");
            registry
        });
        let pages = RegistryPages {
            registry: &REGISTRY,
            unready: "nothing is read yet",
        };
        let unready = Answer::Unready("nothing is read yet\n".to_owned());
        assert_eq!(pages.answer("/readyz").await, unready);
        set_ready(true);
        assert_eq!(pages.answer("/readyz").await, Answer::Text("ok\n".to_owned()));
        set_ready(false);
        assert_eq!(pages.answer("/readyz").await, unready);
        ca_expires(1_800_000_000);
        let Answer::Metrics(text) = pages.answer("/metrics").await else {
            panic!("no metrics");
        };
        assert!(
            text.contains("\nthuban_test_ca_expiry_timestamp_seconds 1800000000\n"),
            "{text}"
        );
    }

    #[test]
    fn an_address_that_kubelet_did_not_know_is_refused() {
        assert_eq!(server_address("10.96.0.9:6086").unwrap(), "10.96.0.9:6086");
        assert_eq!(
            server_address("cidrd.thuban-system.svc:6086").unwrap(),
            "cidrd.thuban-system.svc:6086"
        );
        let unknown = "$(CIDRD_SERVICE_HOST):$(CIDRD_SERVICE_PORT)";
        assert_eq!(
            server_address(unknown),
            Err(AddressError::Unresolved(unknown.to_owned()))
        );
    }
}

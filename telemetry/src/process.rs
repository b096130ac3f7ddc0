//! What small processes have in common: their log, rustls' provider, their end by a signal, addresses of servers, and
//! the pages of one registry.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use thiserror::Error;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::json::Lines;
use crate::{Answer, Pages, abort_on_panic, levels};

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

/// `/metrics` of a registry, and probes.
pub struct RegistryPages {
    pub registry: &'static Registry,
    pub is_ready: &'static AtomicBool,
    /// What `/readyz` says before.
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
            "/readyz" if self.is_ready.load(Ordering::Relaxed) => Answer::Text("ok\n".to_owned()),
            "/readyz" => Answer::Unready(format!("{}\n", self.unready)),
            _ => Answer::Unknown("/metrics, /healthz, /readyz\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{AddressError, server_address};

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

//! Serves `/metrics` for Prometheus, `/healthz` and `/readyz` for kubelet, on the node's address. Metrics are shown by
//! TLS to who may get `/metrics`, probes to everybody.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use thuban_authority::ServerCertificate;
use thuban_telemetry::{Answer, Pages, REQUEST_TIMEOUT};
use tokio::time::timeout;

use super::{leadership, text};

static IS_READY: AtomicBool = AtomicBool::new(false);

/// Sets whether the process is ready. A standby is ready when it could lead, a leader when it serves.
pub fn ready(is_ready: bool) {
    IS_READY.store(is_ready, Ordering::Relaxed);
}

/// The certificate of the page of metrics. There is none until the operator has its CA: probes don't wait for it.
#[derive(Debug, Default)]
pub struct PageCertificate(OnceLock<Arc<ServerCertificate>>);

impl PageCertificate {
    /// Has the page show this certificate from now on, as it is and will be.
    pub fn set(&self, certificate: Arc<ServerCertificate>) {
        // There is one CA in a process, so one certificate.
        let _ = self.0.set(certificate);
    }
}

impl ResolvesServerCert for PageCertificate {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.get()?.resolve(hello)
    }
}

#[derive(Debug)]
pub struct OperatorPages;

impl Pages for OperatorPages {
    async fn answer(&self, path: &str) -> Answer {
        let good = || Answer::Text("ok\n".to_owned());
        match path {
            "/metrics" => text().map_or_else(|error| Answer::Failed(error.to_string()), Answer::Metrics),
            "/healthz" if is_alive().await => good(),
            "/healthz" => Answer::Unready("the hub does not answer".to_owned()),
            "/readyz" if IS_READY.load(Ordering::Relaxed) => good(),
            "/readyz" => Answer::Unready("not ready yet".to_owned()),
            _ => Answer::Unknown("there are /metrics, /healthz and /readyz"),
        }
    }
}

/// Whether the process is alive: a leader whose hub is stuck is not.
async fn is_alive() -> bool {
    let Some(leadership) = leadership() else {
        return true;
    };
    let look = tokio::task::spawn_blocking(move || leadership.look());
    timeout(REQUEST_TIMEOUT / 2, look).await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn metrics_and_health_are_served_and_nothing_else() {
        let pages = OperatorPages;
        let Answer::Metrics(metrics) = pages.answer("/metrics").await else {
            panic!("no metrics")
        };
        assert!(metrics.contains("thuban_operator_leader"), "{metrics}");
        assert!(metrics.ends_with("# EOF\n"), "{metrics}");
        let good = Answer::Text("ok\n".into());
        assert_eq!(pages.answer("/healthz").await, good);
        ready(false);
        assert!(matches!(pages.answer("/readyz").await, Answer::Unready(_)));
        ready(true);
        assert_eq!(pages.answer("/readyz").await, good);
        assert!(matches!(pages.answer("/").await, Answer::Unknown(_)));
    }
}

//! Serves `/metrics` for Prometheus, `/healthz` and `/readyz` for kubelet, on the node's address. Metrics are shown by
//! TLS to who may get `/metrics`, probes to everybody.

use std::sync::{Arc, OnceLock};

use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use thuban_authority::ServerCertificate;
use thuban_telemetry::process::is_ready;
use thuban_telemetry::{Answer, Pages, REQUEST_TIMEOUT};
use tokio::time::timeout;

use super::{leadership, text};

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

/// Metrics and probes. A standby is ready when it could lead, a leader when it serves.
#[derive(Debug)]
pub struct OperatorPages;

impl Pages for OperatorPages {
    async fn answer(&self, path: &str) -> Answer {
        let good = || Answer::Text("ok\n".to_owned());
        match path {
            "/metrics" => text().map_or_else(|error| Answer::Failed(error.to_string()), Answer::Metrics),
            "/healthz" if is_alive().await => good(),
            "/healthz" => Answer::Unready("the hub does not answer".to_owned()),
            "/readyz" if is_ready() => good(),
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
    use thuban_telemetry::process::set_ready;

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
        set_ready(false);
        assert!(matches!(pages.answer("/readyz").await, Answer::Unready(_)));
        set_ready(true);
        assert_eq!(pages.answer("/readyz").await, good);
        assert!(matches!(pages.answer("/").await, Answer::Unknown(_)));
    }
}

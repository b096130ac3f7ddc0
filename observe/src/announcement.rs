//! Tells droplets where thuban-observe is: by annotations of a Lease, as the operator does. It is written when it
//! changes, not to show that this process lives.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{ObjectMeta, Patch, PatchParams};
use kube::{Api, Client};
use thuban_api::{ADDRESS_ANNOTATION, CA_BUNDLE_ANNOTATION, VERSION_ANNOTATION};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::namespace;

/// The Lease.
const LEASE: &str = "thuban-observe";
/// Who owns the annotations.
const MANAGER: &str = "thuban-observe";
/// The pause after a write that failed.
const RETRY: Duration = Duration::from_secs(2);
/// How often the Lease is written without news: somebody may have deleted it.
const AGAIN: Duration = Duration::from_mins(10);

/// Writes the address (host:port) and the CA bundle, and again when the bundle changes. Returns when the bundle can't
/// change any more.
pub async fn announce(client: Client, address: String, mut bundle: watch::Receiver<String>) {
    let api: Api<Lease> = Api::namespaced(client, namespace());
    let parameters = PatchParams::apply(MANAGER).force();
    loop {
        let lease = lease(&address, bundle.borrow_and_update().clone());
        match api.patch(LEASE, &parameters, &Patch::Apply(&lease)).await {
            Ok(_) => {
                if let Ok(Err(_)) = timeout(AGAIN, bundle.changed()).await {
                    return;
                }
            }
            Err(error) => {
                warn!(
                    lease = LEASE,
                    %error,
                    "droplets are not told where thuban-observe is, trying again: may it patch the Lease?"
                );
                sleep(RETRY).await;
            }
        }
    }
}

fn lease(address: &str, bundle: String) -> Lease {
    let annotations = [
        (ADDRESS_ANNOTATION, address.to_owned()),
        (CA_BUNDLE_ANNOTATION, bundle),
        (VERSION_ANNOTATION, env!("CARGO_PKG_VERSION").to_owned()),
    ];
    let annotations = annotations.map(|(name, value)| (name.to_owned(), value));
    Lease {
        metadata: ObjectMeta {
            name: Some(LEASE.to_owned()),
            annotations: Some(annotations.into()),
            ..ObjectMeta::default()
        },
        ..Lease::default()
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::sync::{Arc, Mutex};

    use serde_json::Value;
    use thuban_client::played::{self, Method};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_lease_has_address_and_bundle_and_follows_news() {
        let written: Arc<Mutex<Vec<Value>>> = Arc::default();
        let server = written.clone();
        let client = played::client(move |request| {
            assert_eq!(request.method, Method::PATCH);
            assert!(
                request
                    .path
                    .ends_with("/namespaces/thuban-observe/leases/thuban-observe")
            );
            let lease: Value = serde_json::from_slice(&request.body).unwrap();
            let answer = (200, lease.to_string());
            server.lock().unwrap().push(lease);
            ready(answer)
        });
        let (sender, bundle) = watch::channel("A".to_owned());
        let announced = tokio::spawn(announce(client, "10.244.0.9:6091".to_owned(), bundle));
        sleep(AGAIN / 2).await;
        sender.send_replace("A, B".to_owned());
        sleep(RETRY).await;
        drop(sender);
        announced.await.unwrap();
        let written = written.lock().unwrap();
        let annotation = |lease: &Value, name: &str| lease["metadata"]["annotations"][name].clone();
        let bundles: Vec<Value> = written
            .iter()
            .map(|lease| annotation(lease, "thuban.dev/ca-bundle"))
            .collect();
        assert_eq!(bundles, ["A", "A, B"]);
        assert_eq!(annotation(&written[0], "thuban.dev/address"), "10.244.0.9:6091");
    }
}

//! Publishes the certificates that verify a CA's servers in a ConfigMap, for clients that may not read the Secret: RBAC
//! shows a Secret as a whole, with the key.

use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ObjectMeta, Patch, PatchParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::{LOOK, Names};

/// The key of the ConfigMap that has the certificates, as PEM.
const KEY: &str = "ca.crt";
/// The first pause after a publication that failed. Each pause is twice as long as the one before, up to [`LOOK`].
const RETRY: Duration = Duration::from_secs(2);
/// How often the bundle is published without news: somebody may have deleted or changed the ConfigMap.
const AGAIN: Duration = Duration::from_mins(10);

/// Publishes the bundle in the ConfigMap that has the name of the CA's Secret, and again when the bundle changes.
/// `manager` names this program as the owner of the fields. Several processes may publish the same bundle. Returns when
/// the bundle can't change any more.
pub async fn publish(
    client: Client,
    names: Names,
    manager: &'static str,
    mut bundle: watch::Receiver<String>,
) {
    let api: Api<ConfigMap> = Api::namespaced(client, (names.namespace)());
    let parameters = PatchParams::apply(manager).force();
    let mut pause = RETRY;
    loop {
        let text = bundle.borrow_and_update().clone();
        let published = ConfigMap {
            metadata: ObjectMeta {
                name: Some(names.secret.to_owned()),
                ..ObjectMeta::default()
            },
            data: Some([(KEY.to_owned(), text)].into()),
            ..ConfigMap::default()
        };
        match api
            .patch(names.secret, &parameters, &Patch::Apply(&published))
            .await
        {
            Ok(_) => {
                pause = RETRY;
                if let Ok(Err(_)) = timeout(AGAIN, bundle.changed()).await {
                    return;
                }
            }
            Err(error) => {
                warn!(
                    config_map = names.secret,
                    %error,
                    "the CA's certificates could not be published, trying again: may this program patch the ConfigMap?"
                );
                sleep(pause).await;
                pause = LOOK.min(pause * 2);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::future::ready;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use serde_json::Value;
    use thuban_api::system_namespace;
    use thuban_client::played::{self, Answer, Method, Request};

    use super::*;

    const NAMES: Names = Names {
        namespace: system_namespace,
        secret: "ca",
        server: "server",
    };

    /// An API server that has one ConfigMap, and may refuse the next write.
    #[derive(Clone, Default)]
    struct Server {
        config_map: Arc<Mutex<Option<Value>>>,
        refuses_next: Arc<AtomicBool>,
    }

    impl Server {
        fn client(&self) -> Client {
            let server = self.clone();
            played::client(move |request| ready(server.serve(&request)))
        }

        fn serve(&self, request: &Request) -> Answer {
            assert_eq!(request.method, Method::PATCH);
            assert!(request.path.ends_with("/configmaps/ca"));
            assert!(request.query.contains("fieldManager=part"));
            if self.refuses_next.swap(false, Ordering::Relaxed) {
                return played::status(403, "Forbidden", "no");
            }
            let config_map: Value = serde_json::from_slice(&request.body).unwrap();
            let answer = (200, config_map.to_string());
            *self.config_map.lock().unwrap() = Some(config_map);
            answer
        }

        /// Takes the ConfigMap away, and returns its certificates.
        fn take(&self) -> Option<String> {
            let config_map = self.config_map.lock().unwrap().take()?;
            assert_eq!(config_map["kind"], "ConfigMap");
            assert_eq!(config_map["metadata"]["name"], "ca");
            Some(config_map["data"]["ca.crt"].as_str().unwrap().to_owned())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn config_map_has_the_bundle_as_it_is_now() {
        let server = Server::default();
        let (sender, bundle) = watch::channel("A".to_owned());
        let publication = tokio::spawn(publish(server.client(), NAMES, "part", bundle));
        sleep(RETRY / 2).await;
        assert_eq!(server.take().as_deref(), Some("A"));
        // A write that fails is done again.
        server.refuses_next.store(true, Ordering::Relaxed);
        sender.send_replace("A, B".to_owned());
        sleep(RETRY / 2).await;
        assert_eq!(server.take(), None);
        sleep(RETRY).await;
        assert_eq!(server.take().as_deref(), Some("A, B"));
        // Somebody has deleted the ConfigMap.
        sleep(AGAIN).await;
        assert_eq!(server.take().as_deref(), Some("A, B"));
        drop(sender);
        publication.await.unwrap();
    }
}

//! What the API server says of thuban-observe: its namespace, the CA of its certificate, and tokens for it.

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use tokio::sync::Mutex;

use super::error::{ObserveError, VIEWER};

/// thuban-observe's Service, and the label of it. Also its namespace where nothing else is said.
pub const SERVICE: &str = "thuban-observe";
const LABEL: &str = "app.kubernetes.io/name=thuban-observe";
/// The ConfigMap with the CA, and the key in it.
const CA: &str = "thuban-observe-ca";
const CA_KEY: &str = "ca.crt";
/// The audience of tokens: no other server takes them.
pub const AUDIENCE: &str = "thuban-observe";
/// How long a token lives. API servers make none with a shorter life.
const TOKEN_SECONDS: i64 = 600;

/// Returns the namespace of thuban-observe. Who may not list Services of all namespaces gets the usual one.
///
/// Anybody may make a Service of this name in a namespace of its own, and would get tokens by it. So the usual
/// namespace, which only administrators make, is taken first; and of several others none.
pub async fn find(client: &Client) -> Result<String, ObserveError> {
    let services: Api<Service> = Api::all(client.clone());
    let selector = ListParams::default().labels(LABEL);
    match Box::pin(services.list(&selector)).await {
        Ok(list) => {
            let services = list.items.into_iter();
            let namespaces = services
                .filter(|service| service.metadata.name.as_deref() == Some(SERVICE))
                .filter_map(|service| service.metadata.namespace);
            choose(namespaces.collect())
        }
        Err(error) if code(&error) == Some(403) => Ok(SERVICE.to_owned()),
        Err(error) => Err(failed("services", error)),
    }
}

fn choose(namespaces: Vec<String>) -> Result<String, ObserveError> {
    if namespaces.iter().any(|namespace| namespace == SERVICE) {
        return Ok(SERVICE.to_owned());
    }
    match namespaces.as_slice() {
        [] => Err(ObserveError::NotInstalled),
        [one] => Ok(one.clone()),
        _ => Err(ObserveError::Several(namespaces)),
    }
}

/// Returns the certificates that verify thuban-observe, as PEM.
pub async fn ca(client: &Client, namespace: &str) -> Result<String, ObserveError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = Box::pin(maps.get(CA)).await.map_err(|error| match code(&error) {
        Some(403) => ObserveError::MayNotConnect {
            verb: "get",
            resource: "ConfigMap thuban-observe-ca",
            namespace: namespace.to_owned(),
        },
        Some(404) => ObserveError::NotIn(namespace.to_owned()),
        _ => failed("ConfigMap thuban-observe-ca", error),
    })?;
    let mut data = map.data.unwrap_or_default();
    data.remove(CA_KEY).ok_or(ObserveError::NoCa)
}

/// Tokens of the viewer of one namespace. A token is used until a quarter of its life is left.
pub struct Tokens {
    accounts: Api<ServiceAccount>,
    namespace: String,
    held: Mutex<Option<Held>>,
}

struct Held {
    token: String,
    /// When the next token is made, in seconds since 1970 by this machine's clock.
    until: i64,
}

impl Tokens {
    pub fn new(client: Client, namespace: &str) -> Self {
        Self {
            accounts: Api::namespaced(client, namespace),
            namespace: namespace.to_owned(),
            held: Mutex::new(None),
        }
    }

    /// Returns the namespace of the ServiceAccount.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub async fn token(&self) -> Result<String, ObserveError> {
        self.token_at(Timestamp::now().as_second()).await
    }

    /// Has the next request make a new token.
    pub async fn forget(&self) {
        *self.held.lock().await = None;
    }

    async fn token_at(&self, now: i64) -> Result<String, ObserveError> {
        // Requests that come together wait for one token.
        let mut held = self.held.lock().await;
        if let Some(held) = held.as_ref().filter(|held| now < held.until) {
            return Ok(held.token.clone());
        }
        let made = Box::pin(self.make()).await?;
        let life = made.spec.and_then(|spec| spec.expiration_seconds);
        let token = made.status.and_then(|status| status.token);
        let token = token.ok_or_else(|| ObserveError::NoToken(self.namespace.clone()))?;
        *held = Some(Held {
            token: token.clone(),
            until: now + life.unwrap_or(TOKEN_SECONDS) / 4 * 3,
        });
        Ok(token)
    }

    async fn make(&self) -> Result<TokenRequest, ObserveError> {
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                audiences: Some(vec![AUDIENCE.to_owned()]),
                expiration_seconds: Some(TOKEN_SECONDS),
                ..TokenRequestSpec::default()
            }),
            ..TokenRequest::default()
        };
        let parameters = PostParams::default();
        let made = self
            .accounts
            .create_token_request(VIEWER, &parameters, &request)
            .await;
        made.map_err(|error| match code(&error) {
            Some(403) => ObserveError::MayNotMakeToken(self.namespace.clone()),
            Some(404) => ObserveError::NoViewer(self.namespace.clone()),
            _ => failed("serviceaccounts/token", error),
        })
    }
}

fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

fn failed(resource: &'static str, error: kube::Error) -> ObserveError {
    ObserveError::Api {
        resource,
        error: Box::new(error),
    }
}

#[cfg(test)]
mod tests {
    use std::future;
    use std::sync::{Arc, Mutex};

    use serde_json::{Value, json};
    use thuban_client::played::{self, Request};

    use super::{AUDIENCE, Tokens, ca, find};
    use crate::observe::client::TLS_NAME;
    use crate::testing;

    #[test]
    fn name_and_audience_are_those_of_the_contract() {
        assert_eq!(TLS_NAME, thuban_proto::OBSERVE_TLS_NAME);
        assert_eq!(AUDIENCE, thuban_proto::OBSERVE_TOKEN_AUDIENCE);
    }

    #[tokio::test]
    async fn what_is_not_installed_says_how_to_enable_it() {
        let asked = Arc::default();
        let none = testing::server(|_| testing::list_of(&json!([])), &asked);
        let error = find(&none).await.unwrap_err().to_string();
        assert!(error.contains("observe.enabled=true"), "{error}");
        let missing = testing::server(|_| testing::refusal(404, "no"), &asked);
        let error = ca(&missing, "net").await.unwrap_err().to_string();
        assert!(
            error.contains("namespace net") && error.contains("observe.enabled=true"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn a_service_of_a_tenant_is_not_taken_for_the_real_one() {
        let found = |namespaces: &'static [&'static str]| {
            let services: Vec<Value> = namespaces
                .iter()
                .map(|namespace| json!({"metadata": {"name": "thuban-observe", "namespace": namespace}}))
                .chain([json!({"metadata": {"name": "other", "namespace": "aaa"}})])
                .collect();
            let client =
                played::client(move |_| future::ready(testing::list_of(&Value::Array(services.clone()))));
            async move { find(&client).await.map_err(|error| error.to_string()) }
        };
        assert_eq!(found(&["aaa", "thuban-observe"]).await.unwrap(), "thuban-observe");
        assert_eq!(found(&["net"]).await.unwrap(), "net");
        let error = found(&["aaa", "net"]).await.unwrap_err();
        assert!(
            error.contains("aaa, net") && error.contains("--observe-namespace"),
            "{error}"
        );
        assert!(found(&[]).await.unwrap_err().contains("not installed"));
    }

    #[tokio::test]
    async fn who_may_not_list_services_looks_in_the_usual_place() {
        let forbidding = testing::server(|_| testing::refusal(403, "no"), &Arc::default());
        assert_eq!(find(&forbidding).await.unwrap(), "thuban-observe");
        let error = ca(&forbidding, "net").await.unwrap_err().to_string();
        assert!(
            error.contains("you may not get ConfigMap") && error.contains("Role thuban-observe-connect"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn a_token_that_can_not_be_made_names_the_remedy() {
        let refused = |code| {
            let client = played::client(move |_| future::ready(testing::refusal(code, "no")));
            async move { Tokens::new(client, "red").token().await.unwrap_err().to_string() }
        };
        let forbidden = refused(403).await;
        assert!(
            forbidden.contains("serviceaccounts/token of thuban-viewer in namespace red"),
            "{forbidden}"
        );
        let missing = refused(404).await;
        assert!(
            missing.contains("kubectl create serviceaccount thuban-viewer -n red"),
            "{missing}"
        );
    }

    #[tokio::test]
    async fn a_token_is_renewed_before_it_expires() {
        let asked: Arc<Mutex<Vec<Value>>> = Arc::default();
        let seen = Arc::clone(&asked);
        let client = played::client(move |Request { path, body, .. }| {
            assert_eq!(path, "/api/v1/namespaces/red/serviceaccounts/thuban-viewer/token");
            let mut asked = seen.lock().unwrap();
            let mut made: Value = serde_json::from_slice(&body).unwrap();
            asked.push(made.clone());
            made["status"] =
                json!({"token": format!("t{}", asked.len()), "expirationTimestamp": testing::now()});
            future::ready((201, made.to_string()))
        });
        let tokens = Tokens::new(client, "red");
        assert_eq!(tokens.token_at(1000).await.unwrap(), "t1");
        assert_eq!(tokens.token_at(1449).await.unwrap(), "t1");
        assert_eq!(tokens.token_at(1450).await.unwrap(), "t2");
        tokens.forget().await;
        assert_eq!(tokens.token_at(1451).await.unwrap(), "t3");
        let spec = asked.lock().unwrap()[0]["spec"].clone();
        assert_eq!(
            spec,
            json!({"audiences": ["thuban-observe"], "expirationSeconds": 600})
        );
    }
}

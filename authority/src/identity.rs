//! Finds out which node asks: by the ServiceAccount token of its pod, which the API server reviews.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::Value;
use thiserror::Error;
use thuban_api::system_namespace;

/// Whose tokens are let in.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    /// The one ServiceAccount of Thuban's namespace whose pods may ask.
    pub name: &'static str,
    /// The audience that the tokens are for.
    pub audience: &'static str,
}

impl Account {
    fn user(&self) -> String {
        format!("system:serviceaccount:{}:{}", system_namespace(), self.name)
    }
}

const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

#[derive(Debug, Error)]
pub enum IdentityError {
    #[error("no bearer token in the metadata")]
    NoToken,
    #[error("the API server could not review the token: {0}")]
    Review(#[source] kube::Error),
    #[error("the token is not valid for audience {0}")]
    NotAuthenticated(&'static str),
    #[error("the token is of {0}, not of {1}")]
    WrongUser(String, String),
    #[error("the token is not bound to a pod on a node")]
    NotBound,
    #[error("the token has expired or states no expiry")]
    Expired,
    #[error("too many ask at once: ask again")]
    Busy,
}

/// A proven node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub node: String,
    /// How long the token is valid.
    pub valid_for: Duration,
}

/// Asks the API server which node has the token. `now`: seconds since the epoch, for the token's expiry.
pub async fn review(
    client: Client,
    account: Account,
    token: &str,
    now: u64,
) -> Result<Identity, IdentityError> {
    let spec = TokenReviewSpec {
        token: token.to_owned(),
        audiences: Some(vec![account.audience.to_owned()]),
    };
    let review = TokenReview {
        spec,
        ..TokenReview::default()
    };
    let reviews: Api<TokenReview> = Api::all(client);
    let answer = reviews
        .create(&PostParams::default(), &review)
        .await
        .map_err(IdentityError::Review)?;
    judge(account, &answer.status.unwrap_or_default(), expiry(token), now)
}

/// Checks the token's own claims before the API server is asked whether they are true: a token that is refused here
/// costs the API server nothing.
pub fn check_claims(account: Account, token: &str, now: u64) -> Result<(), IdentityError> {
    let stranger = || IdentityError::NotAuthenticated(account.audience);
    let claims = claims(token).ok_or_else(stranger)?;
    let audience = &claims["aud"];
    let mut audiences = audience.as_array().into_iter().flatten().chain([audience]);
    if !audiences.any(|audience| audience == account.audience) {
        return Err(stranger());
    }
    let user = claims["sub"].as_str().unwrap_or_default();
    if user != account.user() {
        return Err(IdentityError::WrongUser(user.to_owned(), account.user()));
    }
    let is_there = |path: &str| {
        let value = claims.pointer(path).and_then(Value::as_str);
        value.is_some_and(|value| !value.is_empty())
    };
    if !is_there("/kubernetes.io/pod/uid") || !is_there("/kubernetes.io/node/name") {
        return Err(IdentityError::NotBound);
    }
    let expiry = claims["exp"].as_u64();
    expiry
        .filter(|expiry| *expiry > now)
        .map(|_| ())
        .ok_or(IdentityError::Expired)
}

fn judge(
    account: Account,
    status: &TokenReviewStatus,
    expiry: Option<u64>,
    now: u64,
) -> Result<Identity, IdentityError> {
    let has_audience = status
        .audiences
        .iter()
        .flatten()
        .any(|audience| audience == account.audience);
    if status.authenticated != Some(true) || !has_audience {
        return Err(IdentityError::NotAuthenticated(account.audience));
    }
    let user = status.user.clone().unwrap_or_default();
    if user.username.as_deref() != Some(account.user().as_str()) {
        let username = user.username.unwrap_or_default();
        return Err(IdentityError::WrongUser(username, account.user()));
    }
    let extra = user.extra.unwrap_or_default();
    let one = |key: &str| match extra.get(key).map(Vec::as_slice) {
        Some([value]) if !value.is_empty() => Ok(value.clone()),
        _ => Err(IdentityError::NotBound),
    };
    one(POD_UID)?;
    let node = one(NODE_NAME)?;
    let left = expiry
        .and_then(|expiry| expiry.checked_sub(now))
        .filter(|left| *left > 0);
    Ok(Identity {
        node,
        valid_for: Duration::from_secs(left.ok_or(IdentityError::Expired)?),
    })
}

fn claims(token: &str) -> Option<Value> {
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    serde_json::from_slice(&claims).ok()
}

/// Returns the `exp` claim. It is believed only if the API server has verified the token.
fn expiry(token: &str) -> Option<u64> {
    claims(token)?.get("exp")?.as_u64()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::authentication::v1::TokenReviewStatus;
    use serde_json::json;

    use super::{Account, IdentityError, expiry, judge};

    const ACCOUNT: Account = Account {
        name: "transitd",
        audience: "thuban-operator",
    };

    fn status(user: &str, audience: &str, extra: &serde_json::Value) -> TokenReviewStatus {
        serde_json::from_value(json!({
            "authenticated": true, "audiences": [audience], "user": {"username": user, "extra": extra},
        }))
        .unwrap()
    }

    #[test]
    fn only_pods_of_transitd_on_a_node_are_let_in() {
        let user = "system:serviceaccount:thuban-system:transitd";
        let node = "authentication.kubernetes.io/node-name";
        let pod = "authentication.kubernetes.io/pod-uid";
        let full = json!({node: ["n1"], pod: ["u"]});
        let judge = |user: &str, audience: &str, extra: &serde_json::Value, expiry| {
            judge(ACCOUNT, &status(user, audience, extra), expiry, 100)
        };
        let identity = judge(user, "thuban-operator", &full, Some(160)).unwrap();
        assert_eq!((identity.node.as_str(), identity.valid_for.as_secs()), ("n1", 60));
        assert!(matches!(
            judge(user, "api", &full, Some(160)),
            Err(IdentityError::NotAuthenticated(_))
        ));
        let other = "system:serviceaccount:red:default";
        assert!(matches!(
            judge(other, "thuban-operator", &full, Some(160)),
            Err(IdentityError::WrongUser(..))
        ));
        let node_only = json!({node: ["n1"]});
        assert!(matches!(
            judge(user, "thuban-operator", &node_only, Some(160)),
            Err(IdentityError::NotBound)
        ));
        assert!(matches!(
            judge(user, "thuban-operator", &full, Some(100)),
            Err(IdentityError::Expired)
        ));
        assert!(matches!(
            judge(user, "thuban-operator", &full, None),
            Err(IdentityError::Expired)
        ));
        let nobody = TokenReviewStatus::default();
        assert!(matches!(
            super::judge(ACCOUNT, &nobody, Some(160), 100),
            Err(IdentityError::NotAuthenticated(_))
        ));
    }

    #[test]
    fn claims_of_another_are_refused_before_the_api_server_is_asked() {
        let user = "system:serviceaccount:thuban-system:transitd";
        let bound = json!({"pod": {"uid": "u"}, "node": {"name": "n1"}});
        let right = json!({"aud": ["thuban-operator"], "sub": user, "exp": 160, "kubernetes.io": bound});
        let check = |field: &str, value: serde_json::Value| {
            let mut claims = right.clone();
            claims[field] = value;
            super::check_claims(ACCOUNT, &token(&claims), 100)
        };
        check("iss", json!("https://kubernetes")).unwrap();
        check("aud", json!("thuban-operator")).unwrap();
        for audience in [
            json!(null),
            json!([]),
            json!(["api"]),
            json!({"thuban-operator": 1}),
        ] {
            assert!(matches!(
                check("aud", audience),
                Err(IdentityError::NotAuthenticated(_))
            ));
        }
        let other = check("sub", json!("system:serviceaccount:red:default"));
        assert!(matches!(other, Err(IdentityError::WrongUser(..))));
        for bound in [
            json!({"node": {"name": "n1"}}),
            json!({"pod": {"uid": "u"}}),
            json!({"pod": {"uid": ""}, "node": {"name": "n1"}}),
        ] {
            assert!(matches!(
                check("kubernetes.io", bound),
                Err(IdentityError::NotBound)
            ));
        }
        for expiry in [json!(100), json!("never"), json!(null)] {
            assert!(matches!(check("exp", expiry), Err(IdentityError::Expired)));
        }
        for text in ["", "a.b.c", "..", "nonsense"] {
            let refused = super::check_claims(ACCOUNT, text, 100);
            assert!(
                matches!(refused, Err(IdentityError::NotAuthenticated(_))),
                "{text}"
            );
        }
    }

    fn token(claims: &serde_json::Value) -> String {
        use base64::Engine;
        use base64::engine::general_purpose::URL_SAFE_NO_PAD;
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims.to_string()))
    }

    #[test]
    fn the_expiry_is_read_from_the_claims() {
        // {"exp":42}
        assert_eq!(expiry("e30.eyJleHAiOjQyfQ.x"), Some(42));
        assert_eq!(expiry("nonsense"), None);
    }
}

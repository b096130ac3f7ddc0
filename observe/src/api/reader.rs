//! Who asks: a token, and the right that it must give.

use std::sync::Arc;

use axum::http::HeaderMap;
use thuban_api::GROUP;
use thuban_telemetry::access::{Access, Refusal, Right};
use thuban_telemetry::bearer;

use super::problem::Problem;
use crate::server::Peer;
use crate::view::Scope;

/// The virtual resource: no object of it exists, only rights to it.
const RESOURCE: &str = "flows";

/// A reader who was let in.
pub struct Reader {
    access: Arc<Access>,
    peer: Peer,
    token: String,
    right: Right,
}

impl Reader {
    /// Lets in who may get the flows of the scope.
    pub async fn admit(
        access: &Arc<Access>,
        peer: Peer,
        headers: &HeaderMap,
        scope: &Scope,
    ) -> Result<Self, Problem> {
        let token = bearer(headers).ok_or(Refusal::NoToken)?;
        let reader = Self {
            access: access.clone(),
            peer,
            token: token.to_owned(),
            right: Right::Resource {
                group: GROUP,
                resource: RESOURCE,
                namespace: scope.namespace().map(str::to_owned),
            },
        };
        reader.judge().await?;
        Ok(reader)
    }

    /// Judges whether the reader may still read.
    pub async fn judge(&self) -> Result<(), Refusal> {
        self.access.judge(self.peer.0, &self.token, &self.right).await
    }
}

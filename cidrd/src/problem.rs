//! Refusals and failures as the HTTP API tells them: problem details (RFC 9457).

use axum::Json;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use crate::lease::{LeaseError, Refusal};
use crate::pools::TermsError;

/// The body of an answer that is no success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The HTTP status.
    pub status: u16,
    /// What is wrong, one word in CamelCase: for programs.
    pub reason: String,
    /// What is wrong and what to do: for people.
    pub detail: String,
    /// The field of the request, such as `pool`. Empty if it is no field's fault.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub field: String,
}

impl Problem {
    pub fn new(status: StatusCode, reason: &str, detail: impl Into<String>, field: &str) -> Self {
        Self {
            status: status.as_u16(),
            reason: reason.to_owned(),
            detail: detail.into(),
            field: field.to_owned(),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(&self)).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<LeaseError> for Problem {
    fn from(error: LeaseError) -> Self {
        let detail = error.to_string();
        let (status, reason, field) = match error {
            LeaseError::Refused(refusal) => match refusal {
                Refusal::Exhausted { .. } => (StatusCode::CONFLICT, "Exhausted", "pool"),
                Refusal::Superseded(_) => (StatusCode::CONFLICT, "Superseded", "grants"),
                Refusal::Taken(_) => (StatusCode::CONFLICT, "Taken", "addresses"),
                Refusal::HasAnother { .. } => (StatusCode::CONFLICT, "HasAnother", "pool"),
                Refusal::OutsidePool { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "OutsidePool", "addresses"),
            },
            LeaseError::Contended => (StatusCode::SERVICE_UNAVAILABLE, "Contended", ""),
            LeaseError::Away(_) => (StatusCode::SERVICE_UNAVAILABLE, "Away", ""),
        };
        Self::new(status, reason, detail, field)
    }
}

impl From<TermsError> for Problem {
    fn from(error: TermsError) -> Self {
        let (status, reason, field) = match &error {
            TermsError::Unknown(_) => (StatusCode::UNPROCESSABLE_ENTITY, "UnknownPool", "pool"),
            TermsError::NotAccepted { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "PoolNotAccepted", "pool"),
            TermsError::NotAllowed { .. } => (StatusCode::FORBIDDEN, "NamespaceNotAllowed", "namespace"),
        };
        Self::new(status, reason, error.to_string(), field)
    }
}

//! Why a reader gets no answer.

use std::fmt;

use axum::Json;
use axum::http::header::WWW_AUTHENTICATE;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use thiserror::Error;
use thuban_telemetry::access::Refusal;

use super::parameters::ParameterError;

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    #[error("{0}")]
    Refused(Refused),
    #[error("too many readers follow: end one, or try again later")]
    TooManyReaders,
    #[error("too many answers are on their way: take them first, or try again later")]
    TooManyAnswers,
    #[error(
        "there is no such path: there are /v1/flows, /v1/graph, /v1/graph/events, /v1/top and /v1/series"
    )]
    NotFound,
    #[error("the answer could not be made")]
    Failed,
}

/// A refusal, in words about flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused(Refusal);

impl fmt::Display for Refused {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self.0 {
            Refusal::Plain | Refusal::NoToken => "send a bearer token of the audience thuban-observe",
            Refusal::UnknownToken => {
                "the API server does not know the token, or it is not for the audience thuban-observe"
            }
            Refusal::Forbidden => {
                "the token's owner may not get flows.thuban.dev there: bind a Role with this right in the namespace, \
                 or a ClusterRole for all namespaces"
            }
            Refusal::TooMany => "too many tokens were sent that are not known here: try again in some seconds",
            Refusal::Unasked => "the API server can't be asked about the token now",
        })
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(Refused(refusal))
    }
}

impl Problem {
    fn status(&self) -> StatusCode {
        match self {
            Self::Parameter(_) => StatusCode::BAD_REQUEST,
            Self::Refused(refused) => refused.0.status(),
            Self::TooManyReaders | Self::TooManyAnswers => StatusCode::TOO_MANY_REQUESTS,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let error = json!({"error": self.to_string()});
        let mut response = (self.status(), Json(error)).into_response();
        if response.status() == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

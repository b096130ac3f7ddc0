//! A played API server for tests of other crates: the test answers the requests of a client, without a connection.

use std::convert::Infallible;

pub use http::Method;
use http::{Response, StatusCode};
use kube::Client;
use kube::client::Body;
use serde_json::json;
use tower::service_fn;

/// A request, as the API server reads it.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: Method,
    pub path: String,
    /// The part after the question mark; empty without one.
    pub query: String,
    pub body: Vec<u8>,
}

/// A code of HTTP, and the body.
pub type Answer = (u16, String);

/// Returns a client whose requests get these answers.
pub fn client<F>(answer: impl Fn(Request) -> F + Clone + Send + 'static) -> Client
where
    F: Future<Output = Answer> + Send + 'static,
{
    let serve = move |request| {
        let answer = answer.clone();
        async move {
            let request = read(request).await;
            let answered = answer(request);
            Ok::<_, Infallible>(response(answered.await))
        }
    };
    Client::new(service_fn(serve), "default")
}

/// Returns what the API server says instead of an object: that it refuses, lacks or has deleted something.
pub fn status(code: u16, reason: &str, message: &str) -> Answer {
    let status = if code < 300 { "Success" } else { "Failure" };
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": status, "message": message, "reason": reason,
        "code": code,
    });
    (code, body.to_string())
}

async fn read(request: http::Request<Body>) -> Request {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    // A client of Kubernetes has the whole body before it sends the request.
    let body = request.into_body().collect_bytes().await.unwrap_or_default();
    Request {
        method,
        path: uri.path().to_owned(),
        query: uri.query().unwrap_or_default().to_owned(),
        body: body.to_vec(),
    }
}

fn response((code, body): Answer) -> Response<Body> {
    let mut response = Response::new(Body::from(body.into_bytes()));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response
}

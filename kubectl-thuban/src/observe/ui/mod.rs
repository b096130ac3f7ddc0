//! `ui`: serves thuban-observe's page at 127.0.0.1 to the browser of this user, and adds the token to what the browser
//! asks. [`door`] decides who may ask.
//!
//! Invariant: no token goes to the browser. An answer has only the headers that [`pass`] lists.

mod browser;
mod door;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderValue, REFERRER_POLICY,
    SET_COOKIE, X_CONTENT_TYPE_OPTIONS,
};
use hyper::http::request::Parts;
use hyper::http::uri::PathAndQuery;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::Target;
use super::client::Relay;
use super::error::ObserveError;
use crate::arguments::Ui;
use crate::error::CliError;
use crate::render;
use browser::Lead;
use door::{Admission, Door};

/// How long a browser may take to send the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after an accept that failed, such as without a free descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// The most connections. A browser opens six.
const MAX_CONNECTIONS: usize = 64;
const HTML: &str = "text/html; charset=utf-8";
const JSON: &str = "application/json";
/// The page that leads to thuban-observe's page loads nothing.
const CLOSED: &str = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

type Body = BoxBody<Bytes, hyper::Error>;

/// Serves until it is dropped.
pub async fn run(relay: Relay, options: &Ui) -> Result<(), CliError> {
    // What is missing is told here, and not only in the browser.
    let probe = Target::new("/v1/top", &relay.asked).with("by", Some("vpc"));
    drop(Box::pin(relay.ask(&probe)).await?);
    let port = options.port;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
    let listener = listener.map_err(|error| ObserveError::Listen { port, error })?;
    let door = Door::new(listener.local_addr()?.port(), &relay.asked)?;
    render::write(&format!("{}\n", door.url()))?;
    eprintln!(
        "This URL shows the flows of {}; keep it to yourself. Ctrl-C ends it.",
        relay.asked
    );
    // The file is deleted with the command.
    let _lead = if options.open {
        Some(Lead::open(&door)?)
    } else {
        None
    };
    serve(&listener, &Arc::new(door), &Arc::new(relay)).await;
    Ok(())
}

async fn serve(listener: &TcpListener, door: &Arc<Door>, relay: &Arc<Relay>) {
    // They end when this is dropped.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, Arc::clone(door), Arc::clone(relay)));
                }
                Err(_) => sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(stream: TcpStream, door: Arc<Door>, relay: Arc<Relay>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let (door, relay) = (Arc::clone(&door), Arc::clone(&relay));
        // No request that is let in has a body.
        let (head, _) = request.into_parts();
        async move { Ok::<_, Infallible>(answer(&head, &door, &relay).await) }
    });
    // A browser that goes away is no error.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn answer(head: &Parts, door: &Door, relay: &Relay) -> Response<Body> {
    match door.judge(&head.method, &head.uri, &head.headers) {
        Admission::Refused(status, why) => respond(status, JSON, json!({"error": why}).to_string()),
        Admission::Enter => enter(door),
        Admission::Pass => {
            let target = head.uri.path_and_query().map_or("/", PathAndQuery::as_str);
            match Box::pin(relay.get(target, head.headers.get(ACCEPT))).await {
                Ok(response) => pass(response),
                Err(error) => {
                    let why = json!({"error": error.to_string()}).to_string();
                    respond(StatusCode::BAD_GATEWAY, JSON, why)
                }
            }
        }
    }
}

/// Returns thuban-observe's answer, each part as soon as it is there.
fn pass(response: Response<Incoming>) -> Response<Body> {
    let (head, body) = response.into_parts();
    let mut passed = Response::new(body.boxed());
    *passed.status_mut() = head.status;
    for name in [
        CACHE_CONTROL,
        CONTENT_SECURITY_POLICY,
        CONTENT_TYPE,
        ETAG,
        REFERRER_POLICY,
        X_CONTENT_TYPE_OPTIONS,
    ] {
        if let Some(value) = head.headers.get(&name) {
            passed.headers_mut().insert(name, value.clone());
        }
    }
    passed
}

/// Returns a page that gives the browser its cookie, and leads it to the page. The browser goes there on behalf of this
/// page, so it sends the cookie, whatever led it here.
fn enter(door: &Door) -> Response<Body> {
    let page = door.page();
    let text = format!(
        "<!doctype html><html lang=\"en\"><title>Thuban</title><meta http-equiv=\"refresh\" content=\"0;url={page}\">\
         <p><a href=\"{page}\">Thuban</a></p></html>\n"
    );
    let mut response = respond(StatusCode::OK, HTML, text);
    let headers = response.headers_mut();
    headers.insert(SET_COOKIE, door.cookie());
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(CLOSED));
    response
}

fn respond(status: StatusCode, kind: &'static str, text: String) -> Response<Body> {
    let body = Full::<Bytes>::from(text).map_err(|never| match never {});
    let mut response = Response::new(body.boxed());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

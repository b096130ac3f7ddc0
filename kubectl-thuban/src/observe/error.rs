//! Why thuban-observe could not be asked, and what to do about it.

use std::io;

use hyper::StatusCode;
use hyper::header::InvalidHeaderValue;
use hyper::http::uri::InvalidUri;
use rustls::pki_types::InvalidDnsNameError;
use rustls::pki_types::pem::Error as PemError;
use thiserror::Error;

use super::Asked;
use crate::kubectl::KubectlError;

/// The Role of thuban-observe's namespace that lets people connect to it.
const CONNECT_ROLE: &str = "thuban-observe-connect";
/// The ClusterRole that lets a ServiceAccount see flows.
const FLOWS_ROLE: &str = "thuban-flows-view";
/// The ServiceAccount of a namespace whose tokens thuban-observe judges.
pub const VIEWER: &str = "thuban-viewer";

#[derive(Debug, Error)]
pub enum ObserveError {
    #[error("thuban-observe is not installed: enable it by the chart's value observe.enabled=true")]
    NotInstalled,
    #[error(
        "the namespaces {} have Services named thuban-observe, and tokens are sent to one only: name its namespace by \
         --observe-namespace",
        .0.join(", ")
    )]
    Several(Vec<String>),
    #[error(
        "namespace {0} has no thuban-observe: enable it by the chart's value observe.enabled=true, or name its \
         namespace by --observe-namespace"
    )]
    NotIn(String),
    #[error(
        "you may not {verb} {resource} in namespace {namespace}: a RoleBinding to Role {CONNECT_ROLE} there allows it"
    )]
    MayNotConnect {
        verb: &'static str,
        resource: &'static str,
        namespace: String,
    },
    #[error(
        "you may not create serviceaccounts/token of {VIEWER} in namespace {0}: a Role there has to allow it, with \
         the verb create and the resourceName {VIEWER}"
    )]
    MayNotMakeToken(String),
    #[error(
        "namespace {0} has no ServiceAccount {VIEWER}: make it by `kubectl create serviceaccount {VIEWER} -n {0}`, and \
         bind ClusterRole {FLOWS_ROLE} to it"
    )]
    NoViewer(String),
    #[error(
        "ServiceAccount {account}/{VIEWER} may not get flows.thuban.dev of {asked}: bind ClusterRole {FLOWS_ROLE} to \
         it by a {}",
        binding(.asked)
    )]
    MayNotSee { account: String, asked: Asked },
    #[error("reading {resource}: {error}")]
    Api {
        resource: &'static str,
        error: Box<kube::Error>,
    },
    #[error("the API server has made no token of {VIEWER} in namespace {0}")]
    NoToken(String),
    #[error(transparent)]
    Kubectl(#[from] KubectlError),
    #[error(
        "kubectl port-forward to thuban-observe in namespace {namespace}: {said}; it needs a pod there that is ready, \
         and the rights of Role {CONNECT_ROLE}"
    )]
    Forward { namespace: String, said: String },
    #[error("ConfigMap thuban-observe-ca has no certificate of a CA")]
    NoCa,
    #[error("a certificate in ConfigMap thuban-observe-ca: {0}")]
    Ca(#[from] PemError),
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error("the name of thuban-observe's certificate: {0}")]
    Name(#[from] InvalidDnsNameError),
    #[error("the connection to thuban-observe: {0}")]
    Connect(#[source] io::Error),
    #[error("thuban-observe: {0}")]
    Http(#[from] hyper::Error),
    #[error("a request to thuban-observe: {0}")]
    Target(#[from] InvalidUri),
    #[error("the token can't be sent: {0}")]
    Token(#[from] InvalidHeaderValue),
    #[error("thuban-observe did not answer within {0} s")]
    Late(u64),
    #[error("thuban-observe has sent nothing for {0} s")]
    Silent(u64),
    #[error("thuban-observe has ended the answer: it may have been restarted, so ask again")]
    Ended,
    #[error("thuban-observe answers {status}: {said}")]
    Refused { status: StatusCode, said: String },
    #[error("an answer of thuban-observe is longer than {0} bytes")]
    TooLong(usize),
    #[error("an answer of thuban-observe: {0}")]
    Json(#[from] serde_json::Error),
    #[error("port {port} of 127.0.0.1: {error}; choose another one by --port")]
    Listen { port: u16, error: io::Error },
    #[error("{what}: {error}")]
    Browser { what: String, error: io::Error },
}

fn binding(asked: &Asked) -> &'static str {
    match asked {
        Asked::Namespace(_) => "RoleBinding",
        Asked::All => "ClusterRoleBinding",
    }
}

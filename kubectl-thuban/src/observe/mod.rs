//! What asks thuban-observe: `flows`, `top` and `ui`. [`access`] finds out by the API server where thuban-observe is,
//! and makes tokens. [`forward`] has kubectl forward a port, and [`client`] speaks HTTPS over it.
//!
//! The user's own rights decide who may connect. The rights of the ServiceAccount `thuban-viewer` of the asked
//! namespace decide whose flows are shown. This module makes tokens of it, and sends them to thuban-observe alone.
//! Invariant: no token is printed, stored or sent to a browser.

mod access;
mod client;
mod error;
mod flows;
mod forward;
#[cfg(test)]
mod testing;
mod top;
mod ui;

pub use error::ObserveError;
pub use top::{Row, Top};

use std::fmt::{self, Display, Formatter, Write};

use crate::arguments::{Flows, Format, TopOptions, Ui};
use crate::error::CliError;
use crate::fetch::Cluster;
use crate::kubectl::Kubectl;
use crate::report::Verdict;
use crate::stop::stopped;
use client::Relay;

/// Whose flows are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    Namespace(String),
    /// All namespaces.
    All,
}

impl Asked {
    /// Returns the parameter that says it to thuban-observe.
    fn parameter(&self) -> (&'static str, &str) {
        match self {
            Self::Namespace(namespace) => ("namespace", namespace),
            Self::All => ("all", "true"),
        }
    }
}

impl Display for Asked {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Namespace(namespace) => write!(formatter, "namespace {namespace}"),
            Self::All => formatter.write_str("all namespaces"),
        }
    }
}

/// A path with its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target(String);

impl Target {
    fn new(path: &str, asked: &Asked) -> Self {
        let (name, value) = asked.parameter();
        Self(format!("{path}?{name}={}", encoded(value)))
    }

    /// Adds a parameter, if it has a value.
    fn with(mut self, name: &str, value: Option<&str>) -> Self {
        if let Some(value) = value {
            let _ = write!(self.0, "&{name}={}", encoded(value));
        }
        self
    }
}

/// Returns a value as it may stand in a URL (RFC 3986, section 2.1).
fn encoded(value: &str) -> String {
    let mut text = String::new();
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

/// Finds thuban-observe for what the user asks for: one namespace, or all. `place` is thuban-observe's namespace, if
/// the user named it.
async fn relay(
    cluster: &Cluster,
    kubectl: Kubectl,
    is_all: bool,
    place: Option<&str>,
) -> Result<Relay, ObserveError> {
    let asked = if is_all {
        Asked::All
    } else {
        Asked::Namespace(cluster.namespace().to_owned())
    };
    Relay::find(cluster.client(), kubectl, asked, place).await
}

/// Prints flows until all that were asked for are printed, or until the user ends it.
pub async fn show_flows(
    cluster: &Cluster,
    kubectl: Kubectl,
    is_all: bool,
    options: &Flows,
    format: Format,
) -> Result<Verdict, CliError> {
    let relay = Box::pin(relay(cluster, kubectl, is_all, options.place.named())).await?;
    let mut printer = flows::Printer::new(format);
    tokio::select! {
        printed = Box::pin(flows::print(&relay, options, &mut printer)) => printed?,
        () = stopped() => {}
    }
    Ok(printer.verdict())
}

/// Prints who sends most, once or again and again until the user ends it.
pub async fn show_top(
    cluster: &Cluster,
    kubectl: Kubectl,
    is_all: bool,
    options: &TopOptions,
    format: Format,
) -> Result<Verdict, CliError> {
    let relay = Box::pin(relay(cluster, kubectl, is_all, options.place.named())).await?;
    tokio::select! {
        printed = Box::pin(top::print(&relay, options, format)) => printed?,
        () = stopped() => {}
    }
    Ok(Verdict::Good)
}

/// Serves the page to the user's browser until the user ends it.
pub async fn show_ui(
    cluster: &Cluster,
    kubectl: Kubectl,
    is_all: bool,
    options: &Ui,
) -> Result<Verdict, CliError> {
    let relay = Box::pin(relay(cluster, kubectl, is_all, options.place.named())).await?;
    tokio::select! {
        served = Box::pin(ui::run(relay, options)) => served?,
        () = stopped() => {}
    }
    Ok(Verdict::Good)
}

#[cfg(test)]
mod tests {
    use super::{Asked, Target};

    #[test]
    fn a_value_changes_nothing_but_its_own_parameter() {
        let red = Asked::Namespace("red".to_owned());
        let target = Target::new("/v1/flows", &red)
            .with("peer", Some("blue/db-0&all=true#"))
            .with("vpc", None);
        assert_eq!(
            target.0,
            "/v1/flows?namespace=red&peer=blue%2Fdb-0%26all%3Dtrue%23"
        );
        assert_eq!(Target::new("/v1/top", &Asked::All).0, "/v1/top?all=true");
    }
}

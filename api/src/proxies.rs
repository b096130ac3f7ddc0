//! What HAProxy on the nodes serves: nodes ask lbaasd by `POST /v1/proxies`, and lbaasd answers when that changes.
//!
//! A node executes what it is told and decides nothing. So what comes from tenants is checked by lbaasd: names are
//! names of Kubernetes, ranges are networks, and certificates are lines of PEM and nothing else.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{ClientLimits, ProxyProtocol, TlsVersion};

/// What a node says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProxiesWanted {
    /// The version of the last answer, for which the next one waits to differ. Empty: it doesn't wait.
    pub version: String,
}

/// What a node's HAProxy serves: these Vips and no other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Proxies {
    pub version: String,
    /// In the order of namespaces and names.
    pub proxies: Vec<Proxy>,
}

/// A Vip whose pool has the driver `Haproxy`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Proxy {
    pub namespace: String,
    /// The name of the Vip and of its Service.
    pub name: String,
    pub addresses: Vec<IpAddr>,
    pub ports: Vec<ProxyPort>,
    /// Absent: connections are passed on as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<ProxyTls>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_protocol: Option<ProxyProtocol>,
    /// Networks in CIDR notation. Empty: all clients may ask.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub source_ranges: Vec<String>,
    /// The seconds for which a client keeps its member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity_seconds: Option<u32>,
    #[serde(default)]
    pub client_limits: ClientLimits,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_seconds: Option<u32>,
    /// The nodes with a backend, in the order of their names.
    pub members: Vec<ProxyMember>,
}

/// A port that clients ask, and the port of nodes that leads to the backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProxyPort {
    pub port: u16,
    pub node_port: u16,
}

/// A node with backends.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProxyMember {
    /// The name of the node.
    pub node: String,
    pub address: IpAddr,
    /// How many backends it has, at most [`MAX_WEIGHT`].
    pub weight: u16,
}

/// The greatest weight that HAProxy knows.
pub const MAX_WEIGHT: u16 = 256;

/// How TLS is ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProxyTls {
    /// The certificate, those of its issuers, and the key.
    pub pem: Pem,
    pub min_version: TlsVersion,
}

/// Certificates and a key as PEM: lines of ASCII without control characters, none of them empty. HAProxy takes an empty
/// line for the end of a certificate, and what follows for commands.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pem(String);

impl Pem {
    /// Returns the text; it ends with a line break.
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Pem {
    type Error = NotPem;

    fn try_from(text: String) -> Result<Self, NotPem> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let is_pem = |line: &str| line.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
        let mut cleaned = String::with_capacity(text.len() + 1);
        for line in lines {
            if !is_pem(line) {
                return Err(NotPem);
            }
            cleaned += line;
            cleaned += "\n";
        }
        if cleaned.starts_with("-----BEGIN ") {
            Ok(Self(cleaned))
        } else {
            Err(NotPem)
        }
    }
}

impl From<Pem> for String {
    fn from(pem: Pem) -> Self {
        pem.0
    }
}

impl fmt::Debug for Pem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Pem(..)")
    }
}

/// The text is no PEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no lines of PEM")]
pub struct NotPem;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::Pem;

    #[test]
    fn a_certificate_has_no_line_that_ends_it() {
        let text =
            "\n-----BEGIN CERTIFICATE-----\r\nMIIB\r\n\r\n-----END CERTIFICATE-----\n\n-----BEGIN KEY-----\n";
        let pem = Pem::try_from(text.to_owned()).unwrap();
        assert_eq!(
            pem.text(),
            "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n-----BEGIN KEY-----\n"
        );
        for wrong in ["", "show info", "-----BEGIN A-----\nx\u{7}\n"] {
            assert!(Pem::try_from(wrong.to_owned()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_certificate_is_not_shown() {
        let pem = Pem::try_from("-----BEGIN KEY-----\ns3cret\n".to_owned()).unwrap();
        assert!(!format!("{pem:?}").contains("s3cret"));
    }
}

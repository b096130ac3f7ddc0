//! The plugin's errors, and the CNI error code of each (CNI spec 1.1, "Error"; codes from 100 are our own, set by
//! transitd).

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum PluginError {
    #[error("{variable}: expected {expected}")]
    Environment {
        variable: &'static str,
        expected: &'static str,
    },
    #[error("network configuration: cniVersion: {verb} is not in {version}, expected 1.1.0")]
    VerbVersion { verb: &'static str, version: String },
    #[error("network configuration: prevResult: expected none; thuban must be the first plugin of its list")]
    NotFirst,
    #[error("cannot read the network configuration from stdin")]
    ReadStdin(#[source] std::io::Error),
    #[error("network configuration: expected a JSON object")]
    Decode(#[source] serde_json::Error),
    #[error("network configuration: {field}: expected {expected}")]
    Config {
        field: &'static str,
        expected: &'static str,
    },
    #[error("network configuration: cniVersion: {0:?} is not supported, expected one of 0.4.0, 1.0.0, 1.1.0")]
    Version(String),
    #[error("cannot start the plugin's runtime")]
    Runtime(#[source] std::io::Error),
    #[error("transitd does not answer on {socket}; look at the transitd pod of this node")]
    Connect {
        socket: String,
        source: tonic::transport::Error,
    },
    #[error("transitd did not finish within {} s; look at the transitd pod of this node", .0.as_secs())]
    Timeout(Duration),
    #[error("the call to transitd failed; look at the transitd pod of this node")]
    Call(#[source] Box<tonic::Status>),
    #[error("transitd answered without a result; restart the transitd pod of this node")]
    EmptyReply,
    #[error("transitd has not been ready for {seconds} s; look at the transitd pod of this node")]
    Away { seconds: u64, source: Box<PluginError> },
    #[error(
        "transitd has not served this node since the node was started; look at the transitd pod of this node"
    )]
    NeverServed(#[source] Box<PluginError>),
    #[error("cannot {action} {path}")]
    Spool {
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "transitd is away, and {count} removals wait for it in {path} already; start the transitd pod of this node"
    )]
    SpoolFull { count: usize, path: PathBuf },
    #[error("{}", .0.message)]
    Transitd(thuban_proto::cni::CniError),
}

impl PluginError {
    pub fn code(&self) -> u32 {
        match self {
            Self::Version(_) | Self::VerbVersion { .. } => 1,
            Self::Environment { .. } => 4,
            Self::ReadStdin(_) | Self::Runtime(_) | Self::Spool { .. } => 5,
            Self::Decode(_) | Self::EmptyReply => 6,
            Self::Config { .. } | Self::NotFirst => 7,
            Self::Connect { .. } | Self::Timeout(_) | Self::Call(_) | Self::SpoolFull { .. } => 11,
            Self::Away { .. } | Self::NeverServed(_) => 50,
            Self::Transitd(error) => error.code,
        }
    }

    /// Whether transitd did not answer: it is not there, is not in time, or ended in the middle of the call.
    pub fn is_away(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Timeout(_) | Self::Call(_))
    }

    fn details(&self) -> String {
        if let Self::Transitd(error) = self {
            return error.details.clone();
        }
        let mut details = String::new();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            if !details.is_empty() {
                details.push_str(": ");
            }
            details.push_str(&error.to_string());
            source = error.source();
        }
        details
    }
}

/// The error object of the spec.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorDocument<'a> {
    cni_version: &'a str,
    code: u32,
    msg: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    details: String,
}

impl<'a> ErrorDocument<'a> {
    pub fn new(version: &'a str, error: &PluginError) -> Self {
        Self {
            cni_version: version,
            code: error.code(),
            msg: error.to_string(),
            details: error.details(),
        }
    }

    pub fn to_json(&self) -> Option<serde_json::Value> {
        serde_json::to_value(self).ok()
    }
}

//! What can go wrong, and the CNI error code of each (CNI spec 1.1, "Error"; from 100 our own, set by transitd).

use std::time::Duration;

use serde::Serialize;
use thiserror::Error;

use crate::environment::Verb;

#[derive(Debug, Error)]
pub enum PluginError {
    #[error("{variable}: expected {expected}")]
    Environment {
        variable: &'static str,
        expected: &'static str,
    },
    #[error("CNI_COMMAND: {0:?} is not supported by this version, expected ADD, DEL, STATUS or VERSION")]
    UnsupportedVerb(Verb),
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
    #[error("the call to transitd failed")]
    Call(#[source] Box<tonic::Status>),
    #[error("transitd answered without a result")]
    EmptyReply,
    #[error("{}", .0.message)]
    Transitd(thuban_proto::cni::CniError),
}

impl PluginError {
    pub fn code(&self) -> u32 {
        match self {
            Self::Version(_) => 1,
            Self::Environment { .. } | Self::UnsupportedVerb(_) => 4,
            Self::ReadStdin(_) | Self::Runtime(_) => 5,
            Self::Decode(_) | Self::EmptyReply => 6,
            Self::Config { .. } => 7,
            Self::Connect { .. } | Self::Timeout(_) | Self::Call(_) => 11,
            Self::Transitd(error) => error.code,
        }
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

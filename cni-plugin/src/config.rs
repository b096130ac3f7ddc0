//! The network configuration on stdin, checked before anything else happens.
//!
//! Unknown keys are left alone: runtimes and chained plugins add their own.

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::SUPPORTED_VERSIONS;
use crate::error::PluginError;

/// A configuration that this plugin can act on.
#[derive(Debug)]
pub struct Config {
    /// One of [`SUPPORTED_VERSIONS`].
    pub cni_version: String,
    /// Where transitd listens.
    pub socket: PathBuf,
}

impl Config {
    pub fn parse(input: &[u8]) -> Result<Self, PluginError> {
        let fields = object(input)?;
        let cni_version = version(&fields)?;
        let name = string(&fields, "name", "the network's name")?.unwrap_or_default();
        if name.is_empty() {
            return Err(PluginError::Config {
                field: "name",
                expected: "the network's name, a non-empty string",
            });
        }
        if let Some(kind) = string(&fields, "type", "\"thuban\"")?
            && kind != "thuban"
        {
            return Err(PluginError::Config {
                field: "type",
                expected: "\"thuban\"",
            });
        }
        let expected = "an absolute path of transitd's Unix socket";
        let socket = string(&fields, "socket", expected)?.unwrap_or(thuban_proto::DEFAULT_CNI_SOCKET);
        if !socket.starts_with('/') {
            return Err(PluginError::Config {
                field: "socket",
                expected,
            });
        }
        Ok(Self {
            cni_version,
            socket: PathBuf::from(socket),
        })
    }
}

/// The JSON object that stdin must hold.
pub fn object(input: &[u8]) -> Result<Map<String, Value>, PluginError> {
    match serde_json::from_slice(input).map_err(PluginError::Decode)? {
        Value::Object(fields) => Ok(fields),
        _ => Err(PluginError::Config {
            field: "(document)",
            expected: "a JSON object",
        }),
    }
}

fn version(fields: &Map<String, Value>) -> Result<String, PluginError> {
    let expected = "one of 0.4.0, 1.0.0, 1.1.0";
    let version = string(fields, "cniVersion", expected)?.ok_or(PluginError::Config {
        field: "cniVersion",
        expected,
    })?;
    if SUPPORTED_VERSIONS.contains(&version) {
        Ok(version.to_owned())
    } else {
        Err(PluginError::Version(version.to_owned()))
    }
}

fn string<'a>(
    fields: &'a Map<String, Value>,
    field: &'static str,
    expected: &'static str,
) -> Result<Option<&'a str>, PluginError> {
    match fields.get(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(PluginError::Config { field, expected }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(input: &str) -> (u32, String) {
        match Config::parse(input.as_bytes()) {
            Ok(config) => panic!("accepted: {config:?}"),
            Err(error) => (error.code(), error.to_string()),
        }
    }

    #[test]
    fn a_minimal_configuration_uses_the_default_socket() {
        let config =
            Config::parse(br#"{"cniVersion":"1.1.0","name":"thuban","type":"thuban","ipam":{}}"#).unwrap();
        assert_eq!(config.cni_version, "1.1.0");
        assert_eq!(config.socket, PathBuf::from("/run/thuban/cni.sock"));
    }

    #[test]
    fn unreadable_json_is_code_6() {
        assert_eq!(code("{not json").0, 6);
        assert_eq!(code("").0, 6);
    }

    #[test]
    fn every_wrong_field_is_named_with_what_was_expected() {
        for (input, number, field, expected) in [
            ("[]", 7, "(document)", "a JSON object"),
            (r#"{"name":"n"}"#, 7, "cniVersion", "one of 0.4.0, 1.0.0, 1.1.0"),
            (r#"{"cniVersion":1,"name":"n"}"#, 7, "cniVersion", "one of"),
            (r#"{"cniVersion":"1.0.0"}"#, 7, "name", "non-empty"),
            (
                r#"{"cniVersion":"1.0.0","name":"n","type":"bridge"}"#,
                7,
                "type",
                "thuban",
            ),
            (
                r#"{"cniVersion":"1.0.0","name":"n","socket":7}"#,
                7,
                "socket",
                "absolute path",
            ),
            (
                r#"{"cniVersion":"1.0.0","name":"n","socket":"run/x"}"#,
                7,
                "socket",
                "absolute path",
            ),
            (
                r#"{"cniVersion":"0.2.0","name":"n"}"#,
                1,
                "cniVersion",
                "0.4.0, 1.0.0, 1.1.0",
            ),
        ] {
            let (got, message) = code(input);
            assert_eq!(got, number, "{input}");
            assert!(
                message.contains(field) && message.contains(expected),
                "{input}: {message}"
            );
        }
    }
}

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
    /// The CNI network's name.
    pub network: String,
    /// Where transitd listens.
    pub socket: PathBuf,
    /// Where DELs wait while transitd is away.
    pub spool: PathBuf,
    /// Goes into the result of ADD as it is: names are no business of Thuban's.
    pub dns: Map<String, Value>,
    /// `prevResult`.
    pub previous: Option<Value>,
    /// `cni.dev/valid-attachments`, or `cni.dev/attachments`, as the first text of spec 1.1 called it.
    pub valid_attachments: Option<Value>,
}

impl Config {
    pub fn parse(input: &[u8]) -> Result<Self, PluginError> {
        let mut fields = object(input)?;
        let cni_version = version(&fields)?;
        let expected =
            "the network's name: a letter or digit followed by letters, digits, _ . -, a non-empty string";
        let network = string(&fields, "name", expected)?.unwrap_or_default().to_owned();
        if !is_identifier(&network) {
            return Err(PluginError::Config {
                field: "name",
                expected,
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
        let socket = path(
            &fields,
            "socket",
            thuban_proto::DEFAULT_CNI_SOCKET,
            "an absolute path of transitd's Unix socket",
        )?;
        let spool = path(
            &fields,
            "spool",
            thuban_proto::DEFAULT_CNI_SPOOL,
            "an absolute path of a directory",
        )?;
        let dns = match fields.remove("dns") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(dns)) => dns,
            Some(_) => {
                return Err(PluginError::Config {
                    field: "dns",
                    expected: "an object",
                });
            }
        };
        let mut take = |name| fields.remove(name).filter(|value| !value.is_null());
        Ok(Self {
            cni_version,
            network,
            socket,
            spool,
            dns,
            previous: take("prevResult"),
            valid_attachments: take("cni.dev/valid-attachments").or_else(|| take("cni.dev/attachments")),
        })
    }

    /// Returns an error before 1.1.0. CHECK is in every supported version, STATUS and GC came with 1.1.0.
    pub fn require_1_1(&self, verb: &'static str) -> Result<(), PluginError> {
        if self.cni_version == "1.1.0" {
            return Ok(());
        }
        Err(PluginError::VerbVersion {
            verb,
            version: self.cni_version.clone(),
        })
    }
}

/// Whether the text starts with a letter or digit, and then has letters, digits, `_`, `.`, `-` only (CNI spec,
/// container ids and network names).
pub fn is_identifier(text: &str) -> bool {
    let mut characters = text.chars();
    characters.next().is_some_and(|c| c.is_ascii_alphanumeric())
        && characters.all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

/// Returns the JSON object that stdin must hold.
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

fn path(
    fields: &Map<String, Value>,
    field: &'static str,
    default: &str,
    expected: &'static str,
) -> Result<PathBuf, PluginError> {
    let path = string(fields, field, expected)?.unwrap_or(default);
    if path.starts_with('/') {
        Ok(PathBuf::from(path))
    } else {
        Err(PluginError::Config { field, expected })
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
        assert_eq!(config.spool, PathBuf::from("/var/lib/thuban/spool"));
        assert!(config.valid_attachments.is_none() && config.previous.is_none() && config.dns.is_empty());
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
            (r#"{"cniVersion":"1.0.0","name":"../n"}"#, 7, "name", "letters"),
            (
                r#"{"cniVersion":"1.0.0","name":"n","dns":[]}"#,
                7,
                "dns",
                "object",
            ),
            (
                r#"{"cniVersion":"1.0.0","name":"n","spool":"x"}"#,
                7,
                "spool",
                "absolute path",
            ),
            (
                r#"{"cniVersion":"1.2.0","name":"n","type":"thuban"}"#,
                1,
                "1.2.0",
                "0.4.0, 1.0.0, 1.1.0",
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

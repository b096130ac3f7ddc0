//! VERSION: what is supported. Needs no valid configuration, only JSON with a `cniVersion` where there is input.

use serde_json::{Value, json};

use crate::SUPPORTED_VERSIONS;
use crate::config::object;
use crate::error::PluginError;

pub fn run(input: &[u8]) -> Result<Value, PluginError> {
    let asked = if input.is_empty() {
        None
    } else {
        object(input)?.remove("cniVersion")
    };
    let version = match asked {
        Some(Value::String(version)) => version,
        None => SUPPORTED_VERSIONS[1].to_owned(),
        Some(_) => {
            return Err(PluginError::Config {
                field: "cniVersion",
                expected: "a string",
            });
        }
    };
    Ok(json!({"cniVersion": version, "supportedVersions": SUPPORTED_VERSIONS}))
}

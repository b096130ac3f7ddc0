//! GC: transitd removes attachments that the runtime does not list and that are gone by another source too.
//!
//! A list that is absent (or null) is refused, never taken for an empty one: an empty one allows everything to go.

use std::time::Duration;

use serde::Deserialize;
use thuban_proto::cni::{AttachmentKey, GcRequest};

use crate::config::Config;
use crate::error::PluginError;
use crate::transitd;

const TIMEOUT: Duration = Duration::from_mins(1);

#[derive(Debug, Deserialize)]
struct Entry {
    #[serde(rename = "containerID")]
    container_id: String,
    ifname: String,
}

pub fn run(config: &Config) -> Result<(), PluginError> {
    config.require_1_1("GC")?;
    let listed = config.valid_attachments.as_ref().ok_or(PluginError::Config {
        field: "cni.dev/valid-attachments",
        expected: "a list, empty if there is nothing valid",
    })?;
    let listed = Vec::<Entry>::deserialize(listed).map_err(PluginError::Decode)?;
    let request = GcRequest {
        network: config.network.clone(),
        valid: listed
            .into_iter()
            .map(|Entry { container_id, ifname }| AttachmentKey { container_id, ifname })
            .collect(),
    };
    let reply = transitd::call(&config.socket, TIMEOUT, async |mut client| {
        client.gc(request).await
    })?;
    reply
        .error
        .map_or(Ok(()), |error| Err(PluginError::Transitd(error)))
}

//! ADD: transitd makes the attachment; the answer is printed in the version that the configuration asks for.

use std::time::Duration;

use thuban_proto::cni::{AddRequest, add_reply};

use crate::config::Config;
use crate::environment::Environment;
use crate::error::PluginError;
use crate::{result, transitd};

/// transitd waits up to 30 s for the endpoint's rows; the rest is a margin for wiring the pod.
const TIMEOUT: Duration = Duration::from_secs(40);

pub fn run(config: &Config, environment: &Environment) -> Result<serde_json::Value, PluginError> {
    if config.previous.is_some() {
        return Err(PluginError::NotFirst);
    }
    let pod = environment.pod()?;
    let (ifname, netns) = (environment.ifname()?, environment.netns()?);
    let request = AddRequest {
        container_id: environment.container_id()?.to_owned(),
        netns: netns.to_owned(),
        ifname: ifname.to_owned(),
        pod_namespace: pod.namespace,
        pod_name: pod.name,
        pod_uid: pod.uid,
        network: config.network.clone(),
    };
    let reply = transitd::call(&config.socket, TIMEOUT, async |mut client| {
        client.add(request).await
    })?;
    match reply.result {
        Some(add_reply::Result::Attached(attached)) => {
            let version = &config.cni_version;
            Ok(result::document(version, ifname, netns, &attached, &config.dns))
        }
        Some(add_reply::Result::Error(error)) => Err(PluginError::Transitd(error)),
        None => Err(PluginError::EmptyReply),
    }
}

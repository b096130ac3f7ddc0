//! DEL: idempotent; what is not there is success. Without transitd it fails with code 11, and the runtime repeats it.

use std::time::Duration;

use thuban_proto::cni::DelRequest;

use crate::config::Config;
use crate::environment::Environment;
use crate::error::PluginError;
use crate::transitd;

const LIMIT: Duration = Duration::from_secs(20);

pub fn run(config: &Config, environment: &Environment) -> Result<(), PluginError> {
    let request = DelRequest {
        container_id: environment.container_id()?.to_owned(),
        netns: environment.optional_netns().to_owned(),
        ifname: environment.ifname()?.to_owned(),
    };
    let reply = transitd::call(&config.socket, LIMIT, async |mut client| {
        client.del(request).await
    })?;
    reply
        .error
        .map_or(Ok(()), |error| Err(PluginError::Transitd(error)))
}

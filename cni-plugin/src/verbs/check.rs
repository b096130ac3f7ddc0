//! CHECK: transitd compares what the runtime remembers with what it holds and with the kernel.

use std::time::Duration;

use thuban_proto::cni::CheckRequest;

use crate::config::Config;
use crate::environment::Environment;
use crate::error::PluginError;
use crate::{previous, transitd};

const TIMEOUT: Duration = Duration::from_secs(20);

pub fn run(config: &Config, environment: &Environment) -> Result<(), PluginError> {
    let ifname = environment.ifname()?;
    let request = CheckRequest {
        container_id: environment.container_id()?.to_owned(),
        netns: environment.netns()?.to_owned(),
        ifname: ifname.to_owned(),
        previous: Some(previous::parse(config.previous.as_ref(), ifname)?),
    };
    let reply = transitd::call(&config.socket, TIMEOUT, async |mut client| {
        client.check(request).await
    })?;
    reply
        .error
        .map_or(Ok(()), |error| Err(PluginError::Transitd(error)))
}

//! DEL: idempotent; what is not there is success. While transitd is away it is kept in the spool, which is success too:
//! the runtime removes the pod's namespace then, and the veth with it.

use std::time::Duration;

use thuban_proto::cni::DelRequest;

use crate::config::Config;
use crate::environment::Environment;
use crate::error::PluginError;
use crate::{clock, spool, transitd};

/// How long transitd may take. Spooling included, a DEL takes 2 s.
const TIMEOUT: Duration = Duration::from_millis(1500);

pub fn run(config: &Config, environment: &Environment) -> Result<(), PluginError> {
    let asked_at = clock::since_boot();
    let request = DelRequest {
        container_id: environment.container_id()?.to_owned(),
        netns: environment.optional_netns().to_owned(),
        ifname: environment.ifname()?.to_owned(),
    };
    let sent = request.clone();
    let reply = transitd::call(&config.socket, TIMEOUT, async |mut client| client.del(sent).await);
    match reply {
        Ok(reply) => reply
            .error
            .map_or(Ok(()), |error| Err(PluginError::Transitd(error))),
        Err(error) if error.is_away() => spool::keep(&config.spool, request, asked_at),
        Err(error) => Err(error),
    }
}

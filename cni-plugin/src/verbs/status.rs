//! STATUS: whether transitd serves ADD. Runtimes make the whole node NotReady when this fails, so a restart of transitd
//! is bridged: for [`BRIDGE`] from the first time that it was found not ready, if it has served in this boot.

use std::path::Path;
use std::time::Duration;

use thuban_proto::cni::StatusRequest;
use thuban_proto::{AWAY_FILE, SERVED_FILE};

use crate::config::Config;
use crate::error::PluginError;
use crate::{clock, file, transitd};

/// How long transitd may take: runtimes ask every few seconds and want an answer within one.
const TIMEOUT: Duration = Duration::from_millis(900);
/// How long a restart is bridged: longer than an upgrade whose image is there, shorter than pods are evicted in.
const BRIDGE: Duration = Duration::from_mins(2);

pub fn run(config: &Config) -> Result<(), PluginError> {
    config.require_1_1("STATUS")?;
    let reply = transitd::call(&config.socket, TIMEOUT, async |mut client| {
        client.status(StatusRequest {}).await
    });
    let away = config.socket.with_file_name(AWAY_FILE);
    let error = match reply {
        Ok(reply) => match reply.error {
            None => {
                let _ = std::fs::remove_file(away);
                return Ok(());
            }
            Some(error) => PluginError::Transitd(error),
        },
        Err(error) if error.is_away() => error,
        Err(error) => return Err(error),
    };
    let boot_id = clock::boot_id();
    let served = std::fs::read_to_string(config.socket.with_file_name(SERVED_FILE));
    if !served.is_ok_and(|served| served == boot_id) {
        return Err(match error {
            PluginError::Transitd(error) => PluginError::Transitd(error),
            error => PluginError::NeverServed(Box::new(error)),
        });
    }
    let away_for = away_for(&away, &boot_id)?;
    if away_for < BRIDGE {
        return Ok(());
    }
    Err(PluginError::Away {
        seconds: away_for.as_secs(),
        source: Box::new(error),
    })
}

/// Returns the time since the first STATUS of this boot that found transitd not ready. Stores that time if this STATUS
/// is the first.
fn away_for(path: &Path, boot_id: &str) -> Result<Duration, PluginError> {
    let now = clock::since_boot();
    let noted = std::fs::read_to_string(path).ok().and_then(|text| {
        let (boot, since) = text.split_once(' ')?;
        (boot == boot_id).then_some(Duration::from_secs(since.trim().parse().ok()?))
    });
    if let Some(since) = noted {
        return Ok(now.saturating_sub(since));
    }
    let text = format!("{boot_id} {}\n", now.as_secs());
    file::replace(path, text.as_bytes()).map_err(|source| PluginError::Spool {
        action: "write",
        path: path.to_owned(),
        source,
    })?;
    Ok(Duration::ZERO)
}

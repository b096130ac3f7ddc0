//! Events from the programs: addresses that agents want a direct row for, and the programs' log lines.
#![allow(unsafe_code)]

use std::path::Path;

use aya::Ebpf;
use aya::maps::{Map, MapData, MapError, RingBuf};
use aya_log::EbpfLogger;
use thiserror::Error;
use thuban_common::tables::EndpointKey;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tracing::{debug, warn};

#[derive(Debug, Error)]
pub enum EventError {
    #[error("cannot open the ring buffer DIRECT_WANTED")]
    Open(#[source] MapError),
    #[error("cannot wait on a ring buffer")]
    Wait(#[source] std::io::Error),
}

/// Forwards each wanted address; ends when the receiver is gone. A full channel drops: the agent asks again.
pub fn watch_wanted(maps: &Path, wanted: mpsc::Sender<EndpointKey>) -> Result<(), EventError> {
    let data = MapData::from_pin(maps.join("DIRECT_WANTED")).map_err(EventError::Open)?;
    let ring = RingBuf::try_from(Map::RingBuf(data)).map_err(EventError::Open)?;
    // SAFETY: the ring buffer owns its file descriptor and never changes it.
    let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
    let mut ring = ring.map_err(|error| EventError::Wait(error.into_parts().1))?;
    tokio::spawn(async move {
        loop {
            let mut guard = match ring.readable_mut().await {
                Ok(guard) => guard,
                Err(error) => {
                    warn!(
                        error = &error as &dyn std::error::Error,
                        "the ring buffer of wanted rows is lost"
                    );
                    return;
                }
            };
            while let Some(item) = guard.get_inner_mut().next() {
                if let Some(key) = decode(&item)
                    && matches!(wanted.try_send(key), Err(mpsc::error::TrySendError::Closed(_)))
                {
                    return;
                }
            }
            guard.clear_ready();
        }
    });
    Ok(())
}

fn decode(record: &[u8]) -> Option<EndpointKey> {
    let vni = u32::from_ne_bytes(record.get(..4)?.try_into().ok()?);
    Some(EndpointKey {
        vni,
        address: record.get(4..20)?.try_into().ok()?,
    })
}

/// Forwards the log lines of this process's programs. Programs without log statements have no such map.
pub fn watch_log(ebpf: &mut Ebpf) {
    let logger = match EbpfLogger::init(ebpf) {
        Ok(logger) => logger,
        Err(error) => {
            debug!(
                error = &error as &dyn std::error::Error,
                "the programs do not log"
            );
            return;
        }
    };
    // SAFETY: the logger owns its ring buffer's file descriptor and never changes it.
    let Ok(mut logger) = (unsafe { AsyncFd::register_with_interest(logger, Interest::READABLE) }) else {
        return;
    };
    tokio::spawn(async move {
        while let Ok(mut guard) = logger.readable_mut().await {
            guard.get_inner_mut().flush();
            guard.clear_ready();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_a_vni_and_an_address_and_short_ones_are_ignored() {
        let mut record = 7u32.to_ne_bytes().to_vec();
        record.extend([9u8; 16]);
        assert_eq!(
            decode(&record),
            Some(EndpointKey {
                vni: 7,
                address: [9; 16]
            })
        );
        assert_eq!(decode(&record[..19]), None);
    }
}

//! Events from the programs: addresses that agents want a direct row for, and the programs' log lines.
#![allow(unsafe_code)]

use std::path::Path;

use aya::Ebpf;
use aya_log::EbpfLogger;
use thuban_common::tables::EndpointKey;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tracing::{debug, warn};

use super::ring::{Ring, RingError, decode};

/// The most events that are read in a row.
const BATCH: usize = 256;

/// Forwards each wanted address; ends when the receiver is gone. A full channel drops: the agent asks again.
pub fn watch_wanted(maps: &Path, wanted: mpsc::Sender<EndpointKey>) -> Result<(), RingError> {
    let mut ring = Ring::open(maps, "DIRECT_WANTED")?;
    tokio::spawn(async move {
        while !wanted.is_closed() {
            let forward = |record: &[u8]| {
                if let Some(key) = decode(record) {
                    let _ = wanted.try_send(key);
                }
            };
            if let Err(error) = ring.read(BATCH, forward).await {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "the ring buffer of wanted rows is lost"
                );
                return;
            }
        }
    });
    Ok(())
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
        assert_eq!(decode::<EndpointKey>(&record[..19]), None);
    }
}

//! Reads records that the programs write into a ring buffer, for a verb that runs until somebody ends it.
//!
//! Invariant: a ring buffer has one reader on a node; the reader holds a lock ([`lock`]).

use std::fs::File;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use aya::Pod;
use aya::maps::{Map, MapData, MapError, RingBuf};
use nix::fcntl::{Flock, FlockArg};
use thiserror::Error;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, Interval, Sleep, interval_at, sleep};

use crate::boot;

/// How long the programs write records without a renewal.
pub const LEASE: Duration = Duration::from_secs(5);
/// The most records of one [`Event`].
const MAX_RECORDS: usize = 4096;

#[derive(Debug, Error)]
pub enum FollowError {
    #[error("another `transitd {0}` runs on this node")]
    Busy(&'static str),
    #[error("cannot open {path}; has transitd run on this node?")]
    Lock { path: PathBuf, source: std::io::Error },
    #[error("cannot open the pinned map {name}; has this version of transitd run on this node?")]
    Open { name: &'static str, source: MapError },
    #[error("cannot wait for packets")]
    Wait(#[source] std::io::Error),
}

/// Locks a directory for the only process of a verb, as long as the lock lives.
pub fn lock(path: &Path, verb: &'static str) -> Result<Flock<File>, FollowError> {
    let directory = File::open(path).map_err(|source| FollowError::Lock {
        path: path.to_owned(),
        source,
    })?;
    Flock::lock(directory, FlockArg::LockExclusiveNonblock).map_err(|_| FollowError::Busy(verb))
}

/// Returns nanoseconds since boot, by the programs' clock.
pub fn now() -> u64 {
    boot::monotonic().as_nanos() as u64
}

pub enum Event<T> {
    Records(Vec<T>),
    /// The programs stop after [`LEASE`] without a renewal, and this is the time for one.
    Renewal,
    /// A signal, or the end of the time.
    End,
}

/// The reader of a ring buffer of records `T`.
pub struct Follower<T> {
    ring: AsyncFd<RingBuf<MapData>>,
    interrupt: Signal,
    terminate: Signal,
    renewal: Interval,
    end: Pin<Box<Sleep>>,
    record: PhantomData<T>,
}

impl<T: Pod> Follower<T> {
    /// Opens the pinned ring buffer, and empties it of records that an earlier reader left. Ends after so many seconds,
    /// if there is a number.
    pub fn open(maps: &Path, name: &'static str, seconds: Option<u64>) -> Result<Self, FollowError> {
        let open = |source| FollowError::Open { name, source };
        let data = MapData::from_pin(maps.join(name)).map_err(open)?;
        let mut ring = RingBuf::try_from(Map::RingBuf(data)).map_err(open)?;
        while ring.next().is_some() {}
        // SAFETY: the ring buffer owns its file descriptor and never changes it.
        #[allow(unsafe_code)]
        let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
        let renewal = LEASE / 5;
        Ok(Self {
            ring: ring.map_err(|error| FollowError::Wait(error.into_parts().1))?,
            interrupt: signal(SignalKind::interrupt()).map_err(FollowError::Wait)?,
            terminate: signal(SignalKind::terminate()).map_err(FollowError::Wait)?,
            renewal: interval_at(Instant::now() + renewal, renewal),
            end: Box::pin(sleep(Duration::from_secs(seconds.unwrap_or(u64::MAX / 4)))),
            record: PhantomData,
        })
    }

    /// Waits for what comes next.
    pub async fn next(&mut self) -> Result<Event<T>, FollowError> {
        tokio::select! {
            guard = self.ring.readable_mut() => {
                let mut guard = guard.map_err(FollowError::Wait)?;
                let mut records = Vec::new();
                while records.len() < MAX_RECORDS {
                    let Some(item) = guard.get_inner_mut().next() else {
                        guard.clear_ready();
                        break;
                    };
                    records.extend(decode::<T>(&item));
                }
                Ok(Event::Records(records))
            }
            _ = self.renewal.tick() => Ok(Event::Renewal),
            () = &mut self.end => Ok(Event::End),
            _ = self.interrupt.recv() => Ok(Event::End),
            _ = self.terminate.recv() => Ok(Event::End),
        }
    }
}

/// Decodes a record; `None` if there are too few bytes.
fn decode<T: Pod>(bytes: &[u8]) -> Option<T> {
    if bytes.len() < size_of::<T>() {
        return None;
    }
    // SAFETY: long enough, any bytes are a record, and the record is copied.
    #[allow(unsafe_code)]
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

#[cfg(test)]
mod tests {
    use super::decode;

    #[test]
    fn a_record_is_read_whole_or_not_at_all() {
        let bytes = 7_u64.to_ne_bytes();
        assert_eq!(decode::<u64>(&bytes), Some(7));
        assert_eq!(decode::<u64>(&bytes[..7]), None);
    }
}

//! A pinned ring buffer: programs write records, and one reader takes them.

use std::path::Path;

use aya::Pod;
use aya::maps::{Map, MapData, RingBuf};
use thiserror::Error;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::tables::{TableError, data, open};

#[derive(Debug, Error)]
pub enum RingError {
    #[error(transparent)]
    Open(#[from] TableError),
    #[error("cannot wait for the ring buffer {name}")]
    Wait {
        name: &'static str,
        source: std::io::Error,
    },
}

pub struct Ring {
    name: &'static str,
    records: AsyncFd<RingBuf<MapData>>,
}

impl Ring {
    /// Opens a pinned ring buffer. Must be called within the runtime.
    pub fn open(maps: &Path, name: &'static str) -> Result<Self, RingError> {
        let records = RingBuf::try_from(Map::RingBuf(data(maps, name)?)).map_err(open(name))?;
        // SAFETY: the ring buffer owns its file descriptor and never changes it.
        #[allow(unsafe_code)]
        let records = unsafe { AsyncFd::register_with_interest(records, Interest::READABLE) };
        let records = records.map_err(|error| RingError::Wait {
            name,
            source: error.into_parts().1,
        })?;
        Ok(Self { name, records })
    }

    /// Drops the records that an earlier reader left.
    pub fn clear(&mut self) {
        while self.records.get_mut().next().is_some() {}
    }

    /// Waits for records, and gives at most `most` of them. Returns whether there may be more of them now.
    pub async fn read(&mut self, most: usize, mut give: impl FnMut(&[u8])) -> Result<bool, RingError> {
        let ready = self.records.readable_mut().await;
        let mut ready = ready.map_err(|source| RingError::Wait {
            name: self.name,
            source,
        })?;
        let is_full = (0..most).all(|_| {
            let record = ready.get_inner_mut().next();
            record.map(|record| give(&record)).is_some()
        });
        if !is_full {
            ready.clear_ready();
        }
        Ok(is_full)
    }
}

/// Decodes a record; `None` if it has another size.
pub fn decode<T: Pod>(bytes: &[u8]) -> Option<T> {
    if bytes.len() != size_of::<T>() {
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
        assert_eq!(decode::<u32>(&bytes), None);
    }
}

//! The rows of known droplets as snapshots have them: all droplets have them alike, so they are encoded once.
//!
//! Invariant: no snapshot has the row of its own droplet.

use std::collections::HashMap;
use std::ops::Range;

use prost::bytes::Bytes;

use crate::model::rows::PackedRow;

/// The rows of all droplets, one after the other.
#[derive(Debug)]
pub(super) struct DropletRows {
    bytes: Bytes,
    /// Where the row of each droplet is.
    places: HashMap<String, Range<usize>>,
}

impl<'a> FromIterator<(&'a String, PackedRow)> for DropletRows {
    fn from_iter<T: IntoIterator<Item = (&'a String, PackedRow)>>(rows: T) -> Self {
        let (mut bytes, mut places) = (Vec::new(), HashMap::new());
        for (name, row) in rows {
            let begin = bytes.len();
            bytes.extend_from_slice(row.bytes());
            places.insert(name.clone(), begin..bytes.len());
        }
        Self {
            bytes: bytes.into(),
            places,
        }
    }
}

impl DropletRows {
    /// Returns the rows that a droplet has. What is no droplet has none.
    pub fn of(&self, droplet: &str) -> OtherDroplets {
        let Some(own) = self.places.get(droplet) else {
            return OtherDroplets::default();
        };
        OtherDroplets {
            count: self.places.len() - 1,
            parts: [self.bytes.slice(..own.start), self.bytes.slice(own.end..)],
        }
    }
}

/// The rows of all droplets but one, as parts of a program. A copy costs nothing.
#[derive(Clone, Debug, Default)]
pub struct OtherDroplets {
    count: usize,
    parts: [Bytes; 2],
}

impl OtherDroplets {
    /// Returns how many rows there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Yields the bytes of the rows, which all snapshots share.
    pub fn parts(&self) -> impl Iterator<Item = &Bytes> {
        self.parts.iter()
    }
}

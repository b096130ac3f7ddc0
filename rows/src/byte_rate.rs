//! The rate of an endpoint's traffic.

use serde::{Deserialize, Serialize};

use crate::fields::{InvalidRow, invalid};

/// A rate in bytes per second: 1k to 1P bits per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct ByteRate(u64);

impl ByteRate {
    const MIN: u64 = 125;
    const MAX: u64 = 125_000_000_000_000;

    /// Returns the rate of the number, if it is one.
    pub const fn new(number: u64) -> Option<Self> {
        if number < Self::MIN || number > Self::MAX {
            return None;
        }
        Some(Self(number))
    }

    pub const fn get(self) -> u64 {
        self.0
    }

    fn read(number: u64, field: &'static str) -> Result<Self, InvalidRow> {
        Self::new(number).ok_or(invalid(field, "125 to 125000000000000 bytes per second"))
    }

    /// Reads a field in which 0 is none.
    pub(crate) fn read_option(number: u64, field: &'static str) -> Result<Option<Self>, InvalidRow> {
        (number != 0).then(|| Self::read(number, field)).transpose()
    }

    /// Writes a field in which 0 is none.
    pub(crate) fn number(rate: Option<Self>) -> u64 {
        rate.map_or(0, Self::get)
    }
}

impl TryFrom<u64> for ByteRate {
    type Error = InvalidRow;

    fn try_from(number: u64) -> Result<Self, InvalidRow> {
        Self::read(number, "rate")
    }
}

impl From<ByteRate> for u64 {
    fn from(rate: ByteRate) -> Self {
        rate.get()
    }
}

//! The id of a class or a set of network policy.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::fields::{InvalidRow, invalid};

/// The id of a class or set, unique in its VPC. It has 24 bits, because packets bear it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct PolicyId(u32);

impl PolicyId {
    /// The class of endpoints that no peer of a policy selects.
    pub const PLAIN: Self = Self(1);
    const MAX: u32 = 0xff_ffff;
    /// The class of clients by a shared Service. No endpoint has it, and no row: every droplet knows it.
    pub const SHARED_SERVICE: Self = Self(Self::MAX);

    /// Returns the id of the number, if it is one.
    pub const fn new(number: u32) -> Option<Self> {
        if number == 0 || number > Self::MAX {
            return None;
        }
        Some(Self(number))
    }

    pub const fn get(self) -> u32 {
        self.0
    }

    pub(crate) fn read(number: u32) -> Result<Self, InvalidRow> {
        Self::new(number).ok_or(invalid("id", "1 to 16777215"))
    }

    /// Reads a field in which 0 is none.
    pub(crate) fn read_option(number: u32) -> Result<Option<Self>, InvalidRow> {
        (number != 0).then(|| Self::read(number)).transpose()
    }

    /// Writes a field in which 0 is none.
    pub(crate) fn number(id: Option<Self>) -> u32 {
        id.map_or(0, Self::get)
    }
}

impl TryFrom<u32> for PolicyId {
    type Error = InvalidRow;

    fn try_from(number: u32) -> Result<Self, InvalidRow> {
        Self::read(number)
    }
}

impl From<PolicyId> for u32 {
    fn from(id: PolicyId) -> Self {
        id.get()
    }
}

impl fmt::Display for PolicyId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:06x}", self.0)
    }
}

//! Rows that could not be applied, in the form in which the operator is told of them.

use thuban_proto::transit as proto;
use thuban_rows::InvalidRow;
use tracing::warn;

use crate::dataplane::tables::TableError;
use crate::program::policy::{NoRoom, PolicyError};

/// The reason why one row was not applied.
pub struct Rejection {
    pub reason: proto::NackReason,
    pub message: String,
}

/// Returns the nack of a row that was not applied.
pub fn refusal(epoch: u64, sequence: u64, key: Option<proto::RowKey>, rejection: Rejection) -> proto::Nack {
    warn!(reason = ?rejection.reason, message = rejection.message, "row not applied");
    proto::Nack {
        epoch,
        sequence,
        key,
        reason: rejection.reason.into(),
        message: rejection.message,
    }
}

impl From<InvalidRow> for Rejection {
    fn from(error: InvalidRow) -> Self {
        Self {
            reason: proto::NackReason::Invalid,
            message: error.to_string(),
        }
    }
}

impl From<PolicyError> for Rejection {
    fn from(error: PolicyError) -> Self {
        Self {
            reason: proto::NackReason::IdTaken,
            message: error.to_string(),
        }
    }
}

impl From<NoRoom> for Rejection {
    fn from(why: NoRoom) -> Self {
        Self {
            reason: proto::NackReason::TableFull,
            message: why.to_string(),
        }
    }
}

impl From<TableError> for Rejection {
    fn from(error: TableError) -> Self {
        let reason = match &error {
            TableError::Full { .. } | TableError::Share { .. } => proto::NackReason::TableFull,
            TableError::Open { .. } | TableError::Access { .. } | TableError::Mismatch { .. } => {
                proto::NackReason::Unspecified
            }
        };
        Self {
            reason,
            message: error.to_string(),
        }
    }
}

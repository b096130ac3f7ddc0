//! The row of a pod on this node that got no endpoint: its ADD fails at once with the reason.

use thuban_proto::transit::RefusedRow;

use crate::fields::{self, InvalidRow};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The pod's UID as kubelet tells the CNI plugin; not empty.
    pub pod_uid: String,
    /// The reason as in the Endpoint's condition.
    pub reason: String,
    pub message: String,
}

impl TryFrom<RefusedRow> for Refused {
    type Error = InvalidRow;

    fn try_from(row: RefusedRow) -> Result<Self, InvalidRow> {
        Ok(Self {
            pod_uid: fields::pod_uid(row.pod_uid)?,
            reason: row.reason,
            message: row.message,
        })
    }
}

impl From<&Refused> for RefusedRow {
    fn from(row: &Refused) -> Self {
        Self {
            pod_uid: row.pod_uid.clone(),
            reason: row.reason.clone(),
            message: row.message.clone(),
        }
    }
}

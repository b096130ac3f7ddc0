//! The CNI verbs, one file a verb.

pub mod add;
pub mod check;
pub mod del;
pub mod gc;
pub mod status;
pub mod version;

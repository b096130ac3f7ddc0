//! One file a verb. CHECK and GC are not supported: the conflist says so, and asking is answered with code 4.

pub mod add;
pub mod del;
pub mod status;
pub mod version;

//! Thuban.

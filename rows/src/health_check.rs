//! The check that a droplet makes of its own backends of a front.

use thuban_api::health_check::{MAX_CHECK_INTERVAL, MAX_CHECKS_IN_A_ROW, MIN_CHECK_INTERVAL, is_check_path};
use thuban_proto::transit as proto;

use crate::fields::{InvalidRow, invalid};
use crate::service::number;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The port at the backends' addresses.
    pub port: u16,
    /// The path of a GET over HTTP/1.1; empty: only a connection is opened.
    pub path: String,
    /// The milliseconds between two checks of a backend.
    pub interval_ms: u32,
    /// How many checks in a row must pass before a backend passes.
    pub rise: u32,
    /// How many checks in a row must fail before a backend fails.
    pub fall: u32,
}

impl TryFrom<proto::HealthCheck> for HealthCheck {
    type Error = InvalidRow;

    fn try_from(told: proto::HealthCheck) -> Result<Self, InvalidRow> {
        let in_a_row = |count: u32| {
            let count = Some(count).filter(|count| (1..=MAX_CHECKS_IN_A_ROW).contains(count));
            count.ok_or(invalid(
                "check.rise and check.fall",
                "numbers that a Vip may have",
            ))
        };
        if !told.path.is_empty() && !is_check_path(&told.path) {
            return Err(invalid("check.path", "empty, or a path of printable ASCII"));
        }
        if !(MIN_CHECK_INTERVAL..=MAX_CHECK_INTERVAL).contains(&told.interval_ms) {
            return Err(invalid("check.interval_ms", "an interval that a Vip may have"));
        }
        Ok(Self {
            port: number(told.port, "check.port")?,
            path: told.path,
            interval_ms: told.interval_ms,
            rise: in_a_row(told.rise)?,
            fall: in_a_row(told.fall)?,
        })
    }
}

impl From<&HealthCheck> for proto::HealthCheck {
    fn from(check: &HealthCheck) -> Self {
        Self {
            port: check.port.into(),
            path: check.path.clone(),
            interval_ms: check.interval_ms,
            rise: check.rise,
            fall: check.fall,
        }
    }
}

impl From<&thuban_api::HealthCheck> for HealthCheck {
    fn from(check: &thuban_api::HealthCheck) -> Self {
        Self {
            port: check.port,
            path: check.get_path().unwrap_or_default().to_owned(),
            interval_ms: check.interval_ms,
            rise: check.rise,
            fall: check.fall,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders;

    #[test]
    fn a_check_that_no_droplet_may_make_is_refused_by_field() {
        let refused = |change: &dyn Fn(&mut proto::HealthCheck), field: &str| {
            let mut told = proto::HealthCheck::from(&builders::health_check());
            change(&mut told);
            let error = HealthCheck::try_from(told).unwrap_err().to_string();
            assert!(error.starts_with(field), "{error}");
        };
        refused(&|told| told.port = 0, "check.port");
        refused(&|told| told.port = 65_536, "check.port");
        refused(&|told| told.path = "healthz".into(), "check.path");
        refused(&|told| told.path = "/\r\nHost: x".into(), "check.path");
        refused(&|told| told.interval_ms = 0, "check.interval_ms");
        refused(&|told| told.rise = 0, "check.rise and check.fall");
        refused(&|told| told.fall = 11, "check.rise and check.fall");
        let tcp = thuban_api::HealthCheck::of_annotation(r#"{"port": 80}"#).unwrap();
        let told = proto::HealthCheck::from(&HealthCheck::from(&tcp));
        assert_eq!(HealthCheck::try_from(told).unwrap().path, "");
    }
}

//! The check of a load balancer's backends, as a Vip or the annotation of a Service has it.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Annotation of Services: the check of their load balancer's backends, as JSON with the fields of
/// `Vip.spec.healthCheck`.
pub const HEALTH_CHECK_ANNOTATION: &str = "thuban.dev/health-check";
/// The least milliseconds between two checks of a backend.
pub const MIN_CHECK_INTERVAL: u32 = 1000;
/// The most milliseconds between two checks of a backend.
pub const MAX_CHECK_INTERVAL: u32 = 300_000;
/// The most passed or failed checks in a row that a change of the state takes.
pub const MAX_CHECKS_IN_A_ROW: u32 = 10;
/// The length of the longest path.
pub const MAX_CHECK_PATH: usize = 256;
/// The longest annotation that is read.
const MAX_ANNOTATION: usize = 1024;

/// How the nodes of backends check them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.path) || (has(self.type) && self.type == 'HTTP')")
        .message("spec.healthCheck.path needs the type HTTP")
)]
pub struct HealthCheck {
    /// `TCP`: the backend takes a connection. `HTTP`: it also answers a GET with a status from 200 to 399.
    /// Default: TCP.
    #[serde(default, rename = "type")]
    pub kind: HealthCheckType,
    /// The port of the pods that is checked, 1 to 65535. It may be another port than that of the Service's backends.
    #[schemars(range(min = 1, max = 65_535))]
    pub port: u16,
    /// The path of the GET, with a query if one is needed. Default: /.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new("self.matches('^/[!-~]*$')")
            .message("spec.healthCheck.path must be a path such as /healthz, without spaces")
    )]
    #[schemars(length(min = 1, max = MAX_CHECK_PATH))]
    pub path: Option<String>,
    /// The milliseconds between two checks of a backend, 1000 to 300000. A check has failed after this time, or after
    /// 5 s. Default: 5000.
    #[serde(default = "default_interval")]
    #[schemars(range(min = MIN_CHECK_INTERVAL, max = MAX_CHECK_INTERVAL))]
    pub interval_ms: u32,
    /// The number of passed checks in a row after which a failing backend gets new connections again, 1 to 10.
    /// Default: 2.
    #[serde(default = "default_rise")]
    #[schemars(range(min = 1, max = MAX_CHECKS_IN_A_ROW))]
    pub rise: u32,
    /// The number of failed checks in a row after which a backend gets no new connections, 1 to 10. Default: 3.
    #[serde(default = "default_fall")]
    #[schemars(range(min = 1, max = MAX_CHECKS_IN_A_ROW))]
    pub fall: u32,
}

/// What is asked of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum HealthCheckType {
    #[default]
    Tcp,
    Http,
}

fn default_interval() -> u32 {
    5000
}

fn default_rise() -> u32 {
    2
}

fn default_fall() -> u32 {
    3
}

/// Why an annotation is no check. The messages name the field.
#[derive(Debug, Error)]
pub enum HealthCheckError {
    #[error("it must have at most {MAX_ANNOTATION} bytes")]
    TooLong,
    #[error("it must be JSON such as {{\"type\": \"HTTP\", \"port\": 8080, \"path\": \"/healthz\"}}: {0}")]
    Json(#[from] serde_json::Error),
    #[error("port must be 1 to 65535")]
    Port,
    #[error("path needs the type HTTP")]
    PathOfTcp,
    #[error(
        "path must be a path such as /healthz, of at most {MAX_CHECK_PATH} printable ASCII characters without spaces"
    )]
    Path,
    #[error("intervalMs must be {MIN_CHECK_INTERVAL} to {MAX_CHECK_INTERVAL}")]
    Interval,
    #[error("rise and fall must be 1 to {MAX_CHECKS_IN_A_ROW}")]
    InARow,
}

impl HealthCheck {
    /// Reads an annotation. It is held to the rules of the CRD, which the API server doesn't apply to annotations.
    pub fn of_annotation(text: &str) -> Result<Self, HealthCheckError> {
        if text.len() > MAX_ANNOTATION {
            return Err(HealthCheckError::TooLong);
        }
        let check: Self = serde_json::from_str(text)?;
        let is_in_a_row = |number: u32| (1..=MAX_CHECKS_IN_A_ROW).contains(&number);
        if check.port == 0 {
            return Err(HealthCheckError::Port);
        }
        if check.path.is_some() && check.kind != HealthCheckType::Http {
            return Err(HealthCheckError::PathOfTcp);
        }
        if !check.path.as_deref().is_none_or(is_check_path) {
            return Err(HealthCheckError::Path);
        }
        if !(MIN_CHECK_INTERVAL..=MAX_CHECK_INTERVAL).contains(&check.interval_ms) {
            return Err(HealthCheckError::Interval);
        }
        if !is_in_a_row(check.rise) || !is_in_a_row(check.fall) {
            return Err(HealthCheckError::InARow);
        }
        Ok(check)
    }

    /// Returns the path of the GET; none: no GET.
    pub fn get_path(&self) -> Option<&str> {
        match self.kind {
            HealthCheckType::Tcp => None,
            HealthCheckType::Http => Some(self.path.as_deref().unwrap_or("/")),
        }
    }
}

/// Whether a text can be asked for by a GET, and is nothing else in its first line.
pub fn is_check_path(text: &str) -> bool {
    text.starts_with('/') && text.len() <= MAX_CHECK_PATH && text.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_annotation_is_held_to_the_rules_of_the_field() {
        let check = HealthCheck::of_annotation(r#"{"port": 8080}"#).unwrap();
        assert_eq!((check.get_path(), check.port), (None, 8080));
        assert_eq!((check.interval_ms, check.rise, check.fall), (5000, 2, 3));
        let http = HealthCheck::of_annotation(r#"{"type": "HTTP", "port": 80}"#).unwrap();
        assert_eq!(http.get_path(), Some("/"));
        let text = r#"{"type":"HTTP","port":80,"path":"/ready?full=1","intervalMs":1000,"rise":1,"fall":10}"#;
        let all = HealthCheck::of_annotation(text).unwrap();
        assert_eq!(all.get_path(), Some("/ready?full=1"));
        assert_eq!(serde_json::to_string(&all).unwrap(), text);
        for (wrong, field) in [
            ("tcp", "JSON"),
            (r#"{"type": "HTTP"}"#, "port"),
            (r#"{"port": 0}"#, "port"),
            (r#"{"port": 65536}"#, "JSON"),
            (r#"{"port": 80, "type": "UDP"}"#, "UDP"),
            (r#"{"port": 80, "path": "/"}"#, "the type HTTP"),
            (r#"{"port": 80, "type": "HTTP", "path": "healthz"}"#, "path must"),
            (
                r#"{"port": 80, "type": "HTTP", "path": "/ HTTP/1.1"}"#,
                "path must",
            ),
            (
                r#"{"port": 80, "type": "HTTP", "path": "/\r\nX: y"}"#,
                "path must",
            ),
            (r#"{"port": 80, "intervalMs": 999}"#, "intervalMs"),
            (r#"{"port": 80, "intervalMs": 300001}"#, "intervalMs"),
            (r#"{"port": 80, "rise": 0}"#, "rise and fall"),
            (r#"{"port": 80, "fall": 11}"#, "rise and fall"),
        ] {
            let error = HealthCheck::of_annotation(wrong).unwrap_err().to_string();
            assert!(error.contains(field), "{wrong}: {error}");
        }
        let long = format!("{{\"port\": 80{}}}", " ".repeat(MAX_ANNOTATION));
        assert!(HealthCheck::of_annotation(&long).is_err());
    }

    #[test]
    fn messages_schema_and_descriptions_have_the_same_bounds() {
        let schema = serde_json::to_value(schemars::schema_for!(HealthCheck)).unwrap();
        let of = |field: &str, key: &str| schema["properties"][field][key].as_u64().unwrap();
        let described = |field: &str, bounds: &str| {
            let text = schema["properties"][field]["description"].as_str().unwrap();
            // A line may end between two words.
            assert!(text.replace('\n', " ").contains(bounds), "{field}: {text}");
        };
        let intervals = [MIN_CHECK_INTERVAL, MAX_CHECK_INTERVAL];
        assert_eq!(
            [of("intervalMs", "minimum"), of("intervalMs", "maximum")],
            intervals.map(u64::from)
        );
        let [least, most] = intervals;
        let told = HealthCheckError::Interval.to_string();
        assert_eq!(told, format!("intervalMs must be {least} to {most}"));
        described("intervalMs", &format!("{least} to {most}"));
        for field in ["rise", "fall"] {
            assert_eq!(
                [of(field, "minimum"), of(field, "maximum")],
                [1, MAX_CHECKS_IN_A_ROW].map(u64::from)
            );
            described(field, &format!("1 to {MAX_CHECKS_IN_A_ROW}"));
        }
        assert_eq!(schema["properties"]["path"]["maxLength"], MAX_CHECK_PATH);
        let told = HealthCheckError::Path.to_string();
        assert!(told.contains(&format!("at most {MAX_CHECK_PATH} ")), "{told}");
    }
}

//! The log as JSON: one object a line, with time, level, target, message, and the fields of the event.
//!
//! tracing-subscriber's own JSON leaves out the causes of errors.

use std::error::Error;
use std::fmt;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

pub struct Lines;

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut fields = Fields(Map::new());
        fields.0.insert("timestamp".into(), time.into());
        fields.0.insert("level".into(), metadata.level().as_str().into());
        fields.0.insert("target".into(), metadata.target().into());
        event.record(&mut fields);
        writeln!(writer, "{}", Value::Object(fields.0))
    }
}

/// The fields of an event. A field of the name of another one gets an underscore.
struct Fields(Map<String, Value>);

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        let mut name = field.name().to_owned();
        while self.0.contains_key(&name) {
            name.push('_');
        }
        self.0.insert(name, value);
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        let (mut chain, mut cause) = (value.to_string(), value.source());
        while let Some(error) = cause {
            chain = format!("{chain}: {error}");
            cause = error.source();
        }
        self.add(field, chain.into());
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    use serde_json::Value;
    use tracing::warn;

    use super::Lines;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[derive(Debug, thiserror::Error)]
    #[error("cannot write")]
    struct Failed(#[source] io::Error);

    #[test]
    fn a_line_has_all_fields_and_the_causes_of_errors() {
        let written = Written::default();
        let writer = written.clone();
        let log = tracing_subscriber::fmt()
            .event_format(Lines)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(log, || {
            let error = Failed(io::Error::other("disk full"));
            warn!(
                error = &error as &dyn std::error::Error,
                vni = 7,
                message = "told",
                "row {}",
                "refused"
            );
        });
        let line = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let line: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(line["error"], "cannot write: disk full");
        assert_eq!(line["vni"], 7);
        assert_eq!(line["level"], "WARN");
        let told = [&line["message"], &line["message_"]];
        assert!(
            told.contains(&&Value::from("told")) && told.contains(&&Value::from("row refused")),
            "{line}"
        );
        assert!(line["timestamp"].as_str().unwrap().ends_with('Z'), "{line}");
    }
}

//! Metrics that every process has: its version, and what it takes from the machine. The names are those of Prometheus'
//! own client libraries.

use std::fmt::Write;
use std::fs;

use crate::traces;

/// Ticks a second in `/proc`, on every architecture (`USER_HZ`).
const TICKS: f64 = 100.0;
const END: &str = "# EOF\n";

/// Returns a page in OpenMetrics with these metrics at its end.
pub fn with_own(page: &str) -> String {
    let mut text = page.strip_suffix(END).unwrap_or(page).to_owned();
    let version = env!("CARGO_PKG_VERSION");
    let _ = write!(
        text,
        "# HELP thuban_build The version of the program.\n# TYPE thuban_build info\n\
         thuban_build_info{{version=\"{version}\"}} 1\n"
    );
    let mut add = |name: &str, kind: &str, help: &str, value: Option<f64>| {
        let Some(value) = value else { return };
        let suffix = if kind == "counter" { "_total" } else { "" };
        let _ = write!(
            text,
            "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{suffix} {value}\n"
        );
    };
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let cpu = [field(&stat, 14), field(&stat, 15)]
        .into_iter()
        .sum::<Option<f64>>();
    add(
        "process_cpu_seconds",
        "counter",
        "User and system CPU time spent, in seconds.",
        cpu.map(|ticks| ticks / TICKS),
    );
    add(
        "process_resident_memory_bytes",
        "gauge",
        "Resident memory size, in bytes.",
        kilobytes("VmRSS:").map(|size| size * 1024.0),
    );
    add(
        "process_open_fds",
        "gauge",
        "Number of open file descriptors.",
        fs::read_dir("/proc/self/fd")
            .ok()
            .and_then(|files| u32::try_from(files.count()).ok())
            .map(f64::from),
    );
    add(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since the Unix epoch, in seconds.",
        booted()
            .zip(field(&stat, 22))
            .map(|(boot, ticks)| boot + ticks / TICKS),
    );
    if let Some((sent, lost)) = traces::counts() {
        let lost = ("lost", "Spans that the collector has not taken.", lost);
        for (end, help, value) in [("sent", "Spans that the collector has taken.", sent), lost] {
            let name = format!("thuban_trace_spans_{end}");
            let _ = write!(
                text,
                "# HELP {name} {help}\n# TYPE {name} counter\n{name}_total {value}\n"
            );
        }
    }
    text.push_str(END);
    text
}

/// Reads a field of `/proc/self/stat` by its number in proc(5). The second field, the name, may have blanks.
fn field(stat: &str, number: usize) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(number - 3)?.parse().ok()
}

/// Reads a size of `/proc/self/status`, in KiB.
fn kilobytes(name: &str) -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns when the machine was booted, in seconds since the Unix epoch.
fn booted() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let line = stat.lines().find_map(|line| line.strip_prefix("btime "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::{SystemTime, UNIX_EPOCH};

    use super::{END, with_own};

    #[test]
    fn a_page_tells_what_the_process_takes() {
        let page = with_own("a 1\n# EOF\n");
        assert!(
            page.starts_with("a 1\n# HELP thuban_build ") && page.ends_with(END),
            "{page}"
        );
        let value = |name: &str| -> f64 {
            let line = page.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim().parse().unwrap()
        };
        assert!(value("process_cpu_seconds_total") < 3600.0);
        assert!((1e5..1e12).contains(&value("process_resident_memory_bytes")));
        assert!(value("process_open_fds") >= 3.0);
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs_f64();
        assert!((now - 3600.0..now + 5.0).contains(&value("process_start_time_seconds")));
    }
}

//! Ping-pong by sockperf: round trips, not the halves that sockperf calls latency.

use std::time::Duration;

use anyhow::{Context, Result};

use super::{CLIENT_CORE, Ends, SERVER_CORE};
use crate::bench::{Sample, process::Process};

const PORT: u16 = 6000;

pub fn round_trips(ends: Ends, time: Duration) -> Result<Vec<Sample>> {
    let address = ends.address;
    let line = format!("sockperf server --tcp -i {address} -p {PORT}");
    let mut server = Process::start(ends.server, SERVER_CORE, &line)?;
    server.await_listener(ends.server, PORT)?;
    let line = format!(
        "sockperf ping-pong --tcp --full-rtt -m 64 -i {address} -p {PORT} -t {}",
        time.as_secs().max(1)
    );
    let client = Process::start(ends.client, CLIENT_CORE, &line)?;
    let text = client.output(time + Duration::from_secs(15))?;
    Ok(vec![
        Sample::new("rr_p50_us", "us", percentile(&text, "50.000")?),
        Sample::new("rr_p99_us", "us", percentile(&text, "99.000")?),
    ])
}

/// Of a line such as `sockperf: ---> percentile 50.000 =   13.370`, which may have colours in it.
fn percentile(text: &str, which: &str) -> Result<f64> {
    let line = text
        .lines()
        .find(|line| line.contains(&format!("percentile {which}")))
        .with_context(|| format!("sockperf says no percentile {which}"))?;
    let (_, value) = line.split_once('=').context("a value")?;
    let number: String = value
        .trim()
        .chars()
        .take_while(|character| character.is_ascii_digit() || *character == '.')
        .collect();
    number.parse().with_context(|| format!("reading {line}"))
}

#[cfg(test)]
mod tests {
    use super::percentile;

    #[test]
    fn percentiles_are_read_from_lines_of_sockperf() {
        let text = "sockperf: ---> percentile 99.000 =   21.114\nsockperf: ---> percentile 50.000 =   13.370\u{1b}[0m\n";
        assert!((percentile(text, "50.000").unwrap() - 13.37).abs() < 1e-9);
        assert!(percentile(text, "75.000").is_err());
    }
}

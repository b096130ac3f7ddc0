//! Bulk TCP by iperf3: bits that the server received.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Ends;
use crate::bench::{
    machine::busy_ms,
    process::{CLIENT_CORE, Process, SERVER_CORE},
    results::Sample,
};

pub const PORT: u16 = 5201;

pub fn one(ends: Ends, time: Duration) -> Result<Vec<Sample>> {
    let (gigabits, seconds, busy) = run(ends, time, 1)?;
    Ok(vec![
        Sample::new("tcp1_gbps", "Gbit/s", gigabits / seconds),
        Sample::new("cpu_ms_per_gb", "ms/Gbit", busy / gigabits),
    ])
}

pub fn eight(ends: Ends, time: Duration) -> Result<Vec<Sample>> {
    let (gigabits, seconds, _) = run(ends, time, 8)?;
    Ok(vec![Sample::new("tcp8_gbps", "Gbit/s", gigabits / seconds)])
}

/// Runs iperf3. Returns the gigabits carried, in how many seconds, and the milliseconds of CPU that the machine spent
/// meanwhile.
fn run(ends: Ends, time: Duration, streams: u8) -> Result<(f64, f64, f64)> {
    let mut server = Process::start(ends.server, SERVER_CORE, "iperf3 -s -1")?;
    server.await_listener(ends.server, PORT)?;
    let before = busy_ms()?;
    // iperf3 takes whole seconds, and never ends after 0.
    let line = format!(
        "iperf3 -J -c {} -t {} -P {streams} --connect-timeout 3000",
        ends.address,
        time.as_secs().max(1)
    );
    let client = Process::start(ends.client, CLIENT_CORE, &line)?;
    let text = client.output(time + Duration::from_secs(15))?;
    let busy = busy_ms()? - before;
    let report: Value = serde_json::from_str(&text).context("reading iperf3's report")?;
    let received = &report["end"]["sum_received"];
    let bytes = received["bytes"].as_f64().context("iperf3 says no bytes")?;
    let seconds = received["seconds"].as_f64().context("iperf3 says no seconds")?;
    ensure!(bytes > 1e6 && seconds > 0.5, "only {bytes} bytes in {seconds} s");
    Ok((bytes * 8.0 / 1e9, seconds, busy))
}

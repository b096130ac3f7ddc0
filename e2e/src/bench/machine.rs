//! The machine that is measured: its description, and how busy it was.

use std::{fs, process::Command, thread};

use anyhow::{Context, Result};
use serde::Serialize;

/// The properties of the machine that numbers depend on.
#[derive(Debug, Serialize)]
pub struct Machine {
    pub kernel: String,
    pub cpu: String,
    pub cores: usize,
    pub memory_gib: u64,
}

impl Machine {
    pub fn observe() -> Result<Self> {
        let read = |path: &str| fs::read_to_string(path).with_context(|| path.to_owned());
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let memory = field(&read("/proc/meminfo")?, "MemTotal").context("MemTotal")?;
        let kibibytes: u64 = memory.trim_end_matches(" kB").parse().context("MemTotal")?;
        Ok(Self {
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            cpu: field(&read("/proc/cpuinfo")?, "model name").unwrap_or_else(|| "unknown".to_owned()),
            cores: thread::available_parallelism()?.get(),
            memory_gib: (kibibytes + (1 << 19)) >> 20,
        })
    }
}

/// Returns date and time, UTC.
pub fn date() -> Result<String> {
    let output = Command::new("date")
        .args(["-u", "+%Y-%m-%dT%H:%M:%SZ"])
        .output()
        .context("date")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the milliseconds that all cores together were busy since boot: user, nice, system, interrupts.
pub fn busy_ms() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat").context("/proc/stat")?;
    let ticks: Vec<f64> = text
        .lines()
        .next()
        .context("an empty /proc/stat")?
        .split_whitespace()
        .skip(1)
        .map_while(|word| word.parse().ok())
        .collect();
    // The fields are user nice system idle iowait irq softirq steal …, each in units of 10 ms.
    let busy = [0, 1, 2, 5, 6].map(|index| ticks.get(index).copied().unwrap_or(0.0));
    Ok(busy.iter().sum::<f64>() * 10.0)
}

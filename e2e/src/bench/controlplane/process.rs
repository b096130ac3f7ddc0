//! The operator's process, as Kubernetes would run it: its own ServiceAccount's token, its release binary, a log. It
//! ends with the bench, however the bench ends.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};

use crate::bench::process::end_with_owner;

/// CPU and memory of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    pub cpu_seconds: f64,
    pub rss_mib: f64,
    pub most_rss_mib: f64,
}

/// The settings with which the operator is started.
#[derive(Clone, Debug)]
pub struct Launch {
    pub binary: PathBuf,
    pub kubeconfig: PathBuf,
    pub log: PathBuf,
    /// The address that droplets dial.
    pub address: String,
    pub port: u16,
    /// Ranges of the nodes' addresses.
    pub underlay: String,
}

#[derive(Debug)]
pub struct Operator {
    child: Child,
    pub started: Instant,
}

impl Operator {
    /// Starts the operator. The calling thread must outlive it: the kernel ends it with that thread.
    pub fn start(launch: &Launch, number: u32) -> Result<Self> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(&launch.log)
            .with_context(|| format!("opening {}", launch.log.display()))?;
        let mut command = Command::new(&launch.binary);
        command
            .env_clear()
            .env("KUBECONFIG", &launch.kubeconfig)
            .env("POD_NAME", format!("thuban-operator-{number}"))
            .env("POD_IP", &launch.address)
            .env("THUBAN_LISTEN_PORT", launch.port.to_string())
            .env("THUBAN_SERVICE_CIDRS", "10.96.0.0/16")
            .env("THUBAN_UNDERLAY_CIDRS", &launch.underlay)
            // All hollow droplets dial from this address.
            .env("THUBAN_STREAM_SOURCES", format!("{}/32", launch.address))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        end_with_owner(&mut command);
        let started = Instant::now();
        let child = command
            .spawn()
            .with_context(|| format!("starting {}", launch.binary.display()))?;
        Ok(Self { child, started })
    }

    pub fn usage(&self) -> Result<Usage> {
        usage(self.child.id())
    }

    /// Returns its process number.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Returns an error if it has ended.
    pub fn check(&mut self, launch: &Launch) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the operator has ended ({status}), see {}", launch.log.display());
        }
        Ok(())
    }

    /// Kills it with SIGKILL: it can't say goodbye, and the Lease stays taken.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("killing the operator")?;
        self.child.wait().context("the operator's end")?;
        Ok(())
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns CPU and memory of any process.
pub fn usage(process: u32) -> Result<Usage> {
    let folder = Path::new("/proc").join(process.to_string());
    let read =
        |name: &str| fs::read_to_string(folder.join(name)).with_context(|| format!("{name} of {process}"));
    parse(&read("stat")?, &read("status")?).with_context(|| format!("numbers of process {process}"))
}

fn parse(stat: &str, status: &str) -> Option<Usage> {
    // The name may have spaces; after it come the state and the numbers, user and system time as 12th and 13th.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<f64>().ok();
    let mib = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib / 1024.0)
    };
    Some(Usage {
        // A tick is 10 ms, on every Linux of today.
        cpu_seconds: (ticks(11)? + ticks(12)?) / 100.0,
        rss_mib: mib("VmRSS:")?,
        most_rss_mib: mib("VmHWM:")?,
    })
}

#[cfg(test)]
mod tests {
    use super::{Usage, parse};

    #[test]
    fn numbers_of_a_process_with_a_strange_name() {
        let stat = "17 (a ) b) S 1 17 17 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 5 0 100 1 1";
        let status = "Name:\ta\nVmHWM:\t  4096 kB\nVmRSS:\t  2048 kB\n";
        let usage = Usage {
            cpu_seconds: 3.0,
            rss_mib: 2.0,
            most_rss_mib: 4.0,
        };
        assert_eq!(parse(stat, status), Some(usage));
        assert_eq!(parse("17 (a", status), None);
    }
}

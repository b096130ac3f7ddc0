//! Other programs in namespaces, and threads of our own, on one core and before all other work of the machine. Programs
//! end with their owner, and with this process however it ends.

use std::{
    fs::File,
    io,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::{prctl, signal::Signal},
    unistd::Pid,
};
use thuban_cluster::wait::wait_until;

use super::traffic::within;

/// The core of the client of a measurement; its server has `SERVER_CORE`.
pub const CLIENT_CORE: usize = 0;
pub const SERVER_CORE: usize = 1;

const LOOK: Duration = Duration::from_millis(20);
/// How long a program may take until it listens.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(5);

/// Has a program killed when the thread that starts it ends, however that ends.
pub fn end_with_owner(command: &mut Command) {
    // SAFETY: one system call, no allocation.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?));
    }
}

/// A running program.
pub struct Process {
    child: Child,
    name: String,
}

impl Process {
    /// Starts a program in the namespace, on one core; arguments are split at spaces. The calling thread must outlive
    /// the program.
    pub fn start(namespace: &Path, core: usize, line: &str) -> Result<Self> {
        let mut words = line.split(' ');
        let name = words.next().unwrap_or_default().to_owned();
        let mut command = Command::new(&name);
        command.args(words).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let file = File::open(namespace).with_context(|| namespace.display().to_string())?;
        let cores = one_core(core)?;
        end_with_owner(&mut command);
        // SAFETY: between fork and exec only system calls, no allocation.
        #[allow(unsafe_code)]
        unsafe {
            command.pre_exec(move || {
                nix::sched::setns(&file, nix::sched::CloneFlags::CLONE_NEWNET)?;
                sched_setaffinity(Pid::from_raw(0), &cores)?;
                real_time(0, 1)
            });
        }
        let child = command.spawn().with_context(|| format!("starting {name}"))?;
        Ok(Self { child, name })
    }

    /// Returns what the program prints until it ends by itself, within the time.
    pub fn output(mut self, within: Duration) -> Result<String> {
        let stdout = self.child.stdout.take().context("a pipe")?;
        let stderr = self.child.stderr.take().context("a pipe")?;
        let read = |mut pipe: Box<dyn std::io::Read + Send>| {
            thread::spawn(move || {
                let mut bytes = Vec::new();
                let _ = pipe.read_to_end(&mut bytes);
                String::from_utf8_lossy(&bytes).into_owned()
            })
        };
        let (stdout, stderr) = (read(Box::new(stdout)), read(Box::new(stderr)));
        let what = format!("the end of {}", self.name);
        let status = wait_until(&what, within, LOOK, || Ok(self.child.try_wait()?))?;
        let text = stdout.join().unwrap_or_default();
        if !status.success() {
            let errors = stderr.join().unwrap_or_default();
            bail!("{}: {status}: {} {}", self.name, errors.trim(), last_line(&text));
        }
        Ok(text)
    }

    /// Waits until somebody listens on a TCP port in the namespace.
    pub fn await_listener(&mut self, namespace: &Path, port: u16) -> Result<()> {
        let wanted = format!(":{port:04X} ");
        let what = format!("{} to listen on port {port}", self.name);
        wait_until(&what, LISTEN_TIMEOUT, LOOK, || {
            let listens = within(namespace, || {
                let tables = ["tcp", "tcp6"].map(|name| format!("/proc/thread-self/net/{name}"));
                let tables = tables.map(|path| std::fs::read_to_string(path).unwrap_or_default());
                // State 0A: LISTEN.
                Ok(tables
                    .iter()
                    .flat_map(|table| table.lines())
                    .any(|line| line.contains(&wanted) && line.contains(" 0A ")))
            })?;
            if !listens && let Some(status) = self.child.try_wait()? {
                bail!("{} ended before it listened: {status}", self.name);
            }
            Ok(listens.then_some(()))
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Keeps the calling thread on one core, with priority over all other work of the machine. Otherwise latencies would
/// measure the fair scheduler's slices of 3 ms. The kernel leaves other work a twentieth of the time.
pub fn pin(core: usize) -> Result<()> {
    place(0, core, 1)
}

/// Keeps the calling thread on one core, where the scheduler gives it ten times the share of others.
pub fn prefer(core: usize) -> Result<()> {
    sched_setaffinity(Pid::from_raw(0), &one_core(core)?)
        .with_context(|| format!("pinning to core {core}"))?;
    // SAFETY: changes a number of the calling thread.
    #[allow(unsafe_code)]
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error()).context("asking for priority")
    }
}

/// Does the same as [`pin`] for any thread, 0 for the calling one, with a real-time priority.
pub fn place(thread: i32, core: usize, priority: i32) -> Result<()> {
    let cores = one_core(core)?;
    sched_setaffinity(Pid::from_raw(thread), &cores).with_context(|| format!("pinning to core {core}"))?;
    real_time(thread, priority).context("asking for SCHED_FIFO")
}

fn real_time(thread: i32, priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: the structure is ours and whole.
    #[allow(unsafe_code)]
    let result = unsafe { libc::sched_setscheduler(thread, libc::SCHED_FIFO, &raw const parameters) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns one core; on a machine that has fewer cores, one that exists.
fn one_core(core: usize) -> Result<CpuSet> {
    let cores = thread::available_parallelism()?.get();
    let mut set = CpuSet::new();
    set.set(core % cores)?;
    Ok(set)
}

fn last_line(text: &str) -> &str {
    text.trim().lines().last().unwrap_or_default()
}

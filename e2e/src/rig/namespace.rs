//! Named network namespaces that are removed with their owner. Those of a killed run are removed by the next run.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result};
use thuban_cluster::{
    command::run,
    namespace::{self, inside},
};

const PREFIX: &str = "thubanrig";
static NEXT: AtomicU32 = AtomicU32::new(0);

#[derive(Debug)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Makes a namespace whose name contains the given word.
    pub fn new(word: &str) -> Result<Self> {
        remove_stale();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}-{}-{number}-{word}", std::process::id());
        run("ip", &["netns", "add", &name])?;
        let namespace = Self { name };
        namespace.command("ip link set lo up")?;
        Ok(namespace)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the file of the namespace.
    pub fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// Runs a command in the namespace; arguments are split at spaces.
    pub fn command(&self, line: &str) -> Result<String> {
        let mut words = vec!["netns", "exec", &self.name];
        words.extend(line.split(' '));
        run("ip", &words)
    }

    /// Runs a function on a thread of its own inside the namespace.
    pub fn run<T: Send>(&self, function: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        inside(self.open()?, function)
    }

    /// Moves the calling thread into the namespace.
    pub fn enter(&self) -> Result<()> {
        namespace::enter(self.open()?).with_context(|| self.name.clone())
    }

    fn open(&self) -> Result<File> {
        let path = self.path();
        File::open(&path).with_context(|| path.display().to_string())
    }

    /// Writes a sysctl of the namespace.
    pub fn sysctl(&self, path: &str, value: &str) -> Result<()> {
        self.run(|| fs::write(Path::new("/proc/sys/net").join(path), value).with_context(|| path.to_owned()))
    }

    /// Returns the index of an interface in the namespace.
    pub fn interface(&self, name: &str) -> Result<u32> {
        self.run(|| nix::net::if_::if_nametoindex(name).with_context(|| name.to_owned()))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = run("ip", &["netns", "del", &self.name]) {
            eprintln!("{error:#}");
        }
    }
}

/// Removes namespaces of processes that are gone.
fn remove_stale() {
    let Ok(entries) = fs::read_dir("/run/netns") else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(process) = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').nth(1)) else {
            continue;
        };
        if !Path::new("/proc").join(process).exists() {
            let _ = run("ip", &["netns", "del", &name]);
        }
    }
}

//! The instance's cgroups: which processes belong to it, and how it ends.
//!
//! A process belongs to an instance when it is in the instance's cgroup; nothing else tells. Hierarchies of version 1
//! are all used (kubelet wants its root in each); on a machine with version 2 only that one is used.

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::wait::{wait_for, wait_until};

const UNIFIED: &str = "/sys/fs/cgroup";

/// Returns the mount points of file systems of type `kind`.
fn mounts_of(kind: &str) -> Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("reading the mounts")?;
    Ok(mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .filter(|fields| fields.get(2) == Some(&kind))
        .filter_map(|fields| fields.get(1).map(PathBuf::from))
        .filter(|path| path.starts_with(UNIFIED))
        .collect())
}

/// Returns the mount points of the hierarchies, first the one with the processes (`pids`, or the unified one).
fn hierarchies() -> Result<Vec<PathBuf>> {
    let mut found = mounts_of("cgroup")?;
    if found.is_empty() && Path::new(UNIFIED).join("cgroup.controllers").exists() {
        return Ok(vec![UNIFIED.into()]);
    }
    found.sort();
    let processes = found.iter().position(|path| path.ends_with("pids"));
    match processes {
        Some(position) => found.swap(0, position),
        None => bail!("no cgroups with the pids controller under {UNIFIED}: mount them"),
    }
    Ok(found)
}

fn is_unified(hierarchy: &Path) -> bool {
    hierarchy.join("cgroup.controllers").exists()
}

/// Makes `group` (a path such as `thuban-demo/node-a`) in every hierarchy, with CPUs and memory nodes to run on.
pub fn create(group: &str) -> Result<()> {
    for hierarchy in hierarchies()? {
        let mut folder = hierarchy.clone();
        for part in Path::new(group) {
            if is_unified(&hierarchy) {
                // A controller that the machine does not have must not keep the others away.
                for controller in ["+cpu", "+cpuset", "+memory", "+pids", "+io"] {
                    let _ = fs::write(folder.join("cgroup.subtree_control"), controller);
                }
            }
            let parent = folder.clone();
            folder = folder.join(part);
            fs::create_dir_all(&folder).with_context(|| format!("making cgroup {}", folder.display()))?;
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if !is_unified(&hierarchy) && folder.join(file).exists() {
                    let value = fs::read_to_string(parent.join(file))?;
                    fs::write(folder.join(file), value.trim())
                        .with_context(|| format!("{}/{file}", folder.display()))?;
                }
            }
        }
    }
    Ok(())
}

/// Returns the file that takes a process into `group`; makes the leaf.
pub fn processes_file(group: &str) -> Result<PathBuf> {
    let hierarchies = hierarchies()?;
    let folder = hierarchies[0].join(group);
    fs::create_dir_all(&folder).with_context(|| format!("making cgroup {}", folder.display()))?;
    Ok(folder.join("cgroup.procs"))
}

/// Returns all processes in `group` and beneath it.
pub fn processes(group: &str) -> Result<BTreeSet<i32>> {
    let mut found = BTreeSet::new();
    for folder in folders(&hierarchies()?[0].join(group)) {
        // The group was removed between the walk and the read: it holds no process.
        let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
    }
    Ok(found)
}

/// Returns the folder of `group` in the hierarchy of version 2; makes it.
pub fn version_2(group: &str) -> Result<PathBuf> {
    let mounts = mounts_of("cgroup2")?;
    let folder = mounts.first().context("no cgroups of version 2")?.join(group);
    fs::create_dir_all(&folder).with_context(|| format!("making cgroup {}", folder.display()))?;
    Ok(folder)
}

/// A stay of this process in a cgroup of version 2; it goes back at the end.
#[derive(Debug)]
pub struct Stay {
    before: PathBuf,
}

impl Stay {
    pub fn begin(group: &str) -> Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").context("reading the own cgroups")?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
        let before = version_2(own.context("no cgroup of version 2")?)?;
        move_to(&version_2(group)?)?;
        Ok(Self { before })
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        if let Err(error) = move_to(&self.before) {
            eprintln!("{error:#}");
        }
    }
}

fn move_to(folder: &Path) -> Result<()> {
    let file = folder.join("cgroup.procs");
    fs::write(&file, std::process::id().to_string()).with_context(|| format!("writing {}", file.display()))
}

/// Sends a signal to processes. A process that has ended needs none.
pub fn signal<'a>(processes: impl IntoIterator<Item = &'a i32>, signal: Signal) {
    for process in processes {
        let _ = kill(Pid::from_raw(*process), signal);
    }
}

/// Sends a signal to all processes of `group`.
pub fn signal_all(group: &str, what: Signal) -> Result<()> {
    signal(&processes(group)?, what);
    Ok(())
}

/// Kills all processes of `group` and waits until they are gone.
pub fn kill_all(group: &str, patience: Duration) -> Result<()> {
    let mut living = BTreeSet::new();
    let what = format!("the end of all processes of {group}");
    let waited = wait_until(&what, patience, Duration::from_millis(50), || {
        living = processes(group)?;
        signal(&living, Signal::SIGKILL);
        Ok(living.is_empty().then_some(()))
    });
    waited.with_context(|| format!("processes of {group}: {living:?}"))
}

/// Removes `group` and everything beneath it in every hierarchy. Its processes must be gone.
pub fn remove(group: &str) -> Result<()> {
    for root in roots(group)? {
        for folder in folders(&root).iter().rev() {
            remove_folder(folder)?;
        }
    }
    Ok(())
}

/// Returns the group's folders that still exist.
pub fn leftovers(group: &str) -> Result<Vec<PathBuf>> {
    Ok(roots(group)?.into_iter().filter(|path| path.exists()).collect())
}

/// Returns the places where the group may be. With version 1, runc also makes its cgroups in an additional version 2
/// tree.
fn roots(group: &str) -> Result<Vec<PathBuf>> {
    let mounts = [mounts_of("cgroup")?, mounts_of("cgroup2")?].concat();
    Ok(mounts.into_iter().map(|mount| mount.join(group)).collect())
}

/// Removes a folder. A cgroup stays busy for some moments after its last process has died.
fn remove_folder(folder: &Path) -> Result<()> {
    let what = format!("the end of cgroup {}", folder.display());
    let (patience, pause) = (Duration::from_secs(5), Duration::from_millis(20));
    wait_for(&what, patience, pause, || match fs::remove_dir(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => Ok(true),
    })
}

/// Returns `root` and all folders beneath it, parents first; none if there is no such folder.
fn folders(root: &Path) -> Vec<PathBuf> {
    if !root.is_dir() {
        return Vec::new();
    }
    let mut found = vec![root.to_path_buf()];
    let mut next = 0;
    while let Some(folder) = found.get(next).cloned() {
        next += 1;
        let Ok(entries) = fs::read_dir(&folder) else {
            continue;
        };
        found.extend(
            entries
                .flatten()
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|entry| entry.path()),
        );
    }
    found
}

//! The lanes and shares of the tests of a cluster. Each share has a cluster of its own. Shares run side by side, the
//! lanes of a share one after the other. A test's lane is the first part of its name.

use std::{
    collections::{BTreeSet, VecDeque},
    process::Command,
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::{Context, Result, bail};

use super::{
    binaries::{self, Binary},
    output::Sum,
    times::Times,
};

/// How many files of a lane run side by side.
const AT_ONCE: usize = 4;

/// Tests that disturb each other in the same way.
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    name: &'static str,
    /// Whether its files may run side by side; the tests of a file never do.
    is_parallel: bool,
}

/// The lanes that run on one cluster.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    pub cluster: &'static str,
    pub lanes: &'static [Lane],
    /// Whether the cluster has thuban-observe.
    pub has_flow_relay: bool,
    /// Whether the tests of `cargo xtask uninstall` run at its end.
    pub has_removal: bool,
}

/// The shares, balanced by how long they take.
pub const SHARES: [Share; 2] = [
    Share {
        cluster: "test",
        lanes: &[
            Lane {
                name: "side_by_side",
                is_parallel: true,
            },
            Lane {
                name: "control_plane",
                is_parallel: false,
            },
        ],
        has_flow_relay: true,
        has_removal: false,
    },
    Share {
        cluster: "test2",
        lanes: &[
            Lane {
                name: "alone",
                is_parallel: false,
            },
            Lane {
                name: "gone",
                is_parallel: false,
            },
        ],
        has_flow_relay: false,
        has_removal: true,
    },
];

/// Runs the lanes of a share.
pub fn run(binary: &Binary, share: &Share) -> Result<(Sum, Times)> {
    let tests = list(binary)?;
    let lanes = SHARES.iter().flat_map(|share| share.lanes);
    let known: BTreeSet<&str> = lanes.map(|lane| lane.name).collect();
    if let Some(test) = tests.iter().find(|test| !known.contains(part(test, 0))) {
        bail!("the test {test} is in no lane of {known:?}: put its file in one of these folders");
    }
    let (mut sum, mut times) = (Sum::default(), Times::default());
    for lane in share.lanes {
        let own = tests.iter().filter(|test| part(test, 0) == lane.name);
        let filters: BTreeSet<String> = if lane.is_parallel {
            own.map(|test| format!("{}::{}::", lane.name, part(test, 1)))
                .collect()
        } else {
            BTreeSet::from([format!("{}::", lane.name)])
        };
        let (more, took) = run_files(binary, share.cluster, filters.into_iter().collect());
        sum.add(more);
        times.merge(took);
    }
    Ok((sum, times))
}

/// Runs the tests of each filter in a process of its own.
fn run_files(binary: &Binary, cluster: &str, filters: VecDeque<String>) -> (Sum, Times) {
    let all = Mutex::new((Sum::default(), Times::default()));
    let left = Mutex::new(filters);
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(filter) = next() {
                    let mut took = Times::default();
                    let environment = [("THUBAN_CLUSTER", cluster)];
                    let result =
                        binaries::run(binary, &[&filter, "--test-threads=1"], &environment, &mut took);
                    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                    all.0
                        .add(result.unwrap_or_else(|error| Sum::one(&filter, Err(error))));
                    all.1.merge(took);
                }
            });
        }
    });
    all.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the part of a test's name at this place.
fn part(test: &str, place: usize) -> &str {
    test.split("::").nth(place).unwrap_or_default()
}

/// Returns the names of all tests of a binary.
fn list(binary: &Binary) -> Result<Vec<String>> {
    let output = Command::new(&binary.executable)
        .args(["--list", "--format=terse"])
        .output()
        .with_context(|| format!("starting {}", binary.executable.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names.map(str::to_owned).collect())
}

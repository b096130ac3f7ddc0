//! `cargo xtask test`: all tests, in groups that all run even when one fails, and one sum at the end.
//!
//! A test that failed only because it waited too long is run once more by itself, because machines of tests are busy.
//! If it passes then, the sum names it: such a test may have found something that now and then waits for ever.
//! `--strict` counts it as failed. A test that failed for another reason has failed.

mod binaries;
mod debian_kernel;
mod initramfs;
pub mod kernel;
mod lanes;
mod machine;
pub mod nic;
mod output;
mod times;

use std::{
    io::Write,
    process::ExitCode,
    thread::{self, JoinHandle},
    time::Instant,
};

use anyhow::{Context, Result, anyhow, bail};
use thuban_cluster::Cluster;

use self::{
    binaries::{Binary, Built},
    lanes::{SHARES, Share},
    output::Sum,
    times::Times,
};
use crate::{
    alerts,
    build::{self, Profile, step},
    check, cluster, cni_tools, deps, diagnostics, dns, ebpf, flow_relay, install, kube, load_balancers,
    machine::{KERNEL, Needs},
    manifests, otlp, page, publish, removal,
};

/// Test targets that need root, a cluster, or both. All others are the group `unit`.
const PROGRAMS: &str = "programs";
const NETNS: [&str; 4] = ["netns", "datapath", "neighbours", "haproxy"];
/// Tests of the first of [`NETNS`] that compare times, or modules of them.
const TIMED: [&str; 6] = [
    "attach::a_refused_pods_add_fails_at_once_with_the_reason",
    "killed::",
    "loads::",
    "reconnect::ended_stream_is_redialled_at_once_and_silent_one_soon",
    "restart::traffic_flows_on_while_transitd_is_away_and_comes_back",
    "spool::",
];
/// Runs by `--nic` only.
const NIC: &str = "nic";
const E2E: &str = "cluster";
const SIMULATOR: &str = "simulator";
/// Needs an etcd and CoreDNS, and no cluster.
const NAMES: &str = "dns";
/// Needs a browser, and no cluster.
const PAGE: &str = "page";
const GROUPS: [&str; 7] = ["check", "unit", SIMULATOR, "programs", "netns", PAGE, "e2e"];
/// Builds and images on disk, two clusters in memory.
const NEEDS: Needs = Needs {
    profile: Profile::Test,
    disk: 25,
    memory: 10,
    kernel: KERNEL,
};
/// Schedules of the simulator: first some 200 chosen seeds (`operator/tests/simulator/chosen.txt`), then those from 1
/// on. `cargo xtask soak --only simulator` runs more of them.
pub const SCHEDULES: u64 = 1_200;

/// Runs all groups, or only one. The last line of output is `N passed, N failed`.
pub fn run(only: Option<&str>, schedules: u64, is_strict: bool) -> Result<ExitCode> {
    if let Some(group) = only.filter(|group| !GROUPS.contains(group)) {
        bail!(
            "no group of tests is called {group}: take one of {}",
            GROUPS.join(", ")
        );
    }
    if !nix::unistd::geteuid().is_root() {
        bail!("the tests make network namespaces, load eBPF programs and start a cluster: run them as root");
    }
    if only.is_none() {
        crate::machine::check(&NEEDS, false)?;
    }
    let mut times = Times::default();
    times.stage("packages of the system", |_| deps::ensure())?;
    times.stage("eBPF programs", |_| step("eBPF programs", ebpf::build))?;
    times.stage("page", |_| step("page of thuban-observe", page::build))?;
    let built = times.stage("build of tests", |_| step("tests", binaries::build))?;
    let mut total = Sum::default();
    let mut summary = Vec::new();
    let mut others = None;
    for group in GROUPS {
        if only.is_some_and(|only| only != group) {
            continue;
        }
        println!("\n==> tests: {group}");
        let start = Instant::now();
        let sum = times.stage(group, |times| {
            let run = Run {
                built: &built,
                schedules,
                is_whole: only.is_none(),
            };
            run_group(group, &run, &mut others, times)
        })?;
        summary.push(format!(
            "{group:<10}{:>5} passed {:>4} failed {:>4} ignored {:>7.1} s{}",
            sum.passed,
            sum.failed,
            sum.ignored,
            start.elapsed().as_secs_f32(),
            if sum.late.is_empty() {
                String::new()
            } else {
                format!(", {} when run again", sum.late.len())
            }
        ));
        total.add(sum);
    }
    times.tell()?;
    println!("\n{}\n", summary.join("\n"));
    for (name, said) in &total.failures {
        println!("FAILED {name}: {said}");
    }
    for name in &total.late {
        println!("LATE {name}: it waited too long, and passed when it was run again");
    }
    if is_strict {
        total.passed -= total.late.len();
        total.failed += total.late.len();
    }
    println!("{} passed, {} failed", total.passed, total.failed);
    std::io::stdout().flush()?;
    Ok(if total.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The build of others' programs, beside tests that mostly wait.
type Others = Option<JoinHandle<Result<()>>>;

/// The values that all groups need.
struct Run<'a> {
    built: &'a Built,
    schedules: u64,
    /// Whether all groups run.
    is_whole: bool,
}

fn run_group(group: &str, run: &Run<'_>, others: &mut Others, times: &mut Times) -> Result<Sum> {
    let Run {
        built,
        schedules,
        is_whole,
    } = *run;
    let binaries = &built.binaries;
    let is_special = |binary: &&Binary| {
        let names = [PROGRAMS, E2E, SIMULATOR, NIC, NAMES, PAGE]
            .into_iter()
            .chain(NETNS);
        names.into_iter().any(|name| binary.is_test(name))
    };
    let named = |names: &[&str]| {
        let chosen = binaries
            .iter()
            .filter(|binary| names.iter().any(|name| binary.is_test(name)));
        chosen.collect::<Vec<_>>()
    };
    match group {
        "check" => {
            let mut sum = Sum::one("lints", lints(built.warnings));
            sum.add(Sum::one("format", check::format()));
            sum.add(Sum::one("pages", check::pages()));
            sum.add(Sum::one("names of tests", check::test_names()));
            Ok(sum)
        }
        "unit" => {
            let units: Vec<_> = binaries.iter().filter(|binary| !is_special(binary)).collect();
            run_each(&units, &[], &[], times)
        }
        SIMULATOR => {
            let schedules = schedules.to_string();
            run_each(
                &named(&[SIMULATOR]),
                &[],
                &[("THUBAN_SCHEDULES", &schedules)],
                times,
            )
        }
        "programs" => run_each(&named(&[PROGRAMS]), &[], &[], times),
        PAGE => {
            let mut sum = Sum::one("page without a browser", page::check());
            // A browser takes most of a core.
            sum.add(run_each(&named(&[PAGE]), &["--test-threads=1"], &[], times)?);
            Ok(sum)
        }
        "netns" => {
            step("cnitool and others", cni_tools::ensure)?;
            if is_whole {
                *others = Some(thread::spawn(prepare));
            }
            run_netns(&named(&NETNS), times)
        }
        _ => {
            let binary = named(&[E2E]).into_iter().next();
            run_e2e(
                binary.context("no tests of a cluster were built")?,
                &named(&[NAMES]),
                others.take(),
                times,
            )
        }
    }
}

/// Fails if the build has printed warnings.
fn lints(warnings: usize) -> Result<()> {
    if warnings > 0 {
        bail!("{warnings} warnings, told while the tests were built: `cargo xtask check` tells them again");
    }
    Ok(())
}

/// Runs the tests that measure time first, one test for each core. Then runs the others, which mostly wait.
fn run_netns(binaries: &[&Binary], times: &mut Times) -> Result<Sum> {
    let timed: Vec<&str> = TIMED.iter().copied().chain(["--test-threads=2"]).collect();
    let all = ["--test-threads=8"];
    let skips = TIMED.iter().flat_map(|name| ["--skip", name]);
    let others: Vec<&str> = all.into_iter().chain(skips).collect();
    // A filter fits any part of a name: "loads::" would fit the datapath's "offloads::", too.
    let (own, rest): (Vec<&Binary>, Vec<&Binary>) = binaries
        .iter()
        .copied()
        .partition(|binary| binary.is_test(NETNS[0]));
    let mut sum = run_each(&own, &timed, &[], times)?;
    sum.add(run_each(&rest, &all, &[], times)?);
    sum.add(run_each(&own, &others, &[], times)?);
    Ok(sum)
}

fn run_each(
    binaries: &[&Binary],
    arguments: &[&str],
    environment: &[(&str, &str)],
    times: &mut Times,
) -> Result<Sum> {
    let mut sum = Sum::default();
    for binary in binaries {
        sum.add(binaries::run(binary, arguments, environment, times)?);
    }
    Ok(sum)
}

/// Runs the tests on clusters of their own, which are made before and removed after. `names`: tests that need others'
/// programs only.
fn run_e2e(binary: &Binary, names: &[&Binary], others: Others, times: &mut Times) -> Result<Sum> {
    times.stage("e2e: others' programs", |_| match others {
        Some(building) => building.join().map_err(|_| anyhow!("a thread panicked"))?,
        None => prepare(),
    })?;
    times.stage("e2e: images", |_| build::images(Profile::Test))?;
    let pushed = Sum::one(
        "images in a registry",
        step("images in a registry", publish::registry::check),
    );
    let shares = times.stage("e2e: clusters and tests", |_| {
        thread::scope(|scope| {
            let threads = SHARES
                .each_ref()
                .map(|share| scope.spawn(move || run_share(binary, share)));
            threads.map(thread::ScopedJoinHandle::join)
        })
    });
    let [etcd, coredns] = [kube::binaries()?.join("etcd"), dns::ensure()?.join("coredns")];
    let programs = [("THUBAN_ETCD", etcd), ("THUBAN_COREDNS", coredns)];
    let programs = programs
        .each_ref()
        .map(|(name, path)| (*name, path.to_str().unwrap_or_default()));
    let mut sum = run_each(names, &[], &programs, times)?;
    sum.add(pushed);
    for share in shares {
        let (own, took) = share.unwrap_or_else(|_| {
            (
                Sum::one("e2e", Err(anyhow!("a thread panicked"))),
                Times::default(),
            )
        });
        sum.add(own);
        times.merge(took);
    }
    Ok(sum)
}

/// Builds the parts of clusters beside images, so that no two builds run at once.
fn prepare() -> Result<()> {
    step("kube binaries", kube::binaries)?;
    step("CoreDNS", || dns::archive(Profile::Test))?;
    step("gobgpd", load_balancers::ensure_gobgpd)?;
    step("alerts", alerts::check)?;
    step("Helm", || {
        manifests::helm()?;
        manifests::run(true)?;
        manifests::kustomize()?;
        manifests::cni_folders()
    })?;
    step("crane", publish::crane)?;
    step("collector of traces", otlp::ensure)?;
    step("containerd 2", cluster::ensure_containerd)?;
    step("cnitool and others", cni_tools::ensure)
}

/// Brings thuban-observe, if tests of the share ask it. It comes with Thuban, because a transitd that has looked for it
/// in vain for minutes looks again only after minutes.
fn bring_flow_relay(share: &Share) -> Result<()> {
    if share.has_flow_relay {
        flow_relay::apply(&Cluster::named(share.cluster)?)?;
    }
    Ok(())
}

fn run_share(binary: &Binary, share: &Share) -> (Sum, Times) {
    let name = share.cluster;
    let start = Instant::now();
    let prepared = cluster::down(name)
        .and_then(|()| cluster::up(name))
        .and_then(|()| cni_tools::portmap_on_nodes(&Cluster::named(name)?))
        .and_then(|()| install::run(name))
        .and_then(|()| dns::import(&Cluster::named(name)?))
        .and_then(|()| load_balancers::import(&Cluster::named(name)?))
        .and_then(|()| bring_flow_relay(share));
    let is_prepared = prepared.is_ok();
    println!(
        "cluster {name}: up with Thuban after {:.1} s",
        start.elapsed().as_secs_f32()
    );
    let mut sum = Sum::one(&format!("cluster {name} with Thuban on it"), prepared);
    let mut times = Times::default();
    if is_prepared {
        match lanes::run(binary, share) {
            Ok((tests, took)) => {
                sum.add(tests);
                times = took;
            }
            Err(error) => sum.add(Sum::one("lanes", Err(error))),
        }
        if share.has_removal {
            for (test, run) in removal::TESTS {
                let start = Instant::now();
                sum.add(Sum::one(test, run(name)));
                times.test(test.to_owned(), start.elapsed());
            }
        }
        if let (true, Ok(cluster)) = (sum.failed > 0, Cluster::named(name)) {
            diagnostics::print(&cluster);
        }
    }
    sum.add(Sum::one(
        &format!("cluster {name} without a trace left"),
        cluster::down(name),
    ));
    println!(
        "cluster {name}: done after {:.1} s",
        start.elapsed().as_secs_f32()
    );
    (sum, times)
}

/// Builds the tests' binaries and the images that their clusters run.
pub fn images() -> Result<()> {
    step("eBPF programs", ebpf::build)?;
    step("tests", binaries::build)?;
    build::images(Profile::Test)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{NETNS, TIMED};
    use crate::build::root;

    #[test]
    fn tests_that_compare_times_exist() {
        let folder = root().join("transitd/tests").join(NETNS[0]);
        for name in TIMED {
            let (module, test) = name.split_once("::").unwrap();
            let text = fs::read_to_string(folder.join(format!("{module}.rs"))).unwrap();
            assert!(text.contains(&format!("fn {test}")), "no test {name}");
        }
    }
}

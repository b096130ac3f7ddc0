//! `cargo xtask soak`: runs the tests that `cargo xtask test` runs with small counts, with large ones, one after the
//! other.

use std::{process::ExitCode, time::Instant};

use anyhow::{Result, bail};

use crate::{
    build::{cargo, root, run_command, step},
    cni_tools, deps, ebpf,
};

/// One test.
struct Soak {
    name: &'static str,
    package: &'static str,
    /// Its test binary; empty: the library.
    target: &'static str,
    /// The beginning of the names of its tests.
    tests: &'static str,
    /// The environment variable of its count; `count` is the large value.
    variable: &'static str,
    count: &'static str,
}

const COUNT: usize = 12;

const SOAKS: [Soak; COUNT] = [
    Soak {
        name: "churn",
        package: "transitd",
        target: "netns",
        tests: "churn::",
        variable: "THUBAN_CHURN",
        count: "10000",
    },
    Soak {
        name: "simulator",
        package: "thuban-operator",
        target: "simulator",
        tests: "the_control_plane",
        variable: "THUBAN_SCHEDULES",
        count: "100000",
    },
    Soak {
        name: "leases",
        package: "cidrd",
        target: "leases",
        tests: "an_address_has",
        variable: "THUBAN_SCHEDULES",
        count: "10000",
    },
    Soak {
        name: "announcers",
        package: "lbaasd",
        target: "",
        tests: "routes::simulation",
        variable: "THUBAN_SCHEDULES",
        count: "10000",
    },
    Soak {
        name: "policy",
        package: "thuban-e2e",
        target: "policy",
        tests: "tables_say",
        variable: "THUBAN_DECISIONS",
        count: "100000000",
    },
    Soak {
        name: "starts",
        package: "transitd",
        target: "netns",
        tests: "policy_starts::",
        variable: "THUBAN_STARTS",
        count: "1000",
    },
    Soak {
        name: "killed",
        package: "transitd",
        target: "netns",
        tests: "killed::",
        // Every boundary.
        variable: "THUBAN_KILL_STRIDE",
        count: "1",
    },
    Soak {
        name: "rates",
        package: "transitd",
        target: "netns",
        tests: "bandwidth::limits_of_any_size",
        // Percent. Nothing else should run.
        variable: "THUBAN_RATES_WITHIN",
        count: "5",
    },
    Soak {
        name: "far-rates",
        package: "thuban-e2e",
        target: "datapath",
        tests: "limits::limits_hold",
        // Percent. Nothing else should run.
        variable: "THUBAN_RATES_WITHIN",
        count: "5",
    },
    Soak {
        name: "restarts",
        package: "transitd",
        target: "netns",
        tests: "upgrade::",
        variable: "THUBAN_SOAK_RESTARTS",
        count: "100",
    },
    Soak {
        name: "outage",
        package: "transitd",
        target: "netns",
        tests: "away::an_outage",
        // Seconds.
        variable: "THUBAN_SOAK_AWAY",
        count: "300",
    },
    Soak {
        name: "socket",
        package: "transitd",
        target: "netns",
        tests: "socket::whatever",
        variable: "THUBAN_SOAK_SOCKET",
        count: "20000",
    },
];

/// Returns the names of all tests.
pub fn names() -> [&'static str; COUNT] {
    SOAKS.map(|soak| soak.name)
}

/// Runs all, or one by name. A count that the environment has already stays.
pub fn run(only: Option<&str>) -> Result<ExitCode> {
    let chosen: Vec<&Soak> = SOAKS
        .iter()
        .filter(|soak| only.is_none_or(|only| only == soak.name))
        .collect();
    if !nix::unistd::geteuid().is_root() {
        bail!("the tests make network namespaces and load eBPF programs: run them as root");
    }
    deps::ensure()?;
    step("eBPF programs", ebpf::build)?;
    step("cnitool and others", cni_tools::ensure)?;
    // The tests run the plugin that cargo builds beside them.
    run_command(
        cargo()
            .current_dir(root())
            .args(["build", "--quiet", "-p", "thuban-cni"]),
    )?;
    let mut failed = Vec::new();
    for soak in chosen {
        println!("\n==> soak: {}", soak.name);
        let start = Instant::now();
        let count = std::env::var(soak.variable).unwrap_or_else(|_| soak.count.to_owned());
        let target: &[&str] = match soak.target {
            "" => &["--lib"],
            target => &["--test", target],
        };
        let status = cargo()
            .current_dir(root())
            .args(["test", "-p", soak.package])
            .args(target)
            .arg(soak.tests)
            .args(["--", "--nocapture", "--test-threads=1"])
            .env(soak.variable, &count)
            // The simulator alone writes it: a new `operator/tests/simulator/chosen.txt`.
            .env("THUBAN_CHOSEN", root().join("target/chosen.txt"))
            .status()?;
        println!(
            "{}: {} with {}={count}, {:.0} s",
            soak.name,
            status,
            soak.variable,
            start.elapsed().as_secs_f32()
        );
        if !status.success() {
            failed.push(soak.name);
        }
    }
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("failed: {}", failed.join(", "));
    Ok(ExitCode::FAILURE)
}

//! `cargo xtask cluster`: the local clusters of `e2e/cluster`, with this machine's binaries and images.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use thuban_cluster::{Cluster, Instance, NODES, Options, Status, relay};

use crate::{
    build::{self, Profile, is_tests},
    deps, dns,
    go_tools::GoTools,
    kube, progress, test,
};

/// Images without which no pod runs.
const BASE_IMAGES: [&str; 2] = ["pause.tar", "agnhost.tar"];

/// The containerd of one node of the tests' cluster: unlike Debian's version 1 it asks the CNI plugin for its STATUS.
const CONTAINERD: GoTools = GoTools {
    name: "containerd",
    modules: "e2e/containerd",
    files: &["go.mod", "go.sum"],
    tags: "no_btrfs,no_devmapper,no_tracing,no_zfs",
    needs_c: false,
    flags: "",
    packages: &["tool"],
    tests: &[],
    binaries: &["containerd", "containerd-shim-runc-v2", "ctr"],
};

#[derive(Subcommand)]
pub enum Action {
    /// Start the cluster. Nothing happens if it is running
    Up {
        /// Also install CoreDNS, and connect the control plane with pods
        #[arg(long)]
        dns: bool,
    },
    /// Stop the cluster and remove all of its files, processes and interfaces
    Down,
    /// Forward connections between the control plane and pods. `up --dns` starts it
    #[command(hide = true)]
    Relay,
    /// Print the state of each part. Exits with 0 only if all are running
    Status,
    /// Print shell commands that point kubectl at the cluster: eval "$(cargo xtask cluster env)"
    Env,
    /// Run a command in the namespaces of a node
    Exec {
        /// Name of the node: node-a, node-b or node-c
        node: String,
        /// The command and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<String>,
    },
}

pub fn run(name: &str, action: Action) -> Result<ExitCode> {
    let instance = Instance::named(name)?;
    match action {
        Action::Up { dns } => {
            if name == "scale" {
                bail!("cluster scale has no nodes: `cargo xtask bench scale` brings it up and takes it down");
            }
            if dns {
                up_with_dns(name)?;
            } else {
                up(name)?;
            }
            println!("kubectl: eval \"$(cargo xtask cluster --name {name} env)\"");
        }
        Action::Down => {
            down(name)?;
            println!("cluster {name} is down");
        }
        Action::Relay => thuban_cluster::relay::serve(&instance)?,
        Action::Status => {
            let status = thuban_cluster::status(&instance)?;
            print(&instance, &status);
            return Ok(if status.is_up() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            });
        }
        Action::Env => print!("{}", thuban_cluster::env(&instance)),
        Action::Exec { node, command } => {
            let status = thuban_cluster::exec(&instance, &node, &command)?;
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            return Ok(code.map_or(ExitCode::FAILURE, ExitCode::from));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Brings the cluster up with all images that exist.
pub fn up(name: &str) -> Result<()> {
    bring_up(name, None)
}

/// Does the same as [`up`], with CoreDNS, whose pods run when Thuban is installed. A cluster that is already up must
/// have been brought up by this function.
pub fn up_with_dns(name: &str) -> Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    bring_up(name, Some(program))?;
    let cluster = Cluster::named(name)?;
    if !relay::config(cluster.instance()).exists() {
        bail!("cluster {name} was brought up without --dns: take it down first");
    }
    dns::apply(&cluster)
}

fn bring_up(name: &str, relay: Option<PathBuf>) -> Result<()> {
    let instance = Instance::named(name)?;
    deps::ensure()?;
    let binaries = kube::binaries()?;
    let profile = Profile::of(name);
    if BASE_IMAGES
        .iter()
        .any(|image| !profile.images().join(image).exists())
    {
        match profile {
            Profile::Release => build::run()?,
            Profile::Demo => build::demo()?,
            Profile::Test => test::images()?,
        }
    }
    // The demo's uplinks all segment: transit runs at tc, with segments aggregated before it. Tests also want a NIC
    // that segments tunnels itself.
    let whole_gso = if is_tests(name) {
        vec![NODES[2].to_owned()]
    } else {
        Vec::new()
    };
    let runtimes = if is_tests(name) {
        vec![(NODES[1].to_owned(), ensure_containerd()?)]
    } else {
        Vec::new()
    };
    let options = Options {
        binaries,
        runtimes,
        images: images(profile)?,
        whole_gso,
        relay,
        progress: |line| println!("{line}"),
    };
    thuban_cluster::up(&instance, &options)
}

/// Builds the containerd of the tests' clusters if it doesn't exist; returns its folder.
pub fn ensure_containerd() -> Result<PathBuf> {
    progress::watched("building containerd 2", || CONTAINERD.ensure())
}

/// Takes the cluster down.
pub fn down(name: &str) -> Result<()> {
    thuban_cluster::down(&Instance::named(name)?)
}

/// Returns all archives of the profile.
fn images(profile: Profile) -> Result<Vec<PathBuf>> {
    let folder = profile.images();
    let entries = fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "tar"))
        .collect();
    found.sort();
    Ok(found)
}

fn print(instance: &Instance, status: &Status) {
    println!(
        "cluster {}: {}",
        instance.name(),
        if status.is_up() { "up" } else { "down" }
    );
    let word = |runs: bool| if runs { "runs" } else { "down" };
    for (component, runs) in &status.components {
        println!("  {component:<20} {}", word(*runs));
    }
    println!(
        "  {:<20} {}",
        instance.api_url(),
        if status.api_ready { "ready" } else { "not ready" }
    );
    for (node, lives, ready) in &status.nodes {
        let ready = match ready.as_deref() {
            None => "not registered",
            Some("True") => "Ready",
            Some(_) => "NotReady",
        };
        let address = instance
            .node_address(node)
            .map(|address| address.to_string())
            .unwrap_or_default();
        println!("  {node:<20} {}, {ready}, {address}", word(*lives));
    }
}

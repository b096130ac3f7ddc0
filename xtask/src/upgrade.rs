//! `cargo xtask upgrade-from REF`: Helm installs a former version of Thuban on a cluster, upgrades it to this one and
//! rolls it back, while datagrams pass between two nodes.
//!
//! The former version is built by its own xtask in a worktree of its own: images and chart are its own. It is not part
//! of `cargo xtask test`, because two builds of the release take longer than all tests.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::AtomicBool,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use thuban_cluster::{Cluster, Instance, command::output};

use crate::{
    build::{self, Profile, root, run_command, step},
    chart, cluster, diagnostics, images,
    install::{self, NAMESPACE},
    kube, progress,
};

const NAME: &str = "upgrade";
const RELEASE: &str = "thuban";
const CHART: &str = "charts/thuban";
/// The tags of the two versions' images: both are built with the same one.
const BEFORE: &str = "before";
const AFTER: &str = "after";
/// A pod that is made after each step.
const NEW_POD: &str = "newcomer";
const HELM_TIMEOUT: &str = "--timeout=5m";
const READY_TIMEOUT: Duration = Duration::from_mins(2);

/// Runs all of it. Takes the cluster down at the end, unless it is to be kept.
pub fn run(reference: &str, is_kept: bool) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the cluster needs network namespaces and eBPF programs: run this as root");
    }
    let commit = git(&["rev-parse", "--verify", &format!("{reference}^{{commit}}")])
        .with_context(|| format!("{reference} is no commit of this repository"))?;
    println!(
        "This builds {reference} ({commit}) and the tree as it is, starts a cluster of three nodes with {reference},\n\
         upgrades it and rolls it back. On two cores it takes up to an hour the first time, and some 10 minutes later."
    );
    let tree = step(&format!("sources of {reference}"), || Tree::check_out(&commit))?;
    step(&format!("images of {reference}"), || tree.build())?;
    build::run()?;
    let result = step("cluster of three nodes", || {
        cluster::down(NAME)?;
        cluster::up(NAME)
    })
    .and_then(|()| upgrade_and_roll_back(&tree));
    if let (true, Ok(cluster)) = (result.is_err(), Cluster::named(NAME)) {
        diagnostics::print(&cluster);
    }
    if is_kept {
        println!("the cluster stays up: eval \"$(cargo xtask cluster --name {NAME} env)\"");
        return result;
    }
    result.and(step("removal of the cluster", || cluster::down(NAME)))
}

/// The sources of the former version. They are removed when this is dropped; what was built of them stays.
struct Tree {
    folder: PathBuf,
    target: PathBuf,
}

impl Tree {
    fn check_out(commit: &str) -> Result<Self> {
        // Not in this repository: cargo would read its configuration, too.
        let base = kube::cache()?.join("upgrade-from");
        fs::create_dir_all(&base).with_context(|| format!("making {}", base.display()))?;
        let tree = Self {
            folder: base.join("tree"),
            target: base.join("target"),
        };
        // An interrupted run may have left one.
        tree.remove();
        git(&[
            "worktree",
            "add",
            "--detach",
            &tree.folder.display().to_string(),
            commit,
        ])?;
        ensure!(
            tree.chart().join("Chart.yaml").exists(),
            "that version has no {CHART}: take a later one"
        );
        Ok(tree)
    }

    fn chart(&self) -> PathBuf {
        self.folder.join(CHART)
    }

    /// Has the former version build its images.
    fn build(&self) -> Result<()> {
        let mut cargo = build::cargo();
        cargo
            .current_dir(&self.folder)
            .env("CARGO_TARGET_DIR", &self.target)
            // It may want another compiler than this version.
            .env_remove("RUSTUP_TOOLCHAIN")
            .args(["xtask", "build"]);
        progress::watched("building the former version", || run_command(&mut cargo))
    }

    fn remove(&self) {
        // git knows nothing of a folder that is not there.
        let _ = git(&[
            "worktree",
            "remove",
            "--force",
            &self.folder.display().to_string(),
        ]);
        let _ = fs::remove_dir_all(&self.folder);
        let _ = git(&["worktree", "prune"]);
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.remove();
    }
}

fn git(arguments: &[&str]) -> Result<String> {
    let printed = output(Command::new("git").current_dir(root()).args(arguments))?;
    Ok(printed.trim().to_owned())
}

fn upgrade_and_roll_back(tree: &Tree) -> Result<()> {
    let cluster = &Cluster::named(NAME)?;
    step("images on nodes", || {
        // Both have the same name. A name leads to what was imported last.
        tag(cluster, &Profile::Release.images(), AFTER)?;
        tag(cluster, &tree.folder.join("target/images"), BEFORE)
    })?;
    let instance = cluster.instance();
    let before = Release::new(instance, &tree.folder, BEFORE)?;
    let after = Release::new(instance, &root(), AFTER)?;
    step("the former version", || {
        before.helm(cluster, "install", &["--create-namespace"])?;
        runs(cluster, BEFORE)
    })?;
    chart::under_traffic(cluster, || {
        step("upgrade to this version", || {
            after.helm(cluster, "upgrade", &[])?;
            runs(cluster, AFTER)
        })?;
        step("rollback to the former version", || {
            let rollback = ["rollback", RELEASE, "1", "--wait", HELM_TIMEOUT];
            chart::helm(cluster, NAMESPACE, &rollback)?;
            runs(cluster, BEFORE)
        })
    })
}

/// Imports a version's images on all nodes, and gives them a tag of their own.
fn tag(cluster: &Cluster, folder: &Path, tag: &str) -> Result<()> {
    for (archive, name) in [
        ("operator.tar", images::OPERATOR),
        ("transitd.tar", images::TRANSITD),
    ] {
        cluster.import_image(&folder.join(archive))?;
        let tagged = with_tag(name, tag);
        for node in cluster.nodes()? {
            let command = ["ctr", "-n", "k8s.io", "images", "tag", "--force", name, &tagged];
            cluster.exec_on_node(&node, &command)?;
        }
    }
    Ok(())
}

fn with_tag(name: &str, tag: &str) -> String {
    let repository = name.rsplit_once(':').map_or(name, |(repository, _)| repository);
    format!("{repository}:{tag}")
}

/// A version as Helm installs it.
struct Release {
    chart: String,
    values: String,
}

impl Release {
    /// Writes the values of the version whose sources are in this folder.
    fn new(instance: &Instance, sources: &Path, tag: &str) -> Result<Self> {
        let file = instance.state().join(format!("values-{tag}.json"));
        let values = values(&install::values_of(sources, instance)?, tag);
        fs::write(&file, values.to_string()).with_context(|| format!("writing {}", file.display()))?;
        Ok(Self {
            chart: sources.join(CHART).display().to_string(),
            values: file.display().to_string(),
        })
    }

    fn helm(&self, cluster: &Cluster, verb: &str, more: &[&str]) -> Result<()> {
        let all = [
            verb,
            RELEASE,
            &self.chart,
            "--values",
            &self.values,
            "--wait",
            HELM_TIMEOUT,
        ];
        chart::helm(cluster, NAMESPACE, &[&all[..], more].concat()).map(drop)
    }
}

fn values(config: &BTreeMap<String, String>, tag: &str) -> Value {
    json!({"config": config, "images": {"operator": {"tag": tag}, "transitd": {"tag": tag}}})
}

/// Checks that a version runs, and that it connects a new pod.
fn runs(cluster: &Cluster, tag: &str) -> Result<()> {
    for workload in ["deployment/thuban-operator", "daemonset/transitd"] {
        let image = "jsonpath={.spec.template.spec.containers[0].image}";
        let image = cluster.kubectl(&["get", "-n", NAMESPACE, workload, "-o", image])?;
        ensure!(image.ends_with(&format!(":{tag}")), "{workload} runs {image}");
    }
    cluster.wait_nodes_ready(READY_TIMEOUT)?;
    let nodes = cluster.nodes()?;
    let server = chart::start_server(cluster, NEW_POD, &nodes[2])?;
    // It ends with the first answer.
    let is_over = AtomicBool::new(true);
    cluster.in_node(&nodes[0], || chart::ask_until(server, &is_over))?;
    cluster.kubectl(&["delete", "pod", NEW_POD, "--now"]).map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::{AFTER, BEFORE, Instance, install, values, with_tag};

    #[test]
    fn two_versions_have_images_of_different_tags() {
        let config = [("KEY".to_owned(), "value".to_owned())].into();
        let expected = json!({"config": {"KEY": "value"},
            "images": {"operator": {"tag": "before"}, "transitd": {"tag": "before"}}});
        assert_eq!(values(&config, BEFORE), expected);
        assert_eq!(
            with_tag("thuban.dev/operator:0.1.0", AFTER),
            "thuban.dev/operator:after"
        );
    }

    #[test]
    fn a_former_version_gets_only_values_that_it_knows() {
        let folder = std::env::temp_dir().join(format!("thuban-former-{}", std::process::id()));
        fs::create_dir_all(folder.join("install")).unwrap();
        let file = folder.join("install/config.env.example");
        fs::write(&file, "# Something.\nTHUBAN_OF_OLD=1\n").unwrap();
        let instance = Instance::named(super::NAME).unwrap();
        let data = install::values_of(&folder, &instance);
        fs::remove_dir_all(&folder).unwrap();
        let data = data.unwrap();
        assert_eq!(data["THUBAN_OF_OLD"], "1");
        assert_eq!(data["KUBERNETES_SERVICE_HOST"], instance.gateway().to_string());
        assert!(!data.contains_key("THUBAN_TRANSIT_HOOK"));
    }
}

//! `sysdump`: an archive for those who help. Objects, events, logs, and what transitd says on nodes.
//!
//! Invariant: it has no Secrets. [`kinds`] does not name them, [`scrub`] takes environments out of objects, and no
//! command on a node prints any. What rights forbid is left out, and the index says so.

mod archive;
mod gzip;
mod kinds;
mod nodes;
mod scrub;

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DynamicObject, ListParams, LogParams};
use kube::core::Status;
use kube::{Api, ResourceExt};
use serde::Serialize;

use crate::arguments::Sysdump;
use crate::error::CliError;
use crate::fetch::Cluster;
use crate::kubectl::{Kubectl, KubectlError, Place};
use crate::report::{PLUGIN, Verdict};
use crate::{check, status};

use archive::{Archive, Index, LeftOut, MAX_FILE};
use kinds::{Kind, Within};

/// How many objects a request lists.
const PAGE: u32 = 500;
/// The last lines of a container's log that are collected.
const LOG_LINES: i64 = 5_000;

/// What `sysdump` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    pub verdict: Verdict,
    pub archive: String,
    /// The number of files in it.
    pub files: usize,
    /// What is not in it, and why.
    pub left_out: Vec<LeftOut>,
}

impl Summary {
    /// Returns the summary as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for LeftOut { what, why } in &self.left_out {
            let _ = writeln!(text, "left out {what}: {why}");
        }
        let _ = writeln!(text, "{}: {} files", self.archive, self.files);
        text
    }
}

/// Collects everything into a new file.
pub async fn run(cluster: &Cluster, kubectl: &Kubectl, options: &Sysdump) -> Result<Summary, CliError> {
    let now = Timestamp::now();
    let folder = format!("thuban-sysdump-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let path = match &options.file {
        Some(path) => path.clone(),
        None => PathBuf::from(format!("{folder}.tar.gz")),
    };
    let name = path.display().to_string();
    let file = create(&path).map_err(|error| CliError::Archive {
        path: name.clone(),
        error,
    })?;
    let mut collector = Collector {
        cluster,
        kubectl,
        archive: Archive::new(file, &folder, now.as_second().try_into().unwrap_or_default()),
    };
    Box::pin(collector.collect(&options.nodes, now)).await?;
    let (_, index) = collector.finish(now)?;
    Ok(Summary {
        verdict: Verdict::from_findings(false, !index.left_out.is_empty()),
        archive: name,
        files: index.files.len(),
        left_out: index.left_out,
    })
}

/// Makes the file, for the user alone. One that is there stays as it is.
fn create(path: &std::path::Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

struct Collector<'a, W: Write> {
    cluster: &'a Cluster,
    kubectl: &'a Kubectl,
    archive: Archive<W>,
}

impl<W: Write> Collector<'_, W> {
    /// Collects everything. What can't be collected is left out; only the archive itself fails.
    async fn collect(&mut self, nodes: &[String], now: Timestamp) -> Result<(), CliError> {
        self.reports(now).await?;
        for kind in kinds::all() {
            self.objects(&kind).await?;
        }
        let system = self.cluster.system_namespace().to_owned();
        tell("the pods of Thuban");
        let pods: Api<Pod> = Api::namespaced(self.cluster.client(), &system);
        let pods = match Box::pin(pods.list(&ListParams::default())).await {
            Ok(pods) => pods.items,
            Err(error) => {
                let what = format!("logs and nodes: pods in namespace {system}");
                self.archive.leave_out(what, why(error));
                return Ok(());
            }
        };
        let chosen = nodes::choose(&pods, nodes);
        for node in &chosen.missing {
            let what = format!("node {node}");
            self.archive.leave_out(what, "no pod of transitd is on it");
        }
        if chosen.others > 0 {
            let what = format!("{} other nodes", chosen.others);
            self.archive.leave_out(what, "name nodes by --node");
        }
        let is_chosen = |pod: &&Pod| {
            let node = nodes::node_of(pod);
            !nodes::is_transitd(pod) || chosen.nodes.iter().any(|chosen| chosen == node)
        };
        for pod in pods.iter().filter(is_chosen) {
            self.logs(&system, pod).await?;
        }
        for pod in pods
            .iter()
            .filter(is_chosen)
            .filter(|pod| nodes::is_transitd(pod))
        {
            if let Err(error) = self.node(&system, pod).await? {
                self.archive
                    .leave_out("what transitd says on nodes", error.to_string());
                break;
            }
        }
        Ok(())
    }

    fn finish(self, now: Timestamp) -> io::Result<(W, Index)> {
        let scope = match self.cluster.named_namespace() {
            Some(namespace) => format!("the namespace {namespace}"),
            None => "all namespaces".to_owned(),
        };
        let title = format!("Made by kubectl thuban {PLUGIN} at {now}, of {scope}.");
        self.archive.finish(&title)
    }

    /// Adds what `status` and `check` say.
    async fn reports(&mut self, now: Timestamp) -> Result<(), CliError> {
        tell("status and check");
        match Box::pin(self.cluster.status()).await {
            Ok(objects) => self.add_json("status.json", &status::report(&objects, now))?,
            Err(error) => self.archive.leave_out("status.json", error.to_string()),
        }
        match Box::pin(self.cluster.check()).await {
            Ok(objects) => {
                let report = check::report(&objects, self.cluster.system_namespace(), now);
                self.add_json("check.json", &report)?;
            }
            Err(error) => self.archive.leave_out("check.json", error.to_string()),
        }
        Ok(())
    }

    fn add_json(&mut self, path: &str, value: &impl Serialize) -> Result<(), CliError> {
        let text = serde_json::to_vec_pretty(value)?;
        Ok(self.archive.add(path, &text, false)?)
    }

    /// Adds the objects of a kind, one a line.
    async fn objects(&mut self, kind: &Kind) -> Result<(), CliError> {
        let name = kind.name();
        let system = self.cluster.system_namespace();
        let (namespace, file) = match &kind.within {
            Within::Cluster => (None, name.clone()),
            Within::Namespaces => (self.cluster.named_namespace(), name.clone()),
            Within::System => (Some(system), format!("{name}-of-thuban")),
            Within::Own(namespace) => (Some(*namespace), format!("{name}-of-{namespace}")),
        };
        tell(&name);
        let mut listed = self.list(kind, namespace).await;
        if kind.within == Within::Namespaces
            && namespace.is_none()
            && listed.as_ref().is_err_and(is_forbidden)
        {
            let own = self.cluster.namespace();
            let what = format!("{name} of all namespaces but {own}");
            self.archive.leave_out(what, "you may not list them");
            listed = self.list(kind, Some(own)).await;
        }
        match listed {
            Ok((lines, is_cut)) => {
                let path = format!("objects/{file}.jsonl");
                Ok(self.archive.add(&path, &lines, is_cut)?)
            }
            Err(error) => {
                let place = namespace.map(|namespace| format!(" in namespace {namespace}"));
                let what = format!("{name}{}", place.unwrap_or_default());
                self.archive.leave_out(what, why(error));
                Ok(())
            }
        }
    }

    /// Lists the objects of a kind, one a line, until a file is full. Returns whether there are more.
    async fn list(&self, kind: &Kind, namespace: Option<&str>) -> Result<(Vec<u8>, bool), kube::Error> {
        let client = self.cluster.client();
        let api: Api<DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(client, namespace, &kind.resource),
            None => Api::all_with(client, &kind.resource),
        };
        let mut lines = Vec::new();
        let mut parameters = ListParams::default().limit(PAGE);
        loop {
            let page = Box::pin(api.list(&parameters)).await?;
            for object in page.items {
                let object = serde_json::to_value(object).map_err(kube::Error::SerdeError)?;
                let line = scrub::scrub(&kind.resource.kind, object).to_string();
                if lines.len() + line.len() >= MAX_FILE {
                    return Ok((lines, true));
                }
                lines.extend_from_slice(line.as_bytes());
                lines.push(b'\n');
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = ListParams::default().limit(PAGE).continue_token(&token),
                None => return Ok((lines, false)),
            }
        }
    }

    /// Adds the last lines of each container's log, and of its predecessor's.
    async fn logs(&mut self, namespace: &str, pod: &Pod) -> Result<(), CliError> {
        let name = pod.name_any();
        tell(&format!("the logs of {name}"));
        let pods: Api<Pod> = Api::namespaced(self.cluster.client(), namespace);
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        for container in containers.map(|container| container.name.clone()) {
            for previous in [false, true] {
                if previous && !has_restarted(pod, &container) {
                    continue;
                }
                let parameters = LogParams {
                    container: Some(container.clone()),
                    tail_lines: Some(LOG_LINES),
                    limit_bytes: i64::try_from(MAX_FILE).ok(),
                    previous,
                    ..LogParams::default()
                };
                let suffix = if previous { ".previous" } else { "" };
                let path = format!("logs/{name}/{container}{suffix}.log");
                match Box::pin(pods.logs(&name, &parameters)).await {
                    Ok(text) => self.archive.add(&path, text.as_bytes(), text.len() >= MAX_FILE)?,
                    Err(error) => self.archive.leave_out(path, why(error)),
                }
            }
        }
        Ok(())
    }

    /// Adds what transitd says on a node. Returns an error inside if no command can be run anywhere.
    async fn node(&mut self, namespace: &str, pod: &Pod) -> Result<Result<(), KubectlError>, CliError> {
        let node = nodes::node_of(pod);
        tell(&format!("node {node}"));
        let place = Place {
            namespace: namespace.to_owned(),
            pod: pod.name_any(),
            container: nodes::TRANSITD,
        };
        for (file, command) in nodes::COMMANDS {
            let path = format!("nodes/{node}/{file}");
            match Box::pin(self.kubectl.exec(&place, command, MAX_FILE as u64)).await {
                Ok(printed) => self.archive.add(&path, &printed.bytes, printed.is_cut)?,
                Err(error @ KubectlError::Start { .. }) => return Ok(Err(error)),
                Err(error) => self.archive.leave_out(path, error.to_string()),
            }
        }
        Ok(Ok(()))
    }
}

/// Whether the container had a predecessor, which may have a log.
fn has_restarted(pod: &Pod, container: &str) -> bool {
    let mut statuses = pod
        .status
        .iter()
        .flat_map(|status| status.container_statuses.iter().flatten());
    statuses.any(|status| status.name == container && status.restart_count > 0)
}

/// Tells the progress.
fn tell(what: &str) {
    eprintln!("collecting {what}");
}

fn is_forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 403)
}

/// Returns why something was left out, in one line.
fn why(error: kube::Error) -> String {
    let said = match error {
        kube::Error::Api(status) => said(&status),
        error => error.to_string(),
    };
    said.replace('\n', " ")
}

fn said(status: &Status) -> String {
    match status.code {
        // An API server without a kind says that a page is not found.
        404 => "the API server does not have it".to_owned(),
        _ => status.message.clone(),
    }
}

#[cfg(test)]
mod tests;

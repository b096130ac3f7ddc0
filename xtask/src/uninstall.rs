//! Takes Thuban off a local cluster, in whatever state it is. First it removes pods, then the objects that people made,
//! while the operator can still take rows out of droplets. Then it removes Thuban itself, then its traces on the nodes.
//!
//! Invariant: every wait has an end, says what it waits for, and can be run again. An object that waits for an operator
//! or a node that is gone loses its finalizer once the operator is deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use thuban_cluster::Cluster;

use crate::build::root;
use crate::install::{NAMESPACE, is_foreign, manifests};

/// Kinds of Thuban, users before the kinds that they use.
const KINDS: [&str; 8] = [
    "endpoints.thuban.dev",
    "networks.thuban.dev",
    "vpcs.thuban.dev",
    "bouncers.thuban.dev",
    "dividers.thuban.dev",
    "ipclaims.thuban.dev",
    "vniclaims.thuban.dev",
    "droplets.thuban.dev",
];
/// Kinds of the objects that people make.
const ASKED_FOR: [&str; 3] = [KINDS[0], KINDS[1], KINDS[2]];
/// Cluster-scoped kinds of the manifests.
const LASTING: &str = "namespaces,customresourcedefinitions,clusterroles,clusterrolebindings,\
                       validatingadmissionpolicies,validatingadmissionpolicybindings,\
                       flowschemas,prioritylevelconfigurations";
const NAMESPACES: [&str; 2] = [NAMESPACE, "thuban-heartbeats"];
/// How long pods may take to end. Pods get their own grace first. They never end if their kubelet is gone or has no
/// transitd to call.
const PATIENCE_WITH_PODS: Duration = Duration::from_secs(45);
/// How long after the last removed object the operator is given up.
const PATIENCE_WITH_OPERATOR: Duration = Duration::from_secs(30);
const PATIENCE_WITH_SERVER: Duration = Duration::from_mins(2);
const POLL: Duration = Duration::from_secs(1);
const ON_A_NODE: &str = "install/remove-from-node.sh";

pub fn run(name: &str) -> Result<()> {
    run_with(name, PATIENCE_WITH_PODS)
}

/// Does the same, and gives pods up when none has gone for as long as `patience`.
pub fn run_with(name: &str, patience: Duration) -> Result<()> {
    let cluster = Cluster::named(name)?;
    // Pods that are made again meanwhile get no node.
    let cordoned = cordon(&cluster)?;
    let result = remove(&cluster, patience);
    for node in &cordoned {
        cluster.kubectl(&["uncordon", node])?;
    }
    result?;
    let left = leftovers(&cluster)?;
    if !left.is_empty() {
        bail!("left on cluster {name}: {}", left.join(", "));
    }
    println!(
        "nothing of Thuban is left on cluster {name}; nodes stay NotReady until they get another CNI plugin"
    );
    Ok(())
}

fn remove(cluster: &Cluster, patience: Duration) -> Result<()> {
    end_pods(cluster, patience)?;
    if is_operator_ready(cluster) {
        end_what_was_asked_for(cluster)?;
    } else {
        println!("no operator runs: objects go without it");
    }
    // Workloads and rights, then policies, kinds, configuration and namespaces.
    for manifest in manifests()?.iter().rev().filter(|path| !is_foreign(path)) {
        println!("deleting {}", manifest.display());
        let file = manifest.display().to_string();
        let arguments = ["delete", "--ignore-not-found", "--wait=false", "-f", &file];
        // A kind that is gone has no objects.
        if let Err(error) = cluster.kubectl(&arguments)
            && !is_unknown_kind(&error)
        {
            return Err(error);
        }
    }
    wait_until_deleted(cluster)?;
    clean_nodes(cluster)
}

/// Marks nodes unschedulable; returns those that were not before.
fn cordon(cluster: &Cluster) -> Result<Vec<String>> {
    let mut cordoned = Vec::new();
    for node in items(cluster, &["nodes"])? {
        if node["spec"]["unschedulable"] != true {
            let name = text(&node["metadata"]["name"]);
            cluster.kubectl(&["cordon", &name])?;
            cordoned.push(name);
        }
    }
    Ok(cordoned)
}

/// Ends the pods that have their network from Thuban: without Thuban they can neither be connected nor taken away
/// cleanly.
fn end_pods(cluster: &Cluster, patience: Duration) -> Result<()> {
    let found = connected_pods(cluster)?;
    if found.is_empty() {
        return Ok(());
    }
    let all: BTreeSet<String> = found.iter().map(|pod| text(&pod["metadata"]["uid"])).collect();
    println!("deleting {} pods that have their network by Thuban:", found.len());
    delete_pods(cluster, &found, &[])?;
    // Pods that a DaemonSet makes anew are other pods.
    let remaining = || -> Result<Vec<Value>> {
        let mut pods = connected_pods(cluster)?;
        pods.retain(|pod| all.contains(&text(&pod["metadata"]["uid"])));
        Ok(pods)
    };
    let is_done = wait("pods", patience, || Ok(remaining()?.iter().map(named).collect()))?;
    if !is_done {
        println!("ending them without their kubelet, which is gone or can't disconnect them");
        delete_pods(cluster, &remaining()?, &["--force", "--grace-period=0"])?;
    }
    Ok(())
}

/// Returns the pods that are on a node, not on host network and not finished.
fn connected_pods(cluster: &Cluster) -> Result<Vec<Value>> {
    let mut pods = items(cluster, &["pods", "-A"])?;
    pods.retain(|pod| {
        pod["spec"]["hostNetwork"] != true
            && !pod["spec"]["nodeName"].is_null()
            && pod["status"]["phase"] != "Succeeded"
            && pod["status"]["phase"] != "Failed"
    });
    Ok(pods)
}

fn delete_pods(cluster: &Cluster, pods: &[Value], how: &[&str]) -> Result<()> {
    let mut of_namespace: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for pod in pods {
        let names = of_namespace
            .entry(text(&pod["metadata"]["namespace"]))
            .or_default();
        names.push(text(&pod["metadata"]["name"]));
    }
    for (namespace, names) in of_namespace {
        println!("  {namespace}: {}", names.join(", "));
        let mut arguments = vec![
            "delete",
            "pods",
            "--ignore-not-found",
            "--wait=false",
            "-n",
            &namespace,
        ];
        arguments.extend(how);
        arguments.extend(names.iter().map(String::as_str));
        cluster.kubectl(&arguments)?;
    }
    Ok(())
}

fn is_operator_ready(cluster: &Cluster) -> bool {
    let arguments = ["get", "deployment", "thuban-operator", "-n", NAMESPACE];
    let ready = "jsonpath={.status.readyReplicas}";
    cluster
        .kubectl(&[&arguments[..], &["-o", ready]].concat())
        .is_ok_and(|ready| ready.trim().parse().is_ok_and(|ready: u32| ready > 0))
}

/// Removes endpoints, networks and VPCs, whose rows the operator takes out of all droplets.
fn end_what_was_asked_for(cluster: &Cluster) -> Result<()> {
    for kind in ASKED_FOR {
        let mut arguments = vec!["delete", kind, "--all", "--wait=false"];
        if kind == KINDS[0] {
            arguments.push("-A");
        }
        cluster.kubectl(&arguments)?;
    }
    let is_done = wait("objects", PATIENCE_WITH_OPERATOR, || {
        let mut left = Vec::new();
        for kind in ASKED_FOR {
            let objects = items(cluster, &[kind, "-A"])?;
            // Endpoints of Services stay as long as their Services, which are not Thuban's. Their rows go with the
            // networks.
            let objects = objects.iter().filter(|object| !is_scaled(object));
            left.extend(objects.map(waiting));
        }
        Ok(left)
    })?;
    if !is_done {
        println!("going on without the operator");
    }
    Ok(())
}

/// Whether it is a Service's Endpoint.
pub fn is_scaled(object: &Value) -> bool {
    object["spec"]["type"] == "Scaled"
}

/// Returns an object's name and, if the object says so, what it waits for.
fn waiting(object: &Value) -> String {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    let reason = conditions
        .filter(|condition| condition["type"] == "Deleting")
        .map(|condition| format!(" {}", text(&condition["message"])))
        .next_back();
    format!("{}{}", named(object), reason.unwrap_or_default())
}

/// Waits for all that was deleted, and removes by force the objects that nobody else can remove.
fn wait_until_deleted(cluster: &Cluster) -> Result<()> {
    let mut last_pods = Instant::now();
    let is_done = wait("the API server", PATIENCE_WITH_SERVER, || {
        take_finalizers(cluster)?;
        if last_pods.elapsed() > Duration::from_secs(15) {
            last_pods = Instant::now();
            let mut pods = Vec::new();
            for namespace in NAMESPACES {
                pods.extend(items(cluster, &["pods", "-n", namespace])?);
            }
            // Pods of a node that is gone: their namespace waits for them.
            delete_pods(cluster, &pods, &["--force", "--grace-period=0"])?;
        }
        lasting(cluster)
    })?;
    if !is_done {
        bail!("the API server did not delete everything; run it again, or look at the objects named above");
    }
    Ok(())
}

/// Takes the finalizers away. The operator is deleted, so nobody else would do it.
fn take_finalizers(cluster: &Cluster) -> Result<()> {
    let mut count = 0;
    for kind in KINDS {
        let mut of_namespace: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for object in items(cluster, &[kind, "-A"])? {
            if object["metadata"]["finalizers"]
                .as_array()
                .is_some_and(|all| !all.is_empty())
            {
                let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default();
                let names = of_namespace.entry(namespace.to_owned()).or_default();
                names.push(text(&object["metadata"]["name"]));
            }
        }
        for (namespace, names) in of_namespace {
            for names in names.chunks(50) {
                count += names.len();
                let patch = r#"{"metadata":{"finalizers":null}}"#;
                let mut arguments = vec!["patch", kind, "--type=merge", "-p", patch];
                if !namespace.is_empty() {
                    arguments.extend(["-n", &namespace]);
                }
                arguments.extend(names.iter().map(String::as_str));
                // An object that went in between needs nothing more.
                let _ = cluster.kubectl(&arguments);
            }
        }
    }
    if count > 0 {
        println!("took the finalizers off {count} objects that the operator had left");
    }
    Ok(())
}

/// Returns everything of the manifests that has no namespace and still exists.
fn lasting(cluster: &Cluster) -> Result<Vec<String>> {
    let mut ours = BTreeSet::new();
    for manifest in manifests()?.into_iter().filter(|path| !is_foreign(path)) {
        let text =
            fs::read_to_string(&manifest).with_context(|| format!("reading {}", manifest.display()))?;
        for document in serde_yaml_ng::Deserializer::from_str(&text) {
            let object: Value = serde::Deserialize::deserialize(document)?;
            if object["metadata"]["namespace"].is_null()
                && let (Some(kind), Some(name)) =
                    (object["kind"].as_str(), object["metadata"]["name"].as_str())
            {
                ours.insert((kind.to_lowercase(), name.to_owned()));
            }
        }
    }
    let all = cluster.kubectl(&["get", LASTING, "-o", "name"])?;
    let is_ours = |line: &&str| {
        line.split_once('/').is_some_and(|(kind, name)| {
            let kind = kind.split('.').next().unwrap_or(kind);
            ours.contains(&(kind.to_owned(), name.to_owned()))
        })
    };
    Ok(all.lines().filter(is_ours).map(str::to_owned).collect())
}

fn clean_nodes(cluster: &Cluster) -> Result<()> {
    let path = root().join(ON_A_NODE);
    let script = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    for node in cluster.nodes()? {
        match cluster.node_pid(&node) {
            Ok(_) => {
                cluster
                    .exec_on_node(&node, &["sh", "-c", &script, "sh", "remove"])
                    .with_context(|| format!("run {ON_A_NODE} on {node}"))?;
                println!("{node}: clean");
            }
            Err(_) => println!("{node} is down: if it comes back, run {ON_A_NODE} there"),
        }
    }
    Ok(())
}

/// Returns everything of Thuban that is on the cluster and on the nodes that are up.
fn leftovers(cluster: &Cluster) -> Result<Vec<String>> {
    let mut left = lasting(cluster)?;
    let path = root().join(ON_A_NODE);
    let script = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    for node in cluster.nodes()? {
        if cluster.node_pid(&node).is_ok() {
            let script = format!("( {script}\n) || true");
            let found = cluster.exec_on_node(&node, &["sh", "-c", &script, "sh", "check"])?;
            left.extend(found.lines().map(|line| format!("{node}: {line}")));
        }
    }
    Ok(left)
}

/// Asks until nothing is left. Returns false when nothing was removed for as long as `patience`. Prints how much is
/// left whenever that changes.
fn wait(what: &str, patience: Duration, mut ask: impl FnMut() -> Result<Vec<String>>) -> Result<bool> {
    let start = Instant::now();
    let mut said = Vec::new();
    let mut last = Instant::now();
    loop {
        let left = ask()?;
        let seconds = start.elapsed().as_secs();
        if left.is_empty() {
            println!("{what}: all gone ({seconds} s)");
            return Ok(true);
        }
        if left != said {
            let first = left.iter().take(3).cloned().collect::<Vec<_>>().join("; ");
            println!("{what}: waits for {} ({seconds} s): {first}", left.len());
            if left.len() != said.len() {
                last = Instant::now();
            }
            said = left;
        }
        if last.elapsed() > patience {
            println!("{what}: nothing went for {} s", patience.as_secs());
            return Ok(false);
        }
        std::thread::sleep(POLL);
    }
}

/// Returns the items of `kubectl get …`; none of a kind that the API server doesn't know.
fn items(cluster: &Cluster, arguments: &[&str]) -> Result<Vec<Value>> {
    let arguments = [&["get", "-o", "json"], arguments].concat();
    let answer = match cluster.kubectl(&arguments) {
        Ok(answer) => answer,
        Err(error) if is_unknown_kind(&error) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut list: Value = serde_json::from_str(&answer).context("the answer of kubectl")?;
    match list["items"].take() {
        Value::Array(items) => Ok(items),
        _ => Ok(Vec::new()),
    }
}

fn is_unknown_kind(error: &anyhow::Error) -> bool {
    let text = format!("{error:#}");
    [
        "the server doesn't have a resource type",
        "no matches for kind",
        "could not find the requested resource",
    ]
    .iter()
    .any(|words| text.contains(words))
}

fn named(object: &Value) -> String {
    let (kind, name) = (text(&object["kind"]), text(&object["metadata"]["name"]));
    match object["metadata"]["namespace"].as_str() {
        Some(namespace) => format!("{kind} {namespace}/{name}"),
        None => format!("{kind} {name}"),
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::{ON_A_NODE, root};

    /// The script only looks here, and changes nothing.
    #[test]
    fn the_script_looks_in_the_folders_that_transitd_noted() {
        let folder = std::env::temp_dir().join(format!("thuban-noted-{}", std::process::id()));
        let (state, bin, conf) = (folder.join("state"), folder.join("bin"), folder.join("conf"));
        for made in [&state, &bin, &conf] {
            fs::create_dir_all(made).unwrap();
        }
        let noted = format!("bin={}\nconf={}\n", bin.display(), conf.display());
        fs::write(state.join("cni-folders"), noted).unwrap();
        let files = [bin.join("thuban"), conf.join("05-thuban.conflist")];
        for file in &files {
            fs::write(file, "").unwrap();
        }
        let script = root().join(ON_A_NODE);
        let check = |named: Option<&str>| {
            let mut command = Command::new("sh");
            command.arg(&script).arg("check").env("THUBAN_STATE_DIR", &state);
            for variable in ["CNI_BIN_DIR", "CNI_CONF_DIR"] {
                match named {
                    Some(folder) => command.env(variable, folder),
                    None => command.env_remove(variable),
                };
            }
            let output = command.output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            files
                .iter()
                .filter(|file| said.contains(&format!("file {}\n", file.display())))
                .count()
        };
        let found = (check(None), check(Some("/nowhere")));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, (2, 0), "a folder that is named counts before a noted one");
    }
}

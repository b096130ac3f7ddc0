//! `uninstall`: takes Thuban off a cluster, in whatever state it is. First it removes pods, then the objects that
//! people made, while the operator can still take rows out of droplets. Then it removes Thuban itself. Traces on the
//! nodes stay: [`NODE_SCRIPT`] removes them.
//!
//! Invariant: every wait has an end, says what it waits for, and can be run again. An object that waits for an operator
//! or a node that is gone loses its finalizer once the operator is deleted.
//!
//! It blocks: nothing else runs beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufRead, IsTerminal, Write};
use std::time::{Duration, Instant};

use serde_json::Value;
use thiserror::Error;
use thuban_api::{HEARTBEAT_NAMESPACE, SYSTEM_NAMESPACE};

use crate::kubectl::{Kubectl, KubectlError};

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
/// The most objects that one command names.
const AT_ONCE: usize = 50;
/// Kinds of the objects that people make.
const ASKED_FOR: [&str; 3] = [KINDS[0], KINDS[1], KINDS[2]];
/// Cluster-scoped kinds of the manifests.
const LASTING: &str = "namespaces,customresourcedefinitions,clusterroles,clusterrolebindings,\
                       validatingadmissionpolicies,validatingadmissionpolicybindings,\
                       flowschemas,prioritylevelconfigurations";
/// Such kinds that API servers before Kubernetes 1.36 do not have.
const LASTING_IF_KNOWN: &str = "mutatingadmissionpolicies,mutatingadmissionpolicybindings";
/// What is deleted, in this order: workloads and rights, then policies, kinds and namespaces. Each with its name for
/// people. The CRD of ClusterNetworkPolicy is not among them, because it is not Thuban's. Optional policies are deleted
/// one by one: the API server may not know the kind of one.
const MANIFESTS: [(&str, &str); 9] = [
    ("thuban-observe", OBSERVE),
    ("the right of monitors", METRICS_READER),
    ("transitd", include_str!("../../install/30-transitd.yaml")),
    ("the operator", include_str!("../../install/20-operator.yaml")),
    (
        "admission policies",
        include_str!("../../install/15-admission.yaml"),
    ),
    (
        "the policy that requires a network",
        include_str!("../../install/optional/require-network.yaml"),
    ),
    (
        "the policy of placement",
        include_str!("../../install/optional/placement.yaml"),
    ),
    ("kinds", include_str!("../../install/10-crds.yaml")),
    ("namespaces", include_str!("../../install/00-namespace.yaml")),
];
/// What thuban-observe has outside of namespaces, if it is there. The rest of it goes with its namespace.
const OBSERVE: &str = "
{apiVersion: v1, kind: Namespace, metadata: {name: thuban-observe}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: thuban-observe}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: thuban-flows-view}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: thuban-observe}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: thuban-viewer}}
";
/// What the chart's monitors have outside of namespaces.
const METRICS_READER: &str = "
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: thuban-metrics-reader}}
";
/// The labels of the operator's and the droplets' pods.
const OURS: &str = "app.kubernetes.io/name in (thuban-operator,transitd)";
/// What takes the traces off a node.
pub const NODE_SCRIPT: &str = include_str!("../../install/remove-from-node.sh");
/// How long after the last removed object the operator is given up.
const OPERATOR_PATIENCE: Duration = Duration::from_secs(30);
const SERVER_PATIENCE: Duration = Duration::from_mins(2);
const POLL: Duration = Duration::from_secs(1);

/// Why Thuban was not removed.
#[derive(Debug, Error)]
pub enum UninstallError {
    #[error(transparent)]
    Kubectl(#[from] KubectlError),
    #[error("an object of the manifests, or an answer of kubectl: {0}")]
    Json(#[from] serde_json::Error),
    #[error("an object of the manifests: {0}")]
    Yaml(#[from] serde_yaml_ng::Error),
    #[error("the answer: {0}")]
    Answer(#[from] io::Error),
    #[error("nothing was removed")]
    NotConfirmed,
    #[error("nothing was removed: give --yes where nobody can be asked")]
    NobodyToAsk,
    #[error("the API server did not delete everything; run it again, or look at the objects named above")]
    Left,
}

type Result<T> = std::result::Result<T, UninstallError>;

/// What is to be removed.
#[derive(Clone, Debug)]
pub struct Removal {
    pub kubectl: Kubectl,
    /// The namespace that Thuban is installed in.
    pub namespace: String,
    /// How long pods may take to end: pods get their own grace first. They never end if their kubelet is gone or has no
    /// transitd to call.
    pub pods: Duration,
}

/// Asks the person at the terminal.
pub fn confirm(removal: &Removal) -> Result<()> {
    if !io::stdin().is_terminal() {
        return Err(UninstallError::NobodyToAsk);
    }
    let context = removal.kubectl.run(&["config", "current-context"]);
    let pods = connected_pods(&removal.kubectl)?.len();
    eprintln!(
        "This removes Thuban from the cluster, with all VPCs and networks, and deletes {pods} pods that are not on \
         host network."
    );
    if let Ok(context) = context {
        eprintln!("The current context of your kubeconfig is {}.", context.trim());
    }
    eprint!("Write yes to go on: ");
    io::stderr().flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    if answer.trim() == "yes" {
        Ok(())
    } else {
        Err(UninstallError::NotConfirmed)
    }
}

/// Removes Thuban. Returns the nodes that take no pods now, and did before.
pub fn run(removal: &Removal) -> Result<Vec<String>> {
    let kubectl = &removal.kubectl;
    // Pods that are made again meanwhile get no node.
    let cordoned = cordon(kubectl)?;
    if let Err(error) = remove(removal) {
        for node in &cordoned {
            kubectl.run(&["uncordon", node])?;
        }
        return Err(error);
    }
    Ok(cordoned)
}

fn remove(removal: &Removal) -> Result<()> {
    let Removal {
        kubectl,
        namespace,
        pods,
    } = removal;
    end_pods(kubectl, *pods)?;
    if is_operator_ready(kubectl, namespace) {
        end_what_was_asked_for(kubectl)?;
    } else {
        eprintln!("no operator runs: objects go without it");
    }
    for (name, manifest) in MANIFESTS {
        eprintln!("deleting {name}");
        let list =
            serde_json::json!({"apiVersion": "v1", "kind": "List", "items": objects(manifest, namespace)?});
        let arguments = ["delete", "--ignore-not-found", "--wait=false", "-f", "-"];
        // A kind that is gone has no objects.
        if let Err(error) = kubectl.run_with(&arguments, &list.to_string())
            && !is_unknown_kind(&error)
        {
            return Err(error.into());
        }
    }
    wait_until_deleted(kubectl, namespace)
}

/// Returns the objects of a manifest, as they are in Thuban's namespace. A namespace of another name stays: others may
/// be in it, too.
fn objects(manifest: &str, namespace: &str) -> Result<Vec<Value>> {
    let mut objects = Vec::new();
    for document in serde_yaml_ng::Deserializer::from_str(manifest) {
        let mut object: Value = serde::Deserialize::deserialize(document)?;
        if object.is_null() {
            continue;
        }
        let is_namespace = object["kind"] == "Namespace" && object["metadata"]["name"] == SYSTEM_NAMESPACE;
        if is_namespace && namespace != SYSTEM_NAMESPACE {
            continue;
        }
        if object["metadata"]["namespace"] == SYSTEM_NAMESPACE {
            object["metadata"]["namespace"] = namespace.into();
        }
        objects.push(object);
    }
    Ok(objects)
}

/// Marks nodes unschedulable; returns those that were not before.
fn cordon(kubectl: &Kubectl) -> Result<Vec<String>> {
    let mut cordoned = Vec::new();
    for node in items(kubectl, &["nodes"])? {
        if node["spec"]["unschedulable"] != true {
            let name = text(&node["metadata"]["name"]);
            kubectl.run(&["cordon", &name])?;
            cordoned.push(name);
        }
    }
    Ok(cordoned)
}

/// Ends the pods that have their network from Thuban: without Thuban they can neither be connected nor taken away
/// cleanly.
fn end_pods(kubectl: &Kubectl, patience: Duration) -> Result<()> {
    let found = connected_pods(kubectl)?;
    if found.is_empty() {
        return Ok(());
    }
    let all: BTreeSet<String> = found.iter().map(|pod| text(&pod["metadata"]["uid"])).collect();
    eprintln!("deleting {} pods that have their network by Thuban:", found.len());
    delete_each(kubectl, "pods", &found, &[])?;
    // Pods that a DaemonSet makes anew are other pods.
    let remaining = || -> Result<Vec<Value>> {
        let mut pods = connected_pods(kubectl)?;
        pods.retain(|pod| all.contains(&text(&pod["metadata"]["uid"])));
        Ok(pods)
    };
    let is_done = wait("pods", patience, || Ok(remaining()?.iter().map(named).collect()))?;
    if !is_done {
        eprintln!("ending them without their kubelet, which is gone or can't disconnect them");
        delete_each(kubectl, "pods", &remaining()?, &["--force", "--grace-period=0"])?;
    }
    Ok(())
}

/// Returns the pods that are on a node, not on host network and not finished.
fn connected_pods(kubectl: &Kubectl) -> Result<Vec<Value>> {
    let mut pods = items(kubectl, &["pods", "-A"])?;
    pods.retain(|pod| {
        pod["spec"]["hostNetwork"] != true
            && !pod["spec"]["nodeName"].is_null()
            && pod["status"]["phase"] != "Succeeded"
            && pod["status"]["phase"] != "Failed"
    });
    Ok(pods)
}

/// Returns the names of the objects by their namespaces; that of other objects is empty.
fn by_namespace<'a>(objects: impl IntoIterator<Item = &'a Value>) -> BTreeMap<String, Vec<String>> {
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for object in objects {
        let metadata = &object["metadata"];
        let of_namespace = names.entry(text(&metadata["namespace"])).or_default();
        of_namespace.push(text(&metadata["name"]));
    }
    names
}

fn delete_each(kubectl: &Kubectl, kind: &str, objects: &[Value], how: &[&str]) -> Result<()> {
    for (namespace, names) in by_namespace(objects) {
        eprintln!("  {namespace}: {}", names.join(", "));
        for names in names.chunks(AT_ONCE) {
            let mut arguments = vec![
                "delete",
                kind,
                "--ignore-not-found",
                "--wait=false",
                "-n",
                &namespace,
            ];
            arguments.extend(how);
            arguments.extend(names.iter().map(String::as_str));
            kubectl.run(&arguments)?;
        }
    }
    Ok(())
}

fn is_operator_ready(kubectl: &Kubectl, namespace: &str) -> bool {
    let arguments = ["get", "deployment", "thuban-operator", "-n", namespace];
    let ready = "jsonpath={.status.readyReplicas}";
    kubectl
        .run(&[&arguments[..], &["-o", ready]].concat())
        .is_ok_and(|ready| ready.trim().parse().is_ok_and(|ready: u32| ready > 0))
}

/// Removes endpoints, networks and VPCs, whose rows the operator takes out of all droplets.
fn end_what_was_asked_for(kubectl: &Kubectl) -> Result<()> {
    let mut endpoints = items(kubectl, &[KINDS[0], "-A"])?;
    // The operator deletes a pod's after the pod, and nobody else may.
    endpoints.retain(|endpoint| endpoint["spec"]["podRef"].is_null());
    delete_each(kubectl, KINDS[0], &endpoints, &[])?;
    for kind in &ASKED_FOR[1..] {
        kubectl.run(&["delete", kind, "--all", "--wait=false"])?;
    }
    let is_done = wait("objects", OPERATOR_PATIENCE, || {
        let mut left = Vec::new();
        for kind in ASKED_FOR {
            let objects = items(kubectl, &[kind, "-A"])?;
            // Endpoints of Services stay as long as their Services, which are not Thuban's. Their rows go with the
            // networks.
            let objects = objects.iter().filter(|object| !is_scaled(object));
            left.extend(objects.map(waiting));
        }
        Ok(left)
    })?;
    if !is_done {
        eprintln!("going on without the operator");
    }
    Ok(())
}

/// Whether it is a Service's Endpoint.
fn is_scaled(object: &Value) -> bool {
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
fn wait_until_deleted(kubectl: &Kubectl, namespace: &str) -> Result<()> {
    let mut last_pods = Instant::now();
    let is_done = wait("the API server", SERVER_PATIENCE, || {
        take_finalizers(kubectl)?;
        if last_pods.elapsed() > Duration::from_secs(15) {
            last_pods = Instant::now();
            let mut pods = Vec::new();
            // The pods of others stay, if the namespace does.
            let ours = if namespace == SYSTEM_NAMESPACE { "" } else { OURS };
            for namespace in [namespace, HEARTBEAT_NAMESPACE] {
                pods.extend(items(kubectl, &["pods", "-n", namespace, "-l", ours])?);
            }
            // Pods of a node that is gone: their namespace waits for them.
            delete_each(kubectl, "pods", &pods, &["--force", "--grace-period=0"])?;
        }
        lasting(kubectl, namespace)
    })?;
    if !is_done {
        return Err(UninstallError::Left);
    }
    Ok(())
}

/// Takes the finalizers away. The operator is deleted, so nobody else would do it.
fn take_finalizers(kubectl: &Kubectl) -> Result<()> {
    let mut count = 0;
    for kind in KINDS {
        let mut objects = items(kubectl, &[kind, "-A"])?;
        objects.retain(|object| {
            let finalizers = object["metadata"]["finalizers"].as_array();
            finalizers.is_some_and(|all| !all.is_empty())
        });
        for (namespace, names) in by_namespace(&objects) {
            for names in names.chunks(AT_ONCE) {
                count += names.len();
                let patch = r#"{"metadata":{"finalizers":null}}"#;
                let mut arguments = vec!["patch", kind, "--type=merge", "-p", patch];
                if !namespace.is_empty() {
                    arguments.extend(["-n", &namespace]);
                }
                arguments.extend(names.iter().map(String::as_str));
                // An object that went in between needs nothing more.
                let _ = kubectl.run(&arguments);
            }
        }
    }
    if count > 0 {
        eprintln!("took the finalizers off {count} objects that the operator had left");
    }
    Ok(())
}

/// Returns everything of the manifests that has no namespace and still exists.
fn lasting(kubectl: &Kubectl, namespace: &str) -> Result<Vec<String>> {
    let ours = of_no_namespace(namespace)?;
    let mut all = kubectl.run(&["get", LASTING, "-o", "name"])?;
    match kubectl.run(&["get", LASTING_IF_KNOWN, "-o", "name"]) {
        Ok(more) => all.push_str(&more),
        Err(error) if is_unknown_kind(&error) => {}
        Err(error) => return Err(error.into()),
    }
    let is_ours = |line: &&str| {
        line.split_once('/').is_some_and(|(kind, name)| {
            let kind = kind.split('.').next().unwrap_or(kind);
            ours.contains(&(kind.to_owned(), name.to_owned()))
        })
    };
    Ok(all.lines().filter(is_ours).map(str::to_owned).collect())
}

/// Returns kind and name of the manifests' objects that have no namespace.
fn of_no_namespace(namespace: &str) -> Result<BTreeSet<(String, String)>> {
    let mut ours = BTreeSet::new();
    for (_, manifest) in MANIFESTS {
        for object in objects(manifest, namespace)? {
            if object["metadata"]["namespace"].is_null() {
                ours.insert((
                    text(&object["kind"]).to_lowercase(),
                    text(&object["metadata"]["name"]),
                ));
            }
        }
    }
    Ok(ours)
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
            eprintln!("{what}: all gone ({seconds} s)");
            return Ok(true);
        }
        if left != said {
            let first = left.iter().take(3).cloned().collect::<Vec<_>>().join("; ");
            eprintln!("{what}: waits for {} ({seconds} s): {first}", left.len());
            if left.len() != said.len() {
                last = Instant::now();
            }
            said = left;
        }
        if last.elapsed() > patience {
            eprintln!("{what}: nothing went for {} s", patience.as_secs());
            return Ok(false);
        }
        std::thread::sleep(POLL);
    }
}

/// Returns the items of `kubectl get …`; none of a kind that the API server doesn't know.
fn items(kubectl: &Kubectl, arguments: &[&str]) -> Result<Vec<Value>> {
    let arguments = [&["get", "-o", "json"], arguments].concat();
    let answer = match kubectl.run(&arguments) {
        Ok(answer) => answer,
        Err(error) if is_unknown_kind(&error) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut list: Value = serde_json::from_str(&answer)?;
    match list["items"].take() {
        Value::Array(items) => Ok(items),
        _ => Ok(Vec::new()),
    }
}

fn is_unknown_kind(error: &KubectlError) -> bool {
    let text = error.to_string();
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
    use super::{KINDS, MANIFESTS, NODE_SCRIPT, objects, of_no_namespace, waiting};
    use serde_json::json;

    #[test]
    fn all_that_the_manifests_make_is_removed() {
        let ours = of_no_namespace("thuban-system").unwrap();
        let has = |kind: &str, name: &str| ours.contains(&(kind.to_owned(), name.to_owned()));
        assert!(has("namespace", "thuban-system") && has("namespace", "thuban-heartbeats"));
        assert!(has("clusterrole", "thuban-operator"));
        assert!(has("namespace", "thuban-observe") && has("clusterrole", "thuban-flows-view"));
        for kind in KINDS {
            assert!(has("customresourcedefinition", kind), "{kind}");
        }
        // Helm has no record of them any more once the namespace is gone.
        assert!(has("mutatingadmissionpolicy", "thuban-placement"));
        assert!(has("mutatingadmissionpolicybinding", "thuban-placement"));
        assert!(has("validatingadmissionpolicy", "thuban-require-network"));
        assert!(has("clusterrolebinding", "thuban-metrics-reader"));
        let foreign = "clusternetworkpolicies.policy.networking.k8s.io";
        assert!(!has("customresourcedefinition", foreign));
    }

    #[test]
    fn thuban_is_removed_from_the_namespace_that_it_is_in() {
        let all = MANIFESTS
            .iter()
            .flat_map(|(_, text)| objects(text, "net").unwrap());
        let mut namespaces: Vec<String> = all
            .filter_map(|object| Some(object["metadata"]["namespace"].as_str()?.to_owned()))
            .collect();
        namespaces.sort();
        namespaces.dedup();
        assert_eq!(namespaces, ["net", "thuban-heartbeats"]);
        let ours = of_no_namespace("net").unwrap();
        // Others may be in it.
        assert!(!ours.contains(&("namespace".to_owned(), "net".to_owned())));
        assert!(!ours.contains(&("namespace".to_owned(), "thuban-system".to_owned())));
    }

    #[test]
    fn an_object_says_what_it_waits_for() {
        let object = json!({"kind": "Network", "metadata": {"name": "web"}, "status": {"conditions": [
            {"type": "Ready", "message": "no"}, {"type": "Deleting", "message": "2 endpoints"}]}});
        assert_eq!(waiting(&object), "Network web 2 endpoints");
    }

    #[test]
    fn the_script_for_nodes_can_check() {
        assert!(NODE_SCRIPT.starts_with("#!/bin/sh") && NODE_SCRIPT.contains("$1\" = check"));
    }
}

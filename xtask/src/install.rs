//! Installs Thuban on a local cluster from `install/`: the same files in the same order as a user would apply.
//!
//! The values of `config.env` are those of the cluster. A second run brings changed images and manifests.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use thuban_cluster::{Cluster, Instance};

use crate::{
    build::{Profile, is_tests, root},
    conformance, diagnostics, flow_relay,
    images::hex_digest,
    otlp,
};

pub const NAMESPACE: &str = "thuban-system";
const CONFIG: &str = "install/config.env.example";
const KUSTOMIZATION: &str = "kustomization.yaml";
/// Values that all local clusters have.
const SERVICE_CIDRS: &str = "10.96.0.0/16";
const CLUSTER_DNS: &str = "10.96.0.10";
const DEFAULT_VPC_CIDR: &str = "10.244.0.0/16";
/// The CRD of ClusterNetworkPolicy, which isn't Thuban's: one that a cluster has is used, and none is ever removed.
const FOREIGN: &str = "12-cluster-network-policies.yaml";
const FOREIGN_CRD: &str = "customresourcedefinition/clusternetworkpolicies.policy.networking.k8s.io";
/// The external addresses that the cluster of our tests allows, and that of Kubernetes' tests.
const EXTERNAL_IPS: &str = "198.51.100.0/24";
const KUBERNETES_EXTERNAL_IPS: &str = "203.0.113.0/24";
/// The rest of claims on the tests' cluster: tests wait until addresses and VNIs are free again.
const CLAIM_REST_SECONDS: &str = "5";
const READY_TIMEOUT: Duration = Duration::from_mins(3);

/// Installs, or updates, and waits until pods can be made.
pub fn run(name: &str) -> Result<()> {
    let cluster = Cluster::named(name)?;
    let was_installed = cluster
        .kubectl(&["get", "-n", NAMESPACE, "daemonset/transitd"])
        .is_ok();
    let are_images_new = import_changed_images(&cluster)?;
    for (index, manifest) in manifests()?.into_iter().enumerate() {
        let text =
            fs::read_to_string(&manifest).with_context(|| format!("reading {}", manifest.display()))?;
        let file = manifest
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if is_foreign(&manifest) && cluster.kubectl(&["get", FOREIGN_CRD]).is_ok() {
            println!("left out install/{file}: the cluster has the kind already");
            continue;
        }
        cluster
            .kubectl_apply(&text)
            .with_context(|| format!("applying install/{file}"))?;
        println!("applied install/{file}");
        if index == 0 {
            // The namespace is there now.
            cluster
                .kubectl_apply(&config_map(cluster.instance())?)
                .context("applying the configuration")?;
        }
    }
    if was_installed && are_images_new {
        for workload in ["deployment/thuban-operator", "daemonset/transitd"] {
            cluster.kubectl(&["rollout", "restart", "-n", NAMESPACE, workload])?;
            println!("restarted {workload}: its image has changed");
        }
    }
    wait_installed(&cluster).inspect_err(|_| diagnostics::print(&cluster))
}

/// Returns the YAML files of `install/`, in name order.
pub fn manifests() -> Result<Vec<PathBuf>> {
    manifests_in(&root().join("install"))
}

/// Returns the YAML files of a folder, in name order.
fn manifests_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .filter(|path| !path.ends_with(KUSTOMIZATION))
        .collect();
    files.sort();
    if files.is_empty() {
        bail!("{} has no manifests", folder.display());
    }
    Ok(files)
}

/// Whether what the file makes stays when Thuban goes.
pub fn is_foreign(path: &Path) -> bool {
    path.ends_with(FOREIGN)
}

/// Returns the values of a file that sets environment variables.
fn read_values(path: &Path) -> Result<BTreeMap<String, String>> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let values = lines.filter_map(|line| line.split_once('='));
    Ok(values
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect())
}

/// Returns a cluster's values.
pub fn values(instance: &Instance) -> Result<BTreeMap<String, String>> {
    values_of(&root(), instance)
}

/// Returns a cluster's values for the version whose sources are in this folder: it may know fewer than this one.
pub fn values_of(sources: &Path, instance: &Instance) -> Result<BTreeMap<String, String>> {
    let mut data = read_values(&sources.join(CONFIG))?;
    // Uplinks are veths. The demo runs as a user would have it, the tests have transit at XDP where the uplinks can.
    let is_tests = is_tests(instance.name());
    let aggregation = if is_tests { "never" } else { "auto" };
    let mut set = |key: &str, value: String| drop(data.insert(key.to_owned(), value));
    set("THUBAN_AGGREGATION", aggregation.to_owned());
    set("KUBERNETES_SERVICE_HOST", instance.gateway().to_string());
    set("KUBERNETES_SERVICE_PORT", instance.api_port().to_string());
    set("THUBAN_SERVICE_CIDRS", SERVICE_CIDRS.to_owned());
    set("THUBAN_UNDERLAY_CIDRS", instance.subnet());
    set("THUBAN_DEFAULT_VPC_CIDR", DEFAULT_VPC_CIDR.to_owned());
    set("THUBAN_CLUSTER_DNS", CLUSTER_DNS.to_owned());
    // The tests dial from here, as thieves of tokens do.
    set("THUBAN_STREAM_SOURCES", format!("{}/32", instance.gateway()));
    if instance.name() == conformance::NAME {
        set("THUBAN_EXTERNAL_IP_CIDRS", KUBERNETES_EXTERNAL_IPS.to_owned());
    }
    if is_tests {
        set("THUBAN_EXTERNAL_IP_CIDRS", EXTERNAL_IPS.to_owned());
        set("THUBAN_CLAIM_REST_SECONDS", CLAIM_REST_SECONDS.to_owned());
        set("THUBAN_OTLP_ENDPOINT", otlp::endpoint(instance));
        // All tests run with the work that telling of flows costs, whether thuban-observe is there or not.
        set("THUBAN_OBSERVE_NAMESPACE", flow_relay::NAMESPACE.to_owned());
        set("THUBAN_FLOWS", flow_relay::MODE.to_owned());
    }
    Ok(data)
}

/// Returns the ConfigMap of a cluster's values.
fn config_map(instance: &Instance) -> Result<String> {
    let config = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": values(instance)?,
        "metadata": {"name": "thuban-config", "namespace": NAMESPACE}});
    Ok(config.to_string())
}

/// Imports archives that changed since the last installation on this cluster.
fn import_changed_images(cluster: &Cluster) -> Result<bool> {
    let mut has_changed = false;
    for archive in ["operator.tar", "transitd.tar"] {
        let path = Profile::of(cluster.name()).images().join(archive);
        let bytes =
            fs::read(&path).with_context(|| format!("{}: run `cargo xtask build`", path.display()))?;
        let hash = hex_digest(&bytes);
        let record = cluster
            .instance()
            .state()
            .join(format!("installed-{archive}.sha256"));
        if fs::read_to_string(&record).is_ok_and(|old| old == hash) {
            continue;
        }
        cluster.import_image(&path)?;
        fs::write(&record, hash).with_context(|| format!("writing {}", record.display()))?;
        println!("imported {archive} on all nodes");
        has_changed = true;
    }
    Ok(has_changed)
}

fn wait_installed(cluster: &Cluster) -> Result<()> {
    wait("operator", || {
        workload(cluster, NAMESPACE, "deployment/thuban-operator")
    })?;
    wait("transitd", || workload(cluster, NAMESPACE, "daemonset/transitd"))?;
    wait("nodes", || {
        let nodes = get(cluster, &["nodes"])?;
        let nodes = nodes["items"].as_array().context("a list of nodes")?;
        let ready = nodes.iter().filter(|node| is_ready(node)).count();
        Ok((
            ready == nodes.len() && !nodes.is_empty(),
            format!("{ready} of {} Ready", nodes.len()),
        ))
    })?;
    for object in ["vpcs.thuban.dev/default", "networks.thuban.dev/default"] {
        wait(object, || provisioned(cluster, object))?;
    }
    Ok(())
}

/// Brings an optional part of Thuban: its image to all nodes, and the manifests in its folder of `install/`. Does not
/// wait.
pub fn bring(cluster: &Cluster, archive: &Path, folder: &str) -> Result<()> {
    cluster.import_image(archive)?;
    for file in manifests_in(&root().join("install").join(folder))? {
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        cluster
            .kubectl_apply(&text)
            .with_context(|| format!("applying {}", file.display()))?;
    }
    Ok(())
}

/// Whether the newest template of a Deployment or DaemonSet runs everywhere and is ready.
pub fn workload(cluster: &Cluster, namespace: &str, name: &str) -> Result<(bool, String)> {
    let object = get(cluster, &["-n", namespace, name])?;
    let status = &object["status"];
    // A Deployment has the first of the two fields, a DaemonSet the second.
    let number = |fields: [&str; 2]| {
        let mut numbers = fields.into_iter().filter_map(|field| status[field].as_u64());
        numbers.next().unwrap_or(0)
    };
    let wanted = number(["replicas", "desiredNumberScheduled"]);
    let updated = number(["updatedReplicas", "updatedNumberScheduled"]);
    let ready = number(["readyReplicas", "numberReady"]);
    let is_observed = status["observedGeneration"] == object["metadata"]["generation"];
    Ok((
        is_observed && wanted > 0 && updated == wanted && ready == wanted,
        format!("{ready} of {wanted} ready, {updated} up to date"),
    ))
}

pub fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    conditions.is_some_and(|all| {
        all.iter()
            .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    })
}

/// Returns the phase of an object, with the reason when it is refused.
pub fn provisioned(cluster: &Cluster, object: &str) -> Result<(bool, String)> {
    let status = get(cluster, &[object])?["status"].take();
    let phase = status["phase"].as_str().unwrap_or("no phase").to_owned();
    let refusal = status["conditions"]
        .as_array()
        .and_then(|all| all.iter().find(|condition| condition["status"] == "False"))
        .and_then(|condition| condition["message"].as_str());
    let text = refusal.map_or_else(|| phase.clone(), |message| format!("{phase}: {message}"));
    Ok((phase == "Provisioned", text))
}

/// Returns the answer of `kubectl get … -o json`.
pub fn get(cluster: &Cluster, arguments: &[&str]) -> Result<Value> {
    let arguments: Vec<&str> = ["get", "-o", "json"].iter().chain(arguments).copied().collect();
    Ok(serde_json::from_str(&cluster.kubectl(&arguments)?)?)
}

/// Asks until the answer is yes; prints each change of the answer's text.
pub fn wait(what: &str, mut ask: impl FnMut() -> Result<(bool, String)>) -> Result<()> {
    let start = Instant::now();
    let mut said = String::new();
    loop {
        let (is_done, text) = ask().unwrap_or_else(|error| (false, format!("{error:#}")));
        let seconds = start.elapsed().as_secs_f32();
        if text != said {
            println!("{what}: {text} ({seconds:.1} s)");
            said = text;
        }
        if is_done {
            return Ok(());
        }
        if start.elapsed() > READY_TIMEOUT {
            bail!("{what}: still {said} after {seconds:.0} s");
        }
        std::thread::sleep(Duration::from_millis(250));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{Instance, manifests, read_values, root, values};

    #[test]
    fn the_configuration_gets_the_values_of_the_cluster() {
        let instance = Instance::named("test").unwrap();
        let data = values(&instance).unwrap();
        assert_eq!(data["KUBERNETES_SERVICE_HOST"], instance.gateway().to_string());
        assert_eq!(data["KUBERNETES_SERVICE_PORT"], instance.api_port().to_string());
        assert_eq!(data["THUBAN_UNDERLAY_CIDRS"], instance.subnet());
        assert_eq!(data["THUBAN_TRANSIT_HOOK"], "auto");
    }

    #[test]
    fn the_chart_and_kustomize_have_the_same_values_by_default() {
        let values = root().join("charts/thuban/values.yaml");
        let values: serde_yaml_ng::Value =
            serde_yaml_ng::from_str(&std::fs::read_to_string(values).unwrap()).unwrap();
        let chart = values["config"].as_mapping().unwrap().iter();
        let chart: BTreeMap<String, String> = chart
            .map(|(key, value)| {
                (
                    key.as_str().unwrap().to_owned(),
                    value.as_str().unwrap().to_owned(),
                )
            })
            .filter(|(_, value)| !value.is_empty())
            .collect();
        assert_eq!(chart, read_values(&root().join(super::CONFIG)).unwrap());
    }

    #[test]
    fn one_manifest_is_foreign_and_makes_the_crd_that_is_looked_for() {
        let mut files = manifests().unwrap();
        files.retain(|path| super::is_foreign(path));
        let [file] = &files[..] else { panic!("{files:?}") };
        let text = std::fs::read_to_string(file).unwrap();
        let object: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text).unwrap();
        let name = object["metadata"]["name"].as_str().unwrap();
        assert_eq!(super::FOREIGN_CRD, format!("customresourcedefinition/{name}"));
        let read = |field: &str| object["spec"]["versions"][0][field].clone();
        assert_eq!((read("name"), read("served")), ("v1alpha2".into(), true.into()));
    }
}

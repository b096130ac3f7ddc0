//! The test of `charts/thuban`: Helm installs, upgrades, rolls back and removes Thuban in a namespace of another name,
//! on a local cluster without Thuban. No packet between two nodes is lost meanwhile.

use std::{
    fs,
    net::{SocketAddr, UdpSocket},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use thuban_cluster::{Cluster, command::output};

use crate::{build::root, images, install, manifests, uninstall};

const RELEASE: &str = "vpcs";
const SPACE: &str = "vpc-network";
const POD: &str = "charted";
/// The port where the pod answers datagrams.
const PORT: u16 = 8081;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
const SERVER_TIMEOUT: Duration = Duration::from_mins(1);
/// How many datagrams show something: fewer are sent only if the time was short.
const ENOUGH: u32 = 100;
const PAUSE: Duration = Duration::from_millis(10);
/// What a value that is missing names.
const REQUIRED: &str = "KUBERNETES_SERVICE_HOST";

/// Returns what Helm said of a release in this namespace, or why it failed.
pub fn helm(cluster: &Cluster, namespace: &str, arguments: &[&str]) -> Result<String> {
    output(
        Command::new(manifests::helm()?)
            .env("KUBECONFIG", cluster.instance().kubeconfig())
            .args(arguments)
            .args(["--namespace", namespace]),
    )
}

/// Runs the test. Leaves the cluster without Thuban.
pub fn in_another_namespace(name: &str) -> Result<()> {
    let cluster = &Cluster::named(name)?;
    let chart = root().join("charts/thuban").display().to_string();
    let values = cluster.instance().state().join("values.json");
    let mut config = install::values(cluster.instance())?;
    // The chart sets it, if thuban-observe is enabled.
    config.remove("THUBAN_OBSERVE_NAMESPACE");
    let write = |config: &_| {
        let text = json!({"config": config}).to_string();
        fs::write(&values, text).with_context(|| format!("writing {}", values.display()))
    };
    let file = values.display().to_string();
    let of = |verb: &'static str| [verb, RELEASE, &chart, "--values", &file, "--wait", "--timeout=3m"];

    let mut lacking = config.clone();
    lacking.remove(REQUIRED);
    write(&lacking)?;
    let install = of("install");
    let refused = helm(cluster, SPACE, &[&install[..], &["--create-namespace"]].concat());
    let refused = refused
        .err()
        .context("a chart with a value missing was installed")?;
    ensure!(format!("{refused:#}").contains(REQUIRED), "{refused:#}");
    ensure!(
        cluster.kubectl(&["get", "crd", "vpcs.thuban.dev"]).is_err(),
        "half installed"
    );

    write(&config)?;
    helm(cluster, SPACE, &[&install[..], &["--create-namespace"]].concat())?;
    under_traffic(cluster, || {
        change(cluster, || {
            let mut changed = config.clone();
            changed.insert("THUBAN_CLAIM_REST_SECONDS".to_owned(), "6".to_owned());
            write(&changed)?;
            helm(cluster, SPACE, &of("upgrade")).map(drop)
        })
    })?;
    helm(cluster, SPACE, &["uninstall", RELEASE, "--wait", "--timeout=3m"])?;
    cluster
        .kubectl(&["get", "crd", "vpcs.thuban.dev"])
        .context("the CRDs go only by hand")?;
    // It takes finalizers off that the operator has left, also in this namespace.
    uninstall::run(name)?;
    cluster
        .kubectl(&["delete", "namespace", SPACE, "--timeout=60s"])
        .map(drop)
}

/// Upgrades and rolls back. Each change of a value replaces all pods.
fn change(cluster: &Cluster, upgrade: impl Fn() -> Result<()>) -> Result<()> {
    let templates = || {
        cluster.kubectl(&[
            "get",
            "daemonset",
            "-n",
            SPACE,
            "transitd",
            "-o",
            "jsonpath={.metadata.generation}",
        ])
    };
    let first = templates()?;
    upgrade()?;
    let second = templates()?;
    let rollback = ["rollback", RELEASE, "1", "--wait", "--timeout=3m"];
    helm(cluster, SPACE, &rollback)?;
    ensure!(
        first != second && second != templates()?,
        "transitd was not replaced"
    );
    Ok(())
}

/// Does `work` while a node asks a pod of another node by datagrams. Fails if one of them got no answer.
pub fn under_traffic(cluster: &Cluster, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let nodes = cluster.nodes()?;
    let server = start_server(cluster, POD, &nodes[1])?;
    let is_over = AtomicBool::new(false);
    let (asked, lost) = thread::scope(|scope| {
        let asking = scope.spawn(|| cluster.in_node(&nodes[0], || ask_until(server, &is_over)));
        let done = work();
        is_over.store(true, Ordering::Relaxed);
        let asked = asking.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        done.and(asked)
    })?;
    println!("{asked} datagrams were asked for while Helm upgraded and rolled back, {lost} got no answer");
    ensure!(
        asked > ENOUGH && lost == 0,
        "{lost} of {asked} datagrams were lost"
    );
    cluster.kubectl(&["delete", "pod", POD, "--now"]).map(drop)
}

/// Returns the address of a pod that answers datagrams.
pub fn start_server(cluster: &Cluster, name: &str, node: &str) -> Result<SocketAddr> {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": node, "containers": [
            {"name": "agnhost", "image": images::AGNHOST, "args": ["netexec", format!("--udp-port={PORT}")]}]}});
    cluster.kubectl_apply(&pod.to_string())?;
    cluster.kubectl(&["wait", "--for=condition=Ready", "pod", name, "--timeout=90s"])?;
    let address = cluster.kubectl(&["get", "pod", name, "-o", "jsonpath={.status.podIP}"])?;
    Ok(SocketAddr::new(address.trim().parse()?, PORT))
}

/// Asks by datagrams until somebody says that it is over, once the node's own endpoint works and one was answered.
/// Returns how many were sent, and how many had no answer.
pub fn ask_until(server: SocketAddr, is_over: &AtomicBool) -> Result<(u32, u32)> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let is_answered = || socket.send(b"hostname").is_ok() && socket.recv(&mut [0; 256]).is_ok();
    let began = Instant::now();
    while !is_answered() {
        ensure!(began.elapsed() < SERVER_TIMEOUT, "{server} does not answer");
    }
    let (mut asked, mut lost) = (0, 0);
    while !is_over.load(Ordering::Relaxed) {
        asked += 1;
        lost += u32::from(!is_answered());
        thread::sleep(PAUSE);
    }
    Ok((asked, lost))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_yaml_ng::Value;

    use super::{images, root};

    /// Who may read a Secret reads all of it: the key is beside the certificate.
    #[test]
    fn scrapers_need_no_secret_with_the_key_of_a_ca() {
        let read = |file: &str| {
            let path = root().join("charts/thuban/templates").join(file);
            std::fs::read_to_string(path).unwrap()
        };
        let monitor = read("41-pod-monitor.yaml");
        assert!(monitor.contains("configMap: {name: thuban-operator-ca, key: ca.crt}"));
        assert!(!monitor.contains("secret: "), "{monitor}");
        let published = "resources: [configmaps]\n  resourceNames: [thuban-operator-ca]\n  verbs: [patch]\n";
        assert!(read("20-operator.yaml").contains(published));
    }

    #[test]
    fn each_key_of_config_is_in_the_schema_and_on_the_page() {
        let read = |file: &str| std::fs::read_to_string(root().join(file)).unwrap();
        let keys = |mapping: &Value| -> BTreeSet<String> {
            let keys = mapping.as_mapping().unwrap().keys();
            keys.map(|key| key.as_str().unwrap().to_owned()).collect()
        };
        let values: Value = serde_yaml_ng::from_str(&read("charts/thuban/values.yaml")).unwrap();
        // JSON is YAML.
        let schema: Value = serde_yaml_ng::from_str(&read("charts/thuban/values.schema.json")).unwrap();
        let config = keys(&values["config"]);
        assert_eq!(config, keys(&schema["properties"]["config"]["properties"]));
        let page = read("docs/guide/install.md");
        let missing: Vec<_> = config
            .iter()
            .filter(|key| !page.contains(&format!("`{key}`")))
            .collect();
        assert!(missing.is_empty(), "docs/guide/install.md lacks {missing:?}");
    }

    #[test]
    fn images_chart_and_kustomize_have_the_workspaces_version() {
        let version = env!("CARGO_PKG_VERSION");
        for image in [
            images::OPERATOR,
            images::TRANSITD,
            images::LOAD_BALANCERS,
            images::OBSERVE,
        ] {
            assert!(image.ends_with(&format!(":{version}")), "{image}");
        }
        let read = |file: &str| std::fs::read_to_string(root().join(file)).unwrap();
        let chart: Value = serde_yaml_ng::from_str(&read("charts/thuban/Chart.yaml")).unwrap();
        assert_eq!(
            (&chart["version"], &chart["appVersion"]),
            (&version.into(), &version.into())
        );
        let kustomization = read("install/kustomization.yaml");
        assert_eq!(kustomization.matches(&format!("newTag: {version}}}")).count(), 4);
    }
}

//! Policies in every namespace, also in those that tests make: all pods are isolated in both directions, and may talk
//! to pods of their namespace, to cluster DNS and to nodes.

use std::{
    collections::HashSet,
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use thuban_cluster::{Cluster, NODES};

use crate::dns;

/// The label of all policies that are made here.
const LABEL: &str = "isolation";

/// Isolates namespaces until this ends.
pub struct Isolation {
    cluster: Cluster,
    watch: Arc<Watch>,
    isolating: Option<JoinHandle<Result<usize>>>,
}

/// The process that tells of namespaces.
#[derive(Default)]
struct Watch {
    process: Mutex<Option<Child>>,
    is_over: AtomicBool,
}

impl Isolation {
    /// Isolates all namespaces that are there, and each one that comes.
    pub fn begin(cluster: &Cluster) -> Result<Self> {
        let nodes = addresses(cluster)?;
        let namespaces = cluster.kubectl(&["get", "namespaces", "-o", "name"])?;
        let mut known = HashSet::new();
        for namespace in namespaces.lines().filter_map(name) {
            apply(cluster, namespace, &nodes)?;
            known.insert(namespace.to_owned());
        }
        let watch = Arc::new(Watch::default());
        let (of_thread, for_thread) = (cluster.clone(), Arc::clone(&watch));
        Ok(Self {
            cluster: cluster.clone(),
            watch,
            isolating: Some(thread::spawn(move || {
                for_thread.isolate(&of_thread, &nodes, known)
            })),
        })
    }

    /// Ends, and removes the policies. Fails if a namespace was not isolated.
    pub fn end(mut self) -> Result<()> {
        self.watch.end();
        let isolating = self.isolating.take().context("it has ended")?;
        let isolated = isolating.join().map_err(|_| anyhow!("isolating namespaces"))??;
        println!("    {isolated} namespaces were isolated");
        Ok(())
    }
}

impl Drop for Isolation {
    fn drop(&mut self) {
        self.watch.end();
        let made = format!("{LABEL}=yes");
        let all = ["delete", "networkpolicies", "-A", "-l", &made, "--wait=false"];
        if let Err(error) = self.cluster.kubectl(&all) {
            eprintln!("removing the policies: {error:#}");
        }
    }
}

impl Watch {
    fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut process) = process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Begins a watch, or returns none if that is over.
    fn begin(&self, cluster: &Cluster) -> Result<Option<ChildStdout>> {
        let instance = cluster.instance();
        let mut watch = Command::new(instance.bin().join("kubectl"));
        watch.arg(format!("--kubeconfig={}", instance.kubeconfig().display()));
        watch.args(["get", "namespaces", "--watch", "-o", "name"]);
        watch.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_over.load(Ordering::SeqCst) {
            return Ok(None);
        }
        if let Some(mut ended) = process.take() {
            let _ = ended.wait();
        }
        let mut watch = watch.spawn().context("starting kubectl")?;
        let lines = watch.stdout.take().context("no output of kubectl")?;
        *process = Some(watch);
        Ok(Some(lines))
    }

    /// Isolates namespaces until the end, except those that are isolated already. Returns how many are. The API server
    /// ends each watch after a time.
    fn isolate(&self, cluster: &Cluster, nodes: &[String], mut known: HashSet<String>) -> Result<usize> {
        while let Some(lines) = self.begin(cluster)? {
            // The watch names a namespace at each change of it.
            for line in BufReader::new(lines).lines().map_while(Result::ok) {
                let Some(namespace) = name(&line).filter(|name| known.insert((*name).to_owned())) else {
                    continue;
                };
                // A namespace that goes takes no policies.
                if let Err(error) = apply(cluster, namespace, nodes)
                    && is_active(cluster, namespace)
                {
                    return Err(error.context(format!("isolating {namespace}")));
                }
            }
        }
        Ok(known.len())
    }
}

fn name(line: &str) -> Option<&str> {
    line.trim().strip_prefix("namespace/")
}

fn is_active(cluster: &Cluster, namespace: &str) -> bool {
    let phase = cluster.kubectl(&["get", "namespace", namespace, "-o", "jsonpath={.status.phase}"]);
    phase.is_ok_and(|phase| phase == "Active")
}

/// Returns the addresses of the nodes, on the underlay and in the VPC `default`, and the API server's.
fn addresses(cluster: &Cluster) -> Result<Vec<String>> {
    let mut all = vec![cluster.gateway().to_string()];
    for node in NODES {
        all.push(cluster.node_address(node)?.to_string());
        let own = cluster.kubectl(&[
            "get",
            "endpoints.thuban.dev",
            "-n",
            "thuban-system",
            node,
            "-o",
            "jsonpath={.status.addresses[*]}",
        ])?;
        all.extend(own.split_whitespace().map(str::to_owned));
    }
    Ok(all)
}

fn apply(cluster: &Cluster, namespace: &str, nodes: &[String]) -> Result<()> {
    let policies = json!({"apiVersion": "v1", "kind": "List", "items": policies(namespace, nodes)});
    cluster.kubectl_apply(&policies.to_string()).map(|_| ())
}

fn policies(namespace: &str, nodes: &[String]) -> Vec<Value> {
    let blocks = nodes.iter().map(|address| {
        let length = if address.contains(':') { 128 } else { 32 };
        json!({"ipBlock": {"cidr": format!("{address}/{length}")}})
    });
    let blocks: Vec<Value> = blocks.collect();
    let servers = json!({
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": dns::NAMESPACE}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    });
    let ports = json!([{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]);
    let mut all = vec![
        policy(namespace, "default-deny", &json!([]), &json!([])),
        policy(
            namespace,
            "within",
            &json!([{"from": [{"podSelector": {}}]}]),
            &json!([{"to": [{"podSelector": {}}]}]),
        ),
        policy(
            namespace,
            "nodes",
            &json!([{"from": blocks}]),
            &json!([{"to": blocks}]),
        ),
        policy(
            namespace,
            "ask-dns",
            &json!([]),
            &json!([{"to": [servers], "ports": ports}]),
        ),
    ];
    if namespace == dns::NAMESPACE {
        let asked = json!([{"from": [{"namespaceSelector": {}}], "ports": ports}]);
        all.push(policy(namespace, "dns", &asked, &json!([])));
    }
    all
}

fn policy(namespace: &str, name: &str, ingress: &Value, egress: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace, "labels": {LABEL: "yes"}},
        "spec": {
            "podSelector": {}, "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress, "egress": egress,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::{name, policies};

    #[test]
    fn all_namespaces_are_isolated_and_dns_is_asked() {
        let names = |namespace: &str| {
            let all = policies(namespace, &["10.0.0.1".into(), "fd00::1".into()]);
            let names = all.iter().map(|policy| policy["metadata"]["name"].to_string());
            names.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names("shop"), r#""default-deny" "within" "nodes" "ask-dns""#);
        assert_eq!(names("kube-system"), names("shop") + r#" "dns""#);
        let nodes = &policies("shop", &["10.0.0.1".into(), "fd00::1".into()])[2];
        let cidr = |index: usize| &nodes["spec"]["ingress"][0]["from"][index]["ipBlock"]["cidr"];
        assert!(cidr(0) == "10.0.0.1/32" && cidr(1) == "fd00::1/128");
        assert_eq!((name("namespace/shop"), name("error")), (Some("shop"), None));
    }
}

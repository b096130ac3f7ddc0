//! `kubectl thuban`, as an administrator and as a tenant run it: what it says, and its exit status.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use thuban_cluster::Cluster;

use crate::actor::Actor;
use crate::support::{apply, binary, delete_namespace, namespace_manifest, netexec_manifest};
use crate::tenants::tenants;

const NODE: &str = "node-a";
const PARTS_OF_STATUS: [&str; 6] = [
    "operator",
    "droplets",
    "VPCs",
    "networks",
    "addresses",
    "endpoints",
];

/// What the plugin printed, its exit status, and how long it ran.
#[derive(Debug)]
pub struct Said {
    pub output: String,
    pub error: String,
    pub code: Option<i32>,
    pub took: Duration,
}

impl Said {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.output).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

pub fn plugin(kubeconfig: &Path, line: &str) -> Result<Said> {
    let start = Instant::now();
    let output = Command::new(binary("kubectl-thuban")?)
        .env("KUBECONFIG", kubeconfig)
        .args(line.split_whitespace())
        .output()
        .context("kubectl-thuban")?;
    Ok(Said {
        output: String::from_utf8_lossy(&output.stdout).into_owned(),
        error: String::from_utf8_lossy(&output.stderr).into_owned(),
        code: output.status.code(),
        took: start.elapsed(),
    })
}

pub fn administrator(line: &str) -> Said {
    let kubeconfig = tenants().cluster.instance().kubeconfig();
    plugin(&kubeconfig, line).unwrap()
}

/// A namespace of a test, which goes when this is dropped.
pub struct Namespace<'a>(&'a Cluster, &'a str);

impl<'a> Namespace<'a> {
    pub fn new(cluster: &'a Cluster, name: &'a str) -> Result<Self> {
        let namespace = Self(cluster, name);
        // A test that was ended may have left it.
        delete_namespace(cluster, name)?;
        apply(cluster, &[namespace_manifest(name, None)])?;
        Ok(namespace)
    }
}

impl Drop for Namespace<'_> {
    fn drop(&mut self) {
        let _ = delete_namespace(self.0, self.1);
    }
}

/// Returns the line of a part.
fn line<'a>(report: &'a Value, part: &str) -> &'a Value {
    let mut lines = report["lines"].as_array().into_iter().flatten();
    let found = lines.find(|line| line["part"] == part);
    found.unwrap_or_else(|| panic!("no {part} in {report}"))
}

#[test]
fn status_says_how_each_part_stands() {
    let said = administrator("status -o json");
    let report = said.json();
    // Other tests make objects that wait at the same time.
    let expected = i32::from(report["verdict"] != "good");
    assert_eq!(said.code, Some(expected), "{said:?}");
    let lines = report["lines"].as_array().unwrap();
    let parts: Vec<_> = lines.iter().map(|line| line["part"].as_str().unwrap()).collect();
    assert_eq!(parts, PARTS_OF_STATUS);
    assert_eq!(report["thuban"], report["plugin"]);
    let droplets = line(&report, "droplets");
    assert_eq!(droplets["level"], "ok", "{report}");
    assert_eq!(droplets["text"], "3 connected", "{report}");
    let operator = line(&report, "operator")["text"].as_str().unwrap();
    assert!(
        operator.contains("leader on node-") && operator.contains("epoch "),
        "{operator}"
    );
    let text = administrator("status").output;
    assert!(
        text.starts_with("Thuban ") && text.contains("  droplets       3 connected\n"),
        "{text}"
    );
    assert!(!text.contains('\x1b'), "{text}");
}

#[test]
fn check_compares_nodes_and_versions() {
    let said = administrator("check -o json");
    let report = said.json();
    assert!(matches!(said.code, Some(0 | 1)), "{said:?}");
    for (part, text) in [
        ("nodes", "3 nodes, 3 droplets"),
        ("droplets", "3 connected"),
        ("other plugins", "none"),
    ] {
        assert_eq!(line(&report, part)["text"], text, "{report}");
    }
    assert_eq!(line(&report, "versions")["level"], "ok", "{report}");
}

#[test]
fn a_tree_and_a_table_show_a_tenants_pods() {
    let pod = tenants().network("red-web")[0];
    let tree = administrator("tree red").output;
    for expected in [
        "VPC red".to_owned(),
        "network red-web".to_owned(),
        "bouncer red-web-b0".to_owned(),
        "divider red-d0".to_owned(),
        format!("pod red/{}  {}  on {}", pod.name, pod.address, pod.node),
    ] {
        assert!(tree.contains(&expected), "{expected}: {tree}");
    }
    assert!(!tree.contains("VPC blue"), "{tree}");
    let listing = administrator("endpoints -n red -o json").json();
    let endpoints = listing["endpoints"].as_array().unwrap();
    let endpoint = endpoints
        .iter()
        .find(|endpoint| endpoint["pod"] == pod.name.as_str());
    let endpoint = endpoint.unwrap();
    assert_eq!(endpoint["addresses"][0], pod.address.to_string());
    assert_eq!(endpoint["node"], pod.node.as_str());
    assert_eq!(endpoint["state"], "Provisioned");
    let missing = administrator("tree no-such-vpc");
    assert_eq!(missing.code, Some(2));
    assert!(missing.error.contains("no VPC no-such-vpc"), "{missing:?}");
}

#[test]
fn an_endpoint_without_a_network_is_found_and_explained() {
    let cluster = &tenants().cluster;
    let namespace = Namespace::new(cluster, "cli-lost").unwrap();
    let empty = administrator("status --wait=5 -n cli-lost -o json").json();
    assert_eq!(line(&empty, "endpoints")["level"], "ok", "{empty}");
    apply(
        cluster,
        &[netexec_manifest("cli-lost", "lost", NODE, Some("nowhere"))],
    )
    .unwrap();
    cluster
        .wait_for("the reason", Duration::from_secs(30), || {
            let said = administrator("endpoints -n cli-lost");
            Ok(said.code == Some(1) && said.output.contains("NetworkNotFound"))
        })
        .unwrap();
    let said = administrator("status -n cli-lost -o json");
    assert_eq!(said.code, Some(1));
    let report = said.json();
    let problem = &line(&report, "endpoints")["problems"][0];
    assert_eq!(problem["reason"], "NetworkNotFound", "{report}");
    assert!(
        problem["remedy"].as_str().unwrap().contains("create the Network"),
        "{problem}"
    );
    let explained = administrator("explain NetworkNotFound");
    assert_eq!(explained.code, Some(0));
    assert!(explained.output.contains("create the Network"), "{explained:?}");
    drop(namespace);
}

#[test]
fn a_tenant_is_told_what_it_may_not_see() {
    let cluster = &tenants().cluster;
    let _namespace = Namespace::new(cluster, "cli-tenant").unwrap();
    for arguments in [
        &["create", "serviceaccount", "-n", "cli-tenant", "editor"][..],
        &[
            "create",
            "rolebinding",
            "-n",
            "cli-tenant",
            "editor",
            "--clusterrole=edit",
            "--serviceaccount=cli-tenant:editor",
        ],
    ] {
        cluster.kubectl(arguments).unwrap();
    }
    let tenant = Actor::service_account(cluster, "cli-tenant", "editor").unwrap();
    // The API server may learn of the rights a moment later.
    cluster
        .wait_for("the tenant's rights", Duration::from_secs(20), || {
            Ok(plugin(&tenant.kubeconfig, "endpoints -n cli-tenant")?.code == Some(0))
        })
        .unwrap();
    let status = plugin(&tenant.kubeconfig, "status -n cli-tenant").unwrap();
    assert_eq!(status.code, Some(2), "{status:?}");
    let lines: Vec<&str> = status.output.lines().collect();
    let unseen = lines.iter().filter(|line| line.starts_with("----  "));
    assert_eq!(unseen.count(), 5, "{status:?}");
    assert!(
        status.output.contains("you may not list droplets.thuban.dev"),
        "{status:?}"
    );
    let own = "0 Provisioned, 0 wait in namespace cli-tenant";
    assert!(status.output.contains(own), "{status:?}");
    let tree = plugin(&tenant.kubeconfig, "tree -n cli-tenant").unwrap();
    assert_eq!(tree.code, Some(2));
    assert!(
        tree.output.contains("you may not list vpcs.thuban.dev"),
        "{tree:?}"
    );
    let other = plugin(&tenant.kubeconfig, "endpoints -n blue").unwrap();
    assert_eq!(other.code, Some(2));
    assert!(
        other.output.contains("you may not list endpoints.thuban.dev"),
        "{other:?}"
    );
    // The same for an administrator in the tenant's name.
    let said = administrator("status -n cli-tenant --as system:serviceaccount:cli-tenant:editor");
    assert_eq!(said.output, status.output);
}

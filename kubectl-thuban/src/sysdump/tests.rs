//! What is collected of a played cluster.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::archive::{Archive, Index};
use super::{Collector, create};
use crate::fetch::Cluster;
use crate::kubectl::Kubectl;
use crate::testing::{list_of, now, refusal, server, unpack};

const SECRET: &str = "hunter2";
const ROWS: &str = r#"case "$*" in
    *"transitd rows") echo '{"table": "ENDPOINTS"}' ;;
    *"inet thuban-policy") echo "No such file" >&2; exit 1 ;;
    *) echo "of $*" ;;
esac"#;

fn pod(name: &str, node: &str, label: &str) -> Value {
    json!({"metadata": {"name": name, "labels": {"app.kubernetes.io/name": label}},
        "spec": {"nodeName": node, "containers": [
            {"name": label, "env": [{"name": "PASSWORD", "value": SECRET}]}]},
        "status": {"containerStatuses": [{"name": label, "image": "", "imageID": "", "ready": true,
            "restartCount": 1}]}})
}

/// Answers as an API server does to an administrator.
fn administrator(path: &str) -> (u16, String) {
    match path {
        "/api/v1/namespaces/thuban-system/pods" => list_of(&json!([
            pod("transitd-a", "node-a", "transitd"),
            pod("transitd-b", "node-b", "transitd"),
            pod("operator-1", "node-b", "thuban-operator"),
        ])),
        "/api/v1/pods" | "/api/v1/namespaces/red/pods" => list_of(&json!([pod("web-0", "node-a", "web")])),
        "/apis/thuban.dev/v1alpha1/vips" => refusal(404, "page not found"),
        path if path.ends_with("/log") => (200, "a line of a log\n".to_owned()),
        path if path.ends_with("/thuban-operator") => refusal(404, "not found"),
        _ => list_of(&json!([])),
    }
}

/// Answers as an API server does to a tenant.
fn tenant(path: &str) -> (u16, String) {
    if path.contains("/namespaces/red/") {
        administrator(path)
    } else {
        refusal(403, "the tenant may not do that")
    }
}

async fn collected(
    answer: fn(&str) -> (u16, String),
    named: Option<&str>,
    nodes: &[&str],
    kubectl: Kubectl,
) -> (BTreeMap<String, String>, Index) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let cluster = Cluster::played(server(answer, &asked), named);
    let mut collector = Collector {
        cluster: &cluster,
        kubectl: &kubectl,
        archive: Archive::new(Vec::new(), "dump", 1),
    };
    let nodes: Vec<String> = nodes.iter().map(|node| (*node).to_owned()).collect();
    collector.collect(&nodes, now()).await.unwrap();
    let (packed, index) = collector.finish(now()).unwrap();
    for path in asked.lock().unwrap().iter() {
        let has_secrets = path.contains("secrets") || path.contains("configmaps");
        assert!(!has_secrets, "{path}");
    }
    (unpack(&packed), index)
}

#[tokio::test]
async fn objects_logs_and_tables_are_collected_without_secrets() {
    let (files, index) = collected(administrator, None, &["node-a"], Kubectl::played(ROWS)).await;
    for (path, text) in &files {
        assert!(!text.contains(SECRET), "{path}: {text}");
    }
    assert!(files["dump/objects/pods.jsonl"].contains("web-0"));
    assert!(files.contains_key("dump/status.json") && files.contains_key("dump/check.json"));
    assert_eq!(
        files["dump/logs/operator-1/thuban-operator.log"],
        "a line of a log\n"
    );
    assert!(files.contains_key("dump/logs/transitd-a/transitd.previous.log"));
    assert_eq!(
        files["dump/nodes/node-a/rows.jsonl"],
        "{\"table\": \"ENDPOINTS\"}\n"
    );
    let nft = &files["dump/nodes/node-a/nft-thuban.txt"];
    assert!(
        nft.ends_with("transitd-a -c transitd -- nft list table inet thuban\n"),
        "{nft}"
    );
    assert!(
        !files
            .keys()
            .any(|path| path.contains("transitd-b") || path.contains("node-b"))
    );
    let text = &files["dump/index.txt"];
    for line in [
        "of all namespaces.\n",
        "  vips.thuban.dev: the API server does not have it\n",
        "  1 other nodes: name nodes by --node\n",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let policy = index
        .left_out
        .iter()
        .find(|left| left.what.ends_with("nft-policy.txt"));
    assert!(policy.unwrap().why.ends_with("No such file"), "{index:?}");
}

#[tokio::test]
async fn a_tenant_gets_what_its_rights_show_and_is_told_the_rest() {
    for named in [Some("red"), None] {
        let (files, index) = collected(tenant, named, &[], Kubectl::played("exit 9")).await;
        assert!(files["dump/objects/pods.jsonl"].contains("web-0"), "{named:?}");
        assert!(
            !files
                .keys()
                .any(|path| path.contains("/logs/") || path.contains("/nodes/"))
        );
        let text = &files["dump/index.txt"];
        for line in [
            "  nodes: the tenant may not do that\n",
            "  leases.coordination.k8s.io in namespace thuban-system: the tenant may not do that\n",
            "  logs and nodes: pods in namespace thuban-system: the tenant may not do that\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        let others = "pods of all namespaces but red";
        let has_others = index.left_out.iter().any(|left| left.what == others);
        assert_eq!(has_others, named.is_none(), "{text}");
    }
}

#[tokio::test]
async fn without_kubectl_the_rest_is_collected() {
    let arguments = ["kubectl-thuban", "--kubectl", "/nonexistent/kubectl", "version"];
    let arguments: crate::arguments::Arguments = clap::Parser::try_parse_from(arguments).unwrap();
    let kubectl = Kubectl::new(&arguments.connection);
    let (files, index) = collected(administrator, None, &[], kubectl).await;
    assert!(files.contains_key("dump/logs/transitd-b/transitd.log"));
    let lines = index
        .left_out
        .iter()
        .filter(|left| left.why.contains("--kubectl"));
    assert_eq!(lines.count(), 1, "{index:?}");
}

#[test]
fn a_file_that_is_there_stays_as_it_is() {
    let name = format!("kubectl-thuban-sysdump-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    create(&path).unwrap();
    let error = create(&path).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists);
    std::fs::remove_file(path).unwrap();
}

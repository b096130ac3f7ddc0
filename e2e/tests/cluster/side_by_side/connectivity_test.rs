//! `kubectl thuban connectivity test`: a healthy cluster passes, a planted fault is found, and nothing is left. Each
//! test has a range of its own: an address is in use once on a node.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;
use thuban_cluster::wait::wait_for;

use super::command_line::{Namespace, administrator, plugin};
use crate::actor::Actor;
use crate::support::{apply, get, lock};
use crate::tenants::tenants;

const NAMESPACE_WAIT: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(100);

/// Returns the findings of a group.
fn group<'a>(report: &'a Value, group: &str) -> Vec<&'a Value> {
    let checks = report["checks"].as_array().into_iter().flatten();
    checks.filter(|check| check["group"] == group).collect()
}

/// Returns the objects of a test that are still there.
fn left(cluster: &Cluster, prefix: &str) -> Result<Vec<String>> {
    let mut left = Vec::new();
    for kind in ["namespaces", "vpcs.thuban.dev", "networks.thuban.dev"] {
        let list = get(cluster, &[kind])?;
        let names = list["items"].as_array().into_iter().flatten();
        let names = names.filter_map(|object| object["metadata"]["name"].as_str());
        left.extend(
            names
                .filter(|name| name.starts_with(prefix))
                .map(|name| format!("{kind} {name}")),
        );
    }
    Ok(left)
}

#[test]
fn a_healthy_cluster_passes_and_keeps_nothing() {
    let cluster = &tenants().cluster;
    // CoreDNS comes and goes while another test has this lock.
    let _red = lock(cluster, "vpc-red").unwrap();
    let said = administrator("connectivity test --namespace-prefix cli-good --cidr 10.213.0.0/22 -o json");
    assert_eq!(said.code, Some(0), "{said:?}");
    let report = said.json();
    assert_eq!(report["verdict"], "good", "{report}");
    for name in ["pairs", "isolation", "services", "egress", "policy"] {
        let own = group(&report, name);
        assert!(own.len() >= 2, "{name}: {report}");
        assert!(own.iter().all(|check| check["state"] == "ok"), "{name}: {report}");
    }
    let far = group(&report, "pairs");
    let is_far = |check: &&&Value| {
        let text = check["check"].as_str();
        text.is_some_and(|text| text.contains("other network, other node"))
    };
    assert_eq!(far.iter().filter(is_far).count(), 4, "two VPCs, TCP and UDP");
    assert_eq!(left(cluster, "cli-good").unwrap(), Vec::<String>::new());
}

#[test]
fn a_policy_that_denies_all_is_found() {
    let cluster = &tenants().cluster;
    let policy = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "deny-all", "namespace": "cli-bad-a"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    });
    let said = std::thread::scope(|scope| {
        let line = "connectivity test --namespace-prefix cli-bad --cidr 10.213.4.0/22";
        let test = scope.spawn(|| administrator(line));
        // The namespace comes first, the pods some seconds later.
        wait_for("the namespace cli-bad-a", NAMESPACE_WAIT, PAUSE, || {
            apply(cluster, std::slice::from_ref(&policy)).map(|()| true)
        })
        .unwrap();
        test.join().unwrap()
    });
    assert_eq!(said.code, Some(1), "{said:?}");
    let failed = |words: &str| {
        let mut lines = said.output.lines();
        lines.any(|line| line.starts_with(" FAIL  pairs ") && line.contains(words))
    };
    assert!(failed("cli-bad-a > web-1 "), "{said:?}");
    // The other VPC is not affected.
    assert!(!failed("cli-bad-b > "), "{said:?}");
    assert!(
        said.output.contains("kubectl thuban why cli-bad-a/web-0"),
        "{said:?}"
    );
    assert_eq!(left(cluster, "cli-bad").unwrap(), Vec::<String>::new());
}

#[test]
fn a_missing_image_is_named_and_the_objects_go() {
    let cluster = &tenants().cluster;
    let line = "connectivity test --namespace-prefix cli-pull --cidr 10.213.8.0/22 --timeout 40 \
                --image localhost:1/no-such-image:1";
    let said = administrator(line);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(
        said.error.contains("not yet: pod cli-pull-a/"),
        "told while it waits: {said:?}"
    );
    let words = ["ErrImagePull", "ImagePullBackOff", "Failed"];
    assert!(
        words.iter().any(|word| said.output.contains(word)),
        "told at the end: {said:?}"
    );
    assert_eq!(left(cluster, "cli-pull").unwrap(), Vec::<String>::new());
}

#[test]
fn a_tenant_is_told_the_rights_and_makes_nothing() {
    let cluster = &tenants().cluster;
    let _namespace = Namespace::new(cluster, "cli-rights").unwrap();
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "cli-nobody", "namespace": "cli-rights"}});
    apply(cluster, &[account]).unwrap();
    let tenant = Actor::service_account(cluster, "cli-rights", "cli-nobody").unwrap();
    let said = plugin(
        &tenant.kubeconfig,
        "connectivity test --namespace-prefix cli-tester",
    )
    .unwrap();
    assert_eq!(said.code, Some(2), "{said:?}");
    for right in ["create namespaces", "delete vpcs.thuban.dev", "get pods/log"] {
        assert!(said.error.contains(right), "{right}: {said:?}");
    }
    assert_eq!(left(cluster, "cli-tester").unwrap(), Vec::<String>::new());
}

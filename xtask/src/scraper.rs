//! What Debian's Prometheus needs to read the metrics of a local cluster: an account with the right, its token, and the
//! certificates that verify the operator. The account goes when this is dropped.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::{Cluster, wait::wait_for};

use crate::install::NAMESPACE;

const ACCOUNT: &str = "observe-metrics";
const ACCOUNT_SPACE: &str = "default";
/// The right of transitd to ask whose a token is. The chart gives it with the page at nodes' addresses.
const REVIEWS: &str = "observe-transitd-metrics";
const TIMEOUT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(500);

pub struct Scraper<'a> {
    cluster: &'a Cluster,
    pub token: String,
    /// The certificates, as PEM.
    pub authorities: String,
}

impl<'a> Scraper<'a> {
    /// Makes the account, and waits until its rights count: a server keeps a refusal for some seconds.
    pub fn make(cluster: &'a Cluster) -> Result<Self> {
        // Whatever fails from here on, the account goes again.
        let mut made = Self {
            cluster,
            token: String::new(),
            authorities: String::new(),
        };
        cluster
            .kubectl_apply(&objects().to_string())
            .context("giving Prometheus the right to read metrics")?;
        let transitd = format!("system:serviceaccount:{NAMESPACE}:transitd");
        let reader = format!("system:serviceaccount:{ACCOUNT_SPACE}:{ACCOUNT}");
        for (user, verb, object) in [
            (&reader, "get", "/metrics"),
            (&transitd, "create", "tokenreviews.authentication.k8s.io"),
        ] {
            let user = format!("--as={user}");
            wait_for("the rights to read metrics", TIMEOUT, POLL, || {
                cluster
                    .kubectl(&["auth", "can-i", verb, object, &user])
                    .map(|_| true)
            })?;
        }
        let token = cluster.kubectl(&["create", "token", "-n", ACCOUNT_SPACE, ACCOUNT])?;
        token.trim().clone_into(&mut made.token);
        wait_for("what verifies the operator", TIMEOUT, POLL, || {
            let path = r"jsonpath={.data.ca\.crt}";
            let name = [
                "get",
                "configmap",
                "-n",
                NAMESPACE,
                "thuban-operator-ca",
                "-o",
                path,
            ];
            made.authorities = cluster.kubectl(&name)?;
            Ok(made.authorities.contains("BEGIN CERTIFICATE"))
        })?;
        Ok(made)
    }
}

impl Drop for Scraper<'_> {
    fn drop(&mut self) {
        // Nobody waits for it, and the cluster may be gone.
        for object in [
            &["serviceaccount", "-n", ACCOUNT_SPACE, ACCOUNT][..],
            &["clusterrolebinding", ACCOUNT, REVIEWS],
        ] {
            let arguments = [&["delete", "--ignore-not-found", "--wait=false"], object].concat();
            let _ = self.cluster.kubectl(&arguments);
        }
    }
}

fn objects() -> Value {
    let account =
        |name: &str, namespace: &str| json!({"kind": "ServiceAccount", "name": name, "namespace": namespace});
    let binding = |name: &str, role: &str, subject: Value| {
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": name}, "subjects": [subject],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}})
    };
    json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": ACCOUNT, "namespace": ACCOUNT_SPACE}},
        binding(ACCOUNT, "thuban-metrics-reader", account(ACCOUNT, ACCOUNT_SPACE)),
        binding(REVIEWS, "system:auth-delegator", account("transitd", NAMESPACE)),
    ]})
}

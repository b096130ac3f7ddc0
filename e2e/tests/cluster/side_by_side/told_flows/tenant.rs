//! What a tenant sees: flows of its own namespace, and nothing of a neighbour in the same VPC.

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use super::{NAMESPACE, NODE, SEEN, VIEWER, ask, installed, of_all, token_of_viewer, with_kubectl};
use crate::actor::Actor;
use crate::side_by_side::command_line::{Said, plugin};
use crate::support::{
    Pod, REACHED, apply, delete, delete_namespace, namespace_manifest, netexec_manifest, network_manifest,
    running, vpc_manifest, wait_provisioned,
};

const VPC: &str = "told";
/// The tenant: namespace and network.
const RED: &str = "told-red";
/// The neighbour, and the name of its pod. Nothing that the tenant may see contains the word, or the range.
const BLUE: &str = "told-blue";
const BLUE_POD: &str = "blue-db";
const WITHHELD: [&str; 2] = ["blue", "10.77.2."];
/// The tenant's ServiceAccount.
const PERSON: &str = "person";
const API: &str = "rbac.authorization.k8s.io";

/// Two namespaces of one VPC, each with a network of its own. They go when this is dropped.
struct Neighbours<'a> {
    cluster: &'a Cluster,
    web: Pod,
    db: Pod,
    blue: Pod,
}

impl<'a> Neighbours<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        // A test that was ended may have left them.
        remove(cluster)?;
        let objects = [
            vpc_manifest(VPC, "10.77.0.0/16", &[RED, BLUE]),
            network_manifest(RED, VPC, "10.77.1.0/24"),
            network_manifest(BLUE, VPC, "10.77.2.0/24"),
            namespace_manifest(RED, Some(RED)),
            namespace_manifest(BLUE, Some(BLUE)),
        ];
        apply(cluster, &objects)?;
        for network in [RED, BLUE] {
            wait_provisioned(cluster, &format!("networks.thuban.dev/{network}"))?;
        }
        let pods = [
            (RED, "web", "node-a"),
            (RED, "db", "node-b"),
            (BLUE, BLUE_POD, "node-b"),
        ];
        let manifests = pods.map(|(space, name, node)| netexec_manifest(space, name, node, None));
        apply(cluster, &[&manifests[..], &rights()[..]].concat())?;
        let [web, db, blue] = pods.map(|(space, name, _)| running(cluster, space, name));
        Ok(Self {
            cluster,
            web: web?,
            db: db?,
            blue: blue?,
        })
    }

    /// Connects the tenant's pods with each other, and with the neighbour's in both directions.
    fn talk(&self) -> Result<()> {
        for (from, to) in [
            (&self.web, &self.db),
            (&self.web, &self.blue),
            (&self.blue, &self.db),
        ] {
            from.tcp(to.address, REACHED)?;
        }
        Ok(())
    }
}

impl Drop for Neighbours<'_> {
    fn drop(&mut self) {
        if let Err(error) = remove(self.cluster) {
            eprintln!("neighbours of VPC {VPC}: {error:#}");
        }
    }
}

fn remove(cluster: &Cluster) -> Result<()> {
    delete(cluster, &["rolebinding", "-n", NAMESPACE, RED])?;
    for namespace in [RED, BLUE] {
        delete_namespace(cluster, namespace)?;
    }
    delete(cluster, &["networks.thuban.dev", RED, BLUE])?;
    delete(cluster, &["vpcs.thuban.dev", VPC])
}

/// Returns what docs/guide/flows.md gives a tenant: an account that may see flows of the namespace, the right to make
/// tokens of it, and the right to connect to thuban-observe.
fn rights() -> Vec<Value> {
    let account = |name: &str| {
        let metadata = json!({"name": name, "namespace": RED});
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    };
    let binding = |namespace: &str, name: &str, kind: &str, role: &str, subject: &str| {
        json!({
            "apiVersion": format!("{API}/v1"), "kind": "RoleBinding",
            "metadata": {"name": name, "namespace": namespace},
            "roleRef": {"apiGroup": API, "kind": kind, "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": subject, "namespace": RED}],
        })
    };
    let makes_tokens = json!({
        "apiVersion": format!("{API}/v1"), "kind": "Role", "metadata": {"name": "tokens", "namespace": RED},
        "rules": [{"apiGroups": [""], "resources": ["serviceaccounts/token"], "resourceNames": [VIEWER],
                   "verbs": ["create"]}],
    });
    vec![
        account(VIEWER),
        account(PERSON),
        makes_tokens,
        binding(RED, "viewer", "ClusterRole", "thuban-flows-view", VIEWER),
        binding(RED, "tokens", "Role", "tokens", PERSON),
        binding(NAMESPACE, RED, "Role", "thuban-observe-connect", PERSON),
    ]
}

/// Whether the plugin could look; a pod may have sent what is dropped.
fn has_looked(said: &Said) -> bool {
    matches!(said.code, Some(0 | 1))
}

/// Asserts that there is no byte of the neighbour.
fn assert_withholds(what: &str, text: &str) {
    for word in WITHHELD {
        assert!(!text.contains(word), "{what} has {word:?}: {text}");
    }
}

/// Asserts that the plugin could not look, and names what the user lacks.
fn assert_refused(said: &Said, namespace: &str) {
    assert_eq!((said.code, said.output.as_str()), (Some(2), ""), "{said:?}");
    let right = format!("serviceaccounts/token of {VIEWER} in namespace {namespace}");
    assert!(said.error.contains(&right), "{said:?}");
}

#[test]
fn a_tenant_sees_its_own_flows_and_no_byte_of_others() {
    let cluster = installed();
    let neighbours = Neighbours::new(cluster).unwrap();
    let person = Actor::service_account(cluster, RED, PERSON).unwrap();
    let run = |line: &str| plugin(&person.kubeconfig, &with_kubectl(cluster, line));
    // Without the neighbour's flows nothing would be shown.
    let peer = format!("&peer={}", neighbours.blue.address);
    cluster
        .wait_for("the neighbour's flows", SEEN, || {
            neighbours.talk()?;
            let told = of_all(cluster, "/v1/flows", &peer)?;
            Ok(WITHHELD.iter().all(|word| told.contains(word)))
        })
        .unwrap();
    cluster
        .wait_for("the tenant's flows", SEEN, || {
            let said = run(&format!("flows -n {RED} -o wide"))?;
            let own = [" told-red/web:", " told-red/db:8080 ", " (withheld) "];
            Ok(has_looked(&said) && own.iter().all(|own| said.output.contains(own)))
        })
        .unwrap();
    for line in [
        "flows",
        "flows -o json --last 10000",
        "flows -o yaml --since 600",
        "flows --vpc told",
        "top pods -o json",
        "top networks",
        "top vpcs",
        "top reasons",
    ] {
        let said = run(&format!("{line} -n {RED}")).unwrap();
        assert!(has_looked(&said), "{line}: {said:?}");
        assert_withholds(line, &said.output);
        assert_withholds(line, &said.error);
    }
    assert_refused(&run(&format!("flows -n {BLUE}")).unwrap(), BLUE);
    assert_refused(&run("flows -A").unwrap(), NAMESPACE);
    assert_refused(&run("top pods -A").unwrap(), NAMESPACE);

    // The page asks the same.
    let token = token_of_viewer(cluster, RED).unwrap();
    let get = |target: &str| ask(cluster, NODE, target, Some(&token), &[]).unwrap();
    for (path, own) in [
        ("/v1/graph", "\"pod:told-red/web\""),
        (
            "/v1/series",
            "thuban_observe_flow_packets_total{vpc=\"told\",network=\"told-red\"}",
        ),
        ("/v1/top?by=pod", "told-red/web"),
        ("/v1/flows", "\"withheld\":true"),
    ] {
        let mark = if path.contains('?') { '&' } else { '?' };
        let answer = get(&format!("{path}{mark}namespace={RED}"));
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        assert!(answer.body.contains(own), "{path}: {answer:?}");
        assert_withholds(path, &answer.body);
        for other in [format!("namespace={BLUE}"), "all=true".to_owned()] {
            let answer = get(&format!("{path}{mark}{other}"));
            assert_eq!(answer.status, 403, "{path}: {answer:?}");
            assert!(answer.body.contains("flows.thuban.dev"), "{path}: {answer:?}");
        }
    }
    // Nor does a filter tell what is withheld.
    let guessed = get(&format!("/v1/flows?namespace={RED}{peer}"));
    assert_eq!((guessed.status, guessed.body.as_str()), (200, ""));
}

//! Every rule of the CRDs: an object that breaks it is refused by the API server, in words that name field and remedy.

mod cases;

use std::collections::BTreeSet;

use serde_json::{Value, json};

use self::cases::{claims, endpoints, networks, path_traces, roles_and_droplets, vpcs};
use crate::actor::Actor;
use crate::support::{apply, delete, get};
use crate::tenants::tenants;

/// Kinds that are there only while load balancers are installed: `load_balancers` breaks their rules.
pub const OF_LOAD_BALANCERS: [&str; 6] = [
    "ippools",
    "ipleases",
    "vips",
    "vipprofiles",
    "bgppeers",
    "dnszones",
];

/// An object that breaks one rule, and the message that the API server must give.
struct Case(Value, &'static str);

fn object(kind: &str, name: &str, spec: Value) -> Value {
    let metadata = json!({"name": name, "namespace": "default"});
    with(
        json!({"apiVersion": "thuban.dev/v1alpha1", "kind": kind, "metadata": metadata}),
        "spec",
        spec,
    )
}

fn with(mut spec: Value, field: &str, value: Value) -> Value {
    spec[field] = value;
    spec
}

/// A question of this test's own, which goes when this is dropped.
struct Asked;

impl Asked {
    fn new() -> Self {
        let metadata = json!({"name": "rule", "namespace": "red"});
        let spec = json!({"source": {"pod": "nobody"}, "target": {"address": "10.0.2.4"}});
        let trace = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "PathTrace", "metadata": metadata,
            "spec": spec});
        apply(&tenants().cluster, &[trace]).unwrap();
        Self
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let _ = delete(
            &tenants().cluster,
            &["pathtraces.thuban.dev", "rule", "-n", "red"],
        );
    }
}

/// Returns the name of the object of a kind that has a value at a field.
fn name_of(kind: &str, field: &str, value: &str) -> String {
    let objects = get(&tenants().cluster, &[kind, "-A"]).unwrap();
    let mut objects = objects["items"].as_array().unwrap().iter();
    let found = objects.find(|object| object.pointer(field).is_some_and(|found| found == value));
    let name = found.and_then(|object| object["metadata"]["name"].as_str());
    name.unwrap_or_else(|| panic!("no {kind} has {value:?} at {field}"))
        .to_owned()
}

/// Returns existing objects, each with a field changed that can't be changed.
fn changes() -> Vec<Case> {
    let cluster = &tenants().cluster;
    let changed = |kind: &str, name: &str, field: &str, value: Value| {
        let mut object = get(cluster, &[kind, name, "-n", "red"]).unwrap();
        object["spec"][field] = value;
        // The operator may write the object meanwhile.
        object["metadata"]
            .as_object_mut()
            .unwrap()
            .remove("resourceVersion");
        object
    };
    // Objects of the tenants' own pods stay: those of other tests may go meanwhile.
    let endpoint = name_of("endpoints.thuban.dev", "/spec/podRef/name", "red-web-node-a");
    let claim = name_of("ipclaims.thuban.dev", "/spec/endpointName", &endpoint);
    let vni = name_of("vniclaims.thuban.dev", "/spec/vpc", "red");
    let web = "red-web-b0";
    vec![
        Case(
            changed("vpcs.thuban.dev", "red", "cidrs", json!(["10.7.0.0/16"])),
            "spec.cidrs may only be appended to: ranges in force (status.cidrs) can not be taken away",
        ),
        Case(
            changed("networks.thuban.dev", "red-web", "cidrs", json!(["10.0.7.0/24"])),
            "spec.cidrs may only be appended to: ranges in force (status.cidrs) can not be taken away",
        ),
        Case(
            changed("networks.thuban.dev", "red-web", "vpc", json!("blue")),
            "spec.vpc is immutable: delete the Network and make it again in the other VPC",
        ),
        Case(
            changed("endpoints.thuban.dev", &endpoint, "network", json!("blue-web")),
            "spec is immutable: delete the Endpoint and make it again",
        ),
        Case(
            changed("dividers.thuban.dev", "red-d0", "vpc", json!("blue")),
            "spec.vpc is immutable: a Divider serves one VPC all its life",
        ),
        Case(
            changed("bouncers.thuban.dev", web, "network", json!("red-db")),
            "spec.network is immutable: a Bouncer serves one network all its life",
        ),
        Case(
            changed("bouncers.thuban.dev", web, "vpc", json!("blue")),
            "spec.vpc is immutable: a Bouncer serves one network all its life",
        ),
        Case(
            changed("ipclaims.thuban.dev", &claim, "ownerUid", json!("mallory")),
            "spec is immutable: a claim is what it was made for, or is deleted",
        ),
        Case(
            changed("vniclaims.thuban.dev", &vni, "vpcUid", json!("mallory")),
            "spec is immutable: a claim is what it was made for, or is deleted",
        ),
        Case(
            changed("pathtraces.thuban.dev", "rule", "port", json!(80)),
            "spec is immutable: make another PathTrace",
        ),
    ]
}

/// Sends one request of kubectl for all objects; kubectl prints a line for each.
fn refusals(verb: &str, cases: &[Case]) -> Vec<String> {
    let admin = Actor::administrator(&tenants().cluster).unwrap();
    let stream: Vec<String> = cases.iter().map(|case| case.0.to_string()).collect();
    let arguments = [verb, "--dry-run=server", "--validate=false", "-f", "-"];
    let error = admin
        .with_input(&arguments, &stream.join("\n---\n"))
        .expect_err("the API server took them all")
        .to_string();
    error.lines().map(str::to_owned).collect()
}

#[test]
fn objects_are_in_init_from_their_creation() {
    let admin = Actor::administrator(&tenants().cluster).unwrap();
    let objects = [
        object("Vpc", "newborn", json!({"cidrs": ["10.59.0.0/16"]})),
        object(
            "Network",
            "newborn",
            json!({"vpc": "newborn", "cidrs": ["10.59.1.0/24"]}),
        ),
        object("Endpoint", "newborn", json!({"network": "newborn"})),
    ];
    for object in &objects {
        let made = admin.with_input(&["create", "-f", "-", "-o", "json"], &object.to_string());
        let made: Value = serde_json::from_str(&made.unwrap()).unwrap();
        assert_eq!(
            made["status"]["phase"], "Init",
            "nobody has written a status: {made}"
        );
    }
    for kind in ["endpoints", "networks", "vpcs"] {
        let kind = format!("{kind}.thuban.dev");
        delete(&tenants().cluster, &[&kind, "newborn", "-n", "default"]).unwrap();
    }
}

/// `endpoints` alone is the core's kind: `tep` is the name of Thuban's everywhere.
#[test]
fn kubectl_explains_and_lists_kinds_by_short_names() {
    let admin = Actor::administrator(&tenants().cluster).unwrap();
    for (name, kind) in [
        ("vpc", "Vpc"),
        ("net", "Network"),
        ("tep", "Endpoint"),
        ("div", "Divider"),
        ("bnc", "Bouncer"),
        ("drop", "Droplet"),
    ] {
        for field in ["spec", "status"] {
            let told = admin.kubectl(&["explain", &format!("{name}.{field}")]).unwrap();
            assert!(told.contains("thuban.dev") && told.contains(kind), "{told}");
            let is_empty = ["<empty>", "<no description>"]
                .iter()
                .any(|words| told.contains(words));
            assert!(!is_empty, "{told}");
        }
        let listed = admin.kubectl(&["get", name, "-A", "-o", "name"]).unwrap();
        let group = format!("{}.thuban.dev/", kind.to_lowercase());
        assert!(listed.contains(&group), "{listed}");
    }
}

#[test]
fn every_rule_refuses_what_breaks_it_and_says_what_to_do() {
    let _asked = Asked::new();
    let made = [
        vpcs(),
        networks(),
        endpoints(),
        roles_and_droplets(),
        claims(),
        path_traces(),
    ];
    let made: Vec<Case> = made.into_iter().flatten().collect();
    let mut said = String::new();
    for (verb, cases) in [("create", made), ("replace", changes())] {
        let lines = refusals(verb, &cases);
        if lines.len() != cases.len() {
            let is_unsaid = |case: &&Case| !lines.iter().any(|line| line.contains(case.1));
            let unsaid: Vec<_> = cases.iter().filter(is_unsaid).map(|case| case.1).collect();
            panic!(
                "{} of {} objects are refused; nobody says {unsaid:#?}",
                lines.len(),
                cases.len()
            );
        }
        for (Case(object, expected), line) in cases.iter().zip(&lines) {
            assert!(
                line.contains(expected),
                "{object} is refused, but {line:?} does not say {expected:?}"
            );
            // A rule that can't be evaluated gives no proper message.
            assert!(!line.contains("no such"), "{line}");
            said.push_str(line);
        }
    }
    let untested: Vec<String> = rules().into_iter().filter(|rule| !said.contains(rule)).collect();
    assert!(
        untested.is_empty(),
        "rules without an object that breaks them: {untested:#?}"
    );
}

/// Returns the messages of all rules that the API server has for our kinds.
fn rules() -> BTreeSet<String> {
    fn walk(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    if name == "x-kubernetes-validations" {
                        let rules = value.as_array().into_iter().flatten();
                        found.extend(
                            rules
                                .filter_map(|rule| rule["message"].as_str())
                                .map(str::to_owned),
                        );
                    }
                    walk(value, found);
                }
            }
            Value::Array(items) => items.iter().for_each(|item| walk(item, found)),
            _ => {}
        }
    }
    let crds = get(&tenants().cluster, &["customresourcedefinitions"]).unwrap();
    let ours = crds["items"].as_array().into_iter().flatten();
    let ours = ours.filter(|crd| crd["spec"]["group"] == "thuban.dev");
    let is_tested_elsewhere = |crd: &&Value| {
        let name = crd["spec"]["names"]["plural"].as_str();
        name.is_some_and(|name| OF_LOAD_BALANCERS.contains(&name))
    };
    let ours = ours.filter(|crd| !is_tested_elsewhere(crd));
    let mut found = BTreeSet::new();
    ours.for_each(|crd| walk(crd, &mut found));
    assert!(found.len() > 20, "{found:#?}");
    found
}

//! The objects of a plan, as the API server takes them. Pure.

use serde_json::{Value, json};
use thuban_api::{IP_ANNOTATION, NETWORK_ANNOTATION};
use thuban_connectivity::{QUESTIONS, Question};

use super::plan::{CLIENT, GUARDED, PORTS, Plan, SERVICE, Server, Side, TWINS};

/// The label of all objects of a run.
pub const RUN_LABEL: &str = "thuban.dev/connectivity-run";
/// The label of pods that says which of them the Service and the policy select.
const ROLE_LABEL: &str = "thuban.dev/connectivity-role";
/// The port of the Service, and of pods behind it.
pub const SERVICE_PORT: u16 = 80;
pub const POLICY: &str = "guarded";
const PROGRAM: &str = "/bin/thuban-connectivity";
/// The user of the pods, as in the operator's pod: not root, as PodSecurity `restricted` wants it.
const USER: u32 = 65532;

/// Returns the selector of all objects of a run.
pub fn selector(plan: &Plan) -> String {
    format!("{RUN_LABEL}={}", plan.run)
}

/// Returns the namespace of a VPC, in which only `restricted` pods run.
pub fn namespace(plan: &Plan, side: Side) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": {
            "name": plan.namespace(side),
            "labels": {RUN_LABEL: plan.run, "pod-security.kubernetes.io/enforce": "restricted"},
            "annotations": {NETWORK_ANNOTATION: plan.network(side, 0)},
        },
    })
}

pub fn vpc(plan: &Plan, side: Side) -> Value {
    json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Vpc",
        "metadata": {"name": plan.namespace(side), "labels": {RUN_LABEL: plan.run}},
        "spec": {
            "cidrs": [plan.range.to_string()],
            "dividers": plan.roles(),
            "allowedNamespaces": {"matchLabels": {"kubernetes.io/metadata.name": plan.namespace(side)}},
        },
    })
}

/// Returns a network of a VPC, by its place.
pub fn network(plan: &Plan, side: Side, place: usize) -> Value {
    json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Network",
        "metadata": {"name": plan.network(side, place), "labels": {RUN_LABEL: plan.run}},
        "spec": {
            "vpc": plan.namespace(side),
            "cidrs": [plan.network_range(place)],
            "bouncers": plan.roles(),
            "allowedNamespaces": {},
            "allowStaticIPs": true,
        },
    })
}

pub fn service(plan: &Plan, side: Side) -> Value {
    let [port, _] = PORTS;
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": SERVICE, "namespace": plan.namespace(side), "labels": {RUN_LABEL: plan.run}},
        "spec": {
            // The pods have IPv4 addresses alone.
            "ipFamilyPolicy": "SingleStack",
            "ipFamilies": ["IPv4"],
            "selector": {ROLE_LABEL: "twin"},
            "ports": [
                {"name": "tcp", "protocol": "TCP", "port": SERVICE_PORT, "targetPort": port},
                {"name": "udp", "protocol": "UDP", "port": SERVICE_PORT, "targetPort": port},
            ],
        },
    })
}

/// Returns the policy that denies all but the first TCP port of the server `guarded`.
pub fn policy(plan: &Plan, side: Side) -> Value {
    let [port, _] = PORTS;
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": POLICY, "namespace": plan.namespace(side), "labels": {RUN_LABEL: plan.run}},
        "spec": {
            "podSelector": {"matchLabels": {ROLE_LABEL: GUARDED}},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"protocol": "TCP", "port": port}]}],
        },
    })
}

pub fn server(plan: &Plan, server: &Server) -> Value {
    let mut arguments = vec![
        "serve".to_owned(),
        "--name".to_owned(),
        plan.answer(server.side, server.name),
    ];
    for port in PORTS {
        arguments.push("--listen".to_owned());
        arguments.push(format!("0.0.0.0:{port}"));
    }
    let role = if TWINS.contains(&server.name) {
        "twin"
    } else {
        server.name
    };
    let mut pod = pod(plan, server.side, server.name, role, &server.node, &arguments);
    pod["metadata"]["annotations"] = json!({
        NETWORK_ANNOTATION: plan.network(server.side, server.network),
        IP_ANNOTATION: server.address.to_string(),
    });
    pod
}

/// Returns the pod that asks.
pub fn client(plan: &Plan, side: Side, questions: &[Question]) -> Value {
    let node = plan.node(side, false).to_owned();
    let mut pod = pod(plan, side, CLIENT, CLIENT, &node, &["ask".to_owned()]);
    pod["spec"]["containers"][0]["env"] = json!([{"name": QUESTIONS, "value": json!(questions).to_string()}]);
    pod
}

fn pod(plan: &Plan, side: Side, name: &str, role: &str, node: &str, arguments: &[String]) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": plan.namespace(side),
            "labels": {RUN_LABEL: plan.run, ROLE_LABEL: role},
        },
        "spec": {
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchFields": [
                    {"key": "metadata.name", "operator": "In", "values": [node]},
                ]}],
            }}},
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "connectivity",
                "image": plan.image,
                "imagePullPolicy": "IfNotPresent",
                "command": [PROGRAM],
                "args": arguments,
                "resources": {"requests": {"cpu": "1m", "memory": "8Mi"}, "limits": {"cpu": "200m", "memory": "64Mi"}},
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": {"drop": ["ALL"]},
                },
            }],
        },
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Namespace, Pod, Service};
    use k8s_openapi::api::networking::v1::NetworkPolicy;
    use serde_json::Value;
    use thuban_api::{Network, Vpc};
    use thuban_connectivity::{Question, Request};

    use super::RUN_LABEL;
    use crate::connectivity::plan::Side;
    use crate::connectivity::testing::plan;
    use crate::testing::object;

    fn question() -> Question {
        Question {
            id: 3,
            request: Request::Tcp("10.213.0.10:8080".parse().unwrap()),
            patience_ms: 1_000,
        }
    }

    #[test]
    fn all_objects_are_of_the_run_and_of_their_kinds() {
        let plan = plan();
        for side in Side::BOTH {
            let vpc: Vpc = object(super::vpc(&plan, side));
            assert_eq!(vpc.spec.cidrs, ["10.213.0.0/16"]);
            let network: Network = object(super::network(&plan, side, 1));
            assert_eq!(network.spec.cidrs, ["10.213.1.0/24"]);
            assert!(network.spec.allow_static_ips);
            let _: Namespace = object(super::namespace(&plan, side));
            let _: Service = object(super::service(&plan, side));
            let _: NetworkPolicy = object(super::policy(&plan, side));
            let all = [
                super::vpc(&plan, side),
                super::network(&plan, side, 0),
                super::namespace(&plan, side),
                super::service(&plan, side),
                super::policy(&plan, side),
                super::client(&plan, side, &[]),
            ];
            for manifest in all {
                assert_eq!(manifest["metadata"]["labels"][RUN_LABEL], "run-1", "{manifest}");
            }
        }
    }

    /// Asserts what PodSecurity `restricted` asks for.
    fn assert_restricted(manifest: &Value) {
        let pod: Pod = object(manifest.clone());
        let spec = pod.spec.unwrap();
        assert_eq!(spec.automount_service_account_token, Some(false));
        let all = spec.security_context.unwrap();
        assert_eq!(all.run_as_non_root, Some(true));
        assert_eq!(all.seccomp_profile.unwrap().type_, "RuntimeDefault");
        let own = spec.containers[0].security_context.clone().unwrap();
        assert_eq!(own.allow_privilege_escalation, Some(false));
        assert_eq!(own.capabilities.unwrap().drop.unwrap(), ["ALL"]);
    }

    #[test]
    fn pods_are_restricted_and_have_no_token() {
        let plan = plan();
        for server in plan.servers() {
            let manifest = super::server(&plan, &server);
            assert_restricted(&manifest);
            assert_eq!(
                manifest["metadata"]["annotations"]["thuban.dev/ip"],
                server.address.to_string()
            );
        }
        assert_restricted(&super::client(&plan, Side::A, &[question()]));
    }

    #[test]
    fn a_client_gets_its_questions_as_json() {
        let client = super::client(&plan(), Side::B, &[question()]);
        let container = &client["spec"]["containers"][0];
        assert_eq!(container["args"][0], "ask");
        let value = container["env"][0]["value"].as_str().unwrap();
        let read: Vec<Question> = serde_json::from_str(value).unwrap();
        assert_eq!(read, [question()]);
        assert_eq!(client["metadata"]["namespace"], "test-b");
    }
}

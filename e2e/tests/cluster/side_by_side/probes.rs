//! Kubelet's probes of pods whose addresses another VPC has too: passing ones pass, failing ones fail.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{apply, delete, get, is_ready};
use crate::tenants::tenants;

fn pod(namespace: &str, name: &str, node: &str, arguments: &[&str], probes: &Value) -> Value {
    let mut container = json!({
        "name": "c", "image": "registry.k8s.io/e2e-test-images/agnhost:2.63.0", "args": arguments,
    });
    for (key, value) in probes.as_object().unwrap() {
        container[key] = value.clone();
    }
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace},
        "spec": {"nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 0, "containers": [container]},
    })
}

fn every_second(probe: Value) -> Value {
    let mut probe = probe;
    probe["periodSeconds"] = 1.into();
    probe["failureThreshold"] = 2.into();
    probe
}

/// The kind of a probe, the arguments of its server, and the probe.
type Case<'a> = (&'a str, &'a [&'a str], Value);

/// The probes of a pod that must pass.
fn patient_probes(probe: &Value) -> Value {
    // A busy machine may be slow to start them, and then to answer; a probe that can't work fails ten times too.
    let mut patient = probe.clone();
    patient["failureThreshold"] = 10.into();
    patient["timeoutSeconds"] = 5.into();
    let mut startup = patient.clone();
    startup["failureThreshold"] = 80.into();
    json!({"startupProbe": startup, "readinessProbe": patient, "livenessProbe": patient})
}

/// One pod for each probe that passes. Two for each that fails: one is not ready, one is restarted.
fn manifests_of(vpc: &str, node: &str, passing: &[Case<'_>], failing: &[Case<'_>]) -> Vec<Value> {
    let mut manifests = Vec::new();
    for (kind, arguments, probe) in passing {
        manifests.push(pod(
            vpc,
            &format!("pass-{kind}"),
            node,
            arguments,
            &patient_probes(probe),
        ));
    }
    for (kind, arguments, probe) in failing {
        manifests.push(pod(
            vpc,
            &format!("unready-{kind}"),
            node,
            arguments,
            &json!({"readinessProbe": probe}),
        ));
        manifests.push(pod(
            vpc,
            &format!("dying-{kind}"),
            node,
            arguments,
            &json!({"livenessProbe": probe}),
        ));
    }
    manifests
}

#[test]
fn all_probe_kinds_pass_and_fail_correctly_in_both_vpcs() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let node = &cluster.nodes().unwrap()[1];
    let netexec = ["netexec", "--http-port=8080", "--udp-port=8080"];
    let grpc = ["grpc-health-checking", "--port", "5000", "--http-port", "8080"];
    let http = |port: u16| every_second(json!({"httpGet": {"path": "/hostname", "port": port}}));
    let tcp = |port: u16| every_second(json!({"tcpSocket": {"port": port}}));
    let exec = |command: &[&str]| every_second(json!({"exec": {"command": command}, "timeoutSeconds": 5}));
    let rpc = |port: u16| every_second(json!({"grpc": {"port": port}}));
    let passing = [
        ("http", &netexec[..], http(8080)),
        ("tcp", &netexec, tcp(8080)),
        ("grpc", &grpc, rpc(5000)),
        ("exec", &netexec, exec(&["/agnhost", "--help"])),
    ];
    let failing = [
        ("http", &netexec[..], http(8081)),
        ("tcp", &netexec, tcp(8081)),
        ("grpc", &grpc, rpc(5001)),
        ("exec", &netexec, exec(&["/agnhost", "no-such-command"])),
    ];
    let manifests: Vec<Value> = ["red", "blue"]
        .into_iter()
        .flat_map(|vpc| manifests_of(vpc, node, &passing, &failing))
        .collect();
    apply(cluster, &manifests).unwrap();
    let status = |vpc: &str, name: &str| get(cluster, &["pod", "-n", vpc, name]);
    let restarts = |pod: &Value| {
        pod["status"]["containerStatuses"][0]["restartCount"]
            .as_u64()
            .unwrap_or(0)
    };
    for vpc in ["red", "blue"] {
        for (kind, ..) in &passing {
            let name = format!("pass-{kind}");
            cluster
                .wait_for(&format!("{vpc}/{name} ready"), Duration::from_secs(90), || {
                    Ok(is_ready(&status(vpc, &name)?))
                })
                .unwrap();
        }
        for (kind, ..) in &failing {
            let name = format!("dying-{kind}");
            cluster
                .wait_for(
                    &format!("{vpc}/{name} restarted"),
                    Duration::from_secs(90),
                    || Ok(restarts(&status(vpc, &name)?) > 0),
                )
                .unwrap();
        }
    }
    for vpc in ["red", "blue"] {
        for (kind, ..) in &passing {
            assert_eq!(
                restarts(&status(vpc, &format!("pass-{kind}")).unwrap()),
                0,
                "{vpc} pass-{kind} was restarted"
            );
        }
        for (kind, ..) in &failing {
            let pod = status(vpc, &format!("unready-{kind}")).unwrap();
            assert!(
                pod["status"]["phase"] == "Running" && !is_ready(&pod),
                "{vpc} unready-{kind} is ready"
            );
        }
        delete(
            cluster,
            &["pod", "-n", vpc, "--force", "--grace-period=0"]
                .iter()
                .copied()
                .chain(
                    manifests
                        .iter()
                        .filter(|pod| pod["metadata"]["namespace"] == vpc)
                        .map(|pod| pod["metadata"]["name"].as_str().unwrap()),
                )
                .collect::<Vec<_>>(),
        )
        .unwrap();
    }
}

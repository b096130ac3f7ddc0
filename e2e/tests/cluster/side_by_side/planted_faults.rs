//! Faults are planted into a path that works, and `kubectl thuban why` names each within five seconds. The book has a
//! table of them: `docs/guide/cli.md`.

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use super::command_line::administrator;
use crate::path_questions::{Expected, SEEN, WORKS, has_hop, named, named_by_probe, wait_answer};
use crate::support::{PORT, Pod, apply, netexec_manifest, patch_vpc, running};
use crate::tenant::Tenant;
use crate::tenants::tenants;

/// The name of the VPC, its network and its namespace.
const NAME: &str = "planted";
/// The nodes of the pods `client` and `server`.
const CLIENT_NODE: &str = "node-a";
const SERVER_NODE: &str = "node-b";
/// A port of the server at which nothing listens, and one from which a rule in the pod drops all packets.
const CLOSED_PORT: u16 = 8081;
const SILENT_PORT: u16 = 8082;
/// An address in no range of any VPC.
const OUTSIDE: &str = "198.51.100.77";
/// A Service that VPCs reach by default.
const SHARED: &str = "svc/default/kubernetes";
const SHARED_NAME: &str = "default/kubernetes";
/// The time between two probes. Droplets that the packet does not pass look out for it for up to 4 s, and a namespace
/// has two probes at a time.
const PROBE_PAUSE: Duration = Duration::from_secs(2);

/// The VPC's pods. Two run; others have faults.
struct Scene<'a> {
    cluster: &'a Cluster,
    client: Pod,
    server: Pod,
}

impl<'a> Scene<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let pod = |name: &str, node: &str, network: Option<&str>| {
            let mut pod = netexec_manifest(NAME, name, node, network);
            pod["metadata"]["labels"] = json!({"role": name});
            pod
        };
        let mut on_host = pod("on-host", CLIENT_NODE, None);
        on_host["spec"]["hostNetwork"] = json!(true);
        on_host["spec"]["containers"][0]["args"] = json!(["pause"]);
        let pods = [
            pod("client", CLIENT_NODE, None),
            pod("server", SERVER_NODE, None),
            on_host,
            pod("unbound", "no-such-node", None),
            pod("refused", CLIENT_NODE, Some("nowhere")),
        ];
        apply(cluster, &pods)?;
        Ok(Self {
            cluster,
            client: running(cluster, NAME, "client")?,
            server: running(cluster, NAME, "server")?,
        })
    }

    /// Asks what keeps packets of the client from a target. The fault was planted just now.
    fn is_named(target: &str, expected: &Expected<'_>) {
        let line = format!("why {NAME}/client {target} -o json");
        named(expected, &|| administrator(&line)).unwrap();
    }

    /// Makes a Service at port 80 of the pods with a role, and asks about it. `asked` may have a port.
    fn service_is_named(&self, asked: &str, (role, policy): (&str, &str), expected: &Expected<'_>) {
        let (service, _) = asked.split_once(':').unwrap_or((asked, ""));
        let manifest = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": service, "namespace": NAME},
            "spec": {"selector": {"role": role}, "internalTrafficPolicy": policy,
                "ports": [{"port": 80, "targetPort": PORT}]},
        });
        apply(self.cluster, &[manifest]).unwrap();
        Self::is_named(&format!("svc/{asked}"), expected);
    }

    /// Makes a NetworkPolicy that selects a pod and accepts nothing in a direction.
    fn deny(&self, policy: &str, pod: &str, direction: &str) {
        let manifest = json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": policy, "namespace": NAME},
            "spec": {"podSelector": {"matchLabels": {"role": pod}}, "policyTypes": [direction]},
        });
        apply(self.cluster, &[manifest]).unwrap();
    }
}

/// Asks with probes from the client, one after the other.
#[derive(Default)]
struct Prober {
    /// When the last question was asked.
    last: Cell<Option<Instant>>,
}

impl Prober {
    /// Asks about a target until the answer is as expected, and returns the answer.
    fn ask(&self, target: &str, expected: &Expected<'_>) -> Value {
        let line = format!("why {NAME}/client {target} --probe -o json");
        let ask = || {
            let since = self.last.get().map(|last| last.elapsed());
            if let Some(left) = since.and_then(|since| PROBE_PAUSE.checked_sub(since)) {
                thread::sleep(left);
            }
            self.last.set(Some(Instant::now()));
            administrator(&line)
        };
        named_by_probe(expected, &ask).unwrap()
    }

    fn ask_server(&self, port: u16, expected: &Expected<'_>) -> Value {
        self.ask(&format!("server:{port}"), expected)
    }
}

#[test]
fn each_planted_fault_is_named_within_five_seconds() {
    let cluster = &tenants().cluster;
    let tenant = Tenant::new(cluster, NAME, &["10.93.0.0/16"], &["10.93.1.0/24"]).unwrap();
    let scene = Scene::new(cluster).unwrap();
    let line = format!("why {NAME}/client server:{PORT} -o json");
    wait_answer(&WORKS, SEEN, &|| administrator(&line)).unwrap();
    thread::scope(|scope| {
        // Probes mostly wait for packets. The other faults are found before anybody looks at the server's policies.
        scope.spawn(|| {
            let prober = Prober::default();
            faults_in_pods(&scene, &prober);
            denying_policies(&scene, &prober);
        });
        faults_of_targets();
        faults_of_services(&scene);
        closed_ways_out(&scene);
    });
    probes_of_known_faults();
    tenant.remove().unwrap();
}

/// Returns targets without a place in the client's VPC. `other`: a pod of another VPC.
fn lost_targets(other: &str) -> [(&str, Expected<'_>); 7] {
    [
        ("no-such-pod", Expected::no("PodNotFound", "no-such-pod")),
        ("unbound", Expected::no("PodNotBound", "unbound has no node")),
        ("refused", Expected::no("NetworkNotFound", "nowhere")),
        ("on-host", Expected::unknown("HostNetwork", "on-host")),
        (other, Expected::no("NotInVpc", "in VPC blue")),
        ("10.93.1.250", Expected::no("AddressFree", "10.93.1.250")),
        ("[fd00::1]:80", Expected::no("NoSuchFamily", "fd00::1")),
    ]
}

fn pod_of_blue() -> String {
    format!("blue/{}", tenants().network("blue-db")[1].name)
}

fn faults_of_targets() {
    for (target, expected) in lost_targets(&pod_of_blue()) {
        Scene::is_named(target, &expected);
    }
    Scene::is_named(&format!("{OUTSIDE}:80"), &Expected::no("NoEgress", "VPC planted"));
}

fn faults_of_services(scene: &Scene<'_>) {
    Scene::is_named("svc/none", &Expected::no("ServiceNotFound", "none"));
    // The name of each Service, the role of its pods, and its internalTrafficPolicy.
    for (asked, made, expected) in [
        (
            "web:81",
            ("server", "Cluster"),
            Expected::no("PortNotServed", "80/TCP"),
        ),
        (
            "empty",
            ("nobody", "Cluster"),
            Expected::no("NoBackends", "is ready"),
        ),
        (
            "near",
            ("server", "Local"),
            Expected::no("NoBackends", CLIENT_NODE),
        ),
    ] {
        scene.service_is_named(asked, made, &expected);
    }
    patch_vpc(scene.cluster, NAME, &json!({"sharedServices": []})).unwrap();
    Scene::is_named(SHARED, &Expected::no("ServiceNotReached", SHARED_NAME));
}

fn closed_ways_out(scene: &Scene<'_>) {
    let node = scene.cluster.node_address("node-c").unwrap().to_string();
    patch_vpc(scene.cluster, NAME, &json!({"egress": true})).unwrap();
    Scene::is_named(&format!("{node}:10250"), &Expected::no("RangeClosed", &node));
    let private = json!({"spec": {"egress": false}}).to_string();
    let patch = ["patch", "networks.thuban.dev", NAME, "--type=merge", "-p"];
    scene
        .cluster
        .kubectl(&[&patch[..], &[private.as_str()]].concat())
        .unwrap();
    let expected = Expected::no("NetworkPrivate", "network planted");
    Scene::is_named(&format!("{OUTSIDE}:80"), &expected);
}

/// Faults that only a packet finds.
fn faults_in_pods(scene: &Scene<'_>, prober: &Prober) {
    let is_delivered = |answer: &Value| has_hop(answer, SERVER_NODE, "delivered");
    let works = prober.ask_server(PORT, &WORKS.probed("ok"));
    assert_eq!(
        works["answer"]["message"], "server accepts the connection",
        "{works}"
    );
    assert_eq!(works["hops"][0]["node"], CLIENT_NODE, "{works}");
    assert!(is_delivered(&works), "{works}");

    let refused = Expected::no("ProbeRefused", "").probed("fail");
    let refused = prober.ask_server(CLOSED_PORT, &refused);
    let said = "TCP reset by server: nothing listens on 8081 in the pod";
    assert_eq!(refused["answer"]["message"], said, "{refused}");
    assert!(is_delivered(&refused), "{refused}");

    let rules = format!(
        "add table inet silent; add chain inet silent input {{ type filter hook input priority 0; }}; \
         add rule inet silent input tcp dport {SILENT_PORT} drop"
    );
    scene.server.command(&["nft", &rules]).unwrap();
    let silent = Expected::no("ProbeSilent", "").probed("fail");
    let silent = prober.ask_server(SILENT_PORT, &silent);
    let said = "none within 2 s: server is silent";
    assert_eq!(silent["answer"]["message"], said, "{silent}");
    assert!(is_delivered(&silent), "{silent}");
    // Without a packet nobody finds it.
    let line = format!("why {NAME}/client server:{SILENT_PORT} -o json");
    wait_answer(&WORKS, SEEN, &|| administrator(&line)).unwrap();

    let route = format!("{}/32", scene.server.address);
    let route = |verb: &str| {
        scene
            .client
            .command(&["ip", "route", verb, "unreachable", &route])
    };
    route("add").unwrap();
    let unreachable = Expected::no("ProbeUnreachable", "").probed("fail");
    let unreachable = prober.ask_server(PORT, &unreachable);
    route("del").unwrap();
    // The packet never left the pod.
    assert!(unreachable["hops"].is_null(), "{unreachable}");
}

/// Policies of both ends, each asked about without and with a probe.
fn denying_policies(scene: &Scene<'_>, prober: &Prober) {
    let target = format!("server:{PORT}");
    let is_dropped = |policy: &str, counter: &str| {
        let name = format!("{NAME}/{policy}");
        let expected = Expected::no("PolicyDenies", &name);
        Scene::is_named(&target, &expected);
        let denied = prober.ask(&target, &expected.probed("fail"));
        let verdict = format!("dropped, {counter}");
        assert!(has_hop(&denied, SERVER_NODE, &verdict), "{denied}");
    };
    scene.deny("no-egress", "client", "Egress");
    is_dropped("no-egress", "policy_egress");
    scene.deny("no-ingress", "server", "Ingress");
    // Programs judge by the receiver's policies first, `why` by the sender's.
    let delete = ["delete", "networkpolicy", "-n", NAME, "no-egress"];
    scene.cluster.kubectl(&delete).unwrap();
    is_dropped("no-ingress", "policy_ingress");
}

/// A probe does not hide a fault that is known without one.
fn probes_of_known_faults() {
    let other = pod_of_blue();
    let services = [
        ("svc/none", Expected::no("ServiceNotFound", "none")),
        ("svc/web:81", Expected::no("PortNotServed", "80/TCP")),
        (SHARED, Expected::no("ServiceNotReached", SHARED_NAME)),
    ];
    for (target, expected) in lost_targets(&other).into_iter().chain(services) {
        let line = format!("why {NAME}/client {target} --probe -o json");
        let expected = expected.probed("unknown");
        let answer = named(&expected, &|| administrator(&line)).unwrap();
        assert_eq!(answer["answer"]["reason"], "ProbeNotSent", "{answer}");
    }
    let empty = Expected::no("NoBackends", "is ready").probed("fail");
    let empty = Prober::default().ask("svc/empty", &empty);
    assert_eq!(empty["answer"]["reason"], "ProbeRefused", "{empty}");
}

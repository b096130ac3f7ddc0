//! Vips that users make: by lbaasctl, for a Service that stays as it is, with a Service that lbaasd makes.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::Cluster;
use thuban_cluster::router::Router;

use crate::actor::Actor;
use crate::support::{
    PORT, REACHED, apply, binary, condition, delete, get, http_hostname_at, is_ready, running,
};

use super::SOON;
use super::announcing::{answers, wait_for_next_hops};

/// The Service whose pods answer, and what the test makes of it.
pub struct Backends<'a> {
    pub namespace: &'a str,
    /// The label `app` of the pods.
    pub app: &'a str,
    pub pool: &'a str,
    /// The pods' names.
    pub pods: &'a BTreeSet<String>,
    /// A label of the test's objects.
    pub labels: Value,
}

/// What lbaasctl said and wrote, and its exit code.
struct Said {
    text: String,
    code: Option<i32>,
}

fn lbaasctl(cluster: &Cluster, line: &str) -> Result<Said> {
    let output = Command::new(binary("lbaasctl")?)
        .env("KUBECONFIG", cluster.instance().kubeconfig())
        .args(line.split_whitespace())
        .output()
        .context("lbaasctl")?;
    let text = [output.stdout, output.stderr].concat();
    Ok(Said {
        text: String::from_utf8_lossy(&text).into_owned(),
        code: output.status.code(),
    })
}

/// Runs a command that must succeed and say a word.
fn says(cluster: &Cluster, line: &str, word: &str) -> Result<String> {
    let said = lbaasctl(cluster, line)?;
    assert_eq!(said.code, Some(0), "{line}: {}", said.text);
    assert!(said.text.contains(word), "{line}: {}", said.text);
    Ok(said.text)
}

/// Runs a command that must fail and say a word.
fn refuses(cluster: &Cluster, line: &str, code: i32, word: &str) -> Result<()> {
    let said = lbaasctl(cluster, line)?;
    assert_eq!(said.code, Some(code), "{line}: {}", said.text);
    assert!(said.text.contains(word), "{line}: {}", said.text);
    Ok(())
}

/// Objects that a test makes for these backends.
impl Backends<'_> {
    fn object(&self, api: &str, kind: &str, name: &str, spec: &Value) -> Value {
        json!({"apiVersion": api, "kind": kind, "spec": spec,
            "metadata": {"name": name, "namespace": self.namespace, "labels": self.labels}})
    }

    fn vip(&self, name: &str, spec: &Value) -> Value {
        self.object("thuban.dev/v1alpha1", "Vip", name, spec)
    }

    fn get(&self, cluster: &Cluster, kind: &str, name: &str) -> Result<Value> {
        get(cluster, &[kind, "-n", self.namespace, name])
    }

    fn patch(&self, cluster: &Cluster, service: &str, patch: &Value) -> Result<()> {
        let patch = patch.to_string();
        cluster
            .kubectl(&["patch", "service", "-n", self.namespace, service, "-p", &patch])
            .map(drop)
    }

    /// Waits until a field of the Vip's Service has a value.
    fn wait_for(&self, cluster: &Cluster, pointer: &str, value: &Value) -> Result<()> {
        let mut last = Value::Null;
        cluster
            .wait_for(&format!("{pointer} of the Vip's Service"), SOON, || {
                last = self.get(cluster, "service", "shop")?;
                Ok(last.pointer(pointer) == Some(value))
            })
            .with_context(|| format!("{last:#}"))
    }
}

/// Has a client outside reach a Vip that a user makes, from its making to its end.
pub fn check(cluster: &Cluster, router: &Router, backends: &Backends) -> Result<()> {
    let Backends {
        namespace, app, pool, ..
    } = *backends;
    let port = |name: &str, port: u16| json!({"name": name, "port": port, "targetPort": PORT});
    let web = json!({"selector": {"app": app}, "ports": [port("http", 80), port("more", 81)]});
    let sticky = backends.object(
        "thuban.dev/v1alpha1",
        "VipProfile",
        "sticky",
        &json!({"affinitySeconds": 60}),
    );
    apply(cluster, &[backends.object("v1", "Service", "web", &web), sticky])?;

    let line = format!("{namespace}/shop web 80 tcp sticky --pool {pool}");
    says(cluster, &format!("{line} --wait=60"), "ready 203.0.113.")?;
    says(cluster, &line, "unchanged")?;
    let vip = backends.get(cluster, "vip", "shop")?;
    assert_eq!(condition(&vip, "Ready").context("Ready")?["status"], "True");
    assert_eq!(
        vip["status"]["nodes"],
        json!(vip["status"]["announcedBy"].as_array().map(Vec::len))
    );
    let address: IpAddr = vip["status"]["addresses"][0]
        .as_str()
        .context("an address")?
        .parse()?;
    // It has no NodePort, and every node is a front.
    wait_for_next_hops(cluster, router, address, cluster.nodes()?.len())?;
    let service = backends.get(cluster, "service", "shop")?;
    assert_eq!(
        service["metadata"]["ownerReferences"][0]["uid"],
        vip["metadata"]["uid"]
    );
    let ports = service["spec"]["ports"].as_array().context("ports")?;
    assert_eq!((ports.len(), &ports[0]["port"]), (1, &json!(80)), "{service:#}");
    cluster.wait_for("one backend for the client", SOON, || {
        let stuck = answers(router, SocketAddr::new(address, 80))?;
        Ok(stuck.len() == 1 && stuck.is_subset(backends.pods))
    })?;

    // The Service follows.
    says(cluster, &format!("{namespace}/shop web 81 tcp"), "changed")?;
    backends.wait_for(cluster, "/spec/ports/1/port", &json!(81))?;
    cluster.wait_for("an answer by the second port", SOON, || {
        Ok(answers(router, SocketAddr::new(address, 81)).is_ok())
    })?;
    backends.patch(cluster, "web", &json!({"spec": {"selector": {"app": "other"}}}))?;
    backends.wait_for(cluster, "/spec/selector/app", &json!("other"))?;
    backends.patch(cluster, "web", &json!({"spec": {"selector": {"app": app}}}))?;
    backends.wait_for(cluster, "/spec/selector/app", &json!(app))?;
    let longer = json!({"spec": {"affinitySeconds": 90}}).to_string();
    cluster.kubectl(&[
        "patch",
        "vipprofile",
        "-n",
        namespace,
        "sticky",
        "--type=merge",
        "-p",
        &longer,
    ])?;
    backends.wait_for(
        cluster,
        "/spec/sessionAffinityConfig/clientIP/timeoutSeconds",
        &json!(90),
    )?;
    // Somebody deletes it, or edits it.
    delete(cluster, &["service", "-n", namespace, "shop"])?;
    backends.wait_for(
        cluster,
        "/status/loadBalancer/ingress/0/ip",
        &json!(address.to_string()),
    )?;
    backends.patch(cluster, "shop", &json!({"spec": {"selector": {"app": "other"}}}))?;
    backends.wait_for(cluster, "/spec/selector/app", &json!(app))?;
    cluster.wait_for("an answer of the Service that was made anew", SOON, || {
        Ok(answers(router, SocketAddr::new(address, 80)).is_ok())
    })?;

    follows_checks(cluster, router, backends, SocketAddr::new(address, 80))?;
    refused_by_the_api_server(cluster, backends);
    refusals(cluster, backends)?;
    shown(cluster, backends)?;
    private(cluster, router, backends)?;
    says(cluster, &format!("delete {namespace}/shop --wait=60"), "gone")?;
    cluster.wait_for("the end of the Vip's Service and lease", SOON, || {
        Ok(backends.get(cluster, "service", "shop").is_err()
            && get(cluster, &["iplease", &address.to_string()]).is_err())
    })?;
    assert_eq!(
        backends.get(cluster, "service", "web")?["spec"]["selector"]["app"],
        app
    );
    delete(
        cluster,
        &[
            "service,vipprofile",
            "-n",
            namespace,
            "web",
            "sticky",
            "--ignore-not-found",
        ],
    )
}

/// Has a pod of the VPC reach a Vip from a private pool. No router hears of it.
fn private(cluster: &Cluster, router: &Router, backends: &Backends) -> Result<()> {
    let namespace = backends.namespace;
    let terms = [
        ("class", json!("private")),
        ("vpc", json!(namespace)),
        ("allowedNamespaces", json!({})),
        ("quarantineSeconds", json!(5)),
    ];
    let spec = json!({"service": "web", "pool": "inside", "ports": [{"port": 80}]});
    apply(
        cluster,
        &[
            super::pool("inside", &["198.51.100.64/29"], &terms),
            backends.vip("inside", &spec),
        ],
    )?;
    let mut vip = Value::Null;
    cluster
        .wait_for("a private Vip", SOON, || {
            vip = backends.get(cluster, "vip", "inside")?;
            Ok(is_ready(&vip))
        })
        .with_context(|| format!("{vip:#}"))?;
    assert_eq!(vip["status"]["vpc"], namespace);
    let address: IpAddr = vip["status"]["addresses"][0]
        .as_str()
        .context("an address")?
        .parse()?;
    let client = backends.pods.first().context("a pod")?;
    let client = running(cluster, namespace, client)?;
    let server = SocketAddr::new(address, 80);
    cluster.wait_for("an answer within the VPC", SOON, || {
        Ok(client.inside(|| http_hostname_at(server, REACHED)).is_ok())
    })?;
    let service = backends.get(cluster, "service", "inside")?;
    assert_eq!(service["spec"]["type"], "ClusterIP");
    assert_eq!(service["status"]["loadBalancer"], json!({}));
    assert!(router.next_hops(address)?.is_empty());
    says(
        cluster,
        &format!("delete -n {namespace} inside --wait=60"),
        "gone",
    )?;
    delete(cluster, &["ippool", "inside"])
}

/// Has backends fail the check of the Vip: first all but one, then all.
fn follows_checks(cluster: &Cluster, router: &Router, backends: &Backends, server: SocketAddr) -> Result<()> {
    let namespace = backends.namespace;
    let check = |check: Value| {
        let patch = json!({"spec": {"healthCheck": check}}).to_string();
        cluster.kubectl(&[
            "patch",
            "vip",
            "-n",
            namespace,
            "shop",
            "--type=merge",
            "-p",
            &patch,
        ])
    };
    let wait_for = |reason: &str, failing: usize| {
        let mut last = Value::Null;
        cluster
            .wait_for(reason, SOON, || {
                last = backends.get(cluster, "vip", "shop")?;
                let healthy = condition(&last, "Healthy");
                Ok(
                    last["status"]["failingMembers"].as_u64().unwrap_or_default() == failing as u64
                        && healthy.is_some_and(|healthy| healthy["reason"] == *reason),
                )
            })
            .with_context(|| format!("{last:#}"))
    };
    let serving = backends.pods.first().context("a pod")?;
    let pod = running(cluster, namespace, serving)?;
    // Its backlog takes all checks of the test.
    let listener = pod.inside(|| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 9090))?))?;
    check(json!({"port": 9090, "intervalMs": 1000, "rise": 1, "fall": 1}))?;
    wait_for("MembersFail", backends.pods.len() - 1)?;
    cluster.wait_for("answers of the backend that passes alone", SOON, || {
        Ok(answers(router, server)? == BTreeSet::from([serving.clone()]))
    })?;
    let members = says(cluster, &format!("members {namespace}/shop"), "failing")?;
    assert!(members.contains("the pod refuses the connection"), "{members}");
    drop(listener);
    let unready = "/echo?msg=no&code=503";
    check(json!({"type": "HTTP", "port": PORT, "path": unready, "intervalMs": 1000, "rise": 1, "fall": 1}))?;
    wait_for("AllMembersFail", backends.pods.len())?;
    assert!(answers(router, server).is_ok(), "the last backends stay");
    check(
        json!({"type": "HTTP", "port": PORT, "path": "/hostname", "intervalMs": 1000, "rise": 1, "fall": 1}),
    )?;
    wait_for("Passing", 0)?;
    check(Value::Null)?;
    cluster.wait_for("the end of the check", SOON, || {
        let vip = backends.get(cluster, "vip", "shop")?;
        let service = backends.get(cluster, "service", "shop")?;
        let annotation = &service["metadata"]["annotations"]["thuban.dev/health-check"];
        Ok(condition(&vip, "Healthy").is_none() && annotation.is_null())
    })
}

/// What one Vip can say about itself, the API server refuses.
fn refused_by_the_api_server(cluster: &Cluster, backends: &Backends) {
    let http = |field: &str, value: Value| {
        let mut check = json!({"type": "HTTP", "port": 80, "path": "/"});
        check[field] = value;
        check
    };
    let admin = Actor::administrator(cluster).unwrap();
    let refused = |mode: &str, check: &Value, message: &str| {
        let spec = json!({"service": "web", "mode": mode, "healthCheck": check});
        let vip = backends.vip("checked", &spec);
        admin.is_refused(&vip.to_string(), admin.write("create", &vip, &[]), &[message]);
    };
    for (check, message) in [
        (
            json!({"port": 80, "path": "/"}),
            "spec.healthCheck.path needs the type HTTP",
        ),
        (
            http("path", json!("healthz")),
            "spec.healthCheck.path must be a path such as /healthz",
        ),
        (
            http("path", json!("/a b")),
            "spec.healthCheck.path must be a path such as /healthz",
        ),
        (http("type", json!("UDP")), "spec.healthCheck.type"),
        (http("port", json!(0)), "spec.healthCheck.port"),
        (json!({"type": "TCP"}), "spec.healthCheck.port"),
        (http("intervalMs", json!(999)), "spec.healthCheck.intervalMs"),
        (http("intervalMs", json!(300_001)), "spec.healthCheck.intervalMs"),
        (http("rise", json!(0)), "spec.healthCheck.rise"),
        (http("fall", json!(11)), "spec.healthCheck.fall"),
    ] {
        refused("Dsr", &check, message);
    }
    refused(
        "Node",
        &http("path", json!("/")),
        "spec.healthCheck has no effect in spec.mode Node",
    );
}

/// What lbaasd refuses, and what it may not do.
fn refusals(cluster: &Cluster, backends: &Backends) -> Result<()> {
    let namespace = backends.namespace;
    let cases = [
        ("web", json!({"service": "web"}), "NameTaken"),
        ("chain", json!({"service": "shop"}), "ServiceIsDerived"),
        ("nowhere", json!({"service": "nothing"}), "ServiceNotFound"),
        (
            "port",
            json!({"service": "web", "ports": [{"port": 80, "protocol": "UDP"}]}),
            "PortNotFound",
        ),
        (
            "profile",
            json!({"service": "web", "profiles": ["lost"]}),
            "ProfileNotFound",
        ),
        (
            "family",
            json!({"service": "web", "ipFamilies": ["IPv6"]}),
            "FamilyNotServed",
        ),
    ];
    let vips: Vec<Value> = cases
        .iter()
        .map(|(name, spec, _)| backends.vip(name, spec))
        .collect();
    apply(cluster, &vips)?;
    for (name, _, reason) in &cases {
        cluster.wait_for(reason, SOON, || {
            let vip = backends.get(cluster, "vip", name)?;
            let ready = condition(&vip, "Ready").context("Ready")?["reason"] == *reason;
            Ok(ready && condition(&vip, "Accepted").context("Accepted")?["reason"] == *reason)
        })?;
        assert!(
            *name == "web" || backends.get(cluster, "service", name).is_err(),
            "{name}"
        );
    }
    let web = backends.get(cluster, "service", "web")?;
    assert_eq!(web["metadata"].get("ownerReferences"), None);
    let late = format!("{namespace}/port web 80 udp --wait=1");
    refuses(
        cluster,
        &late,
        1,
        "PortNotFound: Accepted: spec.ports: Service web has no port 80/UDP",
    )?;
    for (name, ..) in cases {
        says(
            cluster,
            &format!("delete -n {namespace} {name} --wait=30"),
            "gone",
        )?;
    }
    cluster.wait_for("the rights of those who edit a namespace", SOON, || {
        let rules = get(cluster, &["clusterrole", "edit"])?["rules"].to_string();
        Ok(rules.contains("vipprofiles"))
    })?;
    let lbaasd = Actor::service_account(cluster, "thuban-system", "thuban-lbaasd")?;
    let answer = lbaasd.write("replace", &web, &[]);
    lbaasd.is_refused("write anybody's Service", answer, &["does not follow from a Vip"]);
    let mut forged = backends.object("v1", "Service", "forged", &json!({"ports": [{"port": 80}]}));
    let answer = lbaasd.write("create", &forged, &[]);
    lbaasd.is_refused(
        "make a Service of its own",
        answer,
        &["does not follow from a Vip"],
    );
    let answer = lbaasd.kubectl(&["delete", "service", "-n", namespace, "web", "--dry-run=server"]);
    lbaasd.is_refused("delete a Service", answer, &["cannot delete"]);
    // People hear of a wrong annotation.
    forged["metadata"]["name"] = json!("wrong");
    forged["metadata"]["annotations"] = json!({"thuban.dev/load-balancer-ips": "nonsense"});
    forged["spec"]["type"] = json!("LoadBalancer");
    forged["spec"]["loadBalancerClass"] = json!("thuban.dev/vip");
    apply(cluster, &[forged])?;
    let events = [
        "events",
        "-n",
        namespace,
        "--field-selector=involvedObject.name=wrong",
    ];
    cluster.wait_for("an event", SOON, || {
        let events = get(cluster, &events)?;
        let mut events = events["items"].as_array().into_iter().flatten();
        Ok(events.any(|event| event["reason"] == "InvalidAnnotation"))
    })?;
    delete(cluster, &["service", "-n", namespace, "wrong"])
}

/// What lbaasctl shows.
fn shown(cluster: &Cluster, backends: &Backends) -> Result<()> {
    let namespace = backends.namespace;
    let list = says(cluster, &format!("list -n {namespace}"), "80/TCP,81/TCP")?;
    assert!(list.contains("Ready") && list.contains(backends.pool), "{list}");
    says(cluster, "list -A", namespace)?;
    let members = says(cluster, &format!("members {namespace}/shop"), "ready")?;
    assert!(backends.pods.iter().all(|pod| members.contains(pod)), "{members}");
    says(cluster, "pools", backends.pool)?;
    let shop = says(cluster, &format!("get {namespace}/shop -o json"), "")?;
    assert_eq!(serde_json::from_str::<Value>(&shop)?["spec"]["service"], "web");
    let other = format!("{namespace}/shop other 80 tcp");
    refuses(cluster, &other, 1, "give the new Vip another name")?;
    let moved = format!("{namespace}/shop web 80 tcp --pool other");
    refuses(cluster, &moved, 1, "spec.pool can't be changed: make another Vip")?;
    let made = format!("delete {namespace}/{}", backends.app);
    refuses(cluster, &made, 1, "delete the Service")?;
    refuses(cluster, "shop web http tcp", 2, "invalid value 'http'")
}

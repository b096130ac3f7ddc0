//! HAProxy ends TLS for a Vip: a client outside sees the certificate that the tenant lets lbaasd read, and the next
//! one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::Cluster;
use thuban_cluster::command::output;
use thuban_cluster::router::Router;

use super::OwnSpeakers;
use crate::side_by_side::load_balancers::{
    Made, SOON, SYSTEM, TENANT, pool_on_link, wait_for_processes, wait_for_reason,
};
use crate::support::{PORT, apply, get, netexec_manifest, running};
use crate::tenants::tenants;

const PATCH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../install/optional/haproxy.yaml");
const NAME: &str = "proxied";
const VIP: [&str; 4] = ["vip", "-n", TENANT, NAME];
/// The name that the certificates are for.
const HOST: &str = "shop.example";
/// The last byte of the first address of the pool, which no node has.
const FIRST: u8 = 216;

/// The files of a certificate, which go when this is dropped.
struct Certificate(PathBuf);

impl Certificate {
    fn new(name: &str) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("thuban-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).context("a folder")?;
        let made = Self(folder);
        output(
            Command::new("openssl")
                .args([
                    "req",
                    "-x509",
                    "-newkey",
                    "ec",
                    "-pkeyopt",
                    "ec_paramgen_curve:P-256",
                ])
                .args(["-nodes", "-days", "2", "-subj", &format!("/CN={HOST}")])
                .args(["-addext", &format!("subjectAltName=DNS:{HOST}")])
                .arg("-keyout")
                .arg(made.key())
                .arg("-out")
                .arg(made.chain()),
        )?;
        Ok(made)
    }

    fn key(&self) -> PathBuf {
        self.0.join("tls.key")
    }

    fn chain(&self) -> PathBuf {
        self.0.join("tls.crt")
    }

    fn secret(&self) -> Result<Value> {
        let text = |path: &Path| fs::read_to_string(path).with_context(|| path.display().to_string());
        Ok(
            json!({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
            "metadata": {"name": NAME, "namespace": TENANT},
            "stringData": {"tls.crt": text(&self.chain())?, "tls.key": text(&self.key())?}}),
        )
    }
}

impl Drop for Certificate {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn objects(node: &str) -> [Value; 4] {
    let labels = json!({"app": NAME, "test": NAME});
    let of = |kind: &str, spec: Value| {
        json!({"apiVersion": "thuban.dev/v1alpha1", "kind": kind, "spec": spec,
            "metadata": {"name": NAME, "namespace": TENANT, "labels": labels}})
    };
    let service = json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "behind", "namespace": TENANT, "labels": labels}, "spec": {
            "selector": {"app": NAME}, "ports": [{"port": 443, "targetPort": PORT}]}});
    let profile = of("VipProfile", json!({"ssl": {"secret": NAME}, "idleSeconds": 60}));
    let vip = of(
        "Vip",
        json!({"service": "behind", "pool": NAME, "profiles": [NAME]}),
    );
    let mut pod = netexec_manifest(TENANT, NAME, node, None);
    pod["metadata"]["labels"] = labels;
    [service, profile, vip, pod]
}

/// Returns the Vip's address.
fn address(cluster: &Cluster) -> Result<String> {
    let vip = get(cluster, &VIP)?;
    let address = vip["status"]["addresses"][0].as_str();
    address.map(str::to_owned).context("an address")
}

/// Has a host on the nodes' link ask, which believes this certificate alone. Returns the name of the pod that answers.
fn ask(router: &Router, address: &str, certificate: &Certificate) -> Result<String> {
    let (chain, place) = (certificate.chain(), format!("{HOST}:443:{address}"));
    router.at_router(move || {
        output(
            Command::new("curl")
                .args(["-sS", "--max-time", "5", "--resolve", &place, "--cacert"])
                .arg(chain)
                .arg(format!("https://{HOST}/hostname")),
        )
    })
}

/// Gives lbaasd the right to read the Secret, as a tenant does.
fn let_read(cluster: &Cluster) -> Result<()> {
    let secret = format!("--resource-name={NAME}");
    let role = [
        "create",
        "role",
        NAME,
        "-n",
        TENANT,
        "--verb=get",
        "--resource=secrets",
    ];
    cluster.kubectl(&[&role[..], &[secret.as_str()]].concat())?;
    let account = format!("--serviceaccount={SYSTEM}:thuban-lbaasd");
    let of_role = format!("--role={NAME}");
    cluster.kubectl(&["create", "rolebinding", NAME, "-n", TENANT, &of_role, &account])?;
    Ok(())
}

#[test]
fn haproxy_ends_tls_by_the_tenants_certificate() -> Result<()> {
    let cluster = &tenants().cluster;
    let _speakers = OwnSpeakers::new(cluster)?;
    let patch = ["patch", "daemonset", "thuban-speaker", "-n", SYSTEM];
    cluster.kubectl(&[&patch[..], &["--patch-file", PATCH]].concat())?;
    let router = Router::start(cluster, None)?;
    let _made = Made {
        cluster,
        label: "test=proxied",
        needed: &[
            &["vipprofile", "-n", TENANT, NAME],
            &["secret", "-n", TENANT, NAME],
            &["rolebinding", "-n", TENANT, NAME],
            &["role", "-n", TENANT, NAME],
            &["ippool", NAME],
        ],
    };
    wait_for_processes(cluster)?;
    let driver = [("driver", json!("Haproxy"))];
    apply(cluster, &[pool_on_link(cluster, NAME, FIRST, &driver)])?;
    let certificate = Certificate::new("first")?;
    let nodes = cluster.nodes()?;
    apply(cluster, &objects(&nodes[0]))?;
    apply(cluster, &[certificate.secret()?])?;
    running(cluster, TENANT, NAME)?;
    wait_for_reason(cluster, &VIP, "CertificateReady", "SecretUnreadable")?;
    let_read(cluster)?;
    wait_for_reason(cluster, &VIP, "Ready", "Ready")?;
    let address = address(cluster)?;
    let service = get(cluster, &["service", "-n", TENANT, NAME])?;
    assert_eq!(service["status"]["loadBalancer"]["ingress"][0]["ipMode"], "Proxy");
    cluster.wait_for("an answer by TLS", SOON, || {
        Ok(ask(&router, &address, &certificate).is_ok_and(|pod| pod.trim() == NAME))
    })?;

    // Another certificate is there within a minute.
    let next = Certificate::new("next")?;
    assert!(ask(&router, &address, &next).is_err(), "not yet");
    apply(cluster, &[next.secret()?])?;
    cluster.wait_for("the next certificate", SOON, || {
        Ok(ask(&router, &address, &next).is_ok_and(|pod| pod.trim() == NAME))
    })?;
    assert!(ask(&router, &address, &certificate).is_err(), "the former one");
    Ok(())
}

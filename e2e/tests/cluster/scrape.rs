//! Metrics and probes of operator and transitd, read as Prometheus and kubelet do.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;
use thuban_cluster::Cluster;
use thuban_proto::OPERATOR_TLS_NAME;

use crate::support::{apply, get};

pub const PORT: u16 = 6083;

pub const TRANSITD_PORT: u16 = 6084;

pub fn http(address: &str, path: &str) -> Result<String> {
    ask(SocketAddr::new(address.parse()?, PORT), path)
}

pub fn ask(address: SocketAddr, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(3))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: thuban\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// A server with a certificate for a name, whatever its address is.
#[derive(Clone, Copy)]
pub struct TlsServer<'a> {
    pub name: &'a str,
    pub address: SocketAddr,
    /// The CA that verifies it, as PEM.
    pub authority: &'a str,
}

impl TlsServer<'_> {
    /// Returns the answer to GET, with its head. `more`: arguments of curl.
    pub fn ask(&self, cluster: &Cluster, target: &str, token: Option<&str>, more: &[&str]) -> Result<String> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let file = format!("ca-{}-{number}.pem", std::process::id());
        let authority = cluster.instance().state().join(file);
        std::fs::write(&authority, self.authority)?;
        let (name, port) = (self.name, self.address.port());
        let mut curl = Command::new("curl");
        curl.args([
            "--silent",
            "--show-error",
            "--include",
            "--http1.1",
            "--max-time",
            "10",
        ])
        .arg("--cacert")
        .arg(&authority)
        .arg("--resolve")
        .arg(format!("{name}:{port}:{}", self.address.ip()))
        .args(more)
        .arg(format!("https://{name}:{port}{target}"));
        if let Some(token) = token {
            curl.arg("--header")
                .arg(format!("Authorization: Bearer {}", token.trim()));
        }
        let output = curl.output().context("starting curl");
        std::fs::remove_file(&authority)?;
        let output = output?;
        if !output.status.success() {
            bail!("curl: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Returns an answer of the operator by TLS, which its CA verifies.
pub fn https(cluster: &Cluster, address: &str, path: &str, token: Option<&str>) -> Result<String> {
    let lease = get(cluster, &["lease", "-n", "thuban-system", "thuban-operator"])?;
    let bundle = lease["metadata"]["annotations"]["thuban.dev/ca-bundle"].as_str();
    let server = TlsServer {
        name: OPERATOR_TLS_NAME,
        address: SocketAddr::new(address.parse()?, PORT),
        authority: bundle.context("the Lease has no bundle")?,
    };
    server.ask(cluster, path, token, &[])
}

/// Returns a token whose owner may read metrics, and nothing else.
pub fn reader(cluster: &Cluster) -> Result<&'static str> {
    const NAME: &str = "metrics-reader";
    static TOKEN: OnceLock<String> = OnceLock::new();
    if let Some(token) = TOKEN.get() {
        return Ok(token);
    }
    apply(
        cluster,
        &[
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NAME, "namespace": "default"}}),
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": NAME},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
                            "name": "thuban-metrics-reader"},
                "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": "default"}],
            }),
        ],
    )?;
    // The operator keeps a refusal for some seconds, so it is not asked before.
    let user = format!("--as=system:serviceaccount:default:{NAME}");
    cluster.wait_for("right to read metrics", Duration::from_secs(30), || {
        Ok(cluster
            .kubectl(&["auth", "can-i", "get", "/metrics", &user])
            .is_ok())
    })?;
    let token = cluster.kubectl(&["create", "token", "-n", "default", NAME])?;
    Ok(TOKEN.get_or_init(|| token.trim().to_owned()))
}

/// Returns the operator's page of metrics.
pub fn page(cluster: &Cluster, address: &str) -> Result<String> {
    https(cluster, address, "/metrics", Some(reader(cluster)?))
}

/// Returns the addresses of the operator's replicas.
pub fn replicas(cluster: &Cluster) -> Vec<String> {
    addresses_of(cluster, "thuban-operator")
}

/// Returns the addresses of the pods of Thuban with this name that run.
pub fn addresses_of(cluster: &Cluster, name: &str) -> Vec<String> {
    let selector = format!("app.kubernetes.io/name={name}");
    let pods = get(cluster, &["pods", "-n", "thuban-system", "-l", &selector]).unwrap();
    let running =
        pods["items"].as_array().unwrap().iter().filter(|pod| {
            pod["status"]["phase"] == "Running" && pod["metadata"]["deletionTimestamp"].is_null()
        });
    running
        .map(|pod| pod["status"]["podIP"].as_str().unwrap().to_owned())
        .collect()
}

/// Asserts that Prometheus' own tool has no objection to names, types and help of the metrics in an answer.
pub fn assert_well_formed(whose: &str, answer: &str) {
    let (_, page) = answer.split_once("\r\n\r\n").unwrap();
    assert!(page.contains("thuban_build_info{version="), "{whose}: {answer}");
    let mut child = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{whose}: {told}");
}

/// Returns series and their values.
pub fn metrics(cluster: &Cluster, address: &str) -> Result<BTreeMap<String, f64>> {
    series(&page(cluster, address)?)
}

/// Returns the metrics of transitd, as scraped on its node.
pub fn of_node(cluster: &Cluster, node: &str) -> Result<BTreeMap<String, f64>> {
    series(&page_of_node(cluster, node)?)
}

/// Returns the answer with these metrics.
pub fn page_of_node(cluster: &Cluster, node: &str) -> Result<String> {
    let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), TRANSITD_PORT);
    cluster.in_node(node, || ask(address, "/metrics"))
}

pub fn series(answer: &str) -> Result<BTreeMap<String, f64>> {
    let (_, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    let lines = body.lines().filter(|line| !line.starts_with('#'));
    Ok(lines
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(series, value)| Some((series.to_owned(), value.parse().ok()?)))
        .collect())
}

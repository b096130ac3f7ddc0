//! A Prometheus: one that runs somewhere, asked by its HTTP interface, and Debian's, started for a local cluster.

use std::{
    collections::BTreeSet,
    fmt::{self, Write as _},
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs},
    path::Path,
    process::{Child, Command, Stdio},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context, Error, Result, ensure};
use serde_json::{Value, json};
use thuban_cluster::{Cluster, wait::wait_for};

use crate::{build::root, scraper::Scraper};

const PORT: u16 = 19_099;
const OPERATOR_PORT: u16 = 6083;
const TRANSITD_PORT: u16 = 6084;
/// The name in the operator's certificate.
const OPERATOR_NAME: &str = "thuban-operator";
/// Files beside the configuration.
const TOKEN: &str = "token";
const AUTHORITIES: &str = "operator-ca.pem";
/// The operator's job, and that of transitd.
const JOBS: usize = 2;
const TIMEOUT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(500);
const ALERTS: &str = "charts/thuban/files/alerts.yaml";
/// How long a rule is true before its alert fires here: people wait minutes, and tests don't.
const FOR: &str = "5s";

/// The address of a Prometheus.
#[derive(Clone, Copy, Debug)]
pub struct Server(SocketAddr);

impl FromStr for Server {
    type Err = Error;

    /// Reads `http://HOST:PORT`.
    fn from_str(text: &str) -> Result<Self> {
        let host = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
        let mut addresses = host
            .to_socket_addrs()
            .with_context(|| format!("{text} is not of the form http://HOST:PORT"))?;
        addresses.next().map(Self).context("the host has no address")
    }
}

impl fmt::Display for Server {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "http://{}", self.0)
    }
}

impl Server {
    /// Returns the series of a query.
    pub fn query(self, query: &str) -> Result<Vec<Value>> {
        let path = format!("/api/v1/query?query={}", encoded(query));
        let data = self
            .get(&path)
            .with_context(|| format!("asking {self} for {query}"))?;
        Ok(data["result"].as_array().cloned().unwrap_or_default())
    }

    /// Returns the names of all metrics that scraped pages describe, those without series included.
    pub fn metrics(self) -> Result<BTreeSet<String>> {
        let data = self
            .get("/api/v1/metadata")
            .with_context(|| format!("asking {self} for metrics"))?;
        Ok(data
            .as_object()
            .into_iter()
            .flatten()
            .map(|(name, _)| name.clone())
            .collect())
    }

    /// Returns the names of the alerts that fire.
    pub fn firing(self) -> Result<BTreeSet<String>> {
        let series = self.query("ALERTS{alertstate=\"firing\"}")?;
        let names = series
            .iter()
            .filter_map(|one| one["metric"]["alertname"].as_str());
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns the field `data` of an answer.
    fn get(self, path: &str) -> Result<Value> {
        let mut stream = TcpStream::connect_timeout(&self.0, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: {}\r\n\r\n", self.0)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (_, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
        let mut body: Value = serde_json::from_str(body).with_context(|| format!("reading {body:?}"))?;
        ensure!(body["status"] == "success", "{}", body["error"]);
        Ok(body["data"].take())
    }
}

fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() {
            encoded.push(byte.into());
        } else {
            // Writing to a String can't fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

/// Debian's Prometheus, which scrapes a local cluster until this is dropped.
pub struct Running {
    child: Child,
    pub server: Server,
}

impl Running {
    /// Starts it with the chart's alerts, which fire after seconds; waits until it answers.
    pub fn start(cluster: &Cluster, scraper: &Scraper<'_>) -> Result<Self> {
        let folder = cluster.instance().state().join("prometheus");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
        };
        let rules = fs::read_to_string(root().join(ALERTS)).with_context(|| format!("reading {ALERTS}"))?;
        write("alerts.yaml", &impatient(&rules))?;
        write(TOKEN, &scraper.token)?;
        write(AUTHORITIES, &scraper.authorities)?;
        write("prometheus.yaml", &configuration(cluster)?.to_string())?;
        let log = fs::File::create(folder.join("log")).context("making Prometheus's log")?;
        let child = Command::new("prometheus")
            .arg(option("config.file", &folder.join("prometheus.yaml")))
            .arg(option("storage.tsdb.path", &folder.join("data")))
            .arg(format!("--web.listen-address=127.0.0.1:{PORT}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("starting prometheus")?;
        let server = Server((Ipv4Addr::LOCALHOST, PORT).into());
        let running = Self { child, server };
        wait_for("Prometheus has scraped the cluster", TIMEOUT * 2, POLL, || {
            let up = server.query("count by (job) (up == 1)")?;
            Ok(up.len() == JOBS && !server.metrics()?.is_empty())
        })
        .with_context(|| format!("see {}", folder.join("log").display()))?;
        Ok(running)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn option(name: &str, path: &Path) -> String {
    format!("--{name}={}", path.display())
}

/// Returns what Prometheus scrapes, and how often. JSON is YAML, too.
fn configuration(cluster: &Cluster) -> Result<Value> {
    let (mut operators, mut droplets) = (Vec::new(), Vec::new());
    for node in cluster.nodes()? {
        let address = cluster.node_address(&node)?;
        operators.push(json!(format!("{address}:{OPERATOR_PORT}")));
        let labels = json!({"node": node});
        droplets.push(json!({"targets": [format!("{address}:{TRANSITD_PORT}")], "labels": labels}));
    }
    Ok(json!({
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": jobs(&operators, &droplets),
    }))
}

/// Returns the jobs as docs/metrics.md has them: by TLS, with a token.
fn jobs(operators: &[Value], droplets: &[Value]) -> [Value; JOBS] {
    [
        // A node without a replica has no such port.
        json!({
            "job_name": "thuban-operator", "scheme": "https", "authorization": {"credentials_file": TOKEN},
            "tls_config": {"ca_file": AUTHORITIES, "server_name": OPERATOR_NAME},
            "static_configs": [{"targets": operators}],
        }),
        json!({
            "job_name": "thuban-transitd", "scheme": "https", "authorization": {"credentials_file": TOKEN},
            // Each transitd makes its certificate itself.
            "tls_config": {"insecure_skip_verify": true},
            "static_configs": droplets,
        }),
    ]
}

/// Returns rules that need to be true for a few seconds only.
fn impatient(rules: &str) -> String {
    let lines = rules.lines().map(|line| match line.split_once("for: ") {
        Some((indent, _)) if indent.trim().is_empty() => format!("{indent}for: {FOR}"),
        _ => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{OPERATOR_NAME, Server, TOKEN, encoded, impatient, jobs};

    #[test]
    fn queries_are_encoded_and_servers_read() {
        assert_eq!(encoded("sum(up{a=\"b\"})"), "sum%28up%7Ba%3D%22b%22%7D%29");
        let server: Server = "http://127.0.0.1:9090/".parse().unwrap();
        assert_eq!(server.to_string(), "http://127.0.0.1:9090");
        assert!("http://127.0.0.1".parse::<Server>().is_err());
    }

    #[test]
    fn guarded_pages_are_scraped_by_tls_and_with_a_token() {
        let [operator, transitd] = jobs(
            &[json!("192.0.2.1:6083")],
            &[json!({"targets": ["192.0.2.1:6084"]})],
        );
        for job in [&operator, &transitd] {
            assert_eq!(job["scheme"], "https");
            assert_eq!(job["authorization"]["credentials_file"], TOKEN);
        }
        assert_eq!(operator["static_configs"][0]["targets"][0], "192.0.2.1:6083");
        assert_eq!(transitd["static_configs"][0]["targets"][0], "192.0.2.1:6084");
        assert!(operator["tls_config"]["insecure_skip_verify"].is_null());
        // The chart's monitor verifies by the same name.
        let monitor = super::root().join("charts/thuban/templates/41-pod-monitor.yaml");
        let monitor = std::fs::read_to_string(monitor).unwrap();
        assert!(monitor.contains(&format!("serverName: {OPERATOR_NAME}\n")));
        assert_eq!(operator["tls_config"]["server_name"], OPERATOR_NAME);
    }

    #[test]
    fn alerts_wait_for_seconds_only() {
        let rules = "- alert: A\n  expr: up == 0\n  for: 10m\n  # It waits for: a while.\n";
        assert_eq!(
            impatient(rules),
            "- alert: A\n  expr: up == 0\n  for: 5s\n  # It waits for: a while."
        );
        let all = std::fs::read_to_string(super::root().join(super::ALERTS)).unwrap();
        let shown = impatient(&all);
        assert_eq!(
            shown.matches("for: 5s").count(),
            all.lines()
                .filter(|line| line.trim().starts_with("for: "))
                .count()
        );
    }
}

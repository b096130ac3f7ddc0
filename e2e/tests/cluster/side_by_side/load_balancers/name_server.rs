//! BIND's named at the router, with a zone that lbaasd may write. Nodes and the client reach it.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::Cluster;
use thuban_cluster::router::Router;

use super::SOON;
use crate::side_by_side::dns::ask;
use crate::support::REACHED;

const PROGRAM: &str = "/usr/sbin/named";
const PORT: u16 = 5300;
/// The TSIG key of lbaasd: its name, and its secret in base64.
const KEY: &str = "lbaasd";
const SECRET: &str = "YSBzZWNyZXQgb2YgdGhpcnR5LXR3byBieXRlcy4uLi4=";
/// The user "nobody".
const NOBODY: u32 = 65534;
const RECORDS: &str = "$TTL 30\n@ IN SOA ns hostmaster 1 3600 600 86400 1\n@ IN NS ns\nns IN A 127.0.0.1\n";

/// The server's files, which go when this is dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Ends when it is dropped. A run that was killed leaves it to the next router, which ends all programs of its
/// namespace.
pub struct NameServer {
    address: SocketAddr,
    zone: &'static str,
    child: Child,
    _folder: Folder,
}

impl NameServer {
    /// Starts the server, and waits until it answers.
    pub fn start(cluster: &Cluster, router: &Router, zone: &'static str) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("thuban-named-{}", std::process::id()));
        fs::create_dir_all(&folder).context("a folder")?;
        let folder = Folder(folder);
        let address = SocketAddr::new(router.address().into(), PORT);
        let settings = configuration(&folder, address, zone);
        for (file, text) in [("records", RECORDS), ("named.conf", settings.as_str())] {
            fs::write(folder.0.join(file), text).context(file)?;
            chown(folder.0.join(file), Some(NOBODY), None).context(file)?;
        }
        chown(&folder.0, Some(NOBODY), None).context("the folder's owner")?;
        let child = Command::new("nsenter")
            .arg(format!("--net={}", router.path().display()))
            .args([PROGRAM, "-f", "-n", "1", "-u", "nobody", "-c"])
            .arg(folder.0.join("named.conf"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("named (package bind9)")?;
        let server = Self {
            address,
            zone,
            child,
            _folder: folder,
        };
        cluster.wait_for("the name server", SOON, || {
            let (code, _) = server.resolve(router, &format!("ns.{zone}"))?;
            Ok(code == 0)
        })?;
        Ok(server)
    }

    /// Returns the DnsZone, and first the Secret that the DnsZone names.
    pub fn objects(&self, name: &str) -> [Value; 2] {
        let secret = json!({"apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": name, "namespace": "thuban-dns"},
            "stringData": {"name": KEY, "algorithm": "hmac-sha256", "secret": SECRET}});
        let zone = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "DnsZone", "metadata": {"name": name}, "spec": {
            "zone": self.zone, "allowedNamespaces": {}, "ttlSeconds": 1,
            "rfc2136": {"server": self.address.to_string(), "secret": name}}});
        [secret, zone]
    }

    /// Has the client behind the router ask for a name's addresses. Returns the response code, too.
    pub fn resolve(&self, router: &Router, name: &str) -> Result<(u8, Vec<Ipv4Addr>)> {
        let server = self.address;
        router.at_client(|| ask(server, name, REACHED))
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn configuration(folder: &Folder, address: SocketAddr, zone: &str) -> String {
    let path = folder.0.display();
    format!(
        "options {{ directory \"{path}\"; pid-file \"{path}/pid\"; session-keyfile \"{path}/session.key\";
        managed-keys-directory \"{path}\"; listen-on port {PORT} {{ {}; }}; listen-on-v6 {{ none; }};
        recursion no; dnssec-validation no; notify no; }};
        controls {{ }};
        key \"{KEY}\" {{ algorithm hmac-sha256; secret \"{SECRET}\"; }};
        zone \"{zone}\" {{ type primary; file \"records\"; allow-update {{ key {KEY}; }}; }};\n",
        address.ip()
    )
}

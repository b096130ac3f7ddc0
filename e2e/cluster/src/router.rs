//! A router outside of a cluster, which speaks BGP with the nodes by FRR, and a client behind it. Both are network
//! namespaces.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::command::run;
use crate::handle::Cluster;
use crate::instance::NODES;
use crate::namespace::inside;
use crate::network::namespace_path;
use crate::wait::wait_for;

/// The router's autonomous system, and that of the nodes.
pub const ASN: u32 = 64_512;
pub const NODES_ASN: u32 = 64_513;
/// The network behind the router: the router's address in it, and the client's.
pub const CLIENTS: &str = "192.0.2.0/24";
pub const INSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// The last byte of the router's address in the underlay.
const LAST: u8 = 250;
/// FRR's programs, in the order of their start.
const DAEMONS: [&str; 3] = ["zebra", "bfdd", "bgpd"];
const FRR: &str = "/usr/lib/frr";
/// zebra's socket.
const ZEBRA: &str = "zserv.api";
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// Stops FRR and removes the namespaces when it is dropped.
pub struct Router {
    cluster: Cluster,
    daemons: Vec<Child>,
    folder: PathBuf,
    /// The password of its BGP sessions.
    password: Option<&'static str>,
    /// The autonomous system of the nodes.
    nodes_asn: u32,
}

impl Router {
    /// Joins a router to a cluster's underlay, and tells the nodes that the clients are behind it. With a password, the
    /// router accepts only sessions that have it.
    pub fn start(cluster: &Cluster, password: Option<&'static str>) -> Result<Self> {
        Self::join(cluster, password, NODES_ASN)
    }

    /// Joins a router of the nodes' own autonomous system, [`ASN`]: nodes speak internal BGP with it.
    pub fn start_internal(cluster: &Cluster) -> Result<Self> {
        Self::join(cluster, None, ASN)
    }

    fn join(cluster: &Cluster, password: Option<&'static str>, nodes_asn: u32) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("thuban-router-{}", cluster.name()));
        let mut router = Self {
            cluster: cluster.clone(),
            daemons: Vec::new(),
            folder,
            password,
            nodes_asn,
        };
        router.remove();
        router.connect().context("the router's links")?;
        router.speak().context("the router's FRR (package frr)")?;
        Ok(router)
    }

    /// Returns the router's address in the underlay.
    pub fn address(&self) -> Ipv4Addr {
        let [first, second, third, _] = self.cluster.gateway().octets();
        Ipv4Addr::new(first, second, third, LAST)
    }

    fn namespace(&self) -> String {
        format!("thuban-{}-router", self.cluster.name())
    }

    /// Returns the file of the client's network namespace.
    pub fn client_path(&self) -> PathBuf {
        namespace_path(&self.client_namespace())
    }

    /// Returns the file of the router's network namespace.
    pub fn path(&self) -> PathBuf {
        namespace_path(&self.namespace())
    }

    /// Has the router send what is for an address by these next hops. It prefers them to those of BGP.
    pub fn route(&self, address: IpAddr, hops: &[Ipv4Addr]) -> Result<()> {
        let (namespace, address) = (self.namespace(), address.to_string());
        let hops: Vec<String> = hops.iter().map(Ipv4Addr::to_string).collect();
        let mut arguments = vec!["-n", &namespace, "route", "replace", &address];
        for hop in &hops {
            arguments.extend(["nexthop", "via", hop]);
        }
        run("ip", &arguments).map(drop)
    }

    fn client_namespace(&self) -> String {
        format!("thuban-{}-client", self.cluster.name())
    }

    /// The router's link on the bridge.
    fn link(&self) -> String {
        format!("th-{}-rt", self.cluster.name())
    }

    fn connect(&self) -> Result<()> {
        let (router, client, link) = (self.namespace(), self.client_namespace(), self.link());
        let address = self.address().to_string();
        // Nodes know a router of before by the same MAC.
        let [a, b, c, d] = self.address().octets();
        let mac = format!("02:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}");
        let ip = |arguments: &str| run("ip", &arguments.split(' ').collect::<Vec<_>>()).map(drop);
        for namespace in [&router, &client] {
            ip(&format!("netns add {namespace}"))?;
            ip(&format!("-n {namespace} link set lo up"))?;
        }
        ip(&format!(
            "link add {link} type veth peer name eth0 address {mac} netns {router}"
        ))?;
        ip(&format!("link set {link} master {} up", self.cluster.bridge()))?;
        ip(&format!("-n {router} addr add {address}/24 dev eth0"))?;
        ip(&format!("-n {router} link set eth0 up"))?;
        ip(&format!(
            "-n {router} link add eth1 type veth peer name eth0 netns {client}"
        ))?;
        ip(&format!("-n {router} addr add {INSIDE}/24 dev eth1"))?;
        ip(&format!("-n {router} link set eth1 up"))?;
        ip(&format!("-n {client} addr add {CLIENT}/24 dev eth0"))?;
        ip(&format!("-n {client} link set eth0 up"))?;
        ip(&format!("-n {client} route add default via {INSIDE}"))?;
        // Flows keep their node by addresses and ports.
        for setting in ["net.ipv4.ip_forward=1", "net.ipv4.fib_multipath_hash_policy=1"] {
            ip(&format!("netns exec {router} sysctl -qw {setting}"))?;
        }
        for node in NODES {
            let route = ["ip", "route", "replace", CLIENTS, "via", &address];
            self.cluster.exec_on_node(node, &route)?;
        }
        Ok(())
    }

    fn speak(&mut self) -> Result<()> {
        fs::create_dir_all(&self.folder)?;
        fs::set_permissions(&self.folder, fs::Permissions::from_mode(0o755))?;
        fs::write(self.folder.join("empty.conf"), "")?;
        fs::write(self.folder.join("bgpd.conf"), self.configuration())?;
        run("chown", &["-R", "frr:frr", &self.folder.display().to_string()])?;
        for daemon in DAEMONS {
            let child = self.daemon(daemon)?.spawn().context(daemon)?;
            self.daemons.push(child);
            // The others look for zebra at their start, and then only after 10 s.
            wait_for("zebra", ANSWER_TIMEOUT, PAUSE, || {
                Ok(self.folder.join(ZEBRA).exists())
            })?;
        }
        Ok(())
    }

    fn daemon(&self, name: &str) -> Result<Command> {
        let log = File::create(self.folder.join(format!("{name}.log")))?;
        let within = |file: &str| self.folder.join(file).display().to_string();
        let configuration = if name == "bgpd" { "bgpd.conf" } else { "empty.conf" };
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.namespace()])
            .arg(Path::new(FRR).join(name))
            .args(["-f", &within(configuration), "-z", &within(ZEBRA)])
            .args(["--vty_socket", &within(""), "-i", &within(&format!("{name}.pid"))])
            .args(["-u", "frr", "-g", "frr", "-P", "0", "--log", "stdout"])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if name == "bfdd" {
            command.args(["--bfdctl", &within("bfdd.sock")]);
        }
        Ok(command)
    }

    fn configuration(&self) -> String {
        let [first, second, third, _] = self.cluster.gateway().octets();
        let families = ["ipv4", "ipv6"].map(|family| {
            format!(
                " address-family {family} unicast\n  neighbor NODES activate\n  maximum-paths 16\n  \
                 maximum-paths ibgp 16\n exit-address-family\n"
            )
        });
        let password = self
            .password
            .map(|password| format!(" neighbor NODES password {password}\n"))
            .unwrap_or_default();
        format!(
            "frr defaults datacenter\nrouter bgp {ASN}\n bgp router-id {}\n no bgp ebgp-requires-policy\n \
             no bgp default ipv4-unicast\n neighbor NODES peer-group\n neighbor NODES remote-as {}\n \
             neighbor NODES timers 1 3\n neighbor NODES bfd\n{password} \
             bgp listen range {first}.{second}.{third}.0/24 peer-group NODES\n{}",
            self.address(),
            self.nodes_asn,
            families.concat()
        )
    }

    /// Returns the next hops of the router's route to an address, as the kernel has it.
    pub fn next_hops(&self, address: IpAddr) -> Result<Vec<String>> {
        let namespace = self.namespace();
        let family = if address.is_ipv4() { "-4" } else { "-6" };
        let prefix = format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 });
        let arguments = ["-n", &namespace, family, "route", "show", "proto", "bgp", &prefix];
        let text = run("ip", &arguments)?;
        let words: Vec<&str> = text.split_whitespace().collect();
        let vias = words.windows(2).filter(|pair| pair[0] == "via");
        let mut hops: Vec<String> = vias.map(|pair| pair[1].to_owned()).collect();
        hops.sort();
        Ok(hops)
    }

    /// Returns how many nodes the router sees alive by BFD.
    pub fn bfd_sessions(&self) -> Result<usize> {
        let folder = self.folder.display().to_string();
        let socket = ["--vty_socket", &folder, "-d", "bfdd"];
        let text = run("vtysh", &[&socket[..], &["-c", "show bfd peers json"]].concat())?;
        sessions_up(&text).with_context(|| format!("no list of BFD's sessions: {text}"))
    }

    /// Runs `work` on a thread of its own at the client.
    pub fn at_client<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let namespace = File::open(self.client_path()).context("the client's namespace")?;
        inside(namespace, work)
    }

    /// Runs `work` on a thread of its own at the router.
    pub fn at_router<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let namespace = File::open(self.path()).context("the router's namespace")?;
        inside(namespace, work)
    }

    /// Returns what the router's programs said.
    pub fn log(&self) -> String {
        let read =
            |name: &&str| fs::read_to_string(self.folder.join(format!("{name}.log"))).unwrap_or_default();
        DAEMONS.iter().map(read).collect()
    }

    fn remove(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        self.daemons.clear();
        for namespace in [self.namespace(), self.client_namespace()] {
            if namespace_path(&namespace).exists() {
                // A run that was killed leaves its programs behind, and with them the namespace.
                let processes = run("ip", &["netns", "pids", &namespace]).unwrap_or_default();
                for process in processes.split_whitespace().flat_map(str::parse) {
                    let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
                }
                let _ = run("ip", &["netns", "del", &namespace]);
            }
        }
        let _ = run("ip", &["link", "del", &self.link()]);
        for node in NODES {
            let _ = self.cluster.exec_on_node(node, &["ip", "route", "del", CLIENTS]);
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Returns how many of the BFD sessions are up that bfdd lists. vtysh may say something before the list.
fn sessions_up(text: &str) -> Option<usize> {
    let list = text.get(text.find('[')?..)?;
    let sessions: Vec<serde_json::Value> = serde_json::from_str(list).ok()?;
    let up = sessions.iter().filter(|session| session["status"] == "up");
    Some(up.count())
}

#[cfg(test)]
mod tests {
    use super::sessions_up;

    #[test]
    fn only_bfd_sessions_that_are_up_count() {
        let list = r#"[{"peer": "10.0.0.2", "status": "up"}, {"peer": "10.0.0.3", "status": "down"}]"#;
        assert_eq!(sessions_up(list), Some(1));
        assert_eq!(sessions_up(&format!("% no vtysh.conf\n{list}\n")), Some(1));
        assert_eq!(sessions_up("[]\n"), Some(0));
        assert_eq!(sessions_up("bfdd is not running\n"), None);
    }
}

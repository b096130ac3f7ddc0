//! Cluster DNS: CoreDNS as users run it, and each VPC's own view of it.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use thuban_cluster::Cluster;
use thuban_cluster::wait::uninterrupted;

use crate::support::{NOT_REACHED, PORT, Pod, apply, delete, get, lock, netexec_manifest, running};
use crate::tenants::{SELECTOR, tenants};

const SOON: Duration = Duration::from_secs(30);
/// The patience of a resolver, on a busy machine.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);
const DNS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10)), 53);
const MANIFEST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/dns/coredns.yaml");
/// The response code of names that do not exist.
pub const NXDOMAIN: u8 = 3;

/// CoreDNS, which runs until this is dropped.
struct CoreDns<'a>(&'a Cluster);

impl<'a> CoreDns<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let made = Self(cluster);
        cluster.kubectl(&["apply", "-f", MANIFEST])?;
        let status = [
            "rollout",
            "status",
            "-n",
            "kube-system",
            "deployment/coredns",
            "--timeout=120s",
        ];
        cluster.kubectl(&status)?;
        Ok(made)
    }
}

impl Drop for CoreDns<'_> {
    fn drop(&mut self) {
        let _ = self
            .0
            .kubectl(&["delete", "--ignore-not-found", "--wait=true", "-f", MANIFEST]);
    }
}

/// Returns a query for the IPv4 addresses of a name (RFC 1035).
fn query(name: &str) -> Vec<u8> {
    let mut message = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        message.push(label.len() as u8);
        message.extend(label.bytes());
    }
    message.extend([0, 0, 1, 0, 1]);
    message
}

/// Returns an answer's response code, and the addresses in it.
fn read(answer: &[u8], asked: usize) -> Result<(u8, Vec<Ipv4Addr>)> {
    ensure!(
        answer.len() >= asked && answer[..2] == [0x12, 0x34],
        "no answer to it"
    );
    let count = u16::from_be_bytes([answer[6], answer[7]]);
    let mut addresses = Vec::new();
    let mut rest = &answer[asked..];
    for _ in 0..count {
        // A name is labels, or two bytes that lead to some; then type, class, life and length.
        let mut at = 0;
        while rest.get(at).is_some_and(|length| *length != 0 && *length < 0xc0) {
            at += 1 + usize::from(rest[at]);
        }
        at += if rest.get(at) == Some(&0) { 1 } else { 2 };
        let length = rest.get(at + 8..at + 10).context("cut off")?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        let data = rest.get(at + 10..at + 10 + length).context("cut off")?;
        if rest[at..at + 2] == [0, 1] {
            addresses.push(Ipv4Addr::from(<[u8; 4]>::try_from(data)?));
        }
        rest = &rest[at + 10 + length..];
    }
    addresses.sort_unstable();
    Ok((answer[3] & 15, addresses))
}

/// Asks a server for a name's IPv4 addresses, from the network namespace of the calling thread. Returns the response
/// code, too.
pub fn ask(server: SocketAddr, name: &str, patience: Duration) -> Result<(u8, Vec<Ipv4Addr>)> {
    let query = query(name);
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(patience))?;
    socket.connect(server)?;
    socket.send(&query)?;
    let mut answer = [0; 4096];
    let length = uninterrupted(|| socket.recv(&mut answer))?;
    read(&answer[..length], query.len())
}

fn asks(pod: &Pod, name: &str, patience: Duration) -> Result<(u8, Vec<Ipv4Addr>)> {
    pod.inside(|| ask(DNS, name, patience))
}

fn asks_by_tcp(pod: &Pod, name: &str) -> Result<(u8, Vec<Ipv4Addr>)> {
    let query = query(name);
    pod.inside(move || {
        let mut stream = TcpStream::connect_timeout(&DNS, ANSWER_TIMEOUT)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        stream.write_all(&(query.len() as u16).to_be_bytes())?;
        stream.write_all(&query)?;
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut answer)?;
        read(&answer, query.len())
    })
}

fn service(namespace: &str, name: &str, headless: bool) -> Value {
    let mut service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {SELECTOR.0: SELECTOR.1}, "ports": [{"port": PORT}]},
    });
    if headless {
        service["spec"]["clusterIP"] = "None".into();
    }
    service
}

fn cluster_ip(cluster: &Cluster, namespace: &str, name: &str) -> Result<Ipv4Addr> {
    let service = get(cluster, &["service", "-n", namespace, name])?;
    Ok(service["spec"]["clusterIP"]
        .as_str()
        .context("clusterIP")?
        .parse()?)
}

#[test]
fn dns_resolves_only_names_of_own_vpc_and_shared_services() {
    let tenants = tenants();
    let cluster = &tenants.cluster;
    let _red = lock(cluster, "vpc-red").unwrap();
    let _dns = CoreDns::new(cluster).unwrap();
    let spaces = ["red", "blue"];
    let services = spaces.map(|space| [service(space, "names", false), service(space, "heads", true)]);
    apply(cluster, services.as_flattened()).unwrap();
    apply(cluster, &[netexec_manifest("default", "asker", "node-b", None)]).unwrap();
    let everybody = running(cluster, "default", "asker").unwrap();
    let api = cluster_ip(cluster, "default", "kubernetes").unwrap();
    let name = |service: &str, space: &str| format!("{service}.{space}.svc.cluster.local");
    for (own, other) in [("red", "blue"), ("blue", "red")] {
        let pods = tenants.vpc(own);
        let address = cluster_ip(cluster, own, "names").unwrap();
        let mut all: Vec<Ipv4Addr> = pods.iter().map(|pod| pod.address).collect();
        all.sort_unstable();
        for pod in &pods {
            cluster
                .wait_for(&format!("names of {own} for {}", pod.name), SOON, || {
                    Ok(asks(pod, &name("names", own), ANSWER_TIMEOUT)
                        .is_ok_and(|(_, found)| found == [address]))
                })
                .unwrap();
            assert_eq!(
                asks(pod, &name("heads", own), ANSWER_TIMEOUT).unwrap(),
                (0, all.clone()),
                "{}",
                pod.name
            );
            assert_eq!(asks_by_tcp(pod, &name("names", own)).unwrap(), (0, vec![address]));
            assert_eq!(
                asks(pod, &name("kubernetes", "default"), ANSWER_TIMEOUT).unwrap(),
                (0, vec![api])
            );
            for hidden in [
                name("names", other),
                name("heads", other),
                name("nobody", other),
                name("nobody", "nowhere"),
            ] {
                let (code, found) = asks(pod, &hidden, ANSWER_TIMEOUT).unwrap();
                assert_eq!((code, found), (NXDOMAIN, vec![]), "{hidden} for {}", pod.name);
            }
        }
        // The pod uses the resolver that every pod has, with nothing in its spec.
        let target = format!("names.{own}:{PORT}");
        let arguments = [
            "exec",
            "-n",
            own,
            &pods[0].name,
            "--",
            "/agnhost",
            "connect",
            "--timeout=8s",
            &target,
        ];
        cluster.kubectl(&arguments).unwrap();
        let (code, found) = asks(&everybody, &name("names", own), ANSWER_TIMEOUT).unwrap();
        assert_eq!((code, found), (0, vec![address]), "the VPC of nodes finds all");
    }
    // A VPC that shares nothing has no DNS.
    let red = tenants.vpc("red");
    crate::support::patch_vpc(cluster, "red", &json!({"sharedServices": []})).unwrap();
    let result = cluster.wait_for("no names for red", SOON, || {
        Ok(asks(red[0], &name("names", "red"), NOT_REACHED).is_err())
    });
    crate::support::patch_vpc(cluster, "red", &json!({"sharedServices": null})).unwrap();
    result.unwrap();
    for space in spaces {
        delete(cluster, &["service", "-n", space, "names", "heads"]).unwrap();
    }
    delete(cluster, &["pod", "-n", "default", "asker", "--now"]).unwrap();
}

//! The text of HAProxy's configuration.
//!
//! Same Vips, same text. The text has its own digest as the description that HAProxy tells, so the speaker sees which
//! text a worker has.

use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use thuban_api::proxies::{Proxy, ProxyMember, ProxyPort};
use thuban_api::{ProxyProtocol, TlsVersion};

/// The folder of certificates within that of HAProxy.
pub const CERTIFICATES: &str = "certs";
/// The user of the worker, which takes connections and has no rights.
const USER: u32 = 65_532;
/// The seconds after which a connection is closed that carries nothing.
const IDLE_SECONDS: u32 = 300;
/// The most connections to a port, unless a profile says otherwise.
const CONNECTIONS: u32 = 2000;
/// The most connections to all ports of a Vip, of some 50,000 that a node has for all Vips.
const CONNECTIONS_OF_VIP: u32 = 10_000;
/// How many clients of a port are remembered.
const CLIENTS: &str = "20k";
/// The seconds for which a client is remembered whose connections are counted.
const COUNTED_SECONDS: u32 = 60;

/// What all Vips have in common. A worker that has been replaced ends after a day at the latest, or after so many
/// reloads: a tenant that causes one after the other must not fill the node's memory with workers.
const HEAD: &str = "    fd-hard-limit 100000
    hard-stop-after 24h
    mworker-max-reloads 50
    log stderr format raw daemon notice
    tune.ssl.default-dh-param 2048
defaults
    mode tcp
    log global
    timeout connect 5s
    timeout client-fin 30s
    timeout server-fin 30s
    retries 3
    option redispatch 1
    balance leastconn
    default-server check inter 2s fall 3 rise 2
";

/// A configuration, and the digest that its worker tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub text: String,
    pub digest: String,
}

/// Returns the configuration for Vips. `folder`: what HAProxy and the speaker share.
pub fn config(proxies: &[Proxy], folder: &Path) -> Config {
    let mut body = format!("    uid {USER}\n    gid {USER}\n{HEAD}");
    // HAProxy does not start without a listener.
    let idle = folder.join("idle.sock");
    let _ = writeln!(
        body,
        "listen idle\n    bind unix@{} mode 600\n    timeout client 5s\n    timeout server 5s",
        idle.display()
    );
    for proxy in proxies {
        for port in &proxy.ports {
            listener(&mut body, proxy, *port, folder);
        }
    }
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    let digest = format!("{:016x}", hasher.finish());
    let text = format!("# Written by thuban-speaker.\nglobal\n    description {digest}\n{body}");
    Config { text, digest }
}

/// Returns the name of a port of a Vip, in HAProxy's configuration and at its socket.
pub fn listener_name(proxy: &Proxy, port: ProxyPort) -> String {
    format!("{}:{}:{}", proxy.namespace, proxy.name, port.port)
}

/// Returns the file of a Vip's certificate.
pub fn certificate_path(proxy: &Proxy, folder: &Path) -> PathBuf {
    // No name of Kubernetes has an underscore.
    let name = format!("{}_{}.pem", proxy.namespace, proxy.name);
    folder.join(CERTIFICATES).join(name)
}

/// Appends what HAProxy does at one port. Writing to a String can't fail.
fn listener(text: &mut String, proxy: &Proxy, port: ProxyPort, folder: &Path) {
    let _ = writeln!(text, "listen {}", listener_name(proxy, port));
    let tls = tls(proxy, folder);
    for address in &proxy.addresses {
        let at = at(*address, port.port);
        let _ = writeln!(text, "    bind {at} transparent{tls}");
    }
    let idle = proxy.idle_seconds.unwrap_or(IDLE_SECONDS);
    let limits = &proxy.client_limits;
    let ports = u32::try_from(proxy.ports.len()).unwrap_or(u32::MAX).max(1);
    let share = (CONNECTIONS_OF_VIP / ports).max(1);
    let connections = limits.connections.unwrap_or(CONNECTIONS).min(share);
    let _ = writeln!(text, "    maxconn {connections}");
    let _ = writeln!(text, "    timeout client {idle}s\n    timeout server {idle}s");
    // A line may have only 64 words.
    for range in &proxy.source_ranges {
        let _ = writeln!(text, "    acl admitted src {range}");
    }
    if !proxy.source_ranges.is_empty() {
        text.push_str("    tcp-request connection reject if !admitted\n");
    }
    let is_counted = limits.per_client.is_some() || limits.per_client_rate.is_some();
    if is_counted || proxy.affinity_seconds.is_some() {
        let seconds = proxy.affinity_seconds.unwrap_or(COUNTED_SECONDS);
        let _ = writeln!(
            text,
            "    stick-table type ipv6 size {CLIENTS} expire {seconds}s store conn_cur,conn_rate(1s)"
        );
    }
    if is_counted {
        text.push_str("    tcp-request connection track-sc0 src\n");
    }
    for (counter, limit) in [
        ("conn_cur", limits.per_client),
        ("conn_rate", limits.per_client_rate),
    ] {
        if let Some(limit) = limit {
            let _ = writeln!(
                text,
                "    tcp-request connection reject if {{ sc0_{counter} gt {limit} }}"
            );
        }
    }
    if proxy.affinity_seconds.is_some() {
        text.push_str("    stick on src\n");
    }
    for member in &proxy.members {
        server(text, proxy, port, member);
    }
}

fn server(text: &mut String, proxy: &Proxy, port: ProxyPort, member: &ProxyMember) {
    let told = match proxy.proxy_protocol {
        None => "",
        Some(ProxyProtocol::V1) => " send-proxy",
        Some(ProxyProtocol::V2) => " send-proxy-v2",
    };
    let (node, weight) = (&member.node, member.weight);
    let at = at(member.address, port.node_port);
    let _ = writeln!(text, "    server {node} {at} weight {weight}{told}");
}

/// Returns the words of a listener that ends TLS.
fn tls(proxy: &Proxy, folder: &Path) -> String {
    let Some(tls) = &proxy.tls else {
        return String::new();
    };
    let version = match tls.min_version {
        TlsVersion::V12 => "TLSv1.2",
        TlsVersion::V13 => "TLSv1.3",
    };
    let path = certificate_path(proxy, folder);
    format!(" ssl crt {} ssl-min-ver {version}", path.display())
}

/// Returns an address and a port; IPv6 in brackets.
fn at(address: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(address, port)
}

#[cfg(test)]
pub mod tests;

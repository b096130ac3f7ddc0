#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

use std::path::Path;
use std::process::Command;

use thuban_api::proxies::{Proxy, ProxyMember, ProxyPort, ProxyTls};
use thuban_api::{ClientLimits, ProxyProtocol, TlsVersion};

use super::config;

/// Returns a Vip with two nodes as members.
pub fn shop() -> Proxy {
    let member = |node: &str, address: &str, weight| ProxyMember {
        node: node.to_owned(),
        address: address.parse().unwrap(),
        weight,
    };
    Proxy {
        namespace: "red".to_owned(),
        name: "shop".to_owned(),
        addresses: vec!["203.0.113.7".parse().unwrap(), "2001:db8::7".parse().unwrap()],
        ports: vec![ProxyPort {
            port: 443,
            node_port: 31443,
        }],
        members: vec![
            member("a.example", "192.0.2.1", 1),
            member("b", "2001:db8::2", 256),
        ],
        ..Proxy::default()
    }
}

/// Returns a Vip that uses all that HAProxy does.
fn full() -> Proxy {
    Proxy {
        tls: Some(ProxyTls {
            pem: "-----BEGIN CERTIFICATE-----\n".to_owned().try_into().unwrap(),
            min_version: TlsVersion::V13,
        }),
        proxy_protocol: Some(ProxyProtocol::V2),
        source_ranges: vec!["198.51.100.0/24".to_owned(), "2001:db8:1::/48".to_owned()],
        affinity_seconds: Some(600),
        client_limits: ClientLimits {
            connections: Some(100),
            per_client: Some(9),
            per_client_rate: Some(5),
        },
        idle_seconds: Some(30),
        ..shop()
    }
}

fn of(proxy: &Proxy) -> String {
    let text = config(std::slice::from_ref(proxy), Path::new("/run/haproxy")).text;
    text[text.find("listen red:").unwrap()..].to_owned()
}

#[test]
fn a_port_leads_to_the_node_ports_of_members() {
    let expected = "listen red:shop:443
    bind 203.0.113.7:443 transparent
    bind [2001:db8::7]:443 transparent
    maxconn 2000
    timeout client 300s
    timeout server 300s
    server a.example 192.0.2.1:31443 weight 1
    server b [2001:db8::2]:31443 weight 256
";
    assert_eq!(of(&shop()), expected);
}

#[test]
fn a_vip_has_no_more_than_its_part_of_connections() {
    let mut proxy = full();
    proxy.client_limits.connections = Some(100_000);
    assert!(of(&proxy).contains("    maxconn 10000\n"));
    proxy.ports = vec![proxy.ports[0]; 16];
    assert_eq!(of(&proxy).matches("    maxconn 625\n").count(), 16);
}

#[test]
fn all_that_a_profile_says_is_in_the_text() {
    let expected = "listen red:shop:443
    bind 203.0.113.7:443 transparent ssl crt /run/haproxy/certs/red_shop.pem ssl-min-ver TLSv1.3
    bind [2001:db8::7]:443 transparent ssl crt /run/haproxy/certs/red_shop.pem ssl-min-ver TLSv1.3
    maxconn 100
    timeout client 30s
    timeout server 30s
    acl admitted src 198.51.100.0/24
    acl admitted src 2001:db8:1::/48
    tcp-request connection reject if !admitted
    stick-table type ipv6 size 20k expire 600s store conn_cur,conn_rate(1s)
    tcp-request connection track-sc0 src
    tcp-request connection reject if { sc0_conn_cur gt 9 }
    tcp-request connection reject if { sc0_conn_rate gt 5 }
    stick on src
    server a.example 192.0.2.1:31443 weight 1 send-proxy-v2
    server b [2001:db8::2]:31443 weight 256 send-proxy-v2
";
    assert_eq!(of(&full()), expected);
}

#[test]
fn affinity_alone_counts_nobody_and_limits_alone_keep_nobody() {
    let sticky = Proxy {
        affinity_seconds: Some(60),
        ..shop()
    };
    let text = of(&sticky);
    assert!(
        text.contains("stick on src") && text.contains("expire 60s"),
        "{text}"
    );
    assert!(!text.contains("track-sc0"), "{text}");
    let limited = Proxy {
        client_limits: ClientLimits {
            per_client_rate: Some(5),
            ..ClientLimits::default()
        },
        proxy_protocol: Some(ProxyProtocol::V1),
        ..shop()
    };
    let text = of(&limited);
    assert!(
        text.contains("track-sc0") && !text.contains("stick on src"),
        "{text}"
    );
    assert!(!text.contains("conn_cur gt"), "{text}");
    assert!(text.contains("weight 1 send-proxy\n"), "{text}");
}

#[test]
fn a_text_has_its_own_digest() {
    let folder = Path::new("/certs");
    let (one, other) = (config(&[shop()], folder), config(&[full()], folder));
    assert_ne!(one.digest, other.digest);
    assert_eq!(one, config(&[shop()], folder));
    assert!(one.text.contains(&format!("description {}\n", one.digest)));
    assert!(
        !of(&full()).contains("BEGIN"),
        "a certificate is in a file of its own"
    );
}

#[test]
fn former_workers_do_not_pile_up() {
    let text = config(&[], Path::new("/run/haproxy")).text;
    let global = &text[..text.find("\ndefaults\n").unwrap()];
    for line in ["\n    hard-stop-after ", "\n    mworker-max-reloads "] {
        assert!(global.contains(line), "{text}");
    }
}

/// The group `netns` has HAProxy; a machine for unit tests may lack it.
#[test]
fn haproxy_takes_the_text_where_it_is_installed() {
    let folder = std::env::temp_dir().join(format!("thuban-haproxy-config-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("haproxy.cfg");
    // The certificate would have to be a real one.
    let plain = Proxy { tls: None, ..full() };
    std::fs::write(&path, config(&[plain], &folder).text).unwrap();
    let checked = Command::new("haproxy").arg("-c").arg("-f").arg(&path).output();
    std::fs::remove_dir_all(&folder).unwrap();
    if let Ok(checked) = checked {
        let said = String::from_utf8_lossy(&checked.stderr);
        assert!(checked.status.success(), "{said}");
    }
}

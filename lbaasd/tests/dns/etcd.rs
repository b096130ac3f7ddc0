//! An etcd, and CoreDNS that serves a zone from it.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::Ordering;

use data_encoding::BASE64;
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use kube::{Client, Config};
use lbaasd::dns::etcd::{Certificates, Keys, node};
use lbaasd::dns::{DnsError, Records};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::{Value, json};
use thuban_api::EtcdRecords;
use tokio::net::TcpStream;

use crate::proxy::{Proxy, played};
use crate::{
    Folder, Process, SHOP, ZONE, a_name_has_one_owner, addresses, ask, local, port, program, publish, ready,
    record, started, the_first_gets_a_name,
};

const ADDRESS: &[&str] = &["203.0.113.7"];

struct Etcd {
    address: SocketAddr,
    /// Of CoreDNS.
    dns: SocketAddr,
    _processes: Vec<Process>,
    _folder: Folder,
}

fn keys(servers: &[String], certificates: Option<&Certificates>) -> Result<Keys, DnsError> {
    let spec = EtcdRecords {
        endpoints: servers.to_vec(),
        path: "/skydns".into(),
        secret: String::new(),
    };
    Keys::new(&spec, ZONE, certificates)
}

fn usual(server: SocketAddr) -> Keys {
    keys(&[format!("http://{server}")], None).unwrap()
}

/// Starts an etcd that is asked by this scheme.
fn etcd(folder: &Folder, scheme: &str, port: u16, more: &[&str]) -> Process {
    let url = |port: u16| format!("{scheme}://127.0.0.1:{port}");
    let peer = format!("http://127.0.0.1:{}", crate::port());
    let mut command = Command::new(program("THUBAN_ETCD", "kube-", "etcd"));
    command.args(["--data-dir", &folder.path("etcd"), "--unsafe-no-fsync"]);
    command.args([
        "--listen-client-urls",
        &url(port),
        "--advertise-client-urls",
        &url(port),
    ]);
    command.args([
        "--listen-peer-urls",
        &peer,
        "--initial-advertise-peer-urls",
        &peer,
    ]);
    command.args(["--initial-cluster", &format!("default={peer}")]);
    Process::start(command.args(more))
}

impl Etcd {
    async fn start() -> Self {
        let (folder, client, dns) = (Folder::new(), port(), port());
        let settings = format!(
            ".:{dns} {{
            bind 127.0.0.1
            etcd {ZONE} {{
            path /skydns
            endpoint http://127.0.0.1:{client}
            }}
            }}"
        );
        let settings = folder.write("Corefile", &settings);
        let etcd = etcd(&folder, "http", client, &[]);
        ready(&usual(local(client))).await;
        let mut command = Command::new(program("THUBAN_COREDNS", "coredns-", "coredns"));
        let coredns = Process::start(command.args(["-conf", &settings]));
        started("CoreDNS", async || TcpStream::connect(local(dns)).await.map(drop)).await;
        Self {
            address: local(client),
            dns: local(dns),
            _processes: vec![coredns, etcd],
            _folder: folder,
        }
    }

    async fn ask(&self, path: &str, body: Value) -> Value {
        let config = Config::new(format!("http://{}", self.address).parse().unwrap());
        let request = http::Request::post(path)
            .body(serde_json::to_vec(&body).unwrap())
            .unwrap();
        Client::try_from(config).unwrap().request(request).await.unwrap()
    }

    /// Writes a key as somebody else does.
    async fn put(&self, key: &str, host: &str) {
        let value = BASE64.encode(json!({"host": host, "ttl": 30}).to_string().as_bytes());
        let body = json!({"key": BASE64.encode(key.as_bytes()), "value": value});
        self.ask("/v3/kv/put", body).await;
    }

    /// Returns all keys.
    async fn all(&self) -> Vec<String> {
        let body = json!({"key": BASE64.encode(b"/"), "range_end": BASE64.encode(b"0"), "keys_only": true});
        let answer = self.ask("/v3/kv/range", body).await;
        let keys = answer["kvs"].as_array().cloned().unwrap_or_default();
        let key =
            |key: &Value| String::from_utf8(BASE64.decode(key["key"].as_str().unwrap().as_bytes()).unwrap());
        keys.iter().map(|found| key(found).unwrap()).collect()
    }
}

#[tokio::test]
async fn etcd_gives_a_name_one_owner() {
    let etcd = Etcd::start().await;
    let records = usual(etcd.address);
    a_name_has_one_owner(&records, etcd.dns).await;
    records.withdraw("vip-2", SHOP).await.unwrap();
    assert!(etcd.all().await.is_empty(), "nothing is left behind");
}

#[tokio::test]
async fn etcd_gives_a_name_to_the_first() {
    let etcd = Etcd::start().await;
    the_first_gets_a_name(&usual(etcd.address), etcd.dns).await;
}

#[tokio::test]
async fn a_repeat_writes_no_key() {
    let etcd = Etcd::start().await;
    let records = usual(etcd.address);
    let shop = record(SHOP, &["203.0.113.7", "2001:db8::7"]);
    assert!(publish(&records, "vip-1", &shop).await.unwrap());
    let revision =
        async || etcd.ask("/v3/kv/range", json!({"key": "AA=="})).await["header"]["revision"].clone();
    let before = revision().await;
    assert!(publish(&records, "vip-1", &shop).await.unwrap());
    assert!(!publish(&records, "vip-2", &shop).await.unwrap());
    assert!(!records.withdraw("vip-2", SHOP).await.unwrap());
    assert_eq!(revision().await, before);
}

#[tokio::test]
async fn keys_of_others_stay_as_they_are() {
    let etcd = Etcd::start().await;
    let records = usual(etcd.address);
    let red = node("/skydns", &format!("red.{ZONE}"));
    // At the name itself, below it, at our own key, and at a name above it.
    for (key, name) in [
        ("plain", "plain"),
        ("leaf/x1", "leaf"),
        ("nested/a/b", "nested"),
        ("mark/_thuban4", "mark"),
        ("above", "below.above"),
    ] {
        let (key, name) = (format!("{red}/{key}"), format!("{name}.red.{ZONE}"));
        etcd.put(&key, "198.51.100.1").await;
        let before = etcd.all().await;
        assert!(
            !publish(&records, "vip-1", &record(&name, ADDRESS)).await.unwrap(),
            "{name}"
        );
        assert!(!records.withdraw("vip-1", &name).await.unwrap(), "{name}");
        assert_eq!(etcd.all().await, before, "{name}");
    }
    // A name whose label only begins like another's.
    let near = format!("plain2.red.{ZONE}");
    assert!(publish(&records, "vip-1", &record(&near, ADDRESS)).await.unwrap());
    assert_eq!(addresses(etcd.dns, &near).await, ADDRESS);
}

/// CoreDNS would answer one name with the addresses of both.
#[tokio::test]
async fn a_name_above_or_below_anothers_is_refused() {
    let etcd = Etcd::start().await;
    let records = usual(etcd.address);
    let (below, far) = (format!("x.{SHOP}"), format!("z.y.x.{SHOP}"));
    assert!(publish(&records, "vip-1", &record(SHOP, ADDRESS)).await.unwrap());
    for name in [&below, &far] {
        assert!(
            !publish(&records, "vip-2", &record(name, &["203.0.113.9"]))
                .await
                .unwrap(),
            "{name}"
        );
    }
    assert_eq!(addresses(etcd.dns, SHOP).await, ADDRESS);
    assert!(records.withdraw("vip-1", SHOP).await.unwrap());
    assert!(
        publish(&records, "vip-2", &record(&far, &["203.0.113.9"]))
            .await
            .unwrap()
    );
    for name in [SHOP, &below] {
        assert!(
            !publish(&records, "vip-1", &record(name, ADDRESS)).await.unwrap(),
            "{name}"
        );
    }
    // What the rule is for.
    etcd.put(&format!("{}/x1", node("/skydns", SHOP)), "198.51.100.1")
        .await;
    assert_eq!(addresses(etcd.dns, SHOP).await, ["198.51.100.1", "203.0.113.9"]);
}

#[tokio::test]
async fn an_answer_of_etcd_that_was_lost_is_made_up_for() {
    let etcd = Etcd::start().await;
    let proxy = Proxy::before(etcd.address).await;
    let records = usual(proxy.address);
    let shop = record(SHOP, ADDRESS);
    proxy.drops.store(true, Ordering::Relaxed);
    let lost = records.claim("vip-1", &shop).await.unwrap_err();
    assert_eq!(lost.reason(), "ServerAway");
    assert_eq!(addresses(etcd.dns, SHOP).await, ADDRESS, "it was carried out");
    proxy.drops.store(false, Ordering::Relaxed);
    assert!(publish(&records, "vip-1", &shop).await.unwrap());
    assert!(records.withdraw("vip-1", SHOP).await.unwrap());
    assert_eq!(ask(etcd.dns, SHOP, RecordType::A).await.0, ResponseCode::NXDomain);
}

#[tokio::test]
async fn another_member_is_asked_for_one_that_is_away() {
    let etcd = Etcd::start().await;
    let live = format!("http://{}", etcd.address);
    for dead in [local(port()), played(|_| None).await] {
        let records = keys(&[format!("http://{dead}"), live.clone()], None).unwrap();
        assert!(publish(&records, "vip-1", &record(SHOP, ADDRESS)).await.unwrap());
        assert!(records.withdraw("vip-1", SHOP).await.unwrap());
    }
    let dead = usual(local(port()));
    assert_eq!(dead.check().await.unwrap_err().reason(), "ServerAway");
    let silent = usual(played(|_| None).await);
    assert_eq!(silent.check().await.unwrap_err().reason(), "ServerAway");
}

#[tokio::test]
async fn an_etcd_with_certificates_is_asked_by_tls() {
    let (folder, port) = (Folder::new(), port());
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let issue = |name: &str| {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([name.to_owned()])
            .unwrap()
            .signed_by(&key, &ca)
            .unwrap();
        (certificate.pem(), key.serialize_pem())
    };
    let (server, client) = (issue("127.0.0.1"), issue("lbaasd"));
    let file = |name: &str, text: &str| folder.write(name, text);
    let arguments = [
        "--trusted-ca-file",
        &file("ca.crt", &ca.pem()),
        "--client-cert-auth",
        "--cert-file",
        &file("tls.crt", &server.0),
        "--key-file",
        &file("tls.key", &server.1),
    ];
    let _etcd = etcd(&folder, "https", port, &arguments);
    let url = [format!("https://127.0.0.1:{port}")];
    let own = Certificates {
        ca: ca.pem(),
        client: Some(client),
    };
    let records = keys(&url, Some(&own)).unwrap();
    ready(&records).await;
    assert!(publish(&records, "vip-1", &record(SHOP, ADDRESS)).await.unwrap());
    let without = Certificates {
        client: None,
        ..own.clone()
    };
    keys(&url, Some(&without)).unwrap().check().await.unwrap_err();
    let others = CertificateParams::default()
        .self_signed(&KeyPair::generate().unwrap())
        .unwrap();
    let deceived = Certificates {
        ca: others.pem(),
        ..own
    };
    keys(&url, Some(&deceived)).unwrap().check().await.unwrap_err();
    assert!(keys(&url, None).is_err(), "https without a CA");
}

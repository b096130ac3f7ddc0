//! The manager against a real HAProxy: connections survive reloads and another certificate. Runs as root, because
//! HAProxy's worker gets another user.

#![allow(clippy::unwrap_used)] // a test

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rcgen::{CertificateParams, KeyPair};
use rustls::client::Resumption;
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use thuban_api::TlsVersion;
use thuban_api::proxies::{Pem, Proxy, ProxyMember, ProxyPort, ProxyTls};
use thuban_speaker::haproxy::folder::Folder;
use thuban_speaker::haproxy::manager::Manager;

/// The address of the Vip: any of 127.0.0.0/8 leads to this machine.
const VIP: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 82, 0, 7));
const NAME: &str = "shop.example";
/// The longest time until HAProxy is as wanted.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A HAProxy, as its container starts it.
struct Haproxy {
    master: Child,
    path: PathBuf,
    manager: Manager,
}

impl Haproxy {
    fn start(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("thuban-haproxy-{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let master = Command::new(env!("CARGO_BIN_EXE_thuban-speaker"))
            .args(["haproxy", "--haproxy", "haproxy", "--haproxy-folder"])
            .arg(&path)
            .spawn()
            .unwrap();
        let folder = Folder::new(path.clone()).unwrap();
        Self {
            master,
            path,
            manager: Manager::new(folder, "haproxy".into()),
        }
    }

    /// Has HAProxy serve a Vip, until `is_done` says so.
    async fn bring_to(&mut self, proxy: &Proxy, is_done: impl Fn() -> bool) {
        let end = Instant::now() + TIMEOUT;
        loop {
            let serving = self.manager.sync(Some(std::slice::from_ref(proxy))).await;
            if serving.contains(&(VIP, "red/shop".to_owned())) && is_done() {
                return;
            }
            assert!(Instant::now() < end, "HAProxy serves {serving:?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

impl Drop for Haproxy {
    fn drop(&mut self) {
        // The master ends its workers, too.
        let master = Pid::from_raw(self.master.id().cast_signed());
        let _ = kill(master, Signal::SIGTERM);
        let _ = self.master.wait();
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Starts a server that repeats what it gets, and returns its port: it stands for a NodePort.
fn repeater() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || repeat(stream));
        }
    });
    port
}

fn repeat(mut stream: TcpStream) {
    let mut bytes = [0; 64];
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        if stream.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((VIP, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

fn vip(port: u16) -> Proxy {
    Proxy {
        namespace: "red".to_owned(),
        name: "shop".to_owned(),
        addresses: vec![VIP],
        ports: vec![ProxyPort {
            port,
            node_port: repeater(),
        }],
        members: vec![ProxyMember {
            node: "node-a".to_owned(),
            address: Ipv4Addr::LOCALHOST.into(),
            weight: 1,
        }],
        ..Proxy::default()
    }
}

fn connect(port: u16) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&SocketAddr::new(VIP, port), Duration::from_secs(2))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(stream)
}

/// Whether a connection leads to the repeater.
fn answers(stream: &mut (impl Read + Write)) -> bool {
    let mut heard = [0; 5];
    let asked = stream.write_all(b"hello").and_then(|()| stream.flush());
    asked.and_then(|()| stream.read_exact(&mut heard)).is_ok() && &heard == b"hello"
}

fn is_served(port: u16) -> bool {
    connect(port).is_ok_and(|mut stream| answers(&mut stream))
}

#[tokio::test]
async fn connections_survive_a_reload() {
    let mut haproxy = Haproxy::start("reload");
    let port = free_port();
    let first = vip(port);
    haproxy.bring_to(&first, || is_served(port)).await;
    let mut kept = connect(port).unwrap();
    assert!(answers(&mut kept));
    let clients = thread::spawn(move || {
        let end = Instant::now() + Duration::from_secs(8);
        let mut failed = 0;
        while Instant::now() < end {
            failed += u32::from(!is_served(port));
            thread::sleep(Duration::from_millis(10));
        }
        failed
    });
    let mut second = first.clone();
    second.idle_seconds = Some(120);
    let config = haproxy.path.join("haproxy.cfg");
    let is_written =
        || std::fs::read_to_string(&config).is_ok_and(|text| text.contains("timeout client 120s"));
    haproxy.bring_to(&second, is_written).await;
    assert_eq!(clients.join().unwrap(), 0, "connections failed");
    assert!(answers(&mut kept), "the former worker keeps its connections");
}

#[tokio::test]
async fn a_member_that_goes_gets_no_new_connections() {
    let mut haproxy = Haproxy::start("members");
    let port = free_port();
    let with = vip(port);
    haproxy.bring_to(&with, || is_served(port)).await;
    let mut kept = connect(port).unwrap();
    assert!(answers(&mut kept));
    let without = Proxy {
        members: Vec::new(),
        ..with.clone()
    };
    haproxy.bring_to(&without, || !is_served(port)).await;
    assert!(answers(&mut kept), "open connections go on");
    haproxy.bring_to(&with, || is_served(port)).await;
}

/// Returns a certificate with its key, and a client that believes that certificate alone.
fn certificate() -> (ProxyTls, Arc<ClientConfig>) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new([NAME.to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap().pem();
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    // A resumed session shows no certificate.
    client.resumption = Resumption::disabled();
    let tls = ProxyTls {
        pem: Pem::try_from(format!("{certificate}{}", key.serialize_pem())).unwrap(),
        min_version: TlsVersion::V13,
    };
    (tls, Arc::new(client))
}

fn connect_tls(port: u16, client: &Arc<ClientConfig>) -> Option<StreamOwned<ClientConnection, TcpStream>> {
    let name = ServerName::try_from(NAME).unwrap();
    let connection = ClientConnection::new(client.clone(), name).unwrap();
    let mut stream = StreamOwned::new(connection, connect(port).ok()?);
    answers(&mut stream).then_some(stream)
}

#[tokio::test]
async fn another_certificate_breaks_no_connection() {
    let mut haproxy = Haproxy::start("certificate");
    let port = free_port();
    let (first, first_client) = certificate();
    let (second, second_client) = certificate();
    let mut proxy = Proxy {
        tls: Some(first),
        ..vip(port)
    };
    haproxy
        .bring_to(&proxy, || connect_tls(port, &first_client).is_some())
        .await;
    assert!(connect_tls(port, &second_client).is_none());
    let mut kept = connect_tls(port, &first_client).unwrap();
    proxy.tls = Some(second);
    haproxy
        .bring_to(&proxy, || connect_tls(port, &second_client).is_some())
        .await;
    assert!(connect_tls(port, &first_client).is_none());
    assert!(answers(&mut kept), "the connection has the former certificate");
}

//! Names at real servers: BIND's named, and an etcd with CoreDNS before it.
//!
//! All listen at 127.0.0.1 and keep their files in a folder of the test. `cargo xtask test` sets `THUBAN_ETCD` and
//! `THUBAN_COREDNS`. Without them the programs that it built last are taken.

// Helpers of tests: a failure that they find ends the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bind;
mod etcd;
mod proxy;
mod updates;

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use lbaasd::dns::{DnsError, Record, Records};
use tokio::net::UdpSocket;
use tokio::time::{Instant, sleep, timeout};

const ZONE: &str = "apps.example.com";
const SHOP: &str = "shop.red.apps.example.com";
/// How long a server may take to start.
const START: Duration = Duration::from_secs(20);

/// A process, which ends with the test.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Self(
            child
                .spawn()
                .unwrap_or_else(|error| panic!("{command:?}: {error}")),
        )
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A folder, which is removed with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("thuban-dns-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.0.join(name), text).unwrap();
        self.path(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns a port that is free now, for TCP and UDP.
fn port() -> u16 {
    loop {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        if std::net::UdpSocket::bind(address).is_ok() {
            return address.port();
        }
    }
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// Returns a program that `cargo xtask test` names by a variable, or built last.
fn program(variable: &str, folder: &str, name: &str) -> PathBuf {
    if let Some(path) = std::env::var_os(variable) {
        return path.into();
    }
    let home = std::env::var("HOME").unwrap();
    let cache = Path::new(&home).join(".cache/thuban");
    let folders = std::fs::read_dir(&cache).unwrap().flatten();
    let built = folders
        .filter(|found| found.file_name().to_str().unwrap().starts_with(folder))
        .map(|found| found.path().join(name));
    let mut built: Vec<PathBuf> = built.filter(|path| path.exists()).collect();
    built.sort_by_key(|path| path.metadata().unwrap().modified().unwrap());
    built
        .pop()
        .unwrap_or_else(|| panic!("no {name} in {}: run cargo xtask test once", cache.display()))
}

/// What a server says of a name: the code, and the data of each record with its TTL.
async fn ask(server: SocketAddr, name: &str, kind: RecordType) -> (ResponseCode, Vec<(String, u32)>) {
    let mut question = Query::new();
    question
        .set_name(Name::from_ascii(format!("{name}.")).unwrap())
        .set_query_type(kind);
    let mut message = Message::query();
    message.add_query(question);
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(server).await.unwrap();
    socket.send(&message.to_vec().unwrap()).await.unwrap();
    let mut buffer = [0; 4096];
    let length = timeout(Duration::from_secs(5), socket.recv(&mut buffer))
        .await
        .unwrap()
        .unwrap();
    let answer = Message::from_vec(&buffer[..length]).unwrap();
    let mut records: Vec<_> = answer
        .answers
        .iter()
        .map(|record| (record.data.to_string(), record.ttl))
        .collect();
    records.sort();
    (answer.metadata.response_code, records)
}

/// Returns a name's addresses of both families.
async fn addresses(server: SocketAddr, name: &str) -> Vec<String> {
    let mut found = Vec::new();
    for kind in [RecordType::A, RecordType::AAAA] {
        found.extend(ask(server, name, kind).await.1.into_iter().map(|(data, _)| data));
    }
    found
}

fn record(name: &str, addresses: &[&str]) -> Record {
    Record {
        name: name.to_owned(),
        addresses: addresses
            .iter()
            .map(|text| text.parse::<IpAddr>().unwrap())
            .collect(),
        ttl_seconds: 30,
    }
}

/// Gives an owner a name as lbaasd does. Returns whether the owner has it.
async fn publish(records: &dyn Records, owner: &str, record: &Record) -> Result<bool, DnsError> {
    Ok(records.refresh(owner, record).await? || records.claim(owner, record).await?)
}

/// Waits until what a server must do after its start succeeds.
async fn started<E: Display>(server: &str, mut attempt: impl AsyncFnMut() -> Result<(), E>) {
    let end = Instant::now() + START;
    while let Err(error) = attempt().await {
        assert!(Instant::now() < end, "{server} does not start: {error}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until a server takes writes.
async fn ready(records: &dyn Records) {
    started("the server", async || records.check().await).await;
}

/// What holds at each server, before which `records` stands.
async fn a_name_has_one_owner(records: &dyn Records, server: SocketAddr) {
    let (old, new) = (
        record(SHOP, &["203.0.113.7"]),
        record(SHOP, &["203.0.113.8", "2001:db8::8"]),
    );
    assert!(
        !records.withdraw("vip-1", SHOP).await.unwrap(),
        "nothing is there"
    );
    assert!(!records.refresh("vip-1", &old).await.unwrap(), "nobody has it");
    assert!(publish(records, "vip-1", &old).await.unwrap());
    assert_eq!(
        ask(server, SHOP, RecordType::A).await.1,
        [("203.0.113.7".to_owned(), 30)]
    );
    // Again, as after an answer that was lost.
    assert!(publish(records, "vip-1", &old).await.unwrap());
    assert!(
        !records.claim("vip-1", &old).await.unwrap(),
        "a claim takes only what nobody has"
    );
    assert!(!publish(records, "vip-2", &new).await.unwrap());
    assert!(!records.withdraw("vip-2", SHOP).await.unwrap());
    assert_eq!(
        addresses(server, SHOP).await,
        ["203.0.113.7"],
        "another owner changed nothing"
    );
    // Other addresses, another family, another TTL.
    assert!(publish(records, "vip-1", &new).await.unwrap());
    assert_eq!(addresses(server, SHOP).await, ["203.0.113.8", "2001:db8::8"]);
    let longer = Record {
        ttl_seconds: 60,
        ..record(SHOP, &["2001:db8::8"])
    };
    assert!(publish(records, "vip-1", &longer).await.unwrap());
    assert_eq!(addresses(server, SHOP).await, ["2001:db8::8"]);
    assert_eq!(ask(server, SHOP, RecordType::AAAA).await.1[0].1, 60);
    assert!(records.withdraw("vip-1", SHOP).await.unwrap());
    assert!(!records.withdraw("vip-1", SHOP).await.unwrap(), "again");
    assert_eq!(ask(server, SHOP, RecordType::A).await.0, ResponseCode::NXDomain);
    assert!(publish(records, "vip-2", &new).await.unwrap(), "the name is free");
    assert_eq!(addresses(server, SHOP).await, ["203.0.113.8", "2001:db8::8"]);
}

/// Of two that claim a name at once, one gets it.
async fn the_first_gets_a_name(records: &dyn Records, server: SocketAddr) {
    for number in 0..20 {
        let name = format!("n{number}.red.{ZONE}");
        let (one, other) = (record(&name, &["203.0.113.1"]), record(&name, &["203.0.113.2"]));
        let claims = tokio::join!(publish(records, "vip-1", &one), publish(records, "vip-2", &other));
        let claims = (claims.0.unwrap(), claims.1.unwrap());
        assert!(claims.0 != claims.1, "{name}: {claims:?}");
        let expected = if claims.0 { "203.0.113.1" } else { "203.0.113.2" };
        assert_eq!(addresses(server, &name).await, [expected], "{name}");
    }
}

//! Who is served: clients whose certificate the CA signed, and nobody else.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use cidrd::TLS_NAME;
use cidrd::client::{Client, ClientError};
use cidrd::http::{Released, Wanted, router};
use cidrd::lease::Family;
use cidrd::server::{Clients, Server};
use rustls::sign::CertifiedKey;
use thuban_authority::{Ca, ServerCertificate};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::directed::OnePool;
use crate::world::World;

fn ca() -> Ca {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    Ca::make("thuban-cidrd-ca", now.as_secs()).unwrap()
}

/// A cidrd on loopback.
struct Cidrd {
    address: String,
    certificate: Arc<ServerCertificate>,
    bundle: watch::Sender<String>,
}

async fn start(ca: &Ca) -> Cidrd {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let certificate = Arc::new(ServerCertificate::new(ca.sign(TLS_NAME).unwrap()));
    let (bundle, published) = watch::channel(ca.certificate.clone());
    let router = router(World::calm(), OnePool);
    let server = Server {
        certificate: certificate.clone(),
        clients: Clients::Signed(published),
        connections: 64,
        router,
    };
    tokio::spawn(server.accept(listener));
    Cidrd {
        address,
        certificate,
        bundle,
    }
}

impl Cidrd {
    /// Asks with a certificate, and trusts a CA.
    async fn is_served(&self, trusted: &Ca, key: Arc<CertifiedKey>) -> bool {
        let client = Client::new(&self.address, &trusted.certificate, key).unwrap();
        match client.list().await {
            Ok(_) => true,
            Err(ClientError::Away(_)) => false,
            Err(refused) => panic!("{refused}"),
        }
    }
}

#[tokio::test]
async fn only_clients_of_the_ca_are_served() {
    let (ca, other) = (ca(), ca());
    let cidrd = start(&ca).await;
    let lbaasd = || ca.sign_client("lbaasd").unwrap();
    assert!(cidrd.is_served(&ca, lbaasd()).await);
    assert!(
        !cidrd.is_served(&ca, other.sign_client("lbaasd").unwrap()).await,
        "another CA"
    );
    assert!(
        !cidrd.is_served(&ca, ca.sign("lbaasd").unwrap()).await,
        "a server's certificate"
    );
    assert!(!cidrd.is_served(&other, lbaasd()).await, "cidrd of another CA");
}

#[tokio::test]
async fn peers_that_say_nothing_keep_nobody_out() {
    let ca = ca();
    let cidrd = start(&ca).await;
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(TcpStream::connect(&cidrd.address).await.unwrap());
    }
    assert!(cidrd.is_served(&ca, ca.sign_client("lbaasd").unwrap()).await);
}

#[tokio::test]
async fn both_cas_are_served_while_one_follows_the_other() {
    let (old, new) = (ca(), ca());
    let cidrd = start(&old).await;
    cidrd
        .bundle
        .send_replace(format!("{}{}", old.certificate, new.certificate));
    assert!(cidrd.is_served(&old, old.sign_client("lbaasd").unwrap()).await);
    assert!(cidrd.is_served(&old, new.sign_client("lbaasd").unwrap()).await);
    cidrd.certificate.exchange(new.sign(TLS_NAME).unwrap());
    cidrd.bundle.send_replace(new.certificate.clone());
    assert!(cidrd.is_served(&new, new.sign_client("lbaasd").unwrap()).await);
    assert!(!cidrd.is_served(&new, old.sign_client("lbaasd").unwrap()).await);
}

#[tokio::test]
async fn a_client_tells_a_refusal_from_a_failure() {
    let ca = ca();
    let cidrd = start(&ca).await;
    let client =
        |address: &str| Client::new(address, &ca.certificate, ca.sign_client("lbaasd").unwrap()).unwrap();
    let wanted = Wanted {
        pool: "public".into(),
        namespace: "shop".into(),
        name: "web".into(),
        families: vec![Family::V4],
        ..Wanted::default()
    };
    let near = client(&cidrd.address);
    let before = Instant::now();
    let granted = near.put("uid", &wanted).await.unwrap();
    // Ten minutes but for the margin, from before the request was sent.
    let life = granted[0].deadline - before;
    assert!(life.as_secs() >= 540 && life.as_secs() < 550, "{life:?}");
    let renewed = near.renew("uid").await.unwrap();
    assert_eq!(renewed[0].lease.address, granted[0].lease.address);
    let released = Released {
        grants: vec![renewed[0].lease.grant.clone()],
    };
    near.release("uid", &released).await.unwrap();
    let refused = near.renew("uid").await.unwrap_err();
    assert!(
        matches!(&refused, ClientError::Refused(problem) if problem.reason == "NoLease"),
        "{refused}"
    );
    let silent = client("127.0.0.1:1").renew("uid").await.unwrap_err();
    assert!(matches!(silent, ClientError::Away(_)), "{silent}");
}

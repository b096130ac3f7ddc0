//! Something between lbaasd and a server that does not let everything through.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Forwards connections to a server.
pub struct Proxy {
    pub address: SocketAddr,
    /// Whether answers are dropped.
    pub drops: Arc<AtomicBool>,
    /// How many answers were.
    pub dropped: Arc<AtomicU32>,
}

impl Proxy {
    pub async fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Self {
            address: listener.local_addr().unwrap(),
            drops: Arc::default(),
            dropped: Arc::default(),
        };
        let (drops, dropped) = (proxy.drops.clone(), proxy.dropped.clone());
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let server = TcpStream::connect(server).await.unwrap();
                tokio::spawn(forward(client, server, drops.clone(), dropped.clone()));
            }
        });
        proxy
    }
}

async fn forward(
    mut client: TcpStream,
    mut server: TcpStream,
    drops: Arc<AtomicBool>,
    dropped: Arc<AtomicU32>,
) {
    let (mut request, mut answer) = ([0; 16384], [0; 16384]);
    loop {
        tokio::select! {
            read = client.read(&mut request) => match read {
                Ok(1..) => server.write_all(&request[..read.unwrap()]).await.unwrap(),
                _ => return,
            },
            read = server.read(&mut answer) => match read {
                // The server has carried out the request. The client's connection ends without an answer.
                Ok(1..) if drops.load(Ordering::Relaxed) => {
                    dropped.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                Ok(1..) => client.write_all(&answer[..read.unwrap()]).await.unwrap(),
                _ => return,
            },
        }
    }
}

/// Accepts connections. Reads a request and writes what `answer` makes of it, or never answers.
pub async fn played(answer: fn(&[u8]) -> Option<Vec<u8>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut open = Vec::new();
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            let length = client.read(&mut request).await.unwrap();
            if let Some(answer) = answer(&request[..length]) {
                client.write_all(&answer).await.unwrap();
            }
            open.push(client);
        }
    });
    address
}

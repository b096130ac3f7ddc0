//! What a client outside has of fronts: backends see its own address, and its connections outlive changes of the nodes
//! that take its packets and of the backends.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context, Result};
use thuban_cluster::Cluster;
use thuban_cluster::router::{CLIENT, Router};

use crate::support::{REACHED, http_get};

/// Connections that go on through all changes.
const HELD: usize = 24;
const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

/// A connection by which a client asks again and again.
struct Held {
    stream: BufReader<TcpStream>,
    /// The pod that answers.
    pod: String,
}

impl Held {
    fn open(server: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&server, REACHED)?;
        stream.set_read_timeout(Some(REACHED))?;
        let mut held = Self {
            stream: BufReader::new(stream),
            pod: String::new(),
        };
        held.pod = held.ask()?;
        Ok(held)
    }

    fn ask(&mut self) -> Result<String> {
        self.stream
            .get_mut()
            .write_all(b"GET /hostname HTTP/1.1\r\nHost: front\r\n\r\n")?;
        let (mut line, mut length) = (String::new(), 0);
        while self.stream.read_line(&mut line)? > 2 {
            if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
            line.clear();
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        Ok(String::from_utf8(body)?)
    }
}

/// Connections of the client at the router.
pub struct Connections<'a> {
    cluster: &'a Cluster,
    router: &'a Router,
    all: Vec<Held>,
}

impl<'a> Connections<'a> {
    pub fn open(cluster: &'a Cluster, router: &'a Router, server: SocketAddr) -> Result<Self> {
        let all = router.at_client(|| (0..HELD).map(|_| Held::open(server)).collect::<Result<_>>())?;
        Ok(Self { cluster, router, all })
    }

    /// Asserts that each connection is answered by its own pod. Returns these pods.
    pub fn ask(&mut self, when: &str) -> Result<BTreeSet<String>> {
        let all = &mut self.all;
        self.router.at_client(|| {
            let pods = all.iter_mut().map(|held| {
                let answered = held.ask().with_context(|| format!("{when}: by {}", held.pod))?;
                assert_eq!(answered, held.pod, "{when}");
                Ok(answered)
            });
            pods.collect()
        })
    }

    /// Has one node after the other announce alone. `wait` waits for so many ways to the address.
    pub fn outlive_nodes(&mut self, nodes: &[String], wait: impl Fn(usize) -> Result<()>) -> Result<()> {
        let excluded = Excluded(self.cluster, nodes);
        for alone in nodes {
            excluded.all_but(alone)?;
            wait(1)?;
            self.ask(&format!("by {alone} alone"))?;
        }
        drop(excluded);
        wait(nodes.len())
    }
}

/// Asserts that all backends see the client's own address.
pub fn ensure_own_address(router: &Router, server: SocketAddr) -> Result<()> {
    router.at_client(|| {
        for _ in 0..HELD {
            let seen = http_get(server, "/clientip", REACHED)?;
            let address = seen.rsplit_once(':').map(|(address, _)| address);
            assert_eq!(address, Some(CLIENT.to_string().as_str()));
        }
        Ok(())
    })
}

/// Nodes that may be kept from announcing. All may announce when this is dropped.
struct Excluded<'a>(&'a Cluster, &'a [String]);

impl Excluded<'_> {
    fn all_but(&self, alone: &str) -> Result<()> {
        for node in self.1 {
            let label = if node == alone {
                format!("{EXCLUDED}-")
            } else {
                format!("{EXCLUDED}=true")
            };
            self.0.kubectl(&["label", "node", node, &label, "--overwrite"])?;
        }
        Ok(())
    }
}

impl Drop for Excluded<'_> {
    fn drop(&mut self) {
        for node in self.1 {
            let _ = self.0.kubectl(&["label", "node", node, &format!("{EXCLUDED}-")]);
        }
    }
}

//! The operator's stream: as an actor with a token of a node may open it, and taken from a droplet.

use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use thuban_cluster::Cluster;
use thuban_proto::transit::transit_client::TransitClient;
use thuban_proto::transit::{DropletMessage, Hello, Program, droplet_message, operator_message};
use thuban_proto::{OPERATOR_TLS_NAME, PROTOCOL_VERSION};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status, Streaming};

use crate::support::get;

pub const NODE: &str = "node-a";

pub const WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Dials the address in the Lease, which everybody with a node's token may read.
async fn client(lease: &Value) -> TransitClient<Channel> {
    let annotation = |name: &str| {
        lease["metadata"]["annotations"][format!("thuban.dev/{name}")]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(annotation("ca-bundle")))
        .domain_name(OPERATOR_TLS_NAME);
    let endpoint = Endpoint::from_shared(format!("https://{}", annotation("address")))
        .unwrap()
        .tls_config(tls)
        .unwrap();
    TransitClient::new(endpoint.connect().await.unwrap())
}

/// Returns the first program that the operator sends to a client that says Hello as `droplet` with this token, and the
/// stream.
pub async fn program(
    lease: &Value,
    token: Option<&str>,
    droplet: &str,
) -> Result<(Program, Streaming<thuban_proto::transit::OperatorMessage>), Status> {
    let hello = Hello {
        protocol_version: PROTOCOL_VERSION,
        droplet: droplet.to_owned(),
        ..Hello::default()
    };
    let message = DropletMessage {
        message: Some(droplet_message::Message::Hello(hello)),
    };
    // The stream stays open after the Hello.
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    sender.send(message).await.unwrap();
    let mut request = Request::new(tokio_stream::wrappers::ReceiverStream::new(receiver));
    if let Some(token) = token {
        let value: MetadataValue<Ascii> = format!("Bearer {}", token.trim()).parse().unwrap();
        request.metadata_mut().insert("authorization", value);
    }
    let work = async {
        let mut stream = client(lease).await.connect(request).await?.into_inner();
        let first = stream.message().await?.and_then(|message| message.message);
        let Some(operator_message::Message::Program(program)) = first else {
            return Err(Status::internal("no program came"));
        };
        drop(sender);
        Ok((program, stream))
    };
    tokio::time::timeout(WAIT_TIMEOUT, work)
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded("the operator said nothing")))
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

pub fn operator_lease(cluster: &Cluster) -> Value {
    get(cluster, &["lease", "-n", "thuban-system", "thuban-operator"]).unwrap()
}

/// Keeps a node from the operators until this is dropped: its droplet has no stream. Nothing else is kept from it, so
/// packets of pods go on.
pub struct NoStream<'a> {
    cluster: &'a Cluster,
    node: &'a str,
}

impl<'a> NoStream<'a> {
    pub fn new(cluster: &'a Cluster, node: &'a str) -> anyhow::Result<Self> {
        let lease = operator_lease(cluster);
        let address = lease["metadata"]["annotations"]["thuban.dev/address"].as_str();
        // The port of any operator: another one may lead meanwhile.
        let (_, port) = address
            .and_then(|address| address.rsplit_once(':'))
            .context("a port in the Lease")?;
        let rules = format!(
            "add table inet outage; add chain inet outage sent {{ type filter hook output priority 0; }}; \
             add rule inet outage sent tcp dport {port} drop"
        );
        cluster.exec_on_node(node, &["nft", &rules])?;
        Ok(Self { cluster, node })
    }
}

impl Drop for NoStream<'_> {
    fn drop(&mut self) {
        let command = ["nft", "delete", "table", "inet", "outage"];
        if let Err(error) = self.cluster.exec_on_node(self.node, &command) {
            eprintln!("{} stays without operator: {error:#}", self.node);
        }
    }
}

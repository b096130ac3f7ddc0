//! What somebody with a token of one node gets from the operator's stream.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;
use thuban_cluster::Cluster;
use thuban_proto::transit::transit_client::TransitClient;
use thuban_proto::transit::{DropletMessage, Hello, Program, droplet_message, operator_message, row};
use thuban_proto::{OPERATOR_TLS_NAME, OPERATOR_TOKEN_AUDIENCE, PROTOCOL_VERSION};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status, Streaming};

use crate::actor::token_of_node;
use crate::support::get;
use crate::tenants::tenants;

const NODE: &str = "node-a";
const PATIENCE: Duration = Duration::from_secs(10);

/// Dials as the Lease says, which everybody with a node's token may read.
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

/// The first program that the operator sends to whoever says Hello as `droplet` with this token, and the stream.
async fn program(
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
    // The stream stays open behind the Hello.
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
    tokio::time::timeout(PATIENCE, work)
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded("the operator said nothing")))
}

fn refusal(lease: &Value, token: Option<&str>, droplet: &str) -> Status {
    runtime()
        .block_on(program(lease, token, droplet))
        .expect_err("the operator sent a program")
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

fn operator_lease(cluster: &Cluster) -> Value {
    get(cluster, &["lease", "-n", "thuban-system", "thuban-operator"]).unwrap()
}

#[test]
fn a_stolen_token_is_good_for_no_other_nodes_stream() {
    let cluster = &tenants().cluster;
    let lease = operator_lease(cluster);
    let token = token_of_node(cluster, NODE, OPERATOR_TOKEN_AUDIENCE).unwrap();
    for other in ["node-b", "node-z", ""] {
        let status = refusal(&lease, Some(&token), other);
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
        assert!(
            status.message().contains("the token is of node node-a"),
            "{status}"
        );
    }
}

#[test]
fn who_has_no_token_of_a_transitd_for_the_operator_gets_no_stream() {
    let cluster = &tenants().cluster;
    let lease = operator_lease(cluster);
    let status = refusal(&lease, None, NODE);
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    let status = refusal(&lease, Some("not.a.token"), NODE);
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    // That of the API server, of the same pod.
    let token = token_of_node(cluster, NODE, "api").unwrap();
    let status = refusal(&lease, Some(&token), NODE);
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    let made = |arguments: &[&str]| {
        let audience = format!("--audience={OPERATOR_TOKEN_AUDIENCE}");
        let arguments: Vec<&str> = ["create", "token", &audience]
            .iter()
            .chain(arguments)
            .copied()
            .collect();
        cluster.kubectl(&arguments).unwrap()
    };
    // The right ServiceAccount, but of no pod; of a node alone; and another's.
    for (arguments, word) in [
        (&["-n", "thuban-system", "transitd"][..], "not bound to a pod"),
        (
            &[
                "-n",
                "thuban-system",
                "transitd",
                "--bound-object-kind=Node",
                "--bound-object-name=node-a",
            ],
            "not bound to a pod",
        ),
        (&["-n", "red", "default"], "system:serviceaccount:red:default"),
    ] {
        let status = refusal(&lease, Some(&made(arguments)), NODE);
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
        assert!(status.message().contains(word), "{status}");
    }
}

#[test]
fn the_owner_of_a_node_gets_the_program_of_that_node_alone_and_not_for_long() {
    let cluster = &tenants().cluster;
    let lease = operator_lease(cluster);
    let token = token_of_node(cluster, NODE, OPERATOR_TOKEN_AUDIENCE).unwrap();
    let endpoints = get(cluster, &["endpoints.thuban.dev", "-A"]).unwrap();
    let at_home: BTreeSet<String> = endpoints["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|endpoint| endpoint["status"]["droplet"] == NODE)
        .map(|endpoint| {
            // The node's own has its name.
            let pod = endpoint["spec"]["podRef"]["name"].as_str();
            pod.unwrap_or(NODE).to_owned()
        })
        .collect();
    assert!(at_home.len() >= tenants().pods.len() / 3 && at_home.len() < tenants().pods.len());
    let end = runtime().block_on(async {
        let (program, mut stream) = program(&lease, Some(&token), NODE).await.unwrap();
        assert!(program.snapshot);
        let locals = program.upserts.iter().filter_map(|row| match &row.row {
            Some(row::Row::Local(local)) => Some(local.pod_name.clone()),
            _ => None,
        });
        assert_eq!(locals.collect::<BTreeSet<_>>(), at_home);
        // The node's transitd dials anew, and so ends the thief's stream.
        let end = async {
            loop {
                match stream.message().await {
                    Ok(Some(_)) => {}
                    Ok(None) => return "the stream's end".to_owned(),
                    Err(status) => return status.message().to_owned(),
                }
            }
        };
        tokio::time::timeout(PATIENCE, end).await
    });
    assert!(end.is_ok(), "transitd never came back");
    // Nothing of it stays.
    for pod in tenants().network("red-web") {
        for other in tenants().network("red-web") {
            pod.ping(other.address, crate::support::REACHED).unwrap();
        }
    }
}

//! What somebody with a token of one node gets from the operator's stream.

use serde_json::Value;
use thuban_proto::OPERATOR_TOKEN_AUDIENCE;
use tonic::{Code, Status};

use crate::actor::token_of_node;
use crate::operator_stream::{NODE, operator_lease, program, runtime};
use crate::tenants::tenants;

fn refusal(lease: &Value, token: Option<&str>, droplet: &str) -> Status {
    runtime()
        .block_on(program(lease, token, droplet))
        .expect_err("the operator sent a program")
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
fn stream_requires_transitd_token_for_operator_audience() {
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

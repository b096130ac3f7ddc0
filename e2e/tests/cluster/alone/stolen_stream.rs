//! The owner of a node takes the place of its transitd for a moment.

use std::collections::BTreeSet;

use thuban_proto::OPERATOR_TOKEN_AUDIENCE;
use thuban_proto::transit::row;

use crate::actor::token_of_node;
use crate::operator_stream::{NODE, WAIT_TIMEOUT, operator_lease, program, runtime};
use crate::support::get;
use crate::tenants::tenants;

#[test]
fn stolen_token_streams_only_its_nodes_program_briefly() {
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
            // The endpoint of the node itself has the node's name.
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
        tokio::time::timeout(WAIT_TIMEOUT, end).await
    });
    assert!(end.is_ok(), "transitd never came back");
    // Nothing of the thief's stays.
    for pod in tenants().network("red-web") {
        for other in tenants().network("red-web") {
            pod.ping(other.address, crate::support::REACHED).unwrap();
        }
    }
}

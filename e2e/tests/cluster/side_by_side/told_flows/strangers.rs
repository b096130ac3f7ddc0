//! What thuban-observe answers to those who have no right, and to requests that make no sense.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use thuban_cluster::Cluster;
use thuban_proto::observe::Report;
use thuban_proto::observe::observe_client::ObserveClient;
use thuban_proto::{OBSERVE_TLS_NAME, OBSERVE_TOKEN_AUDIENCE, OPERATOR_TOKEN_AUDIENCE};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};

use super::{
    NAMESPACE, Observer, PORT, VIEWER, ask, authority, installed, of_all, token_of_all, token_of_viewer,
};
use crate::actor::token_of_node;
use crate::operator_stream::{WAIT_TIMEOUT, runtime};

/// From here strangers ask, and many of them from another node: thuban-observe bounds what a peer may have reviewed.
const NODE: &str = "node-c";
const CROWDED: &str = "node-b";
const GRAPH: &str = "/v1/graph?all=true";
/// Signs claims, as the API server signs tokens of ServiceAccounts. `$1`: its key, `$2`: the claims.
const SIGN: &str = r#"
    encode() { base64 -w0 | tr '+/' '-_' | tr -d '='; }
    text=$(printf '{"alg":"RS256","typ":"JWT"}' | encode).$(printf '%s' "$2" | encode)
    printf '%s.%s' "$text" "$(printf '%s' "$text" | openssl dgst -sha256 -sign "$1" -binary | encode)"
"#;
/// How many requests, and how many connections without TLS, are random.
const RANDOM_REQUESTS: usize = 25;
const RANDOM_CONNECTIONS: usize = 10;
/// What the random ones are made of: all that curl sends as it is, and that may mean something to somebody.
const CHARACTERS: &[u8] = b"/?&=%.-_~!$'()*+,;:@abcdefnptv0123456789\"<>[]{}|\\^`";

/// Returns a token of the administrators' viewer that was good for an hour and ends so many seconds from now.
fn token_that_ends(cluster: &Cluster, seconds: i64) -> Result<String> {
    let uid = [
        "get",
        "serviceaccount",
        "-n",
        NAMESPACE,
        VIEWER,
        "-o",
        "jsonpath={.metadata.uid}",
    ];
    let uid = cluster.kubectl(&uid)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let end = i64::try_from(now)? + seconds;
    let begin = end - 3600;
    let claims = json!({
        "iss": "https://kubernetes.default.svc", "aud": [OBSERVE_TOKEN_AUDIENCE],
        "exp": end, "iat": begin, "nbf": begin,
        "sub": format!("system:serviceaccount:{NAMESPACE}:{VIEWER}"),
        "kubernetes.io": {"namespace": NAMESPACE, "serviceaccount": {"name": VIEWER, "uid": uid}},
    });
    let key = cluster.instance().state().join("pki/service-accounts.key");
    let output = Command::new("sh")
        .args(["-c", SIGN, "sh"])
        .arg(key)
        .arg(claims.to_string())
        .output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Asserts that the pod is this one, has not been started again, and answers at once who has a right.
fn assert_serves(cluster: &Cluster, before: &Observer) {
    of_all(cluster, "/v1/graph", "").unwrap();
    assert_eq!(Observer::find(cluster).unwrap(), *before);
}

#[test]
fn tokens_that_prove_no_right_are_refused() {
    let cluster = installed();
    let observer = Observer::find(cluster).unwrap();
    let made = |arguments: &[&str]| {
        let token = cluster.kubectl(&[&["create", "token"][..], arguments].concat());
        token.unwrap().trim().to_owned()
    };
    let audience = format!("--audience={OBSERVE_TOKEN_AUDIENCE}");
    let get = |token: Option<&str>| ask(cluster, NODE, GRAPH, token, &[]).unwrap();
    // Without this one, an expired token may be refused for another reason.
    let good = token_that_ends(cluster, 600).unwrap();
    let good = get(Some(good.as_str()));
    assert_eq!(good.status, 200, "{good:?}");
    for (what, token, status, word) in [
        ("none", None, 401, "bearer token"),
        (
            "garbage",
            Some("a.b.c".to_owned()),
            401,
            "does not know the token",
        ),
        (
            "an expired one",
            Some(token_that_ends(cluster, -3600).unwrap()),
            401,
            "does not know the token",
        ),
        (
            "one for the API server",
            Some(made(&["-n", NAMESPACE, VIEWER])),
            401,
            "does not know the token",
        ),
        (
            "one for the operator",
            Some(token_of_node(cluster, NODE, OPERATOR_TOKEN_AUDIENCE).unwrap()),
            401,
            "does not know the token",
        ),
        (
            "one of a droplet",
            Some(token_of_node(cluster, NODE, OBSERVE_TOKEN_AUDIENCE).unwrap()),
            403,
            "may not get flows.thuban.dev",
        ),
        (
            "one of another account",
            Some(made(&["-n", "red", "default", &audience])),
            403,
            "may not get flows.thuban.dev",
        ),
    ] {
        let answer = get(token.as_deref());
        assert_eq!(answer.status, status, "{what}: {answer:?}");
        assert!(answer.body.contains(word), "{what}: {answer:?}");
        assert!(!answer.body.contains("node-"), "{what}: {answer:?}");
    }
    assert_serves(cluster, &observer);
}

fn random(length: usize) -> String {
    let characters = (0..length).filter_map(|_| fastrand::choice(CHARACTERS));
    characters.map(|byte| char::from(*byte)).collect()
}

/// Sends bytes that are no TLS.
fn send_noise(cluster: &Cluster, address: SocketAddr) -> Result<()> {
    let mut bytes = vec![0_u8; fastrand::usize(1..64 << 10)];
    fastrand::fill(&mut bytes);
    cluster.in_node(CROWDED, || {
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(3))?;
        stream.set_write_timeout(Some(Duration::from_secs(3)))?;
        // The server may end it before it has read all.
        let _ = stream.write_all(&bytes);
        Ok(())
    })
}

#[test]
fn requests_that_make_no_sense_are_refused_and_harm_nobody() {
    let cluster = installed();
    let observer = Observer::find(cluster).unwrap();
    let token = token_of_all(cluster).unwrap();
    let ask = |target: &str, more: &[&str]| ask(cluster, CROWDED, target, Some(token), more);
    for (target, status, word) in [
        ("/v1", 404, "no such path"),
        ("/v1/nothing?all=true", 404, "no such path"),
        ("/metrics", 404, "no such path"),
        ("/assets/../index.html", 404, "no such path"),
        ("/assets/../../../../etc/passwd", 404, "no such path"),
        ("/assets/%2e%2e/%2e%2e/etc/passwd", 404, "no such path"),
        ("/v1/graph", 400, "namespace"),
        ("/v1/graph?namespace=red&all=true", 400, "namespace"),
        ("/v1/graph?namespace=red/../blue", 400, "namespace"),
        ("/v1/graph?all=true&sudo=true", 400, "sudo"),
        ("/v1/flows?all=true&all=true", 400, "twice"),
        ("/v1/flows?all=true&last=-1", 400, "last"),
        ("/v1/top?all=true&by=password", 400, "by"),
    ] {
        let answer = ask(target, &[]).unwrap();
        assert_eq!(answer.status, status, "{target}: {answer:?}");
        assert!(answer.body.contains(word), "{target}: {answer:?}");
    }
    let huge = format!("X-Huge: {}", "a".repeat(100_000));
    let long = format!("{GRAPH}&{}", "a".repeat(100_000));
    let headers: Vec<String> = (0..500).map(|number| format!("X-{number}: a")).collect();
    let many: Vec<&str> = headers
        .iter()
        .flat_map(|header| ["--header", header.as_str()])
        .collect();
    let cases: [(&str, &str, &[&str]); 6] = [
        ("a huge header", GRAPH, &["--header", huge.as_str()]),
        (
            "a huge header by HTTP/2",
            GRAPH,
            &["--http2", "--header", huge.as_str()],
        ),
        ("a long target", long.as_str(), &[]),
        ("many headers", GRAPH, many.as_slice()),
        ("POST", GRAPH, &["--request", "POST"]),
        ("DELETE", GRAPH, &["--request", "DELETE"]),
    ];
    for (what, target, more) in cases {
        let answer = ask(target, more);
        // The server may end the connection while curl sends.
        let is_taken = answer.as_ref().is_ok_and(|answer| answer.status < 400);
        assert!(!is_taken, "{what}: {answer:?}");
    }
    for _ in 0..RANDOM_REQUESTS {
        let target = format!("/v1/{}", random(fastrand::usize(1..200)));
        let answer = ask(&target, &[]);
        let is_taken = answer.as_ref().is_ok_and(|answer| answer.status < 400);
        assert!(!is_taken, "{target}: {answer:?}");
    }
    let address = SocketAddr::new(observer.address.into(), PORT);
    for _ in 0..RANDOM_CONNECTIONS {
        send_noise(cluster, address).unwrap();
    }
    // Each is a token that nobody knows.
    for _ in 0..RANDOM_REQUESTS {
        let token = random(fastrand::usize(1..2000));
        let answer = super::ask(cluster, CROWDED, GRAPH, Some(&token), &[]);
        let is_taken = answer.as_ref().is_ok_and(|answer| answer.status < 400);
        assert!(!is_taken, "{token}: {answer:?}");
    }
    assert_serves(cluster, &observer);
}

/// Opens a stream of reports as this droplet, from a node.
fn report(cluster: &Cluster, token: Option<&str>, droplet: &str) -> Result<Result<(), Status>> {
    let authority = authority(cluster)?;
    let address = SocketAddr::new(Observer::find(cluster)?.address.into(), PORT);
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(authority))
        .domain_name(OBSERVE_TLS_NAME);
    let endpoint = Endpoint::from_shared(format!("https://{address}"))?.tls_config(tls)?;
    let first = Report {
        droplet: droplet.to_owned(),
        ..Report::default()
    };
    let mut request = Request::new(tokio_stream::iter([first]));
    if let Some(token) = token {
        let value: MetadataValue<Ascii> = format!("Bearer {}", token.trim()).parse()?;
        request.metadata_mut().insert("authorization", value);
    }
    cluster.in_node(NODE, move || {
        let work = async {
            let mut client = ObserveClient::new(endpoint.connect().await?);
            let opened = client.report(request).await;
            let mut answers = match opened {
                Ok(answers) => answers.into_inner(),
                Err(status) => return anyhow::Ok(Err(status)),
            };
            anyhow::Ok(answers.message().await.map(|_| ()))
        };
        runtime()
            .block_on(async { tokio::time::timeout(WAIT_TIMEOUT, work).await })
            .context("thuban-observe says nothing")?
    })
}

#[test]
fn nobody_reports_flows_but_a_droplet_its_own() {
    let cluster = installed();
    let observer = Observer::find(cluster).unwrap();
    let viewer = token_of_viewer(cluster, NAMESPACE).unwrap();
    let of_node = |audience: &str| token_of_node(cluster, NODE, audience).unwrap();
    let (own, of_operator) = (of_node(OBSERVE_TOKEN_AUDIENCE), of_node(OPERATOR_TOKEN_AUDIENCE));
    let (stranger, another) = (Code::Unauthenticated, Code::PermissionDenied);
    for (what, token, droplet, code) in [
        ("no token", None, NODE, stranger),
        ("garbage", Some("not.a.token"), NODE, stranger),
        (
            "a token for the operator",
            Some(of_operator.as_str()),
            NODE,
            stranger,
        ),
        ("a viewer's token", Some(viewer.as_str()), NODE, another),
        ("another droplet's name", Some(own.as_str()), "node-a", another),
        ("no name", Some(own.as_str()), "", another),
    ] {
        let refused = report(cluster, token, droplet).unwrap();
        let refused = refused.expect_err(what);
        assert_eq!(refused.code(), code, "{what}: {refused}");
    }
    assert_serves(cluster, &observer);
}

//! What is printed of flows, and how they are asked for.

use clap::Parser;
use serde_json::{Value, json};

use super::{Printer, target};
use crate::arguments::{Arguments, Flows, Format, Verb};
use crate::observe::testing::Played;
use crate::observe::{Asked, ObserveError};
use crate::report::Verdict;

fn flows(line: &str) -> Flows {
    let line = format!("kubectl-thuban flows {line}");
    let arguments = Arguments::try_parse_from(line.split_whitespace()).unwrap();
    let Verb::Flows(flows) = arguments.verb else {
        panic!("another verb");
    };
    flows
}

fn flow() -> Value {
    json!({"time_unix_ms": 1_795_960_931_000_u64, "event": "first", "vpc": "red", "vni": 7,
        "from": {"namespace": "red", "pod": "web-0", "address": "10.0.1.3", "port": 40112, "network": "red-web"},
        "to": {"namespace": "red", "pod": "db-0", "address": "10.0.2.4", "port": 5432, "network": "red-db"},
        "protocol": "tcp", "packets": 6, "bytes": 4200, "tcp_flags": ["SYN", "ACK"], "verdict": "passed",
        "reason": "direct", "droplet": "node-b", "next": "node-c", "denied_by": null})
}

fn lines(format: Format, told: &[Value]) -> (Vec<String>, Printer) {
    let mut printer = Printer::new(format);
    let text: String = told
        .iter()
        .map(|told| printer.line(&told.to_string()).unwrap())
        .collect();
    (text.lines().map(str::to_owned).collect(), printer)
}

#[test]
fn flows_have_the_names_of_their_ends() {
    let mut outside = flow();
    outside["to"] =
        json!({"namespace": null, "pod": null, "address": "8.8.8.8", "port": 53, "outside": true});
    outside["protocol"] = json!("udp");
    (outside["next"], outside["event"]) = (Value::Null, json!("ended"));
    let mut service = flow();
    service["to"] =
        json!({"namespace": "red", "pod": null, "service": "red/shop", "address": "fd00::7", "port": 0});
    let (rows, printer) = lines(Format::Table, &[flow(), outside, service]);
    assert_eq!(
        rows,
        [
            "TIME      FROM              TO                PROTO   PKTS  VERDICT",
            "14:02:11  red/web-0:40112   red/db-0:5432     tcp        6  direct, node-b > node-c",
            "14:02:11  red/web-0:40112   8.8.8.8:53        udp        6  direct, node-b (ended)",
            "14:02:11  red/web-0:40112   svc/red/shop      tcp        6  direct, node-b > node-c",
        ]
    );
    assert_eq!(printer.verdict(), Verdict::Good);
}

#[test]
fn drops_have_their_meaning_or_the_policy() {
    let mut dropped = flow();
    (dropped["verdict"], dropped["reason"]) = (json!("dropped"), json!("outside_vpc"));
    dropped["next"] = Value::Null;
    let mut denied = dropped.clone();
    (denied["reason"], denied["denied_by"]) =
        (json!("policy_ingress"), json!({"policy": "red/web", "rule": 0}));
    let (rows, printer) = lines(Format::Table, &[dropped.clone(), denied]);
    assert!(rows[1].contains("  DROPPED outside_vpc: "), "{rows:?}");
    assert!(
        rows[2].ends_with("  DROPPED policy_ingress: denied by red/web rule 0"),
        "{rows:?}"
    );
    assert_eq!(printer.verdict(), Verdict::Found);
    let (rows, _) = lines(Format::Wide, &[dropped]);
    assert!(
        rows[0].contains("BYTES  VPC") && rows[0].contains("FLAGS"),
        "{rows:?}"
    );
    assert!(
        rows[1].contains(" 4200  red ") && rows[1].contains("SYN,ACK"),
        "{rows:?}"
    );
    assert!(rows[1].contains(", node-b -> ask the VPC's owner"), "{rows:?}");
}

#[test]
fn a_withheld_end_is_shown_as_withheld() {
    let mut seen = flow();
    seen["to"] = json!({"withheld": true});
    seen["from"] =
        json!({"namespace": null, "pod": null, "node": "node-a", "address": "192.0.2.11", "port": 0});
    (seen["droplet"], seen["next"]) = (json!(""), Value::Null);
    let (rows, _) = lines(Format::Table, &[seen]);
    assert!(
        rows[1].ends_with("  node/node-a       (withheld)        tcp        6  direct"),
        "{rows:?}"
    );
}

#[test]
fn lost_events_are_told_by_their_place() {
    let lost = json!({"droplet": "node-b",
        "lost": {"budget": 14, "table": 0, "ring": 2, "stream": 0, "reader": 0}});
    let slow = json!({"lost": {"reader": 7}, "droplet": ""});
    let (rows, printer) = lines(Format::Table, &[lost.clone(), slow]);
    assert_eq!(
        rows,
        [
            "          lost: 14 events on node-b (budget)",
            "          lost: 2 events on node-b (ring)",
            "          lost: 7 events (reader)",
        ]
    );
    assert_eq!((printer.flows, printer.drops), (0, 0));
    let (rows, _) = lines(Format::Json, std::slice::from_ref(&lost));
    assert_eq!(serde_json::from_str::<Value>(&rows[0]).unwrap(), lost);
}

#[test]
fn what_is_no_flow_is_printed_as_it_is() {
    let (rows, _) = lines(Format::Table, &[json!({"more": 1})]);
    assert_eq!(rows, ["{\"more\":1}"]);
    let (rows, printer) = lines(Format::Yaml, &[flow()]);
    assert_eq!((rows[0].as_str(), printer.flows), ("---", 1));
}

#[test]
fn filters_are_parameters() {
    let red = Asked::Namespace("red".to_owned());
    let plain = target(&flows("-n red"), &red);
    assert_eq!(plain.0, "/v1/flows?namespace=red");
    let line = "-f --pod web-0 --vpc red --peer red/db-0 --verdict dropped --since 60 --last 5";
    assert_eq!(
        target(&flows(line), &red).0,
        "/v1/flows?namespace=red&vpc=red&pod=web-0&peer=red%2Fdb-0&verdict=dropped&since=60&last=5&follow=true"
    );
}

#[tokio::test]
async fn flows_are_read_with_a_token_over_verified_tls() {
    let line = flow().to_string();
    let played = Played::start(
        200,
        &[
            &format!("{line}\n\n{}", &line[..20]),
            &format!("{}\n", &line[20..]),
        ],
    )
    .await;
    played.gate.notify_one();
    let mut printer = Printer::new(Format::Json);
    super::print(&played.relay, &flows("-n red"), &mut printer)
        .await
        .unwrap();
    assert_eq!(printer.flows, 2);
    let asked = played.asked();
    assert!(
        asked[0].starts_with("GET /v1/flows?namespace=red HTTP/1.1\r\n"),
        "{asked:?}"
    );
    assert!(
        asked[0].contains("authorization: Bearer secret-1\r\n"),
        "{asked:?}"
    );
}

#[tokio::test]
async fn what_the_viewer_may_not_see_names_the_role() {
    let played = Played::start(403, &["{\"error\": \"no\"}"]).await;
    let mut printer = Printer::new(Format::Table);
    let error = super::print(&played.relay, &flows(""), &mut printer)
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("red/thuban-viewer may not get flows.thuban.dev of namespace red")
            && error.contains("ClusterRole thuban-flows-view to it by a RoleBinding"),
        "{error}"
    );
}

#[tokio::test]
async fn a_refused_token_is_renewed_once() {
    let played = Played::start(401, &["{\"error\": \"the token is of nobody\"}"]).await;
    let mut printer = Printer::new(Format::Table);
    let error = super::print(&played.relay, &flows(""), &mut printer)
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("401 Unauthorized: the token is of nobody"),
        "{error}"
    );
    let tokens: Vec<bool> = played
        .asked()
        .iter()
        .zip(["secret-1", "secret-2"])
        .map(|(asked, token)| asked.contains(token))
        .collect();
    assert_eq!(tokens, [true, true]);
}

#[tokio::test]
async fn a_server_of_another_ca_gets_no_token() {
    let played = Played::of_another_ca().await;
    let error = played.relay.ask(&target(&flows(""), &played.relay.asked)).await;
    assert!(matches!(error, Err(ObserveError::Connect(_))));
    assert!(played.asked().is_empty());
}

//! Tests of the names that a VPC's pods learn, and of those that they don't.

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::RecordType::{A, ANY, CNAME, PTR, SRV};
use hickory_proto::rr::{RData, RecordType, rdata};

use super::upstream::{a, alias, always, cluster, negative, ptr, record, reply, srv};
use super::{BLUE, RED, Rig, data, has_soa, in_cluster, name, query};
use crate::metrics::DnsResult;

#[tokio::test]
async fn each_vpc_sees_its_own_and_what_is_shared() {
    let rig = Rig::new(cluster()).await;
    for (source, asked, sees) in [
        (RED, "web.red.svc", true),
        (RED, "shared.blue.svc", true),
        (RED, "web.blue.svc", false),
        (BLUE, "web.blue.svc", true),
        (BLUE, "shared.blue.svc", true),
        (BLUE, "web.red.svc", false),
    ] {
        let answer = rig.ask(source, &query(&in_cluster(asked), A)).await;
        assert_eq!(!answer.answers.is_empty(), sees, "{source} {asked}: {answer}");
        if !sees {
            assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
            assert!(has_soa(&answer), "{answer}");
        }
    }
    assert_eq!(rig.upstream.asked().len(), 4, "what is refused is not asked for");
    assert_eq!(rig.metrics.count(DnsResult::Refused), 2);
    assert_eq!(rig.metrics.count(DnsResult::Forwarded), 4);
}

#[tokio::test]
async fn what_is_not_there_and_what_is_not_for_the_vpc_look_the_same() {
    let rig = Rig::new(cluster()).await;
    let bytes = async |asked: &str| {
        let mut message = query(&in_cluster(asked), A);
        message.metadata.id = 7;
        rig.raw(RED, &message.to_vec().unwrap()).await
    };
    // Asked for, not there; not asked for, there.
    let refused = bytes("moved.red.svc").await;
    assert_eq!(
        bytes("other.red.svc").await,
        replace(&refused, b"moved", b"other")
    );
    assert_eq!(rig.upstream.asked().len(), 1);
}

fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).position(|part| part == from).unwrap();
    let mut replaced = bytes.to_vec();
    replaced[at..at + to.len()].copy_from_slice(to);
    replaced
}

#[tokio::test]
async fn names_with_names_below_them_have_no_data() {
    let rig = Rig::new(cluster()).await;
    for asked in ["svc", "pod", "red.svc", "red.pod", "blue.svc"] {
        let answer = rig.ask(RED, &query(&in_cluster(asked), A)).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::NoError, "{asked}");
        assert!(answer.answers.is_empty() && has_soa(&answer), "{answer}");
    }
    assert!(rig.upstream.asked().is_empty());
    assert_eq!(rig.metrics.count(DnsResult::NoData), 5);
}

/// Returns the answer's bytes for two upstreams, one which has the hidden name and one which hasn't.
async fn both(asked: &str, of_type: RecordType, has: fn(&Message, &str) -> Message) -> [Vec<u8>; 2] {
    let with = Rig::new(always(has)).await;
    let without = Rig::new(always(|query, _| negative(query, ResponseCode::NoError))).await;
    let mut message = query(asked, of_type);
    message.metadata.id = 99;
    let bytes = message.to_vec().unwrap();
    let answers = [with.raw(RED, &bytes).await, without.raw(RED, &bytes).await];
    assert_eq!(
        with.metrics.count(DnsResult::Filtered),
        1,
        "it would have been said"
    );
    answers
}

#[tokio::test]
async fn an_alias_out_of_the_view_tells_nothing() {
    let asked = in_cluster("ext.red.svc");
    let [with, without] = both(&asked, A, |query, owner| {
        let hidden = "db.blue.svc.cluster.local.";
        reply(query, vec![alias(owner, hidden), a(hidden, 9)])
    })
    .await;
    assert_eq!(with, without);
    // By one that it may see.
    let [with, without] = both(&asked, A, |query, owner| {
        let (seen, hidden) = ("b.red.svc.cluster.local.", "db.blue.svc.cluster.local.");
        reply(query, vec![alias(owner, seen), alias(seen, hidden), a(hidden, 9)])
    })
    .await;
    assert_eq!(with, without);
    for of_type in [CNAME, ANY] {
        let [with, without] = both(&asked, of_type, |query, owner| {
            reply(query, vec![alias(owner, "db.BLUE.svc.cluster.local.")])
        })
        .await;
        assert_eq!(with, without);
    }
}

#[tokio::test]
async fn aliases_to_what_it_may_see_and_to_the_world_are_left() {
    for target in [
        "web.red.svc.cluster.local.",
        "shared.blue.svc.cluster.local.",
        "www.example.com.",
    ] {
        let rig = Rig::new(always(move |query, owner| {
            reply(query, vec![alias(owner, target), a(target, 9)])
        }))
        .await;
        let answer = rig.ask(RED, &query(&in_cluster("ext.red.svc"), A)).await;
        assert_eq!(data(&answer), [target, "10.96.0.9"]);
        assert_eq!(rig.metrics.count(DnsResult::Forwarded), 1);
    }
}

#[tokio::test]
async fn a_name_outside_cannot_lead_to_anothers_service() {
    let rig = Rig::new(always(|query, owner| {
        let hidden = "db.blue.svc.cluster.local.";
        reply(query, vec![alias(owner, hidden), a(hidden, 9)])
    }))
    .await;
    let answer = rig.ask(RED, &query("www.example.com.", A)).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
    assert!(
        answer.answers.is_empty() && answer.authorities.is_empty(),
        "{answer}"
    );
    assert_eq!(rig.metrics.count(DnsResult::Filtered), 1);
}

#[tokio::test]
async fn targets_are_looked_through_one_by_one() {
    let rig = Rig::new(always(|query, owner| {
        let (seen, hidden) = ("web.red.svc.cluster.local.", "db.blue.svc.cluster.local.");
        let mut message = reply(query, vec![srv(owner, hidden), srv(owner, seen)]);
        message.metadata.authentic_data = true;
        message.additionals = vec![a(hidden, 9), a(seen, 7)];
        message
    }))
    .await;
    let asked = in_cluster("_http._tcp.ext.red.svc");
    let answer = rig.ask(RED, &query(&asked, SRV)).await;
    assert_eq!(data(&answer), ["0 50 80 web.red.svc.cluster.local."]);
    assert!(answer.additionals.is_empty(), "{answer}");
    assert!(!answer.metadata.authentic_data);
    assert_eq!(answer.queries, query(&asked, SRV).queries);

    let mail = |host: &str| RData::MX(rdata::MX::new(10, name(host)));
    let rig = Rig::new(always(move |query, owner| {
        let hosts = ["db.blue.svc.cluster.local.", "mail.example.com."];
        reply(query, hosts.map(|host| record(owner, mail(host))).to_vec())
    }))
    .await;
    let answer = rig.ask(RED, &query("example.com.", RecordType::MX)).await;
    assert_eq!(data(&answer), ["10 mail.example.com."]);
}

#[tokio::test]
async fn what_only_helps_names_nothing_hidden_either() {
    let rig = Rig::new(always(|query, owner| {
        let mut message = reply(query, vec![srv(owner, "www.example.com.")]);
        message.additionals = vec![alias("www.example.com.", "db.blue.svc.cluster.local.")];
        message
    }))
    .await;
    let answer = rig.ask(RED, &query("_x._tcp.example.com.", SRV)).await;
    assert_eq!(answer.answers.len(), 1);
    assert!(answer.additionals.is_empty(), "{answer}");
}

#[tokio::test]
async fn addresses_lead_to_visible_names_alone() {
    let rig = Rig::new(always(|query, owner| {
        let (seen, hidden) = ("web.red.svc.cluster.local.", "db.blue.svc.cluster.local.");
        match owner.split('.').next().unwrap() {
            "7" => reply(query, vec![ptr(owner, seen)]),
            "8" => reply(query, vec![ptr(owner, seen), ptr(owner, hidden)]),
            "9" => reply(query, vec![ptr(owner, hidden)]),
            "10" => reply(query, vec![ptr(owner, "router.example.com.")]),
            _ => negative(query, ResponseCode::NXDomain),
        }
    }))
    .await;
    let asked = |last: u8| query(&format!("{last}.0.96.10.in-addr.arpa."), PTR);
    let seen = ["web.red.svc.cluster.local."];
    assert_eq!(data(&rig.ask(RED, &asked(7)).await), seen);
    assert_eq!(data(&rig.ask(RED, &asked(8)).await), seen);
    assert_eq!(
        data(&rig.ask(BLUE, &asked(9)).await),
        ["db.blue.svc.cluster.local."]
    );
    assert_eq!(data(&rig.ask(RED, &asked(10)).await), ["router.example.com."]);
    let hidden = rig.ask(RED, &asked(9)).await;
    let nobodys = rig.ask(RED, &asked(11)).await;
    assert_eq!(hidden.metadata.response_code, ResponseCode::NXDomain);
    assert!(hidden.answers.is_empty() && has_soa(&hidden));
    assert_eq!(hidden.authorities, nobodys.authorities);
    let mut alike = hidden.metadata;
    alike.id = nobodys.metadata.id;
    assert_eq!(alike, nobodys.metadata, "nothing tells them apart");
}

#[tokio::test]
async fn by_tcp_the_same_is_seen() {
    let rig = Rig::new(cluster()).await;
    let seen = rig.ask_by_tcp(RED, &query(&in_cluster("web.red.svc"), A)).await;
    assert_eq!(data(&seen), ["10.96.0.7"]);
    let hidden = rig.ask_by_tcp(RED, &query(&in_cluster("web.blue.svc"), A)).await;
    assert_eq!(hidden.metadata.response_code, ResponseCode::NXDomain);
    assert!(hidden.answers.is_empty() && has_soa(&hidden));
    assert_eq!(rig.upstream.asked().len(), 1);
}

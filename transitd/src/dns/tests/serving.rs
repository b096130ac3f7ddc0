//! Tests of messages as such: which are sent on, which come back, and which are answered here.

use std::net::UdpSocket;
use std::sync::Arc;

use hickory_proto::op::{Edns, Message, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{DNSClass, Name, RecordType};
use tokio::io::AsyncWriteExt;

use super::super::upstream::Transport;
use super::super::{Limits, Server, Settings};
use super::upstream::{Asked, Upstream, a, always, cluster, reply};
use super::{BLUE, RED, Rig, STRANGER, data, in_cluster, name, query, take};
use crate::metrics::DnsResult;

#[tokio::test]
async fn the_case_of_a_name_comes_back_as_it_went() {
    // This upstream lowers it.
    let rig = Rig::new(always(|query, owner| {
        let mut message = reply(query, vec![a(&owner.to_lowercase(), 7)]);
        message.queries[0].name = query.queries[0].name.to_lowercase();
        message
    }))
    .await;
    let asked = query("wEb.ReD.svc.Cluster.LOCAL.", RecordType::A);
    let answer = rig.ask(RED, &asked).await;
    assert_eq!(answer.metadata.id, asked.metadata.id);
    assert!(answer.queries[0].name.eq_case(&asked.queries[0].name), "{answer}");
    assert_eq!(data(&answer), ["10.96.0.7"]);
    let (sent, _) = &rig.upstream.asked()[0];
    assert!(sent.queries[0].name.eq_case(&asked.queries[0].name), "{sent}");
    // Refused names keep their case too.
    let asked = query("wEb.bLue.svc.Cluster.LOCAL.", RecordType::A);
    let answer = rig.ask(RED, &asked).await;
    assert!(answer.queries[0].name.eq_case(&asked.queries[0].name), "{answer}");
}

#[tokio::test]
async fn answers_that_need_no_change_come_byte_by_byte() {
    let rig = Rig::new(cluster()).await;
    for asked in ["www.example.com.", "web.red.svc.cluster.local."] {
        let asked = query(asked, RecordType::A);
        let expected = reply(&asked, vec![a(&asked.queries[0].name.to_ascii(), 7)]);
        assert_eq!(
            rig.raw(RED, &asked.to_vec().unwrap()).await,
            expected.to_vec().unwrap()
        );
    }
}

#[tokio::test]
async fn each_query_has_an_id_and_a_port_of_its_own() {
    let rig = Rig::new(cluster()).await;
    let mut asked = query("www.example.com.", RecordType::A);
    asked.metadata.id = 1;
    for _ in 0..16 {
        rig.ask(RED, &asked).await;
    }
    let seen = rig.upstream.asked();
    let mut ids: Vec<u16> = seen.iter().map(|(message, _)| message.metadata.id).collect();
    let mut ports: Vec<u16> = seen.iter().map(|(_, client)| client.port()).collect();
    for numbers in [&mut ids, &mut ports] {
        numbers.sort_unstable();
        numbers.dedup();
        // Chance may make two alike.
        assert!(numbers.len() > 8, "{numbers:?}");
        let is_counting = numbers.windows(2).all(|pair| pair[1] == pair[0] + 1);
        assert!(!is_counting, "{numbers:?}");
    }
}

#[tokio::test]
async fn forged_answers_are_not_believed() {
    let rig = Rig::new(Arc::new(|asked: &Asked<'_>| {
        let owner = asked.message.queries[0].name.to_ascii();
        let good = reply(asked.message, vec![a(&owner, 7)]);
        let forged = reply(asked.message, vec![a(&owner, 66)]);
        let mut other_id = forged.clone();
        other_id.metadata.id ^= 1;
        let mut other_name = forged.clone();
        other_name.queries[0].name = name("www.example.org.");
        let mut other_type = forged.clone();
        other_type.queries[0].query_type = RecordType::AAAA;
        let mut no_question = forged.clone();
        no_question.queries.clear();
        let mut a_query = asked.message.clone();
        a_query.answers.clone_from(&forged.answers);
        // The answer is right in everything but its source.
        let elsewhere = UdpSocket::bind("127.0.0.1:0").unwrap();
        elsewhere
            .send_to(&forged.to_vec().unwrap(), asked.client)
            .unwrap();
        let messages = [other_id, other_name, other_type, no_question, a_query, good];
        let mut bytes: Vec<Vec<u8>> = messages.iter().map(|message| message.to_vec().unwrap()).collect();
        bytes.insert(0, vec![0; 5]);
        bytes
    }))
    .await;
    let answer = rig.ask(RED, &query("www.example.com.", RecordType::A)).await;
    assert_eq!(data(&answer), ["10.96.0.7"]);
    assert_eq!(rig.metrics.count(DnsResult::Forwarded), 1);
}

fn with_edns(mut message: Message, payload: u16, dnssec_ok: bool) -> Message {
    let mut edns = Edns::new();
    edns.set_max_payload(payload).set_dnssec_ok(dnssec_ok);
    edns.options_mut().insert(EdnsOption::Unknown(10, vec![1; 8]));
    message.edns = Some(edns);
    message
}

#[tokio::test]
async fn edns_is_passed_on_by_what_it_says() {
    let rig = Rig::new(cluster()).await;
    let plain = query("www.example.com.", RecordType::A);
    assert!(rig.ask(RED, &plain).await.edns.is_none());
    for (payload, asked_for, dnssec_ok) in [(4096, 1232, true), (800, 800, false), (0, 512, false)] {
        let answer = rig.ask(RED, &with_edns(plain.clone(), payload, dnssec_ok)).await;
        assert!(answer.edns.is_some() && !answer.metadata.truncation, "{answer}");
        let seen = rig.upstream.asked();
        let edns = seen.last().unwrap().0.edns.as_ref().unwrap();
        assert_eq!(edns.max_payload(), asked_for);
        assert_eq!(edns.flags().dnssec_ok, dnssec_ok);
        assert!(edns.options().as_ref().is_empty(), "options go one hop");
    }
    assert!(rig.upstream.asked()[0].0.edns.is_none());
    // Answers that are made here have it, too.
    let refused = query(&in_cluster("web.blue.svc"), RecordType::A);
    assert!(rig.ask(RED, &refused).await.edns.is_none());
    assert!(
        rig.ask(RED, &with_edns(refused, 4096, false))
            .await
            .edns
            .is_some()
    );
    // EDNS of a version that nobody knows yet.
    let mut newer = with_edns(plain, 4096, false);
    newer.edns.as_mut().unwrap().set_version(1);
    let answer = rig.ask(RED, &newer).await;
    // Two response codes have this number, and the decoder takes the other one.
    assert_eq!(
        u16::from(answer.metadata.response_code),
        u16::from(ResponseCode::BADVERS)
    );
}

#[tokio::test]
async fn what_is_too_long_for_udp_is_had_by_tcp() {
    let rig = Rig::new(cluster()).await;
    let asked = query(&in_cluster("big.red.svc"), RecordType::TXT);
    for asked in [asked.clone(), with_edns(asked.clone(), 4096, false)] {
        let answer = rig.ask(RED, &asked).await;
        assert!(
            answer.metadata.truncation && answer.answers.is_empty(),
            "{answer}"
        );
        assert_eq!(answer.queries, asked.queries);
        let answer = rig.ask_by_tcp(RED, &asked).await;
        assert!(!answer.metadata.truncation);
        assert_eq!(answer.answers.len(), 16);
    }
    // Upstream said so itself, with some answers or none.
    let rig = Rig::new(always(|query, owner| {
        let some = if owner.starts_with("web") {
            vec![a(owner, 7)]
        } else {
            Vec::new()
        };
        let mut message = reply(query, some);
        message.metadata.truncation = true;
        message
    }))
    .await;
    for asked in ["web.red.svc", "none.red.svc"] {
        let answer = rig.ask(RED, &query(&in_cluster(asked), RecordType::A)).await;
        assert!(
            answer.metadata.truncation && answer.answers.is_empty(),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn what_is_no_plain_query_is_answered_here() {
    let rig = Rig::new(cluster()).await;
    let plain = query("www.example.com.", RecordType::A);
    let mut update = plain.clone();
    update.metadata.op_code = OpCode::Update;
    let mut chaos = query("version.bind.", RecordType::TXT);
    chaos.queries[0].query_class = DNSClass::CH;
    let mut two = plain.clone();
    two.queries
        .push(Query::query(name("web.blue.svc.cluster.local."), RecordType::A));
    let mut none = plain.clone();
    none.queries.clear();
    let mut answered = plain.clone();
    answered.answers.push(a("www.example.com.", 7));
    let mut root = plain.clone();
    root.queries[0] = Query::query(Name::root(), RecordType::AXFR);
    for (message, code, result) in [
        (update, ResponseCode::NotImp, DnsResult::Unsupported),
        (chaos, ResponseCode::Refused, DnsResult::Unsupported),
        (
            query("cluster.local.", RecordType::AXFR),
            ResponseCode::Refused,
            DnsResult::Unsupported,
        ),
        (
            query("cluster.local.", RecordType::IXFR),
            ResponseCode::Refused,
            DnsResult::Unsupported,
        ),
        (root, ResponseCode::Refused, DnsResult::Unsupported),
        (two, ResponseCode::FormErr, DnsResult::Malformed),
        (none, ResponseCode::FormErr, DnsResult::Malformed),
        (answered, ResponseCode::FormErr, DnsResult::Malformed),
    ] {
        let before = rig.metrics.count(result);
        let answer = rig.ask(RED, &message).await;
        assert_eq!(answer.metadata.id, message.metadata.id);
        assert_eq!(answer.metadata.response_code, code, "{message}");
        assert!(answer.answers.is_empty(), "{answer}");
        rig.counts(result, before + 1).await;
        assert_eq!(
            rig.ask_by_tcp(RED, &message).await.metadata.response_code,
            code,
            "{message}"
        );
    }
    assert!(rig.upstream.asked().is_empty());
}

#[tokio::test]
async fn strangers_get_no_answer_and_are_counted() {
    let rig = Rig::new(cluster()).await;
    let socket = rig.udp(STRANGER).await;
    let asked = query("www.example.com.", RecordType::A).to_vec().unwrap();
    socket.send(&asked).await.unwrap();
    rig.counts(DnsResult::UnknownSource, 1).await;
    assert!(take(&mut rig.tcp(STRANGER).await).await.is_none());
    assert_eq!(rig.metrics.hung_up_on(DnsResult::UnknownSource), 1);
    rig.assert_serves(RED, "www.example.com.").await;
    assert!(socket.try_recv(&mut [0; 512]).is_err(), "it was dropped");
    assert_eq!(rig.upstream.asked().len(), 1);
}

#[tokio::test]
async fn an_upstream_that_fails_is_said_so() {
    // Nobody listens there any more.
    let upstream = Upstream::start(cluster()).await;
    let gone = Upstream::start(cluster()).await;
    let nobody = gone.address;
    gone.stop();
    while tokio::net::TcpStream::connect(nobody).await.is_ok() {}
    let rig = Rig::before(upstream, nobody, Limits::default());
    let asked = query("www.example.com.", RecordType::A);
    assert_eq!(
        rig.ask(RED, &asked).await.metadata.response_code,
        ResponseCode::ServFail
    );
    let answer = rig.ask_by_tcp(RED, &asked).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    // Queries that need no upstream are still answered.
    let answer = rig
        .ask(RED, &query(&in_cluster("web.blue.svc"), RecordType::A))
        .await;
    assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
    assert_eq!(rig.metrics.count(DnsResult::Failed), 2);

    // One upstream says nothing, the other sends nonsense after the question.
    for junk in [None, Some(vec![0xff; 40])] {
        let limits = Limits {
            patience: std::time::Duration::from_millis(100),
            ..Limits::default()
        };
        let rig = Rig::with_limits(
            Arc::new(move |asked: &Asked<'_>| {
                let nonsense = junk.as_ref().map(|junk| {
                    let mut message = reply(asked.message, Vec::new()).to_vec().unwrap();
                    message[7] = 3;
                    message.extend(junk);
                    message
                });
                nonsense.into_iter().collect()
            }),
            limits,
        )
        .await;
        let answer = rig.ask(BLUE, &asked).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
        let answer = rig.ask_by_tcp(BLUE, &asked).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
        assert_eq!(rig.metrics.in_flight.get(), 0);
    }
}

#[tokio::test]
async fn answers_overtake_each_other_on_a_connection() {
    // By TCP, one name is never answered.
    let rig = Rig::new(Arc::new(|asked: &Asked<'_>| {
        let owner = asked.message.queries[0].name.to_ascii();
        let is_slow = owner.starts_with("slow");
        assert_eq!(asked.transport, Transport::Tcp);
        let answer = reply(asked.message, vec![a(&owner, 7)]).to_vec().unwrap();
        if is_slow { Vec::new() } else { vec![answer] }
    }))
    .await;
    let mut stream = rig.tcp(RED).await;
    let mut bytes = Vec::new();
    for id in 0..40_u16 {
        let asked = if id == 0 {
            "slow.example.com."
        } else {
            "www.example.com."
        };
        let mut message = query(asked, RecordType::A);
        message.metadata.id = id;
        let message = message.to_vec().unwrap();
        bytes.extend(u16::try_from(message.len()).unwrap().to_be_bytes());
        bytes.extend(message);
    }
    // The bytes are cut anywhere.
    for part in bytes.chunks(17) {
        stream.write_all(part).await.unwrap();
    }
    let mut ids = Vec::new();
    for _ in 1..40 {
        let answer = Message::from_vec(&take(&mut stream).await.unwrap()).unwrap();
        assert_eq!(data(&answer), ["10.96.0.7"]);
        ids.push(answer.metadata.id);
    }
    ids.sort_unstable();
    assert_eq!(ids, (1..40).collect::<Vec<u16>>());
    // The connection is half closed: queries in flight are still answered.
    stream.shutdown().await.unwrap();
    let answer = Message::from_vec(&take(&mut stream).await.unwrap()).unwrap();
    assert_eq!(answer.metadata.id, 0);
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    assert!(take(&mut stream).await.is_none());
}

#[tokio::test]
async fn it_stops_when_told_and_frees_its_port() {
    let nobody = "127.0.0.1:9".parse().unwrap();
    let settings = Settings::new(vec!["127.0.0.1:0".parse().unwrap()], nobody);
    let views = |_| None;
    let server = Server::bind(settings.clone(), views).unwrap();
    let addresses = server.local_addresses().collect();
    let settings = Settings {
        addresses,
        ..settings
    };
    assert!(Server::bind(settings.clone(), views).is_err(), "it is taken");
    server.serve(async {}).await;
    assert!(Server::bind(settings, views).is_ok());
}

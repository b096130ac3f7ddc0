//! Messages that no resolver sends.
//!
//! `THUBAN_SEED` chooses the cases; it is printed.

use fastrand::Rng;
use hickory_proto::op::Message;
use hickory_proto::rr::{Name, RData, Record, RecordType, rdata};
use tokio::io::AsyncWriteExt;

use super::super::filter::filter;
use super::super::query::Question;
use super::super::{Verdict, View, Zone};
use super::upstream::{a, alias, cluster, ptr, record, reply, srv};
use super::{BLUE, RED, Rig, eventually, in_cluster, name, query, red, take};
use crate::metrics::DnsResult;

fn seed() -> u64 {
    let set = std::env::var("THUBAN_SEED").ok();
    let seed = set.map_or_else(|| fastrand::u64(..1 << 32), |text| text.parse().unwrap());
    println!("THUBAN_SEED={seed}");
    seed
}

/// Changes, cuts, repeats or inserts bytes; or makes a message of nothing at all.
fn spoil(random: &mut Rng, proper: &[u8]) -> Vec<u8> {
    let mut bytes = proper.to_vec();
    for _ in 0..random.usize(1..6) {
        let at = random.usize(0..=bytes.len());
        match random.u8(0..7) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, random.u8(..)),
            // A pointer to somewhere.
            2 => bytes.splice(at..at, [0xc0, random.u8(0..64)]).for_each(drop),
            3 => {
                let part = bytes[at..].to_vec();
                bytes.extend(part);
            }
            4 => bytes = (0..random.usize(0..64)).map(|_| random.u8(..)).collect(),
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = if random.bool() {
                        random.u8(..)
                    } else {
                        *byte ^ (1 << random.u8(0..8))
                    };
                }
            }
        }
    }
    bytes.truncate(4000);
    bytes
}

fn proper_queries() -> Vec<Vec<u8>> {
    let mut queries = Vec::new();
    for asked in ["web.red.svc", "web.blue.svc", "_http._tcp.web.red.svc", "red.svc"] {
        for of_type in [RecordType::A, RecordType::SRV, RecordType::ANY] {
            let mut message = query(&in_cluster(asked), of_type);
            queries.push(message.to_vec().unwrap());
            message.edns = Some(hickory_proto::op::Edns::new());
            queries.push(message.to_vec().unwrap());
        }
    }
    queries
}

#[tokio::test]
async fn whatever_pods_send_neither_ends_nor_stalls_it() {
    let seed = seed();
    let rig = Rig::new(cluster()).await;
    let proper = proper_queries();
    let mut random = Rng::with_seed(seed);
    let socket = rig.udp(RED).await;
    for case in 0..4000 {
        let chosen = random.choice(&proper).unwrap();
        let bytes = spoil(&mut random, chosen);
        socket.send(&bytes).await.unwrap();
        if case % 20 == 0 {
            let mut stream = rig.tcp(RED).await;
            // The length is right or not.
            let length = if random.bool() {
                u16::try_from(bytes.len()).unwrap()
            } else {
                random.u16(..)
            };
            let _ = stream.write_u16(length).await;
            let _ = stream.write_all(&bytes).await;
            let _ = stream.shutdown().await;
            while take(&mut stream).await.is_some() {}
            rig.assert_serves(RED, &in_cluster("web.red.svc")).await;
        }
    }
    eventually(
        || rig.metrics.in_flight.get() == 0,
        || format!("in flight, seed {seed}"),
    )
    .await;
    eventually(
        || rig.metrics.connections.get() == 0,
        || format!("connections, seed {seed}"),
    )
    .await;
    rig.assert_serves(BLUE, &in_cluster("web.blue.svc")).await;
    assert!(rig.metrics.count(DnsResult::Malformed) > 100, "seed {seed}");
    // No query was sent upstream about names that this VPC must not see, or as anything but a plain query.
    for (message, _) in rig.upstream.asked() {
        let asked = &message.queries[0].name;
        let own = asked == &name("web.blue.svc.cluster.local.");
        assert!(own || red().shows(asked), "{asked} by seed {seed}");
        assert_eq!(message.queries.len(), 1);
    }
}

/// Returns every name in a message, but for the question's.
fn named(message: &Message) -> Vec<Name> {
    let target = |record: &Record| match &record.data {
        RData::CNAME(target) => Some(target.0.clone()),
        RData::PTR(target) => Some(target.0.clone()),
        RData::NS(target) => Some(target.0.clone()),
        RData::SRV(service) => Some(service.target.clone()),
        RData::MX(mail) => Some(mail.exchange.clone()),
        RData::SVCB(service) => Some(service.target_name.clone()),
        _ => None,
    };
    message
        .all_sections()
        .flat_map(|record| [Some(record.name.clone()), target(record)])
        .flatten()
        .collect()
}

#[test]
fn no_answer_names_what_is_hidden() {
    let seed = seed();
    let view: View = red();
    let mut random = Rng::with_seed(seed);
    let owners = [
        in_cluster("ext.red.svc"),
        "www.example.com.".into(),
        "9.0.96.10.in-addr.arpa.".into(),
    ];
    let targets = [
        in_cluster("db.blue.svc"),
        in_cluster("moved.red.svc"),
        in_cluster("web.red.svc"),
        in_cluster("shared.blue.svc"),
        "www.example.org.".into(),
    ];
    let (mut filtered, mut whole) = (0, 0);
    for _ in 0..20_000 {
        let asked = random.choice(&owners).unwrap().clone();
        let question = query(&asked, RecordType::ANY);
        let mut some = |most: usize| -> Vec<Record> {
            let count = random.usize(0..most);
            (0..count).map(|_| made(&mut random, &asked, &targets)).collect()
        };
        let mut answer = reply(&question, some(4));
        answer.authorities = some(2);
        answer.additionals = some(3);
        let mut bytes = answer.to_vec().unwrap();
        if random.u8(0..4) == 0 {
            bytes = spoil(&mut random, &bytes);
        }
        let Ok(answer) = Message::from_vec(&bytes) else {
            continue;
        };
        let question = Question::parse(&question.to_vec().unwrap()).unwrap();
        let Verdict::Forward(zone) = view.decide(question.name()) else {
            panic!("{asked}");
        };
        let left = match filter(&view, zone, &question, answer.clone()) {
            None => answer,
            Some(made) => made.message,
        };
        // The message is parsed as the pod will parse it.
        let Ok(left) = Message::from_vec(&left.to_vec().unwrap()) else {
            panic!("it can't be read, seed {seed}");
        };
        for name in named(&left) {
            assert!(view.shows(&name), "{name} in {left}, seed {seed}");
        }
        if left.all_sections().count() == 0 || zone == Zone::Outside {
            filtered += 1;
        } else {
            whole += 1;
        }
    }
    assert!(filtered > 1000 && whole > 1000, "{filtered}, {whole}");
}

fn made(random: &mut Rng, asked: &str, targets: &[String]) -> Record {
    let target = random.choice(targets).unwrap();
    let owner = if random.u8(0..3) == 0 {
        random.choice(targets).unwrap()
    } else {
        asked
    };
    match random.u8(0..7) {
        0 => alias(owner, target),
        1 => ptr(owner, target),
        2 => srv(owner, target),
        3 => record(owner, RData::MX(rdata::MX::new(1, name(target)))),
        4 => record(owner, RData::NS(rdata::NS(name(target)))),
        5 => record(owner, RData::SVCB(rdata::SVCB::new(1, name(target), Vec::new()))),
        _ => a(owner, random.u8(..)),
    }
}

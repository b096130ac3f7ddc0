//! What one pod or one VPC can hold, and what is left for others.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::super::Limits;
use super::upstream::{Asked, Script, a, cluster, reply};
use super::{BLUE, RED, RED_TOO, Rig, eventually, query, send, take};
use crate::metrics::DnsResult;

/// Answers nothing about names that begin with `slow`, unless told to.
fn with_slow_names(answers_all: Arc<AtomicBool>) -> Script {
    Arc::new(move |asked: &Asked<'_>| {
        let owner = asked.message.queries[0].name.to_ascii();
        if owner.starts_with("slow") && !answers_all.load(Ordering::Relaxed) {
            return Vec::new();
        }
        vec![reply(asked.message, vec![a(&owner, 7)]).to_vec().unwrap()]
    })
}

#[tokio::test]
async fn a_vpc_that_asks_too_much_at_once_leaves_others_theirs() {
    let limits = Limits {
        in_flight: 5,
        in_flight_of_vpc: 3,
        patience: super::AGES,
        ..Limits::default()
    };
    let rig = Rig::with_limits(with_slow_names(Arc::default()), limits).await;
    let slow = query("slow.example.com.", RecordType::A).to_vec().unwrap();
    let red = rig.udp(RED).await;
    for _ in 0..3 {
        red.send(&slow).await.unwrap();
    }
    eventually(|| rig.upstream.asked().len() == 3, || "three in flight".into()).await;
    assert_eq!(rig.metrics.in_flight.get(), 3);
    // Whichever pod of it asks, for whatever, however.
    rig.udp(RED_TOO).await.send(&slow).await.unwrap();
    rig.counts(DnsResult::Limited, 1).await;
    let mut stream = rig.tcp(RED_TOO).await;
    send(&mut stream, &slow).await;
    rig.counts(DnsResult::Limited, 2).await;
    rig.assert_serves(BLUE, "www.example.com.").await;
    // All there is.
    let blue = rig.udp(BLUE).await;
    for _ in 0..3 {
        blue.send(&slow).await.unwrap();
    }
    rig.counts(DnsResult::Limited, 3).await;
    assert_eq!(rig.upstream.asked().len(), 6, "none of those went on");
    assert_eq!(rig.metrics.in_flight.get(), 5);
}

#[tokio::test]
async fn places_are_given_back() {
    let limits = Limits {
        in_flight: 2,
        in_flight_of_vpc: 1,
        patience: Duration::from_millis(50),
        ..Limits::default()
    };
    let all = Arc::new(AtomicBool::new(false));
    let rig = Rig::with_limits(with_slow_names(Arc::clone(&all)), limits).await;
    for count in 0..5 {
        all.store(count % 2 == 1, Ordering::Relaxed);
        let answer = rig.ask(RED, &query("slow.example.com.", RecordType::A)).await;
        let code = answer.metadata.response_code;
        assert_eq!(code == ResponseCode::NoError, count % 2 == 1, "{code}");
        // Given back just after the answer is on its way.
        eventually(|| rig.metrics.in_flight.get() == 0, || "in flight".into()).await;
    }
    assert_eq!(rig.metrics.count(DnsResult::Limited), 0);
}

#[tokio::test]
async fn a_connection_has_few_queries_in_flight_and_reads_no_more() {
    let limits = Limits {
        patience: super::AGES,
        ..Limits::default()
    };
    let rig = Rig::with_limits(with_slow_names(Arc::default()), limits).await;
    let mut stream = rig.tcp(RED).await;
    let slow = query("slow.example.com.", RecordType::A).to_vec().unwrap();
    for _ in 0..60 {
        send(&mut stream, &slow).await;
    }
    eventually(|| rig.upstream.asked().len() >= 16, || "in flight".into()).await;
    for _ in 0..50 {
        rig.assert_serves(RED_TOO, "www.example.com.").await;
    }
    assert_eq!(rig.metrics.in_flight.get(), 16);
    assert_eq!(rig.upstream.asked().len(), 16 + 50);
}

/// Connections that were served, and how many were hung up on.
async fn connect(rig: &Rig, source: IpAddr, count: usize) -> (Vec<TcpStream>, usize) {
    let (mut served, mut refused) = (Vec::new(), 0);
    for _ in 0..count {
        let mut stream = rig.tcp(source).await;
        let asked = query("www.example.com.", RecordType::A).to_vec().unwrap();
        let length = u16::try_from(asked.len()).unwrap();
        // It may be reset at any moment.
        let _ = stream.write_u16(length).await;
        let _ = stream.write_all(&asked).await;
        match take(&mut stream).await {
            Some(_) => served.push(stream),
            None => refused += 1,
        }
    }
    (served, refused)
}

#[tokio::test]
async fn connections_are_bounded_by_pod_by_vpc_and_in_all() {
    let limits = Limits {
        connections: 5,
        connections_of_vpc: 3,
        connections_of_source: 2,
        idle: super::AGES,
        ..Limits::default()
    };
    let rig = Rig::with_limits(cluster(), limits).await;
    let (red, refused) = connect(&rig, RED, 3).await;
    assert_eq!((red.len(), refused), (2, 1), "of the pod");
    let (red_too, refused) = connect(&rig, RED_TOO, 2).await;
    assert_eq!((red_too.len(), refused), (1, 1), "of the VPC");
    let (blue, refused) = connect(&rig, BLUE, 2).await;
    assert_eq!((blue.len(), refused), (2, 0), "another's are its own");
    assert_eq!(rig.metrics.connections.get(), 5);
    assert_eq!(rig.metrics.hung_up_on(DnsResult::Limited), 2);
    drop(red);
    eventually(
        || rig.metrics.connections.get() == 3,
        || "closed ones count".into(),
    )
    .await;
    let (again, refused) = connect(&rig, RED, 1).await;
    assert_eq!((again.len(), refused), (1, 0));
}

#[tokio::test]
async fn a_silent_connection_is_closed() {
    let limits = Limits {
        idle: Duration::from_millis(100),
        ..Limits::default()
    };
    let rig = Rig::with_limits(cluster(), limits).await;
    let mut silent = rig.tcp(RED).await;
    assert!(take(&mut silent).await.is_none());
    // A message that never ends is silence, too.
    let mut slow = rig.tcp(RED).await;
    slow.write_all(&[0, 40, 1, 2, 3]).await.unwrap();
    assert!(take(&mut slow).await.is_none());
    eventually(
        || rig.metrics.connections.get() == 0,
        || "closed ones count".into(),
    )
    .await;
    rig.assert_serves(RED, "www.example.com.").await;
}

#[tokio::test]
async fn a_client_that_takes_no_answers_is_hung_up_on() {
    let limits = Limits {
        patience: Duration::from_millis(200),
        idle: super::AGES,
        ..Limits::default()
    };
    let rig = Rig::with_limits(cluster(), limits).await;
    let mut stream = rig.tcp(RED).await;
    let asked = query("big.red.svc.cluster.local.", RecordType::TXT)
        .to_vec()
        .unwrap();
    let mut bytes = u16::try_from(asked.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend(asked);
    // Until the answers fill all buffers, and then this fails.
    let wrote = tokio::time::timeout(super::AGES, async {
        while stream.write_all(&bytes).await.is_ok() {}
    });
    assert!(wrote.await.is_ok(), "it was hung up on");
    eventually(
        || rig.metrics.connections.get() == 0,
        || "closed ones count".into(),
    )
    .await;
    eventually(|| rig.metrics.in_flight.get() == 0, || "in flight".into()).await;
    rig.assert_serves(RED, "www.example.com.").await;
}

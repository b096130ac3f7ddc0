//! Tests of the bounds on what one pod or one VPC can hold, and of what is left for others.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::RecordType;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::super::Limits;
use super::upstream::{Asked, Script, a, cluster, reply};
use super::{BLUE, RED, RED_TOO, Rig, eventually, neighbour, query, receive, send, take};
use crate::metrics::DnsResult;

/// Doesn't answer queries for names that begin with `slow`, unless told to.
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
async fn who_has_less_in_flight_takes_a_place_of_the_largest() {
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
    // A pod that has the most is refused itself.
    red.send(&slow).await.unwrap();
    rig.counts(DnsResult::Limited, 1).await;
    assert_eq!((rig.metrics.in_flight.get(), rig.upstream.asked().len()), (3, 3));
    // Another pod of its VPC gets one of its places, by UDP or TCP.
    let mut stream = rig.tcp(RED_TOO).await;
    send(&mut stream, &slow).await;
    rig.counts(DnsResult::Displaced, 1).await;
    let answer = Message::from_vec(&receive(&red).await).unwrap();
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    // Another VPC gets places too, up to as many.
    let blue = rig.udp(BLUE).await;
    for _ in 0..3 {
        blue.send(&slow).await.unwrap();
    }
    rig.counts(DnsResult::Limited, 2).await;
    assert_eq!(rig.metrics.in_flight.get(), 5);
    rig.assert_serves(neighbour(0, 1), "www.example.com.").await;
    rig.counts(DnsResult::Displaced, 2).await;
}

#[tokio::test]
async fn silent_names_of_four_vpcs_leave_others_theirs() {
    let limits = Limits {
        patience: super::AGES,
        ..Limits::default()
    };
    let rig = Rig::with_limits(with_slow_names(Arc::default()), limits).await;
    let slow = query("slow.example.com.", RecordType::A).to_vec().unwrap();
    for vpc in 0..4 {
        let loud = rig.udp(neighbour(vpc, 1)).await;
        // The queries are sent in steps: the server's socket has room for some hundreds.
        for count in 0..200 {
            loud.send(&slow).await.unwrap();
            if count % 20 == 0 {
                rig.assert_serves(BLUE, "www.example.com.").await;
            }
        }
    }
    let is_full = || rig.metrics.in_flight.get() >= 500;
    eventually(is_full, || format!("{} in flight", rig.metrics.in_flight.get())).await;
    for _ in 0..25 {
        rig.assert_serves(BLUE, "www.example.com.").await;
        // So does another pod of a VPC that floods.
        rig.assert_serves(neighbour(1, 2), "www.example.com.").await;
        let answer = rig
            .ask_by_tcp(RED, &query("www.example.com.", RecordType::A))
            .await;
        assert_eq!(answer.answers.len(), 1);
    }
    assert!(rig.metrics.in_flight.get() >= 500, "others keep their places");
    assert!(rig.metrics.count(DnsResult::Limited) > 200);
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
        // The place is given back just after the answer is sent.
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

/// Returns connections that were served, and how many others were hung up on.
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
async fn connections_are_bounded_and_the_largest_gives_way() {
    let limits = Limits {
        connections: 5,
        connections_of_vpc: 4,
        idle: super::AGES,
        ..Limits::default()
    };
    let rig = Rig::with_limits(cluster(), limits).await;
    let (mut red, refused) = connect(&rig, RED, 5).await;
    assert_eq!((red.len(), refused), (4, 1), "of the VPC");
    let (red_too, refused) = connect(&rig, RED_TOO, 3).await;
    assert_eq!((red_too.len(), refused), (2, 1), "as many as the other pod");
    // The oldest are those that were hung up on.
    for mut lost in red.drain(..2) {
        assert!(take(&mut lost).await.is_none());
    }
    let (blue, refused) = connect(&rig, BLUE, 3).await;
    assert_eq!((blue.len(), refused), (2, 1), "as many as the other VPC");
    assert_eq!(rig.metrics.connections.get(), 5);
    assert_eq!(rig.metrics.hung_up_on(DnsResult::Limited), 3);
    assert_eq!(rig.metrics.hung_up_on(DnsResult::Displaced), 3);
    drop(blue);
    eventually(
        || rig.metrics.connections.get() == 3,
        || "closed ones count".into(),
    )
    .await;
    rig.assert_serves(BLUE, "www.example.com.").await;
}

#[tokio::test]
async fn idle_connections_of_four_vpcs_leave_others_theirs() {
    let limits = Limits {
        idle: super::AGES,
        ..Limits::default()
    };
    let rig = Rig::with_limits(cluster(), limits).await;
    let mut idle = Vec::new();
    for (vpc, pod) in (0..4).flat_map(|vpc| (0..4).map(move |pod| (vpc, pod))) {
        idle.extend(connect(&rig, neighbour(vpc, pod), 16).await.0);
    }
    assert_eq!((idle.len(), rig.metrics.connections.get()), (256, 256));
    for source in [BLUE, RED, neighbour(1, 9)] {
        assert_eq!(connect(&rig, source, 2).await.1, 0, "{source}");
    }
    assert_eq!(rig.metrics.hung_up_on(DnsResult::Limited), 0);
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
    // The client writes until the answers fill all buffers; then this write fails.
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

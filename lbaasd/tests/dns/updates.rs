//! Dynamic updates, signed, at BIND.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use hickory_proto::rr::rdata::tsig::TsigAlgorithm;
use lbaasd::dns::updates::Key;
use lbaasd::dns::{DnsError, Records};

use crate::bind::{CLOSED, Named, key, updates, usual};
use crate::proxy::{Proxy, played};
use crate::{
    SHOP, ZONE, a_name_has_one_owner, addresses, ask, local, port, publish, record, the_first_gets_a_name,
};

const ADDRESS: &[&str] = &["203.0.113.7"];

#[tokio::test]
async fn bind_gives_a_name_one_owner() {
    let named = Named::start().await;
    a_name_has_one_owner(&usual(named.address), named.address).await;
}

#[tokio::test]
async fn bind_gives_a_name_to_the_first() {
    let named = Named::start().await;
    the_first_gets_a_name(&usual(named.address), named.address).await;
}

#[tokio::test]
async fn records_of_others_stay_as_they_are() {
    let named = Named::start().await;
    let records = usual(named.address);
    for name in ["foreign.red", "alias.red", "text.red", "ns"] {
        let name = format!("{name}.{ZONE}");
        assert!(
            !publish(&records, "vip-1", &record(&name, ADDRESS)).await.unwrap(),
            "{name}"
        );
        assert!(!records.withdraw("vip-1", &name).await.unwrap(), "{name}");
    }
    let name = format!("foreign.red.{ZONE}");
    assert_eq!(addresses(named.address, &name).await, ["198.51.100.1"]);
    // Names above and below another's have records of their own.
    let below = format!("x.foreign.red.{ZONE}");
    assert!(
        publish(&records, "vip-1", &record(&below, ADDRESS))
            .await
            .unwrap()
    );
    assert_eq!(addresses(named.address, &name).await, ["198.51.100.1"]);
}

#[tokio::test]
async fn an_owner_with_another_mark_is_another() {
    let named = Named::start().await;
    let records = usual(named.address);
    assert!(publish(&records, "vip-1", &record(SHOP, ADDRESS)).await.unwrap());
    let (_, mark) = ask(named.address, &format!("_thuban.{SHOP}"), RecordType::TXT).await;
    assert_eq!(mark[0].0, "heritage=thuban,vip=vip-1");
    for other in ["vip-", "vip-11", "VIP-1", ""] {
        assert!(
            !publish(&records, other, &record(SHOP, &["203.0.113.9"]))
                .await
                .unwrap(),
            "{other}"
        );
        assert!(!records.withdraw(other, SHOP).await.unwrap(), "{other}");
    }
    assert_eq!(addresses(named.address, SHOP).await, ADDRESS);
}

#[tokio::test]
async fn keys_that_the_server_does_not_know_are_refused() {
    let named = Named::start().await;
    let wrong = |change: fn(&mut Key)| {
        let mut key = key();
        change(&mut key);
        updates(named.address, ZONE, key, SystemTime::now)
    };
    for records in [
        wrong(|key| key.secret[0] = b'A'),
        wrong(|key| key.name = "other".into()),
        wrong(|key| key.algorithm = TsigAlgorithm::HmacSha512),
    ] {
        let refused = publish(&records, "vip-1", &record(SHOP, ADDRESS)).await;
        assert!(matches!(refused, Err(DnsError::KeyRefused)), "{refused:?}");
        assert_eq!(records.check().await.unwrap_err().reason(), "KeyRefused");
    }
    assert_eq!(
        ask(named.address, SHOP, RecordType::A).await.0,
        ResponseCode::NXDomain
    );
}

#[tokio::test]
async fn a_clock_that_is_wrong_is_told() {
    let named = Named::start().await;
    for clock in [
        (|| SystemTime::now() - Duration::from_mins(10)) as fn() -> SystemTime,
        || SystemTime::now() + Duration::from_mins(10),
    ] {
        let records = updates(named.address, ZONE, key(), clock);
        let refused = publish(&records, "vip-1", &record(SHOP, ADDRESS)).await;
        assert!(matches!(refused, Err(DnsError::ClockDiffers)), "{refused:?}");
    }
    let late = || SystemTime::now() - Duration::from_secs(200);
    let records = updates(named.address, ZONE, key(), late);
    assert!(publish(&records, "vip-1", &record(SHOP, ADDRESS)).await.unwrap());
}

#[tokio::test]
async fn a_zone_that_is_not_the_keys_is_refused() {
    let named = Named::start().await;
    for (zone, code) in [
        (CLOSED, ResponseCode::Refused),
        ("other.example.org", ResponseCode::NotAuth),
    ] {
        let records = updates(named.address, zone, key(), SystemTime::now);
        let checked = records.check().await;
        assert!(
            matches!(checked, Err(DnsError::Refused(found)) if found == code),
            "{zone}: {checked:?}"
        );
        let name = format!("shop.{zone}");
        publish(&records, "vip-1", &record(&name, ADDRESS))
            .await
            .unwrap_err();
    }
}

#[tokio::test]
async fn a_server_that_is_away_or_silent_is_left() {
    let silent = played(|_| None).await;
    for server in [local(port()), silent] {
        let start = Instant::now();
        let error = publish(&usual(server), "vip-1", &record(SHOP, ADDRESS))
            .await
            .unwrap_err();
        assert_eq!(error.reason(), "ServerAway", "{error}");
        assert!(start.elapsed() < Duration::from_secs(7));
    }
}

#[tokio::test]
async fn an_answer_that_is_not_signed_is_not_believed() {
    // "No error" from somebody without the key.
    let forged = played(|request| {
        let mut header = request[2..14].to_vec();
        header[2] |= 0x80;
        header[4..12].fill(0);
        Some([&[0, 12][..], &header].concat())
    });
    let answered = usual(forged.await).withdraw("vip-1", SHOP).await;
    assert!(matches!(answered, Err(DnsError::Message(_))), "{answered:?}");
}

#[tokio::test]
async fn an_answer_that_was_lost_is_made_up_for() {
    let named = Named::start().await;
    let proxy = Proxy::before(named.address).await;
    let records = usual(proxy.address);
    let drop = |drops| proxy.drops.store(drops, Ordering::Relaxed);
    let shop = record(SHOP, ADDRESS);
    drop(true);
    records.claim("vip-1", &shop).await.unwrap_err();
    assert_eq!(
        addresses(named.address, SHOP).await,
        ADDRESS,
        "it was carried out"
    );
    drop(false);
    assert!(publish(&records, "vip-1", &shop).await.unwrap());
    drop(true);
    records.withdraw("vip-1", SHOP).await.unwrap_err();
    drop(false);
    assert!(!records.withdraw("vip-1", SHOP).await.unwrap());
    assert!(addresses(named.address, SHOP).await.is_empty());
    assert_eq!(proxy.dropped.load(Ordering::Relaxed), 2);
}

/// Somebody who removes records is an administrator: the owner gets them back.
#[tokio::test]
async fn a_name_that_was_removed_comes_again() {
    let named = Named::start().await;
    let records = usual(named.address);
    let shop = record(SHOP, ADDRESS);
    assert!(publish(&records, "vip-1", &shop).await.unwrap());
    removed(named.address, SHOP, RecordType::A).await;
    assert!(addresses(named.address, SHOP).await.is_empty());
    assert!(publish(&records, "vip-1", &shop).await.unwrap());
    assert_eq!(addresses(named.address, SHOP).await, ADDRESS);
    // Without its mark a record is somebody's.
    removed(named.address, &format!("_thuban.{SHOP}"), RecordType::TXT).await;
    assert!(!publish(&records, "vip-1", &shop).await.unwrap());
    removed(named.address, SHOP, RecordType::A).await;
    assert!(publish(&records, "vip-1", &shop).await.unwrap());
}

/// Removes a record as an administrator with the key does.
async fn removed(server: SocketAddr, name: &str, kind: RecordType) {
    use hickory_proto::op::{Message, OpCode, Query, UpdateMessage};
    use hickory_proto::rr::{DNSClass, Name, Record, TSigner};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let absolute = |name: &str| Name::from_ascii(format!("{name}.")).unwrap();
    let mut zone = Query::new();
    zone.set_name(absolute(ZONE)).set_query_type(RecordType::SOA);
    let mut message = Message::query();
    message.metadata.op_code = OpCode::Update;
    message.add_zone(zone);
    let mut removal = Record::update0(absolute(name), 0, kind);
    removal.dns_class = DNSClass::ANY;
    message.add_update(removal);
    let own = key();
    let signer = TSigner::new(own.secret, own.algorithm, absolute(&own.name), 300).unwrap();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    message.finalize(&signer, now.as_secs()).unwrap();
    let bytes = message.to_vec().unwrap();
    let mut connection = tokio::net::TcpStream::connect(server).await.unwrap();
    connection
        .write_u16(u16::try_from(bytes.len()).unwrap())
        .await
        .unwrap();
    connection.write_all(&bytes).await.unwrap();
    let mut answer = vec![0; connection.read_u16().await.unwrap().into()];
    connection.read_exact(&mut answer).await.unwrap();
    assert_eq!(
        Message::from_vec(&answer).unwrap().metadata.response_code,
        ResponseCode::NoError
    );
}

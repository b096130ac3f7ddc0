//! What a holder gets, step by step, from an API server that answers soon.

use std::net::IpAddr;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request as HttpRequest, StatusCode};
use cidrd::expiry::Expiry;
use cidrd::http::{Leases, router};
use cidrd::lease::{
    Family, LeaseError, Refusal, Request, Terms, assign, expire, list, of_holder, release, renew,
};
use cidrd::pools::{Pools, TermsError};
use cidrd::problem::Problem;
use cidrd::store::Store;
use http_body_util::BodyExt;
use serde_json::json;
use thuban_api::ip_lease::{IpLease, LeaseHolder, LeaseState};
use tokio::time::Instant;
use tower::ServiceExt;

use crate::world::World;

fn terms(cidrs: &[&str]) -> Terms {
    Terms {
        pool: "public".into(),
        vpc: String::new(),
        cidrs: cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect(),
        lease_seconds: 600,
        quarantine_seconds: 300,
    }
}

fn request(uid: &str, wanted: &[(Family, Option<&str>)]) -> Request {
    let read = |address: &str| address.parse().unwrap();
    Request {
        holder: LeaseHolder {
            uid: uid.into(),
            namespace: "shop".into(),
            name: uid.into(),
        },
        wanted: wanted
            .iter()
            .map(|(family, address)| (*family, address.map(read)))
            .collect(),
    }
}

/// Asks for any IPv4 address.
async fn any(world: &World, terms: &Terms, uid: &str) -> Result<IpAddr, LeaseError> {
    let leases = assign(world, terms, &request(uid, &[(Family::V4, None)])).await?;
    Ok(leases[0].spec.address.parse().unwrap())
}

async fn grants(world: &World, uid: &str) -> Vec<String> {
    let leases = of_holder(world, uid).await.unwrap();
    leases.iter().map(IpLease::grant).collect()
}

async fn state(world: &World, uid: &str) -> Vec<LeaseState> {
    let leases = of_holder(world, uid).await.unwrap();
    leases.iter().map(IpLease::state).collect()
}

fn refusal<T: std::fmt::Debug>(result: Result<T, LeaseError>) -> Refusal {
    match result {
        Err(LeaseError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_repeat_gets_the_same_address_and_all_addresses_are_used() {
    let (world, terms) = (World::calm(), terms(&["203.0.113.4/30"]));
    let mut used = std::collections::BTreeSet::new();
    for uid in ["a", "b", "c", "d"] {
        let address = any(&world, &terms, uid).await.unwrap();
        assert_eq!(any(&world, &terms, uid).await.unwrap(), address);
        assert!(used.insert(address));
    }
    let exhausted = Refusal::Exhausted {
        pool: "public".into(),
        family: Family::V4,
    };
    assert_eq!(refusal(any(&world, &terms, "e").await), exhausted);
    assert_eq!(list(&world).await.unwrap().len(), 4);
}

#[tokio::test]
async fn the_last_address_is_given_to_both_who_ask_for_one_holder() {
    let (world, terms) = (World::calm(), terms(&["203.0.113.4/32"]));
    let (one, other) = tokio::join!(any(&world, &terms, "a"), any(&world, &terms, "a"));
    assert_eq!(one.unwrap(), other.unwrap());
}

#[tokio::test]
async fn of_two_proposals_for_one_holder_one_becomes_a_lease() {
    let mut rivals = 0;
    for seed in 0..3_000 {
        let world = World::changing(seed);
        // Two cidrds that know the pool at different times: each begins with another address.
        let (old, new) = (terms(&["203.0.113.4/32"]), terms(&["203.0.113.5/32"]));
        let (one, other) = tokio::join!(any(&world, &old, "a"), any(&world, &new, "a"));
        assert_eq!(one.unwrap(), other.unwrap(), "seed {seed}");
        assert_eq!(state(&world, "a").await, [LeaseState::Held], "seed {seed}");
        rivals += world.seen().rivals;
    }
    assert!(rivals > 100, "{rivals}");
}

#[tokio::test]
async fn a_lost_lease_comes_back_at_the_same_address() {
    let (world, terms) = (World::calm(), terms(&["203.0.113.0/24"]));
    let address = any(&world, &terms, "a").await.unwrap();
    let lease = list(&world).await.unwrap().remove(0);
    world.delete(&lease).await.unwrap();
    assert_eq!(any(&world, &terms, "a").await.unwrap(), address);
}

#[tokio::test]
async fn of_two_families_a_holder_gets_both_or_none() {
    let world = World::calm();
    let both = [(Family::V4, None), (Family::V6, None)];
    let leases = assign(
        &world,
        &terms(&["203.0.113.4/30", "2001:db8::/126"]),
        &request("a", &both),
    )
    .await;
    assert_eq!(leases.unwrap().len(), 2);
    let refused = assign(&world, &terms(&["203.0.113.4/30"]), &request("b", &both)).await;
    assert!(matches!(
        refusal(refused),
        Refusal::Exhausted {
            family: Family::V6,
            ..
        }
    ));
    assert!(of_holder(&world, "b").await.unwrap().is_empty());
}

#[tokio::test]
async fn an_address_that_is_asked_for_is_given_or_refused() {
    let (world, terms) = (World::calm(), terms(&["203.0.113.4/30"]));
    let ask = |uid, address| request(uid, &[(Family::V4, Some(address))]);
    let asked = assign(&world, &terms, &ask("a", "203.0.113.6")).await.unwrap();
    assert_eq!(asked[0].spec.address, "203.0.113.6");
    let address = "203.0.113.6".parse().unwrap();
    assert_eq!(
        refusal(assign(&world, &terms, &ask("b", "203.0.113.6")).await),
        Refusal::Taken(address)
    );
    assert!(matches!(
        refusal(assign(&world, &terms, &ask("b", "203.0.113.9")).await),
        Refusal::OutsidePool { .. }
    ));
    assert!(matches!(
        refusal(assign(&world, &terms, &ask("a", "203.0.113.7")).await),
        Refusal::HasAnother { .. }
    ));
    // In quarantine it is its last holder's alone.
    release(&world, "a", &grants(&world, "a").await).await.unwrap();
    assert_eq!(
        refusal(assign(&world, &terms, &ask("b", "203.0.113.6")).await),
        Refusal::Taken(address)
    );
    assert!(assign(&world, &terms, &ask("a", "203.0.113.6")).await.is_ok());
}

#[tokio::test]
async fn a_late_release_takes_nothing_that_was_given_since() {
    let (world, terms) = (World::calm(), terms(&["203.0.113.4/30"]));
    let address = any(&world, &terms, "a").await.unwrap();
    let first = grants(&world, "a").await;
    release(&world, "a", &first).await.unwrap();
    assert_eq!(any(&world, &terms, "a").await.unwrap(), address);
    let late = release(&world, "a", &first).await;
    assert_eq!(refusal(late), Refusal::Superseded(address.to_string()));
    // So does one whose lease was renewed by somebody else since.
    let before = grants(&world, "a").await;
    renew(&world, "a").await.unwrap();
    assert!(release(&world, "a", &before).await.is_err());
    assert_eq!(state(&world, "a").await, [LeaseState::Held]);
    release(&world, "a", &grants(&world, "a").await).await.unwrap();
    assert_eq!(state(&world, "a").await, [LeaseState::Quarantined]);
    assert!(renew(&world, "a").await.unwrap().is_empty());
}

/// Looks at all leases after some seconds, and ends those that are due.
async fn pass(world: &World, expiry: &mut Expiry, seconds: u64) {
    tokio::time::advance(Duration::from_secs(seconds)).await;
    let leases = world.leases();
    for lease in expiry.look(&leases, Instant::now()) {
        expire(world, lease).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_ends_without_renewal_and_rests() {
    let (world, terms) = (World::calm(), terms(&["203.0.113.4/32"]));
    let mut expiry = Expiry::default();
    any(&world, &terms, "a").await.unwrap();
    pass(&world, &mut expiry, 0).await;
    pass(&world, &mut expiry, 599).await;
    renew(&world, "a").await.unwrap();
    pass(&world, &mut expiry, 1).await;
    pass(&world, &mut expiry, 599).await;
    assert_eq!(state(&world, "a").await, [LeaseState::Held]);
    pass(&world, &mut expiry, 1).await;
    assert_eq!(state(&world, "a").await, [LeaseState::Quarantined]);
    pass(&world, &mut expiry, 0).await;
    pass(&world, &mut expiry, 299).await;
    assert!(any(&world, &terms, "b").await.is_err());
    pass(&world, &mut expiry, 1).await;
    assert!(any(&world, &terms, "b").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_look_at_old_leases_ends_nothing_that_was_renewed() {
    let (world, terms) = (World::calm(), terms(&["203.0.113.4/32"]));
    let mut expiry = Expiry::default();
    any(&world, &terms, "a").await.unwrap();
    let old = world.leases();
    assert!(expiry.look(&old, Instant::now()).is_empty());
    tokio::time::advance(Duration::from_mins(10)).await;
    renew(&world, "a").await.unwrap();
    for lease in expiry.look(&old, Instant::now()) {
        expire(&world, lease).await.unwrap();
    }
    assert_eq!(state(&world, "a").await, [LeaseState::Held]);
}

/// One pool, which admits one namespace.
pub struct OnePool;

impl Pools for OnePool {
    fn terms(&self, pool: &str, namespace: &str) -> Result<Terms, TermsError> {
        match (pool, namespace) {
            ("public", "shop") => Ok(terms(&["203.0.113.4/31"])),
            ("public", _) => Err(TermsError::NotAllowed {
                pool: pool.into(),
                namespace: namespace.into(),
            }),
            _ => Err(TermsError::Unknown(pool.into())),
        }
    }
}

async fn call(world: &World, method: Method, path: &str, body: serde_json::Value) -> (StatusCode, Vec<u8>) {
    let request = HttpRequest::builder()
        .method(method)
        .uri(format!("/v1/leases{path}"))
        .header("content-type", "application/json")
        .body(Body::from(body.to_string()))
        .unwrap();
    let response = router(world.clone(), OnePool).oneshot(request).await.unwrap();
    let status = response.status();
    (
        status,
        response.into_body().collect().await.unwrap().to_bytes().to_vec(),
    )
}

#[tokio::test]
async fn the_api_gives_renews_and_takes_back() {
    let world = World::calm();
    let wanted = json!({"pool": "public", "namespace": "shop", "name": "web", "families": ["IPv4"]});
    let (status, body) = call(&world, Method::PUT, "/uid-1", wanted.clone()).await;
    let given: Leases = serde_json::from_slice(&body).unwrap();
    assert_eq!((status, given.leases.len()), (StatusCode::OK, 1));
    let lease = &given.leases[0];
    assert_eq!(
        (lease.state, lease.lease_seconds, lease.quarantine_seconds),
        (LeaseState::Held, 600, 300)
    );
    // A holder keeps what it has, although the pool admits its namespace no more.
    let elsewhere = json!({"pool": "public", "namespace": "other", "name": "web", "families": ["IPv4"]});
    let mut last = lease.clone();
    for (method, path, body) in [
        (Method::PUT, "/uid-1", &wanted),
        (Method::PUT, "/uid-1", &elsewhere),
        (Method::POST, "/uid-1/renew", &wanted),
        (Method::GET, "/uid-1", &wanted),
        (Method::GET, "", &wanted),
    ] {
        let (status, told) = call(&world, method.clone(), path, body.clone()).await;
        let mut again: Leases = serde_json::from_slice(&told).unwrap();
        assert_eq!(status, StatusCode::OK, "{path}");
        let renewed = again.leases.remove(0);
        assert_eq!(renewed.grant == last.grant, method == Method::GET, "{path}");
        last.grant = renewed.grant.clone();
        assert_eq!(renewed, last, "{path}");
    }
    let (status, _) = call(&world, Method::DELETE, "/uid-1", json!({"grants": [lease.grant]})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    let grants = json!({"grants": [last.grant]});
    for _ in 0..2 {
        let (status, _) = call(&world, Method::DELETE, "/uid-1", grants.clone()).await;
        assert_eq!(status, StatusCode::NO_CONTENT);
    }
    let (status, _) = call(&world, Method::POST, "/uid-1/renew", json!(null)).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn the_api_names_the_field_that_is_wrong() {
    let world = World::calm();
    let wanted = |pool: &str, namespace: &str, more: serde_json::Value| {
        let mut wanted = json!({"pool": pool, "namespace": namespace, "name": "web"});
        for (field, value) in more.as_object().unwrap() {
            wanted[field] = value.clone();
        }
        wanted
    };
    let v4 = json!({"families": ["IPv4"]});
    for (uid, body, status, reason, field) in [
        (
            "/uid",
            wanted("none", "shop", v4.clone()),
            422,
            "UnknownPool",
            "pool",
        ),
        (
            "/uid",
            wanted("public", "other", v4.clone()),
            403,
            "NamespaceNotAllowed",
            "namespace",
        ),
        (
            "/a%2Cb",
            wanted("public", "shop", v4.clone()),
            422,
            "Invalid",
            "uid",
        ),
        (
            "/uid",
            wanted("public", "shop", json!({})),
            422,
            "Invalid",
            "families",
        ),
        (
            "/uid",
            wanted("public", "shop", json!({"familys": []})),
            422,
            "Invalid",
            "body",
        ),
        (
            "/uid",
            wanted("public", "shop", json!({"families": ["IPv5"]})),
            422,
            "Invalid",
            "body",
        ),
        (
            "/uid",
            wanted(
                "public",
                "shop",
                json!({"addresses": ["203.0.113.4", "203.0.113.5"]}),
            ),
            422,
            "Invalid",
            "addresses",
        ),
        (
            "/uid",
            wanted("public", "shop", json!({"addresses": ["203.0.113.9"]})),
            422,
            "OutsidePool",
            "addresses",
        ),
        (
            "/uid",
            wanted("public", "shop", json!({"families": ["IPv6"]})),
            409,
            "Exhausted",
            "pool",
        ),
    ] {
        let (answered, told) = call(&world, Method::PUT, uid, body.clone()).await;
        let problem: Problem = serde_json::from_slice(&told).unwrap();
        assert_eq!(answered, problem.status, "{body}");
        assert_eq!(
            (problem.status, problem.reason.as_str(), problem.field.as_str()),
            (status, reason, field),
            "{body}: {}",
            problem.detail
        );
    }
    assert!(world.leases().is_empty());
    let (status, _) = call(&world, Method::PUT, "/uid", json!("x".repeat(20_000))).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let (status, _) = call(&world, Method::GET, "/uid/other", json!(null)).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

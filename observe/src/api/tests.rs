//! Tests of all paths, with an API server that reviews tokens: who gets an answer, and that a tenant gets no byte of
//! another.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::{BodyDataStream, to_bytes};
use axum::http::StatusCode;
use futures::StreamExt;
use kube::Client;
use serde_json::{Value, json};
use thuban_client::played;
use thuban_common::counters::Counter;
use tokio::time::timeout;
use tower::ServiceExt;

use super::*;
use crate::flow::Flow;
use crate::flow::tests::flow;
use crate::relay::tests::relay;

/// All paths that have data, as a reader of the namespace asks them.
const ANSWERS: [&str; 6] = [
    "/v1/flows?namespace=red",
    "/v1/graph?namespace=red",
    "/v1/top?namespace=red&by=pod",
    "/v1/top?namespace=red&by=network",
    "/v1/top?namespace=red&by=reason",
    "/v1/series?namespace=red",
];
const STREAMS: [&str; 2] = [
    "/v1/flows?namespace=red&follow=true&last=100",
    "/v1/graph/events?namespace=red",
];

/// An API server that knows the tokens `red`, who may read that namespace, and `admin`, who may read all.
fn client(grants: Arc<AtomicBool>) -> Client {
    played::client(move |request| {
        let mut review: Value = serde_json::from_slice(&request.body).unwrap();
        let spec = review["spec"].clone();
        review["status"] = if request.path.ends_with("/tokenreviews") {
            let token = spec["token"].as_str().unwrap();
            let is_known = ["red", "admin"].contains(&token);
            json!({"authenticated": is_known, "audiences": spec["audiences"], "user": {"username": token}})
        } else {
            let asked = &spec["resourceAttributes"];
            assert_eq!(asked["resource"], "flows");
            let is_own = asked["namespace"] == "red" && spec["user"] == "red";
            json!({"allowed": (is_own || spec["user"] == "admin") && grants.load(Ordering::Relaxed)})
        };
        std::future::ready((200, review.to_string()))
    })
}

struct Rig {
    relay: Arc<Relay>,
    router: Router,
    grants: Arc<AtomicBool>,
}

impl Rig {
    fn new() -> Self {
        let grants = Arc::new(AtomicBool::new(true));
        let relay = relay();
        let access = Access::new(Some(client(grants.clone())), Some("thuban-observe"));
        Self {
            router: router(relay.clone(), access),
            relay,
            grants,
        }
    }

    /// Flows between two namespaces, and of each with the outside.
    fn tell(&self) {
        let names = self.relay.names.read().unwrap();
        let flows = [
            ("10.0.1.3", "10.0.2.4", Counter::SentDirect),
            ("10.0.2.4", "10.0.1.3", Counter::SentDirect),
            ("10.0.2.4", "9.9.9.9", Counter::OutsideVpc),
            ("10.0.1.3", "8.8.8.8", Counter::OutsideVpc),
        ];
        let flows = flows.map(|(from, to, verdict)| Flow {
            arrived: now(),
            next: None,
            ..flow(&names, from, to, verdict)
        });
        self.relay.store.push(flows);
    }

    async fn ask(&self, path: &str, token: Option<&str>) -> Response {
        let mut request = Request::builder()
            .uri(path)
            .extension(Peer(Ipv4Addr::LOCALHOST.into()));
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.body(Body::empty()).unwrap();
        self.router.clone().oneshot(request).await.unwrap()
    }

    async fn text(&self, path: &str, token: Option<&str>) -> (StatusCode, String) {
        let response = self.ask(path, token).await;
        let status = response.status();
        let bytes = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    async fn stream(&self, path: &str) -> BodyDataStream {
        let response = self.ask(path, Some("red")).await;
        assert_eq!(response.status(), StatusCode::OK);
        response.into_body().into_data_stream()
    }
}

async fn part(stream: &mut BodyDataStream) -> Option<String> {
    let bytes = timeout(Duration::from_mins(5), stream.next()).await.unwrap()?;
    Some(String::from_utf8(bytes.unwrap().to_vec()).unwrap())
}

#[tokio::test(start_paused = true)]
async fn only_who_has_the_right_gets_an_answer() {
    let rig = Rig::new();
    for path in ANSWERS.into_iter().chain(STREAMS) {
        let other = path.replace("namespace=red", "namespace=blue");
        let all = path.replace("namespace=red", "all=true");
        let (other, all) = (other.as_str(), all.as_str());
        for (path, token, expected) in [
            (path, None, StatusCode::UNAUTHORIZED),
            (path, Some("stranger"), StatusCode::UNAUTHORIZED),
            (path, Some("red"), StatusCode::OK),
            (other, Some("red"), StatusCode::FORBIDDEN),
            (all, Some("red"), StatusCode::FORBIDDEN),
            (other, Some("admin"), StatusCode::OK),
            (all, Some("admin"), StatusCode::OK),
        ] {
            // The answer is not read: it may have no end. Tokens of strangers are reviewed a few a second.
            let status = Rig::new().ask(path, token).await.status();
            assert_eq!(status, expected, "{path} {token:?}");
        }
    }
    let (status, text) = rig.text("/v1/series?namespace=blue", Some("red")).await;
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert!(
        error["error"].as_str().unwrap().contains("flows.thuban.dev"),
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_tenant_gets_no_byte_of_another() {
    let rig = Rig::new();
    rig.tell();
    let mut texts = Vec::new();
    for path in ANSWERS {
        texts.push(rig.text(path, Some("red")).await.1);
    }
    for path in STREAMS {
        texts.push(part(&mut rig.stream(path).await).await.unwrap());
    }
    for text in &texts {
        for trace in ["blue", "db-0", "10.0.2.4", "red-db", "9.9.9.9"] {
            assert!(!text.contains(trace), "{trace} in {text}");
        }
    }
    assert!(
        texts[0].contains("web-0") && texts[0].contains("withheld"),
        "{}",
        texts[0]
    );
    let (_, all) = rig.text("/v1/flows?all=true", Some("admin")).await;
    assert_eq!(all.lines().count(), 4);
    assert!(all.contains("blue"), "the test can find it");
}

#[tokio::test(start_paused = true)]
async fn a_follower_hears_news_and_that_there_are_none() {
    let rig = Rig::new();
    let mut stream = rig.stream("/v1/flows?namespace=red&follow=true").await;
    assert_eq!(part(&mut stream).await.as_deref(), Some("\n"));
    rig.tell();
    let line: Value = serde_json::from_str(&part(&mut stream).await.unwrap()).unwrap();
    assert_eq!(line["from"]["pod"], "web-0");
    let mut graphs = rig.stream("/v1/graph/events?namespace=red").await;
    let first = part(&mut graphs).await.unwrap();
    assert!(
        first.starts_with("event: graph\ndata: {") && first.ends_with("}\n\n"),
        "{first}"
    );
    assert_eq!(part(&mut graphs).await.as_deref(), Some(": keep-alive\n\n"));
}

#[tokio::test(start_paused = true)]
async fn a_follower_who_loses_the_right_is_cut_off() {
    let rig = Rig::new();
    let begin = tokio::time::Instant::now();
    let mut streams = Vec::new();
    for path in STREAMS {
        streams.push(rig.stream(path).await);
    }
    rig.grants.store(false, Ordering::Relaxed);
    for stream in &mut streams {
        while part(stream).await.is_some() {}
    }
    assert!(
        begin.elapsed() <= Duration::from_secs(140),
        "{:?}",
        begin.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_place_is_free_when_a_follower_is_gone() {
    let rig = Rig::new();
    for _ in 0..200 {
        drop(rig.stream(STREAMS[0]).await);
    }
    let mut held = Vec::new();
    loop {
        let response = rig.ask(STREAMS[0], Some("red")).await;
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            break;
        }
        held.push(response);
        assert!(held.len() < 100, "followers are unlimited");
    }
}

#[tokio::test(start_paused = true)]
async fn answers_that_nobody_takes_are_bounded() {
    for path in ANSWERS {
        let rig = Rig::new();
        rig.tell();
        let mut held = Vec::new();
        loop {
            let response = rig.ask(path, Some("red")).await;
            if response.status() == StatusCode::TOO_MANY_REQUESTS {
                break;
            }
            assert_eq!(response.status(), StatusCode::OK, "{path}");
            held.push(response);
            assert!(held.len() < 100, "answers are unlimited: {path}");
        }
        let taken = held.pop().unwrap().into_body();
        let _ = to_bytes(taken, 1 << 20).await.unwrap();
        assert_eq!(
            rig.ask(path, Some("red")).await.status(),
            StatusCode::OK,
            "{path}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn many_flows_come_in_parts() {
    let rig = Rig::new();
    for _ in 0..100 {
        rig.tell();
    }
    let mut stream = rig.stream("/v1/flows?namespace=red&last=300").await;
    let mut lines = Vec::new();
    while let Some(text) = part(&mut stream).await {
        lines.push(text.lines().count());
    }
    assert!(lines.len() > 1, "{lines:?}");
    assert_eq!(lines.iter().sum::<usize>(), 300);
}

#[tokio::test(start_paused = true)]
async fn what_can_not_be_asked_is_refused_with_a_reason() {
    let rig = Rig::new();
    for (path, status, reason) in [
        ("/v1/flows", StatusCode::BAD_REQUEST, "namespace"),
        (
            "/v1/flows?namespace=red&colour=red",
            StatusCode::BAD_REQUEST,
            "colour",
        ),
        ("/v1/top?namespace=red", StatusCode::BAD_REQUEST, "by"),
        ("/v2/flows", StatusCode::NOT_FOUND, "no such path"),
        ("/assets/../Cargo.toml", StatusCode::NOT_FOUND, "no such path"),
    ] {
        let (found, text) = rig.text(path, Some("red")).await;
        assert_eq!(found, status, "{path}");
        let error: Value = serde_json::from_str(&text).unwrap();
        assert!(error["error"].as_str().unwrap().contains(reason), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_page_needs_no_token_and_no_answer_is_cached() {
    let rig = Rig::new();
    let page = rig.ask("/", None).await;
    assert_eq!(page.status(), StatusCode::OK);
    assert!(page.headers().contains_key("content-security-policy"));
    let answer = rig.ask(ANSWERS[1], Some("red")).await;
    assert_eq!(answer.headers()[CACHE_CONTROL], "no-store");
}

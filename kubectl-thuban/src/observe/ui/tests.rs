//! The local server of `ui`, asked as a browser and as strangers ask it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::door::Door;
use super::serve;
use crate::observe::testing::Played;

/// How long a test waits for an answer.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A local server in front of a played thuban-observe.
struct Local {
    address: SocketAddr,
    door: Arc<Door>,
    played: Played,
    task: JoinHandle<()>,
}

impl Drop for Local {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Local {
    async fn start(status: u16, parts: &[&str]) -> Self {
        let played = Played::start(status, parts).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let door = Arc::new(Door::new(address.port(), &played.relay.asked).unwrap());
        let task = {
            let (door, relay) = (Arc::clone(&door), Arc::clone(&played.relay));
            tokio::spawn(async move { serve(&listener, &door, &relay).await })
        };
        Self {
            address,
            door,
            played,
            task,
        }
    }

    /// Sends a request with these headers, and returns the connection.
    async fn send(&self, line: &str, headers: &[String]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let headers: Vec<String> = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let request = format!("{line} HTTP/1.1\r\nConnection: close\r\n{}\r\n", headers.concat());
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// Does the same, and returns the answer.
    async fn ask(&self, line: &str, headers: &[String]) -> String {
        let mut stream = self.send(line, headers).await;
        let mut answer = String::new();
        timeout(TEST_TIMEOUT, stream.read_to_string(&mut answer))
            .await
            .unwrap()
            .unwrap();
        answer
    }

    fn host(&self) -> String {
        format!("Host: {}", self.address)
    }

    /// Returns the path with the key.
    fn key(&self) -> String {
        self.door.url().replace(&format!("http://{}", self.address), "")
    }

    /// Returns the header of a browser that has been let in.
    fn cookie(&self) -> String {
        let set = self.door.cookie();
        let set = set.to_str().unwrap();
        format!("Cookie: other=1; {}", set.split(';').next().unwrap())
    }
}

#[tokio::test]
async fn the_key_is_exchanged_for_a_cookie() {
    let local = Local::start(200, &[]).await;
    let answer = local.ask(&format!("GET {}", local.key()), &[local.host()]).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(answer.contains("url=/?namespace=red\""), "{answer}");
    let cookie = answer
        .lines()
        .find(|line| line.starts_with("set-cookie: "))
        .unwrap();
    assert!(
        cookie.contains("; HttpOnly") && cookie.contains("; SameSite=Strict"),
        "{cookie}"
    );
    // The cookie says nothing of the key, and nobody was asked.
    let key = local.key().replace("/?key=", "");
    assert!(!answer.contains(&key), "{answer}");
    assert!(local.played.asked().is_empty());
}

#[tokio::test]
async fn strangers_are_refused() {
    let local = Local::start(200, &["a secret of red"]).await;
    let (host, cookie) = (local.host(), local.cookie());
    let other_host = format!("Host: rebound.example:{}", local.address.port());
    let site = |site: &str| format!("Sec-Fetch-Site: {site}");
    let wrong_key = format!("GET {}0", local.key());
    let page = "GET /v1/graph?namespace=red";
    for (line, headers) in [
        // No cookie, one of another server, and a key that is wrong.
        (page, vec![host.clone()]),
        (page, vec![host.clone(), format!("{cookie}0")]),
        (wrong_key.as_str(), vec![host.clone()]),
        ("GET /?key=", vec![host.clone()]),
        // The name of another host, or none.
        (page, vec![other_host, cookie.clone()]),
        (page, vec![cookie.clone()]),
        // A page of another server, and of another port of this host.
        (page, vec![host.clone(), cookie.clone(), site("cross-site")]),
        (page, vec![host.clone(), cookie.clone(), site("same-site")]),
    ] {
        let answer = local.ask(line, &headers).await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{line}: {answer}");
        assert!(
            !answer.contains("set-cookie") && !answer.contains("secret"),
            "{answer}"
        );
    }
    let answer = local.ask("POST /v1/graph", &[host, cookie]).await;
    assert!(answer.starts_with("HTTP/1.1 405 "), "{answer}");
    assert!(local.played.asked().is_empty());
}

#[tokio::test]
async fn the_token_is_added_and_never_answered() {
    let local = Local::start(200, &["the graph"]).await;
    let headers = [
        local.host(),
        local.cookie(),
        "Sec-Fetch-Site: same-origin".to_owned(),
        "Authorization: Bearer of-the-browser".to_owned(),
    ];
    let answer = local.ask("GET /v1/graph?namespace=red", &headers).await;
    assert!(
        answer.starts_with("HTTP/1.1 200 ") && answer.contains("the graph"),
        "{answer}"
    );
    assert!(answer.contains("content-type: text/event-stream"), "{answer}");
    // Neither the token nor a header that is not listed.
    assert!(
        !answer.contains("secret-") && !answer.contains("set-cookie"),
        "{answer}"
    );
    let asked = local.played.asked();
    assert!(
        asked[0].starts_with("GET /v1/graph?namespace=red HTTP/1.1\r\n")
            && asked[0].contains("authorization: Bearer secret-1\r\n"),
        "{asked:?}"
    );
    // Nothing of the browser's own is sent on.
    assert!(
        !asked[0].contains("of-the-browser") && !asked[0].contains("cookie"),
        "{asked:?}"
    );
}

#[tokio::test]
async fn an_event_is_passed_before_the_next_one_is_there() {
    let local = Local::start(200, &["event: graph\ndata: 1\n\n", "event: graph\ndata: 2\n\n"]).await;
    let headers = [local.host(), local.cookie()];
    let mut stream = local.send("GET /v1/graph/events?namespace=red", &headers).await;
    let mut read = String::new();
    for number in ["data: 1\n", "data: 2\n"] {
        while !read.contains(number) {
            let mut bytes = [0; 1024];
            let got = timeout(TEST_TIMEOUT, stream.read(&mut bytes))
                .await
                .unwrap()
                .unwrap();
            assert!(got > 0, "the answer ends: {read}");
            read.push_str(&String::from_utf8_lossy(&bytes[..got]));
        }
        if number == "data: 1\n" {
            assert!(!read.contains("data: 2\n"), "{read}");
            local.played.gate.notify_one();
        }
    }
}

#[tokio::test]
async fn what_fails_behind_the_door_is_told_without_the_token() {
    let local = Local::start(401, &["{\"error\": \"no\"}"]).await;
    let answer = local.ask("GET /v1/graph", &[local.host(), local.cookie()]).await;
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
    assert!(!answer.contains("secret-"), "{answer}");
}

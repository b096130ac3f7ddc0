//! The program as a process: servers answer with their name, and an asker says who answered.

#![allow(clippy::unwrap_used)] // a test

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Output};
use std::thread::sleep;
use std::time::Duration;

use thuban_connectivity::{Answer, Outcome, Question, Request};

const PROGRAM: &str = env!("CARGO_BIN_EXE_thuban-connectivity");

/// A server, which ends with this.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns an address whose port is free for TCP and UDP.
fn free() -> SocketAddr {
    loop {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        if UdpSocket::bind(address).is_ok() {
            return address;
        }
    }
}

/// Starts a server on a free port. It ends if somebody takes the port meanwhile; then another one starts.
fn serve(name: &str) -> (Server, SocketAddr) {
    loop {
        let address = free();
        let child = Command::new(PROGRAM)
            .args(["serve", "--name", name, "--listen", &address.to_string()])
            .spawn()
            .unwrap();
        let mut server = Server(child);
        while server.0.try_wait().unwrap().is_none() {
            if TcpStream::connect(address).is_ok() {
                return (server, address);
            }
            sleep(Duration::from_millis(10));
        }
    }
}

fn ask(questions: &str) -> Output {
    Command::new(PROGRAM)
        .arg("ask")
        .env("THUBAN_QUESTIONS", questions)
        .output()
        .unwrap()
}

#[test]
fn an_asker_prints_who_answered_and_who_did_not() {
    let (_server, served) = serve("red/web-0");
    let silent = free();
    let requests = [
        Request::Tcp(served),
        Request::Udp(served),
        Request::Connect(served),
        Request::Tcp(silent),
        Request::Udp(silent),
    ];
    let question = |(id, request): (usize, &Request)| Question {
        id,
        request: request.clone(),
        // Who must answer may still be starting.
        patience_ms: if id < 3 { 20_000 } else { 300 },
    };
    let questions: Vec<Question> = requests.iter().enumerate().map(question).collect();
    let output = ask(&serde_json::to_string(&questions).unwrap());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut answers: Vec<Answer> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    answers.sort_by_key(|answer| answer.id);
    let outcomes: Vec<&Outcome> = answers.iter().map(|answer| &answer.outcome).collect();
    let named = Outcome::Answered("red/web-0".to_owned());
    assert_eq!(outcomes[..3], [&named, &named, &Outcome::Answered(String::new())]);
    assert_eq!(outcomes.len(), 5, "{text}");
    for outcome in &outcomes[3..] {
        assert!(
            matches!(outcome, Outcome::Failed(why) if !why.is_empty()),
            "{text}"
        );
    }
}

#[test]
fn only_a_question_is_answered_by_udp() {
    let (_server, served) = serve("red/web-0");
    let question = Question {
        id: 0,
        request: Request::Udp(served),
        patience_ms: 20_000,
    };
    assert!(ask(&serde_json::to_string(&[question]).unwrap()).status.success());
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    socket.connect(served).unwrap();
    // The name of another server: an answer to it would go round for ever.
    socket.send(b"blue/web-0").unwrap();
    assert!(socket.recv(&mut [0; 64]).is_err());
    socket.send(b"who").unwrap();
    let mut buffer = [0; 64];
    let length = socket.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"red/web-0");
}

#[test]
fn bad_questions_are_an_error() {
    let output = ask("[{}]");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("reading the questions"), "{said}");
}

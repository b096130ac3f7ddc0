//! Asks questions over the network, and repeats each until it is answered or its time is over.

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use hickory_proto::ProtoError;
use hickory_proto::op::ResponseCode;
use thiserror::Error;

use crate::serve::DATAGRAM;
use crate::{Answer, Outcome, Question, Request, dns};

/// How long one try may take. Longer than the second in which a lost first packet is sent again.
const TRY_TIMEOUT: Duration = Duration::from_secs(2);
const SHORTEST_TRY: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(100);
/// The bytes of the longest name that is read.
const LONGEST_NAME: usize = 512;

/// Why a try failed.
#[derive(Debug, Error)]
pub(crate) enum AskError {
    #[error("no answer in time")]
    NoAnswer,
    #[error("an answer without a name")]
    Nameless,
    #[error("the DNS server says: {0}")]
    Refused(ResponseCode),
    #[error("the name has no IPv4 address")]
    NoAddress,
    #[error("DNS: {0}")]
    Dns(#[from] ProtoError),
    #[error("{0}")]
    Io(io::Error),
}

impl From<io::Error> for AskError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::NoAnswer,
            _ => Self::Io(error),
        }
    }
}

/// Asks all questions side by side, and tells each answer when it is there.
pub fn ask_all(questions: &[Question], tell: impl Fn(&Answer) + Sync) {
    thread::scope(|scope| {
        for question in questions {
            let tell = &tell;
            scope.spawn(move || {
                tell(&Answer {
                    id: question.id,
                    outcome: ask(question),
                });
            });
        }
    });
}

/// Asks until somebody answers, or until the time is over.
pub fn ask(question: &Question) -> Outcome {
    let end = Instant::now() + Duration::from_millis(question.patience_ms);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match try_once(&question.request, left.clamp(SHORTEST_TRY, TRY_TIMEOUT)) {
            Ok(text) => return Outcome::Answered(text),
            Err(error) if Instant::now() + PAUSE >= end => return Outcome::Failed(error.to_string()),
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

fn try_once(request: &Request, limit: Duration) -> Result<String, AskError> {
    match request {
        Request::Tcp(server) => {
            let stream = TcpStream::connect_timeout(server, limit)?;
            stream.set_read_timeout(Some(limit))?;
            let mut bytes = Vec::new();
            stream.take(LONGEST_NAME as u64).read_to_end(&mut bytes)?;
            name(&bytes)
        }
        Request::Udp(server) => {
            let socket = connected(*server, limit)?;
            socket.send(DATAGRAM)?;
            let mut buffer = [0; LONGEST_NAME];
            let length = socket.recv(&mut buffer)?;
            name(buffer.get(..length).unwrap_or_default())
        }
        Request::Connect(server) => {
            TcpStream::connect_timeout(server, limit)?;
            Ok(String::new())
        }
        Request::Dns { server, name } => dns::addresses(*server, name, limit),
    }
}

/// Returns a UDP socket that receives from one server only.
pub(crate) fn connected(server: SocketAddr, limit: Duration) -> io::Result<UdpSocket> {
    let any: IpAddr = if server.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_read_timeout(Some(limit))?;
    socket.connect(server)?;
    Ok(socket)
}

fn name(bytes: &[u8]) -> Result<String, AskError> {
    let name = String::from_utf8_lossy(bytes).trim().to_owned();
    if name.is_empty() {
        return Err(AskError::Nameless);
    }
    Ok(name)
}

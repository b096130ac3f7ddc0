//! Names of Vips in DNS.
//!
//! Whose a name is stands at the DNS server itself, beside the name's records, and the server compares before it
//! writes. So nobody overwrites or removes a record of somebody else: not another Vip, not another cluster, and not an
//! lbaasd that knows too little. See `docs/adr/0041-a-names-holder-stands-at-the-dns-server.md`.

pub mod etcd;
pub mod names;
pub mod servers;
pub mod status;
pub mod updates;
pub mod zones;

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use futures::future::BoxFuture;
use hickory_proto::ProtoError;
use hickory_proto::dnssec::DnsSecError;
use hickory_proto::op::ResponseCode;
use thiserror::Error;

/// How long a server may take to answer.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// The records of a zone at its server. `owner`: the UID of the Vip. After an error it is not known whether the server
/// did what it was asked: ask again.
pub trait Records: Send + Sync {
    /// Gives a name that the owner has these addresses. Returns false if the owner does not have the name.
    fn refresh<'a>(&'a self, owner: &'a str, record: &'a Record) -> BoxFuture<'a, Result<bool, DnsError>>;

    /// Gives the owner a name that nobody has. Returns false if somebody has it.
    fn claim<'a>(&'a self, owner: &'a str, record: &'a Record) -> BoxFuture<'a, Result<bool, DnsError>>;

    /// Removes what the owner has of a name. Returns false if there was nothing.
    fn withdraw<'a>(&'a self, owner: &'a str, name: &'a str) -> BoxFuture<'a, Result<bool, DnsError>>;

    /// Asks whether the server takes writes of the zone.
    fn check(&self) -> BoxFuture<'_, Result<(), DnsError>>;
}

/// A name and its addresses, at most one of each family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// In lower case, without a dot at its end.
    pub name: String,
    pub addresses: Vec<IpAddr>,
    pub ttl_seconds: u32,
}

#[derive(Debug, Error)]
pub enum DnsError {
    #[error("no answer within {} s", TIMEOUT.as_secs())]
    Late,
    #[error("the connection: {0}")]
    Connection(#[from] io::Error),
    #[error("the server was away {} s ago: not asked again yet", .0.as_secs())]
    Paused(Duration),
    #[error("enough requests are under way")]
    Busy,
    #[error("a message: {0}")]
    Message(#[from] ProtoError),
    #[error("the key: {0}")]
    Key(#[from] DnsSecError),
    #[error("the server does not accept the key: are its name, algorithm and secret those of the server?")]
    KeyRefused,
    #[error("the server's clock and this one differ by more than {} s", updates::FUDGE)]
    ClockDiffers,
    #[error("the server answers {0}")]
    Refused(ResponseCode),
    #[error("etcd: {0}")]
    Etcd(#[from] kube::Error),
    #[error("a request: {0}")]
    Request(#[from] http::Error),
    #[error("a value: {0}")]
    Value(#[from] serde_json::Error),
    #[error("etcd's keys of the name changed while they were written")]
    Contended,
    #[error("reading the Secret {name} in the namespace {}: {error}", servers::NAMESPACE)]
    Secret { name: String, error: Box<kube::Error> },
    #[error(
        "the Secret {name} in the namespace {}: {field} is missing or unusable",
        servers::NAMESPACE
    )]
    SecretField { name: String, field: &'static str },
    #[error("spec: {0} is unusable")]
    Spec(&'static str),
}

impl DnsError {
    /// Returns the reason that the DnsZone's condition gives.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Late
            | Self::Connection(_)
            | Self::Paused(_)
            | Self::Busy
            | Self::Contended
            | Self::Etcd(_) => "ServerAway",
            Self::KeyRefused => "KeyRefused",
            Self::Message(_) => "AnswerInvalid",
            Self::ClockDiffers => "ClockDiffers",
            Self::Refused(_) => "Refused",
            Self::Secret { .. } | Self::SecretField { .. } | Self::Key(_) => "SecretInvalid",
            Self::Spec(_) | Self::Value(_) | Self::Request(_) => "SpecInvalid",
        }
    }
}

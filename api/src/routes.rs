//! What nodes and lbaasd say to each other: `POST /v1/routes`.
//!
//! A node has one request under way at a time. It numbers its requests, and never uses the answer to a request that it
//! gave up. What a request does not name, the node has renounced: it announces it only after another answer.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The audience of the token by which lbaasd knows a node.
pub const TOKEN_AUDIENCE: &str = "thuban-lbaasd";
/// The name by which nodes verify lbaasd's certificate.
pub const TLS_NAME: &str = "lbaasd.thuban-system.svc";
/// No request has this number, nor a higher one.
pub const END_OF_SEQUENCES: u64 = 1 << 62;
/// The namespace of the Secrets that BgpPeers name. Speakers may read all of its Secrets.
pub const PASSWORD_NAMESPACE: &str = "thuban-bgp";
/// How long lbaasd takes to answer at most, in seconds.
pub const LONGEST_ANSWER_SECONDS: u64 = 25;

/// What a node says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Report {
    /// Grows with each request of the node, also over restarts.
    pub sequence: u64,
    /// What the node announces, or may announce.
    pub announced: Vec<Announced>,
    /// The addresses of load balancers that the node serves. Others are not granted.
    pub serves: Vec<Serving>,
    /// The version of the last answer, for which the next one waits to differ. Empty: it doesn't wait.
    pub version: String,
    /// The BgpPeers that the node has no session with, because it does not have their passwords.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without_password: Vec<WithoutPassword>,
}

/// A BgpPeer whose password a node does not have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WithoutPassword {
    /// The BgpPeer's name.
    pub peer: String,
    pub problem: PasswordProblem,
}

/// Why a node does not have a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PasswordProblem {
    /// There is no such Secret.
    NotFound,
    /// The Secret has another type, or no usable password.
    Invalid,
    /// The API server does not answer, or refuses.
    Unreadable,
}

/// An address that a node leads to a Service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Serving {
    pub address: IpAddr,
    /// The Service as `namespace/name`. Empty if the node does not know it yet: that is believed of a node that was let
    /// announce the address before.
    pub service: String,
    /// Whether the node can answer ARP or neighbour discovery for the address: a subnet of its uplink has the address.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_link: bool,
}

/// An address that a node announces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Announced {
    /// The Vip's UID. Empty if the node does not know it any more.
    pub uid: String,
    pub address: IpAddr,
}

/// What a node is to announce: these addresses and no other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Routes {
    pub version: String,
    /// The highest number of a request of this node that lbaasd knows. The next one must be higher.
    pub sequence: u64,
    pub routes: Vec<Route>,
    pub peers: Vec<Peer>,
    /// How soon the node asks again, in milliseconds, so that it keeps its addresses of L2. Absent: at once, and lbaasd
    /// waits with its answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renew_after_ms: Option<u64>,
}

/// An address to announce.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Route {
    /// The Vip's UID.
    pub uid: String,
    pub address: IpAddr,
    /// The seconds for which the address may be announced, from when the node sent its request. Absent: as long as the
    /// node was told before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remaining_seconds: Option<u64>,
    /// Whether the node answers ARP and neighbour discovery for the address, and tells no router.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub l2: bool,
}

/// A router to announce to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Peer {
    /// The BgpPeer's name.
    pub name: String,
    pub address: IpAddr,
    pub port: u16,
    pub asn: u32,
    pub local_asn: u32,
    pub bfd: Option<Bfd>,
    /// The seconds for which the router keeps routes of a session that broke. 0: none.
    pub graceful_restart_seconds: u16,
    pub hold_seconds: u16,
    /// The Secret that has the session's password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_secret: Option<String>,
    /// The TTL of packets to a router that is not on the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multihop_ttl: Option<u8>,
}

/// How soon a silent neighbour counts as gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bfd {
    /// The milliseconds between two packets.
    pub interval_ms: u32,
    /// How many packets in a row are lost when the neighbour is gone.
    pub multiplier: u32,
}

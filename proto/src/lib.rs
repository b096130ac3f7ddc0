//! gRPC contracts of Thuban, generated at build.
//!
//! `cni`: the CNI plugin calls transitd over a Unix socket on the same node.
//! `gobgp`: the speaker configures gobgpd over a Unix socket in their pod. The contract is that of gobgpd.
//! `inspect`: verbs of transitd and the speaker ask the daemon over the same socket.
//! `observe`: transitd dials thuban-observe and tells it of flows.
//! `transit`: transitd dials the operator and holds one stream.
//! Invariant: both sides of a contract are built from the same `.proto`; field numbers are never reused.

pub mod codec;

/// The contract between the CNI plugin and transitd.
#[allow(clippy::pedantic)]
pub mod cni {
    tonic::include_proto!("thuban.cni.v1");
}

/// The part of gobgpd's interface that the speaker uses.
#[allow(clippy::pedantic)]
pub mod gobgp {
    tonic::include_proto!("api");
}

/// The contract between transitd's verbs and the daemon.
#[allow(clippy::pedantic)]
pub mod inspect {
    tonic::include_proto!("thuban.inspect.v1");
}

/// The contract between transitd and thuban-observe.
#[allow(clippy::pedantic)]
pub mod observe {
    tonic::include_proto!("thuban.observe.v1");
}

/// The contract between transitd and the operator.
#[allow(clippy::pedantic)]
pub mod transit {
    tonic::include_proto!("thuban.transit.v1");
}

/// The fixed name in the operator's certificate, whatever address it is dialled at.
pub const OPERATOR_TLS_NAME: &str = "thuban-operator";
/// Audience of the projected ServiceAccount token with which a node proves itself to the operator.
pub const OPERATOR_TOKEN_AUDIENCE: &str = "thuban-operator";
/// The fixed name in thuban-observe's certificate, whatever address it is dialled at.
pub const OBSERVE_TLS_NAME: &str = "thuban-observe";
/// Audience of the tokens with which nodes and readers prove themselves to thuban-observe.
pub const OBSERVE_TOKEN_AUDIENCE: &str = "thuban-observe";
/// Version of the transit contract, sent in `Hello`. Operator and transitd work together when their versions are at
/// most one apart: each ignores fields and messages that it doesn't know. The kinds of rows that a droplet understands
/// are listed separately, in `Hello.row_kinds`. A droplet sends `Denials`, and drops in them, only to an operator that
/// has asked for them, so they needed no version. The operator sends `Probe` only to droplets that have said
/// `Hello.can_probe`. Version 2 added `Load`, `LocalRow.moved_from` and `relays` of
/// `VpcRow` and `NetworkRow`.
pub const PROTOCOL_VERSION: u32 = 2;
/// The most entries of one `Denials`.
pub const MAX_DENIALS: usize = 1024;
/// The most entries of one `Checks`, and so the most checks of a droplet.
pub const MAX_CHECKS: usize = 512;
/// The most drops of one `Denials`.
pub const MAX_DROPS: usize = 256;
/// The most sightings of one `Probed`.
pub const MAX_SIGHTINGS: usize = 16;
/// Socket on which transitd listens for the CNI plugin, unless the CNI configuration names another path.
pub const DEFAULT_CNI_SOCKET: &str = "/run/thuban/cni.sock";
/// Directory in which the CNI plugin leaves DELs while transitd is away, unless the CNI configuration names another
/// path.
pub const DEFAULT_CNI_SPOOL: &str = "/var/lib/thuban/spool";
/// File beside the socket that holds the boot id: a transitd of this boot has served pods, so its absence may be a
/// restart.
pub const SERVED_FILE: &str = "served";
/// File beside the socket that says since when STATUS has found transitd not ready. The plugin writes it, and removes
/// it when transitd is ready.
pub const AWAY_FILE: &str = "away";

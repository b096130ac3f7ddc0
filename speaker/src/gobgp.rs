//! The client of gobgpd.
//!
//! Only the speaker's own routes get into gobgpd's table: what peers announce is rejected, and so no peer is told of
//! another peer's routes.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;
use thuban_proto::gobgp::attribute::Attr;
use thuban_proto::gobgp::conditions::RouteType;
use thuban_proto::gobgp::family::{Afi, Safi};
use thuban_proto::gobgp::go_bgp_service_client::GoBgpServiceClient;
use thuban_proto::gobgp::nlri::Nlri as Prefix;
use thuban_proto::gobgp::peer_state::SessionState;
use thuban_proto::gobgp::{
    Actions, AddPathRequest, AddPeerRequest, AfiSafi, AfiSafiConfig, AsPathAttribute, AsSegment, Attribute,
    BfdPeerConfig, Conditions, DeletePathRequest, DeletePeerRequest, EbgpMultihop, Family, GetBgpRequest,
    Global, GracefulRestart, IpAddressPrefix, ListPathRequest, ListPeerRequest, MpGracefulRestart,
    MpGracefulRestartConfig, MultiExitDiscAttribute, NextHopAttribute, Nlri, OriginAttribute, Path, Peer,
    PeerConf, Policy, PolicyAssignment, PolicyDirection, RouteAction, SetPoliciesRequest,
    SetPolicyAssignmentRequest, StartBgpRequest, Statement, TableType, Timers, TimersConfig, Transport,
    UpdatePeerRequest, as_segment,
};
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::Channel;

use crate::decide::{Form, Step};
use crate::passwords::Password;
use thuban_api::routes as contract;

/// How long an answer of gobgpd may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a lengthened AS path has the own AS number more than a plain one.
const LENGTHENED: usize = 3;
/// The metric (MULTI_EXIT_DISC) of a route that routers should not prefer. A plain route has none, which counts as 0.
const METRIC: u32 = 100;
/// Seconds between two attempts to connect to a peer.
const CONNECT_RETRY: u64 = 5;
/// Seconds without an attempt to connect after a session broke.
const IDLE_AFTER_RESET: u64 = 1;
/// Seconds for which gobgpd waits for the end of a peer's routes after a restart, until it sends its own.
const DEFERRAL: u32 = 5;
/// The policy that lets in own routes.
const OWN_ROUTES: &str = "own-routes";

#[derive(Debug, Error)]
pub enum GobgpError {
    #[error("gobgpd: {operation}: {}", .source.message())]
    Refused { operation: &'static str, source: Status },
    #[error("gobgpd: {0}: no answer in time")]
    Silent(&'static str),
}

/// Where routers send packets to: addresses of the node.
#[derive(Clone, Copy, Debug)]
pub struct NextHops {
    pub v4: Ipv4Addr,
    pub v6: Option<Ipv6Addr>,
}

impl NextHops {
    /// Returns the next hop of a route; `None`: the node can't announce it.
    pub fn of(&self, address: IpAddr) -> Option<IpAddr> {
        match address {
            IpAddr::V4(_) => Some(self.v4.into()),
            IpAddr::V6(_) => self.v6.map(Into::into),
        }
    }
}

/// A router to announce to, and the password of the session if it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub peer: contract::Peer,
    pub password: Option<Password>,
}

/// How routers are told to prefer other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengthening {
    /// This AS number is some more times in the AS path.
    Path(u32),
    /// The route has a metric. A router of the nodes' own AS drops routes with its AS number in the path.
    Metric,
}

/// A connection to gobgpd.
#[derive(Clone, Debug)]
pub struct Gobgp(GoBgpServiceClient<Channel>);

/// Waits for an answer of gobgpd, as long as it may take.
async fn answer<T>(
    operation: &'static str,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, GobgpError> {
    let answered = timeout(ANSWER_TIMEOUT, call).await;
    let answered = answered.map_err(|_| GobgpError::Silent(operation))?;
    answered.map_err(|source| GobgpError::Refused { operation, source })
}

impl Gobgp {
    /// Makes a client of the gobgpd at a Unix socket. The first call connects.
    pub fn new(socket: PathBuf) -> Self {
        Self(GoBgpServiceClient::new(crate::channel(socket)))
    }

    /// Returns gobgpd's AS number; `None`: gobgpd is to be started.
    pub async fn asn(&mut self) -> Result<Option<u32>, GobgpError> {
        let reply = answer("GetBgp", self.0.get_bgp(GetBgpRequest {})).await?;
        let global = reply.into_inner().global.unwrap_or_default();
        Ok(Some(global.asn).filter(|asn| *asn != 0))
    }

    /// Starts BGP, without a port of its own: gobgpd connects to its peers.
    pub async fn start(&mut self, asn: u32, router_id: Ipv4Addr) -> Result<(), GobgpError> {
        let global = Some(Global {
            asn,
            router_id: router_id.to_string(),
            listen_port: -1,
        });
        answer("StartBgp", self.0.start_bgp(StartBgpRequest { global })).await?;
        Ok(())
    }

    /// Makes gobgpd reject what its peers announce.
    pub async fn reject_routes_of_peers(&mut self) -> Result<(), GobgpError> {
        let policy = Policy {
            name: OWN_ROUTES.to_owned(),
            statements: vec![Statement {
                name: OWN_ROUTES.to_owned(),
                conditions: Some(Conditions {
                    route_type: RouteType::Local.into(),
                }),
                actions: Some(Actions {
                    route_action: RouteAction::Accept.into(),
                }),
            }],
        };
        let request = SetPoliciesRequest {
            policies: vec![policy.clone()],
        };
        answer("SetPolicies", self.0.set_policies(request)).await?;
        let assignment = Some(PolicyAssignment {
            name: "global".to_owned(),
            direction: PolicyDirection::Import.into(),
            policies: vec![policy],
            default_action: RouteAction::Reject.into(),
        });
        let request = SetPolicyAssignmentRequest { assignment };
        answer("SetPolicyAssignment", self.0.set_policy_assignment(request)).await?;
        Ok(())
    }

    /// Returns the addresses of all routes.
    pub async fn routes(&mut self) -> Result<BTreeSet<IpAddr>, GobgpError> {
        let mut addresses = BTreeSet::new();
        for afi in [Afi::Ip, Afi::Ip6] {
            let request = ListPathRequest {
                table_type: TableType::Global.into(),
                family: Some(family(afi)),
            };
            let list = async {
                let mut replies = self.0.list_path(request).await?.into_inner();
                while let Some(reply) = replies.message().await? {
                    let prefix = reply.destination.unwrap_or_default().prefix;
                    let address = prefix
                        .split_once('/')
                        .map_or(prefix.as_str(), |(address, _)| address);
                    addresses.extend(address.parse::<IpAddr>());
                }
                Ok(())
            };
            answer("ListPath", list).await?;
        }
        Ok(addresses)
    }

    /// Announces or withdraws a route.
    pub async fn carry_out(
        &mut self,
        step: &Step,
        next_hop: IpAddr,
        lengthening: Lengthening,
    ) -> Result<(), GobgpError> {
        let table_type = TableType::Global.into();
        match *step {
            Step::Add(address, form) => {
                let path = Some(path(address, form, next_hop, lengthening));
                answer("AddPath", self.0.add_path(AddPathRequest { table_type, path })).await?;
            }
            Step::Delete(address) => {
                let path = Some(path(address, Form::Plain, next_hop, lengthening));
                answer(
                    "DeletePath",
                    self.0.delete_path(DeletePathRequest { table_type, path }),
                )
                .await?;
            }
        }
        Ok(())
    }

    /// Returns all peers, with their states.
    pub async fn peers(&mut self) -> Result<Vec<Peer>, GobgpError> {
        let list = async {
            let mut peers = Vec::new();
            let mut replies = self.0.list_peer(ListPeerRequest {}).await?.into_inner();
            while let Some(reply) = replies.message().await? {
                peers.extend(reply.peer);
            }
            Ok(peers)
        };
        answer("ListPeer", list).await
    }

    /// Adds a peer. `has_restarted`: the peer may have routes of a gobgpd before this one, and should keep them until
    /// this one has sent its own.
    pub async fn add_peer(&mut self, wanted: &Wanted, has_restarted: bool) -> Result<(), GobgpError> {
        let mut peer = peer(wanted);
        if let Some(restart) = &mut peer.graceful_restart {
            restart.local_restarting = restart.enabled && has_restarted;
        }
        let peer = Some(peer);
        answer("AddPeer", self.0.add_peer(AddPeerRequest { peer })).await?;
        Ok(())
    }

    /// Turns BFD of a peer on or off. The session goes on.
    pub async fn set_bfd(&mut self, wanted: &Wanted, is_on: bool) -> Result<(), GobgpError> {
        let mut peer = peer(wanted);
        peer.bfd = Some(bfd(&wanted.peer).filter(|_| is_on).unwrap_or_default());
        let request = UpdatePeerRequest { peer: Some(peer) };
        answer("UpdatePeer", self.0.update_peer(request)).await?;
        Ok(())
    }

    pub async fn delete_peer(&mut self, address: String) -> Result<(), GobgpError> {
        answer("DeletePeer", self.0.delete_peer(DeletePeerRequest { address })).await?;
        Ok(())
    }
}

/// Returns the address of a peer.
pub fn address(peer: &Peer) -> &str {
    peer.conf.as_ref().map_or("", |conf| &conf.neighbor_address)
}

pub fn has_password(peer: &Peer) -> bool {
    peer.conf
        .as_ref()
        .is_some_and(|conf| !conf.auth_password.is_empty())
}

pub fn is_established(peer: &Peer) -> bool {
    let state = peer
        .state
        .as_ref()
        .map(thuban_proto::gobgp::PeerState::session_state);
    state == Some(SessionState::Established)
}

/// Returns whether a peer's BFD should be turned on (`true`) or off (`false`). BFD is on while the session is
/// established, because some routers begin BFD only then: BFD from the start would end the session again and again.
/// `is_settled`: the session has been established for a while.
pub fn change_of_bfd(listed: &Peer, wanted: &Wanted, is_settled: bool) -> Option<bool> {
    let known = listed.bfd.filter(|bfd| bfd.enabled);
    if is_established(listed) {
        (is_settled && known != bfd(&wanted.peer)).then_some(true)
    } else {
        known.map(|_| false)
    }
}

/// Returns whether gobgpd has a peer as it is wanted, but for BFD.
pub fn is_equal(listed: &Peer, wanted: &Wanted) -> bool {
    let wanted = peer(wanted);
    // gobgpd fills in a default for what is 0 here.
    let timers = |peer: &Peer| {
        let config = peer
            .timers
            .as_ref()
            .and_then(|timers| timers.config)
            .unwrap_or_default();
        (
            config.connect_retry,
            config.hold_time,
            config.idle_hold_time_after_reset,
        )
    };
    let restart = |peer: &Peer| {
        let restart = peer.graceful_restart.unwrap_or_default();
        (
            restart.enabled,
            if restart.enabled { restart.restart_time } else { 0 },
        )
    };
    listed.conf == wanted.conf
        && timers(listed) == timers(&wanted)
        && listed.transport == wanted.transport
        && listed.ebgp_multihop == wanted.ebgp_multihop
        && restart(listed) == restart(&wanted)
}

fn family(afi: Afi) -> Family {
    Family {
        afi: afi.into(),
        safi: Safi::Unicast.into(),
    }
}

fn path(address: IpAddr, form: Form, next_hop: IpAddr, lengthening: Lengthening) -> Path {
    let (afi, prefix_len) = match address {
        IpAddr::V4(_) => (Afi::Ip, 32),
        IpAddr::V6(_) => (Afi::Ip6, 128),
    };
    let next_hop = next_hop.to_string();
    let mut attributes = vec![
        Attr::Origin(OriginAttribute { origin: 0 }),
        Attr::NextHop(NextHopAttribute { next_hop }),
    ];
    if form == Form::Lengthened {
        attributes.push(match lengthening {
            Lengthening::Path(asn) => Attr::AsPath(AsPathAttribute {
                segments: vec![AsSegment {
                    r#type: as_segment::Type::AsSequence.into(),
                    numbers: vec![asn; LENGTHENED],
                }],
            }),
            Lengthening::Metric => Attr::MultiExitDisc(MultiExitDiscAttribute { med: METRIC }),
        });
    }
    let prefix = address.to_string();
    Path {
        nlri: Some(Nlri {
            nlri: Some(Prefix::Prefix(IpAddressPrefix { prefix_len, prefix })),
        }),
        pattrs: attributes
            .into_iter()
            .map(|attr| Attribute { attr: Some(attr) })
            .collect(),
        family: Some(family(afi)),
    }
}

fn bfd(wanted: &contract::Peer) -> Option<BfdPeerConfig> {
    wanted.bfd.map(|bfd| {
        let interval = bfd.interval_ms.saturating_mul(1000);
        BfdPeerConfig {
            enabled: true,
            desired_minimum_tx_interval: interval,
            required_minimum_receive: interval,
            detection_multiplier: bfd.multiplier.min(u8::MAX.into()),
        }
    })
}

/// Returns a peer without BFD.
fn peer(wanted: &Wanted) -> Peer {
    let Wanted {
        peer: wanted,
        password,
    } = wanted;
    let restarts = wanted.graceful_restart_seconds != 0;
    let afi_safi = |afi| AfiSafi {
        config: Some(AfiSafiConfig {
            family: Some(family(afi)),
            enabled: true,
        }),
        mp_graceful_restart: Some(MpGracefulRestart {
            config: Some(MpGracefulRestartConfig { enabled: restarts }),
        }),
    };
    Peer {
        conf: Some(PeerConf {
            auth_password: password.as_ref().map_or("", Password::text).to_owned(),
            description: wanted.name.clone(),
            local_asn: wanted.local_asn,
            neighbor_address: wanted.address.to_string(),
            peer_asn: wanted.asn,
        }),
        ebgp_multihop: Some(EbgpMultihop {
            enabled: wanted.multihop_ttl.is_some(),
            multihop_ttl: wanted.multihop_ttl.unwrap_or_default().into(),
        }),
        state: None,
        timers: Some(Timers {
            config: Some(TimersConfig {
                connect_retry: CONNECT_RETRY,
                hold_time: wanted.hold_seconds.into(),
                keepalive_interval: 0,
                idle_hold_time_after_reset: IDLE_AFTER_RESET,
            }),
        }),
        transport: Some(Transport {
            remote_port: wanted.port.into(),
        }),
        graceful_restart: Some(GracefulRestart {
            enabled: restarts,
            restart_time: wanted.graceful_restart_seconds.into(),
            deferral_time: DEFERRAL,
            local_restarting: false,
        }),
        afi_safis: vec![afi_safi(Afi::Ip), afi_safi(Afi::Ip6)],
        bfd: None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use thuban_proto::gobgp::PeerState;

    use super::*;
    use crate::passwords::tests::of;

    fn wanted() -> Wanted {
        let peer = contract::Peer {
            name: "tor".to_owned(),
            address: "192.0.2.1".parse().unwrap(),
            port: 179,
            asn: 64512,
            local_asn: 64513,
            bfd: Some(contract::Bfd {
                interval_ms: 300,
                multiplier: 3,
            }),
            graceful_restart_seconds: 20,
            hold_seconds: 9,
            password_secret: None,
            multihop_ttl: None,
        };
        Wanted { peer, password: None }
    }

    /// Returns a peer as gobgpd lists it.
    fn listed(state: SessionState) -> Peer {
        let mut listed = peer(&wanted());
        let session_state = state.into();
        listed.state = Some(PeerState { session_state });
        listed.bfd = Some(BfdPeerConfig {
            detection_multiplier: 3,
            ..BfdPeerConfig::default()
        });
        listed
    }

    #[test]
    fn every_change_of_a_peer_is_seen() {
        let (listed, same) = (listed(SessionState::Active), wanted());
        assert!(is_equal(&listed, &same));
        let changes: [fn(&mut Wanted); 8] = [
            |wanted| wanted.peer.name = "leaf".to_owned(),
            |wanted| wanted.peer.port = 1179,
            |wanted| wanted.peer.asn = 64514,
            |wanted| wanted.peer.local_asn = 64514,
            |wanted| wanted.peer.graceful_restart_seconds = 0,
            |wanted| wanted.peer.hold_seconds = 90,
            |wanted| wanted.peer.multihop_ttl = Some(2),
            |wanted| wanted.password = Some(of("s3cret")),
        ];
        for (index, change) in changes.iter().enumerate() {
            let mut changed = wanted();
            change(&mut changed);
            assert!(!is_equal(&listed, &changed), "change {index}");
        }
    }

    #[test]
    fn bfd_is_on_while_the_session_is_established() {
        let (mut up, mut down) = (listed(SessionState::Established), listed(SessionState::Active));
        assert_eq!(change_of_bfd(&down, &wanted(), false), None);
        assert_eq!(change_of_bfd(&up, &wanted(), false), None);
        assert_eq!(change_of_bfd(&up, &wanted(), true), Some(true));
        (up.bfd, down.bfd) = (bfd(&wanted().peer), bfd(&wanted().peer));
        assert_eq!(change_of_bfd(&down, &wanted(), false), Some(false));
        assert_eq!(change_of_bfd(&up, &wanted(), false), None);
        assert_eq!(change_of_bfd(&up, &wanted(), true), None);
    }

    #[test]
    fn a_lengthened_path_has_the_own_number_three_more_times() {
        let numbers = |form, lengthening| {
            let attributes = attributes(form, lengthening).into_iter();
            attributes
                .filter_map(|attribute| match attribute {
                    Attr::AsPath(path) => Some(path.segments[0].numbers.clone()),
                    _ => None,
                })
                .collect::<Vec<_>>()
        };
        assert!(numbers(Form::Plain, Lengthening::Path(64513)).is_empty());
        assert_eq!(
            numbers(Form::Lengthened, Lengthening::Path(64513)),
            [vec![64513; 3]]
        );
        assert!(numbers(Form::Lengthened, Lengthening::Metric).is_empty());
    }

    #[test]
    fn a_router_of_the_own_as_sees_a_metric() {
        let metric = |form| {
            let attributes = attributes(form, Lengthening::Metric);
            attributes.contains(&Attr::MultiExitDisc(MultiExitDiscAttribute { med: METRIC }))
        };
        assert!(metric(Form::Lengthened));
        assert!(!metric(Form::Plain));
    }

    #[test]
    fn changing_bfd_keeps_the_password_and_the_ttl() {
        let mut wanted = wanted();
        wanted.password = Some(of("s3cret"));
        wanted.peer.multihop_ttl = Some(3);
        let mut updated = peer(&wanted);
        updated.bfd = bfd(&wanted.peer);
        assert!(is_equal(&updated, &wanted));
        assert!(has_password(&updated));
    }

    fn attributes(form: Form, lengthening: Lengthening) -> Vec<Attr> {
        let path = path(
            "2001:db8::7".parse().unwrap(),
            form,
            "2001:db8::1".parse().unwrap(),
            lengthening,
        );
        let attributes = path.pattrs.into_iter();
        attributes.filter_map(|attribute| attribute.attr).collect()
    }
}

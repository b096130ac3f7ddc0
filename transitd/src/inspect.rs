//! Tells transitd's verbs what they can't read themselves: the names of policies, and what programs write into ring
//! buffers. They ask by the socket of the CNI service, where only root may.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thuban_api::identifiers::Vni;
use thuban_common::tables::EndpointKey;
use thuban_proto::inspect::denier_reply::Denier as Told;
use thuban_proto::inspect::inspect_client::InspectClient;
use thuban_proto::inspect::inspect_server::{Inspect, InspectServer};
use thuban_proto::inspect::{
    DenialsRequest, DenierReply, DenierRequest, DenyingRule, NoRule, ServedAddress, ServedReply,
    ServedRequest, TraceRequest, TracedEndpoint, Unjudged,
};
use thuban_rows::PolicyId;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

use crate::follow::followers::Replies;
use crate::node::Node;
use crate::program::policy::Denier;
use crate::socket;

/// How long the daemon's answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The time without a question after one that had no answer.
const RETRY: Duration = Duration::from_secs(1);
/// The most answers that are kept.
const MAX_KNOWN: usize = 4096;
/// The most endpoints of a trace: TRACED has room for those of all that may follow.
const MAX_ENDPOINTS: usize = 8;

#[derive(Debug)]
pub struct Service {
    node: Arc<Node>,
}

pub fn server(node: Arc<Node>) -> InspectServer<Service> {
    InspectServer::new(Service { node })
}

#[tonic::async_trait]
impl Inspect for Service {
    type TraceStream = Replies;
    type DenialsStream = Replies;

    async fn trace(&self, request: Request<TraceRequest>) -> Result<Response<Replies>, Status> {
        let endpoints = request.into_inner().endpoints;
        if !(1..=MAX_ENDPOINTS).contains(&endpoints.len()) {
            let message = format!("endpoints: 1 to {MAX_ENDPOINTS} addresses can be traced at a time");
            return Err(Status::invalid_argument(message));
        }
        let keys: Option<Vec<EndpointKey>> = endpoints.into_iter().map(endpoint_key).collect();
        let keys = keys.ok_or_else(|| Status::invalid_argument("endpoints: an address has 16 bytes"))?;
        let replies = self.node.traces.follow(keys);
        Ok(Response::new(replies.map_err(|error| Status::from(&error))?))
    }

    async fn denials(&self, _: Request<DenialsRequest>) -> Result<Response<Replies>, Status> {
        let replies = self.node.denials.follow(());
        Ok(Response::new(replies.map_err(|error| Status::from(&error))?))
    }

    async fn denier(&self, request: Request<DenierRequest>) -> Result<Response<DenierReply>, Status> {
        let request = request.into_inner();
        let invalid = |field: &str| Status::invalid_argument(format!("{field}: out of range"));
        let vni = Vni::new(request.vni).ok_or_else(|| invalid("vni"))?;
        let set = PolicyId::new(request.set).ok_or_else(|| invalid("set"))?;
        let rank = u16::try_from(request.rank).map_err(|_| invalid("rank"))?;
        let denier = self.node.state().policies.denier(vni, set, rank);
        Ok(Response::new(tell(denier)))
    }

    async fn served(&self, _: Request<ServedRequest>) -> Result<Response<ServedReply>, Status> {
        let bytes = |address: &IpAddr| match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        // The kernel may have rules that an earlier process wrote.
        let state = self.node.state();
        let outside = state.rules.outside.as_ref();
        let outside = outside.ok_or_else(|| Status::unavailable("the operator has not been heard yet"))?;
        // Programs of another layout have tables of their own.
        let fronted = state.fronted.iter().filter(|_| !state.is_replacing);
        let served: BTreeSet<_> = outside.iter().chain(fronted).collect();
        let served = served.into_iter();
        let served = served.map(|(address, service)| ServedAddress {
            address: bytes(address),
            service: service.clone(),
        });
        let served = served.collect();
        Ok(Response::new(ServedReply { served }))
    }
}

fn endpoint_key(endpoint: TracedEndpoint) -> Option<EndpointKey> {
    Some(EndpointKey {
        vni: endpoint.vni,
        address: endpoint.address.try_into().ok()?,
    })
}

fn tell(denier: Denier) -> DenierReply {
    let told = match denier {
        Denier::Rule { policy, index } => Told::Rule(DenyingRule {
            policy: policy.to_string(),
            index,
        }),
        Denier::NoRule { policies, more } => Told::NoRule(NoRule {
            policies: policies.iter().map(ToString::to_string).collect(),
            more,
        }),
        Denier::NoRoom => Told::Unjudged(Unjudged { no_room: true }),
        Denier::Unknown => Told::Unjudged(Unjudged { no_room: false }),
    };
    DenierReply { denier: Some(told) }
}

/// Returns what was told; `None` for an answer that this version doesn't know.
fn hear(reply: DenierReply) -> Option<Denier> {
    Some(match reply.denier? {
        Told::Rule(rule) => Denier::Rule {
            policy: rule.policy.into(),
            index: rule.index,
        },
        Told::NoRule(NoRule { policies, more }) => Denier::NoRule {
            policies: policies.into_iter().map(Into::into).collect(),
            more,
        },
        Told::Unjudged(Unjudged { no_room: true }) => Denier::NoRoom,
        Told::Unjudged(Unjudged { no_room: false }) => Denier::Unknown,
    })
}

/// The daemon's answers about who denies.
#[derive(Debug)]
pub struct Deniers {
    daemon: InspectClient<Channel>,
    /// Answers that stay true, because a set never changes.
    known: HashMap<(u32, u32, u16), Denier>,
    /// The last question that had no answer.
    failed: Option<Instant>,
}

impl Deniers {
    /// Returns the answers of the daemon at a socket. The first question connects.
    pub fn ask(socket: PathBuf) -> Self {
        let channel =
            Endpoint::from_static("http://transitd").connect_with_connector_lazy(socket::connector(socket));
        Self {
            daemon: InspectClient::new(channel),
            known: HashMap::new(),
            failed: None,
        }
    }

    /// Returns who denies a packet by the rule of a rank of a VPC's set, or by none. `None`: the daemon gives no
    /// answer.
    pub async fn of(&mut self, vni: u32, set: u32, rank: u16) -> Option<Denier> {
        let key = (vni, set, rank);
        if let Some(known) = self.known.get(&key) {
            return Some(known.clone());
        }
        if self.failed.is_some_and(|failed| failed.elapsed() < RETRY) {
            return None;
        }
        let request = DenierRequest {
            vni,
            set,
            rank: rank.into(),
        };
        let Ok(Ok(reply)) = timeout(ANSWER_TIMEOUT, self.daemon.denier(request)).await else {
            self.failed = Some(Instant::now());
            return None;
        };
        let denier = hear(reply.into_inner())?;
        if matches!(denier, Denier::Rule { .. } | Denier::NoRule { .. }) {
            if self.known.len() >= MAX_KNOWN {
                self.known.clear();
            }
            self.known.insert(key, denier.clone());
        }
        Some(denier)
    }
}

#[cfg(test)]
mod tests {
    use super::{DenierReply, hear, tell};
    use crate::program::policy::Denier;

    #[test]
    fn who_denies_is_heard_as_told() {
        for denier in [
            Denier::Rule {
                policy: "red/web".into(),
                index: 3,
            },
            Denier::NoRule {
                policies: vec!["red/a".into(), "red/b".into()],
                more: 1,
            },
            Denier::NoRoom,
            Denier::Unknown,
        ] {
            assert_eq!(hear(tell(denier.clone())), Some(denier));
        }
        assert_eq!(hear(DenierReply::default()), None);
    }
}

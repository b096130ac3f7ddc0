//! Says why packets of a pod reach a target, or do not: the first thing that is wrong, from the world and from what
//! droplets have acked.
//!
//! Invariant: of other VPCs nothing is told, and of pods of another namespace than the asker's only whether packets
//! reach them. So pods that do not exist and pods of other VPCs are told of in the same words.
//!
//! | file | what it looks at |
//! |---|---|
//! | `service` | a Service's address, its ports and backends |
//! | `policies` | network policies of both ends |
//! | `delivery` | droplets and their rows |
//! | `fault` | what may be wrong |
//! | `probe` | the packet of a probe, and the droplets that it may pass |

mod delivery;
mod fault;
mod policies;
mod probe;
mod service;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use thuban_api::cidr::Cidr;
use thuban_api::{PathStep, PathStepState, PathVerdict, reasons};

pub use delivery::{Delivery, DropletState, RowState};
use fault::{Cause, Fault, no, unknown};
pub use probe::ProbePlan;
use service::Reached;

use super::{Address, Endpoint, EndpointName, Membership, Network, Vpc, World};

/// The kind in the table of reasons.
const KIND: &str = "PathTrace";

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The pod that sends. Its namespace is the asker's.
    pub source: AskedPod,
    pub target: Target,
    /// The IP protocol's number.
    pub protocol: u8,
    /// The target's port; none: any.
    pub port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Pod(AskedPod),
    Service { namespace: String, name: String },
    Address(IpAddr),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedPod {
    pub namespace: String,
    pub name: String,
    pub state: PodState,
}

/// A pod, as the API server's objects tell of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodState {
    Missing,
    /// No node has been chosen for it.
    Unbound,
    Ended,
    OnHostNetwork,
    Bound {
        /// The Endpoint that it has, or is to have.
        endpoint: EndpointName,
        /// Reason and message of the Endpoint's condition that is False.
        told: Option<(String, String)>,
    },
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    pub verdict: PathVerdict,
    /// The reason of the last step, unless all is well.
    pub reason: Option<String>,
    pub steps: Vec<PathStep>,
}

/// An endpoint with all that its packets depend on.
#[derive(Clone, Copy, Debug)]
struct Place<'a> {
    name: &'a EndpointName,
    endpoint: &'a Endpoint,
    address: &'a Address,
    network: &'a Network,
    vpc: &'a Vpc,
    /// It is of the asker's namespace.
    is_own: bool,
}

impl Place<'_> {
    /// Returns the address of a family.
    fn address_of(&self, is_v6: bool) -> Option<IpAddr> {
        self.address.all().find(|address| address.is_ipv6() == is_v6)
    }

    /// Returns the pod's name, if the asker may hear more of it.
    fn who(&self) -> &str {
        if self.is_own {
            &self.endpoint.pod.name
        } else {
            "the target"
        }
    }

    /// Returns the droplet's name, if the asker may hear it.
    fn node(&self) -> &str {
        if self.is_own {
            &self.endpoint.droplet
        } else {
            "the droplet of the target"
        }
    }

    fn describe(&self) -> String {
        if !self.is_own {
            return format!("in VPC {}", self.network.vpc);
        }
        let addresses: Vec<String> = self.address.all().map(|address| address.to_string()).collect();
        format!(
            "VPC {}, {}, {}, {}, Provisioned",
            self.network.vpc,
            self.endpoint.network,
            addresses.join(", "),
            self.endpoint.droplet
        )
    }
}

/// Packets to one end, in the form in which policies judge them.
#[derive(Clone, Copy, Debug)]
struct Packet {
    is_v6: bool,
    protocol: u8,
    port: Option<u16>,
}

/// Where packets to the target go.
enum Goal<'a> {
    Pod(Place<'a>),
    Service(Reached<'a>),
    Outside(IpAddr),
}

/// What was found in a step, with the step's message.
type Found<T> = Result<(T, String), Fault>;

struct Path<'a> {
    world: &'a World,
    question: &'a Question,
    delivery: &'a dyn Delivery,
    steps: Vec<PathStep>,
}

impl World {
    /// Says what is wrong first on the way of packets.
    pub fn judge_path(&self, question: &Question, delivery: &dyn Delivery) -> Judgement {
        let mut path = Path {
            world: self,
            question,
            delivery,
            steps: Vec::new(),
        };
        let _ = path.walk();
        path.judgement()
    }

    fn place(&self, name: &EndpointName, asker: &str) -> Option<Place<'_>> {
        let (name, endpoint) = self.endpoints.get_key_value(name)?;
        let Membership::Member(address) = &endpoint.membership else {
            return None;
        };
        let network = self.networks.get(&endpoint.network)?;
        Some(Place {
            name,
            endpoint,
            address,
            network,
            vpc: self.vpcs.get(&network.vpc)?,
            is_own: name.0 == asker,
        })
    }
}

impl<'a> Path<'a> {
    /// Goes from step to step; none: the last one is not ok.
    fn walk(&mut self) -> Option<()> {
        let source = self.own_place(&self.question.source);
        let source = source.map(|source| (source, source.describe()));
        let source = self.note("source", source)?;
        let target = self.target(&source);
        let target = self.note("target", target)?;
        match target {
            Goal::Pod(place) => {
                let packet = Packet {
                    is_v6: matches!(self.question.target, Target::Address(address) if address.is_ipv6()),
                    protocol: self.question.protocol,
                    port: self.question.port,
                };
                self.arrive(&source, &[(place, packet)], true)
            }
            Goal::Service(reached) => self.reach_service(&source, &reached),
            Goal::Outside(address) => self.leave(&source, address),
        }
    }

    /// Adds a step. Returns what was found, if the step is ok.
    fn note<T>(&mut self, name: &str, found: Found<T>) -> Option<T> {
        let mut step = PathStep {
            name: name.to_owned(),
            state: PathStepState::Ok,
            message: String::new(),
            reason: None,
            remedy: String::new(),
        };
        let value = match found {
            Ok((value, message)) => {
                step.message = message;
                Some(value)
            }
            Err(fault) => {
                step.state = fault.state;
                step.message = fault.message;
                reasons::remedy(KIND, &fault.reason).clone_into(&mut step.remedy);
                step.reason = Some(fault.reason);
                None
            }
        };
        self.steps.push(step);
        value
    }

    fn judgement(self) -> Judgement {
        let last = self.steps.last();
        let verdict = match last.map(|step| step.state) {
            Some(PathStepState::Ok) => PathVerdict::Ok,
            Some(PathStepState::Fail) => PathVerdict::No,
            Some(PathStepState::Unknown) | None => PathVerdict::Unknown,
        };
        Judgement {
            verdict,
            reason: last.and_then(|step| step.reason.clone()),
            steps: self.steps,
        }
    }

    fn asker(&self) -> &'a str {
        &self.question.source.namespace
    }

    /// Finds a pod of the asker's namespace, of which all may be told.
    fn own_place(&self, pod: &AskedPod) -> Result<Place<'a>, Fault> {
        let name = &pod.name;
        let (endpoint, told) = match &pod.state {
            PodState::Missing => {
                let message = format!("there is no pod {name} in namespace {}", pod.namespace);
                return Err(no(Cause::PodNotFound, message));
            }
            PodState::Unbound => return Err(no(Cause::PodNotBound, format!("{name} has no node"))),
            PodState::Ended => return Err(no(Cause::PodEnded, format!("{name} has ended"))),
            PodState::OnHostNetwork => {
                return Err(unknown(
                    Cause::HostNetwork,
                    format!("{name} uses its node's network"),
                ));
            }
            PodState::Bound { endpoint, told } => (endpoint, told),
        };
        let waits = || match told {
            Some((reason, message)) => Fault::told(reason, message),
            None => no(Cause::NotProvisioned, format!("{name} is not Provisioned")),
        };
        let Some(known) = self.world.endpoints.get(endpoint) else {
            let message = format!("{name} has no Endpoint {}", endpoint.1);
            return Err(no(Cause::NoEndpoint, message));
        };
        let holder = &known.pod.name;
        if !holder.is_empty() && holder != name {
            let message = format!("{holder} has the Endpoint {} that {name} names", endpoint.1);
            return Err(no(Cause::EndpointInUse, message));
        }
        if let Membership::Refused(reason, message) = &known.membership {
            return Err(Fault::told(reason, message));
        }
        let place = self.world.place(endpoint, self.asker());
        place.filter(|place| place.endpoint.ready).ok_or_else(waits)
    }

    fn target(&self, source: &Place<'a>) -> Found<Goal<'a>> {
        match &self.question.target {
            Target::Pod(pod) if pod.namespace == self.asker() => self.own_pod(source, pod),
            Target::Pod(pod) => self.others_pod(source, pod),
            Target::Service { namespace, name } => self.named_service(source, namespace, name),
            Target::Address(address) => self.at_address(source, *address),
        }
    }

    fn own_pod(&self, source: &Place<'a>, pod: &AskedPod) -> Found<Goal<'a>> {
        let place = self.own_place(pod)?;
        let vpc = &source.network.vpc;
        if place.network.vpc == *vpc {
            return Ok((Goal::Pod(place), place.describe()));
        }
        let address: IpAddr = place.address.address.into();
        let message = format!(
            "{} is in VPC {}, network {}, {address}; in VPC {vpc} {} has {address}",
            pod.name,
            place.network.vpc,
            place.endpoint.network,
            self.holder_of(source, address)
        );
        Err(no(Cause::NotInVpc, message))
    }

    /// Says who has an address in the source's VPC.
    fn holder_of(&self, source: &Place, address: IpAddr) -> String {
        let holder = self.world.holder(source.vpc.vni, address);
        let holder = holder.and_then(|name| self.world.endpoints.get(name));
        match holder {
            None => "nobody".to_owned(),
            Some(holder) if holder.pod.namespace == self.asker() => format!("pod {}", holder.pod.name),
            Some(_) => "somebody of another namespace".to_owned(),
        }
    }

    fn others_pod(&self, source: &Place<'a>, pod: &AskedPod) -> Found<Goal<'a>> {
        let vpc = &source.network.vpc;
        let found = match &pod.state {
            PodState::Bound { endpoint, .. } => self.world.place(endpoint, self.asker()),
            PodState::Missing | PodState::Unbound | PodState::Ended | PodState::OnHostNetwork => None,
        };
        let found = found.filter(|place| place.network.vpc == *vpc && place.endpoint.pod.name == pod.name);
        let Some(place) = found else {
            let message = format!(
                "no pod {}/{} is in VPC {vpc}: it does not exist, has no network, or is in another VPC",
                pod.namespace, pod.name
            );
            return Err(no(Cause::NotInVpc, message));
        };
        ready(place)
    }

    fn at_address(&self, source: &Place<'a>, address: IpAddr) -> Found<Goal<'a>> {
        let vpc = &source.network.vpc;
        if source.address_of(address.is_ipv6()).is_none() {
            let message = format!("{} has no address of the family of {address}", source.who());
            return Err(no(Cause::NoSuchFamily, message));
        }
        if source.vpc.cidrs.iter().any(|range| is_in(address, range)) {
            let holder = self.world.holder(source.vpc.vni, address);
            if let Some(place) = holder.and_then(|name| self.world.place(name, self.asker())) {
                return ready(place);
            }
            let services = self.world.services_at(address);
            let mut own = services.filter(|name| {
                let service = self.world.service(name);
                service.is_some_and(|service| self.is_at_home(source, service))
            });
            let reached = own.find_map(|name| self.reached(source, name, address));
            return match reached {
                Some(reached) => self.port_of(reached),
                None => Err(no(
                    Cause::AddressFree,
                    format!("nobody has {address} in VPC {vpc}"),
                )),
            };
        }
        if self.world.is_in_service_ranges(&source.endpoint.network, address) {
            let name = self.world.service_at(address);
            let reached = name.and_then(|name| self.reached(source, name, address));
            let message = format!("no Service that VPC {vpc} reaches has {address}");
            return self.port_of(reached.ok_or_else(|| no(Cause::ServiceNotReached, message))?);
        }
        Ok((Goal::Outside(address), format!("{address}, outside of VPC {vpc}")))
    }

    /// Judges packets that leave the VPC.
    fn leave(&mut self, source: &Place<'a>, address: IpAddr) -> Option<()> {
        let found = self.egress(source, address);
        self.note("egress", found)?;
        let packet = Packet {
            is_v6: address.is_ipv6(),
            protocol: self.question.protocol,
            port: self.question.port,
        };
        let found = self.droplets(source, None);
        self.note("droplets", found)?;
        let found = self.rows(source, None);
        self.note("rows", found)?;
        let found = self.policies_of_sender(source, address, packet);
        self.note("policies", found)
    }

    fn egress(&self, source: &Place<'a>, address: IpAddr) -> Found<()> {
        let (world, vpc) = (self.world, &source.network.vpc);
        let is_node = source.vpc.host_access && world.is_droplets(address);
        if !source.vpc.egress && !is_node {
            let message = format!("VPC {vpc} has no egress, and {address} is outside");
            return Err(no(Cause::NoEgress, message));
        }
        if source.network.private && !is_node {
            let message = format!("network {} has no egress", source.endpoint.network);
            return Err(no(Cause::NetworkPrivate, message));
        }
        if world
            .closed_to(source.vpc)
            .iter()
            .any(|range| is_in(address, range))
        {
            let message = format!("{address} is closed to VPC {vpc}");
            return Err(no(Cause::RangeClosed, message));
        }
        let message = format!(
            "{} sends in its own name; what is outside is not looked at",
            source.node()
        );
        Ok(((), message))
    }

    /// Judges packets to each of these endpoints of the source's VPC. Policies come last: a droplet that is away may
    /// still have others. `is_counted`: see [`for_all`].
    fn arrive(
        &mut self,
        source: &Place<'a>,
        targets: &[(Place<'a>, Packet)],
        is_counted: bool,
    ) -> Option<()> {
        let found = for_all(targets, is_counted, |(target, _)| {
            self.droplets(source, Some(target))
        });
        self.note("droplets", found)?;
        let found = for_all(targets, is_counted, |(target, _)| self.rows(source, Some(target)));
        self.note("rows", found)?;
        let found = for_all(targets, is_counted, |(target, packet)| {
            self.policies(source, target, *packet)
        });
        self.note("policies", found)
    }
}

/// Returns an endpoint as the goal, if it is Provisioned.
fn ready(place: Place<'_>) -> Found<Goal<'_>> {
    if place.endpoint.ready {
        return Ok((Goal::Pod(place), place.describe()));
    }
    let message = format!("{} is not Provisioned", place.who());
    Err(no(Cause::TargetNotReady, message))
}

/// Looks at each of several. Returns what was found of the first, or the first fault. `is_counted`: the fault's message
/// tells how many there are, and how many have faults.
fn for_all<T>(all: &[T], is_counted: bool, look: impl Fn(&T) -> Found<()>) -> Found<()> {
    let mut fine = None;
    let mut faults = Vec::new();
    for one in all {
        match look(one) {
            Ok(found) if fine.is_none() => fine = Some(found),
            Ok(_) => {}
            Err(fault) => faults.push(fault),
        }
    }
    let count = faults.len();
    match faults.into_iter().next() {
        None => Ok(fine.unwrap_or_default()),
        Some(fault) if all.len() == 1 || !is_counted => Err(fault),
        Some(fault) => Err(Fault {
            message: format!("{count} of {} backends: {}", all.len(), fault.message),
            ..fault
        }),
    }
}

fn is_in(address: IpAddr, range: &str) -> bool {
    range
        .parse()
        .is_ok_and(|range: Cidr| range.contains_address(address))
}

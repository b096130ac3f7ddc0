//! Names of the moment: which pod, Service or node has an address of a VPC. Pure: [`watches`] brings objects.
//!
//! Invariant: the answer is of the objects that were told last, in whatever order kinds come. While nobody can tell
//! whose an address was, nobody has it. Of an object only what is asked for is kept. An endpoint takes about 340 bytes:
//! 34 MB at 100,000 endpoints.

pub mod objects;
mod presence;
pub mod watches;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use thuban_api::DEFAULT_NAME;
use thuban_api::cidr::Cidr;

use presence::{Departed, Presence};

/// A text that many share.
pub type Name = Arc<str>;

/// The most endpoints that have names: more than 5,000 droplets have with 50 pods each.
const MAX_ENDPOINTS: usize = 250_000;
/// The least number of shared texts at which those that nobody has any more are looked for.
const SWEEP_FROM: usize = 1024;
/// Services of the VPC `default` that every VPC shares unless it says otherwise.
const SHARED_BY_ALL: [&str; 2] = ["default/kubernetes", "kube-system/kube-dns"];

/// What has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Pod,
    Service,
    Node,
}

/// Who has an address.
#[derive(Debug, PartialEq, Eq)]
pub struct Who {
    pub kind: Kind,
    /// None for a node, which is in no namespace.
    pub namespace: Option<Name>,
    /// None for an Endpoint that no pod has now.
    pub name: Option<Name>,
    pub vpc: Name,
    pub network: Name,
    /// None for a Service.
    pub droplet: Option<Name>,
    /// When the object was made, in milliseconds since 1970, rounded down to a second.
    pub since: u64,
}

impl Who {
    /// Whether the namespace is the one that has this address.
    pub fn is_of(&self, namespace: &str) -> bool {
        self.namespace.as_deref() == Some(namespace)
    }

    /// Returns namespace and name; only the name of a node.
    pub fn full_name(&self) -> String {
        let name = self.name.as_deref().unwrap_or("-");
        match &self.namespace {
            Some(namespace) => format!("{namespace}/{name}"),
            None => name.to_owned(),
        }
    }
}

/// What an Endpoint says of its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub kind: Kind,
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub vpc: String,
    pub network: String,
    pub droplet: Option<String>,
    /// When the object was made, in milliseconds since 1970.
    pub since: u64,
    pub addresses: Vec<IpAddr>,
}

/// What is known of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    Known(Arc<Who>),
    /// Nobody has the address, which is in a range of the VPC.
    Nobody,
    /// The address was somebody's a short while ago. Flows may be told late, so they may still be of that one.
    Departed,
    /// The address is in no range of the VPC, and is no shared Service's.
    Outside,
}

impl Holder {
    /// Returns who has the address, if that is known.
    pub fn who(self) -> Option<Arc<Who>> {
        match self {
            Self::Known(who) => Some(who),
            Self::Nobody | Self::Departed | Self::Outside => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vpc {
    pub vni: Option<u32>,
    pub ranges: Vec<Cidr>,
    /// As `spec.sharedServices` says it.
    pub shared: Option<Vec<String>>,
}

impl Vpc {
    fn shares(&self, service: &str) -> bool {
        let Some(listed) = &self.shared else {
            return SHARED_BY_ALL.contains(&service);
        };
        let is_denied = listed
            .iter()
            .any(|entry| entry.strip_prefix('-') == Some(service));
        let is_usual = !listed.is_empty() && SHARED_BY_ALL.contains(&service);
        listed.iter().any(|entry| entry == service) || is_usual && !is_denied
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    pub vpc: Name,
    /// IPv4 addresses that endpoints can have, and those that are reserved.
    pub capacity: Option<u64>,
    pub allocated: Option<u64>,
}

/// A Bouncer or Divider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Role {
    pub vpc: Name,
    /// None for a divider.
    pub network: Option<Name>,
    pub droplet: Option<Name>,
}

/// An Endpoint with its addresses.
#[derive(Debug)]
pub struct Placed {
    pub addresses: Box<[IpAddr]>,
    pub who: Arc<Who>,
}

/// Texts that are kept once.
#[derive(Debug, Default)]
struct Pool {
    known: HashSet<Name>,
    sweep_at: usize,
}

impl Pool {
    fn share(&mut self, text: &str) -> Name {
        if let Some(known) = self.known.get(text) {
            return known.clone();
        }
        if self.known.len() >= self.sweep_at {
            self.known.retain(|known| Arc::strong_count(known) > 1);
            self.sweep_at = SWEEP_FROM.max(2 * self.known.len());
        }
        let name = Name::from(text);
        self.known.insert(name.clone());
        name
    }
}

/// All names.
#[derive(Debug, Default)]
pub struct Names {
    pool: Pool,
    vpcs: BTreeMap<Name, Vpc>,
    vpc_of: HashMap<u32, Name>,
    networks: BTreeMap<Name, Network>,
    dividers: BTreeMap<Name, Role>,
    bouncers: BTreeMap<Name, Role>,
    droplets: BTreeMap<Name, Option<IpAddr>>,
    droplet_of: HashMap<IpAddr, Name>,
    /// By namespace and name of the Endpoint.
    endpoints: HashMap<Name, Placed>,
    /// By VPC and address.
    holders: HashMap<(Name, IpAddr), Arc<Who>>,
    departed: Departed,
    /// Droplets with endpoints of a VPC, and of a namespace.
    of_vpc: Presence,
    of_namespace: Presence,
}

impl Names {
    pub fn set_vpc(&mut self, name: &str, vpc: Vpc) {
        self.remove_vpc(name);
        let name = self.pool.share(name);
        if let Some(vni) = vpc.vni {
            self.vpc_of.insert(vni, name.clone());
        }
        self.vpcs.insert(name, vpc);
    }

    pub fn remove_vpc(&mut self, name: &str) {
        let vni = self.vpcs.remove(name).and_then(|vpc| vpc.vni);
        if let Some(vni) = vni
            && self.vpc_of.get(&vni).is_some_and(|holder| &**holder == name)
        {
            self.vpc_of.remove(&vni);
        }
    }

    pub fn set_network(&mut self, name: &str, vpc: &str, capacity: Option<u64>, allocated: Option<u64>) {
        let (name, vpc) = (self.pool.share(name), self.pool.share(vpc));
        let network = Network {
            vpc,
            capacity,
            allocated,
        };
        self.networks.insert(name, network);
    }

    pub fn remove_network(&mut self, name: &str) {
        self.networks.remove(name);
    }

    pub fn set_divider(&mut self, name: &str, vpc: &str, droplet: Option<&str>) {
        let role = self.role(vpc, None, droplet);
        self.dividers.insert(name.into(), role);
    }

    pub fn remove_divider(&mut self, name: &str) {
        self.dividers.remove(name);
    }

    pub fn set_bouncer(&mut self, name: &str, vpc: &str, network: &str, droplet: Option<&str>) {
        let role = self.role(vpc, Some(network), droplet);
        self.bouncers.insert(name.into(), role);
    }

    pub fn remove_bouncer(&mut self, name: &str) {
        self.bouncers.remove(name);
    }

    fn role(&mut self, vpc: &str, network: Option<&str>, droplet: Option<&str>) -> Role {
        Role {
            vpc: self.pool.share(vpc),
            network: network.map(|network| self.pool.share(network)),
            droplet: droplet.map(|droplet| self.pool.share(droplet)),
        }
    }

    pub fn set_droplet(&mut self, name: &str, address: Option<IpAddr>) {
        self.remove_droplet(name);
        let name = self.pool.share(name);
        if let Some(address) = address {
            self.droplet_of.insert(address, name.clone());
        }
        self.droplets.insert(name, address);
    }

    pub fn remove_droplet(&mut self, name: &str) {
        let address = self.droplets.remove(name).flatten();
        if let Some(address) = address
            && self
                .droplet_of
                .get(&address)
                .is_some_and(|holder| &**holder == name)
        {
            self.droplet_of.remove(&address);
        }
    }

    /// Notes an Endpoint. The key is its namespace and name.
    pub fn set_endpoint(&mut self, key: &str, member: &Member) {
        let who = Who {
            kind: member.kind,
            namespace: member.namespace.as_ref().map(|text| self.pool.share(text)),
            name: member.name.as_deref().map(Name::from),
            vpc: self.pool.share(&member.vpc),
            network: self.pool.share(&member.network),
            droplet: member.droplet.as_ref().map(|text| self.pool.share(text)),
            since: member.since,
        };
        let is_known = self
            .endpoints
            .get(key)
            .is_some_and(|placed| *placed.who == who && *placed.addresses == *member.addresses);
        if is_known {
            return;
        }
        self.remove_endpoint(key);
        if self.endpoints.len() >= MAX_ENDPOINTS {
            return;
        }
        let who = Arc::new(who);
        self.of_vpc.add(Some(&who.vpc), who.droplet.as_ref());
        self.of_namespace
            .add(who.namespace.as_ref(), who.droplet.as_ref());
        for address in &member.addresses {
            self.holders.insert((who.vpc.clone(), *address), who.clone());
        }
        let addresses = member.addresses.clone().into_boxed_slice();
        self.endpoints.insert(key.into(), Placed { addresses, who });
    }

    pub fn remove_endpoint(&mut self, key: &str) {
        let Some(placed) = self.endpoints.remove(key) else {
            return;
        };
        let who = &placed.who;
        self.of_vpc.remove(Some(&who.vpc), who.droplet.as_ref());
        self.of_namespace
            .remove(who.namespace.as_ref(), who.droplet.as_ref());
        for address in &placed.addresses {
            let place = (who.vpc.clone(), *address);
            // Another Endpoint may have the address by now.
            if self
                .holders
                .get(&place)
                .is_some_and(|who| Arc::ptr_eq(who, &placed.who))
            {
                self.holders.remove(&place);
            }
            self.departed.note(place, who.namespace.clone());
        }
    }

    /// Returns the VPC that has a VNI.
    pub fn vpc(&self, vni: u32) -> Option<&Name> {
        self.vpc_of.get(&vni)
    }

    /// Returns who has an address as seen from a VPC.
    pub fn resolve(&self, vpc: &Name, address: IpAddr) -> Holder {
        let place = (vpc.clone(), address);
        let former = self.departed.recent(&place);
        if let Some(who) = self.holders.get(&place) {
            // In the same namespace it makes no difference to readers which of the two it was.
            return if former.is_none_or(|former| former.namespace == who.namespace) {
                Holder::Known(who.clone())
            } else {
                Holder::Departed
            };
        }
        if former.is_some() {
            return Holder::Departed;
        }
        let Some(known) = self.vpcs.get(vpc) else {
            return Holder::Nobody;
        };
        if known.ranges.iter().any(|range| range.contains_address(address)) {
            return Holder::Nobody;
        }
        self.shared(known, address).map_or(Holder::Outside, Holder::Known)
    }

    /// Whether a droplet has an endpoint or a role of a VPC.
    pub fn is_in_vpc(&self, droplet: &Name, vpc: &Name) -> bool {
        let has_role = |role: &Role| role.vpc == *vpc && role.droplet.as_ref() == Some(droplet);
        self.of_vpc.has(vpc, droplet) || self.roles().any(|(_, role)| has_role(role))
    }

    /// Whether a droplet has an endpoint of a namespace.
    pub fn has_namespace(&self, droplet: &Name, namespace: &str) -> bool {
        self.of_namespace.has(&Name::from(namespace), droplet)
    }

    /// Returns the Service of the VPC `default` that another VPC shares at this address.
    fn shared(&self, vpc: &Vpc, address: IpAddr) -> Option<Arc<Who>> {
        let (default, _) = self.vpcs.get_key_value(DEFAULT_NAME)?;
        let who = self.holders.get(&(default.clone(), address))?;
        (who.kind == Kind::Service && vpc.shares(&who.full_name())).then(|| who.clone())
    }

    /// Returns the droplet at an address of the underlay.
    pub fn droplet(&self, address: IpAddr) -> Option<&Name> {
        self.droplet_of.get(&address)
    }

    pub fn vpcs(&self) -> impl Iterator<Item = (&Name, &Vpc)> {
        self.vpcs.iter()
    }

    pub fn networks(&self) -> impl Iterator<Item = (&Name, &Network)> {
        self.networks.iter()
    }

    /// Yields dividers and bouncers.
    pub fn roles(&self) -> impl Iterator<Item = (&Name, &Role)> {
        self.dividers.iter().chain(&self.bouncers)
    }

    pub fn droplets(&self) -> impl Iterator<Item = &Name> {
        self.droplets.keys()
    }

    pub fn endpoints(&self) -> impl Iterator<Item = &Placed> {
        self.endpoints.values()
    }
}

#[cfg(test)]
pub(crate) mod tests;

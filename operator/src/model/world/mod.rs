//! All objects that make rows, and every droplet's program that follows from them.
//!
//! Each row of a program is contributed by one object; a change makes anew only the rows of the objects that it
//! touches. Invariant (tested): the incremental programs equal those made from scratch.

mod contribute;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_api::identifiers::MacAddr;
use thuban_proto::transit::Row;

use super::rows::Key;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vpc {
    pub vni: u32,
    pub cidrs: Vec<String>,
    pub host_access: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    pub vpc: String,
    pub id: u32,
    pub cidrs: Vec<String>,
}

/// A placed role: `parent` is the divider's VPC or the bouncer's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Role {
    pub parent: String,
    pub droplet: String,
}

/// (namespace, name).
pub type EndpointName = (String, String);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    /// As kubelet tells the CNI plugin.
    pub uid: String,
}

/// What an endpoint is reached by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub address: Ipv4Addr,
    pub prefix_length: u8,
    pub gateway: Ipv4Addr,
    pub mac: MacAddr,
    /// With its prefix length, if its network had an IPv6 range when it was made.
    pub address6: Option<(Ipv6Addr, u8)>,
}

impl Address {
    /// IPv4, then IPv6.
    pub fn all(&self) -> impl Iterator<Item = IpAddr> {
        let second = self.address6.map(|(address, _)| IpAddr::from(address));
        std::iter::once(IpAddr::from(self.address)).chain(second)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Membership {
    /// No address yet: no rows.
    Waiting,
    /// (reason, message).
    Refused(String, String),
    Member(Address),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub network: String,
    pub droplet: String,
    pub pod: Pod,
    pub membership: Membership,
    /// Provisioned.
    pub ready: bool,
}

/// Who contributes rows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Owner {
    Droplet(String),
    Vpc(String),
    Network(String),
    Endpoint(EndpointName),
}

/// Rows that changed on one droplet; `None` is gone.
pub type Delta = BTreeMap<Key, Option<Row>>;

#[derive(Debug, Default)]
pub struct World {
    droplets: BTreeMap<String, Ipv4Addr>,
    vpcs: BTreeMap<String, Vpc>,
    networks: BTreeMap<String, Network>,
    dividers: BTreeMap<String, Role>,
    bouncers: BTreeMap<String, Role>,
    endpoints: HashMap<EndpointName, Endpoint>,
    /// (VNI, address) -> droplets that asked.
    subscriptions: HashMap<(u32, IpAddr), BTreeSet<String>>,
    /// Endpoints of a network by droplet.
    members: HashMap<String, BTreeMap<String, BTreeSet<EndpointName>>>,
    /// Who has an address, by VPC name.
    holders: HashMap<(String, IpAddr), EndpointName>,
    contributions: HashMap<Owner, BTreeMap<(String, Key), Row>>,
    programs: BTreeMap<String, BTreeMap<Key, Row>>,
    dirty: BTreeSet<Owner>,
}

impl World {
    pub fn set_droplet(&mut self, name: &str, address: Option<Ipv4Addr>) {
        let old = match address {
            Some(address) => self.droplets.insert(name.to_owned(), address),
            None => self.droplets.remove(name),
        };
        if old == address {
            return;
        }
        // Its address is in the rows of everything that lives or works there, and in everybody's known droplets.
        self.dirty
            .extend(self.droplets.keys().cloned().map(Owner::Droplet));
        self.dirty.insert(Owner::Droplet(name.to_owned()));
        self.dirty.extend(self.vpcs.keys().cloned().map(Owner::Vpc));
        self.dirty
            .extend(self.networks.keys().cloned().map(Owner::Network));
        self.dirty
            .extend(self.endpoints.keys().cloned().map(Owner::Endpoint));
    }

    pub fn set_vpc(&mut self, name: &str, vpc: Option<Vpc>) {
        if set(&mut self.vpcs, name, vpc) {
            self.touch_vpc(name);
            let endpoints = self.endpoints_where(|network| network.vpc == name);
            self.dirty.extend(endpoints);
        }
    }

    pub fn set_network(&mut self, name: &str, network: Option<Network>) {
        let old = self.networks.get(name).map(|network| network.vpc.clone());
        if set(&mut self.networks, name, network) {
            let new = self.networks.get(name).map(|network| network.vpc.clone());
            self.index_holders(name);
            self.touch_network(name);
            for vpc in old.into_iter().chain(new) {
                self.touch_vpc(&vpc);
            }
        }
    }

    pub fn set_divider(&mut self, name: &str, role: Option<Role>) {
        let old = self.dividers.get(name).cloned();
        let new = role.clone();
        if set(&mut self.dividers, name, role) {
            for role in old.into_iter().chain(new) {
                self.touch_vpc(&role.parent);
            }
        }
    }

    pub fn set_bouncer(&mut self, name: &str, role: Option<Role>) {
        let old = self.bouncers.get(name).cloned();
        let new = role.clone();
        if set(&mut self.bouncers, name, role) {
            for role in old.into_iter().chain(new) {
                self.touch_network(&role.parent);
            }
        }
    }

    pub fn set_endpoint(&mut self, name: &EndpointName, endpoint: Option<Endpoint>) {
        if self.endpoints.get(name) == endpoint.as_ref() {
            return;
        }
        if let Some(old) = self.endpoints.remove(name) {
            self.forget_member(name, &old);
        }
        if let Some(new) = endpoint {
            self.note_member(name, &new);
            self.endpoints.insert(name.clone(), new);
        }
        self.dirty.insert(Owner::Endpoint(name.clone()));
    }

    /// Adds or takes away a subscription; false if nothing changed.
    pub fn subscribe(&mut self, droplet: &str, vni: u32, address: IpAddr, wanted: bool) -> bool {
        let droplets = self.subscriptions.entry((vni, address)).or_default();
        let is_changed = if wanted {
            droplets.insert(droplet.to_owned())
        } else {
            droplets.remove(droplet)
        };
        if droplets.is_empty() {
            self.subscriptions.remove(&(vni, address));
        }
        if is_changed {
            let vpc = self
                .vpcs
                .iter()
                .find(|(_, vpc)| vpc.vni == vni)
                .map(|(name, _)| name.clone());
            let holder = vpc.and_then(|vpc| self.holders.get(&(vpc, address)));
            self.dirty.extend(holder.cloned().map(Owner::Endpoint));
        }
        is_changed
    }

    /// All subscriptions of a droplet.
    pub fn subscriptions_of(&self, droplet: &str) -> Vec<(u32, IpAddr)> {
        let holds =
            |(key, droplets): (&(u32, IpAddr), &BTreeSet<String>)| droplets.contains(droplet).then_some(*key);
        self.subscriptions.iter().filter_map(holds).collect()
    }

    /// Makes the rows of all touched objects anew and says what changed, by droplet.
    pub fn flush(&mut self) -> BTreeMap<String, Delta> {
        let mut deltas: BTreeMap<String, Delta> = BTreeMap::new();
        let mut upserts = Vec::new();
        for owner in std::mem::take(&mut self.dirty) {
            let new = self.contribute(&owner);
            let old = self.contributions.remove(&owner).unwrap_or_default();
            for (droplet, key) in old.keys().filter(|at| !new.contains_key(*at)) {
                if let Some(program) = self.programs.get_mut(droplet) {
                    program.remove(key);
                }
                deltas
                    .entry(droplet.clone())
                    .or_default()
                    .insert(key.clone(), None);
            }
            upserts.extend(
                new.iter()
                    .filter(|(at, row)| old.get(*at) != Some(row))
                    .map(|(at, row)| (at.clone(), row.clone())),
            );
            if !new.is_empty() {
                self.contributions.insert(owner, new);
            }
        }
        // After all removals: a row may pass from one object to another, such as a reused address.
        for ((droplet, key), row) in upserts {
            self.programs
                .entry(droplet.clone())
                .or_default()
                .insert(key.clone(), row.clone());
            deltas.entry(droplet).or_default().insert(key, Some(row));
        }
        deltas
    }

    /// The whole program of a droplet.
    pub fn program(&self, droplet: &str) -> BTreeMap<Key, Row> {
        self.programs.get(droplet).cloned().unwrap_or_default()
    }

    pub fn is_droplet(&self, name: &str) -> bool {
        self.droplets.contains_key(name)
    }

    pub fn droplets(&self) -> impl Iterator<Item = (&String, &Ipv4Addr)> {
        self.droplets.iter()
    }

    pub fn vni(&self, vpc: &str) -> Option<u32> {
        self.vpcs.get(vpc).map(|vpc| vpc.vni)
    }

    /// The VNI that a network's rows carry.
    pub fn network_vni(&self, network: &str) -> Option<u32> {
        self.vni(&self.networks.get(network)?.vpc)
    }

    /// Whether a droplet has a part in a VPC, so may ask about its addresses.
    pub fn takes_part(&self, droplet: &str, vni: u32) -> bool {
        self.programs
            .get(droplet)
            .is_some_and(|program| program.contains_key(&Key::Vpc(vni)))
    }

    /// Whether an endpoint of any VPC on this droplet has the address.
    pub fn is_used_on(&self, droplet: &str, address: IpAddr) -> bool {
        let at_droplet = |vpc: &String| {
            let holder = self.holders.get(&(vpc.clone(), address));
            holder
                .and_then(|name| self.endpoints.get(name))
                .is_some_and(|endpoint| endpoint.droplet == droplet)
        };
        self.vpcs.keys().any(at_droplet)
    }

    /// The endpoint that has an address, by VNI.
    pub fn holder(&self, vni: u32, address: IpAddr) -> Option<&EndpointName> {
        let (vpc, _) = self.vpcs.iter().find(|(_, vpc)| vpc.vni == vni)?;
        self.holders.get(&(vpc.clone(), address))
    }

    /// Droplets of the placed bouncers of a network.
    pub fn bouncer_droplets(&self, network: &str) -> Vec<&str> {
        role_droplets(&self.bouncers, network)
    }

    /// The rows that must be acked before the endpoint is Provisioned: its own, not its subscribers'.
    pub fn endpoint_rows(&self, name: &EndpointName) -> Vec<(String, Key)> {
        let rows = self.contributions.get(&Owner::Endpoint(name.clone()));
        let keys = rows.into_iter().flat_map(BTreeMap::keys);
        keys.filter(|(_, key)| !matches!(key, Key::Direct(..)))
            .cloned()
            .collect()
    }

    /// The rows that must be acked before a divider of the VPC on `droplet` is Provisioned: the VPC's rows
    /// everywhere, and the divider's row of every network.
    pub fn divider_rows(&self, vpc: &str, droplet: &str) -> Vec<(String, Key)> {
        let rows = self.contributions.get(&Owner::Vpc(vpc.to_owned()));
        let mut keys: Vec<_> = rows.into_iter().flat_map(BTreeMap::keys).cloned().collect();
        for (network, _) in self.networks.iter().filter(|(_, network)| network.vpc == vpc) {
            let rows = self.contributions.get(&Owner::Network(network.clone()));
            keys.extend(
                rows.into_iter()
                    .flat_map(BTreeMap::keys)
                    .filter(|(at, _)| at == droplet)
                    .cloned(),
            );
        }
        keys
    }

    /// The rows that must be acked before a bouncer of the network on `droplet` is Provisioned: the network's rows
    /// everywhere, and the bouncer's row of every endpoint.
    pub fn network_rows(&self, network: &str, droplet: &str) -> Vec<(String, Key)> {
        let rows = self.contributions.get(&Owner::Network(network.to_owned()));
        let mut keys: Vec<_> = rows.into_iter().flat_map(BTreeMap::keys).cloned().collect();
        let endpoints = self
            .members
            .get(network)
            .into_iter()
            .flat_map(BTreeMap::values)
            .flatten();
        for name in endpoints {
            let rows = self.contributions.get(&Owner::Endpoint(name.clone()));
            let here = rows.into_iter().flat_map(BTreeMap::keys);
            keys.extend(
                here.filter(|(at, key)| at == droplet && matches!(key, Key::Bouncer(..)))
                    .cloned(),
            );
        }
        keys
    }

    /// Whether anything of the network is left: endpoints with an address, or bouncers.
    pub fn is_in_use(&self, network: &str) -> bool {
        self.members
            .get(network)
            .is_some_and(|droplets| !droplets.is_empty())
            || self.bouncers.values().any(|role| role.parent == network)
    }

    /// Roles by droplet: names of dividers and bouncers.
    pub fn roles(&self, droplet: &str) -> Vec<String> {
        let roles = self.dividers.iter().chain(&self.bouncers);
        roles
            .filter(|(_, role)| role.droplet == droplet)
            .map(|(name, _)| name.clone())
            .collect()
    }

    fn touch_vpc(&mut self, vpc: &str) {
        self.dirty.insert(Owner::Vpc(vpc.to_owned()));
        let networks = self.networks.iter().filter(|(_, network)| network.vpc == vpc);
        self.dirty
            .extend(networks.map(|(name, _)| Owner::Network(name.clone())));
    }

    fn touch_network(&mut self, network: &str) {
        self.dirty.insert(Owner::Network(network.to_owned()));
        self.dirty.extend(
            self.networks
                .get(network)
                .map(|network| Owner::Vpc(network.vpc.clone())),
        );
        let endpoints = self
            .members
            .get(network)
            .into_iter()
            .flat_map(BTreeMap::values)
            .flatten();
        self.dirty.extend(endpoints.cloned().map(Owner::Endpoint));
    }

    fn endpoints_where(&self, accepts: impl Fn(&Network) -> bool) -> Vec<Owner> {
        let names = self
            .networks
            .iter()
            .filter(|(_, network)| accepts(network))
            .map(|(name, _)| name);
        let members = names.filter_map(|name| self.members.get(name));
        members
            .flat_map(BTreeMap::values)
            .flatten()
            .cloned()
            .map(Owner::Endpoint)
            .collect()
    }

    fn vpc_of(&self, endpoint: &Endpoint) -> Option<&String> {
        self.networks.get(&endpoint.network).map(|network| &network.vpc)
    }

    /// Endpoints may be known before their network is.
    fn index_holders(&mut self, network: &str) {
        let Some(vpc) = self.networks.get(network).map(|network| network.vpc.clone()) else {
            return;
        };
        let members = self
            .members
            .get(network)
            .into_iter()
            .flat_map(BTreeMap::values)
            .flatten();
        for name in members {
            if let Some(Membership::Member(address)) =
                self.endpoints.get(name).map(|endpoint| &endpoint.membership)
            {
                for address in address.all() {
                    self.holders.insert((vpc.clone(), address), name.clone());
                }
            }
        }
    }

    fn note_member(&mut self, name: &EndpointName, endpoint: &Endpoint) {
        let Membership::Member(address) = &endpoint.membership else {
            return;
        };
        if let Some(vpc) = self.vpc_of(endpoint).cloned() {
            for address in address.all() {
                self.holders.insert((vpc.clone(), address), name.clone());
            }
        }
        let droplets = self.members.entry(endpoint.network.clone()).or_default();
        let here = droplets.entry(endpoint.droplet.clone()).or_default();
        here.insert(name.clone());
        if here.len() == 1 {
            self.touch_participation(&endpoint.network);
        }
    }

    fn forget_member(&mut self, name: &EndpointName, endpoint: &Endpoint) {
        let Membership::Member(address) = &endpoint.membership else {
            return;
        };
        if let Some(vpc) = self.vpc_of(endpoint).cloned() {
            for address in address.all() {
                let at = (vpc.clone(), address);
                if self.holders.get(&at) == Some(name) {
                    self.holders.remove(&at);
                }
            }
        }
        let Some(droplets) = self.members.get_mut(&endpoint.network) else {
            return;
        };
        if let Some(here) = droplets.get_mut(&endpoint.droplet) {
            here.remove(name);
            if here.is_empty() {
                droplets.remove(&endpoint.droplet);
                self.touch_participation(&endpoint.network);
            }
        }
    }

    /// The first endpoint of a network came to a droplet, or the last one went.
    fn touch_participation(&mut self, network: &str) {
        self.dirty.insert(Owner::Network(network.to_owned()));
        self.dirty.extend(
            self.networks
                .get(network)
                .map(|network| Owner::Vpc(network.vpc.clone())),
        );
    }
}

fn role_droplets<'a>(roles: &'a BTreeMap<String, Role>, parent: &str) -> Vec<&'a str> {
    roles
        .values()
        .filter(|role| role.parent == parent)
        .map(|role| role.droplet.as_str())
        .collect()
}

/// Inserts or removes; true if that changed anything.
fn set<T: PartialEq>(map: &mut BTreeMap<String, T>, name: &str, value: Option<T>) -> bool {
    if map.get(name) == value.as_ref() {
        return false;
    }
    match value {
        Some(value) => map.insert(name.to_owned(), value),
        None => map.remove(name),
    };
    true
}

#[cfg(test)]
mod tests;

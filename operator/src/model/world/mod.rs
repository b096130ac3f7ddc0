//! All objects that make rows, and every droplet's program that follows from the objects.
//!
//! Each row of a program is contributed by one object; a change makes only the rows of the touched objects again.
//! Invariant (tested): the incremental programs equal those made from scratch.

mod contribute;
mod droplet_rows;
mod flush;
mod members;
pub mod path;
mod policy;
mod roles;
mod served;
mod services;
mod shared;

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use thuban_api::identifiers::{MacAddr, NetworkId, Vni};
use thuban_api::{BitRate, Dscp};
use thuban_proto::transit::row;
use thuban_rows::Row;

use super::bandwidth::{Bandwidth, Limits};
use super::policy::Profile;
use super::rows::{self, Key, PackedRow};
use super::sorted_set::SortedSet;
use droplet_rows::DropletRows;
use policy::Enforcement;
use roles::Roles;
use services::Services;
use shared::SharedRows;

pub use droplet_rows::OtherDroplets;
pub use flush::Snapshot;
pub use roles::{Role, RoleId, RoleKind};
pub use services::{AllHints, Hints, MAX_OWN_ADDRESSES, NodePort, RestId, Service, VipMembers, VipName};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vpc {
    pub vni: Vni,
    pub cidrs: Vec<String>,
    pub host_access: bool,
    /// Pods of the VPC reach outside in their node's name.
    pub egress: bool,
    /// Who is denied by network policy in it hears so.
    pub reject: bool,
    /// What its pods may send out of a droplet.
    pub egress_rate: Option<BitRate>,
    /// What outer headers bear; none: what inner headers do.
    pub dscp: Option<Dscp>,
    /// Services of other VPCs that its pods may reach, by namespace and name.
    pub shared: Vec<(String, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    pub vpc: String,
    pub id: NetworkId,
    pub cidrs: Vec<String>,
    /// Its pods don't reach outside, whatever the VPC says.
    pub private: bool,
    /// The limits of its pods' bandwidth.
    pub limits: Limits,
}

/// (namespace, name).
pub type EndpointName = (String, String);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    /// The pod's UID, as kubelet tells it to the CNI plugin.
    pub uid: String,
}

/// The addresses of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub address: Ipv4Addr,
    pub prefix_length: u8,
    pub gateway: Ipv4Addr,
    pub mac: MacAddr,
    /// The IPv6 address with its prefix length, if the network had an IPv6 range when the endpoint was made.
    pub address6: Option<(Ipv6Addr, u8)>,
}

impl Address {
    /// Yields the IPv4 address, then the IPv6 address.
    pub fn all(&self) -> impl Iterator<Item = IpAddr> {
        let second = self.address6.map(|(address, _)| IpAddr::from(address));
        std::iter::once(IpAddr::from(self.address)).chain(second)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Membership {
    /// The endpoint has no address yet, and no rows.
    Waiting,
    /// The endpoint is refused, with (reason, message).
    Refused(String, String),
    Member(Address),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub network: String,
    /// The droplet that the endpoint lives on; empty while no pod has the endpoint.
    pub droplet: String,
    /// The droplet that the endpoint lived on before; packets follow the endpoint from there.
    pub previous: Option<String>,
    pub pod: Pod,
    /// What network policy sees of the pod; none: the pod has not been seen, or there is none.
    pub profile: Option<Arc<Profile>>,
    /// The bandwidth that the pod asks for.
    pub asked: Bandwidth,
    /// The endpoint is its droplet's own.
    pub is_host: bool,
    pub membership: Membership,
    /// The endpoint is Provisioned, or about to be: its object is there, and all have acked.
    pub ready: bool,
}

/// The object that contributes rows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Owner {
    Vpc(String),
    Network(String),
    Endpoint(EndpointName),
    /// A Service, by its scaled Endpoint.
    Service(EndpointName),
}

/// Rows that changed on one droplet; `None` is gone.
pub type Delta = BTreeMap<Key, Option<PackedRow>>;

/// Rows by droplet and key.
type Rows = BTreeMap<(String, Key), PackedRow>;
/// Rows in a small form: most owners are endpoints, which have three or four rows for as long as they live.
type KeptRows = Box<[((String, Key), PackedRow)]>;

/// The addresses of a droplet on the underlay.
type Places = (Option<Ipv4Addr>, Option<Ipv6Addr>);

#[derive(Debug, Default)]
pub struct World {
    droplets: BTreeMap<String, Ipv4Addr>,
    /// IPv6 addresses of the nodes of droplets.
    droplets6: BTreeMap<String, Ipv6Addr>,
    /// The old addresses of the droplets that changed since the last flush.
    moved_droplets: BTreeMap<String, Places>,
    /// The rows of known droplets, until one of them changes.
    droplet_rows: Option<DropletRows>,
    /// Lost droplets: direct rows don't lead there.
    away: BTreeSet<String>,
    vpcs: BTreeMap<String, Vpc>,
    /// VPCs by number.
    by_vni: HashMap<Vni, BTreeSet<String>>,
    networks: BTreeMap<String, Network>,
    /// Names of networks by VPC.
    by_vpc: HashMap<String, BTreeSet<String>>,
    dividers: Roles,
    bouncers: Roles,
    endpoints: HashMap<EndpointName, Endpoint>,
    services: Services,
    enforcement: Enforcement,
    /// Ranges in which Services have their addresses, in every VPC.
    service_ranges: Vec<String>,
    /// Outside ranges that only a VPC with access to hosts reaches.
    closed_ranges: Vec<String>,
    /// Addresses of nodes that are in none of the closed ranges.
    closed_nodes: BTreeSet<IpAddr>,
    /// The droplets that asked for each (VNI, address).
    subscriptions: HashMap<(Vni, IpAddr), BTreeSet<String>>,
    /// The same subscriptions by droplet and VNI.
    subscribed: HashMap<String, HashMap<Vni, BTreeSet<IpAddr>>>,
    /// Endpoints of a network by droplet.
    members: HashMap<String, BTreeMap<String, SortedSet<EndpointName>>>,
    /// Networks with endpoints on a droplet.
    networks_on: HashMap<String, BTreeSet<String>>,
    /// How many endpoints with an address live on a droplet.
    populations: HashMap<String, usize>,
    /// Endpoints of a network that have an address. VPCs may use the same addresses.
    by_address: HashMap<String, HashMap<IpAddr, SortedSet<EndpointName>>>,
    /// Endpoints with a previous droplet.
    moving: BTreeSet<EndpointName>,
    contributions: HashMap<Owner, KeptRows>,
    shared: SharedRows,
    /// The rows that the owners contributed. The rows of known droplets, which all droplets have alike, are not in it,
    /// and neither are those that all droplets of a VPC have alike.
    programs: BTreeMap<String, BTreeMap<Key, PackedRow>>,
    dirty: BTreeSet<Owner>,
}

impl World {
    pub fn set_droplet(&mut self, name: &str, address: Option<Ipv4Addr>) {
        let (_, address6) = self.places(name);
        self.move_droplet(name, (address, address.and(address6)));
    }

    /// Sets the IPv6 address of a droplet's node.
    pub fn set_droplet6(&mut self, name: &str, address6: Option<Ipv6Addr>) {
        let (address, _) = self.places(name);
        self.move_droplet(name, (address, address.and(address6)));
    }

    fn places(&self, name: &str) -> Places {
        (
            self.droplets.get(name).copied(),
            self.droplets6.get(name).copied(),
        )
    }

    fn move_droplet(&mut self, name: &str, new: Places) {
        let old = self.places(name);
        if old == new {
            return;
        }
        match new.0 {
            Some(address) => self.droplets.insert(name.to_owned(), address),
            None => self.droplets.remove(name),
        };
        match new.1 {
            Some(address6) => self.droplets6.insert(name.to_owned(), address6),
            None => self.droplets6.remove(name),
        };
        self.moved_droplets.entry(name.to_owned()).or_insert(old);
        self.touch_exposed();
        // The droplet's address is in the rows of everything that lives or works there.
        self.touch_residents(name);
        self.touch_roles_on(name);
    }

    /// Returns the row by which others know a droplet.
    fn droplet_row(&self, name: &str, address: Ipv4Addr) -> Row {
        rows::droplet(address, self.droplets6.get(name).copied())
    }

    /// Whether direct rows may lead to the droplet.
    pub fn set_away(&mut self, name: &str, is_away: bool) {
        let is_changed = if is_away {
            self.away.insert(name.to_owned())
        } else {
            self.away.remove(name)
        };
        if is_changed {
            self.touch_residents(name);
        }
    }

    pub fn set_vpc(&mut self, name: &str, vpc: Option<Vpc>) {
        // The ranges of that VPC are closed to the others.
        let open_ranges = |vpc: Option<&Vpc>| vpc.filter(|vpc| vpc.host_access).map(|vpc| vpc.cidrs.clone());
        if open_ranges(self.vpcs.get(name)) != open_ranges(vpc.as_ref()) {
            self.dirty.extend(self.vpcs.keys().cloned().map(Owner::Vpc));
        }
        let old = self.vni(name);
        let named = self.vpcs.get(name).map(|known| known.shared.clone());
        if set(&mut self.vpcs, name, vpc) {
            let new = self.vni(name);
            change_place(&mut self.by_vni, (old, new), name);
            self.note_sharer(name, &named.unwrap_or_default());
            self.enforcement.known_served.note_service();
            self.touch_vpc(name);
            self.touch_policy_rows(name);
            let endpoints: Vec<_> = self.endpoints_of_vpc(name).cloned().collect();
            self.dirty.extend(endpoints.into_iter().map(Owner::Endpoint));
            self.touch_services(name);
        }
    }

    pub fn set_network(&mut self, name: &str, network: Option<Network>) {
        let old = self.networks.get(name).map(|network| network.vpc.clone());
        if set(&mut self.networks, name, network) {
            let new = self.networks.get(name).map(|network| network.vpc.clone());
            change_place(&mut self.by_vpc, (old.clone(), new.clone()), name);
            self.touch_network(name);
            self.enforcement.known_served.note_service();
            self.touch_services_of(name);
            self.touch_policies_of(name);
            for vpc in old.into_iter().chain(new) {
                self.touch_vpc(&vpc);
                self.touch_policy_rows(&vpc);
                self.touch_services(&vpc);
            }
        }
    }

    pub fn set_endpoint(&mut self, name: &EndpointName, endpoint: Option<Endpoint>) {
        if self.endpoints.get(name) == endpoint.as_ref() {
            return;
        }
        self.enforcement
            .note(name, self.endpoints.get(name), endpoint.as_ref());
        if let Some(old) = self.endpoints.remove(name) {
            self.forget_member(name, &old);
        }
        if let Some(new) = endpoint {
            self.note_member(name, &new);
            self.endpoints.insert(name.clone(), new);
        }
        self.dirty.insert(Owner::Endpoint(name.clone()));
    }

    pub fn endpoint(&self, name: &EndpointName) -> Option<&Endpoint> {
        self.endpoints.get(name)
    }

    /// Adds or takes away a subscription; false if nothing changed.
    pub fn subscribe(&mut self, droplet: &str, vni: Vni, address: IpAddr, wanted: bool) -> bool {
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
            let own = self.subscribed.entry(droplet.to_owned()).or_default();
            let addresses = own.entry(vni).or_default();
            if wanted {
                addresses.insert(address);
            } else {
                addresses.remove(&address);
                if addresses.is_empty() {
                    own.remove(&vni);
                }
                if own.is_empty() {
                    self.subscribed.remove(droplet);
                }
            }
            let holder = self.holder(vni, address).cloned();
            self.dirty.extend(holder.map(Owner::Endpoint));
            self.touch_services_at(address);
        }
        is_changed
    }

    /// Returns all subscriptions of a droplet.
    pub fn subscriptions_of(&self, droplet: &str) -> Vec<(Vni, IpAddr)> {
        let own = self.subscribed.get(droplet).into_iter().flatten();
        own.flat_map(|(vni, addresses)| addresses.iter().map(|address| (*vni, *address)))
            .collect()
    }

    /// Returns how many subscriptions a droplet has in a VPC.
    pub fn subscribed(&self, droplet: &str, vni: Vni) -> usize {
        let own = self.subscribed.get(droplet).and_then(|own| own.get(&vni));
        own.map_or(0, BTreeSet::len)
    }

    pub fn is_droplet(&self, name: &str) -> bool {
        self.droplets.contains_key(name)
    }

    pub fn droplet_address(&self, name: &str) -> Option<Ipv4Addr> {
        self.droplets.get(name).copied()
    }

    pub fn droplets(&self) -> impl Iterator<Item = (&String, &Ipv4Addr)> {
        self.droplets.iter()
    }

    pub fn vni(&self, vpc: &str) -> Option<Vni> {
        self.vpcs.get(vpc).map(|vpc| vpc.vni)
    }

    /// Returns the ranges of a VPC that are in force.
    pub fn vpc_ranges(&self, vpc: &str) -> &[String] {
        self.vpcs.get(vpc).map_or(&[], |vpc| &vpc.cidrs)
    }

    pub fn has_vni(&self, vni: Vni) -> bool {
        self.by_vni.contains_key(&vni)
    }

    /// Yields the names of the VPCs with a number: one, but while it passes from one to another.
    fn vpcs_with(&self, vni: Vni) -> impl Iterator<Item = &String> {
        self.by_vni.get(&vni).into_iter().flatten()
    }

    /// Yields the names of a VPC's networks.
    fn networks_of(&self, vpc: &str) -> impl Iterator<Item = &String> + use<'_> {
        self.by_vpc.get(vpc).into_iter().flatten()
    }

    /// Returns the VNI that a network's rows carry.
    pub fn network_vni(&self, network: &str) -> Option<Vni> {
        self.vni(&self.networks.get(network)?.vpc)
    }

    /// Whether a droplet has a part in a VPC, so that it may ask about the VPC's addresses.
    pub fn takes_part(&self, droplet: &str, vni: Vni) -> bool {
        self.programs
            .get(droplet)
            .is_some_and(|program| program.contains_key(&Key::Vpc(vni)))
    }

    /// Whether the droplet has a bouncer of the network, or without one a divider of the VPC.
    pub fn carries(&self, droplet: &str, vni: Vni, network: Option<NetworkId>) -> bool {
        let key = match network {
            None => Key::Vpc(vni),
            Some(network) => Key::Network(vni, network),
        };
        let program = self.programs.get(droplet);
        let row = program.and_then(|program| program.get(&key)?.unpack().row);
        row.is_some_and(|row| match row {
            row::Row::Vpc(vpc) => vpc.divider_here,
            row::Row::Network(network) => network.bouncer_here,
            _ => false,
        })
    }

    /// Returns the rows that must be acked before the endpoint is Provisioned: its own, not its subscribers', and those
    /// by which its droplet finds the bouncers and dividers.
    pub fn endpoint_rows(&self, name: &EndpointName) -> Vec<(String, Key)> {
        let keys = self.keys_of(&Owner::Endpoint(name.clone()));
        let own = keys.filter(|(_, key)| matches!(key, Key::Local(..) | Key::Bouncer(..)));
        own.cloned().chain(self.ways_of(name)).collect()
    }

    fn ways_of(&self, name: &EndpointName) -> Vec<(String, Key)> {
        let ways = || {
            let endpoint = self.endpoints.get(name)?;
            let network = self.networks.get(&endpoint.network)?;
            let vni = self.vni(&network.vpc)?;
            let home = &endpoint.droplet;
            let keys = [Key::Vpc(vni), Key::Network(vni, network.id)];
            Some(keys.map(|key| (home.clone(), key)))
        };
        ways().into_iter().flatten().collect()
    }

    /// Returns the droplets that must accept packets from the endpoint's droplet: its VPC's dividers. Bouncers have the
    /// endpoint's row.
    pub fn dividers_of(&self, name: &EndpointName) -> BTreeSet<String> {
        let network = self
            .endpoints
            .get(name)
            .and_then(|endpoint| self.networks.get(&endpoint.network));
        let dividers = network.map(|network| self.dividers.holders(&network.vpc));
        dividers.into_iter().flatten().map(str::to_owned).collect()
    }

    /// Returns the droplets whose row leads to the endpoint's previous droplet until they ack the newer one: bouncers
    /// and subscribers.
    pub fn followers(&self, name: &EndpointName) -> Vec<(String, Key)> {
        let keys = self.keys_of(&Owner::Endpoint(name.clone()));
        keys.filter(|(_, key)| matches!(key, Key::Bouncer(..) | Key::Direct(..)))
            .cloned()
            .collect()
    }

    fn keys_of<'a>(&'a self, owner: &Owner) -> impl Iterator<Item = &'a (String, Key)> + use<'a> {
        let rows = self.contributions.get(owner).into_iter();
        rows.flat_map(|rows| rows.iter().map(|(at, _)| at))
    }

    /// Whether anything of the network is left: endpoints with an address, or bouncers.
    pub fn is_in_use(&self, network: &str) -> bool {
        let members = self.members.get(network);
        members.is_some_and(|droplets| !droplets.is_empty()) || self.bouncers.is_parent(network)
    }

    fn touch_vpc(&mut self, vpc: &str) {
        self.dirty.insert(Owner::Vpc(vpc.to_owned()));
        let networks = self.by_vpc.get(vpc).into_iter().flatten();
        self.dirty.extend(networks.cloned().map(Owner::Network));
    }

    fn touch_network(&mut self, network: &str) {
        self.touch_participation(network);
        let droplets = self.members.get(network).into_iter().flat_map(BTreeMap::values);
        self.dirty
            .extend(droplets.flatten().cloned().map(Owner::Endpoint));
    }

    /// Touches what depends on a network's droplets: its first endpoint came to a droplet, or its last one left it.
    fn touch_participation(&mut self, network: &str) {
        self.dirty.insert(Owner::Network(network.to_owned()));
        let vpc = self.networks.get(network).map(|network| network.vpc.clone());
        self.touch_local_services(vpc.as_deref().unwrap_or_default());
        self.touch_policy_rows(vpc.as_deref().unwrap_or_default());
        self.dirty.extend(vpc.map(Owner::Vpc));
    }
}

/// Notes under which key a name is from now on.
fn change_place<K: Eq + Hash>(
    names: &mut HashMap<K, BTreeSet<String>>,
    (old, new): (Option<K>, Option<K>),
    name: &str,
) {
    if old == new {
        return;
    }
    if let Some(old) = old {
        remove_name(names, &old, name);
    }
    if let Some(new) = new {
        names.entry(new).or_default().insert(name.to_owned());
    }
}

/// Removes a name, and its set with the last one.
fn remove_name<K, Q>(names: &mut HashMap<K, BTreeSet<String>>, key: &Q, name: &str)
where
    K: Eq + Hash + Borrow<Q>,
    Q: Eq + Hash + ?Sized,
{
    if let Some(set) = names.get_mut(key) {
        set.remove(name);
        if set.is_empty() {
            names.remove(key);
        }
    }
}

/// Inserts or removes a value. Returns whether that changed anything.
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
pub(crate) mod tests;

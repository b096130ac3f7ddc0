//! The context of every reconciler: client, stores, hub, events.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, ObjectReference};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, ResourceExt};
use thuban_api::cidr::Cidr;
use thuban_api::cluster_dns::{ClusterDns, DnsService};
use thuban_api::{Endpoint, GROUP, IpClaim, Network, Phase, Vpc};

use crate::controller::cache::claim_locks::ClaimLocks;
use crate::controller::cache::drafts::Drafts;
use crate::controller::cache::index::Index;
use crate::controller::cache::last_seen::LastSeen;
use crate::controller::cache::path_traces::PathTraces;
use crate::controller::cache::placements::Placements;
use crate::controller::cache::policies_told::PoliciesTold;
use crate::controller::cache::reservations::Reservations;
use crate::controller::cache::resting_claims::RestingClaims;
use crate::controller::cache::service_addresses::ServiceAddresses;
use crate::controller::cache::slices::Slices;
use crate::controller::cache::stores::Stores;
use crate::controller::policy_state;
use crate::controller::runtime::clocks::Clocks;
use crate::controller::runtime::events::Events;
use crate::controller::runtime::objects::Object;
use crate::controller::runtime::waits::Waits;
use crate::hub::{Health, Hub};
use crate::metrics::{DropletCounts, Leadership, Told};
use crate::model::cached::internal_ips;
use crate::model::world::World;
use crate::rate_limit::RateLimit;
use thuban_api::refused_ranges::RefusedRanges;

/// The options of one leadership.
#[derive(Debug)]
pub struct Options {
    pub epoch: u64,
    /// How long nobody led before.
    pub vacancy: Duration,
    /// Ranges that no VPC may touch.
    pub refused: RefusedRanges,
    /// Ranges in which Services have their addresses, besides those of ServiceCIDR objects.
    pub service_ranges: Vec<Cidr>,
    /// Ranges in which Services may have `externalIPs`.
    pub external_ranges: Vec<Cidr>,
    /// Ranges of nodes and underlay.
    pub underlay_ranges: Vec<Cidr>,
    /// Range of the default VPC.
    pub default_range: Cidr,
    /// How long a released address, and a VNI, rests before it may be given out again.
    pub claim_rest: Duration,
    /// How long droplets serve ports of tenants' Services without an operator.
    pub node_port_lease: Duration,
    /// ClusterIPs of the cluster's DNS, of which droplets have a view for each VPC.
    pub cluster_dns: Option<ClusterDns>,
    /// The Service that has these ClusterIPs. VPCs share it by default.
    pub cluster_dns_service: DnsService,
}

/// The rate of writes of numbers that only people read: the churn of a large cluster must not double the writes.
const COUNTS_A_SECOND: u32 = 10;
const COUNTS_AT_ONCE: u32 = 50;

pub struct Context {
    pub client: Client,
    pub hub: Arc<Hub>,
    pub stores: Stores,
    pub events: Events,
    pub refused: RefusedRanges,
    /// Ranges in which Services have their addresses, besides those of ServiceCIDR objects.
    pub service_ranges: Vec<Cidr>,
    /// Ranges in which Services may have `externalIPs`.
    pub external_ranges: Vec<Cidr>,
    /// Ranges of nodes and underlay.
    pub underlay_ranges: Vec<Cidr>,
    /// The first range of the default VPC. Nodes see packets of its addresses, so the range is refused to all other
    /// VPCs.
    pub default_range: Cidr,
    /// How long a released address, and a VNI, rests before it may be given out again.
    pub claim_rest: Duration,
    /// Services of the default VPC, by namespace and name, that a VPC reaches if its spec lists none.
    pub shared_by_default: Vec<(String, String)>,
    pub reservations: Reservations,
    pub service_addresses: ServiceAddresses,
    pub waits: Waits,
    pub claim_locks: ClaimLocks,
    pub drafts: Drafts,
    pub resting_claims: RestingClaims,
    pub placements: Placements,
    pub index: Index,
    pub slices: Slices,
    pub policies_told: PoliciesTold,
    pub path_traces: PathTraces,
    /// The rate limit of writes that only update numbers in statuses.
    pub counts: RateLimit,
    pub clocks: Clocks,
    pub last_seen: LastSeen,
}

impl Context {
    pub fn new(client: Client, hub: Arc<Hub>, stores: Stores, events: Events, options: Options) -> Self {
        let dns = options.cluster_dns_service;
        let dns = options.cluster_dns.map(|_| (dns.namespace, dns.name));
        let kubernetes = ("default".to_owned(), "kubernetes".to_owned());
        Self {
            client,
            hub,
            stores,
            events,
            refused: options.refused,
            service_ranges: options.service_ranges,
            external_ranges: options.external_ranges,
            underlay_ranges: options.underlay_ranges,
            default_range: options.default_range,
            claim_rest: options.claim_rest,
            shared_by_default: [kubernetes].into_iter().chain(dns).collect(),
            reservations: Reservations::default(),
            service_addresses: ServiceAddresses::default(),
            waits: Waits::default(),
            claim_locks: ClaimLocks::default(),
            drafts: Drafts::default(),
            resting_claims: RestingClaims::default(),
            placements: Placements::default(),
            index: Index::default(),
            slices: Slices::default(),
            policies_told: PoliciesTold::default(),
            path_traces: PathTraces::default(),
            counts: RateLimit::new(COUNTS_A_SECOND, COUNTS_AT_ONCE),
            clocks: Clocks::default(),
            last_seen: LastSeen::default(),
        }
    }

    pub fn vpc(&self, name: &str) -> Option<Arc<Vpc>> {
        self.stores.vpcs.get(&ObjectRef::new(name))
    }

    pub fn network(&self, name: &str) -> Option<Arc<Network>> {
        self.stores.networks.get(&ObjectRef::new(name))
    }

    pub fn node(&self, name: &str) -> Option<Arc<Node>> {
        self.stores.nodes.get(&ObjectRef::new(name))
    }

    /// Returns the VPC of an endpoint's network. If the network is gone, returns the VPC that the endpoint was made
    /// with.
    pub fn vpc_name_of(&self, endpoint: &Endpoint) -> String {
        let network = self.network(&endpoint.spec.network);
        network.map_or_else(|| endpoint.spec.vpc.clone(), |network| network.spec.vpc.clone())
    }

    /// Returns the claims of an owner.
    pub fn claims_of(&self, owner: &str) -> Vec<Arc<IpClaim>> {
        found(&self.stores.ip_claims, &self.index.owned_by(owner))
    }

    /// Returns the networks of a VPC.
    pub fn networks_of(&self, vpc: &str) -> Vec<Arc<Network>> {
        found(&self.stores.networks, &self.index.networks_of(vpc))
    }

    /// Returns the addresses of all nodes, with the nodes' names.
    pub fn node_addresses(&self) -> Vec<(String, IpAddr)> {
        let nodes = self.stores.nodes.state();
        nodes.iter().flat_map(|node| addresses_of(node)).collect()
    }
}

/// Yields the addresses of a node, each with the node's name.
pub fn addresses_of(node: &Node) -> impl Iterator<Item = (String, IpAddr)> + use<> {
    let name = node.name_any();
    let addresses = internal_ips(node).into_iter();
    addresses.map(move |address| (name.clone(), address))
}

/// Returns a reference to a cluster-scoped object of ours, for an event.
pub fn related(kind: &str, name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(format!("{GROUP}/v1alpha1")),
        kind: Some(kind.to_owned()),
        name: Some(name.to_owned()),
        ..ObjectReference::default()
    }
}

/// Returns the objects with these names that the store has.
pub fn found<K: Object>(store: &Store<K>, names: &[String]) -> Vec<Arc<K>> {
    names
        .iter()
        .filter_map(|name| store.get(&ObjectRef::new(name)))
        .collect()
}

impl Leadership for Context {
    fn look(&self) {
        self.hub.is_connected("");
    }

    fn epoch(&self) -> u64 {
        self.hub.epoch()
    }

    fn droplets(&self) -> DropletCounts {
        let droplets: Vec<String> = self
            .hub
            .read(|world| world.droplets().map(|(name, _)| name.clone()).collect());
        let mut counts = DropletCounts::default();
        for droplet in droplets {
            match self.hub.health(&droplet) {
                Health::Connected => counts.connected += 1,
                Health::Missing(_) => counts.missing += 1,
                Health::Suspect => counts.suspect += 1,
            }
        }
        counts
    }

    fn phases(&self) -> Vec<(&'static str, Vec<Option<Phase>>)> {
        let stores = &self.stores;
        macro_rules! phases {
            ($store:ident) => {
                stores
                    .$store
                    .state()
                    .iter()
                    .map(|object| object.status.as_ref().map(|status| status.phase))
                    .collect()
            };
        }
        vec![
            ("Vpc", phases!(vpcs)),
            ("Network", phases!(networks)),
            ("Endpoint", phases!(endpoints)),
            ("Divider", phases!(dividers)),
            ("Bouncer", phases!(bouncers)),
            ("Droplet", phases!(droplets)),
        ]
    }

    fn policies(&self) -> Vec<Told> {
        policy_state::told_of_all(self)
    }

    fn rows_without_room(&self) -> usize {
        self.hub.rows_without_room()
    }

    fn network_policies(&self) -> usize {
        if self.hub.read(World::has_outdated) {
            self.stores.network_policies.len()
        } else {
            0
        }
    }
}

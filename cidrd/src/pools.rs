//! IpPools: which are accepted, who may lease from them, and how many addresses are in use.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use kube::core::{PartialObjectMeta, Selector, SelectorExt};
use kube::runtime::reflector::store::WriterDropped;
use kube::runtime::reflector::{ObjectRef, Store};
use thiserror::Error;
use thuban_api::cidr::{Cidr, CidrError};
use thuban_api::ip_lease::{IpLease, LeaseState};
use thuban_api::ip_pool::{AnnounceBy, IpPool, IpPoolSpec, IpPoolStatus, PoolClass};
use thuban_api::refused_ranges::RefusedRanges;
use thuban_api::{Network, Vpc};

use crate::lease::Terms;

/// The largest number that JSON tells exactly.
const MAX_NUMBER: u128 = 1 << 53;

/// Why no addresses of a pool can be leased.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PoolError {
    #[error("spec.cidrs: {0}")]
    Malformed(#[from] CidrError),
    #[error("spec.cidrs: {cidr} touches {other} ({what}): choose a range outside of it")]
    Refused { cidr: Cidr, other: Cidr, what: String },
    #[error("spec.cidrs: {cidr} contains the address {address} of node {node}: choose a range without it")]
    NodeAddress {
        cidr: Cidr,
        address: IpAddr,
        node: String,
    },
    #[error("spec.cidrs: {cidr} overlaps {other} of the older IpPool {pool}: choose a range outside of it")]
    Pool { cidr: Cidr, other: String, pool: String },
    #[error(
        "spec.cidrs: {cidr} contains {address}, which is leased from the IpPool {pool}: choose a range without it"
    )]
    Leased {
        cidr: Cidr,
        address: String,
        pool: String,
    },
    #[error(
        "spec.cidrs: {cidr} overlaps {other} of VPC {vpc}: pods there would reach each other by these addresses"
    )]
    Vpc { cidr: Cidr, other: String, vpc: String },
    #[error("spec.cidrs: {cidr} overlaps {other} of network {network}: its pods have these addresses")]
    Network {
        cidr: Cidr,
        other: String,
        network: String,
    },
    #[error("spec.vpc: VPC {0} does not exist: create it, or make an IpPool of another VPC")]
    NoVpc(String),
}

impl PoolError {
    /// Returns the CamelCase reason of the condition.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "InvalidCidr",
            Self::Refused { .. } | Self::NodeAddress { .. } => "RangeRefused",
            Self::Pool { .. } | Self::Leased { .. } | Self::Vpc { .. } | Self::Network { .. } => {
                "RangeOverlaps"
            }
            Self::NoVpc(_) => "VpcNotFound",
        }
    }
}

/// What a pool must not touch.
#[derive(Default)]
pub struct Surroundings {
    pub pools: Vec<Arc<IpPool>>,
    pub vpcs: Vec<Arc<Vpc>>,
    pub networks: Vec<Arc<Network>>,
    /// Nodes' names and addresses.
    pub nodes: Vec<(String, IpAddr)>,
    pub leases: Vec<Arc<IpLease>>,
    pub refused: RefusedRanges,
}

/// Checks a pool. Returns its ranges.
pub fn check(pool: &IpPool, around: &Surroundings) -> Result<Vec<Cidr>, PoolError> {
    let cidrs = pool
        .spec
        .cidrs
        .iter()
        .map(|text| text.parse())
        .collect::<Result<Vec<Cidr>, CidrError>>()?;
    if pool.spec.class == PoolClass::Private && !around.vpcs.iter().any(|vpc| vpc.name_any() == pool.spec.vpc)
    {
        return Err(PoolError::NoVpc(pool.spec.vpc.clone()));
    }
    for cidr in &cidrs {
        check_range(pool, *cidr, around)?;
    }
    Ok(cidrs)
}

fn check_range(pool: &IpPool, cidr: Cidr, around: &Surroundings) -> Result<(), PoolError> {
    let refused = match pool.spec.announce {
        AnnounceBy::Bgp => around.refused.find(cidr),
        AnnounceBy::L2 => around.refused.find_on_link(cidr),
    };
    if let Some((other, what)) = refused {
        let what = what.to_owned();
        return Err(PoolError::Refused { cidr, other, what });
    }
    if let Some((node, address)) = around
        .nodes
        .iter()
        .find(|(_, address)| cidr.contains_address(*address))
    {
        let (node, address) = (node.clone(), *address);
        return Err(PoolError::NodeAddress { cidr, address, node });
    }
    for other in around.pools.iter().filter(|other| rivals(pool, other)) {
        if let Some(range) = overlapping(cidr, &other.spec.cidrs) {
            let (other, pool) = (range.clone(), other.name_any());
            return Err(PoolError::Pool { cidr, other, pool });
        }
    }
    let is_others = |lease: &&Arc<IpLease>| {
        let meets = pool.spec.vpc.is_empty() || lease.spec.vpc.is_empty() || pool.spec.vpc == lease.spec.vpc;
        lease.spec.pool != pool.name_any() && meets
    };
    for lease in around.leases.iter().filter(is_others) {
        let address = crate::lease::address(lease);
        if address.is_some_and(|address| cidr.contains_address(address)) {
            let (address, pool) = (lease.spec.address.clone(), lease.spec.pool.clone());
            return Err(PoolError::Leased { cidr, address, pool });
        }
    }
    if pool.spec.class == PoolClass::Private {
        let of_vpc = |network: &&Arc<Network>| network.spec.vpc == pool.spec.vpc;
        for network in around.networks.iter().filter(of_vpc) {
            if let Some(range) = overlapping(cidr, &network.spec.cidrs) {
                let (other, network) = (range.clone(), network.name_any());
                return Err(PoolError::Network { cidr, other, network });
            }
        }
        return Ok(());
    }
    for vpc in &around.vpcs {
        if let Some(range) = overlapping(cidr, &vpc.spec.cidrs) {
            let (other, vpc) = (range.clone(), vpc.name_any());
            return Err(PoolError::Vpc { cidr, other, vpc });
        }
    }
    Ok(())
}

/// Whether another pool has the first right to a range that both have. Private pools of two VPCs may have the same
/// ranges.
fn rivals(pool: &IpPool, other: &IpPool) -> bool {
    let are_apart = pool.spec.class == PoolClass::Private
        && other.spec.class == PoolClass::Private
        && pool.spec.vpc != other.spec.vpc;
    !are_apart && age(other) < age(pool)
}

/// The order of pools: the older one is first.
fn age(pool: &IpPool) -> (Option<k8s_openapi::jiff::Timestamp>, String) {
    (pool.creation_timestamp().map(|time| time.0), pool.name_any())
}

fn overlapping(cidr: Cidr, ranges: &[String]) -> Option<&String> {
    let overlaps = |text: &&String| text.parse().is_ok_and(|range: Cidr| range.overlaps(cidr));
    ranges.iter().find(overlaps)
}

/// Whether a pool admits a namespace with these labels. A selector that can't be read admits nobody.
pub fn admits(spec: &IpPoolSpec, labels: &BTreeMap<String, String>) -> bool {
    selects(spec.allowed_namespaces.as_ref(), labels)
}

/// Whether a selector of namespaces is there and selects one with these labels. One that can't be read selects none.
pub fn selects(selector: Option<&LabelSelector>, labels: &BTreeMap<String, String>) -> bool {
    let selector = selector.cloned().map(Selector::try_from);
    matches!(selector, Some(Ok(selector)) if selector.matches(labels))
}

/// Why somebody can't lease from a pool at all.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TermsError {
    #[error("the IpPool {0} does not exist")]
    Unknown(String),
    #[error("the IpPool {pool} is not accepted: {error}")]
    NotAccepted { pool: String, error: PoolError },
    #[error("the IpPool {pool} does not admit the namespace {namespace}: see its spec.allowedNamespaces")]
    NotAllowed { pool: String, namespace: String },
}

/// Tells the terms on which a namespace may lease from a pool.
pub trait Pools: Send + Sync + 'static {
    fn terms(&self, pool: &str, namespace: &str) -> Result<Terms, TermsError>;
}

/// The objects that decide about pools, as they were seen last.
pub struct Directory {
    pub pools: Store<IpPool>,
    pub vpcs: Store<Vpc>,
    pub networks: Store<Network>,
    pub nodes: Store<k8s_openapi::api::core::v1::Node>,
    pub leases: Store<IpLease>,
    pub namespaces: Store<PartialObjectMeta<Namespace>>,
    pub refused: RefusedRanges,
}

impl Pools for Arc<Directory> {
    fn terms(&self, pool: &str, namespace: &str) -> Result<Terms, TermsError> {
        let Some(found) = self.pools.get(&ObjectRef::new(pool)) else {
            return Err(TermsError::Unknown(pool.to_owned()));
        };
        let cidrs = check(&found, &self.surroundings()).map_err(|error| TermsError::NotAccepted {
            pool: pool.to_owned(),
            error,
        })?;
        let spec = &found.spec;
        let labelled = self.namespaces.get(&ObjectRef::new(namespace));
        if !labelled.is_some_and(|namespace| admits(spec, namespace.labels())) {
            return Err(TermsError::NotAllowed {
                pool: pool.to_owned(),
                namespace: namespace.to_owned(),
            });
        }
        Ok(Terms {
            pool: pool.to_owned(),
            vpc: spec.vpc.clone(),
            cidrs,
            lease_seconds: spec.lease_seconds,
            quarantine_seconds: spec.quarantine_seconds,
        })
    }
}

impl Directory {
    /// Waits until each kind was listed.
    pub async fn wait_until_ready(&self) -> Result<(), WriterDropped> {
        self.pools.wait_until_ready().await?;
        self.vpcs.wait_until_ready().await?;
        self.networks.wait_until_ready().await?;
        self.nodes.wait_until_ready().await?;
        self.leases.wait_until_ready().await?;
        self.namespaces.wait_until_ready().await
    }

    pub fn surroundings(&self) -> Surroundings {
        let nodes = self.nodes.state();
        Surroundings {
            pools: self.pools.state(),
            vpcs: self.vpcs.state(),
            networks: self.networks.state(),
            nodes: nodes.iter().flat_map(|node| addresses(node)).collect(),
            leases: self.leases.state(),
            refused: self.refused.clone(),
        }
    }
}

fn addresses(node: &k8s_openapi::api::core::v1::Node) -> Vec<(String, IpAddr)> {
    let status = node.status.as_ref();
    let all = status
        .and_then(|status| status.addresses.as_deref())
        .unwrap_or_default();
    all.iter()
        .filter_map(|address| Some((node.name_any(), address.address.parse().ok()?)))
        .collect()
}

/// How many addresses are leased and in quarantine, by the pool's name.
#[derive(Default)]
pub struct Counts(HashMap<String, (u64, u64)>);

impl Counts {
    pub fn new(leases: &[Arc<IpLease>]) -> Self {
        let mut counts = Self::default();
        for lease in leases {
            let (leased, quarantined) = counts.0.entry(lease.spec.pool.clone()).or_default();
            match lease.state() {
                LeaseState::Proposed | LeaseState::Held => *leased += 1,
                LeaseState::Quarantined => *quarantined += 1,
            }
        }
        counts
    }
}

/// Returns a status with the numbers of a pool's addresses. A range that can't be read has none.
pub fn usage(pool: &IpPool, counts: &Counts) -> IpPoolStatus {
    let ranges = pool
        .spec
        .cidrs
        .iter()
        .filter_map(|text| text.parse::<Cidr>().ok());
    let size: u128 = ranges
        .map(Cidr::size)
        .fold(0, u128::saturating_add)
        .min(MAX_NUMBER);
    let size = u64::try_from(size).unwrap_or(u64::MAX);
    let (leased, quarantined) = counts.0.get(&pool.name_any()).copied().unwrap_or_default();
    IpPoolStatus {
        size,
        leased,
        quarantined,
        free: size.saturating_sub(leased).saturating_sub(quarantined),
        ..IpPoolStatus::default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;
    use thuban_api::ip_pool::{AnnounceBy, IpPool};
    use thuban_api::refused_ranges::RefusedRanges;

    use super::{Counts, Surroundings, check, usage};

    fn pool(name: &str, second: u32, vpc: &str, cidrs: &[&str]) -> Arc<IpPool> {
        let class = if vpc.is_empty() { "public" } else { "private" };
        let object = json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "IpPool",
            "metadata": {"name": name, "creationTimestamp": format!("2026-11-27T08:00:{second:02}Z")},
            "spec": {"class": class, "vpc": vpc, "cidrs": cidrs},
        });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    /// A VPC `red` with one network, beside a node and Services.
    fn around(pools: Vec<Arc<IpPool>>) -> Surroundings {
        let vpc = json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "Vpc",
            "metadata": {"name": "red"}, "spec": {"cidrs": ["10.0.0.0/16"]},
        });
        let network = json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "Network",
            "metadata": {"name": "front"}, "spec": {"vpc": "red", "cidrs": ["10.0.1.0/24"]},
        });
        Surroundings {
            pools,
            vpcs: vec![Arc::new(serde_json::from_value(vpc).unwrap())],
            networks: vec![Arc::new(serde_json::from_value(network).unwrap())],
            nodes: vec![("n1".into(), [192, 0, 2, 7].into())],
            leases: Vec::new(),
            refused: RefusedRanges::new(&["10.96.0.0/12".parse().unwrap()], &[]).unwrap(),
        }
    }

    #[test]
    fn a_pool_touches_nothing_that_somebody_else_uses() {
        let older = pool("older", 1, "", &["203.0.113.0/25"]);
        for (pool, reason) in [
            (pool("p", 2, "", &["203.0.113.128/25", "2001:db8::/120"]), None),
            (pool("p", 0, "", &["203.0.113.0/24"]), None),
            (pool("p", 2, "", &["203.0.113.0/24"]), Some("RangeOverlaps")),
            (pool("p", 1, "", &["203.0.113.0/24"]), Some("RangeOverlaps")),
            (pool("p", 2, "", &["10.0.200.0/24"]), Some("RangeOverlaps")),
            (pool("p", 2, "", &["192.0.2.0/24"]), Some("RangeRefused")),
            (pool("p", 2, "", &["10.97.0.0/24"]), Some("RangeRefused")),
            (pool("p", 2, "", &["169.254.7.0/24"]), Some("RangeRefused")),
            (pool("p", 2, "", &["203.0.113.129/25"]), Some("InvalidCidr")),
            (pool("p", 2, "red", &["10.0.200.0/24"]), None),
            (pool("p", 2, "red", &["10.0.1.128/25"]), Some("RangeOverlaps")),
            (pool("p", 2, "red", &["203.0.113.4/32"]), Some("RangeOverlaps")),
            (pool("p", 2, "blue", &["10.0.200.0/24"]), Some("VpcNotFound")),
        ] {
            let checked = check(&pool, &around(vec![older.clone(), pool.clone()]));
            let cidrs = &pool.spec.cidrs;
            assert_eq!(
                checked.as_ref().err().map(super::PoolError::reason),
                reason,
                "{cidrs:?}: {checked:?}"
            );
        }
    }

    #[test]
    fn only_a_pool_of_l2_is_within_the_underlay() {
        let underlay = ["198.51.100.0/24".parse().unwrap()];
        let mut around = around(Vec::new());
        around.refused = RefusedRanges::new(&["10.96.0.0/12".parse().unwrap()], &underlay).unwrap();
        around.nodes = vec![("n1".into(), [198, 51, 100, 7].into())];
        let l2 = |cidr: &str| {
            let mut pool = (*pool("p", 1, "", &[cidr])).clone();
            pool.spec.announce = AnnounceBy::L2;
            pool
        };
        assert!(check(&pool("p", 1, "", &["198.51.100.64/29"]), &around).is_err());
        assert!(check(&l2("198.51.100.64/29"), &around).is_ok());
        assert!(check(&l2("198.51.100.0/29"), &around).is_err(), "of a node");
        assert!(check(&l2("10.97.0.0/29"), &around).is_err(), "of Services");
    }

    #[test]
    fn a_pool_has_no_address_that_another_pool_has_leased() {
        let lease = json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "IpLease", "metadata": {"name": "203.0.113.4"},
            "spec": {
                "pool": "younger", "vpc": "", "address": "203.0.113.4", "leaseSeconds": 600, "quarantineSeconds": 300,
                "holder": {"uid": "uid", "namespace": "shop", "name": "web"},
            },
        });
        let mut around = around(Vec::new());
        around
            .leases
            .push(Arc::new(serde_json::from_value(lease).unwrap()));
        for vpc in ["", "red"] {
            assert!(check(&pool("older", 1, vpc, &["203.0.113.0/29"]), &around).is_err());
            assert!(check(&pool("older", 1, vpc, &["203.0.113.8/29"]), &around).is_ok());
        }
        assert!(check(&pool("younger", 2, "", &["203.0.113.0/29"]), &around).is_ok());
    }

    #[test]
    fn private_pools_of_two_vpcs_may_have_equal_ranges() {
        let mut around = around(vec![pool("older", 1, "red", &["10.9.0.0/24"])]);
        let mut blue = (*around.vpcs[0]).clone();
        blue.metadata.name = Some("blue".into());
        around.vpcs.push(Arc::new(blue));
        assert!(check(&pool("p", 2, "blue", &["10.9.0.0/24"]), &around).is_ok());
        assert!(check(&pool("p", 2, "red", &["10.9.0.0/24"]), &around).is_err());
    }

    #[test]
    fn the_size_of_a_pool_is_told_even_if_it_is_huge() {
        let small = usage(
            &pool("p", 1, "", &["203.0.113.0/30", "2001:db8::/127"]),
            &Counts::default(),
        );
        assert_eq!((small.size, small.free), (6, 6));
        assert_eq!(
            usage(&pool("p", 1, "", &["::/0", "0.0.0.0/0"]), &Counts::default()).size,
            1 << 53
        );
    }
}

//! Claims and releases an endpoint's addresses, one of each family that its network has ranges of. Addresses are
//! claimed by creating objects, and released together.
//!
//! Invariant: an address counts only once an Endpoint says that it has it; a claim that never gets there is released by
//! `claim`.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::cidr::Cidr;
use thuban_api::identifiers::Vni;
use thuban_api::{Endpoint, IpClaim, IpClaimSpec, Network};

use crate::controller::attach::is_borne_out;
use crate::controller::cache::resting_claims::Resting;
use crate::controller::claim::{confirm, is_void, release};
use crate::controller::context::Context;
use crate::controller::runtime::error::ClaimError;
use crate::controller::runtime::objects::{WriteError, create, delete, get};
use crate::hub::Report;
use crate::model::allocation::{
    Family, Owner, addresses_of, ip_claim_name, is_anothers, is_confirmed, is_released, own_claim, propose,
};
use crate::model::world::World;

/// The most claims that one try may lose to others before the next try takes over.
const MAX_LOST: usize = 1000;

/// The owner of claims, and the addresses that are claimed for it.
pub struct Claimant<'a> {
    pub owner: &'a Owner,
    /// UID that kubelet tells the CNI plugin; empty without a pod.
    pub cni_uid: &'a str,
    /// Droplet that the endpoint lives on; empty without a pod.
    pub droplet: &'a str,
    /// Droplet that the endpoint lives on for life; empty if the endpoint has no droplet, or moves.
    pub home: &'a str,
    pub network: &'a Network,
    /// Ranges in force.
    pub ranges: &'a [Cidr],
    /// Addresses asked for.
    pub asked: &'a [IpAddr],
    /// Addresses that the endpoint's droplet refused.
    pub refused: &'a [IpAddr],
}

impl Claimant<'_> {
    /// Claims the addresses that the endpoint needs, IPv4 first. The next try finds the addresses that were claimed
    /// before an error.
    pub async fn claim_all(&self, context: &Context) -> Result<Vec<Claimed>, ClaimError> {
        let mut claimed = Vec::new();
        for family in Family::ALL {
            let ranges = family.ranges(self.ranges);
            let asked = self.asked.iter().find(|address| Family::of(**address) == family);
            if let Some(asked) = asked {
                claimed.push(self.claim_asked(*asked, &ranges, context).await?);
            } else if !ranges.is_empty() || family == Family::V4 {
                claimed.push(self.claim_any(family, &ranges, context).await?);
            }
        }
        Ok(claimed)
    }

    /// Claims the addresses asked for and no others. `leased`: those of them that cidrd leased to the owner, which are
    /// in no range of the network.
    pub async fn claim_asked_alone(&self, leased: &[IpAddr], context: &Context) -> Result<(), ClaimError> {
        for address in self.asked {
            if leased.contains(address) {
                if self.try_claim(*address, context).await? == Try::Lost {
                    return Err(self.taken(*address, context));
                }
                continue;
            }
            let ranges = Family::of(*address).ranges(self.ranges);
            self.claim_asked(*address, &ranges, context).await?;
        }
        Ok(())
    }

    async fn claim_asked(
        &self,
        address: IpAddr,
        ranges: &[Cidr],
        context: &Context,
    ) -> Result<Claimed, ClaimError> {
        let unfit = |wrong| ClaimError::Unfit { address, wrong };
        if !self.network.spec.allow_static_ips {
            let network = self.network.name_any();
            return Err(ClaimError::NotStatic { address, network });
        }
        let range = ranges.iter().find(|range| range.contains_address(address));
        let range = range.ok_or_else(|| self.outside_ranges(address))?;
        if !range.is_host(address) {
            return Err(unfit(
                "the first, second and last address of a range are never given out; ask for another one",
            ));
        }
        if self.refused.contains(&address) {
            return Err(unfit(
                "an endpoint on the same node has it already; ask for another one, or run the pod on another node",
            ));
        }
        let tried = self.try_claim(address, context).await?;
        tried
            .claimed((address, *range))
            .ok_or_else(|| self.taken(address, context))
    }

    fn outside_ranges(&self, address: IpAddr) -> ClaimError {
        let ranges: Vec<String> = self.ranges.iter().map(ToString::to_string).collect();
        ClaimError::OutsideRanges {
            address,
            network: self.network.name_any(),
            ranges: ranges.join(", "),
        }
    }

    /// Returns the error of an address that another endpoint has. That one is named in its own namespace alone.
    fn taken(&self, address: IpAddr, context: &Context) -> ClaimError {
        let name = ip_claim_name(&self.network.spec.vpc, address);
        let claim = context.stores.ip_claims.get(&ObjectRef::new(&name));
        let is_of_namespace = |claim: &Arc<IpClaim>| claim.spec.endpoint_namespace == self.owner.namespace;
        match claim.filter(is_of_namespace).filter(|claim| !is_released(claim)) {
            Some(claim) => ClaimError::TakenHere {
                address,
                endpoint: claim.spec.endpoint_name.clone(),
            },
            None => ClaimError::Taken { address },
        }
    }

    async fn claim_any(
        &self,
        family: Family,
        ranges: &[Cidr],
        context: &Context,
    ) -> Result<Claimed, ClaimError> {
        // The claim was made before a crash, or before the race for the other family was lost; no status names its
        // address yet.
        let known = context.claims_of(&self.owner.uid);
        let known = own_claim(known.iter().map(AsRef::as_ref), self.owner, family, ranges);
        // The pod had the address before etcd forgot it.
        let vni = context
            .hub
            .read(|world| world.network_vni(&self.network.name_any()));
        let attached = vni.map(|vni| context.hub.attached_addresses(self.cni_uid, self.droplet, vni));
        let attached = attached.into_iter().flatten().find_map(|address| {
            let range = ranges.iter().find(|range| range.is_host(address))?;
            Some((address, *range))
        });
        for (address, range) in known.into_iter().chain(attached) {
            if self.refused.contains(&address) {
                continue;
            }
            let tried = self.try_claim(address, context).await?;
            if let Some(claimed) = tried.claimed((address, range)) {
                return Ok(claimed);
            }
        }
        let mut lost: Vec<IpAddr> = self.refused.to_vec();
        loop {
            let pick = self.pick(family, ranges, &lost, context);
            let (address, range) = pick.ok_or_else(|| self.none_left(family, ranges, context))?;
            let tried = self.try_claim(address, context).await?;
            if let Some(claimed) = tried.claimed((address, range)) {
                return Ok(claimed);
            }
            lost.push(address);
            if lost.len() > MAX_LOST {
                return Err(ClaimError::Taken { address });
            }
        }
    }

    /// Returns why the network has no address for the endpoint: other VPCs may have the free ones on its droplet.
    fn none_left(&self, family: Family, ranges: &[Cidr], context: &Context) -> ClaimError {
        let (vpc, network) = (&self.network.spec.vpc, self.network.name_any());
        let is_claimed = |address| {
            let name = ip_claim_name(vpc, address);
            context.stores.ip_claims.get(&ObjectRef::new(&name)).is_some()
        };
        let is_used = |address| context.hub.read(|world| world.is_used_on(self.droplet, address));
        let free_elsewhere = propose(ranges, None, |address| is_claimed(address) || !is_used(address));
        let family = family.name();
        if self.droplet.is_empty() || free_elsewhere.is_none() {
            return ClaimError::Full { network, family };
        }
        ClaimError::UsedOnNode {
            network,
            family,
            node: self.droplet.to_owned(),
        }
    }

    /// Returns the lowest address that seems to be free.
    fn pick(
        &self,
        family: Family,
        ranges: &[Cidr],
        lost: &[IpAddr],
        context: &Context,
    ) -> Option<(IpAddr, Cidr)> {
        let vpc = &self.network.spec.vpc;
        let network = self.network.name_any();
        let vni = context.hub.read(|world| world.network_vni(&network));
        let floor = context.index.floor(&network, family);
        let reserve = |is_reserved: &dyn Fn(IpAddr) -> bool| {
            let mut first_free = None;
            let picked = propose(ranges, floor, |address| {
                let name = ip_claim_name(vpc, address);
                if context.stores.ip_claims.get(&ObjectRef::new(&name)).is_some() {
                    return true;
                }
                first_free.get_or_insert(address);
                lost.contains(&address)
                    || is_reserved(address)
                    || !self.droplet.is_empty()
                        && context.hub.read(|world| world.is_used_on(self.droplet, address))
                    || vni.is_some_and(|vni| self.is_live(vni, address, context))
            });
            if let Some(first) = first_free
                && let Some(range) = ranges.iter().find(|range| range.contains_address(first))
            {
                context.index.raise_floor(&network, *range, first);
            }
            picked
        };
        let uid = &self.owner.uid;
        context.reservations.reserve(uid, vpc, self.droplet, reserve)
    }

    /// Whether another pod has the address, though nobody has claimed it.
    fn is_live(&self, vni: Vni, address: IpAddr, context: &Context) -> bool {
        let judge = |report: &Report, world: &World| is_borne_out(report, world, context).then_some(true);
        context.hub.is_live(vni, address, self.cni_uid, judge)
    }

    /// Creates the claim of an address: the creation decides who has it.
    async fn try_claim(&self, address: IpAddr, context: &Context) -> Result<Try, WriteError> {
        let claims: Api<IpClaim> = Api::all(context.client.clone());
        let name = ip_claim_name(&self.network.spec.vpc, address);
        let spec = IpClaimSpec {
            vpc: self.network.spec.vpc.clone(),
            network: self.network.name_any(),
            address: address.to_string(),
            endpoint_namespace: self.owner.namespace.clone(),
            endpoint_name: self.owner.endpoint.clone(),
            pod: self.owner.pod.clone(),
            owner_uid: self.owner.uid.clone(),
            droplet: self.home.to_owned(),
        };
        let claim = IpClaim::new(&name, spec);
        match create(&claims, &claim).await {
            Ok(_) => return Ok(Try::New),
            Err(error) if error.is_conflict() => {}
            Err(error) => return Err(error),
        }
        // The cache may not show it yet, or not show its release.
        let Some(known) = get(&claims, &name).await? else {
            return Ok(Try::Lost);
        };
        if self.owner.holds(&known) {
            return Ok(Try::Own);
        }
        let is_namesakes = self.owner.had(&known.spec) && self.asked.contains(&address);
        if !is_namesakes || !rests(&known, context).await? {
            return Ok(Try::Lost);
        }
        // All droplets acked that the address is free. Only strangers must wait until it has rested.
        delete(&claims, &known).await?;
        match create(&claims, &claim).await {
            Ok(_) => Ok(Try::New),
            Err(error) if error.is_conflict() => Ok(Try::Lost),
            Err(error) => Err(error),
        }
    }
}

/// An address that is claimed.
#[derive(Clone, Copy, Debug)]
pub struct Claimed {
    /// The address and its range.
    pub address: (IpAddr, Cidr),
    /// Whether the claim was made just now.
    pub is_new: bool,
}

/// What came of a try to claim an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Try {
    /// The claim was made.
    New,
    /// The claim was the owner's already.
    Own,
    Lost,
}

impl Try {
    fn claimed(self, address: (IpAddr, Cidr)) -> Option<Claimed> {
        let is_new = self == Self::New;
        (self != Self::Lost).then_some(Claimed { address, is_new })
    }
}

/// Whether all droplets acked that the address of a claim is out of use, and no Endpoint counts the claim.
async fn rests(claim: &IpClaim, context: &Context) -> Result<bool, WriteError> {
    Ok(match context.resting_claims.of(claim, Duration::ZERO) {
        Some(Resting::Over { is_settled: true }) => true,
        Some(Resting::Over { is_settled: false }) => is_void(context, &claim.spec).await?,
        Some(Resting::Unproven | Resting::Left(_)) | None => is_released(claim),
    })
}

/// Returns the claim of each address as the API server has it now; none where it is gone, released or another's.
pub async fn claims_held(
    endpoint: &Endpoint,
    addresses: &[IpAddr],
    context: &Context,
) -> Result<Vec<Option<IpClaim>>, WriteError> {
    let vpc = context.vpc_name_of(endpoint);
    let claims: Api<IpClaim> = Api::all(context.client.clone());
    let owner = Owner::of(endpoint);
    let mut held = Vec::new();
    for address in addresses {
        let claim = get(&claims, &ip_claim_name(&vpc, *address)).await?;
        held.push(claim.filter(|claim| owner.holds(claim)));
    }
    Ok(held)
}

/// Confirms the claims of addresses that the Endpoint's status is about to name. Until it does they count for nothing,
/// and may be released. An Endpoint without an address need not do so with claims that were made for it: they wait for
/// it. But a claim of its pod's last Endpoint may rest.
pub async fn confirm_each(
    endpoint: &Endpoint,
    addresses: &[IpAddr],
    context: &Context,
) -> Result<(), ClaimError> {
    let held = claims_held(endpoint, addresses, context).await?;
    let claims: Api<IpClaim> = Api::all(context.client.clone());
    for (claim, &address) in held.into_iter().zip(addresses) {
        let claim = claim.ok_or(ClaimError::Lost { address })?;
        if addresses_of(endpoint).is_empty() && is_confirmed(&claim, endpoint) {
            continue;
        }
        confirm(&claims, &claim, endpoint).await?;
    }
    Ok(())
}

/// Returns the claims of addresses of an Endpoint that ends, which rest once it is gone. A claim that another Endpoint
/// has confirmed is not among them.
pub fn claims_counted(endpoint: &Endpoint, addresses: &[IpAddr], context: &Context) -> Vec<Arc<IpClaim>> {
    let (vpc, owner) = (context.vpc_name_of(endpoint), Owner::of(endpoint));
    let names: Vec<String> = addresses
        .iter()
        .map(|address| ip_claim_name(&vpc, *address))
        .collect();
    let claims = context.claims_of(&owner.uid).into_iter();
    claims
        .filter(|claim| names.contains(&claim.name_any()))
        .filter(|claim| owner.holds(claim) && !is_anothers(claim, endpoint))
        .collect()
}

/// Releases the claims of addresses that the Endpoint has. Others' claims and missing claims are skipped, so that the
/// release can be repeated.
pub async fn release_each(
    endpoint: &Endpoint,
    addresses: &[IpAddr],
    context: &Context,
) -> Result<(), WriteError> {
    let held = claims_held(endpoint, addresses, context).await?;
    let claims: Api<IpClaim> = Api::all(context.client.clone());
    for claim in held.iter().flatten() {
        release(&claims, claim).await?;
    }
    Ok(())
}

/// Returns the addresses that the Endpoint has and those that it was made with.
pub fn all_addresses(endpoint: &Endpoint) -> Vec<IpAddr> {
    let mut addresses = addresses_of(endpoint);
    let claimed = endpoint.spec.claimed.iter().filter_map(|text| text.parse().ok());
    addresses.extend(claimed.filter(|address| !addresses_of(endpoint).contains(address)));
    addresses
}

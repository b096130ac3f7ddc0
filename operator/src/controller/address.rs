//! An endpoint's addresses, one of each family that its network has ranges of: claimed by creating objects, released
//! together.
//!
//! Invariant: an address counts only in the Endpoint's status; a claim that never gets there is released by `claim`.

use std::net::IpAddr;

use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thiserror::Error;
use thuban_api::cidr::Cidr;
use thuban_api::{Endpoint, IpClaim, IpClaimSpec, Network};

use super::claim::release;
use super::context::Context;
use super::objects::{WriteError, create, failed};
use crate::model::allocation::{Family, addresses_of, ip_claim_name, own_claim, propose};

/// Claims lost to others in one go before it is left to the next.
const MOST_LOST: usize = 1000;

#[derive(Debug, Error)]
pub enum ClaimError {
    #[error("network {network:?} has no free {family} address; append an {family} range to its spec.cidrs")]
    Full { network: String, family: &'static str },
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Claims what the endpoint needs, each with its range, IPv4 first. What was claimed before an error is found again
/// at the next try.
pub async fn claim_all(
    endpoint: &Endpoint,
    network: &Network,
    ranges: &[Cidr],
    context: &Context,
) -> Result<Vec<(IpAddr, Cidr)>, ClaimError> {
    let mut claimed = Vec::new();
    for family in Family::ALL {
        let ranges = family.ranges(ranges);
        if ranges.is_empty() && family == Family::V6 {
            continue;
        }
        let address = claim(endpoint, network, family, &ranges, context).await?;
        claimed.push(address.ok_or_else(|| ClaimError::Full {
            network: network.name_any(),
            family: family.name(),
        })?);
    }
    Ok(claimed)
}

/// Creates the claim of a free address; the creation decides who has it.
async fn claim(
    endpoint: &Endpoint,
    network: &Network,
    family: Family,
    ranges: &[Cidr],
    context: &Context,
) -> Result<Option<(IpAddr, Cidr)>, WriteError> {
    let uid = endpoint.uid().unwrap_or_default();
    let vpc = &network.spec.vpc;
    let claims: Api<IpClaim> = Api::all(context.client.clone());
    // Made before a crash or a lost race of the other family, its address not written yet.
    let known = context.stores.ip_claims.state();
    if let Some(own) = own_claim(known.iter().map(AsRef::as_ref), &uid, family, ranges) {
        return Ok(Some(own));
    }
    let mut lost: Vec<IpAddr> = Vec::new();
    loop {
        let droplet = &endpoint.spec.droplet;
        let is_claimed = |address| {
            let name = ip_claim_name(vpc, address);
            lost.contains(&address)
                || context.stores.ip_claims.get(&ObjectRef::new(&name)).is_some()
                || context.hub.read(|world| world.is_used_on(droplet, address))
        };
        let pick = context.reservations.reserve(&uid, vpc, droplet, |is_reserved| {
            propose(ranges, |address| is_reserved(address) || is_claimed(address))
        });
        let Some((address, range)) = pick else {
            return Ok(None);
        };
        let spec = IpClaimSpec {
            vpc: vpc.clone(),
            network: endpoint.spec.network.clone(),
            address: address.to_string(),
            endpoint_namespace: endpoint.namespace().unwrap_or_default(),
            endpoint_name: endpoint.name_any(),
            owner_uid: uid.clone(),
        };
        match create(&claims, &IpClaim::new(&ip_claim_name(vpc, address), spec)).await {
            Ok(_) => return Ok(Some((address, range))),
            Err(error) if error.is_conflict() && lost.len() < MOST_LOST => lost.push(address),
            Err(error) => return Err(error),
        }
    }
}

/// Releases the claims of all addresses in the Endpoint's status; others' claims and those that are gone are passed
/// over, so that it can be repeated.
pub async fn release_all(endpoint: &Endpoint, context: &Context) -> Result<(), WriteError> {
    let network = context.network(&endpoint.spec.network);
    let vpc = network.map_or_else(|| endpoint.spec.vpc.clone(), |network| network.spec.vpc.clone());
    let claims: Api<IpClaim> = Api::all(context.client.clone());
    for address in addresses_of(endpoint) {
        let name = ip_claim_name(&vpc, address);
        let claim = claims.get_opt(&name).await.map_err(failed("get", &name))?;
        let own = claim.filter(|claim| Some(claim.spec.owner_uid.as_str()) == endpoint.uid().as_deref());
        if let Some(claim) = own {
            release(&claims, &claim).await?;
        }
    }
    Ok(())
}

//! Walks packets over the tables, as the data plane does: from every endpoint with a pod to every other one of its VPC,
//! over each bouncer and each divider that the tables name.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use serde_json::Value;
use thuban_proto::transit::row::Row as Kind_;
use thuban_proto::transit::{NetworkRow, VpcRow};

use crate::cluster::has_living_pod;
use crate::droplet::Droplet;
use crate::invariants::{first_address, home, pod_uid, vni, vpc_of};
use crate::kind::Kind;
use crate::provisioned::is_users;
use crate::simulation::State;
use crate::store::text;
use crate::tables::{Slot, number, underlay};

/// An endpoint whose packets must arrive.
pub struct Member {
    pub name: String,
    pub vni: u32,
    pub address: IpAddr,
    pub droplet: String,
    pub network: String,
}

/// Returns the endpoints whose pods run. A pod may run before its Endpoint says Provisioned.
pub fn members(state: &State) -> Vec<Member> {
    let endpoints = state.store.all(Kind::Endpoint);
    endpoints
        .filter_map(|((_, _, name), endpoint)| member(state, name, &endpoint.value))
        .collect()
}

fn member(state: &State, name: &str, endpoint: &Value) -> Option<Member> {
    // The rows of a pod that was deleted by force go before the operator hears that it is attached.
    let is_ready = text(endpoint, "/status/phase") == "Provisioned" || !is_users(endpoint);
    if !is_ready || !has_living_pod(state, endpoint) {
        return None;
    }
    // An operator that saw the end of the network late may have let the endpoint in: no role serves it.
    state
        .store
        .value(Kind::Network, "", text(endpoint, "/spec/network"))?;
    let (vni, address) = (vni(state, &vpc_of(state, endpoint))?, first_address(endpoint)?);
    let home = home(endpoint);
    let droplet = state.droplets.get(home).filter(|droplet| droplet.is_on)?;
    let uid = pod_uid(endpoint);
    droplet.attachments.contains_key(uid).then(|| Member {
        name: name.to_owned(),
        vni,
        address,
        droplet: home.to_owned(),
        network: text(endpoint, "/spec/network").to_owned(),
    })
}

pub fn everything(state: &State) -> Result<(), String> {
    let members = members(state);
    for from in &members {
        for to in members
            .iter()
            .filter(|to| to.vni == from.vni && to.name != from.name)
        {
            walk(state, from, to)?;
        }
    }
    Ok(())
}

/// Whether a bouncer and a divider that the droplet knows for an address have a stream, or have lost it for no longer
/// than `long`.
pub fn is_served(state: &State, droplet: &Droplet, (vni, to): (u32, IpAddr), long: Duration) -> bool {
    let now = state.elapsed();
    let lives = |address: &Vec<u8>| {
        let mut droplets = state.droplets.values();
        let role = droplets.find(|droplet| droplet.address == underlay(address));
        // The tables soon lose a machine that is deleted.
        role.is_none_or(|role| role.stream.is_some() || now <= role.since + long)
    };
    let bouncers = network_row(droplet, vni, to).map(|row| &row.bouncers);
    let dividers = vpc_row(droplet, vni).map(|row| &row.dividers);
    let mut roles = bouncers.into_iter().chain(dividers);
    roles.all(|roles| roles.is_empty() || roles.iter().any(lives))
}

fn at(state: &State, address: Ipv4Addr) -> Option<&Droplet> {
    state
        .droplets
        .values()
        .find(|droplet| droplet.address == address && droplet.is_on)
}

fn network_row(droplet: &Droplet, vni: u32, to: IpAddr) -> Option<&NetworkRow> {
    droplet.tables.rows.values().find_map(|row| match &row.row {
        Some(Kind_::Network(row)) if row.vni == vni && row.cidrs.iter().any(|cidr| contains(cidr, to)) => {
            Some(row)
        }
        _ => None,
    })
}

fn vpc_row(droplet: &Droplet, vni: u32) -> Option<&VpcRow> {
    match &droplet.tables.rows.get(&Slot::Vpc(number(vni)))?.row {
        Some(Kind_::Vpc(row)) => Some(row),
        _ => None,
    }
}

pub fn contains(cidr: &str, address: IpAddr) -> bool {
    let cidr: Option<thuban_api::cidr::Cidr> = cidr.parse().ok();
    cidr.is_some_and(|cidr| cidr.contains_address(address))
}

/// Walks a packet over every way that the tables allow.
fn walk(state: &State, from: &Member, to: &Member) -> Result<(), String> {
    let failed = |why: String| {
        format!(
            "no way from {} ({}) to {} ({}): {why}",
            from.name, from.droplet, to.name, to.droplet
        )
    };
    let source = &state.droplets[&from.droplet];
    let (vni, address) = (to.vni, to.address);
    if source.delivers(vni, address) {
        return Ok(());
    }
    if let Some(Kind_::Direct(row)) = source
        .tables
        .rows
        .get(&Slot::Direct(number(vni), address))
        .and_then(|row| row.row.as_ref())
    {
        return arrive(state, source, underlay(&row.droplet), vni, address).map_err(failed);
    }
    if let Some(row) = network_row(source, vni, address).filter(|_| from.network == to.network) {
        return bounce(state, source, row, vni, address).map_err(failed);
    }
    let row = vpc_row(source, vni).ok_or_else(|| failed("it has no row of the VPC".into()))?;
    if row.dividers.is_empty() {
        return Err(failed("it knows no divider".into()));
    }
    for divider in &row.dividers {
        let next = hop(state, source, underlay(divider)).map_err(failed)?;
        let is_divider = vpc_row(next, vni).is_some_and(|row| row.divider_here);
        let row = network_row(next, vni, address);
        let Some(row) = row.filter(|_| is_divider) else {
            return Err(failed(format!(
                "{} doesn't divide (role {is_divider})",
                next.name
            )));
        };
        bounce(state, next, row, vni, address).map_err(failed)?;
    }
    Ok(())
}

/// Walks a packet over each bouncer of the network.
fn bounce(state: &State, from: &Droplet, row: &NetworkRow, vni: u32, address: IpAddr) -> Result<(), String> {
    if row.bouncers.is_empty() {
        return Err(format!("{} knows no bouncer", from.name));
    }
    for bouncer in &row.bouncers {
        let next = hop(state, from, underlay(bouncer))?;
        if next.delivers(vni, address) {
            continue;
        }
        let bounces = network_row(next, vni, address).is_some_and(|row| row.bouncer_here);
        match next
            .tables
            .rows
            .get(&Slot::Bouncer(number(vni), address))
            .and_then(|row| row.row.as_ref())
        {
            Some(Kind_::Bouncer(row)) if bounces => {
                arrive(state, next, underlay(&row.droplet), vni, address)?;
            }
            _ => return Err(format!("{} doesn't bounce (role {bounces})", next.name)),
        }
    }
    Ok(())
}

/// Returns the droplet with an address, if it takes packets from `from`.
fn hop<'a>(state: &'a State, from: &'a Droplet, to: Ipv4Addr) -> Result<&'a Droplet, String> {
    if from.address == to {
        return Ok(from);
    }
    let next = at(state, to).ok_or_else(|| format!("{} sends to {to}, where nobody is", from.name))?;
    if next.tables.rows.contains_key(&Slot::Droplet(from.address.into())) {
        Ok(next)
    } else {
        Err(format!("{} doesn't know droplet {}", next.name, from.name))
    }
}

fn arrive(state: &State, from: &Droplet, to: Ipv4Addr, vni: u32, address: IpAddr) -> Result<(), String> {
    let last = hop(state, from, to)?;
    if last.delivers(vni, address) {
        Ok(())
    } else {
        Err(format!("{} doesn't deliver", last.name))
    }
}

//! Checks the meaning of Provisioned at the moment when it is written. For a VPC or network: its roles work. For a
//! role: its droplet has its tables, and its users know its place. Also checks what is told only afterwards.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::Value;
use thuban_proto::transit::row::Row as Kind_;
use thuban_proto::transit::{NetworkRow, VpcRow};

use crate::cluster::{has_living_pod, is_left_over};
use crate::convergence::{is_accepted, is_provisioned};
use crate::droplet::Droplet;
use crate::invariants::{self, first_address, home, is_alone, pod_uid, vni, vpc_of};
use crate::kind::Kind;
use crate::services::is_scaled;
use crate::simulation::State;
use crate::store::{Change, is_deleting, text};
use crate::tables::{Slot, address, number, underlay};
use crate::walk::contains;

/// Checks the meaning of Provisioned after a write by any writer.
pub fn after_write(state: &mut State, change: &Change) {
    let (kind, _, name) = &change.name;
    let old = change.old.as_deref();
    let Some(new) = change.new.as_deref() else { return };
    let was_provisioned = old.is_some_and(is_provisioned);
    if *kind == Kind::Endpoint && !is_users(new) {
        state.served.insert(holder(new));
    }
    if !is_provisioned(new) {
        // The pods that name a user's Endpoint have it one after the other.
        let is_users = *kind == Kind::Endpoint && is_users(new);
        if was_provisioned && !is_users {
            state.violation(format!("{kind:?} {name} was Provisioned, and is in Init again"));
        }
        return;
    }
    let place = |role: Option<&Value>| role.map(|role| text(role, "/status/droplet").to_owned());
    let wrong = match kind {
        Kind::Vpc if !was_provisioned => roles_work(state, (Kind::Vpc, name, new), Kind::Divider),
        Kind::Network if !was_provisioned => network_works(state, name, new),
        Kind::Divider if !was_provisioned || place(old) != place(Some(new)) => divider_works(state, new),
        Kind::Bouncer if !was_provisioned || place(old) != place(Some(new)) => bouncer_works(state, new),
        Kind::Endpoint => {
            state.served.insert(holder(new));
            Ok(())
        }
        _ => Ok(()),
    };
    if let Err(why) = wrong {
        state.violation(format!("{kind:?} {name} is Provisioned, but {why}"));
    }
}

pub fn is_users(endpoint: &Value) -> bool {
    text(endpoint, "/spec/type") == "Simple" && text(endpoint, "/spec/podRef/uid").is_empty()
}

/// Returns the identifier by which the droplet knows the holder of the Endpoint.
fn holder(endpoint: &Value) -> String {
    match text(endpoint, "/spec/type") {
        "Host" => format!("node/{}", text(endpoint, "/spec/droplet")),
        _ => pod_uid(endpoint).to_owned(),
    }
}

/// Checks that a droplet is told that a pod's endpoint is ready only when the Endpoint is there, and its other droplets
/// have its rows. A user's Endpoint is Provisioned before.
pub fn ready_means_made(state: &mut State, name: &str) {
    let Some(droplet) = state.droplets.get(name) else {
        return;
    };
    let ready = droplet.tables.locals().filter(|row| row.ready);
    let ready: BTreeSet<_> = ready
        .map(|row| (row.pod_uid.clone(), address(&row.address)))
        .collect();
    let epoch = droplet.stream.as_ref().map(|stream| stream.epoch);
    let told = state.told_ready.insert(name.to_owned(), ready.clone());
    for (uid, address) in ready.difference(&told.unwrap_or_default()) {
        if !state.served.contains(uid) {
            let early = format!("{name} was told that the endpoint of {uid} is ready, which was never made");
            state.violation(early);
        }
        let own = state
            .store
            .all(Kind::Endpoint)
            .find_map(|((_, _, name), endpoint)| {
                let endpoint = &endpoint.value;
                // What Provisioned means was checked when it was written. The rows of a pod that was deleted by force
                // may go while its droplet is being told.
                let is_early = !is_provisioned(endpoint) && has_living_pod(state, endpoint);
                let is_own = pod_uid(endpoint) == uid && first_address(endpoint) == Some(*address);
                (is_early && is_own).then(|| (name.clone(), endpoint.clone()))
            });
        if let (Some((endpoint, object)), Some(epoch)) = (own, epoch) {
            invariants::ready_means_acked(state, &endpoint, &object, epoch);
        }
    }
}

/// Checks that all roles of a parent, as many as its status asks for, have been Provisioned.
fn roles_work(state: &State, parent: (Kind, &str, &Value), kind: Kind) -> Result<(), String> {
    let (parent_kind, name, object) = parent;
    let (letter, count) = match parent_kind {
        Kind::Vpc => ('d', "/status/dividers"),
        _ => ('b', "/status/bouncers"),
    };
    let count = object.pointer(count).and_then(Value::as_u64).unwrap_or(1);
    let owner = text(object, "/metadata/uid");
    let mut names = (0..count).map(|number| format!("{name}-{letter}{number}"));
    // The role may have been deleted since.
    let idle = names.find(|role| !has_worked(state, kind, role, owner));
    idle.map_or(Ok(()), |role| Err(format!("{role} has never worked")))
}

fn has_worked(state: &State, kind: Kind, name: &str, owner: &str) -> bool {
    state.store.events_after(kind, 0).iter().any(|event| {
        let role: Value = serde_json::from_slice(&event.object).expect("an object");
        text(&role, "/metadata/name") == name
            && text(&role, "/metadata/ownerReferences/0/uid") == owner
            && is_provisioned(&role)
    })
}

fn network_works(state: &State, name: &str, network: &Value) -> Result<(), String> {
    let vpc = text(network, "/spec/vpc");
    let object = state.store.value(Kind::Vpc, "", vpc);
    if object.is_some_and(|object| !is_provisioned(object)) {
        return Err(format!("its VPC {vpc} is not"));
    }
    roles_work(state, (Kind::Network, name, network), Kind::Bouncer)
}

/// Returns the droplet of a name, unless it is suspect, was started again, or came after another one of its name: then
/// nothing waits for its acks, or it gets everything again.
fn listening<'a>(state: &'a State, name: &str) -> Option<&'a Droplet> {
    let droplet = state.droplets.get(name)?;
    let follows = droplet.follows(state.writer?) && !droplet.tables.rows.is_empty();
    (follows && is_accepted(state, name)).then_some(droplet)
}

fn vpc_row(droplet: &Droplet, vni: u32) -> Option<&VpcRow> {
    match &droplet.tables.rows.get(&Slot::Vpc(number(vni)))?.row {
        Some(Kind_::Vpc(row)) => Some(row),
        _ => None,
    }
}

fn network_row(droplet: &Droplet, vni: u32, within: IpAddr) -> Option<&NetworkRow> {
    droplet.tables.rows.values().find_map(|row| match &row.row {
        Some(Kind_::Network(row))
            if row.vni == vni && row.cidrs.iter().any(|cidr| contains(cidr, within)) =>
        {
            Some(row)
        }
        _ => None,
    })
}

/// Returns an address of a network's first range.
fn inside(network: &Value) -> Option<IpAddr> {
    let range = text(network, "/status/cidrs/0");
    range.split('/').next()?.parse().ok()
}

/// Whether the droplet serves a VPC or a network of it, or has a pod there. Otherwise its rows of the VPC may be about
/// to go.
fn uses(state: &State, droplet: &str, vpc: &str, network: Option<&str>) -> bool {
    let is_own = |object: &Value| {
        let is_of_network = network.is_none_or(|network| text(object, "/spec/network") == network);
        !is_deleting(object) && is_provisioned(object) && is_of_network
    };
    let mut bouncers = state.store.values(Kind::Bouncer);
    let mut endpoints = state.store.values(Kind::Endpoint);
    let mut dividers = state.store.values(Kind::Divider);
    let serves = |role: &Value| text(role, "/status/droplet") == droplet && text(role, "/spec/vpc") == vpc;
    bouncers.any(|bouncer| serves(bouncer) && is_own(bouncer))
        || dividers.any(|divider| serves(divider) && is_provisioned(divider) && !is_deleting(divider))
        || endpoints.any(|endpoint| {
            let is_pods = !is_scaled(endpoint) && home(endpoint) == droplet;
            is_pods && is_own(endpoint) && vpc_of(state, endpoint) == vpc && !is_left_over(state, endpoint)
        })
}

/// Checks that a list of droplets in a row has every role of a kind that works, where the role serves or is about to
/// serve.
fn lists(state: &State, row: &[Vec<u8>], kind: Kind, field: &str, parent: &str) -> Result<(), String> {
    for role in state.store.values(kind) {
        if text(role, field) != parent || is_deleting(role) || !is_provisioned(role) {
            continue;
        }
        let known = |path| {
            let droplet = state.droplets.get(text(role, path));
            droplet.filter(|droplet| is_accepted(state, &droplet.name))
        };
        // The role's droplet has gone: no droplet is told of its next place before it is ready there.
        let Some(serving) = known("/status/droplet") else {
            continue;
        };
        let mut places = [Some(serving), known("/spec/droplet")].into_iter().flatten();
        let is_listed = |droplet: &Droplet| row.iter().any(|listed| underlay(listed) == droplet.address);
        if !places.any(is_listed) {
            return Err(format!("does not list {}", text(role, "/metadata/name")));
        }
    }
    Ok(())
}

/// Checks that the divider's droplet has the VPC's row and the row of every network with its bouncers, and that
/// droplets with the VPC's row know the divider.
fn divider_works(state: &State, divider: &Value) -> Result<(), String> {
    let vpc = text(divider, "/spec/vpc");
    let (true, Some(vni)) = (is_alone(state), vni(state, vpc)) else {
        return Ok(());
    };
    let Some(home) = listening(state, text(divider, "/status/droplet")) else {
        return Ok(());
    };
    if !vpc_row(home, vni).is_some_and(|row| row.divider_here) {
        return Err(format!("{} does not divide", home.name));
    }
    for network in state.store.values(Kind::Network) {
        let name = text(network, "/metadata/name");
        if text(network, "/spec/vpc") != vpc || is_deleting(network) || !is_provisioned(network) {
            continue;
        }
        let Some(within) = inside(network) else { continue };
        let Some(row) = network_row(home, vni, within) else {
            return Err(format!("{} has no row of network {name}", home.name));
        };
        lists(state, &row.bouncers, Kind::Bouncer, "/spec/network", name)
            .map_err(|why| format!("the row of network {name} on {} {why}", home.name))?;
    }
    for name in state.droplets.keys().filter(|name| uses(state, name, vpc, None)) {
        let row = listening(state, name).and_then(|user| vpc_row(user, vni));
        let knows = |row: &VpcRow| row.dividers.iter().any(|listed| underlay(listed) == home.address);
        if row.is_some_and(|row| !knows(row)) {
            return Err(format!("{name} has the VPC's row without it"));
        }
    }
    Ok(())
}

/// Checks that the bouncer's droplet has a row for every endpoint of the network, and the VPC's row with all dividers,
/// and that droplets with the network's row know the bouncer.
fn bouncer_works(state: &State, bouncer: &Value) -> Result<(), String> {
    let (vpc, name) = (text(bouncer, "/spec/vpc"), text(bouncer, "/spec/network"));
    let network = state.store.value(Kind::Network, "", name);
    let within = network.and_then(|network| inside(network));
    let (true, Some(vni), Some(within)) = (is_alone(state), vni(state, vpc), within) else {
        return Ok(());
    };
    let Some(home) = listening(state, text(bouncer, "/status/droplet")) else {
        return Ok(());
    };
    if !network_row(home, vni, within).is_some_and(|row| row.bouncer_here) {
        return Err(format!("{} does not bounce", home.name));
    }
    let Some(row) = vpc_row(home, vni) else {
        return Err(format!("{} has no row of the VPC", home.name));
    };
    lists(state, &row.dividers, Kind::Divider, "/spec/vpc", vpc)
        .map_err(|why| format!("the row of the VPC on {} {why}", home.name))?;
    for endpoint in state.store.values(Kind::Endpoint) {
        if text(endpoint, "/spec/network") != name || is_scaled(endpoint) || is_deleting(endpoint) {
            continue;
        }
        if is_left_over(state, endpoint) {
            continue;
        }
        let Some(address) = first_address(endpoint).filter(|_| is_provisioned(endpoint)) else {
            continue;
        };
        let is_here = vpc_of(state, endpoint) == vpc && listening(state, self::home(endpoint)).is_some();
        let slot = Slot::Bouncer(number(vni), address);
        if is_here && !home.tables.rows.contains_key(&slot) {
            let endpoint = text(endpoint, "/metadata/name");
            return Err(format!("{} has no row of endpoint {endpoint}", home.name));
        }
    }
    for user in state
        .droplets
        .keys()
        .filter(|user| uses(state, user, vpc, Some(name)))
    {
        let row = listening(state, user).and_then(|user| network_row(user, vni, within));
        let knows = |row: &NetworkRow| row.bouncers.iter().any(|listed| underlay(listed) == home.address);
        if row.is_some_and(|row| !knows(row)) {
            return Err(format!("{user} has the network's row without it"));
        }
    }
    Ok(())
}

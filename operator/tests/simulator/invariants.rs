//! Checks the invariants that hold after every step: each check looks at the true objects and the true tables, not at
//! what the operator believes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use serde_json::Value;
use thuban_api::cidr::Cidr;
use thuban_proto::transit::{LocalRow, row};

use crate::cluster::is_left_over;
use crate::convergence::is_accepted;
use crate::droplet::Droplet;
use crate::kind::Kind;
use crate::policies;
use crate::provisioned;
use crate::services::{self, is_scaled};
use crate::simulation::State;
use crate::store::{self, Change, is_deleting, text};
use crate::tables::{Slot, address, number};
use crate::walk;

/// How long an address rests: the least time, because clocks of the simulation have milliseconds.
const REST: Duration = Duration::from_millis(29_990);
/// How late a watch and a write may be together.
const LONGEST_LAG: Duration = Duration::from_secs(15);

/// Checks the invariants after a write by any writer.
pub fn after_write(state: &mut State, change: &Change) {
    let (kind, _, name) = &change.name;
    let (old, new) = (change.old.as_deref(), change.new.as_deref());
    if let Some(part) = store::lost_newer(change) {
        state.violation(format!(
            "{kind:?} {name} lost a field of a newer CRD from its {part}"
        ));
    }
    if *kind == Kind::Endpoint && new.is_none() {
        note_end(state, old);
    }
    match (kind, new) {
        (Kind::Vpc, Some(vpc)) => {
            one_vpc_a_vni(state, name, vpc);
            one_holder_of_a_range(state, (*kind, name), vpc);
        }
        (Kind::Network, Some(network)) => one_holder_of_a_range(state, (*kind, name), network),
        (Kind::Endpoint, Some(endpoint)) => {
            if !is_scaled(endpoint) {
                one_holder_in_status(state, change);
            }
            let was = old.map_or("", |old| text(old, "/status/phase"));
            if was != "Provisioned" && text(endpoint, "/status/phase") == "Provisioned" {
                provisioned_means_acked(state, name, endpoint);
                packets_arrive(state);
            }
        }
        (Kind::Endpoint, None) if state.stripped.contains(name) => {}
        (Kind::Endpoint, None) => gone_means_out_of_use(state, name, old),
        (Kind::IpClaim, _) => {
            claims_outlive_rows(state, name, old, new);
            unmarked_claims_rest(state, name, old, new);
        }
        (Kind::VniClaim, None) => numbers_outlive_rows(state, name),
        _ => {}
    }
    provisioned::after_write(state, change);
}

fn one_vpc_a_vni(state: &mut State, name: &str, vpc: &Value) {
    let Some(vni) = vpc.pointer("/status/vni") else {
        return;
    };
    let others = state.store.all(Kind::Vpc);
    let twin = others
        .filter(|((_, _, other), _)| other != name)
        .find(|(_, other)| other.value.pointer("/status/vni") == Some(vni))
        .map(|((_, _, other), _)| other.clone());
    if let Some(twin) = twin {
        state.violation(format!("VPCs {name} and {twin} have VNI {vni}"));
    }
}

/// Checks that ranges in force overlap those of no sibling; siblings of a VPC are `default`, and all VPCs of `default`.
fn one_holder_of_a_range(state: &mut State, (kind, name): (Kind, &str), object: &Value) {
    let ranges = |object: &Value| -> Vec<Cidr> {
        let ranges = object.pointer("/status/cidrs").and_then(Value::as_array);
        let ranges = ranges.into_iter().flatten().filter_map(Value::as_str);
        ranges.map(|range| range.parse().expect("a range")).collect()
    };
    let is_sibling = |other: &str, sibling: &Value| match kind {
        Kind::Network => text(sibling, "/spec/vpc") == text(object, "/spec/vpc"),
        _ => [name, other].contains(&"default"),
    };
    let own = ranges(object);
    let others = state.store.all(kind);
    let twin = others
        .filter(|((_, _, other), sibling)| other != name && is_sibling(other, &sibling.value))
        .find(|(_, sibling)| {
            let theirs = ranges(&sibling.value);
            theirs
                .iter()
                .any(|range| own.iter().any(|own| own.overlaps(*range)))
        })
        .map(|((_, _, other), _)| other.clone());
    if let Some(twin) = twin {
        state.violation(format!("{kind:?} {name} and {twin} have a range in common"));
    }
}

/// Returns the addresses that an Endpoint has: those of its status, before that those claimed for it.
pub fn addresses(endpoint: &Value) -> Vec<&str> {
    let list = |path| {
        let list = endpoint.pointer(path).and_then(Value::as_array);
        list.into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect::<Vec<_>>()
    };
    let own = list("/status/addresses");
    if own.is_empty() {
        list("/spec/claimed")
    } else {
        own
    }
}

/// Returns the UID of the pod that has the Endpoint now.
pub fn pod_uid(endpoint: &Value) -> &str {
    match text(endpoint, "/spec/podRef/uid") {
        "" => text(endpoint, "/status/podRef/uid"),
        uid => uid,
    }
}

/// Returns the droplet that the Endpoint lives on.
pub fn home(endpoint: &Value) -> &str {
    match text(endpoint, "/spec/droplet") {
        "" => text(endpoint, "/status/droplet"),
        droplet => droplet,
    }
}

fn one_holder_in_status(state: &mut State, change: &Change) {
    let Some(new) = &change.new else { return };
    let mine = addresses(new);
    if mine.is_empty() || change.old.as_ref().is_some_and(|old| addresses(old) == mine) {
        return;
    }
    let vpc = vpc_of(state, new);
    let twin = state.store.all(Kind::Endpoint).find_map(|(name, other)| {
        if *name == change.name || vpc_of(state, &other.value) != vpc {
            return None;
        }
        let theirs = addresses(&other.value);
        let shared = theirs.iter().find(|address| mine.contains(address))?;
        Some(format!(
            "{} and {} both hold {shared} of {vpc}",
            name.2, change.name.2
        ))
    });
    if let Some(twin) = twin {
        state.violation(format!("endpoints {twin}"));
    }
}

/// Returns the VNI of a VPC.
pub fn vni(state: &State, vpc: &str) -> Option<u32> {
    let vpc = state.store.value(Kind::Vpc, "", vpc)?;
    vpc.pointer("/status/vni")?.as_u64().map(|vni| vni as u32)
}

pub fn vpc_of(state: &State, endpoint: &Value) -> String {
    let network = state
        .store
        .value(Kind::Network, "", text(endpoint, "/spec/network"));
    network.map_or_else(
        || text(endpoint, "/spec/vpc").to_owned(),
        |network| text(network, "/spec/vpc").to_owned(),
    )
}

pub fn first_address(endpoint: &Value) -> Option<IpAddr> {
    addresses(endpoint).first()?.parse().ok()
}

/// Whether one operator has been leading alone long enough. While two lead, and while watches lag, one may not know
/// where the other placed a role.
pub fn is_alone(state: &State) -> bool {
    state
        .crowded
        .is_none_or(|last| state.elapsed() > last + LONGEST_LAG)
}

/// Checks a Provisioned Endpoint.
fn provisioned_means_acked(state: &mut State, name: &str, endpoint: &Value) {
    let Some(writer) = state.writer else {
        return;
    };
    if state.is_late && is_left_over(state, endpoint) {
        // The pod has ended since the write was asked for, and its rows may have gone.
        return;
    }
    if !is_scaled(endpoint) {
        ready_means_acked(state, name, endpoint, writer);
    } else if is_alone(state) {
        services::provisioned_means_acked(state, name, endpoint, writer);
    }
}

/// Checks an Endpoint that the operator of this epoch holds for ready: its droplet delivers, and every bouncer that the
/// operator can hear has its row.
pub fn ready_means_acked(state: &mut State, name: &str, endpoint: &Value, writer: u64) {
    if !is_alone(state) {
        return;
    }
    let vpc = vpc_of(state, endpoint);
    let (Some(vni), Some(address)) = (vni(state, &vpc), first_address(endpoint)) else {
        state.violation(format!("endpoint {name} is ready without VNI or address"));
        return;
    };
    let home = home(endpoint).to_owned();
    let Some(droplet) = state.droplets.get(&home) else {
        return;
    };
    let underlay = droplet.address.octets().to_vec();
    let was_lost = droplet.tables.rows.is_empty();
    if droplet.tables.local(vni, address).is_none() && !was_lost {
        state.violation(format!(
            "endpoint {name} is ready, but {home} has no row of {vni}/{address}"
        ));
        return;
    }
    if !walk::is_served(state, droplet, (vni, address), LONGEST_LAG) {
        state.violation(format!(
            "endpoint {name} is ready, but all bouncers or all dividers that {home} knows are lost"
        ));
        return;
    }
    let network = text(endpoint, "/spec/network");
    let bouncers: Vec<String> = state
        .store
        .values(Kind::Bouncer)
        .filter(|bouncer| text(bouncer, "/spec/network") == network && !is_deleting(bouncer))
        .filter(|bouncer| text(bouncer, "/status/phase") == "Provisioned")
        .map(|bouncer| serving(bouncer).to_owned())
        .collect();
    for bouncer in bouncers {
        let Some(droplet) = state.droplets.get(&bouncer) else {
            continue;
        };
        // A bouncer's droplet that is away is suspect, unless it just went; one that is back but has not applied its
        // program has not acked. A machine that came after another one under its name carries nothing until it is
        // Accepted, wherever the bouncer's object says that the bouncer served.
        if !droplet.follows(writer) || !is_accepted(state, &bouncer) {
            continue;
        }
        let leads_home = matches!(
            droplet.tables.rows.get(&Slot::Bouncer(number(vni), address)).and_then(|row| row.row.as_ref()),
            Some(row::Row::Bouncer(row)) if row.droplet == underlay
        );
        if !leads_home {
            state.violation(format!(
                "endpoint {name} is ready, but bouncer droplet {bouncer} has no row of {vni}/{address}"
            ));
            return;
        }
    }
}

/// Returns the droplet where a role serves.
pub fn serving(role: &Value) -> &str {
    match text(role, "/status/droplet") {
        "" => text(role, "/spec/droplet"),
        droplet => droplet,
    }
}

/// Checks that an Endpoint is deleted after its pod, and that no connected droplet has rows of it.
fn gone_means_out_of_use(state: &mut State, name: &str, old: Option<&Value>) {
    let Some(old) = old else { return };
    if is_scaled(old) {
        services::gone_means_out_of_tables(state, name, old);
        return;
    }
    let (Some(vni), Some(address)) = (vni(state, &vpc_of(state, old)), first_address(old)) else {
        return;
    };
    if state.writer.is_none() && text(old, "/status/phase") != "Provisioned" {
        // A user deleted it. It is made again, with its addresses, if its pod lives.
        return;
    }
    let uid = pod_uid(old);
    let holder = state
        .droplets
        .values()
        .find(|droplet| droplet.is_on && droplet.attachments.contains_key(uid))
        .map(|droplet| droplet.name.clone());
    if let (Some(holder), false) = (holder, uid.is_empty()) {
        state.violation(format!(
            "endpoint {name} is gone, but {holder} has its pod attached at {vni}/{address}"
        ));
        return;
    }
    out_of_tables(state, vni, address, &format!("endpoint {name} is gone"), uid);
}

/// Checks that rows of a released address are gone from every droplet that would deliver or bounce by them.
fn out_of_tables(state: &mut State, vni: u32, address: IpAddr, what: &str, uid: &str) {
    let of = number(vni);
    let slots = [Slot::Local(of, address), Slot::Bouncer(of, address)];
    let is_old = |droplet: &Droplet| {
        slots.iter().any(
            |slot| match droplet.tables.rows.get(slot).and_then(|row| row.row.as_ref()) {
                Some(row::Row::Local(row)) => uid.is_empty() || row.pod_uid == uid,
                Some(_) => uid.is_empty() || !is_held_by_another(state, vni, address, uid),
                None => false,
            },
        )
    };
    // Each of two leading operators knows the droplets that follow it; the rest of the claim covers the others.
    let is_followed = |droplet: &Droplet| match state.writer {
        Some(writer) => droplet.follows(writer),
        None => droplet.stream.is_some() && droplet.is_applied,
    };
    let holder = state
        .droplets
        .values()
        .find(|droplet| droplet.is_on && is_followed(droplet) && is_old(droplet))
        .map(|droplet| droplet.name.clone());
    if let Some(holder) = holder {
        state.violation(format!("{what}, but {holder} has rows of {vni}/{address}"));
    }
}

fn is_held_by_another(state: &State, vni: u32, address: IpAddr, uid: &str) -> bool {
    state.store.values(Kind::Endpoint).any(|other| {
        first_address(other) == Some(address)
            && pod_uid(other) != uid
            && crate::invariants::vni(state, &vpc_of(state, other)) == Some(vni)
    })
}

/// Checks that a claim is released, or deleted, only when no Endpoint has its address and no table leads to the old
/// one.
fn claims_outlive_rows(state: &mut State, name: &str, old: Option<&Value>, new: Option<&Value>) {
    let was_released = old.is_some_and(|old| old.pointer("/status/releasedAt").is_some());
    let is_released = new.is_none_or(|new| new.pointer("/status/releasedAt").is_some());
    let Some(claim) = old.or(new).filter(|_| is_released && !was_released) else {
        return;
    };
    let vpc = text(claim, "/spec/vpc");
    let (Some(vni), Ok(address)) = (vni(state, vpc), text(claim, "/spec/address").parse()) else {
        return;
    };
    out_of_tables(state, vni, address, &format!("claim {name} is released"), "");
    let attached = state
        .droplets
        .values()
        .find(|droplet| {
            droplet.is_on
                && droplet
                    .attachments
                    .values()
                    .any(|held| held.vni == vni && crate::tables::address(&held.address) == address)
        })
        .map(|droplet| droplet.name.clone());
    if let Some(attached) = attached {
        state.violation(format!(
            "claim {name} is released, but a pod on {attached} has the address"
        ));
    }
}

/// Notes when the addresses of an Endpoint began to rest.
fn note_end(state: &mut State, old: Option<&Value>) {
    let Some(old) = old else { return };
    let owner = match text(old, "/spec/podRef/uid") {
        "" => text(old, "/metadata/uid"),
        uid => uid,
    };
    let now = state.elapsed();
    for address in addresses(old) {
        state.ends.insert([owner.to_owned(), address.to_owned()], now);
    }
}

/// Checks that a claim without a mark is deleted only after a rest since the end of its Endpoint, unless its pod's
/// namesake asks for the address.
fn unmarked_claims_rest(state: &mut State, name: &str, old: Option<&Value>, new: Option<&Value>) {
    let Some(claim) = old.filter(|old| new.is_none() && old.pointer("/status/releasedAt").is_none()) else {
        return;
    };
    let asks = |pod: &Value| {
        let asked = pod["metadata"]["annotations"].get("thuban.dev/ip");
        let is_asked = asked.and_then(Value::as_str) == Some(text(claim, "/spec/address"));
        is_asked && text(pod, "/metadata/name") == text(claim, "/spec/pod")
    };
    if state.store.values(Kind::Pod).any(|pod| asks(pod)) {
        return;
    }
    let end = state.ends.get(&key_of_end(claim)).copied();
    let has_rested = end.is_some_and(|end| state.elapsed().saturating_sub(end) >= REST);
    if !has_rested {
        state.violation(format!(
            "claim {name} is gone without a rest: its Endpoint ended at {end:?}"
        ));
    } else if counts(state, claim) {
        state.violation(format!("claim {name} is gone, but its Endpoint has the address"));
    }
}

/// Returns the key of a claim's address in [`State::ends`].
pub fn key_of_end(claim: &Value) -> [String; 2] {
    ["/spec/ownerUid", "/spec/address"].map(|path| text(claim, path).to_owned())
}

/// Whether the Endpoint that a claim names has the claim's address in its status.
pub fn counts(state: &State, claim: &Value) -> bool {
    let (namespace, name) = (
        text(claim, "/spec/endpointNamespace"),
        text(claim, "/spec/endpointName"),
    );
    let Some(endpoint) = state.store.value(Kind::Endpoint, namespace, name) else {
        return false;
    };
    let listed = endpoint.pointer("/status/addresses").and_then(Value::as_array);
    let is_listed = |listed: &Vec<Value>| {
        listed
            .iter()
            .any(|one| one.as_str() == Some(text(claim, "/spec/address")))
    };
    pod_uid(endpoint) == text(claim, "/spec/ownerUid") && listed.is_some_and(is_listed)
}

fn numbers_outlive_rows(state: &mut State, name: &str) {
    let Ok(vni) = name.parse::<u32>() else { return };
    let holder = state
        .droplets
        .values()
        .find(|droplet| droplet.is_on && numbers(droplet).contains(&vni))
        .map(|droplet| droplet.name.clone());
    if let Some(holder) = holder {
        state.violation(format!("VNI {vni} is free, but {holder} has rows of it"));
    }
}

/// Returns the VNIs of the droplet's rows.
fn numbers(droplet: &Droplet) -> BTreeSet<u32> {
    let slots = droplet.tables.rows.keys();
    slots.filter_map(|slot| Some(slot.vni()?.get())).collect()
}

fn is_claimed(state: &State, vni: u32) -> bool {
    state.store.get(Kind::VniClaim, "", &vni.to_string()).is_some()
}

/// Checks the invariants after a change of a droplet's tables.
pub fn after_apply(state: &mut State, name: &str) {
    let Some(droplet) = state.droplets.get(name) else {
        return;
    };
    let free = numbers(droplet).into_iter().find(|vni| !is_claimed(state, *vni));
    let delivered: Vec<(u32, IpAddr)> = droplet
        .tables
        .locals()
        .filter(|row| droplet.attachments.contains_key(&row.pod_uid))
        .map(|row| (row.vni, address(&row.address)))
        .collect();
    let foreign = droplet.tables.locals().find_map(|row| {
        let owner = vni(state, &row.vpc_name);
        (owner.is_some_and(|owner| owner != row.vni)).then(|| format!("{} at VNI {}", row.vpc_name, row.vni))
    });
    let unknown = policies::locals_are_judged(droplet);
    if let Err(unknown) = unknown {
        state.violation(unknown);
    }
    if let Some(foreign) = foreign {
        state.violation(format!("{name} has a row of VPC {foreign}"));
    }
    if let Err(shared) = one_vpc_a_number(state, name) {
        state.violation(shared);
    }
    if let Some(free) = free {
        state.violation(format!("{name} has rows of VNI {free}, which is free"));
    }
    for (vni, address) in delivered {
        one_deliverer(state, name, vni, address);
    }
    provisioned::ready_means_made(state, name);
    if state.faults.is_steady
        && let Err(lost) = services::rows_stay(state, name)
    {
        state.violation(lost);
    }
    packets_arrive(state);
}

/// Checks that the VNIs of a droplet's pods are those of another VPC's pods nowhere.
fn one_vpc_a_number(state: &State, name: &str) -> Result<(), String> {
    let own = state.droplets.get(name).into_iter();
    let own: Vec<_> = own.flat_map(|droplet| droplet.tables.locals()).collect();
    for droplet in state.droplets.values().filter(|droplet| droplet.is_on) {
        for other in droplet.tables.locals() {
            let is_shared = |own: &&&LocalRow| own.vni == other.vni && own.vpc_name != other.vpc_name;
            if let Some(own) = own.iter().find(is_shared) {
                return Err(format!(
                    "VNI {} is of VPC {} on {name} and of {} on {}",
                    own.vni, own.vpc_name, other.vpc_name, droplet.name
                ));
            }
        }
    }
    Ok(())
}

/// Checks that packets between Provisioned endpoints arrive while no machine is lost, whatever roles do meanwhile.
fn packets_arrive(state: &mut State) {
    if state.faults.is_steady
        && let Err(lost) = walk::everything(state)
    {
        state.violation(lost);
    }
}

/// Checks the invariants after a pod got its address.
pub fn after_attach(state: &mut State, name: &str, uid: &str) {
    let Some(attachment) = state
        .droplets
        .get(name)
        .and_then(|droplet| droplet.attachments.get(uid))
    else {
        return;
    };
    let (vni, address) = (attachment.vni, address(&attachment.address));
    packets_arrive(state);
    one_deliverer(state, name, vni, address);
    let twin = state.droplets.values().find_map(|droplet| {
        let twins = droplet.attachments.values().filter(|other| {
            other.pod_uid != uid && other.vni == vni && crate::tables::address(&other.address) == address
        });
        twins
            .map(|other| format!("{} on {}", other.pod_name, droplet.name))
            .next()
    });
    if let Some(twin) = twin {
        state.violation(format!(
            "pod {uid} on {name} has {vni}/{address}, which pod {twin} has too"
        ));
    }
}

fn one_deliverer(state: &mut State, name: &str, vni: u32, address: IpAddr) {
    let twin = state
        .droplets
        .values()
        .find(|other| other.name != name && other.delivers(vni, address))
        .map(|other| other.name.clone());
    if let Some(twin) = twin {
        state.violation(format!("{name} and {twin} both deliver {vni}/{address}"));
    }
}

//! Services: users make, move and delete them, slices follow the pods and sometimes lie. Checks what must hold of the
//! Services' rows.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::{Value, json};
use thuban_api::DEFAULT_NAME;
use thuban_proto::transit::{Row, row};

use crate::convergence::is_open;
use crate::droplet::Droplet;
use crate::invariants::{addresses, pod_uid, serving, vni, vpc_of};
use crate::kind::Kind;
use crate::random::Random;
use crate::schedule::NAMESPACES;
use crate::simulation::State;
use crate::store::{Preconditions, is_deleting, text};
use crate::tables::{Slot, Tables, address, number};

const LABEL: &str = "kubernetes.io~1service-name";
const PORT: u32 = 8080;

/// The address of the cluster's DNS. A Service of any VPC may have it here.
pub const CLUSTER_DNS: [u8; 4] = [10, 96, 0, 10];

/// An address in no VPC.
const OUTSIDE: &str = "192.168.0.1";

/// Whether a row is a Service's that nobody serves. Users make none without ports.
fn is_without_ports(row: &Row) -> bool {
    matches!(&row.row, Some(row::Row::Service(row)) if row.ports.is_empty())
}

/// Returns a row of a droplet that is of no Service.
fn foreign<'a>(droplet: &'a Droplet, expected: &BTreeSet<Slot>) -> Option<&'a Slot> {
    droplet.tables.rows.iter().find_map(|(slot, row)| match slot {
        // The cluster's DNS is refused to VPCs that do not share it.
        Slot::Service(_, address) if *address == IpAddr::from(CLUSTER_DNS) && is_without_ports(row) => None,
        Slot::Service(..) | Slot::NodeService(..) => Some(slot).filter(|slot| !expected.contains(slot)),
        _ => None,
    })
}

pub fn is_scaled(endpoint: &Value) -> bool {
    text(endpoint, "/spec/type") == "Scaled"
}

/// Does a random action of users and of the slices' controller.
pub fn step(state: &mut State, random: &mut Random) {
    let namespace = NAMESPACES[random.below(2) as usize];
    let name = format!("s{}", random.below(3));
    match random.below(10) {
        0..3 => make(state, random, namespace, &name),
        3 => {
            state.note(|| format!("service {namespace}/{name} is deleted"));
            let _ = state
                .store
                .delete(Kind::Service, namespace, &name, &Preconditions::default(), false);
        }
        4 => {
            let networks = state.store.names(Kind::Network);
            if let Some(network) = random.pick(&networks) {
                state.note(|| format!("service {namespace}/{name} moves to {network}"));
                state.store.edit(Kind::Service, namespace, &name, |service| {
                    service["metadata"]["annotations"]["thuban.dev/network"] = network.clone().into();
                });
            }
        }
        _ => follow(state, random),
    }
}

fn make(state: &mut State, random: &mut Random, namespace: &str, name: &str) {
    let mut networks = state.store.names(Kind::Network);
    networks.push("nowhere".into());
    let Some(network) = random.pick(&networks) else {
        return;
    };
    // The API server gives out the lowest address that no Service has, even if another one had it a moment ago.
    let used: BTreeSet<String> = state
        .store
        .values(Kind::Service)
        .map(|service| cluster_ip(service).to_owned())
        .collect();
    let free = (10..).map(|host: u32| format!("10.96.0.{host}"));
    let Some(address) = free.into_iter().find(|address| !used.contains(address)) else {
        return;
    };
    let address = if random.permille(50) {
        "None".to_owned()
    } else {
        address
    };
    let service = json!({
        "metadata": {"annotations": {"thuban.dev/network": network}},
        "spec": {"type": "ClusterIP", "clusterIPs": [address],
                 "ports": [{"name": "http", "protocol": "TCP", "port": 80}]},
    });
    if state
        .store
        .create(Kind::Service, namespace, name, service)
        .is_ok()
    {
        state.note(|| format!("service {namespace}/{name} of {network} at {address}"));
    }
}

/// Updates the slices: they name the pods of the namespace that are attached, in any VPC, and an address that nobody
/// has.
pub fn follow(state: &mut State, random: &mut Random) {
    let services: Vec<(String, String)> = state
        .store
        .all(Kind::Service)
        .map(|((_, namespace, name), _)| (namespace.clone(), name.clone()))
        .collect();
    for (namespace, service) in &services {
        // The slice of `s2` is made by hand, and names any address that its maker likes.
        let is_by_hand = service == "s2";
        let attachments = state
            .droplets
            .values()
            .flat_map(|droplet| droplet.attachments.values());
        let pods = attachments.filter(|attachment| is_by_hand || attachment.pod_namespace == *namespace);
        let mut endpoints: Vec<Value> = Vec::new();
        for pod in pods {
            let mut endpoint =
                json!({"addresses": [address(&pod.address).to_string()], "conditions": {"ready": true}});
            if !is_by_hand {
                // A pod that went may still be named when another one has its address.
                let is_late = random.permille(100);
                let uid = if is_late { "another" } else { &pod.pod_uid };
                endpoint["targetRef"] =
                    json!({"kind": "Pod", "namespace": namespace, "name": pod.pod_name, "uid": uid});
            }
            endpoints.push(endpoint);
        }
        endpoints.push(json!({"addresses": [OUTSIDE], "conditions": {"ready": true}}));
        let ready = random.permille(800);
        for endpoint in &mut endpoints {
            endpoint["conditions"]["ready"] = ready.into();
        }
        let slice = json!({
            "metadata": {"labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4", "endpoints": endpoints,
            "ports": [{"name": "http", "protocol": "TCP", "port": PORT}],
        });
        let name = format!("{service}-slice");
        if state.store.get(Kind::EndpointSlice, namespace, &name).is_none() {
            let _ = state.store.create(Kind::EndpointSlice, namespace, &name, slice);
        } else {
            state.store.edit(Kind::EndpointSlice, namespace, &name, |old| {
                old["endpoints"] = slice["endpoints"].clone();
            });
        }
    }
    let all: Vec<_> = state
        .store
        .all(Kind::EndpointSlice)
        .map(|((_, namespace, name), slice)| {
            let service = text(&slice.value, &format!("/metadata/labels/{LABEL}"));
            (namespace.clone(), name.clone(), service.to_owned())
        })
        .collect();
    for (namespace, name, service) in all {
        if !services.contains(&(namespace.clone(), service)) {
            state.store.purge(Kind::EndpointSlice, &namespace, &name);
        }
    }
}

/// Returns the cluster IP; empty for a Service without one.
fn cluster_ip(service: &Value) -> &str {
    match text(service, "/spec/clusterIPs/0") {
        "None" => "",
        address => address,
    }
}

/// Checks that every bouncer of the VPC that its operator can hear has the Service's row.
pub fn provisioned_means_acked(state: &mut State, name: &str, endpoint: &Value, writer: u64) {
    let vpc = vpc_of(state, endpoint);
    let (Some(vni), Some(address)) = (vni(state, &vpc), first(endpoint)) else {
        return;
    };
    let lacks = |bouncer: &&str| {
        let droplet = state.droplets.get(*bouncer);
        droplet.is_some_and(|droplet| droplet.follows(writer) && !has_row(&droplet.tables, vni, address))
    };
    let bouncer = bouncers(state, &vpc).into_iter().find(lacks).map(str::to_owned);
    if let Some(bouncer) = bouncer {
        state.violation(format!(
            "scaled endpoint {name} is Provisioned, but bouncer droplet {bouncer} has no row of {vni}/{address}"
        ));
    }
}

/// Whether the tables have the row of a service that agents or nodes serve.
fn has_row(tables: &Tables, vni: u32, address: IpAddr) -> bool {
    let vni = number(vni);
    let slots = [Slot::Service(vni, address), Slot::NodeService(vni, address)];
    slots.iter().any(|slot| tables.rows.contains_key(slot))
}

fn first(endpoint: &Value) -> Option<IpAddr> {
    addresses(endpoint).first()?.parse().ok()
}

/// Returns the droplets where bouncers of a VPC serve.
fn bouncers<'a>(state: &'a State, vpc: &str) -> Vec<&'a str> {
    let bouncers = state.store.values(Kind::Bouncer);
    bouncers
        .filter(|bouncer| text(bouncer, "/spec/vpc") == vpc && !is_deleting(bouncer))
        .filter(|bouncer| text(bouncer, "/status/phase") == "Provisioned")
        .map(|bouncer| serving(bouncer))
        .collect()
}

/// Checks that no droplet that is heard has rows of a scaled Endpoint that is gone, unless the address already belongs
/// to another one.
pub fn gone_means_out_of_tables(state: &mut State, name: &str, old: &Value) {
    let (Some(vni), Some(address)) = (vni(state, &vpc_of(state, old)), first(old)) else {
        return;
    };
    let uid = text(old, "/spec/serviceRef/uid").to_owned();
    let text_of = address.to_string();
    let is_anothers = state.store.values(Kind::Endpoint).any(|other| {
        is_scaled(other)
            && addresses(other).contains(&text_of.as_str())
            && text(other, "/spec/serviceRef/uid") != uid
    });
    let Some(writer) = state.writer.filter(|_| !is_anothers) else {
        return;
    };
    let holder = state
        .droplets
        .values()
        .find(|droplet| droplet.is_on && droplet.follows(writer) && has_row(&droplet.tables, vni, address));
    if let Some(holder) = holder.map(|droplet| droplet.name.clone()) {
        state.violation(format!(
            "scaled endpoint {name} is gone, but {holder} has its row of {vni}/{address}"
        ));
    }
}

/// Checks that the bouncers of a droplet that applied a program have the rows of all Provisioned Services while no
/// machine is lost: operators that come and go remove none.
pub fn rows_stay(state: &State, droplet: &str) -> Result<(), String> {
    let Some(tables) = state.droplets.get(droplet).map(|droplet| &droplet.tables) else {
        return Ok(());
    };
    for endpoint in state
        .store
        .values(Kind::Endpoint)
        .filter(|endpoint| is_scaled(endpoint))
    {
        let uid = text(endpoint, "/spec/serviceRef/uid");
        let mut services = state.store.values(Kind::Service);
        let is_wanted = services.any(|service| {
            text(service, "/metadata/uid") == uid
                && text(service, "/metadata/annotations/thuban.dev~1network")
                    == text(endpoint, "/spec/network")
        });
        let network = state
            .store
            .value(Kind::Network, "", text(endpoint, "/spec/network"));
        let is_served = is_wanted
            && !is_deleting(endpoint)
            && text(endpoint, "/status/phase") == "Provisioned"
            && network.is_some_and(|network| !is_deleting(network));
        let vpc = vpc_of(state, endpoint);
        let (Some(vni), Some(address)) = (vni(state, &vpc), first(endpoint)) else {
            continue;
        };
        let is_held = has_row(tables, vni, address);
        if is_served && !is_held && bouncers(state, &vpc).contains(&droplet) {
            let name = text(endpoint, "/metadata/name");
            return Err(format!(
                "{name} is Provisioned, but {droplet} with a bouncer lost its row of {vni}/{address}"
            ));
        }
    }
    Ok(())
}

/// Checks that in the end each Service is in its VPC with the backends that it has there, and nowhere else.
pub fn verdict(state: &State) -> Result<(), String> {
    let mut expected: BTreeSet<Slot> = BTreeSet::new();
    for ((_, namespace, name), service) in state.store.all(Kind::Service) {
        let service = &*service.value;
        if cluster_ip(service).is_empty() || is_deleting(service) {
            continue;
        }
        let uid = text(service, "/metadata/uid");
        let mut own = state.store.values(Kind::Endpoint);
        let own = own.find(|endpoint| text(endpoint, "/spec/serviceRef/uid") == uid);
        let space = state.store.value(Kind::Namespace, "", namespace);
        let Some(own) = own else {
            if space.is_none_or(|space| is_deleting(space)) {
                continue;
            }
            return Err(format!("service {name} has no scaled endpoint"));
        };
        let network = text(service, "/metadata/annotations/thuban.dev~1network");
        if text(own, "/spec/network") != network {
            return Err(format!("service {name} is not in {network}"));
        }
        let vpc = vpc_of(state, own);
        let (Some(vni), Some(address)) = (vni(state, &vpc), first(own)) else {
            if is_open(state, namespace, network) {
                return Err(format!("service {name} has no address in {network}"));
            }
            continue;
        };
        let backends = backends(state, namespace, name, &vpc, vni);
        let by_node = backends.iter().any(|(at, _)| at.to_string() == OUTSIDE);
        let slot = if by_node {
            Slot::NodeService(number(vni), address)
        } else {
            Slot::Service(number(vni), address)
        };
        expected.insert(slot.clone());
        if !is_open(state, namespace, network) {
            continue;
        }
        if text(own, "/status/phase") != "Provisioned" {
            let said = own.pointer("/status/conditions").map(ToString::to_string);
            return Err(format!(
                "service {name} is not Provisioned: {}",
                said.unwrap_or_default()
            ));
        }
        if text(own, "/status/addresses/0") != address.to_string() {
            return Err(format!("the status of service {name} does not say {address}"));
        }
        if own.pointer("/status/backends").and_then(Value::as_u64) != Some(backends.len() as u64) {
            return Err(format!("the status of service {name} counts other backends"));
        }
        let parts = state.droplets.values();
        let parts = parts.filter(|droplet| droplet.tables.rows.contains_key(&Slot::Vpc(number(vni))));
        let servers: Vec<&str> = if by_node {
            parts.map(|droplet| droplet.name.as_str()).collect()
        } else {
            bouncers(state, &vpc)
        };
        for bouncer in servers {
            let rows = state.droplets.get(bouncer).map(|droplet| &droplet.tables.rows);
            let row = rows.and_then(|rows| rows.get(&slot)?.row.as_ref());
            let Some(row::Row::Service(row) | row::Row::NodeService(row)) = row else {
                return Err(format!("service {name} has no row on droplet {bouncer}"));
            };
            let found = row.ports[0].backends.iter();
            let found: BTreeSet<_> = found.map(|way| (self::address(&way.address), way.port)).collect();
            if found != backends {
                return Err(format!(
                    "service {name} has {found:?} on {bouncer}, and should have {backends:?}"
                ));
            }
        }
    }
    for endpoint in state
        .store
        .values(Kind::Endpoint)
        .filter(|endpoint| is_scaled(endpoint))
    {
        let uid = text(endpoint, "/spec/serviceRef/uid");
        let mut services = state.store.values(Kind::Service);
        if !services.any(|service| text(service, "/metadata/uid") == uid) {
            return Err(format!(
                "{} outlives its service",
                text(endpoint, "/metadata/name")
            ));
        }
    }
    for droplet in state.droplets.values() {
        let foreign = foreign(droplet, &expected);
        if let Some(slot) = foreign {
            return Err(format!(
                "{} has a row of {slot:?}, which is no service's",
                droplet.name
            ));
        }
    }
    Ok(())
}

/// Returns the backends that slices name, if they are the namespace's own and in the VPC; for the VPC of nodes those
/// outside, if there are any.
fn backends(
    state: &State,
    namespace: &str,
    service: &str,
    vpc: &str,
    wanted: u32,
) -> BTreeSet<(IpAddr, u32)> {
    let mut found = BTreeSet::new();
    let mut outside = BTreeSet::new();
    for ((_, own, _), slice) in state.store.all(Kind::EndpointSlice) {
        if own != namespace || text(&slice.value, &format!("/metadata/labels/{LABEL}")) != service {
            continue;
        }
        let endpoints = slice.value["endpoints"].as_array();
        for said in endpoints
            .into_iter()
            .flatten()
            .filter(|said| said["conditions"]["ready"] == true)
        {
            let at = text(said, "/addresses/0");
            let uid = text(said, "/targetRef/uid");
            // Only members have addresses of the default range; a slice of a selector says which pod has an address.
            if vpc == DEFAULT_NAME && uid.is_empty() && !at.starts_with("10.244.") {
                outside.extend(at.parse().map(|at| (at, PORT)).ok());
                continue;
            }
            let is_member = state.store.all(Kind::Endpoint).any(|((_, space, _), endpoint)| {
                let endpoint = &*endpoint.value;
                space == namespace
                    && !is_scaled(endpoint)
                    && addresses(endpoint).contains(&at)
                    && vni(state, &vpc_of(state, endpoint)) == Some(wanted)
                    && (uid.is_empty() || pod_uid(endpoint) == uid)
            });
            if let (true, Ok(at)) = (is_member, at.parse()) {
                found.insert((at, PORT));
            }
        }
    }
    if outside.is_empty() { found } else { outside }
}

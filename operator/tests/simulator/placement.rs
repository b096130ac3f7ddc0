//! Tests of which machines are droplets, and which of them carry the roles of one parent. Labels and reasons are
//! written out here: people and clouds write them, so a typo in the operator shows.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use crate::cluster::{add_node, droplet_object};
use crate::directed::{begin, check, until};
use crate::kind::Kind;
use crate::operators;
use crate::simulation::{Simulation, State};
use crate::store::{condition, text};

pub const ZONE: &str = "topology.kubernetes.io/zone";
pub const PREFERENCE: &str = "transit.node-restriction.kubernetes.io/thuban";

/// Makes nodes with these labels, an operator, and a VPC with a network of two bouncers. Returns the droplets of the
/// bouncers.
async fn two_bouncers(simulation: &Arc<Simulation>, labels: &[Value]) -> BTreeSet<String> {
    {
        let state = &mut *simulation.lock();
        state.faults = state.faults.ended();
        state.faults.has_default = false;
    }
    for (number, labels) in labels.iter().enumerate() {
        add_node(simulation, number as u8);
        simulation.with(|state| {
            let relabel = |node: &mut Value| node["metadata"]["labels"] = labels.clone();
            state.store.edit(Kind::Node, "", &format!("n{number}"), relabel);
        });
    }
    operators::start(simulation);
    until(simulation, "all droplets are Connected", |state| {
        let mut droplets = state.store.values(Kind::Droplet);
        droplets.all(|droplet| reason(droplet, "Ready") == "Connected")
    })
    .await;
    simulation.with(|state| {
        let vpc = json!({"metadata": {}, "spec": {"cidrs": ["10.0.0.0/16"], "dividers": 1}});
        let network =
            json!({"metadata": {}, "spec": {"vpc": "red", "cidrs": ["10.0.1.0/24"], "bouncers": 2}});
        let _ = state.store.create(Kind::Vpc, "", "red", vpc);
        let _ = state.store.create(Kind::Network, "", "red-1", network);
    });
    until(simulation, "the network is Provisioned", |state| {
        let network = state.store.value(Kind::Network, "", "red-1");
        network.is_some_and(|network| text(network, "/status/phase") == "Provisioned")
    })
    .await;
    let state = simulation.lock();
    let bouncers = state.store.values(Kind::Bouncer);
    bouncers
        .map(|bouncer| text(bouncer, "/status/droplet").to_owned())
        .collect()
}

fn expect(simulation: &Simulation, bouncers: &BTreeSet<String>, expected: [&str; 2]) {
    if !bouncers.iter().eq(expected.iter()) {
        let what = format!("bouncers are on {bouncers:?}, not on {expected:?}");
        simulation.lock().violation(what);
    }
}

#[test]
fn bouncers_of_a_network_are_in_different_zones() {
    for seed in 1..=3 {
        check("zones", seed, async |simulation| {
            let labels = ["b", "a", "a"].map(|zone| json!({ZONE: zone}));
            let bouncers = two_bouncers(simulation, &labels).await;
            // The one that is registered first of the two in zone a.
            let in_a = if bouncers.contains("n2") { "n2" } else { "n1" };
            expect(simulation, &bouncers, ["n0", in_a]);
        });
    }
}

#[test]
fn roles_are_on_nodes_that_are_labelled_for_them() {
    for seed in 1..=3 {
        check("preference", seed, async |simulation| {
            let labels = [
                json!({}),
                json!({}),
                json!({PREFERENCE: ""}),
                json!({PREFERENCE: ""}),
            ];
            let bouncers = two_bouncers(simulation, &labels).await;
            expect(simulation, &bouncers, ["n2", "n3"]);
        });
    }
}

/// Returns the reason of a condition of the type.
fn reason<'a>(object: &'a Value, kind: &str) -> &'a str {
    condition(object, kind).map_or("", |told| text(told, "/reason"))
}

/// Makes a node with one address, and a Droplet that names another address or another node.
fn pretend(state: &mut State, name: &str, address: Ipv4Addr, droplet: &Value) {
    let addresses = json!([{"type": "InternalIP", "address": address.to_string()}]);
    let node = json!({"metadata": {}, "spec": {}, "status": {"addresses": addresses}});
    let _ = state.store.create(Kind::Node, "", name, node);
    let _ = state.store.create(Kind::Droplet, "", name, droplet.clone());
}

#[test]
fn a_droplet_has_an_address_of_its_own_node_and_no_other() {
    for seed in 1..=3 {
        check("pretenders", seed, async |simulation| {
            let only = begin(simulation, 1).await;
            sleep(Duration::from_secs(2)).await;
            let taken = Ipv4Addr::new(192, 168, 0, 1);
            simulation.with(|state| {
                // The addresses are: another node's; one that another node has too; one of a VPC; one in another node's
                // name.
                pretend(
                    state,
                    "m1",
                    Ipv4Addr::new(192, 168, 0, 91),
                    &droplet_object("m1", taken),
                );
                pretend(state, "m2", taken, &droplet_object("m2", taken));
                let within = Ipv4Addr::new(10, 0, 1, 9);
                pretend(state, "m3", within, &droplet_object("m3", within));
                let own = Ipv4Addr::new(192, 168, 0, 94);
                pretend(state, "m4", own, &droplet_object("m4", own));
                state.store.edit(Kind::Droplet, "", "m4", |droplet| {
                    droplet["spec"]["node"] = "n0".into();
                });
            });
            for (name, expected) in [
                ("m1", "WrongAddress"),
                ("m2", "AddressTaken"),
                ("m3", "AddressConflict"),
                ("m4", "WrongNode"),
            ] {
                until(simulation, expected, |state| {
                    let droplet = state.store.value(Kind::Droplet, "", name);
                    droplet.is_some_and(|droplet| {
                        reason(droplet, "Accepted") == expected
                            && text(droplet, "/status/phase") != "Provisioned"
                    })
                })
                .await;
                let hub = only.hub().expect("an operator that leads");
                if hub.read(|world| world.is_droplet(name)) {
                    simulation.lock().violation(format!("{name} is a droplet"));
                }
            }
        });
    }
}

#[test]
fn no_role_is_added_that_would_share_a_droplet() {
    for seed in 1..=3 {
        check("too few", seed, async |simulation| {
            begin(simulation, 3).await;
            let number = |state: &State| {
                let bouncers = state.store.values(Kind::Bouncer);
                let working = bouncers.filter(|bouncer| text(bouncer, "/status/phase") == "Provisioned");
                working.count()
            };
            let why = |state: &State| {
                let network = state.store.value(Kind::Network, "", "red-1");
                network.map_or(String::new(), |network| reason(network, "Crowded").to_owned())
            };
            let is_limited = |state: &State| number(state) == 2 && why(state) == "TooFewDroplets";
            until(simulation, "each droplet has a bouncer", is_limited).await;
            sleep(Duration::from_mins(1)).await;
            if !is_limited(&simulation.lock()) {
                simulation
                    .lock()
                    .violation("a bouncer was added without a droplet of its own".into());
            }
            add_node(simulation, 2);
            until(simulation, "the third bouncer is on the third droplet", |state| {
                number(state) == 3 && why(state).is_empty()
            })
            .await;
        });
    }
}

//! The audit of objects, claims and the droplets' tables: nothing leaked, nothing double.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Result;
use serde_json::Value;
use thuban_cluster::Cluster;

use crate::support::get;

/// (VPC, address), or (VNI, address).
type At<T> = (T, String);

/// Waits until everything in the cluster agrees. Where tests run side by side, objects of other tests may never agree
/// at the same time.
pub fn wait_sound(cluster: &Cluster) {
    wait_until_sound(cluster, |_| true);
}

/// Waits until the objects of some VPCs agree. The VPCs share names with their namespaces.
pub fn wait_sound_of(cluster: &Cluster, vpcs: &[&str]) {
    wait_until_sound(cluster, |vpc| vpcs.contains(&vpc));
}

fn wait_until_sound(cluster: &Cluster, is_meant: impl Fn(&str) -> bool) {
    let mut faults = Vec::new();
    cluster
        .wait_for("objects and tables agree", Duration::from_mins(2), || {
            faults = audit(cluster)?;
            faults.retain(|fault| is_meant(&fault.vpc));
            Ok(faults.is_empty())
        })
        .unwrap_or_else(|error| panic!("{error:#}:\n{faults:#?}"));
}

/// A fact that does not agree with others.
#[derive(Debug)]
pub struct Fault {
    vpc: String,
    /// The description, printed when a test fails.
    #[allow(dead_code)]
    what: String,
}

fn fault(vpc: impl Into<String>, what: String) -> Fault {
    Fault {
        vpc: vpc.into(),
        what,
    }
}

fn items(cluster: &Cluster, arguments: &[&str]) -> Result<Vec<Value>> {
    let list = get(cluster, arguments)?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Returns everything that does not agree.
fn audit(cluster: &Cluster) -> Result<Vec<Fault>> {
    let (scaled, endpoints): (Vec<Value>, Vec<Value>) = endpoints(cluster)?
        .into_iter()
        .partition(|endpoint| endpoint["spec"]["type"] == "Scaled");
    let mut faults = Vec::new();
    let held = held(&endpoints, &mut faults);
    claims(cluster, &held, &mut faults)?;
    pods(cluster, &endpoints, &mut faults)?;
    services(cluster, &scaled, &mut faults)?;
    roles(cluster, &mut faults)?;
    tables(cluster, &endpoints, &mut faults)?;
    Ok(faults)
}

/// Returns all endpoints, with their VPC also where a user named only the network.
fn endpoints(cluster: &Cluster) -> Result<Vec<Value>> {
    let networks = items(cluster, &["networks.thuban.dev"])?;
    let mut endpoints = items(cluster, &["endpoints.thuban.dev", "-A"])?;
    for endpoint in &mut endpoints {
        let own = |network: &&Value| network["metadata"]["name"] == endpoint["spec"]["network"];
        if let Some(network) = networks.iter().find(own) {
            endpoint["spec"]["vpc"] = network["spec"]["vpc"].clone();
        }
    }
    Ok(endpoints)
}

/// Returns the addresses of endpoints.
fn held(endpoints: &[Value], faults: &mut Vec<Fault>) -> BTreeSet<At<String>> {
    let mut held = BTreeSet::new();
    for endpoint in endpoints {
        let name = &endpoint["metadata"]["name"];
        for address in endpoint["status"]["addresses"].as_array().into_iter().flatten() {
            let at = (text(&endpoint["spec"]["vpc"]), text(address));
            if !held.insert(at.clone()) {
                faults.push(fault(
                    &at.0,
                    format!("{name} has {at:?}, and so has another endpoint"),
                ));
            }
        }
    }
    held
}

/// Checks that each address has a claim, and that each claim that doesn't rest has an endpoint.
fn claims(cluster: &Cluster, held: &BTreeSet<At<String>>, faults: &mut Vec<Fault>) -> Result<()> {
    let mut claimed = BTreeSet::new();
    for claim in items(cluster, &["ipclaims.thuban.dev"])? {
        let name = text(&claim["metadata"]["name"]);
        let Some((vpc, address)) = name.split_once('.') else {
            faults.push(fault("", format!("claim {name}")));
            continue;
        };
        let is_resting = !claim["status"]["releasedAt"].is_null();
        let at = (vpc.to_owned(), address_of(address));
        if !is_resting && !held.contains(&at) {
            faults.push(fault(vpc, format!("claim {name} is nobody's")));
        }
        if !is_resting {
            claimed.insert(at);
        }
    }
    for at in held.difference(&claimed) {
        faults.push(fault(&at.0, format!("{at:?} is held without a claim")));
    }
    Ok(())
}

/// Returns the address in a claim's name. IPv6 is written there as 32 hex digits.
fn address_of(name: &str) -> String {
    match u128::from_str_radix(name, 16) {
        Ok(number) if name.len() == 32 => std::net::Ipv6Addr::from(number).to_string(),
        _ => name.to_owned(),
    }
}

/// Checks that each endpoint that was made for a pod has that pod, and that no pod has two.
fn pods(cluster: &Cluster, endpoints: &[Value], faults: &mut Vec<Fault>) -> Result<()> {
    let pods = items(cluster, &["pods", "-A"])?;
    let living: BTreeSet<String> = pods.iter().map(|pod| text(&pod["metadata"]["uid"])).collect();
    let mut had = BTreeSet::new();
    for endpoint in endpoints {
        let Some(uid) = endpoint["spec"]["podRef"]["uid"].as_str() else {
            continue;
        };
        let name = &endpoint["metadata"]["name"];
        let vpc = text(&endpoint["spec"]["vpc"]);
        if !living.contains(uid) {
            faults.push(fault(&vpc, format!("endpoint {name} is of a pod that is gone")));
        }
        if !had.insert(uid) {
            faults.push(fault(&vpc, format!("pod {uid} has two endpoints")));
        }
    }
    Ok(())
}

/// Checks that each Service with addresses of its own has one scaled endpoint with these addresses, and that no other
/// Service has one.
fn services(cluster: &Cluster, scaled: &[Value], faults: &mut Vec<Fault>) -> Result<()> {
    let addresses = |list: &Value| -> Vec<String> {
        let list = list.as_array().into_iter().flatten().map(text);
        list.filter(|address| address != "None").collect()
    };
    let mut wanted = BTreeMap::new();
    for service in items(cluster, &["services", "-A"])? {
        let addresses = addresses(&service["spec"]["clusterIPs"]);
        if !addresses.is_empty() {
            let namespace = text(&service["metadata"]["namespace"]);
            wanted.insert(text(&service["metadata"]["uid"]), (namespace, addresses));
        }
    }
    for endpoint in scaled {
        let (name, uid) = (
            &endpoint["metadata"]["name"],
            text(&endpoint["spec"]["serviceRef"]["uid"]),
        );
        let has = addresses(&endpoint["status"]["addresses"]);
        let has = if has.is_empty() {
            addresses(&endpoint["spec"]["claimed"])
        } else {
            has
        };
        match wanted.remove(&uid) {
            None => {
                let vpc = text(&endpoint["spec"]["vpc"]);
                faults.push(fault(vpc, format!("scaled endpoint {name} is of no Service")));
            }
            // A Service that no network admits has no endpoint.
            Some((namespace, addresses)) if !has.is_empty() && has != addresses => {
                let what = format!("scaled endpoint {name} has {has:?} of {addresses:?}");
                faults.push(fault(namespace, what));
            }
            Some(_) => {}
        }
    }
    faults.extend(wanted.into_values().map(|(vpc, addresses)| {
        fault(
            vpc,
            format!("the Service of {addresses:?} has no scaled endpoint"),
        )
    }));
    Ok(())
}

/// Checks that roles work where they are placed, each once.
fn roles(cluster: &Cluster, faults: &mut Vec<Fault>) -> Result<()> {
    for kind in ["bouncers.thuban.dev", "dividers.thuban.dev"] {
        for role in items(cluster, &[kind])? {
            let is_settled = role["status"]["phase"] == "Provisioned"
                && role["status"]["droplet"] == role["spec"]["droplet"]
                && role["metadata"]["deletionTimestamp"].is_null();
            if !is_settled {
                let name = text(&role["metadata"]["name"]);
                let vpc = text(&role["spec"]["vpc"]);
                faults.push(fault(vpc, format!("{kind} {name} is on the way")));
            }
        }
    }
    Ok(())
}

/// Checks that droplets deliver to the endpoints that live there, and that bouncers know those of their networks: no
/// more, no fewer.
fn tables(cluster: &Cluster, endpoints: &[Value], faults: &mut Vec<Fault>) -> Result<()> {
    let mut vnis = BTreeMap::new();
    for vpc in items(cluster, &["vpcs.thuban.dev"])? {
        vnis.insert(
            text(&vpc["metadata"]["name"]),
            vpc["status"]["vni"].as_u64().unwrap_or_default(),
        );
    }
    let mut bouncers: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for bouncer in items(cluster, &["bouncers.thuban.dev"])? {
        let on = bouncers.entry(text(&bouncer["spec"]["droplet"])).or_default();
        on.insert(text(&bouncer["spec"]["network"]));
    }
    for node in cluster.nodes()? {
        let rows = cluster.table_rows(&node)?;
        let keys = |table: &str| -> BTreeSet<At<u64>> {
            let of_table = rows.iter().filter(|row| row["table"] == table);
            of_table
                .map(|row| {
                    (
                        row["key"]["vni"].as_u64().unwrap_or_default(),
                        text(&row["key"]["address"]),
                    )
                })
                .collect()
        };
        let expected = |fits: &dyn Fn(&Value) -> bool| -> BTreeSet<At<u64>> {
            let fitting = endpoints.iter().filter(|endpoint| fits(endpoint));
            fitting
                .flat_map(|endpoint| {
                    let vni = vnis
                        .get(&text(&endpoint["spec"]["vpc"]))
                        .copied()
                        .unwrap_or_default();
                    let addresses = endpoint["status"]["addresses"].as_array();
                    addresses
                        .into_iter()
                        .flatten()
                        .map(move |address| (vni, text(address)))
                })
                .collect()
        };
        let here = expected(&|endpoint| endpoint["status"]["droplet"] == node.as_str());
        let networks = bouncers.get(&node).cloned().unwrap_or_default();
        let bounced = expected(&|endpoint| {
            !endpoint["status"]["droplet"].is_null() && networks.contains(&text(&endpoint["spec"]["network"]))
        });
        for (table, expected) in [("LOCAL_ENDPOINTS", here), ("BOUNCER_ROWS", bounced)] {
            let found = keys(table);
            for at in found.symmetric_difference(&expected) {
                let what = if found.contains(at) { "too much" } else { "missing" };
                let vpc = vnis.iter().find(|(_, vni)| **vni == at.0);
                let vpc = vpc.map(|(name, _)| name.clone()).unwrap_or_default();
                faults.push(fault(vpc, format!("{node} {table} {at:?}: {what}")));
            }
        }
    }
    Ok(())
}

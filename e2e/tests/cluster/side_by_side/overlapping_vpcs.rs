//! Two VPCs that are as equal as possible. They have the same ranges, a client at the same address that asks from the
//! same ports, and a Service each at the same address. The Services have backends at the same addresses, some of which
//! pass from one VPC to the other and back on their node. No answer may ever come from the other VPC.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::audit::wait_sound_of;
use crate::requests::{ANSWER_TIMEOUT, Load, Tally, Way, under_load};
use crate::service_objects::{made, manifest, serves, wait_endpoint};
use crate::support::{
    Pod, apply, delete, delete_namespace, get, namespace_manifest, netexec_manifest, network_manifest,
    running, vpc_manifest, wait_provisioned,
};
use crate::tenants::tenants;

const TWINS: [&str; 2] = ["castor", "pollux"];
const NODES: [&str; 3] = ["node-a", "node-b", "node-c"];
/// The number of answers to get, of both VPCs together; `THUBAN_E2E_REQUESTS` sets another one.
const REQUESTS: u64 = 30_000;
/// The least number of turns of each passing address: it belongs to one VPC, to the other, to the first one again.
const TURNS: usize = 3;
const LATEST: Duration = Duration::from_secs(90);
const BACKEND: &str = "backend";
/// The address of each VPC's Service.
const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 77, 1, 50);

/// Returns a pod; `last` is the last byte of its address.
fn pod(vpc: &str, name: &str, node: &str, last: usize) -> Value {
    let mut pod = netexec_manifest(vpc, name, node, None);
    pod["metadata"]["annotations"]["thuban.dev/ip"] = json!(address(last));
    pod["metadata"]["labels"] = json!({"app": BACKEND});
    // A deleted pod must be gone from its node.
    pod["spec"]["terminationGracePeriodSeconds"] = json!(1);
    pod
}

fn address(last: usize) -> String {
    format!("10.77.1.{last}")
}

fn client(vpc: usize) -> Value {
    let mut client = pod(TWINS[vpc], &format!("{}-client", TWINS[vpc]), NODES[vpc], 250);
    client["metadata"]["labels"] = json!({"app": "client"});
    client
}

/// Returns one pod on each node. Where castor has its first address, pollux has its third.
fn steady(vpc: usize) -> Vec<Value> {
    let one = |number: usize| {
        let name = format!("{}-steady-{number}", TWINS[vpc]);
        pod(TWINS[vpc], &name, NODES[(number + vpc) % 3], 11 + number)
    };
    (0..3).map(one).collect()
}

/// Returns the owners of the passing addresses at a turn: name and VPC of each pod, and its manifest.
fn passing(turn: usize) -> Vec<(usize, String, Value)> {
    let one = |slot: usize| {
        let vpc = (slot + turn) % 2;
        let name = format!("{}-passing-{slot}-{turn}", TWINS[vpc]);
        let manifest = pod(TWINS[vpc], &name, NODES[slot], 100 + slot);
        (vpc, name, manifest)
    };
    (0..3).map(one).collect()
}

fn make(cluster: &Cluster) -> Vec<Pod> {
    let mut objects = Vec::new();
    for vpc in TWINS {
        let mut network = network_manifest(vpc, vpc, "10.77.1.0/24");
        network["spec"]["allowStaticIPs"] = true.into();
        objects.extend([
            vpc_manifest(vpc, "10.77.0.0/16", &[vpc]),
            network,
            namespace_manifest(vpc, Some(vpc)),
        ]);
    }
    apply(cluster, &objects).unwrap();
    for vpc in TWINS {
        wait_provisioned(cluster, &format!("networks.thuban.dev/{vpc}")).unwrap();
    }
    let pods = [steady(0), steady(1), vec![client(0), client(1)]].concat();
    apply(cluster, &pods).unwrap();
    for pod in pods {
        let part = |field: &str| pod["metadata"][field].as_str().unwrap();
        running(cluster, part("namespace"), part("name")).unwrap();
    }
    TWINS
        .map(|vpc| running(cluster, vpc, &format!("{vpc}-client")).unwrap())
        .to_vec()
}

/// Waits until nobody has claimed the address in the VPC.
fn wait_free(cluster: &Cluster, vpc: &str, last: usize) -> Result<()> {
    let name = format!("{vpc}.{}", address(last));
    cluster.wait_for(&format!("{name} is free"), LATEST, || {
        let claims = get(cluster, &["ipclaims.thuban.dev"])?;
        let claims = claims["items"].as_array().into_iter().flatten();
        Ok(!claims.into_iter().any(|claim| claim["metadata"]["name"] == *name))
    })
}

/// Returns how often each name has answered in a VPC, over the senders there.
fn answers(tallies: &[Mutex<Tally>], vpc: usize) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for tally in tallies.iter().skip(vpc).step_by(TWINS.len()) {
        for (name, count) in &tally.lock().unwrap().answers {
            *all.entry(name.clone()).or_default() += count;
        }
    }
    all
}

fn answered(tallies: &[Mutex<Tally>]) -> u64 {
    tallies.iter().map(|tally| tally.lock().unwrap().answered()).sum()
}

/// Gives the passing addresses to the next pods, and waits until these have answered.
fn turn(cluster: &Cluster, turn: usize, tallies: &[Mutex<Tally>]) -> Result<()> {
    let pods = passing(turn);
    for (slot, (vpc, ..)) in pods.iter().enumerate() {
        wait_free(cluster, TWINS[*vpc], 100 + slot)?;
    }
    let manifests: Vec<Value> = pods.iter().map(|(.., manifest)| manifest.clone()).collect();
    apply(cluster, &manifests)?;
    for (vpc, name, manifest) in &pods {
        let pod = running(cluster, TWINS[*vpc], name)?;
        assert_eq!(
            manifest["metadata"]["annotations"]["thuban.dev/ip"],
            pod.address.to_string()
        );
        cluster.wait_for(&format!("an answer of {name}"), LATEST, || {
            Ok(answers(tallies, *vpc).contains_key(name))
        })?;
    }
    for (vpc, name, _) in &pods {
        delete(cluster, &["pod", "-n", TWINS[*vpc], name])?;
    }
    Ok(())
}

#[test]
fn services_of_overlapping_vpcs_never_mix_as_addresses_move() {
    let cluster = &tenants().cluster;
    let wanted = std::env::var("THUBAN_E2E_REQUESTS").map_or(REQUESTS, |number| number.parse().unwrap());
    let clients = make(cluster);
    assert_eq!(clients[0].address, clients[1].address);
    for vpc in TWINS {
        let mut service = manifest(vpc, BACKEND, &json!({"app": BACKEND}));
        service["metadata"]["annotations"]["thuban.dev/service-ip"] = SERVICE.to_string().into();
        made(cluster, &service).unwrap();
        wait_endpoint(
            cluster,
            vpc,
            BACKEND,
            "its own address and all backends",
            |endpoint| {
                let addresses = endpoint["status"]["addresses"].as_array();
                serves(3)(endpoint) && addresses.is_some_and(|all| all.contains(&json!(SERVICE.to_string())))
            },
        );
    }
    // There is one sender of each way in each VPC.
    let datagrams = [20_000..35_000, 35_000..50_000, 50_000..65_000].map(Way::UdpFrom);
    let loads: Vec<Load> = [Way::Tcp]
        .into_iter()
        .chain(datagrams)
        .flat_map(|way| {
            clients.iter().map(move |pod| Load {
                pod,
                address: SERVICE,
                way: way.clone(),
                pause: Duration::ZERO,
                waits: ANSWER_TIMEOUT,
            })
        })
        .collect();
    let mut turns = 0;
    let result = under_load(&loads, |tallies| {
        while turns < TURNS || answered(tallies) < wanted {
            turn(cluster, turns, tallies)?;
            turns += 1;
        }
        Ok(())
    });
    let tallies: Vec<Mutex<Tally>> = result.unwrap().into_iter().map(Mutex::new).collect();
    let failed: usize = tallies
        .iter()
        .map(|tally| tally.lock().unwrap().failures.len())
        .sum();
    eprintln!(
        "twins: {} answers, {failed} requests to pods that ended, {turns} turns",
        answered(&tallies)
    );
    for (load, tally) in loads.iter().zip(&tallies) {
        let answered = tally.lock().unwrap().answered();
        eprintln!("  {answered} to {} by {:?}", load.pod.name, load.way);
    }
    for (vpc, name) in TWINS.iter().enumerate() {
        let answers = answers(&tallies, vpc);
        eprintln!("  {name}: {answers:?}");
        let mut own: Vec<String> = steady(vpc)
            .iter()
            .map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned())
            .collect();
        let passed = (0..turns).flat_map(passing).filter(|(of, ..)| *of == vpc);
        own.extend(passed.map(|(_, name, _)| name));
        own.sort();
        let heard: Vec<String> = answers.into_keys().collect();
        assert_eq!(heard, own, "who answered in {name}");
    }
    for vpc in TWINS {
        delete_namespace(cluster, vpc).unwrap();
        delete(cluster, &["networks.thuban.dev", vpc]).unwrap();
        delete(cluster, &["vpcs.thuban.dev", vpc]).unwrap();
    }
    wait_sound_of(cluster, &TWINS);
}

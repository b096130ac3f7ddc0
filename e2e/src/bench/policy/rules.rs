//! Rules in the tables of two droplets, as transitd writes them.

use std::{net::Ipv4Addr, rc::Rc};

use anyhow::{Context, Result, bail, ensure};
use aya::maps::{HashMap, LpmTrie, Map, MapData, lpm_trie::Key};
use thuban_common::{
    policy::{
        Action, BlockKey, Decision, FlowEntry, GRANT_ASKS_BLOCKS, GRANT_DENIES, Grant, GrantKey, LAST_POINT,
        ListEntry, ListKey, NO_RULE, PEER_OTHER, PortRange, of_vpc, ranked,
    },
    services::{ALL_FLOWS, ConnectionKey},
    tables::{AttachmentEntry, EndpointKey, LOCAL_HAS_POLICY, LocalEntry},
};

use crate::{
    bench::datapath::rigs::{Path, cable::VNI, node::Node},
    programs::{Programs, address, key},
    rig::traffic::ping,
};

/// The class of the pods, and the first of the classes that other rules are about.
const CLASS: u32 = 0x100;
const OTHERS: u32 = 0x1000;
const INGRESS: u32 = 1;
const EGRESS: u32 = 2;
/// The list of a rule for all ports.
const ALL_PORTS: u32 = 1;
/// The host's end of the first pod of a node.
pub const HOST_END: &str = "pod1";
/// The last bytes of the pods' addresses, in the order of their nodes.
const PODS: [u8; 2] = [2, 3];

/// Gives each pod an ingress set and an egress set that accept the other pod, by the last of `count` rules for other
/// classes and as many for other addresses.
pub fn isolate(nodes: &mut [Node], count: usize) -> Result<()> {
    let pods_of_node = PODS.len() / nodes.len();
    for (node, pods) in nodes.iter_mut().zip(PODS.chunks(pods_of_node)) {
        for set in [INGRESS, EGRESS] {
            fill(programs(node)?, set, count)?;
        }
        for (number, last) in (1..).zip(pods) {
            give_sets(node, &format!("pod{number}"), *last)?;
        }
    }
    Ok(())
}

/// Gives the pod behind a host's end the class and both sets.
fn give_sets(node: &mut Node, host_end: &str, last: u8) -> Result<()> {
    let interface = node.namespace.interface(host_end)?;
    let programs = programs(node)?;
    let mut attachment: AttachmentEntry = programs.get("ATTACHMENTS", &interface)?;
    attachment.class = CLASS;
    attachment.ingress_set = INGRESS;
    attachment.egress_set = EGRESS;
    programs.insert("ATTACHMENTS", interface, attachment)?;
    let local = LocalEntry {
        vni: VNI,
        ifindex: interface,
        mac: attachment.mac,
        flags: LOCAL_HAS_POLICY,
    };
    programs.set_local(key(VNI, Ipv4Addr::new(10, 0, 0, last)), local)?;
    programs.raise_epoch()
}

/// Writes sets that no pod of the rig has: policies of other endpoints of the VPC.
pub fn isolate_others(nodes: &mut [Node]) -> Result<()> {
    for node in nodes {
        let interface = node.namespace.interface(HOST_END)?;
        let programs = programs(node)?;
        fill(programs, INGRESS, 100)?;
        let mut attachment: AttachmentEntry = programs.get("ATTACHMENTS", &interface)?;
        attachment.class = CLASS;
        programs.insert("ATTACHMENTS", interface, attachment)?;
    }
    Ok(())
}

/// Proves that the rules are asked: no ping comes through once the server's set accepts nobody.
pub fn prove(path: &mut Path) -> Result<()> {
    let nodes = Rc::get_mut(&mut path.nodes).context("the nodes are in use")?;
    let server = programs(nodes.last_mut().context("no node")?)?;
    let accepted = server.get::<GrantKey, Grant>("GRANTS", &peer(INGRESS, CLASS))?;
    grant(server, peer(INGRESS, CLASS), 0, GRANT_DENIES)?;
    server.raise_epoch()?;
    let passes = ping(&path.client, path.address, 56)?;
    ensure!(!passes, "a ping comes through, whatever the rules say");
    server.insert("GRANTS", peer(INGRESS, CLASS), accepted)?;
    server.raise_epoch()?;
    ensure!(ping(&path.client, path.address, 56)?, "no ping comes through");
    Ok(())
}

/// Removes all flows, as if their time were over.
pub fn forget_flows(programs: &Programs) -> Result<()> {
    let mut flows: HashMap<_, ConnectionKey, FlowEntry> = handle(programs, "FLOWS")?.try_into()?;
    let keys: Vec<ConnectionKey> = flows.keys().collect::<Result<_, _>>()?;
    for key in keys {
        flows.remove(&key)?;
    }
    let mut shares: HashMap<_, EndpointKey, u32> = handle(programs, "SHARES")?.try_into()?;
    let share = EndpointKey {
        vni: VNI,
        address: ALL_FLOWS,
    };
    // Without flows there is no share.
    let _ = shares.remove(&share);
    Ok(())
}

/// Returns a hash map for writing, whoever else has the programs.
fn handle(programs: &Programs, name: &str) -> Result<Map> {
    let Some(Map::HashMap(map)) = programs.ebpf.map(name) else {
        bail!("no hash map {name}");
    };
    Ok(Map::HashMap(MapData::from_id(map.info()?.id())?))
}

fn programs(node: &mut Node) -> Result<&mut Programs> {
    node.programs.as_mut().context("a droplet without programs")
}

/// Writes a set that accepts [`CLASS`] by its last rule. `count`: how many rules for other classes, and how many for
/// other addresses.
pub fn fill(programs: &mut Programs, set: u32, count: usize) -> Result<()> {
    let range = PortRange {
        first: 0,
        last: LAST_POINT,
        decision: Decision {
            admin: NO_RULE,
            rest: ranked(count.try_into()?, Action::Accept),
        }
        .word(),
    };
    let key = ListKey {
        list: ALL_PORTS,
        part: 0,
    };
    programs.insert("LISTS", key, ListEntry::new(&[range], 0))?;
    let asks = if count == 0 { 0 } else { GRANT_ASKS_BLOCKS };
    grant(programs, other(set), 0, GRANT_DENIES | asks)?;
    for number in 0..u32::try_from(count)? {
        grant(
            programs,
            peer(set, OTHERS + number),
            ALL_PORTS,
            GRANT_DENIES | asks,
        )?;
        block(programs, set, Ipv4Addr::from(0x0b00_0000 + number * 2))?;
    }
    grant(programs, peer(set, CLASS), ALL_PORTS, GRANT_DENIES | asks)
}

fn peer(set: u32, class: u32) -> GrantKey {
    GrantKey {
        set: of_vpc(VNI, set),
        peer: of_vpc(VNI, class),
    }
}

fn other(set: u32) -> GrantKey {
    GrantKey {
        set: of_vpc(VNI, set),
        peer: PEER_OTHER,
    }
}

fn grant(programs: &mut Programs, key: GrantKey, list: u32, flags: u32) -> Result<()> {
    programs.insert("GRANTS", key, Grant { list, flags }.of(&key))
}

/// Writes a rule for one address.
fn block(programs: &mut Programs, set: u32, of: Ipv4Addr) -> Result<()> {
    let map = programs.ebpf.map_mut("BLOCKS").context("BLOCKS")?;
    let mut blocks: LpmTrie<_, BlockKey, Grant> = map.try_into()?;
    let data = BlockKey {
        set: of_vpc(VNI, set).to_be_bytes(),
        address: address(of),
    };
    let entry = Grant {
        list: ALL_PORTS,
        flags: GRANT_DENIES,
    };
    Ok(blocks.insert(&Key::new(64 + 128, data), entry, 0)?)
}

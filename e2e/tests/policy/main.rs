//! From objects to verdicts: what the API's words say of a packet is what the tables of the destination's droplet say.
//!
//! The operator makes rows of objects, and transitd makes tables of rows. Nothing of it runs here: the tables are in
//! memory, and the packets are only described.

use std::{
    collections::{BTreeMap, HashMap},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use ipnet::IpNet;
use thuban_api::identifiers::{Vni, mapped};
use thuban_common::policy::{
    BlockKey, Grant, GrantKey, ListEntry, ListKey, Lookups, PEER_OUTSIDE, judge, of_vpc, point,
};
use thuban_operator::model::policy::{
    Applied,
    oracle::{End, Generator, Objects, Packet, Pod},
};
use thuban_rows::PolicyId;
use transitd::program::policy::{Change, PolicyTables};

/// Packets that are asked about in one world of objects.
const OF_A_WORLD: u64 = 200;
/// Bits of a set in the keys of BLOCKS.
const SET_BITS: u32 = 64;

#[derive(Default)]
struct Maps {
    grants: HashMap<GrantKey, Grant>,
    blocks: HashMap<(BlockKey, u32), Grant>,
    lists: HashMap<ListKey, ListEntry>,
}

impl Lookups for Maps {
    fn grant(&self, key: &GrantKey) -> Option<Grant> {
        self.grants.get(key).copied()
    }

    fn block(&self, key: &BlockKey) -> Option<Grant> {
        (0..=128).rev().find_map(|length| {
            let kept = u128::MAX.checked_shl(128 - length).unwrap_or(0);
            let address = (u128::from_be_bytes(key.address) & kept).to_be_bytes();
            let first = BlockKey { address, ..*key };
            self.blocks.get(&(first, SET_BITS + length)).copied()
        })
    }

    fn part(&self, key: &ListKey) -> Option<&ListEntry> {
        self.lists.get(key)
    }
}

impl Maps {
    fn apply(&mut self, change: Change) {
        match change {
            Change::Grant(key, grant) => put(&mut self.grants, key, grant),
            Change::Block(key, length, grant) => put(&mut self.blocks, (key, length), grant),
            Change::List(key, entry) => put(&mut self.lists, key, entry.map(|entry| *entry)),
        }
    }
}

fn put<K: std::hash::Hash + Eq, V>(map: &mut HashMap<K, V>, key: K, value: Option<V>) {
    match value {
        Some(value) => map.insert(key, value),
        None => map.remove(&key),
    };
}

/// What droplets know of a pod.
struct Known {
    vni: Vni,
    applied: Applied,
}

/// The tables of a droplet that has all rows of all VPCs.
struct World {
    maps: Maps,
    pods: Vec<Known>,
}

impl World {
    fn new(objects: &Objects, knows_ranges: bool) -> Result<Self> {
        let policies = objects.policies();
        let mut tables = PolicyTables::default();
        let mut ranges: BTreeMap<Vni, Vec<IpNet>> = BTreeMap::new();
        let mut pods = Vec::new();
        for pod in &objects.pods {
            let vni = vni_of(pod)?;
            let applied = policies.apply(&pod.member());
            tables.put_class(applied.class.row(vni, applied.class.id(0)))?;
            for set in [&applied.ingress, &applied.egress].into_iter().flatten() {
                tables.put_set(set.row(vni, set.id(0)))?;
            }
            ranges
                .entry(vni)
                .or_default()
                .extend(pod.addresses.map(IpNet::from));
            pods.push(Known { vni, applied });
        }
        for (vni, ranges) in &ranges {
            tables.set_ranges(*vni, knows_ranges.then_some(ranges));
        }
        ensure!(tables.full().next().is_none(), "a set has no room");
        let mut maps = Maps::default();
        for change in tables.flush().0 {
            maps.apply(change);
        }
        Ok(Self { maps, pods })
    }

    /// Returns what is known of the pod at an end.
    fn known(&self, objects: &Objects, end: End) -> Option<&Known> {
        let pod = member(end)?;
        let place = objects.pods.iter().position(|other| std::ptr::eq(other, pod))?;
        self.pods.get(place)
    }

    /// Whether a set lets the packet pass; `None` if no set applies.
    fn judge(&self, objects: &Objects, packet: &Packet, is_egress: bool) -> Option<bool> {
        let [own, other] = if is_egress {
            [packet.from, packet.to]
        } else {
            [packet.to, packet.from]
        };
        let Known { vni, applied } = self.known(objects, own)?;
        let set = if is_egress {
            &applied.egress
        } else {
            &applied.ingress
        };
        let set = of_vpc(vni.get(), set.as_ref()?.id(0).get());
        let known = self.known(objects, other);
        let class = known.map(|known| known.applied.class.id(0));
        let class = class.or(other.by_shared_service.then_some(PolicyId::SHARED_SERVICE));
        let peer = class.map_or(PEER_OUTSIDE, |class| of_vpc(vni.get(), class.get()));
        let point = point(packet.protocol, packet.port);
        Some(judge(&self.maps, set, peer, &mapped(other.address?), point).0)
    }
}

/// Returns a number for each name of a VPC.
fn vni_of(pod: &Pod) -> Result<Vni> {
    let number = pod
        .vpc
        .bytes()
        .fold(1, |number: u32, byte| number.wrapping_mul(31) + u32::from(byte));
    Vni::new(number % 0xff_fffe + 1).context("a VNI")
}

/// Returns the pod at an end that policies select.
fn member(end: End<'_>) -> Option<&Pod> {
    end.pod.filter(|pod| !pod.on_host_network)
}

/// Whether a packet can go from one end to the other at all. Those of a pod to itself are not judged.
fn is_possible(objects: &Objects, packet: &Packet) -> bool {
    let is_taken = |end: End| {
        let mut members = objects.pods.iter().filter(|pod| !pod.on_host_network);
        member(end).is_none()
            && members.any(|pod| pod.addresses.into_iter().map(Some).any(|own| own == end.address))
    };
    match (member(packet.from), member(packet.to)) {
        (Some(from), Some(to)) => from.vpc == to.vpc && !std::ptr::eq(from, to),
        _ => !is_taken(packet.from) && !is_taken(packet.to),
    }
}

#[test]
fn tables_say_of_each_packet_what_the_objects_say() -> Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let seed = number("THUBAN_SEED").unwrap_or(clock);
    println!("THUBAN_SEED={seed}");
    let decisions = number("THUBAN_DECISIONS").unwrap_or(1_000_000);
    let mut random = Generator(Rng::with_seed(seed));
    let (mut made, mut judged) = (0, [0_u64; 2]);
    while made < decisions {
        let objects = random.objects();
        let world = World::new(&objects, random.0.bool())?;
        for _ in 0..OF_A_WORLD {
            let is_sent_on = random.0.u8(..10) == 0;
            let sent_on = is_sent_on.then(|| random.packet_by_shared_service(&objects));
            let packet = sent_on.flatten().unwrap_or_else(|| random.packet(&objects));
            if !is_possible(&objects, &packet) {
                continue;
            }
            for is_egress in [false, true] {
                made += 1;
                let given = world.judge(&objects, &packet, is_egress);
                let expected = objects.accept(&packet, is_egress);
                ensure!(
                    given.unwrap_or(true) == expected,
                    "the tables say {given:?}; is_egress {is_egress} {packet:#?}\n{objects:#?}"
                );
                if let Some(given) = given {
                    judged[usize::from(given)] += 1;
                }
            }
        }
    }
    println!("denied and accepted, of {made}: {judged:?}");
    ensure!(
        judged.iter().all(|count| *count > made / 10),
        "{judged:?} of {made}"
    );
    Ok(())
}

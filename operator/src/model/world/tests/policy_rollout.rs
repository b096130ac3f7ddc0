//! What packets meet while policies change, droplets apply programs late, and leaders change.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fastrand::Rng;
use thuban_api::identifiers::Vni;
use thuban_rows::{Class, Kept, LocalEndpoint, PolicyId, PolicyPorts, PolicyRule, PolicySet};

use super::super::EndpointName;
use super::policy::REST;
use super::policy_droplet::{Droplet, Program, suspicious};
use super::*;
use crate::model::policy::oracle::{End, Generator, NAMESPACES, Objects, Packet, Pod as Sample, read_set};
use crate::model::policy::{ClassContent, Profile, SetContent};

/// An endpoint, its pod's UID, and since when there is one.
struct Known {
    sample: Sample,
    uid: String,
    since: usize,
}

/// A world with its droplets, driven as the hub does.
struct Cluster {
    random: Generator,
    world: World,
    droplets: BTreeMap<String, Droplet>,
    /// What droplets must have acked, by VPC.
    steps: BTreeMap<String, BTreeMap<String, usize>>,
    objects: Objects,
    history: Vec<Objects>,
    /// The places in the history of which endpoints of a VPC may have the policies: those that its round leads from and
    /// to, and after a change of the leader those that the earlier leader's last round led from.
    rounds: BTreeMap<String, BTreeSet<usize>>,
    /// What droplets must have acked before all of a VPC have the new leader's program.
    takeovers: BTreeMap<String, BTreeMap<String, usize>>,
    known: BTreeMap<u8, Known>,
    now: u64,
    judged: [usize; 2],
    /// Packets that were denied because their class does not say enough.
    unsure: usize,
}

const VPCS: [&str; 2] = ["x", "y"];

impl Cluster {
    fn new(seed: u64) -> Self {
        let mut random = Generator(Rng::with_seed(seed));
        let mut objects = random.objects();
        objects.pods.clear();
        objects.cluster_policies.clear();
        objects.network_policies.clear();
        let mut cluster = Self {
            random,
            world: Self::empty(&objects),
            droplets: BTreeMap::new(),
            steps: BTreeMap::new(),
            history: vec![objects.clone()],
            objects,
            rounds: VPCS.map(|vpc| (vpc.to_owned(), [0].into())).into(),
            takeovers: BTreeMap::new(),
            known: BTreeMap::new(),
            now: 0,
            judged: [0; 2],
            unsure: 0,
        };
        cluster.world.stage_policies(0);
        cluster.flush();
        cluster
    }

    /// Makes a world without endpoints and policies.
    fn empty(objects: &Objects) -> World {
        let mut world = World::default();
        for number in 0..4 {
            world.set_droplet(&format!("d{number}"), Some(droplet_address(number)));
        }
        for (number, vpc_name) in VPCS.into_iter().enumerate() {
            world.set_vpc(vpc_name, Some(vpc(number as u32 + 1)));
            world.set_network(vpc_name, Some(network(vpc_name, 1)));
        }
        for name in NAMESPACES {
            world.set_namespace_labels(name, objects.namespaces.get(name).cloned());
        }
        world
    }

    /// Applies the same objects to a new world at once.
    fn anew(&self) -> World {
        let mut world = self.loaded();
        // Endpoints that were added first had classes of fewer groups, whose rows rest.
        for step in 0..4 {
            world.roll_out(step * REST);
            world.flush();
        }
        world
    }

    /// Another leader takes over. Programs on their way are lost.
    fn change_leader(&mut self) {
        self.world = self.loaded();
        let waiting = self.world.stage_policies(self.now);
        self.world.flush();
        for number in 0..4 {
            let name = format!("d{number}");
            let program = self.world.program(&name);
            let droplet = self.droplets.entry(name).or_default();
            droplet.queue.clear();
            droplet.sent = droplet.acked;
            droplet.send(Program::Snapshot(program));
        }
        self.steps = waiting
            .into_iter()
            .map(|vpc| (vpc.clone(), self.marks(&vpc)))
            .collect();
        self.takeovers = VPCS.map(|vpc| (vpc.to_owned(), self.marks(vpc))).into();
        let latest = self.history.len() - 1;
        for places in self.rounds.values_mut() {
            places.insert(latest);
        }
    }

    /// Returns what the droplets of a VPC have acked when they have acked all that they have been sent.
    fn marks(&self, vpc: &str) -> BTreeMap<String, usize> {
        let droplets = self.world.endpoint_droplets_of(vpc);
        let sent = |name: &str| self.droplets.get(name).map_or(0, |droplet| droplet.sent);
        droplets
            .into_iter()
            .map(|name| (name.to_owned(), sent(name)))
            .collect()
    }

    fn have_acked(&self, marks: &BTreeMap<String, usize>) -> bool {
        let acked = |name: &String| self.droplets.get(name).map(|droplet| droplet.acked);
        marks
            .iter()
            .all(|(name, mark)| acked(name).is_none_or(|acked| acked >= *mark))
    }

    /// What lingers on droplets goes after a while.
    fn end_lingering(&mut self) {
        let keeps = |droplet: &Droplet| {
            [1, 2]
                .map(vni)
                .iter()
                .any(|vni| droplet.kept(*vni) != Kept::Nothing)
        };
        let mut droplets = self.droplets.values();
        if droplets.all(|droplet| droplet.queue.is_empty() && !keeps(droplet)) {
            self.droplets
                .values_mut()
                .for_each(|droplet| droplet.lingering.clear());
        }
    }

    /// Returns a new world with the same objects.
    fn loaded(&self) -> World {
        let mut world = Self::empty(&self.objects);
        for (number, known) in &self.known {
            let name = Self::name(known, *number);
            let ready = self.world.endpoint(&name).unwrap().ready;
            world.set_endpoint(&name, Some(Self::endpoint(known, *number, ready)));
        }
        for ((namespace, name), spec) in &self.objects.network_policies {
            let _ = world.set_network_policy(namespace, name, 0, Some(spec));
        }
        for (name, spec) in &self.objects.cluster_policies {
            let _ = world.set_cluster_policy(name, Some(spec));
        }
        world
    }

    fn flush(&mut self) {
        for (name, delta) in self.world.flush() {
            self.droplets
                .entry(name)
                .or_default()
                .send(Program::Change(delta));
        }
    }

    fn home(number: u8) -> String {
        format!("d{}", number % 4)
    }

    fn name(known: &Known, number: u8) -> EndpointName {
        (known.sample.namespace.clone(), format!("e{number}"))
    }

    fn endpoint(known: &Known, number: u8, ready: bool) -> Endpoint {
        let mut made = endpoint(&known.sample.network, u64::from(number % 4), u64::from(number));
        if let Membership::Member(address) = &mut made.membership {
            address.address6 = match known.sample.addresses[1] {
                IpAddr::V6(address) => Some((address, 64)),
                IpAddr::V4(_) => None,
            };
        }
        made.ready = ready;
        made.pod.uid.clone_from(&known.uid);
        made.is_host = known.sample.on_host_network;
        let (labels, ports) = (known.sample.labels.clone(), known.sample.ports.clone());
        made.profile = (!made.is_host).then(|| Arc::new(Profile { labels, ports }));
        made
    }

    /// A pod goes, and another one may come in its place.
    fn replace(&mut self, number: u8) {
        if let Some(known) = self.known.remove(&number) {
            self.world.set_endpoint(&Self::name(&known, number), None);
            self.flush();
        }
        if self.random.0.u8(..4) == 0 {
            return;
        }
        let mut sample = self.random.pod(number);
        sample.network.clone_from(&sample.vpc);
        let since = self.history.len() - 1;
        let uid = format!("u{}", self.random.0.u64(..));
        let known = Known { sample, uid, since };
        let (name, made) = (Self::name(&known, number), Self::endpoint(&known, number, false));
        self.world.set_endpoint(&name, Some(made));
        self.known.insert(number, known);
        self.flush();
    }

    fn change_policy(&mut self) {
        let (namespace, name) = self.random.change_policy(&mut self.objects);
        let objects = &self.objects;
        let _ = match namespace {
            Some(namespace) => {
                let key = (namespace.clone(), name.clone());
                let spec = objects.network_policies.get(&key);
                self.world.set_network_policy(&namespace, &name, 0, spec)
            }
            None => self
                .world
                .set_cluster_policy(&name, objects.cluster_policies.get(&name)),
        };
        self.history.push(self.objects.clone());
        self.flush();
    }

    /// Does what the hub does from time to time.
    fn roll_out(&mut self) {
        let has_passed = |(_, marks): &(&String, &BTreeMap<String, usize>)| self.have_acked(marks);
        let passed = |steps: &BTreeMap<String, BTreeMap<String, usize>>| -> Vec<String> {
            let passed = steps.iter().filter(has_passed);
            passed.map(|(vpc, _)| vpc.clone()).collect()
        };
        let acked = passed(&self.steps);
        for vpc in passed(&self.takeovers) {
            self.takeovers.remove(&vpc);
        }
        let mut waiting = BTreeSet::new();
        for vpc in acked {
            self.steps.remove(&vpc);
            if self.world.policies_acked(&vpc) {
                waiting.insert(vpc);
            } else if let Some(places) = self.rounds.get_mut(&vpc)
                && !self.takeovers.contains_key(&vpc)
            {
                *places = places.last().copied().into_iter().collect();
            }
        }
        let latest = self.history.len() - 1;
        let begun = self.world.roll_out(self.now);
        for (vpc, places) in &mut self.rounds {
            if begun.contains(vpc) {
                places.insert(latest);
            } else if !self.steps.contains_key(vpc) && !waiting.contains(vpc) {
                if self.takeovers.contains_key(vpc) {
                    places.insert(latest);
                } else {
                    *places = [latest].into();
                }
            }
        }
        waiting.extend(begun);
        self.flush();
        for vpc in waiting {
            let marks = self.marks(&vpc);
            self.steps.insert(vpc, marks);
        }
    }

    /// A droplet applies and acks a program.
    fn deliver(&mut self) {
        let index = self.random.0.usize(..self.droplets.len().max(1));
        let Some(droplet) = self.droplets.values_mut().nth(index) else {
            return;
        };
        if let Some(program) = droplet.queue.pop_front() {
            droplet.apply(program);
        }
    }

    /// Endpoints that can be become ready.
    fn provision(&mut self) {
        let numbers: Vec<u8> = self.known.keys().copied().collect();
        for number in numbers {
            let known = &self.known[&number];
            let name = Self::name(known, number);
            let is_told = self.local(number).is_some() && self.droplets[&Self::home(number)].queue.is_empty();
            if is_told && !self.world.is_policy_pending(&name) {
                let ready = Self::endpoint(known, number, true);
                self.world.set_endpoint(&name, Some(ready));
            }
        }
        self.flush();
    }

    /// Returns what the endpoint's droplet has of its local row and of what it keeps.
    fn local(&self, number: u8) -> Option<LocalEndpoint> {
        let known = self.known.get(&number)?;
        let key = Key::Local(self.vni(known), [10, 0, 0, number].into());
        let local = self.droplets.get(&Self::home(number))?.wired.get(&key)?;
        Some(local.clone()).filter(|local| local.pod_uid == known.uid)
    }

    fn vni(&self, known: &Known) -> Vni {
        self.world.vni(&known.sample.vpc).unwrap()
    }

    /// Returns whether the droplet lets a packet pass by a set, to or from a class, and whether the class says too
    /// little. None: it doesn't know one of them.
    fn judge(
        &self,
        droplet: &str,
        vni: Vni,
        (set, class): (Option<PolicyId>, Option<PolicyId>),
        (address, protocol, port): (IpAddr, u8, u16),
    ) -> Option<(bool, bool)> {
        let Some(set) = set else {
            return Some((true, false));
        };
        let droplet = self.droplets.get(droplet)?;
        let (
            Row::PolicySet(PolicySet {
                is_egress,
                is_isolated,
                rules,
                ..
            }),
            set_lingers,
        ) = droplet.policy_row(&Key::PolicySet(vni, set))?
        else {
            return None;
        };
        // A new leader that finds no policies in a VPC gives nobody a class.
        let Some(class) = class else {
            return Some((false, true));
        };
        let (mut class, class_lingers) = match class {
            PolicyId::PLAIN => (ClassContent::default(), false),
            id => match droplet.policy_row(&Key::Class(vni, id))? {
                (Row::Class(Class { groups, names, .. }), lingers) => {
                    (ClassContent { groups, names }, lingers)
                }
                _ => return None,
            },
        };
        let says = match (set_lingers, class_lingers) {
            (false, true) => droplet.named.get(&vni).cloned(),
            (true, true) if droplet.of_several.contains(&vni) => droplet.named.get(&vni).cloned(),
            (true, false) => Some(Droplet::named_by(&droplet.tables, vni)),
            _ => None,
        };
        let is_named = |rule: &PolicyRule| {
            let mut ports = rule.ports.iter();
            ports.any(|ports| matches!(ports, PolicyPorts::Named(..)))
        };
        if says.is_some() && rules.iter().any(is_named) {
            // transitd denies less here.
            return Some((false, true));
        }
        let asked = || rules.iter().flat_map(|rule| &rule.groups);
        let is_unsure = |group: &&u64| {
            says.as_ref().is_some_and(|says| !says.contains(group)) && !class.groups.contains(group)
        };
        let unsure: BTreeSet<u64> = asked().filter(is_unsure).copied().collect();
        let rules = suspicious(rules, &mut class, &unsure);
        let set = SetContent {
            is_egress,
            is_isolated,
            rules: rules.into_iter().map(Arc::new).collect(),
        };
        let passes = read_set(Some(&set), Some(&class), address, protocol, port);
        Some((passes, says.is_some()))
    }

    /// Asserts that packets between ready endpoints meet the old policies or the new ones.
    fn check(&mut self) {
        let numbers: Vec<u8> = self.known.keys().copied().collect();
        let (protocol, port) = ([6, 17][self.random.0.usize(..2)], self.random.0.u16(1..5));
        let family = self.random.0.usize(..2);
        for (from, to) in numbers
            .iter()
            .flat_map(|from| numbers.iter().map(move |to| (*from, *to)))
        {
            let (Some(sender), Some(receiver)) = (self.local(from), self.local(to)) else {
                continue;
            };
            let [source, destination] = [from, to].map(|number| &self.known[&number]);
            if from == to || !(sender.ready && receiver.ready) || source.sample.vpc != destination.sample.vpc
            {
                continue;
            }
            let end = |known: &'_ Known| Some(known.sample.addresses[family]);
            let vni = self.vni(source);
            let judging = Self::home(to);
            let ingress = (receiver.ingress_set, sender.class);
            let egress = (sender.egress_set, receiver.class);
            let packet = Packet {
                from: End {
                    address: end(source),
                    pod: Some(&source.sample),
                    by_shared_service: false,
                },
                to: End {
                    address: end(destination),
                    pod: Some(&destination.sample),
                    by_shared_service: false,
                },
                protocol,
                port,
                behind: &[],
            };
            let round = &self.rounds[&source.sample.vpc];
            let old = *round.first().unwrap();
            let is_young = source.since > old || destination.since > old;
            let places: Vec<usize> = if is_young {
                (old..self.history.len()).collect()
            } else {
                round.iter().copied().collect()
            };
            for (is_egress, given, other) in [(false, ingress, end(source)), (true, egress, end(destination))]
            {
                let judged = self.judge(&judging, vni, given, (other.unwrap(), protocol, port));
                let Some((passes, is_unsure)) = judged else {
                    assert!(is_young, "{from} to {to}: a row is missing");
                    continue;
                };
                if is_unsure && !passes {
                    self.unsure += 1;
                    continue;
                }
                let mut expected = places
                    .iter()
                    .map(|place| self.history[*place].accept(&packet, is_egress));
                assert!(
                    expected.any(|expected| expected == passes),
                    "{from} to {to}, egress {is_egress}: {passes}, of {places:?}\n{packet:#?}\n{:#?}\n{:#?}",
                    self.history[old],
                    self.history[*places.last().unwrap()],
                );
                self.judged[usize::from(passes)] += usize::from(given.0.is_some());
            }
        }
    }

    fn converge(&mut self) {
        for _ in 0..2000 {
            self.deliver();
            self.roll_out();
            self.provision();
        }
    }
}

#[test]
fn packets_meet_the_old_policies_or_the_new_ones() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let seed = number("THUBAN_SEED").unwrap_or(0x7468_7562_616e);
    let runs = number("THUBAN_RUNS").unwrap_or(20);
    let (mut judged, mut unsure) = ([0; 2], 0);
    for seed in seed..seed + runs {
        println!("THUBAN_SEED={seed}");
        let mut cluster = Cluster::new(seed);
        for _ in 0..600 {
            if cluster.random.0.u8(..60) == 0 {
                cluster.change_leader();
            }
            match cluster.random.0.u8(..20) {
                0 => {
                    let number = cluster.random.0.u8(..6);
                    cluster.replace(number);
                }
                1 => cluster.change_policy(),
                2..6 => cluster.roll_out(),
                6 => cluster.provision(),
                7 if cluster.random.0.u8(..10) == 0 => {
                    cluster.now += REST;
                    cluster.end_lingering();
                }
                _ => cluster.deliver(),
            }
            cluster.check();
        }
        cluster.converge();
        let latest = cluster.history.len() - 1;
        assert!(cluster.rounds.values().all(|round| *round == [latest].into()));
        cluster.end_lingering();
        for _ in 0..20 {
            cluster.check();
        }
        for _ in 0..4 {
            cluster.now += REST;
            cluster.converge();
        }
        assert_eq!(programs(&cluster.world), programs(&cluster.anew()));
        judged = [0, 1].map(|index| judged[index] + cluster.judged[index]);
        unsure += cluster.unsure;
    }
    // A new leader costs few packets, though policies change whenever nobody leads here.
    let all: usize = judged.iter().sum();
    assert!(unsure > 0 && unsure < all / 8, "{unsure} of {judged:?}");
    assert!(judged.iter().all(|count| *count > 1000), "{judged:?}");
}

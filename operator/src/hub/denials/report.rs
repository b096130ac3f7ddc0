//! Reads a droplet's report: which policies denied how many packets, and whose.
//!
//! Invariant: a false report is bounded in its numbers. It changes what is told of the policies of sets that the
//! droplet was asked of, and nothing else.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use thuban_api::identifiers::Vni;
use thuban_api::{DeniedPeer, PacketDirection};
use thuban_proto::transit::Denial;
use thuban_rows::PolicyId;

use super::VpcSets;
use crate::model::denial_reports::{Gathered, ReportedSet, keep_latest, note_peers, sum};
use crate::model::rows;
use crate::model::world::World;

/// The most packets that one report adds to the count of a policy, or of a reason at a pod: 300 million a second in an
/// hour, the longest time between two reports.
pub(super) const MAX_PACKETS: u64 = 1 << 40;
/// The longest time that a packet is old: a year.
const MAX_AGE: Duration = Duration::from_hours(365 * 24);

/// What a set denied by the rule of a rank, or by none.
#[derive(Debug)]
pub(super) struct Verdicts<'a> {
    set: &'a ReportedSet,
    rank: u32,
    packets: u64,
    /// The latest first, and of each peer one.
    last: Vec<Packet>,
}

impl<'a> Verdicts<'a> {
    /// Joins the denials of sets that were asked of. What can't be read doesn't count.
    pub fn read(vpcs: &'a [Arc<VpcSets>], denials: &[Denial]) -> Vec<Self> {
        let now = Timestamp::now();
        let mut all: BTreeMap<(Vni, PolicyId, u32), Self> = BTreeMap::new();
        for denial in denials {
            let key = Vni::new(denial.vni).zip(PolicyId::new(denial.set));
            let set = key.and_then(|(vni, id)| {
                let vpc = vpcs.iter().find(|vpc| vpc.vni == vni)?;
                vpc.sets.get(&id)
            });
            let Some((set, packet)) = set.zip(Packet::read(denial, now)) else {
                continue;
            };
            let rank = denial.rank;
            let verdicts = all.entry((set.vni, set.id, rank)).or_insert_with(|| Self {
                set,
                rank,
                packets: 0,
                last: Vec::new(),
            });
            verdicts.packets = sum(verdicts.packets, denial.packets);
            verdicts.last.push(packet);
        }
        for verdicts in all.values_mut() {
            keep_latest(
                &mut verdicts.last,
                |one, other| other.time.cmp(&one.time),
                Packet::has_sides_of,
            );
        }
        all.into_values().collect()
    }

    /// Finds the names of policies and pods. None: the set is gone.
    pub fn name(&self, world: &World) -> Option<Named> {
        let (policies, is_egress) = world.denying(self.set, self.rank)?;
        let packets = self.last.iter();
        let peers = packets.map(|packet| packet.peer(world, self.set.vni, is_egress));
        let gathered = Gathered {
            packets: self.packets,
            last_peers: peers.collect(),
        };
        Some(Named { policies, gathered })
    }
}

/// What some policies denied, each of them all of it.
#[derive(Debug)]
pub(super) struct Named {
    policies: Vec<Arc<str>>,
    gathered: Gathered,
}

/// Returns what each policy denied.
pub(super) fn by_policy(named: Vec<Named>) -> HashMap<Arc<str>, Gathered> {
    let mut all: HashMap<Arc<str>, Gathered> = HashMap::new();
    for Named { policies, gathered } in named {
        for policy in policies {
            let own = all.entry(policy).or_default();
            own.packets = sum(own.packets, gathered.packets);
            own.last_peers.extend_from_slice(&gathered.last_peers);
        }
    }
    for gathered in all.values_mut() {
        gathered.packets = gathered.packets.min(MAX_PACKETS);
        note_peers(&mut gathered.last_peers, []);
    }
    all
}

/// A packet that a droplet reports.
#[derive(Debug)]
struct Packet {
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    port: Option<u16>,
    /// In RFC 3339 format, of one length, so that the order of texts is that of times.
    time: String,
}

impl Packet {
    fn read(denial: &Denial, now: Timestamp) -> Option<Self> {
        let age = Duration::from_millis(denial.age_ms).min(MAX_AGE);
        let time = now.saturating_sub(SignedDuration::try_from(age).ok()?).ok()?;
        Some(Self {
            source: rows::address(&denial.source)?,
            destination: rows::address(&denial.destination)?,
            protocol: u8::try_from(denial.protocol).ok()?,
            port: u16::try_from(denial.port).ok().filter(|port| *port != 0),
            time: format!("{time:.3}"),
        })
    }

    fn has_sides_of(&self, other: &Self) -> bool {
        let sides = |packet: &Self| (packet.source, packet.destination, packet.protocol, packet.port);
        sides(self) == sides(other)
    }

    /// Returns the other side of the packet. Only pods of the VPC have names.
    fn peer(&self, world: &World, vni: Vni, is_egress: bool) -> DeniedPeer {
        let (direction, own, other) = if is_egress {
            (PacketDirection::Egress, self.source, self.destination)
        } else {
            (PacketDirection::Ingress, self.destination, self.source)
        };
        let protocol = match self.protocol {
            1 => "ICMP".to_owned(),
            6 => "TCP".to_owned(),
            17 => "UDP".to_owned(),
            58 => "ICMPv6".to_owned(),
            132 => "SCTP".to_owned(),
            number => number.to_string(),
        };
        DeniedPeer {
            time: self.time.clone(),
            direction,
            pod: world.pod_at(vni, own),
            address: other.to_string(),
            peer_pod: world.pod_at(vni, other),
            protocol,
            port: self.port,
        }
    }
}

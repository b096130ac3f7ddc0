//! The packet that a probe of a path sends, and the droplets that it may pass.
//!
//! Invariant: what droplets do with the packet is told only if all targets are pods of the asker's namespace. Verdicts
//! would tell on which droplet another namespace's pod is.

use std::net::{IpAddr, Ipv4Addr};

use thuban_api::identifiers::Vni;
use thuban_common::packet::ipv4::ICMP;
use thuban_common::packet::ipv6::ICMPV6;

use super::{Delivery, Goal, Packet, Path, Place, Question, Target};
use crate::model::world::{RoleKind, World};

/// The most droplets that one probe asks: with full sets of roles, and backends on as many droplets as are looked at.
const MAX_DROPLETS: usize = 33;

/// A probe of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbePlan {
    /// The asker's.
    pub namespace: String,
    pub vni: Vni,
    pub source: IpAddr,
    pub destination: IpAddr,
    /// The number of TCP, UDP, ICMP or ICMPv6.
    pub protocol: u8,
    /// None: an echo is sent.
    pub port: Option<u16>,
    /// The droplets that the packet may pass, in order: those of the source, of dividers, of bouncers, of targets.
    pub droplets: Vec<(String, Ipv4Addr)>,
    /// Whether the asker may hear what droplets do with the packet.
    pub is_told: bool,
    /// The target, as the asker may hear of it.
    pub target: String,
}

impl ProbePlan {
    /// Returns the droplet of the pod that sends.
    pub fn home(&self) -> &str {
        self.droplets.first().map_or("", |(name, _)| name.as_str())
    }

    /// Returns the name of a droplet on the way.
    pub fn droplet_at(&self, address: Ipv4Addr) -> Option<&str> {
        let mut droplets = self.droplets.iter();
        let found = droplets.find(|(_, known)| *known == address);
        found.map(|(name, _)| name.as_str())
    }
}

impl World {
    /// Returns the probe of a path; none if an end of the path is not there, or has no network.
    pub fn plan_probe(&self, question: &Question, delivery: &dyn Delivery) -> Option<ProbePlan> {
        let path = Path {
            world: self,
            question,
            delivery,
            steps: Vec::new(),
        };
        let source = path.own_place(&question.source).ok()?;
        let (goal, _) = path.target(&source).ok()?;
        path.plan(&source, &goal)
    }
}

impl<'a> Path<'a> {
    fn plan(&self, source: &Place<'a>, goal: &Goal<'a>) -> Option<ProbePlan> {
        let asked = |address: IpAddr| Packet {
            is_v6: address.is_ipv6(),
            protocol: self.question.protocol,
            port: self.question.port,
        };
        let (destination, packet, targets, target) = match goal {
            Goal::Pod(place) => {
                let address = match self.question.target {
                    Target::Address(address) => address,
                    Target::Pod(_) | Target::Service { .. } => place.address.address.into(),
                };
                (address, asked(address), vec![*place], place.who().to_owned())
            }
            Goal::Service(reached) => {
                let pods = self.pods_behind(source, reached);
                (
                    reached.address(),
                    self.served(reached),
                    pods,
                    "a backend".to_owned(),
                )
            }
            Goal::Outside(address) => (*address, asked(*address), Vec::new(), address.to_string()),
        };
        let is_own = match goal {
            Goal::Service(reached) => self.is_own(reached),
            Goal::Pod(_) | Goal::Outside(_) => true,
        };
        let is_told = is_own && targets.iter().all(|target| target.is_own);
        let told = if is_told { &targets[..] } else { &[] };
        let protocol = match packet.port {
            Some(_) => packet.protocol,
            None if packet.is_v6 => ICMPV6,
            None => ICMP,
        };
        Some(ProbePlan {
            namespace: self.asker().to_owned(),
            vni: source.vpc.vni,
            source: source.address_of(packet.is_v6)?,
            destination,
            protocol,
            port: packet.port,
            droplets: self.passed(source, told)?,
            is_told,
            target,
        })
    }

    /// Returns the droplets that packets to these targets may pass.
    fn passed(&self, source: &Place<'a>, targets: &[Place<'a>]) -> Option<Vec<(String, Ipv4Addr)>> {
        let home = &source.endpoint.droplet;
        let apart = targets.iter().copied();
        let apart: Vec<Place<'a>> = apart.filter(|target| target.endpoint.droplet != *home).collect();
        let roles = |kind: RoleKind, target: &Place<'a>| -> Vec<String> {
            let rows = self.world.serving_rows(kind, target.name).into_iter();
            rows.map(|(droplet, _)| droplet).collect()
        };
        let dividers = apart
            .iter()
            .filter(|target| target.endpoint.network != source.endpoint.network)
            .flat_map(|target| roles(RoleKind::Divider, target));
        let bouncers = apart.iter().flat_map(|target| roles(RoleKind::Bouncer, target));
        let homes = apart.iter().map(|target| target.endpoint.droplet.clone());
        let mut droplets = vec![(home.clone(), self.world.droplet_address(home)?)];
        for droplet in dividers.chain(bouncers).chain(homes) {
            let is_known = droplets.iter().any(|(known, _)| *known == droplet);
            if let Some(address) = self.world.droplet_address(&droplet).filter(|_| !is_known) {
                droplets.push((droplet, address));
            }
        }
        droplets.truncate(MAX_DROPLETS);
        Some(droplets)
    }
}

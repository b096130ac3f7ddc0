//! What droplets say of the backends that they check, and the members of load balancers as their Vips show them.
//!
//! Invariant: a droplet is heard only of backends that live on it, and only of services with a check. A backend of
//! which nothing is known counts as passing.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::net::IpAddr;
use std::ops::Bound::{Excluded, Unbounded};

use thuban_api::identifiers::Vni;
use thuban_api::{MAX_VIP_MEMBERS, MemberState, VipMember};

use super::{EndpointName, Owner, Service, World};

/// A Service by namespace and name, which are also those of its Vip.
pub type VipName = (String, String);

/// What a Vip says of its members.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VipMembers {
    /// Those first that get no new connections, at most [`MAX_VIP_MEMBERS`].
    pub listed: Vec<VipMember>,
    pub count: u32,
    pub failing: u32,
}

#[derive(Debug, Default)]
pub(super) struct Checks {
    /// Backends that fail, each with the reason, by service.
    failing: BTreeMap<EndpointName, BTreeMap<IpAddr, String>>,
    /// Services with backends that changed their state since rows were made.
    changed: BTreeSet<EndpointName>,
    /// Services whose Vips may say something else of their members.
    unwritten: BTreeSet<VipName>,
    /// The one of them that was taken last. Those behind it come next, so that no tenant's changes hold up another's.
    taken: Option<VipName>,
}

impl Checks {
    pub fn fails(&self, name: &EndpointName, backend: IpAddr) -> bool {
        self.why(name, backend).is_some()
    }

    fn why(&self, name: &EndpointName, backend: IpAddr) -> Option<&String> {
        self.failing.get(name)?.get(&backend)
    }

    /// Notes that the members of a service may be others now.
    pub fn note_members(&mut self, name: &EndpointName, service: &Service) {
        if !service.fronts.is_empty() {
            self.unwritten.insert((name.0.clone(), service.name.clone()));
        }
    }

    /// Takes the next load balancer whose Vip may say something else.
    fn next_unwritten(&mut self) -> Option<VipName> {
        let all = &self.unwritten;
        let later = self.taken.as_ref().and_then(|last| {
            let mut later = all.range::<VipName, _>((Excluded(last), Unbounded));
            later.next()
        });
        let name = later.or_else(|| all.first())?.clone();
        self.unwritten.remove(&name);
        self.taken = Some(name.clone());
        Some(name)
    }

    /// Forgets what was said of backends that a service has no longer, or has elsewhere.
    pub fn retain(&mut self, name: &EndpointName, old: Option<&Service>, new: Option<&Service>) {
        let Some(failing) = self.failing.get_mut(name) else {
            return;
        };
        let (old, new) = (old.map(|old| &old.homes), new.filter(|new| new.check.is_some()));
        failing.retain(|backend, _| {
            let home = new.and_then(|new| new.homes.get(backend));
            home.is_some() && home == old.and_then(|old| old.get(backend))
        });
        if failing.is_empty() {
            self.failing.remove(name);
        }
    }
}

impl World {
    /// Notes what a droplet says of a backend of a front: why it fails, if it does. Rows follow with
    /// [`Self::follow_checks`].
    pub fn note_check(
        &mut self,
        droplet: &str,
        (vni, front): (Vni, IpAddr),
        backend: IpAddr,
        failure: Option<String>,
    ) {
        let Some(name) = self.service_at(front).cloned() else {
            return;
        };
        let is_its = self.service(&name).is_some_and(|service| {
            service.check.is_some()
                && service.fronts.iter().any(|(address, _)| *address == front)
                && service.homes.get(&backend).is_some_and(|home| home == droplet)
                && self.network_vni(&service.network) == Some(vni)
        });
        if !is_its {
            return;
        }
        let checks = &mut self.services.checks;
        let has_changed = if let Some(why) = failure {
            let failing = checks.failing.entry(name.clone()).or_default();
            failing.insert(backend, why).is_none()
        } else {
            let failing = checks.failing.get_mut(&name);
            failing.is_some_and(|failing| failing.remove(&backend).is_some())
        };
        if has_changed {
            checks.changed.insert(name);
        }
    }

    /// Makes the rows of services anew whose backends changed their state. The caller bounds how often that is: each
    /// costs a row on every droplet.
    pub fn follow_checks(&mut self) {
        for name in mem::take(&mut self.services.checks.changed) {
            if let Some(service) = self.services.all.get(&name) {
                self.services.checks.note_members(&name, service);
            }
            self.dirty.insert(Owner::Service(name));
        }
    }

    /// Takes load balancers whose Vips may say something else of their members, at most so many.
    pub fn take_unwritten_members(&mut self, most: usize) -> Vec<(VipName, VipMembers)> {
        let checks = &mut self.services.checks;
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some(name) = checks.next_unwritten()
        {
            taken.push(name);
        }
        let members = taken.into_iter().map(|name| {
            let members = self.vip_members(&name);
            (name, members)
        });
        members.collect()
    }

    /// Gives back what could not be written.
    pub fn give_members_back(&mut self, name: VipName) {
        self.services.checks.unwritten.insert(name);
    }

    fn vip_members(&self, name: &VipName) -> VipMembers {
        let names = self.services.by_name.get(name).into_iter().flatten();
        let known = names.filter_map(|name| Some((name, self.service(name)?)));
        let fronted = known.filter(|(_, service)| !service.fronts.is_empty());
        let Some((name, service)) = fronted.max_by_key(|(name, service)| (&service.born, *name)) else {
            return VipMembers::default();
        };
        let ports = service.fronts.iter().flat_map(|(_, ports)| ports);
        let addresses: BTreeSet<IpAddr> = ports
            .flat_map(|port| port.backends.iter().map(|backend| backend.address))
            .collect();
        let vni = self.network_vni(&service.network);
        let member = |address: &IpAddr| {
            let droplet = service.homes.get(address).cloned().unwrap_or_default();
            let endpoint = vni.and_then(|vni| self.holder(vni, *address));
            let (state, why) = if self.services.suspects.contains(&droplet) {
                let why = format!("the operator does not hear of droplet {droplet}");
                (MemberState::Suspect, why)
            } else if let Some(why) = self.services.checks.why(name, *address) {
                (MemberState::Failing, why.clone())
            } else {
                (MemberState::Ready, String::new())
            };
            VipMember {
                endpoint: endpoint.map(|endpoint| endpoint.1.clone()).unwrap_or_default(),
                address: address.to_string(),
                droplet,
                state,
                why,
            }
        };
        let mut listed: Vec<VipMember> = addresses.iter().map(member).collect();
        let failing = listed
            .iter()
            .filter(|member| member.state == MemberState::Failing);
        let failing = u32::try_from(failing.count()).unwrap_or(u32::MAX);
        let count = u32::try_from(listed.len()).unwrap_or(u32::MAX);
        // The order of the addresses stays within a state.
        listed.sort_by_key(|member| member.state);
        listed.truncate(MAX_VIP_MEMBERS);
        VipMembers {
            listed,
            count,
            failing,
        }
    }
}

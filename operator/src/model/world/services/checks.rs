//! What droplets say of the backends that they check, and the members of load balancers as their Vips show them.
//!
//! Invariant: a droplet is heard only of backends that live on it, and only of services with a check. A backend of
//! which nothing is known counts as passing. However often backends change their state, the rows of a service and of a
//! VPC follow only as often as their budgets allow, and then with the latest states.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::net::IpAddr;
use std::ops::Bound::{Excluded, Unbounded};

use thuban_api::identifiers::Vni;
use thuban_api::{MAX_VIP_MEMBERS, MemberState, VipMember};

use super::{EndpointName, Owner, Service, World};
use crate::model::budgets::Budgets;

/// The milliseconds that each change of a service's backends costs the service, and the most changes at once. Each
/// change is a row on every droplet.
const SERVICE_BUDGET: (u64, u64) = (10_000, 5);
/// The same for all services of a VPC together.
const VPC_BUDGET: (u64, u64) = (1_000, 50);

/// How long a failure counts that its droplet does not repeat, milliseconds. Droplets repeat all states each 30 s.
const REPEATED_WITHIN: u64 = 90_000;

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

/// Backends that fail, each with the reason, by service.
type Failing = BTreeMap<EndpointName, BTreeMap<IpAddr, String>>;

#[derive(Debug)]
pub(super) struct Checks {
    /// By what droplets said last.
    heard: Failing,
    /// Those of them that were not repeated since a time, while their droplet had a stream.
    unrepeated: BTreeMap<(EndpointName, IpAddr), u64>,
    /// As rows and Vips have it.
    applied: Failing,
    /// Services with backends that changed their state since rows were made, and since when they wait; none: since now.
    changed: BTreeMap<EndpointName, Option<u64>>,
    of_services: Budgets<EndpointName>,
    /// None: the VPC is not known.
    of_vpcs: Budgets<Option<Vni>>,
    /// Services whose Vips may say something else of their members.
    unwritten: BTreeSet<VipName>,
    /// The one of them that was taken last. Those behind it come next, so that no tenant's changes hold up another's.
    taken: Option<VipName>,
}

impl Default for Checks {
    fn default() -> Self {
        Self {
            heard: Failing::new(),
            unrepeated: BTreeMap::new(),
            applied: Failing::new(),
            changed: BTreeMap::new(),
            of_services: Budgets::new(SERVICE_BUDGET.0, SERVICE_BUDGET.1),
            of_vpcs: Budgets::new(VPC_BUDGET.0, VPC_BUDGET.1),
            unwritten: BTreeSet::new(),
            taken: None,
        }
    }
}

impl Checks {
    /// Whether the backend is left out because of its check.
    pub fn fails(&self, name: &EndpointName, backend: IpAddr) -> bool {
        self.why(name, backend).is_some()
    }

    fn why(&self, name: &EndpointName, backend: IpAddr) -> Option<&String> {
        self.applied.get(name)?.get(&backend)
    }

    /// Notes why a backend fails, if it does.
    fn hear(&mut self, name: EndpointName, backend: IpAddr, failure: Option<String>) {
        self.unrepeated.remove(&(name.clone(), backend));
        let has_changed = if let Some(why) = failure {
            let failing = self.heard.entry(name.clone()).or_default();
            failing.insert(backend, why).is_none()
        } else if let Some(failing) = self.heard.get_mut(&name) {
            let has_changed = failing.remove(&backend).is_some();
            if failing.is_empty() {
                self.heard.remove(&name);
            }
            has_changed
        } else {
            false
        };
        if has_changed {
            self.changed.entry(name).or_default();
        }
    }

    /// Whether rows say the same of a service's backends as droplets did last.
    fn is_applied(&self, name: &EndpointName) -> bool {
        let backends = |failing: &Failing| -> Vec<IpAddr> {
            let of_service = failing.get(name).into_iter().flatten();
            of_service.map(|(backend, _)| *backend).collect()
        };
        backends(&self.heard) == backends(&self.applied)
    }

    fn apply(&mut self, name: &EndpointName) {
        if let Some(failing) = self.heard.get(name) {
            self.applied.insert(name.clone(), failing.clone());
        } else {
            self.applied.remove(name);
        }
    }

    /// Takes a change from the budgets of a service and its VPC. Returns whether it may be made now.
    fn may_change(&mut self, name: &EndpointName, vni: Option<Vni>, now: u64) -> bool {
        let may = self.of_services.has_left(name, now) && self.of_vpcs.has_left(&vni, now);
        if may {
            self.of_services.spend(name.clone(), now);
            self.of_vpcs.spend(vni, now);
        }
        may
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
        let (old, new) = (old.map(|old| &old.homes), new.filter(|new| new.check.is_some()));
        for known in [&mut self.heard, &mut self.applied] {
            let Some(failing) = known.get_mut(name) else {
                continue;
            };
            failing.retain(|backend, _| {
                let home = new.and_then(|new| new.homes.get(backend));
                home.is_some() && home == old.and_then(|old| old.get(backend))
            });
            if failing.is_empty() {
                known.remove(name);
            }
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
        self.services.checks.hear(name, backend, failure);
    }

    /// Forgets failures that droplets have not repeated for [`REPEATED_WITHIN`], though they are connected. A droplet
    /// says once that it no longer checks a backend, and that may get lost. `now`: milliseconds since any time.
    pub fn forget_unrepeated(&mut self, now: u64, is_connected: impl Fn(&str) -> bool) {
        let (all, checks) = (&self.services.all, &mut self.services.checks);
        let (mut unrepeated, mut over) = (BTreeMap::new(), Vec::new());
        for (name, failing) in &checks.heard {
            let homes = all.get(name).map(|service| &service.homes);
            for backend in failing.keys() {
                let home = homes.and_then(|homes| homes.get(backend));
                if !home.is_some_and(|home| is_connected(home)) {
                    continue;
                }
                let key = (name.clone(), *backend);
                let since = checks.unrepeated.get(&key).copied().unwrap_or(now);
                if now.saturating_sub(since) >= REPEATED_WITHIN {
                    over.push(key);
                } else {
                    unrepeated.insert(key, since);
                }
            }
        }
        checks.unrepeated = unrepeated;
        for (name, backend) in over {
            checks.hear(name, backend, None);
        }
    }

    /// Makes the rows of services anew whose backends changed their state, as far as the budgets of services and VPCs
    /// allow. The others wait, and get the states of then. `now`: milliseconds since any time.
    pub fn follow_checks(&mut self, now: u64) {
        let changed = mem::take(&mut self.services.checks.changed);
        let since = |(name, since): (EndpointName, Option<u64>)| (since.unwrap_or(now), name);
        let mut changed: Vec<(u64, EndpointName)> = changed.into_iter().map(since).collect();
        // Services that change often don't hold up others of their VPC.
        changed.sort_unstable();
        for (since, name) in changed {
            let Some(service) = self.service(&name) else {
                continue;
            };
            let vni = self.network_vni(&service.network);
            let checks = &mut self.services.checks;
            if checks.is_applied(&name) {
                // Only reasons may be others.
                checks.apply(&name);
            } else if checks.may_change(&name, vni, now) {
                self.apply_checks(name);
            } else {
                checks.changed.insert(name, Some(since));
            }
        }
        let checks = &mut self.services.checks;
        checks.of_services.forget_rested(now);
        checks.of_vpcs.forget_rested(now);
    }

    /// Makes the rows of all services anew whose backends changed their state. No droplet has any row yet.
    pub fn adopt_checks(&mut self) {
        for name in mem::take(&mut self.services.checks.changed).into_keys() {
            self.apply_checks(name);
        }
    }

    fn apply_checks(&mut self, name: EndpointName) {
        let Some(service) = self.services.all.get(&name) else {
            return;
        };
        self.services.checks.apply(&name);
        self.services.checks.note_members(&name, service);
        self.dirty.insert(Owner::Service(name));
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

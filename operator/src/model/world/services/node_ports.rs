//! The NodePorts of services. A port that passes from one VPC to another rests in between: droplets that still have the
//! old service's row would send the new one's clients to it.
//!
//! Invariant: no row gives a service a port that a service of another VPC had, until the hub, which knows what droplets
//! have acked, ends the rest ([`World::end_rests`]).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use thuban_api::identifiers::Vni;

use super::{EndpointName, Owner, World};

/// An IP protocol number and a port.
pub type NodePort = (u8, u16);

/// The identity of a rest.
pub type RestId = u64;

#[derive(Debug, Default)]
pub(in super::super) struct NodePorts {
    /// The ports of each service by its rows, and the VNI of these.
    held: HashMap<EndpointName, (Vni, BTreeSet<NodePort>)>,
    /// The services that have each port: one, if no cache is late.
    holders: HashMap<NodePort, BTreeMap<EndpointName, Vni>>,
    /// The VNIs that each port was of until lately.
    resting: HashMap<NodePort, BTreeMap<RestId, Vni>>,
    /// The rest of all ports: an earlier leader may have told droplets of any. Only recorded ports are given meanwhile.
    unknown: Option<RestId>,
    next: RestId,
    begun: Vec<RestId>,
}

impl NodePorts {
    fn begin(&mut self) -> RestId {
        self.next += 1;
        self.begun.push(self.next);
        self.next
    }

    /// Whether rows may give the port to a service of a VPC. `recorded`: the service had it before.
    pub fn is_free(&self, port: NodePort, vni: Vni, recorded: bool) -> bool {
        let resting = self.resting.get(&port).into_iter().flat_map(BTreeMap::values);
        let held = self.holders.get(&port).into_iter().flat_map(BTreeMap::values);
        let is_others = resting.chain(held).any(|of| *of != vni);
        !is_others && (recorded || self.unknown.is_none())
    }

    /// Notes the ports that a service has from now on, if any.
    fn set(&mut self, name: &EndpointName, now: Option<(Vni, BTreeSet<NodePort>)>) {
        let now = now.filter(|(_, ports)| !ports.is_empty());
        let old = match &now {
            Some(now) => self.held.insert(name.clone(), now.clone()),
            None => self.held.remove(name),
        };
        for port in old.iter().flat_map(|(_, ports)| ports) {
            if let Some(holders) = self.holders.get_mut(port) {
                holders.remove(name);
                if holders.is_empty() {
                    self.holders.remove(port);
                }
            }
        }
        if let Some((vni, ports)) = &now {
            for port in ports {
                self.holders.entry(*port).or_default().insert(name.clone(), *vni);
            }
        }
        let Some((vni, ports)) = old else { return };
        let stays = |port: &NodePort| {
            now.as_ref()
                .is_some_and(|(of, ports)| *of == vni && ports.contains(port))
        };
        let gone: Vec<NodePort> = ports.into_iter().filter(|port| !stays(port)).collect();
        if !gone.is_empty() {
            let rest = self.begin();
            for port in gone {
                self.resting.entry(port).or_default().insert(rest, vni);
            }
        }
    }
}

impl World {
    /// Lets all ports rest: an earlier leader may have told droplets of any.
    pub fn distrust_node_ports(&mut self) {
        let rest = self.services.node_ports.begin();
        self.services.node_ports.unknown = Some(rest);
    }

    /// Whether only recorded ports are given.
    pub fn distrusts_node_ports(&self) -> bool {
        self.services.node_ports.unknown.is_some()
    }

    /// Returns the rests that began since the last call.
    pub fn begun_rests(&mut self) -> Vec<RestId> {
        std::mem::take(&mut self.services.node_ports.begun)
    }

    /// Ends these rests. Services that wait for their ports get them by the next flush.
    pub fn end_rests(&mut self, over: &BTreeSet<RestId>) {
        if over.is_empty() {
            return;
        }
        let ports = &mut self.services.node_ports;
        ports.resting.retain(|_, rests| {
            rests.retain(|rest, _| !over.contains(rest));
            !rests.is_empty()
        });
        ports.unknown = ports.unknown.filter(|rest| !over.contains(rest));
        let waiting = self.services.exposed.iter().filter(|name| {
            let wanted = self.wanted_node_ports(name);
            wanted.is_some_and(|(_, ports)| ports != self.node_ports_of(name))
        });
        let waiting: Vec<_> = waiting.cloned().map(Owner::Service).collect();
        self.dirty.extend(waiting);
    }

    /// Whether a service has the port by its rows.
    pub(in super::super) fn is_node_port(&self, port: NodePort) -> bool {
        self.services.node_ports.holders.contains_key(&port)
    }

    /// Returns the ports that a service has by its rows.
    pub fn node_ports_of(&self, name: &EndpointName) -> BTreeSet<NodePort> {
        let held = self.services.node_ports.held.get(name);
        held.map(|(_, ports)| ports.clone()).unwrap_or_default()
    }

    /// Returns the ports of a service that rest.
    pub fn resting_node_ports(&self, name: &EndpointName) -> BTreeSet<NodePort> {
        let wanted = self.wanted_node_ports(name).map(|(_, ports)| ports);
        let held = self.node_ports_of(name);
        let wanted = wanted.unwrap_or_default();
        wanted.difference(&held).copied().collect()
    }

    fn wanted_node_ports(&self, name: &EndpointName) -> Option<(Vni, BTreeSet<NodePort>)> {
        let service = self.service(name)?;
        let vni = self.network_vni(&service.network)?;
        let ports = service.exposed_ports();
        let ports = ports.filter_map(|port| Some((port.protocol, port.node_port?)));
        Some((vni, ports.collect()))
    }

    /// Notes the ports that the rows of a service, which have just been made, give it.
    pub(in super::super) fn update_node_ports(&mut self, owner: &Owner) {
        let Owner::Service(name) = owner else { return };
        let held = self.wanted_node_ports(name).map(|(vni, mut ports)| {
            ports.retain(|port| self.may_have(name, *port, vni));
            (vni, ports)
        });
        self.services.node_ports.set(name, held);
    }

    /// Whether rows may give the port to the service.
    pub(super) fn may_have(&self, name: &EndpointName, port: NodePort, vni: Vni) -> bool {
        let recorded = self.service(name).and_then(|service| service.recorded.as_ref());
        let is_recorded = recorded.is_none_or(|ports| ports.contains(&port));
        self.services.node_ports.is_free(port, vni, is_recorded)
    }
}

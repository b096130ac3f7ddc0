//! What a node's rules are made of, besides services.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use thuban_api::identifiers::Vni;
use thuban_common::host_stack::{MARK_FROM_POD, MARK_FROM_POD_MASK};
use thuban_rows::{Backend, Exposed, ExposedPort, LocalEndpoint};

use crate::program::Program;

/// The input of the rules, besides services.
#[derive(Debug, Default)]
pub struct Host<'a> {
    /// The addresses of the node's own endpoint.
    pub addresses: Vec<IpAddr>,
    /// The ranges of service addresses: of the VPC of the node's endpoint or, without an endpoint, of any VPC.
    pub service_ranges: &'a [IpNet],
    /// The ranges of the VPC of the node's endpoint.
    pub ranges: &'a [IpNet],
    /// The ranges that endpoints of other VPCs don't answer to, including the ranges of their own VPCs: nobody outside
    /// has such an address.
    pub closed: Vec<IpNet>,
    /// The exposed services of the node's VPC, and those of other VPCs that have backends here which take their
    /// traffic.
    pub exposed: Vec<&'a Exposed>,
    /// The VNI of the VPC of the node's endpoint.
    pub vni: Option<Vni>,
    /// Backends that are endpoints of this node.
    pub led_to: HashSet<(Vni, IpAddr)>,
    /// Those of the backends that may answer to anybody outside.
    pub open: BTreeSet<IpAddr>,
    /// The ranges of private networks of the VPC of the node's endpoint: their endpoints answer to nobody outside.
    pub private: Vec<&'a IpNet>,
    /// The other droplets by their underlay addresses, with IPv6 addresses of their nodes, if any of them takes a share
    /// of the traffic that comes to this one.
    pub droplets: BTreeMap<Ipv4Addr, Option<Ipv6Addr>>,
    /// The addresses of fronts.
    pub fronts: BTreeSet<IpAddr>,
    /// The IPv6 address by which other droplets know this one.
    pub underlay6: Option<Ipv6Addr>,
}

impl<'a> Host<'a> {
    /// Returns the input. While the node has no endpoint, it reaches only endpoints on itself. `underlay`: this
    /// droplet's address.
    pub fn of(program: &'a Program, underlay: Ipv4Addr) -> Self {
        let endpoint = program.host();
        let vni = endpoint.map(|endpoint| endpoint.vni);
        let exposed = program.exposed();
        let exposed = exposed.filter(|exposed| vni == Some(exposed.vni) || exposed.is_local());
        let exposed: Vec<_> = exposed.collect();
        let backends = exposed.iter().flat_map(|exposed| {
            let backends = exposed.local_backends();
            backends.map(|backend| (exposed.vni, backend.address))
        });
        let led_to = backends.filter(|(vni, address)| program.has_local(*vni, *address));
        let led_to: HashSet<_> = led_to.collect();
        let open = led_to
            .iter()
            .filter(|(vni, address)| program.has_egress(*vni, *address));
        let open = open.map(|(_, address)| *address).collect();
        let ranges = vni.map(|vni| program.ranges(vni));
        let others: BTreeSet<Vni> = led_to
            .iter()
            .map(|(of, _)| *of)
            .filter(|of| vni != Some(*of))
            .collect();
        let of_others = others.iter().flat_map(|vni| program.ranges(*vni).0);
        let closed = program.closed_ranges().iter().chain(of_others).copied().collect();
        let mut ports = exposed.iter().flat_map(|exposed| &exposed.ports);
        // To an address of a VPC here the node's packets would go to a pod.
        let outside = |address: &Ipv6Addr| !program.is_in_vpc((*address).into());
        let droplets = if ports.any(|port| !port.peers.is_empty()) {
            let others = program.droplets().filter(|droplet| droplet.address.0 != underlay);
            others
                .map(|droplet| (droplet.address.0, droplet.address6.filter(outside)))
                .collect()
        } else {
            BTreeMap::new()
        };
        Self {
            addresses: endpoint.into_iter().flat_map(LocalEndpoint::addresses).collect(),
            service_ranges: ranges.map_or(program.service_ranges(), |(_, services)| services),
            ranges: ranges.map_or(&[], |(own, _)| own),
            closed,
            exposed,
            vni,
            led_to,
            open,
            private: vni.map_or_else(Vec::new, |vni| program.private_ranges(vni).collect()),
            droplets,
            fronts: program.fronts().map(|front| front.address).collect(),
            underlay6: endpoint.and_then(|endpoint| endpoint.underlay6.filter(outside)),
        }
    }

    /// Returns the backends of an exposed port on this droplet, and whether they are endpoints; `None` if backends of
    /// other droplets are used too. A backend that is neither an endpoint here nor outside of the VPC has gone.
    pub(super) fn local_backends(
        &self,
        of: &Exposed,
        port: &ExposedPort,
    ) -> Option<(bool, Vec<(IpAddr, u16)>)> {
        let local = port.local.as_ref()?;
        let as_told = |backend: &Backend| (backend.address, backend.port);
        let is_led = |backend: &&Backend| self.led_to.contains(&(of.vni, backend.address));
        let led = local.iter().filter(is_led);
        let led: Vec<_> = led.map(as_told).collect();
        if !led.is_empty() || self.vni != Some(of.vni) {
            return Some((true, led));
        }
        let is_outside =
            |(address, _): &(IpAddr, u16)| !self.ranges.iter().any(|range| range.contains(address));
        let outside = local.iter().map(as_told).filter(is_outside);
        Some((false, outside.collect()))
    }
}

/// Returns a match for packets of pods that leave in the node's name; `is`: `==` or `!=`.
pub(super) fn from_pod(is: &str) -> String {
    format!("meta mark & {MARK_FROM_POD_MASK:#x} {is} {MARK_FROM_POD:#x}")
}

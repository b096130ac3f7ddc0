//! The rows that an operator would write: two VPCs with the same addresses, two networks, every role on a droplet of
//! its own.
//!
//! VPC 100: network 1 (10.0.1.0/24, bouncer on droplet 3), network 2 (10.0.2.0/24, bouncer on droplet 1), divider on
//! droplet 2. VPC 200: network 3 (10.0.1.0/24, bouncer on droplet 3), no divider.

use std::net::Ipv4Addr;

use anyhow::Result;
use thuban_common::tables::{RemoteRow, SUBNET_BOUNCER_HERE, SubnetEntry, VPC_DIVIDER_HERE, VpcEntry};

use super::{
    Rig, Transit, Underlay,
    droplet::{Pod, address6},
};
use crate::programs::members;

pub const RED: u32 = 100;
pub const BLUE: u32 = 200;

/// Pods of both VPCs.
pub struct Topology {
    pub transit: Transit,
    pub rig: Rig,
    /// A pod on droplet 1, in network 1.
    pub first: Pod,
    /// A pod on droplet 1, in network 1.
    pub neighbour: Pod,
    /// A pod on droplet 2, in network 1.
    pub second: Pod,
    /// A pod on droplet 3, in network 2.
    pub other: Pod,
    /// A pod on droplet 1 of the other VPC, with the address of `first`.
    pub first_blue: Pod,
    /// A pod on droplet 2 of the other VPC, with the address of `second`.
    pub second_blue: Pod,
}

impl Topology {
    /// Makes the topology with agents at tc.
    pub fn new(transit: Transit) -> Result<Self> {
        Self::with(transit, Underlay::Switched, false)
    }

    /// Makes the topology with a router between the droplets.
    pub fn routed(transit: Transit) -> Result<Self> {
        Self::with(transit, Underlay::Routed, false)
    }

    /// Makes the topology with agents at XDP, and tc behind them.
    pub fn with_agents_at_xdp() -> Result<Self> {
        Self::with(Transit::Xdp, Underlay::Switched, true)
    }

    fn with(transit: Transit, underlay: Underlay, at_xdp: bool) -> Result<Self> {
        let mut rig = Rig::new(3, transit, underlay)?;
        for droplet in &mut rig.droplets {
            droplet.agent_at_xdp = at_xdp;
        }
        let first = rig.droplet(1)?.add_pod(RED, 1, Ipv4Addr::new(10, 0, 1, 11))?;
        let neighbour = rig.droplet(1)?.add_pod(RED, 1, Ipv4Addr::new(10, 0, 1, 12))?;
        let second = rig.droplet(2)?.add_pod(RED, 1, Ipv4Addr::new(10, 0, 1, 21))?;
        let other = rig.droplet(3)?.add_pod(RED, 2, Ipv4Addr::new(10, 0, 2, 31))?;
        let first_blue = rig.droplet(1)?.add_pod(BLUE, 3, Ipv4Addr::new(10, 0, 1, 11))?;
        let second_blue = rig.droplet(2)?.add_pod(BLUE, 3, Ipv4Addr::new(10, 0, 1, 21))?;
        let mut topology = Self {
            transit,
            rig,
            first,
            neighbour,
            second,
            other,
            first_blue,
            second_blue,
        };
        topology.write_roles()?;
        Ok(topology)
    }

    /// Writes which droplet serves which network and VPC.
    fn write_roles(&mut self) -> Result<()> {
        let [one, two, three] = [0, 1, 2].map(|index| self.rig.droplets[index].address);
        for (vni, network, base, bouncer) in [
            (RED, 1, Ipv4Addr::new(10, 0, 1, 0), three),
            (RED, 2, Ipv4Addr::new(10, 0, 2, 0), one),
            (BLUE, 3, Ipv4Addr::new(10, 0, 1, 0), three),
        ] {
            for droplet in &mut self.rig.droplets {
                let flags = if droplet.address == bouncer {
                    SUBNET_BOUNCER_HERE
                } else {
                    0
                };
                droplet.set_subnet(
                    vni,
                    base,
                    SubnetEntry {
                        network,
                        flags,
                        bouncers: members(&[bouncer]),
                    },
                )?;
            }
        }
        for droplet in &mut self.rig.droplets {
            let flags = if droplet.address == two {
                VPC_DIVIDER_HERE
            } else {
                0
            };
            droplet.set_vpc(VpcEntry::new(RED, flags, members(&[two])))?;
            droplet.set_vpc(VpcEntry::new(BLUE, 0, members(&[])))?;
        }
        for (pod, home, bouncer) in [
            (&self.first, one, 3),
            (&self.neighbour, one, 3),
            (&self.second, two, 3),
            (&self.other, three, 1),
            (&self.first_blue, one, 3),
            (&self.second_blue, two, 3),
        ] {
            let (vni, address) = (pod.vni, pod.address);
            let bouncer = self.rig.droplet(bouncer)?;
            bouncer.set_row(RemoteRow::Bouncer, vni, address, home)?;
            bouncer.set_row(RemoteRow::Bouncer, vni, address6(address), home)?;
        }
        Ok(())
    }

    /// Writes direct rows between `first` and `second`, both ways.
    pub fn make_direct(&mut self) -> Result<()> {
        let [one, two] = [0, 1].map(|index| self.rig.droplets[index].address);
        let (first, second) = (self.first.address, self.second.address);
        for (droplet, address, home) in [(1, second, two), (2, first, one)] {
            let droplet = self.rig.droplet(droplet)?;
            droplet.set_row(RemoteRow::Direct, RED, address, home)?;
            droplet.set_row(RemoteRow::Direct, RED, address6(address), home)?;
        }
        Ok(())
    }
}

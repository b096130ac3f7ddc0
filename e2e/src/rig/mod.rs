//! Droplets as network namespaces on one machine: real veths, real stacks, the real programs, tables filled by hand.
//!
//! Everything is in namespaces of the rig's own, the bridge between droplets included; dropping the rig removes them.
//! There is no transitd and no operator: an error here is an error of the data plane.

pub mod capture;
pub mod droplet;
pub mod limits;
pub mod namespace;
pub mod topology;
pub mod traffic;

use std::net::Ipv4Addr;

use anyhow::{Context, Result};

use crate::programs::Lent;
use droplet::Droplet;
use namespace::Namespace;

/// MTU of the underlay.
pub const UNDERLAY_MTU: u32 = 1500;
/// Bytes of encapsulation, which pods' MTU is less than the underlay's.
const ENCAPSULATION: u32 = 50;
/// MTU of pods on such an underlay.
pub const POD_MTU: u32 = UNDERLAY_MTU - ENCAPSULATION;

/// The form in which frames travel between droplets, and the hook that suits it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transit {
    /// Frames are segmented before they leave, as on most NICs: transit at XDP, tc behind it.
    Xdp,
    /// Whole GSO frames, as veths pass them: transit at tc.
    Tc,
    /// Frames are segmented, and the receiving stack aggregates them before transit at tc.
    Aggregated,
}

impl Transit {
    /// All variants.
    pub const ALL: [Self; 3] = [Self::Xdp, Self::Tc, Self::Aggregated];
}

/// The network between droplets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Underlay {
    /// One bridge, 172.31.99.0/24.
    Switched,
    /// A router with a subnet for each droplet, from 172.31.100.0/24 on.
    Routed,
}

impl Underlay {
    /// Returns a droplet's address, by its number from 1.
    pub fn droplet(self, index: u8) -> Ipv4Addr {
        match self {
            Self::Switched => Ipv4Addr::new(172, 31, 99, 10 + index),
            Self::Routed => Ipv4Addr::new(172, 31, 99 + index, 10 + index),
        }
    }

    /// Returns the router's address in a droplet's subnet.
    fn router(self, index: u8) -> Ipv4Addr {
        let [a, b, c, _] = self.droplet(index).octets();
        Ipv4Addr::new(a, b, c, 254)
    }
}

pub struct Rig {
    pub droplets: Vec<Droplet>,
    /// The namespace of the bridge or the router.
    pub bridge: Namespace,
    // Programs that let the bridge's ends of the uplinks take frames that XDP sends.
    _far_ends: Option<Lent>,
}

impl Rig {
    /// Makes droplets that a bridge or a router joins.
    pub fn new(count: u8, transit: Transit, underlay: Underlay) -> Result<Self> {
        let bridge = Namespace::new("bridge")?;
        match underlay {
            Underlay::Switched => {
                bridge.command("ip link add br0 type bridge")?;
                bridge.command("ip addr add 172.31.99.254/24 dev br0")?;
                bridge.command("ip link set br0 up")?;
            }
            Underlay::Routed => bridge.sysctl("ipv4/ip_forward", "1")?,
        }
        let mut far_ends = (transit == Transit::Xdp).then(Lent::new).transpose()?;
        let mut droplets = Vec::new();
        for index in 1..=count {
            let droplet = Droplet::new(index, &bridge, transit, underlay)?;
            if let Some(far_ends) = &mut far_ends {
                bridge.run(|| far_ends.attach_xdp("xdp_pass", &format!("d{index}")))?;
            }
            droplets.push(droplet);
        }
        if transit != Transit::Tc {
            // XDP at one end of a veth turns GRO off at the other end: it is asked for again when all exist.
            for (index, droplet) in (1..).zip(&droplets) {
                droplet.namespace.command("ethtool -K uplink gro on")?;
                bridge.command(&format!("ethtool -K d{index} gro on"))?;
            }
        }
        let addresses: Vec<Ipv4Addr> = droplets.iter().map(|droplet| droplet.address).collect();
        for droplet in &mut droplets {
            droplet.know(&addresses)?;
        }
        Ok(Self {
            droplets,
            bridge,
            _far_ends: far_ends,
        })
    }

    /// Returns a droplet by its number, from 1.
    pub fn droplet(&mut self, number: usize) -> Result<&mut Droplet> {
        self.droplets
            .get_mut(number - 1)
            .with_context(|| format!("no droplet {number}"))
    }

    /// Prints the counters of each droplet, for a failing test.
    pub fn print_counters(&self) {
        for droplet in &self.droplets {
            println!("{}: {:?}", droplet.address, droplet.programs.counters());
        }
    }
}

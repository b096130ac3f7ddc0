//! Droplets as network namespaces on one machine: real veths, real stacks, the real programs, tables filled by hand.
//!
//! Everything lies in namespaces of the rig's own, the bridge between droplets included; dropping the rig removes them.
//! No transitd, no operator: what is wrong here is wrong in the data plane.

pub mod capture;
pub mod droplet;
pub mod namespace;
pub mod topology;
pub mod traffic;

use std::net::Ipv4Addr;

use anyhow::{Context, Result};

use crate::programs::Programs;
use droplet::Droplet;
use namespace::Namespace;

/// MTU of the underlay.
pub const UNDERLAY_MTU: u32 = 1500;
/// MTU of pods: the underlay's less the encapsulation.
pub const POD_MTU: u32 = UNDERLAY_MTU - 50;

/// How frames travel between droplets, and the hook that suits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transit {
    /// Segmented before they leave, as most NICs do it: transit at XDP, tc behind it.
    Xdp,
    /// Whole GSO frames, as veths pass them: transit at tc.
    Tc,
}

pub struct Rig {
    pub droplets: Vec<Droplet>,
    pub bridge: Namespace,
    // Keeps the bridge's ends of the uplinks taking what XDP sends.
    _far_ends: Programs,
}

impl Rig {
    /// Droplets at 172.31.99.11 and on, joined by a bridge.
    pub fn new(count: u8, transit: Transit) -> Result<Self> {
        let bridge = Namespace::new("bridge")?;
        bridge.command("ip link add br0 type bridge")?;
        bridge.command("ip addr add 172.31.99.254/24 dev br0")?;
        bridge.command("ip link set br0 up")?;
        let mut far_ends = Programs::load()?;
        let mut droplets = Vec::new();
        for index in 1..=count {
            let droplet = Droplet::new(index, &bridge, transit)?;
            if transit == Transit::Xdp {
                bridge.run(|| far_ends.attach_xdp("xdp_pass", &format!("d{index}")))?;
            }
            droplets.push(droplet);
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

    /// A droplet by its number, from 1.
    pub fn droplet(&mut self, number: usize) -> Result<&mut Droplet> {
        self.droplets
            .get_mut(number - 1)
            .with_context(|| format!("no droplet {number}"))
    }

    /// Prints what each droplet counted: for a failing test.
    pub fn print_counters(&self) {
        for droplet in &self.droplets {
            println!("{}: {:?}", droplet.address, droplet.programs.counters());
        }
    }
}

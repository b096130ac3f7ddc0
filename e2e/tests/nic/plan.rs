//! Who is who. The machine is droplet `HERE`: it holds one pod, and is bouncer of the pod's network and divider of the
//! VPC. Droplets `TWO` and `THREE` are played.

use std::net::Ipv4Addr;

pub const HERE: Ipv4Addr = Ipv4Addr::new(172, 31, 99, 11);
/// The droplet of `DIRECT` and `BOUNCED`.
pub const TWO: Ipv4Addr = Ipv4Addr::new(172, 31, 99, 12);
/// The bouncer of network 2.
pub const THREE: Ipv4Addr = Ipv4Addr::new(172, 31, 99, 13);
/// A host that is no droplet.
pub const STRANGER: Ipv4Addr = Ipv4Addr::new(172, 31, 99, 14);

pub const VPC: u32 = 100;
/// A VPC that has nothing in the machine.
pub const OTHER_VPC: u32 = 101;

/// The pod in the machine.
pub const POD: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 11);
/// An endpoint of network 1 that the machine has a direct row of.
pub const DIRECT: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 22);
/// An endpoint of network 1 that the machine has a bouncer's row of.
pub const BOUNCED: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 21);
/// An address of network 1 that the machine has no row of.
pub const UNKNOWN: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 32);
/// An endpoint of network 2.
pub const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 31);

/// Returns the MAC of a played droplet.
pub fn mac(droplet: Ipv4Addr) -> [u8; 6] {
    [2, 2, 2, 2, 2, droplet.octets()[3]]
}

/// Returns a MAC as text.
pub fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

//! The rows of the test world, one table each, so that the world and its model are filled from the same.
//!
//! Droplets: 192.0.2.1 (this one), .2 and .3 (neighbours known), .4 (neighbour unknown).
//! VPC 100: no way out, divider .2. VPC 101: host access, no divider. VPC 102: this droplet is its divider.
//! VPC 103: a way out, two dividers, and the addresses of VPC 100 once more. Networks 13 and 14 are private.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_common::{
    policy::{STAMP_GUARDED, Stamp},
    tables::{
        LOCAL_SHAPED, LOCAL_TAKES_XDP, RemoteRow, SUBNET_BOUNCER_HERE, SUBNET_BY_NODE, SUBNET_CLOSED,
        SUBNET_PRIVATE, VPC_DIVIDER_HERE, VPC_EGRESS, VPC_HOST_ACCESS,
    },
};

pub const fn ip(a: u8, b: u8, c: u8, d: u8) -> Ipv4Addr {
    Ipv4Addr::new(a, b, c, d)
}

/// Returns `fd<vpc>:0:0:<network>::<host>`, the numbers written in hexadecimal.
pub const fn ip6(vpc: u16, network: u16, host: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00 | vpc, 0, 0, network, 0, 0, 0, host)
}

const fn v4(a: u8, b: u8, c: u8, d: u8) -> IpAddr {
    IpAddr::V4(ip(a, b, c, d))
}

const fn v6(vpc: u16, network: u16, host: u16) -> IpAddr {
    IpAddr::V6(ip6(vpc, network, host))
}

pub const HERE: Ipv4Addr = ip(192, 0, 2, 1);
pub const SECOND: Ipv4Addr = ip(192, 0, 2, 2);
pub const THIRD: Ipv4Addr = ip(192, 0, 2, 3);
pub const UNREACHED: Ipv4Addr = ip(192, 0, 2, 4);
pub const DROPLETS: [Ipv4Addr; 4] = [HERE, SECOND, THIRD, UNREACHED];
/// Droplets that this droplet probes, and the secret that an answer must repeat.
pub const ASKED: [Ipv4Addr; 2] = [SECOND, UNREACHED];
pub const SECRET: u64 = 0x0807_0605_0403_0201;
/// MTU of the uplink.
pub const MTU: u32 = 1500;

/// A pod's own side: interface number, addresses, MAC.
#[derive(Clone, Copy, Debug)]
pub struct Endpoint {
    pub index: u8,
    pub vni: u32,
    pub network: u32,
    pub address: Ipv4Addr,
    pub v6: Ipv6Addr,
}

/// Returns the ingress set of the endpoint with this stamp, 0 for none.
pub const fn ingress_set(stamp: Stamp) -> u32 {
    stamp.flags as u32
}

impl Endpoint {
    pub const fn mac(self) -> [u8; 6] {
        [2, 0, 0, 0, 0, 100 + self.index]
    }

    /// Whether policies apply to it.
    pub const fn has_policy(self) -> bool {
        let stamp = self.stamp();
        stamp.egress_set != 0 || stamp.flags != 0
    }

    /// Returns what its packets to other droplets say of it. Some endpoints have policies, which allow everything.
    pub const fn stamp(self) -> Stamp {
        let index = self.index as u32;
        Stamp {
            class: 0x0a_0b00 | index,
            egress_set: if matches!(index, 1 | 5 | 7) {
                0x01_0200 | index
            } else {
                0
            },
            flags: if matches!(index, 2 | 5 | 6) {
                STAMP_GUARDED
            } else {
                0
            },
        }
    }

    const fn new(index: u8, vni: u32, network: u32, address: Ipv4Addr, v6: Ipv6Addr) -> Self {
        Self {
            index,
            vni,
            network,
            address,
            v6,
        }
    }
}

/// A pod in VPC 100, network 1 (bouncer: third droplet).
pub const TENANT: Endpoint = Endpoint::new(0, 100, 1, ip(10, 0, 1, 11), ip6(0, 1, 0x11));
/// A pod in VPC 101, which has access to the host.
pub const GUEST: Endpoint = Endpoint::new(1, 101, 5, ip(10, 5, 0, 11), ip6(5, 0, 0x11));
/// A pod in VPC 102, which is divided here.
pub const DIVIDED: Endpoint = Endpoint::new(2, 102, 7, ip(10, 7, 0, 11), ip6(7, 0, 0x11));
/// A pod in VPC 100, network 3, which is bounced here.
pub const BOUNCED: Endpoint = Endpoint::new(3, 100, 3, ip(10, 0, 3, 11), ip6(0, 3, 0x11));
/// An interface without a row.
pub const STRAY: Endpoint = Endpoint::new(4, 100, 1, ip(10, 0, 1, 14), ip6(0, 1, 0x14));
/// A pod in VPC 103, whose roles have two members each.
pub const SPREAD: Endpoint = Endpoint::new(5, 103, 11, ip(10, 0, 1, 21), ip6(0, 1, 0x21));
/// A pod in VPC 103, network 13, which is private.
pub const PRIVATE: Endpoint = Endpoint::new(6, 103, 13, ip(10, 0, 3, 21), ip6(0, 3, 0x21));
/// A pod in VPC 101, network 14, which is private.
pub const PRIVATE_GUEST: Endpoint = Endpoint::new(7, 101, 14, ip(10, 5, 2, 11), ip6(5, 2, 0x11));
/// Endpoints with an attachment.
pub const ATTACHED: [Endpoint; 7] = [TENANT, GUEST, DIVIDED, BOUNCED, SPREAD, PRIVATE, PRIVATE_GUEST];
/// Interfaces for pods.
pub const INTERFACES: u8 = 8;

pub const LOCAL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 12];

/// Further endpoints of this droplet, of network 1 behind the interface of [`BOUNCED`]: VNI, address, flags.
pub const LOCALS: [(u32, IpAddr, u16); 8] = [
    (100, v4(10, 0, 1, 12), LOCAL_TAKES_XDP),
    (100, v4(10, 0, 1, 13), LOCAL_TAKES_XDP),
    (100, v4(10, 0, 1, 15), 0),
    (100, v4(10, 0, 1, 16), LOCAL_SHAPED),
    (100, v6(0, 1, 0x12), LOCAL_TAKES_XDP),
    (100, v6(0, 1, 0x13), LOCAL_TAKES_XDP),
    (100, v6(0, 1, 0x15), 0),
    (100, v6(0, 1, 0x16), LOCAL_SHAPED),
];

/// Rows that name a droplet: row, VNI, address, droplet.
pub const REMOTES: [(RemoteRow, u32, IpAddr, Ipv4Addr); 25] = [
    (RemoteRow::Direct, 100, v4(10, 0, 1, 50), SECOND),
    (RemoteRow::Direct, 100, v4(10, 0, 1, 51), HERE),
    (RemoteRow::Direct, 100, v4(10, 0, 1, 60), UNREACHED),
    (RemoteRow::Direct, 103, v4(10, 0, 1, 50), THIRD),
    (RemoteRow::Direct, 100, v6(0, 1, 0x50), SECOND),
    (RemoteRow::Direct, 100, v6(0, 1, 0x51), HERE),
    (RemoteRow::Direct, 100, v6(0, 1, 0x60), UNREACHED),
    (RemoteRow::Direct, 103, v6(0, 1, 0x50), THIRD),
    (RemoteRow::Forward, 100, v4(10, 0, 1, 70), THIRD),
    (RemoteRow::Forward, 100, v4(10, 0, 1, 71), HERE),
    (RemoteRow::Forward, 100, v4(10, 0, 1, 72), UNREACHED),
    (RemoteRow::Forward, 100, v6(0, 1, 0x70), THIRD),
    (RemoteRow::Forward, 100, v6(0, 1, 0x72), UNREACHED),
    (RemoteRow::Bouncer, 100, v4(10, 0, 3, 30), SECOND),
    (RemoteRow::Bouncer, 100, v4(10, 0, 3, 31), HERE),
    (RemoteRow::Bouncer, 100, v4(10, 0, 3, 33), THIRD),
    (RemoteRow::Bouncer, 102, v4(10, 7, 2, 30), SECOND),
    (RemoteRow::Bouncer, 100, v6(0, 3, 0x30), SECOND),
    (RemoteRow::Bouncer, 100, v6(0, 3, 0x31), HERE),
    (RemoteRow::Bouncer, 100, v6(0, 3, 0x33), THIRD),
    (RemoteRow::Bouncer, 102, v6(7, 2, 0x30), SECOND),
    // Packets that the endpoint's former droplet sends on come from there.
    (RemoteRow::Forwarder, 100, v4(10, 0, 1, 13), UNREACHED),
    (RemoteRow::Forwarder, 100, v6(0, 1, 0x13), UNREACHED),
    (RemoteRow::Forwarder, 100, v4(10, 0, 1, 15), THIRD),
    (RemoteRow::Forwarder, 103, v4(10, 0, 1, 12), UNREACHED),
];

/// A network: VNI, base, prefix, network, flags, bouncers.
pub type Subnet = (u32, IpAddr, u32, u32, u32, &'static [Ipv4Addr]);

/// Networks; 0 is a VPC's own range, or a range of nobody.
pub const SUBNETS: [Subnet; 36] = [
    (100, v4(10, 0, 0, 0), 16, 0, 0, &[]),
    (100, v4(10, 0, 1, 0), 24, 1, 0, &[THIRD]),
    (100, v4(10, 0, 2, 0), 24, 2, 0, &[THIRD]),
    (100, v4(10, 0, 3, 0), 24, 3, SUBNET_BOUNCER_HERE, &[HERE]),
    (101, v4(10, 5, 0, 0), 24, 5, 0, &[]),
    (101, v4(10, 5, 1, 0), 24, 6, 0, &[THIRD]),
    (101, v4(10, 5, 2, 0), 24, 14, SUBNET_PRIVATE, &[]),
    (102, v4(10, 7, 0, 0), 24, 7, 0, &[THIRD]),
    (102, v4(10, 7, 1, 0), 24, 8, 0, &[THIRD]),
    (102, v4(10, 7, 2, 0), 24, 9, 0, &[HERE]),
    (102, v4(10, 7, 3, 0), 24, 10, 0, &[]),
    (103, v4(10, 0, 0, 0), 16, 0, 0, &[]),
    (103, v4(10, 0, 1, 0), 24, 11, 0, &[SECOND, THIRD]),
    (103, v4(10, 0, 2, 0), 24, 12, 0, &[SECOND, THIRD]),
    (103, v4(10, 0, 3, 0), 24, 13, SUBNET_PRIVATE, &[SECOND, THIRD]),
    (100, v6(0, 0, 0), 48, 0, 0, &[]),
    (100, v6(0, 1, 0), 64, 1, 0, &[THIRD]),
    (100, v6(0, 2, 0), 64, 2, 0, &[THIRD]),
    (100, v6(0, 3, 0), 64, 3, SUBNET_BOUNCER_HERE, &[HERE]),
    (101, v6(5, 0, 0), 64, 5, 0, &[]),
    (101, v6(5, 1, 0), 64, 6, 0, &[THIRD]),
    (101, v6(5, 2, 0), 64, 14, SUBNET_PRIVATE, &[]),
    (102, v6(7, 0, 0), 64, 7, 0, &[THIRD]),
    (102, v6(7, 1, 0), 64, 8, 0, &[THIRD]),
    (102, v6(7, 2, 0), 64, 9, 0, &[HERE]),
    (102, v6(7, 3, 0), 64, 10, 0, &[]),
    (103, v6(0, 0, 0), 48, 0, 0, &[]),
    (103, v6(0, 1, 0), 64, 11, 0, &[SECOND, THIRD]),
    (103, v6(0, 2, 0), 64, 12, 0, &[SECOND, THIRD]),
    (103, v6(0, 3, 0), 64, 13, SUBNET_PRIVATE, &[SECOND, THIRD]),
    (101, IpAddr::V4(BY_NODE), 32, 0, SUBNET_BY_NODE, &[]),
    (102, IpAddr::V4(BY_NODE), 32, 0, SUBNET_BY_NODE, &[]),
    (103, IpAddr::V4(BY_NODE), 32, 0, SUBNET_BY_NODE, &[]),
    (103, IpAddr::V4(CLOSED), 24, 0, SUBNET_CLOSED, &[]),
    (103, IpAddr::V6(BY_NODE6), 128, 0, SUBNET_BY_NODE, &[]),
    (103, IpAddr::V6(CLOSED6), 64, 0, SUBNET_CLOSED, &[]),
];

/// An address that nodes serve, and one that stays closed.
pub const BY_NODE: Ipv4Addr = ip(10, 96, 0, 1);
pub const BY_NODE6: Ipv6Addr = ip6(0x96, 0, 1);
pub const CLOSED: Ipv4Addr = ip(203, 0, 113, 0);
pub const CLOSED6: Ipv6Addr = ip6(0x113, 0, 0);
/// Addresses of no endpoint: in those networks, and outside.
pub const OTHERS: [IpAddr; 7] = [
    IpAddr::V4(BY_NODE),
    IpAddr::V6(BY_NODE6),
    v4(203, 0, 113, 9),
    v6(0x113, 0, 9),
    v4(198, 51, 100, 9),
    v6(0x198, 0, 9),
    IpAddr::V4(SECOND),
];

/// VPCs: VNI, flags, dividers.
pub const VPCS: [(u32, u32, &[Ipv4Addr]); 4] = [
    (100, 0, &[SECOND]),
    (101, VPC_HOST_ACCESS, &[]),
    (102, VPC_DIVIDER_HERE, &[HERE]),
    (103, VPC_EGRESS, &[SECOND, THIRD]),
];

//! A droplet with one row for each verdict, and interfaces from which frames can seem to come.
//!
//! Droplets: 192.0.2.1 is this one, .2 and .3 are others. VPC 100: network 1 (bouncer .3) with three pods here,
//! network 3 (bouncer here), a service whose only backend has a direct row, and two fronts. VPC 102: divided here,
//! network 9 (bouncer .3).

use std::{
    net::Ipv4Addr,
    os::fd::{AsFd, BorrowedFd},
};

use anyhow::{Context, Result};
use aya::programs::Program;
use thuban_common::packet::{bytes6, ethernet};
use thuban_common::policy::{STAMP_FRONT, Stamp};
use thuban_common::services::{
    ConnectionEntry, ConnectionKey, FRONTS, GatesEntry, LEAVING, NO_INDEX, gate_of,
};
use thuban_common::tables::{
    AttachmentEntry, ConfigEntry, DropletEntry, GATEWAY_MAC, LOAD_OF_DIVIDER, LOCAL_TAKES_XDP, LoadKey,
    LocalEntry, RemoteRow, SUBNET_BOUNCER_HERE, SUBNET_SERVICES, SubnetEntry, VPC_DIVIDER_HERE, VpcEntry,
};

use super::frames;
use crate::{
    programs::{Programs, key, members},
    rig::namespace::Namespace,
    services::Served,
};

pub const HERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
pub const SECOND: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
pub const THIRD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 3);
/// The VPC with networks 1 and 3, and the one that is divided here.
pub const VNI: u32 = 100;
pub const DIVIDED_VNI: u32 = 102;
pub const POD: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 11);
pub const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 12);
/// The only pod that is a client of a service: packets of such a pod are looked up in CONNECTIONS.
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 13);
/// An address with a direct row, on the second droplet.
pub const REMOTE: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 50);
/// An address without a row.
pub const UNKNOWN: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 90);
/// An address with a bouncer's row, on the third droplet.
pub const BOUNCED: Ipv4Addr = Ipv4Addr::new(10, 3, 0, 33);
/// The address of a service, by whose port each datagram here goes to [`REMOTE`].
pub const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 7);
/// The addresses of load balancers, by whose ports each datagram here goes to [`REMOTE`], and to [`NEIGHBOUR`].
pub const FRONT: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 80);
pub const FRONT_HERE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 81);
/// A client outside.
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
/// Both ends of a divided packet.
pub const DIVIDED: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 7, 2, 50), Ipv4Addr::new(10, 7, 1, 30)];
pub const POD_MAC: [u8; 6] = [2, 0, 0, 0, 0, 11];
const BACKEND_MAC: [u8; 6] = [2, 0, 0, 0, 0, 12];
const UPLINK_MAC: [u8; 6] = [2, 1, 1, 1, 1, 1];
const PEER_MAC: [u8; 6] = [2, 2, 2, 2, 2, 2];

pub struct World {
    pub namespace: Namespace,
    pub programs: Programs,
    pub uplink: u32,
    pub pod: u32,
    pub client: u32,
    pub neighbour: u32,
}

impl World {
    /// Makes the world, with room for more bouncer rows if a number is given.
    pub fn new(bouncer_rows: Option<u32>) -> Result<Self> {
        let namespace = Namespace::new("alone")?;
        let mut programs = load(bouncer_rows)?;
        for name in ["uplink", "pod0", "pod1", "pod2"] {
            // An attached program registers the receive queue, which test runs of XDP need.
            namespace.command(&format!("ip link add {name} type veth peer name {name}-far"))?;
            namespace.command(&format!("ip link set {name} up"))?;
            namespace.command(&format!("ip link set {name}-far up"))?;
            namespace.run(|| programs.attach_xdp("xdp_pass", name))?;
        }
        namespace.command("ip link set uplink address 02:01:01:01:01:01")?;
        namespace.command(&format!("ip addr add {HERE}/24 dev uplink"))?;
        for droplet in [SECOND, THIRD] {
            namespace.command(&format!(
                "ip neigh replace {droplet} lladdr 02:02:02:02:02:02 dev uplink nud permanent"
            ))?;
        }
        namespace.sysctl("ipv4/ip_forward", "1")?;
        let [uplink, pod, neighbour, client] =
            ["uplink", "pod0", "pod1", "pod2"].map(|name| namespace.interface(name));
        let mut world = Self {
            uplink: uplink?,
            pod: pod?,
            client: client?,
            neighbour: neighbour?,
            namespace,
            programs,
        };
        world.fill()?;
        Ok(world)
    }

    fn fill(&mut self) -> Result<()> {
        let programs = &mut self.programs;
        programs.configure(ConfigEntry {
            droplet: HERE.octets(),
            uplink: self.uplink,
            mtu: 1500,
            flags: 0,
            seed: 0,
        })?;
        programs.set_on_link(HERE.octets())?;
        for droplet in [HERE, SECOND, THIRD] {
            programs.insert("DROPLETS", droplet.octets(), DropletEntry { flags: 0 })?;
        }
        for (ifindex, address, mac) in [
            (self.pod, POD, POD_MAC),
            (self.neighbour, NEIGHBOUR, BACKEND_MAC),
            (self.client, CLIENT, POD_MAC),
        ] {
            let key = key(VNI, address);
            let attachment = AttachmentEntry {
                ifindex,
                vni: VNI,
                address: key.address,
                network: 1,
                mac,
                flags: 0,
                outer_dscp: 0,
                class: 0,
                ingress_set: 0,
                egress_set: 0,
            };
            programs.insert("ATTACHMENTS", ifindex, attachment)?;
            let local = LocalEntry {
                vni: VNI,
                ifindex,
                mac,
                flags: LOCAL_TAKES_XDP,
            };
            programs.set_local(key, local)?;
        }
        for (vni, base, prefix, network, flags, bouncer) in [
            (VNI, [10, 0, 1, 0], 24, 1, 0, THIRD),
            (VNI, [10, 3, 0, 0], 16, 3, SUBNET_BOUNCER_HERE, HERE),
            (VNI, [11, 0, 0, 0], 8, 4, SUBNET_BOUNCER_HERE, HERE),
            (VNI, [10, 96, 0, 0], 16, 0, SUBNET_SERVICES, HERE),
            (DIVIDED_VNI, [10, 7, 0, 0], 16, 0, 0, THIRD),
            (DIVIDED_VNI, [10, 7, 1, 0], 24, 9, 0, THIRD),
        ] {
            let entry = SubnetEntry {
                network,
                flags,
                bouncers: members(&[bouncer]),
            };
            programs.insert_subnet(vni, Ipv4Addr::from(base), prefix, entry)?;
        }
        for (vni, flags, divider) in [(VNI, 0, SECOND), (DIVIDED_VNI, VPC_DIVIDER_HERE, HERE)] {
            let dividers = members(&[divider]);
            programs.insert("VPCS", vni, VpcEntry::new(vni, flags, dividers))?;
        }
        for (vni, network) in [(VNI, 3), (VNI, 4), (DIVIDED_VNI, LOAD_OF_DIVIDER)] {
            programs.count_load(LoadKey { vni, network })?;
        }
        let service = Served::new(VNI, 1, SERVICE.into(), frames::PORT, frames::UDP);
        service.by(&mut self.programs, &[(REMOTE.into(), frames::PORT)])?;
        for (id, front, backend, droplet) in [(2, FRONT, REMOTE, SECOND), (3, FRONT_HERE, NEIGHBOUR, HERE)] {
            let front = Served::new(FRONTS, id, front.into(), frames::PORT, frames::UDP);
            front.by_fronts(
                &mut self.programs,
                VNI,
                &[(backend.into(), frames::PORT, droplet)],
            )?;
        }
        self.answer_to_front()?;
        self.row(RemoteRow::Direct, REMOTE, SECOND)?;
        self.row(RemoteRow::Bouncer, BOUNCED, THIRD)
    }

    /// Has what [`NEIGHBOUR`] sends to [`OUTSIDE`] be an answer to a client of [`FRONT_HERE`].
    fn answer_to_front(&mut self) -> Result<()> {
        let key = ConnectionKey {
            vni: VNI,
            ports: [frames::SOURCE_PORT.to_be(), frames::PORT.to_be()],
            source: key(VNI, NEIGHBOUR).address,
            destination: key(VNI, OUTSIDE).address,
            protocol: frames::UDP,
            direction: LEAVING,
            padding: 0,
        };
        let entry = ConnectionEntry {
            vni: VNI,
            index: NO_INDEX,
            time: 0,
            address: crate::programs::address(FRONT_HERE),
            port: frames::PORT.to_be(),
            state: 0,
            service: 3,
            client_port: frames::PORT.to_be(),
            padding: 0,
            payer: VNI,
        };
        self.programs.insert("CONNECTIONS", key, entry)?;
        let gate = GatesEntry {
            pending_until: 0,
            services: 0,
            fronts: 1,
            flows: 0,
        };
        self.programs.set("GATES", gate_of(self.neighbour), gate)
    }

    /// Writes a row of VPC 100.
    pub fn row(&mut self, row: RemoteRow, address: Ipv4Addr, droplet: Ipv4Addr) -> Result<()> {
        self.programs.set_remote(row, key(VNI, address), droplet)
    }

    /// Returns a program's file descriptor.
    pub fn program(&self, name: &str) -> Result<BorrowedFd<'_>> {
        let program: &Program = self
            .programs
            .ebpf
            .program(name)
            .with_context(|| format!("no program {name}"))?;
        Ok(program.fd()?.as_fd())
    }
}

/// Returns a frame of the pod.
pub fn from_pod(source: Ipv4Addr, destination: Ipv4Addr) -> Vec<u8> {
    frames::plain(GATEWAY_MAC, POD_MAC, source, destination)
}

/// Returns a frame from the second droplet.
pub fn from_wire(vni: u32, source: Ipv4Addr, destination: Ipv4Addr) -> Vec<u8> {
    let inner = frames::plain(GATEWAY_MAC, [2, 0, 0, 0, 0, 50], source, destination);
    frames::tunnelled([UPLINK_MAC, PEER_MAC], SECOND, HERE, vni, &inner)
}

/// Returns a frame of the pod that is a backend.
pub fn from_backend(destination: Ipv4Addr) -> Vec<u8> {
    frames::plain(GATEWAY_MAC, BACKEND_MAC, NEIGHBOUR, destination)
}

/// Returns a frame of a client outside.
pub fn from_outside(destination: Ipv4Addr) -> Vec<u8> {
    frames::plain(UPLINK_MAC, PEER_MAC, OUTSIDE, destination)
}

/// Returns the frame by which the second droplet, as a front, sends a packet on.
pub fn from_front(destination: Ipv4Addr) -> Vec<u8> {
    let stamp = Stamp {
        class: 0,
        egress_set: 0,
        flags: STAMP_FRONT,
    };
    let header = stamp.header(ethernet::IPV4);
    let (to, from) = (bytes6(header.destination), bytes6(header.source));
    let inner = frames::plain(to, from, OUTSIDE, destination);
    frames::tunnelled([UPLINK_MAC, PEER_MAC], SECOND, HERE, VNI, &inner)
}

/// Makes all maps, with ENDPOINTS of the given size, and loads the programs that the cases with many rows run.
fn load(bouncer_rows: Option<u32>) -> Result<Programs> {
    let Some(rows) = bouncer_rows else {
        return Programs::load();
    };
    let mut programs = Programs::open(&[("ENDPOINTS", rows)])?;
    for name in ["transit_xdp", "xdp_pass"] {
        programs.xdp(name)?.load()?;
    }
    Ok(programs)
}

//! One droplet: a namespace, an uplink, pods behind veths, and Thuban's programs if the case has them.

use std::net::Ipv4Addr;

use anyhow::{Context, Result};
use thuban_common::tables::{
    AttachmentEntry, CONFIG_TRANSIT_AT_XDP, ConfigEntry, DropletEntry, GATEWAY_MAC, LOCAL_TAKES_XDP,
    LocalEntry, RemoteRow, SUBNET_BOUNCER_HERE, SubnetEntry, VPC_DIVIDER_HERE, VpcEntry,
};

use crate::{
    programs::{Programs, key, members},
    rig::namespace::Namespace,
};

/// The offloads that a NIC without offloads for sending lacks: frames leave segmented, with their checksums.
const SEGMENTED: &str =
    "tx off tso off gso off tx-udp_tnl-segmentation off tx-udp_tnl-csum-segmentation off gro on";
/// The offloads that transitd turns off at pods.
const POD_OFFLOADS: &str = "tx-udp_tnl-segmentation off tx-udp_tnl-csum-segmentation off tx-udp-segmentation off \
                            tx-sctp-segmentation off";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Tc,
    Xdp,
}

pub struct Node {
    pub address: Ipv4Addr,
    pub mtu: u32,
    pub namespace: Namespace,
    pub programs: Option<Programs>,
    pods: u8,
}

impl Node {
    /// Makes a droplet without links.
    pub fn new(address: Ipv4Addr, mtu: u32) -> Result<Self> {
        let [.., number] = address.octets();
        let namespace = Namespace::new(&format!("b{number}"))?;
        namespace.sysctl("ipv4/ip_forward", "1")?;
        namespace.sysctl("ipv4/conf/all/rp_filter", "0")?;
        namespace.sysctl("ipv4/conf/default/rp_filter", "0")?;
        Ok(Self {
            address,
            mtu,
            namespace,
            programs: None,
            pods: 0,
        })
    }

    /// Sets address and MTU of an existing `uplink`.
    pub fn bring_up(&self) -> Result<()> {
        let Self {
            address,
            mtu,
            namespace,
            ..
        } = self;
        namespace.command(&format!("ip addr add {address}/24 dev uplink"))?;
        namespace.command(&format!("ip link set uplink mtu {mtu} up"))?;
        Ok(())
    }

    /// Loads the programs and attaches transit to the uplink: tc, or XDP with tc behind it.
    pub fn load(&mut self, transit: Hook) -> Result<()> {
        let mut programs = Programs::load()?;
        programs.configure(ConfigEntry {
            droplet: self.address.octets(),
            uplink: self.namespace.interface("uplink")?,
            mtu: self.mtu,
            flags: if transit == Hook::Xdp {
                CONFIG_TRANSIT_AT_XDP
            } else {
                0
            },
            seed: 0,
        })?;
        // As transitd does for an uplink whose range has no gateway.
        programs.set_on_link(self.address.octets())?;
        self.namespace.run(|| {
            if transit == Hook::Xdp {
                programs.attach_xdp("transit_xdp", "uplink")?;
            }
            programs.attach_tc("transit_tc", "uplink")
        })?;
        self.programs = Some(programs);
        Ok(())
    }

    fn tables(&mut self) -> Result<&mut Programs> {
        self.programs.as_mut().context("a droplet without programs")
    }

    /// Makes a namespace with `eth0`; returns the name of its other end. The kernel chooses the MACs unless they are
    /// given.
    pub fn veth(&mut self, mtu: u32, macs: Option<([u8; 6], [u8; 6])>) -> Result<(Namespace, String)> {
        self.pods += 1;
        let [.., number] = self.address.octets();
        let pod = Namespace::new(&format!("b{number}p{}", self.pods))?;
        let host_end = format!("pod{}", self.pods);
        let name = pod.name();
        self.namespace.command(&format!(
            "ip link add {host_end} type veth peer name eth0 netns {name}"
        ))?;
        if let Some((host, inside)) = macs {
            let host = text(host);
            self.namespace
                .command(&format!("ip link set {host_end} address {host}"))?;
            pod.command(&format!("ip link set eth0 address {}", text(inside)))?;
        }
        self.namespace
            .command(&format!("ip link set {host_end} mtu {mtu} up"))?;
        pod.command(&format!("ip link set eth0 mtu {mtu} up"))?;
        // This is more than a run of short connections uses.
        pod.sysctl("ipv4/ip_local_port_range", "10000 65000")?;
        Ok((pod, host_end))
    }

    /// Makes a pod of Thuban, as transitd makes it, with the droplet's rows for it.
    pub fn pod(&mut self, vni: u32, network: u32, address: Ipv4Addr, agent: Hook) -> Result<Namespace> {
        let [.., number] = self.address.octets();
        let mac = [2, 0, 0, vni as u8, number, self.pods];
        let (pod, host_end) = self.veth(self.mtu - 50, Some((GATEWAY_MAC, mac)))?;
        let [a, b, c, _] = address.octets();
        pod.command(&format!("ip addr add {address}/24 dev eth0"))?;
        pod.command(&format!("ip route add default via {a}.{b}.{c}.1"))?;
        pod.command(&format!("ethtool -K eth0 {POD_OFFLOADS}"))?;
        let ifindex = self.namespace.interface(&host_end)?;
        let takes_xdp = if agent == Hook::Xdp { LOCAL_TAKES_XDP } else { 0 };
        let address = key(vni, address);
        let programs = self.tables()?;
        let attachment = AttachmentEntry {
            ifindex,
            vni,
            address: address.address,
            network,
            mac,
            flags: 0,
            outer_dscp: 0,
            class: 0,
            ingress_set: 0,
            egress_set: 0,
        };
        programs.insert("ATTACHMENTS", ifindex, attachment)?;
        let local = LocalEntry {
            vni,
            ifindex,
            mac,
            flags: takes_xdp,
        };
        programs.set_local(address, local)?;
        let programs = self.programs.as_mut().context("a droplet without programs")?;
        self.namespace.run(|| {
            if agent == Hook::Xdp {
                programs.attach_xdp("agent_xdp", &host_end)?;
            }
            programs.attach_tc("agent_tc", &host_end)
        })?;
        if agent == Hook::Xdp {
            segment(&pod, "eth0")?;
        }
        Ok(pod)
    }

    /// Makes droplets known.
    pub fn know(&mut self, droplets: &[Ipv4Addr]) -> Result<()> {
        let programs = self.tables()?;
        for droplet in droplets {
            programs.insert("DROPLETS", droplet.octets(), DropletEntry { flags: 0 })?;
        }
        Ok(())
    }

    /// Writes a VPC and its divider.
    pub fn vpc(&mut self, vni: u32, divider: Option<Ipv4Addr>) -> Result<()> {
        let is_here = divider == Some(self.address);
        let flags = if is_here { VPC_DIVIDER_HERE } else { 0 };
        let entry = VpcEntry::new(vni, flags, members(divider.as_slice()));
        self.tables()?.insert("VPCS", vni, entry)
    }

    /// Writes a network of 256 addresses and its bouncer.
    pub fn network(
        &mut self,
        vni: u32,
        network: u32,
        base: Ipv4Addr,
        bouncer: Option<Ipv4Addr>,
    ) -> Result<()> {
        let is_here = bouncer == Some(self.address);
        let entry = SubnetEntry {
            network,
            flags: if is_here { SUBNET_BOUNCER_HERE } else { 0 },
            bouncers: members(bouncer.as_slice()),
        };
        self.tables()?.insert_subnet(vni, base, 24, entry)
    }

    /// Writes a row that names a droplet.
    pub fn row(&mut self, row: RemoteRow, vni: u32, address: Ipv4Addr, droplet: Ipv4Addr) -> Result<()> {
        self.tables()?.set_remote(row, key(vni, address), droplet)
    }
}

/// Makes an interface send like a NIC without offloads, and aggregate what it receives. Must run after any XDP is
/// attached at either end: attaching at the far end takes away the GRO that attaching here gave.
pub fn segment(namespace: &Namespace, interface: &str) -> Result<()> {
    namespace.command(&format!("ethtool -K {interface} {SEGMENTED}"))?;
    Ok(())
}

fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

//! One droplet: a namespace with an uplink, the programs, and pods.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Result;
use thuban_cluster::command::run;
use thuban_common::tables::{
    AttachmentEntry, CONFIG_TRANSIT_AT_XDP, ConfigEntry, DropletEntry, GATEWAY_MAC, HOST_SOURCE_V6,
    LOCAL_TAKES_XDP, LocalEntry, RemoteRow, SubnetEntry, VpcEntry,
};

use super::{ENCAPSULATION, Transit, UNDERLAY_MTU, Underlay, namespace::Namespace, traffic::End};
use crate::programs::{Lent, key};

/// Offloads that must be off at a sender whose receiver has XDP. GRO is asked for, because attaching XDP at the far end
/// takes away what attaching it here gave.
const SEGMENTED: &str =
    "tx off tso off gso off tx-udp_tnl-segmentation off tx-udp_tnl-csum-segmentation off gro on";
/// Offloads that must be off at a pod: decapsulation can't restore these.
const POD_OFFLOADS: &str = "tx-udp_tnl-segmentation off tx-udp_tnl-csum-segmentation off tx-udp-segmentation off \
                            tx-sctp-segmentation off";

pub struct Droplet {
    pub address: Ipv4Addr,
    pub namespace: Namespace,
    pub programs: Lent,
    /// Whether agents are attached at XDP too.
    pub agent_at_xdp: bool,
    /// MTU of the uplink.
    mtu: u32,
    pods: u8,
}

/// A pod on a droplet.
pub struct Pod {
    pub namespace: Namespace,
    pub vni: u32,
    pub network: u32,
    pub address: Ipv4Addr,
    pub address6: Ipv6Addr,
    pub mac: [u8; 6],
    /// The host's end of the veth.
    pub host_end: String,
    pub interface: u32,
}

impl Pod {
    /// Returns the pod as an end of traffic.
    pub fn end(&self) -> End<'_> {
        End {
            namespace: &self.namespace,
            address: self.address.into(),
        }
    }

    /// Returns the same for IPv6.
    pub fn end6(&self) -> End<'_> {
        End {
            namespace: &self.namespace,
            address: self.address6.into(),
        }
    }
}

impl Droplet {
    pub(super) fn new(index: u8, bridge: &Namespace, transit: Transit, underlay: Underlay) -> Result<Self> {
        let namespace = Namespace::new(&format!("d{index}"))?;
        let address = underlay.droplet(index);
        let far = format!("d{index}");
        bridge.command(&format!(
            "ip link add {far} type veth peer name uplink netns {}",
            namespace.name()
        ))?;
        bridge.command(&format!("ip link set {far} up"))?;
        namespace.command(&format!("ip addr add {address}/24 dev uplink"))?;
        namespace.command(&format!("ip link set uplink mtu {UNDERLAY_MTU} up"))?;
        match underlay {
            Underlay::Switched => {
                bridge.command(&format!("ip link set {far} master br0"))?;
            }
            Underlay::Routed => {
                let router = underlay.router(index);
                bridge.command(&format!("ip addr add {router}/24 dev {far}"))?;
                namespace.command(&format!("ip route add default via {router}"))?;
            }
        }
        if transit != Transit::Tc {
            namespace.command(&format!("ethtool -K uplink {SEGMENTED}"))?;
            bridge.command(&format!("ethtool -K {far} {SEGMENTED}"))?;
        }
        Self::with_uplink(namespace, address, transit, UNDERLAY_MTU)
    }

    /// Makes a droplet of a network card that the calling process's namespace has, in a namespace of its own.
    pub fn on_nic(nic: &str, address: Ipv4Addr, transit: Transit, mtu: u32) -> Result<Self> {
        let namespace = Namespace::new("nic")?;
        let name = namespace.name();
        run("ip", &["link", "set", nic, "netns", name, "name", "uplink"])?;
        namespace.command(&format!("ip addr add {address}/24 dev uplink"))?;
        namespace.command(&format!("ip link set uplink mtu {mtu} up"))?;
        Self::with_uplink(namespace, address, transit, mtu)
    }

    /// Attaches transit to the uplink of a namespace.
    fn with_uplink(namespace: Namespace, address: Ipv4Addr, transit: Transit, mtu: u32) -> Result<Self> {
        namespace.sysctl("ipv4/ip_forward", "1")?;
        for interface in ["all", "uplink"] {
            namespace.sysctl(&format!("ipv4/conf/{interface}/rp_filter"), "0")?;
        }
        let mut programs = Lent::new()?;
        let uplink = namespace.interface("uplink")?;
        programs.configure(ConfigEntry {
            droplet: address.octets(),
            uplink,
            mtu,
            flags: if transit == Transit::Xdp {
                CONFIG_TRANSIT_AT_XDP
            } else {
                0
            },
            seed: 0,
        })?;
        programs.set_on_link(address.octets())?;
        match transit {
            Transit::Tc => {}
            Transit::Xdp => namespace.run(|| programs.attach_xdp("transit_xdp", "uplink"))?,
            Transit::Aggregated => aggregate(&namespace)?,
        }
        namespace.run(|| programs.attach_tc("transit_tc", "uplink"))?;
        Ok(Self {
            address,
            namespace,
            programs,
            agent_at_xdp: false,
            mtu,
            pods: 0,
        })
    }

    /// Gives the network card back to the first process's namespace, under its former name.
    pub fn give_back(self, nic: &str) -> Result<()> {
        let Self {
            namespace, programs, ..
        } = self;
        // The programs leave the card with their links.
        drop(programs);
        namespace.command("ip link set uplink down")?;
        namespace.command(&format!("ip link set uplink netns 1 name {nic}"))?;
        Ok(())
    }

    /// Makes the droplets known to this one.
    pub fn know(&mut self, droplets: &[Ipv4Addr]) -> Result<()> {
        for droplet in droplets {
            self.programs
                .insert("DROPLETS", droplet.octets(), DropletEntry { flags: 0 })?;
        }
        Ok(())
    }

    /// Changes the rows of a pod. `flags`: of its local rows.
    pub fn change_rows(
        &mut self,
        pod: &Pod,
        flags: u16,
        change: impl FnOnce(&mut AttachmentEntry),
    ) -> Result<()> {
        let programs = &mut self.programs;
        let mut attachment: AttachmentEntry = programs.get("ATTACHMENTS", &pod.interface)?;
        change(&mut attachment);
        programs.insert("ATTACHMENTS", pod.interface, attachment)?;
        let local = LocalEntry {
            vni: pod.vni,
            ifindex: pod.interface,
            mac: pod.mac,
            flags,
        };
        programs.set_local(key(pod.vni, pod.address), local)?;
        programs.set_local(key(pod.vni, pod.address6), local)
    }

    /// Makes a pod with its veth, the agent at it, and the droplet's own rows for it.
    pub fn add_pod(&mut self, vni: u32, network: u32, address: Ipv4Addr) -> Result<Pod> {
        self.pods += 1;
        let [_, _, _, number] = self.address.octets();
        let namespace = Namespace::new(&format!("p{number}-{}", self.pods))?;
        let host_end = format!("thb{}", self.pods);
        let mtu = self.mtu - ENCAPSULATION;
        let mac = [2, 0, 0, vni as u8, number, self.pods];
        let [a, b, c, _] = address.octets();
        self.namespace.command(&format!(
            "ip link add {host_end} type veth peer name eth0 netns {}",
            namespace.name()
        ))?;
        self.namespace.command(&format!(
            "ip link set {host_end} address {} mtu {mtu} up",
            text(GATEWAY_MAC)
        ))?;
        self.namespace
            .sysctl(&format!("ipv4/conf/{host_end}/rp_filter"), "0")?;
        namespace.command(&format!("ip link set eth0 address {} mtu {mtu} up", text(mac)))?;
        namespace.command(&format!("ip addr add {address}/24 dev eth0"))?;
        namespace.command(&format!("ip route add default via {}", Ipv4Addr::new(a, b, c, 1)))?;
        let address6 = address6(address);
        namespace.sysctl("ipv6/conf/eth0/accept_ra", "0")?;
        namespace.command(&format!("ip addr add {address6}/64 dev eth0 nodad"))?;
        let gateway6 = Ipv6Addr::from(HOST_SOURCE_V6);
        namespace.command(&format!("ip -6 route add default via {gateway6} dev eth0"))?;
        namespace.command(&format!("ethtool -K eth0 {}", POD_OFFLOADS.replace("  ", "")))?;
        let interface = self.namespace.interface(&host_end)?;
        let programs = &mut self.programs;
        let row = AttachmentEntry {
            ifindex: interface,
            vni,
            address: key(vni, address).address,
            network,
            mac,
            flags: 0,
            outer_dscp: 0,
            class: 0,
            ingress_set: 0,
            egress_set: 0,
        };
        programs.insert("ATTACHMENTS", interface, row)?;
        let local = LocalEntry {
            vni,
            ifindex: interface,
            mac,
            flags: LOCAL_TAKES_XDP,
        };
        programs.set_local(key(vni, address), local)?;
        programs.set_local(key(vni, address6), local)?;
        // Rows come first: no packet of the pod meets an agent that doesn't know it.
        if self.agent_at_xdp {
            namespace.command(&format!("ethtool -K eth0 {SEGMENTED}"))?;
            self.namespace
                .run(|| programs.attach_xdp("agent_xdp", &host_end))?;
        }
        self.namespace.run(|| programs.attach_tc("agent_tc", &host_end))?;
        Ok(Pod {
            namespace,
            vni,
            network,
            address,
            address6,
            mac,
            host_end,
            interface,
        })
    }

    pub fn set_vpc(&mut self, entry: VpcEntry) -> Result<()> {
        self.programs.insert("VPCS", entry.vni, entry)
    }

    /// Writes a network of IPv4 /24 and the IPv6 /64 beside it.
    pub fn set_subnet(&mut self, vni: u32, base: Ipv4Addr, entry: SubnetEntry) -> Result<()> {
        self.programs.insert_subnet(vni, base, 24, entry)?;
        self.programs.insert_subnet(vni, address6(base), 64, entry)
    }

    /// Writes a row that names a droplet.
    pub fn set_row(
        &mut self,
        row: RemoteRow,
        vni: u32,
        address: impl Into<IpAddr>,
        droplet: Ipv4Addr,
    ) -> Result<()> {
        self.programs.set_remote(row, key(vni, address), droplet)
    }
}

/// Makes the device by which the kernel aggregates inner flows before transit at tc, as transitd does.
pub fn aggregate(namespace: &Namespace) -> Result<()> {
    namespace.command("ip link add thuban-gro type vxlan external vnifilter dstport 6081")?;
    namespace.command("ip link set thuban-gro up")?;
    Ok(())
}

/// Returns the IPv6 address beside an IPv4 one: fd00:0:0:c::d for a.b.c.d.
pub fn address6(address: Ipv4Addr) -> Ipv6Addr {
    let [_, _, network, host] = address.octets();
    Ipv6Addr::new(0xfd00, 0, 0, network.into(), 0, 0, 0, host.into())
}

fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

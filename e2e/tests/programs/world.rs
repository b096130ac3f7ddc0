//! One set of tables in which every verdict has an address, interfaces to stand on, and the run of a frame at a hook.
//!
//! Droplets: 192.0.2.1 (this one), .2 and .3 (neighbours known), .4 (neighbour unknown).
//! VPC 100: no way out, divider .2. VPC 101: host access, no divider. VPC 102: this droplet is its divider.

use std::{collections::BTreeMap, net::Ipv4Addr};

use anyhow::{Context, Result};
use aya::programs::{TestRun, TestRunOptions};
use thuban_common::{
    counters::Counter,
    tables::{
        AttachmentEntry, CONFIG_TRANSIT_AT_XDP, ConfigEntry, DropletEntry, LOCAL_TAKES_XDP, LocalEntry,
        RemoteEntry, SUBNET_BOUNCER_HERE, SubnetEntry, VPC_DIVIDER_HERE, VPC_HOST_ACCESS, VpcEntry,
    },
};
use thuban_e2e::{
    programs::{Programs, key, members},
    rig::namespace::Namespace,
};

pub const fn ip(a: u8, b: u8, c: u8, d: u8) -> Ipv4Addr {
    Ipv4Addr::new(a, b, c, d)
}

pub const HERE: Ipv4Addr = ip(192, 0, 2, 1);
pub const SECOND: Ipv4Addr = ip(192, 0, 2, 2);
pub const THIRD: Ipv4Addr = ip(192, 0, 2, 3);
pub const UNREACHED: Ipv4Addr = ip(192, 0, 2, 4);
pub const UPLINK_MAC: [u8; 6] = [2, 1, 1, 1, 1, 1];
pub const LOCAL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 12];

/// MAC of a neighbour on the underlay.
pub fn neighbour_mac(droplet: Ipv4Addr) -> [u8; 6] {
    [2, 2, 2, 2, 2, droplet.octets()[3]]
}

/// A pod's own side: interface number, address, MAC.
#[derive(Clone, Copy, Debug)]
pub struct Endpoint {
    pub index: u8,
    pub vni: u32,
    pub network: u32,
    pub address: Ipv4Addr,
}

impl Endpoint {
    pub const fn mac(self) -> [u8; 6] {
        [2, 0, 0, 0, 0, 100 + self.index]
    }
}

/// VPC 100, network 1 (bouncer: third droplet).
pub const TENANT: Endpoint = Endpoint {
    index: 0,
    vni: 100,
    network: 1,
    address: ip(10, 0, 1, 11),
};
/// VPC 101, which has access to the host.
pub const GUEST: Endpoint = Endpoint {
    index: 1,
    vni: 101,
    network: 5,
    address: ip(10, 5, 0, 11),
};
/// VPC 102, divided here.
pub const DIVIDED: Endpoint = Endpoint {
    index: 2,
    vni: 102,
    network: 7,
    address: ip(10, 7, 0, 11),
};
/// VPC 100, network 3, bounced here.
pub const BOUNCED: Endpoint = Endpoint {
    index: 3,
    vni: 100,
    network: 3,
    address: ip(10, 0, 3, 11),
};
/// An interface without a row.
pub const STRAY: Endpoint = Endpoint {
    index: 4,
    vni: 100,
    network: 1,
    address: ip(10, 0, 1, 14),
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Tc,
    Xdp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Agent(u8),
    Transit,
}

/// What a run did.
pub struct Outcome {
    pub verdict: u32,
    pub frame: Vec<u8>,
    pub counted: BTreeMap<&'static str, u64>,
}

pub struct World {
    pub namespace: Namespace,
    pub programs: Programs,
    pub interfaces: Vec<u32>,
    pub uplink: u32,
}

impl World {
    pub fn new() -> Result<Self> {
        let namespace = Namespace::new("world")?;
        let mut programs = Programs::load()?;
        let mut interfaces = Vec::new();
        for index in 0..5 {
            add_interface(&namespace, &mut programs, &format!("pod{index}"))?;
            interfaces.push(namespace.interface(&format!("pod{index}"))?);
        }
        add_interface(&namespace, &mut programs, "uplink")?;
        namespace.command("ip link set uplink address 02:01:01:01:01:01")?;
        namespace.command(&format!("ip addr add {HERE}/24 dev uplink"))?;
        for droplet in [2, 3] {
            let mac = format!("02:02:02:02:02:0{droplet}");
            namespace.command(&format!(
                "ip neigh replace 192.0.2.{droplet} lladdr {mac} dev uplink nud permanent"
            ))?;
        }
        namespace.sysctl("ipv4/ip_forward", "1")?;
        let uplink = namespace.interface("uplink")?;
        let mut world = Self {
            namespace,
            programs,
            interfaces,
            uplink,
        };
        world.configure()?;
        world.fill_endpoints()?;
        world.fill_networks()?;
        Ok(world)
    }

    pub fn configure(&mut self) -> Result<()> {
        self.programs.configure(ConfigEntry {
            droplet: HERE.octets(),
            uplink: self.uplink,
            mtu: 1500,
            flags: CONFIG_TRANSIT_AT_XDP,
        })
    }

    fn fill_endpoints(&mut self) -> Result<()> {
        for endpoint in [TENANT, GUEST, DIVIDED, BOUNCED] {
            let interface = self.interfaces[usize::from(endpoint.index)];
            let Endpoint { vni, network, .. } = endpoint;
            let address = key(vni, endpoint.address);
            let mac = endpoint.mac();
            let attachment = AttachmentEntry {
                vni,
                network,
                address: address.address,
                mac,
                flags: 0,
            };
            self.programs.insert("ATTACHMENTS", interface, attachment)?;
            self.programs.insert(
                "LOCAL_ENDPOINTS",
                address,
                LocalEntry {
                    ifindex: interface,
                    network,
                    mac,
                    flags: LOCAL_TAKES_XDP,
                },
            )?;
        }
        let local = LocalEntry {
            ifindex: self.interfaces[3],
            network: 1,
            mac: LOCAL_MAC,
            flags: LOCAL_TAKES_XDP,
        };
        self.programs
            .insert("LOCAL_ENDPOINTS", key(100, ip(10, 0, 1, 12)), local)?;
        for (map, vni, address, droplet) in [
            ("DIRECT_ROWS", 100, ip(10, 0, 1, 50), SECOND),
            ("DIRECT_ROWS", 100, ip(10, 0, 1, 51), HERE),
            ("DIRECT_ROWS", 100, ip(10, 0, 1, 60), UNREACHED),
            ("FORWARD_ROWS", 100, ip(10, 0, 1, 70), THIRD),
            ("FORWARD_ROWS", 100, ip(10, 0, 1, 71), HERE),
            ("FORWARD_ROWS", 100, ip(10, 0, 1, 72), UNREACHED),
            ("BOUNCER_ROWS", 100, ip(10, 0, 3, 30), SECOND),
            ("BOUNCER_ROWS", 100, ip(10, 0, 3, 31), HERE),
            ("BOUNCER_ROWS", 100, ip(10, 0, 3, 33), THIRD),
            ("BOUNCER_ROWS", 102, ip(10, 7, 2, 30), SECOND),
        ] {
            self.programs.insert(
                map,
                key(vni, address),
                RemoteEntry {
                    droplet: droplet.octets(),
                    used: 0,
                },
            )?;
        }
        Ok(())
    }

    fn fill_networks(&mut self) -> Result<()> {
        for droplet in [HERE, SECOND, THIRD, UNREACHED] {
            self.programs
                .insert("DROPLETS", droplet.octets(), DropletEntry { flags: 0 })?;
        }
        for (vni, base, prefix, network, flags, bouncers) in [
            (100, ip(10, 0, 0, 0), 16, 0, 0, &[][..]),
            (100, ip(10, 0, 1, 0), 24, 1, 0, &[THIRD]),
            (100, ip(10, 0, 2, 0), 24, 2, 0, &[THIRD]),
            (100, ip(10, 0, 3, 0), 24, 3, SUBNET_BOUNCER_HERE, &[HERE]),
            (101, ip(10, 5, 0, 0), 24, 5, 0, &[]),
            (101, ip(10, 5, 1, 0), 24, 6, 0, &[THIRD]),
            (102, ip(10, 7, 0, 0), 24, 7, 0, &[THIRD]),
            (102, ip(10, 7, 1, 0), 24, 8, 0, &[THIRD]),
            (102, ip(10, 7, 2, 0), 24, 9, 0, &[HERE]),
            (102, ip(10, 7, 3, 0), 24, 10, 0, &[]),
        ] {
            let entry = SubnetEntry {
                network,
                flags,
                bouncers: members(bouncers),
            };
            self.programs.insert_subnet(vni, base, prefix, entry)?;
        }
        for (vni, flags, dividers) in [
            (100, 0, &[SECOND][..]),
            (101, VPC_HOST_ACCESS, &[]),
            (102, VPC_DIVIDER_HERE, &[HERE]),
        ] {
            self.programs.insert(
                "VPCS",
                vni,
                VpcEntry {
                    flags,
                    dividers: members(dividers),
                },
            )?;
        }
        Ok(())
    }

    /// Runs a frame through a role's program at a hook.
    pub fn run(&mut self, role: Role, hook: Hook, frame: &[u8]) -> Result<Outcome> {
        self.run_segmented(role, hook, frame, 0)
    }

    /// The same with a GSO segment size (tc).
    pub fn run_segmented(&mut self, role: Role, hook: Hook, frame: &[u8], segment: u32) -> Result<Outcome> {
        let before = self.programs.counters()?;
        let interface = match role {
            Role::Agent(index) => self.interfaces[usize::from(index)],
            Role::Transit => self.uplink,
        };
        let name = match (role, hook) {
            (Role::Agent(_), Hook::Tc) => "agent_tc",
            (Role::Agent(_), Hook::Xdp) => "agent_xdp",
            (Role::Transit, Hook::Tc) => "transit_tc",
            (Role::Transit, Hook::Xdp) => "transit_xdp",
        };
        let mut output = vec![0; frame.len() + 512];
        let mut context = match hook {
            Hook::Tc => vec![0; 192], // struct __sk_buff
            Hook::Xdp => vec![0; 24], // struct xdp_md
        };
        let mut set =
            |offset: usize, value: u32| context[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
        match hook {
            Hook::Tc => {
                set(40, interface);
                set(176, segment);
            }
            Hook::Xdp => {
                set(4, frame.len() as u32);
                set(12, interface);
            }
        }
        let programs = &mut self.programs;
        let result = self.namespace.run(|| {
            let options = TestRunOptions {
                data_in: Some(frame),
                data_out: Some(&mut output),
                ctx_in: Some(&context),
                ..TestRunOptions::new()
            };
            match hook {
                Hook::Tc => programs.tc(name)?.test_run(options),
                Hook::Xdp => programs.xdp(name)?.test_run(options),
            }
            .with_context(|| format!("running {name}"))
        })?;
        output.truncate(result.data_size_out as usize);
        let mut counted = self.programs.counters()?;
        for (name, value) in &mut counted {
            *value -= before.get(name).copied().unwrap_or(0);
        }
        counted.retain(|name, value| *value != 0 && *name != Counter::DirectWanted.name());
        Ok(Outcome {
            verdict: result.return_value,
            frame: output,
            counted,
        })
    }
}

/// One end of a veth with a program, which registers its receive queue for test runs.
fn add_interface(namespace: &Namespace, programs: &mut Programs, name: &str) -> Result<()> {
    namespace.command(&format!("ip link add {name} type veth peer name far-{name}"))?;
    namespace.command(&format!("ip link set {name} up"))?;
    namespace.command(&format!("ip link set far-{name} up"))?;
    namespace.run(|| programs.attach_xdp("xdp_pass", name))
}

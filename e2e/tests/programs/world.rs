//! The tables of [`crate::rows`] in the kernel, interfaces for the frames, and runs of frames at a hook.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use anyhow::{Context, Result};
use aya::programs::{TestRun, TestRunOptions};
use thuban_common::{
    counters::Counter,
    policy::{Grant, GrantKey, PEER_OTHER, of_vpc},
    tables::{
        ATTACHMENT_HOST, AttachmentEntry, CONFIG_TRANSIT_AT_XDP, ConfigEntry, DropletEntry, EndpointKey,
        LOCAL_HAS_POLICY, LOCAL_TAKES_XDP, LocalEntry, ProbeEntry, RemoteRow, SubnetEntry, VpcEntry,
    },
};
use thuban_e2e::{
    programs::{Lent, Programs, key, members},
    rig::namespace::Namespace,
};

use crate::rows::{
    ASKED, ATTACHED, BOUNCED, DROPLETS, Endpoint, HERE, INTERFACES, LOCAL_MAC, LOCALS, MTU, REMOTES, SECRET,
    SUBNETS, VPCS, ingress_set,
};

pub const UPLINK_MAC: [u8; 6] = [2, 1, 1, 1, 1, 1];

/// Returns the MAC of a neighbour on the underlay.
pub fn neighbour_mac(droplet: Ipv4Addr) -> [u8; 6] {
    [2, 2, 2, 2, 2, droplet.octets()[3]]
}

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

/// The result of a run.
pub struct Outcome {
    pub verdict: u32,
    pub frame: Vec<u8>,
    pub counted: BTreeMap<&'static str, u64>,
}

pub struct World {
    pub namespace: Namespace,
    pub programs: Lent,
    pub interfaces: Vec<u32>,
    pub uplink: u32,
    /// Mark of frames at tc.
    pub mark: u32,
    is_inside: bool,
}

impl World {
    pub fn new() -> Result<Self> {
        let namespace = Namespace::new("world")?;
        let mut programs = Lent::new()?;
        let mut interfaces = Vec::new();
        for index in 0..INTERFACES {
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
            mark: 0,
            is_inside: false,
        };
        world.configure()?;
        world.fill_endpoints()?;
        world.fill_networks()?;
        Ok(world)
    }

    /// Makes an endpoint the node's own.
    pub fn be_host(&mut self, endpoint: Endpoint) -> Result<()> {
        let interface = self.interfaces[usize::from(endpoint.index)];
        let mut attachment: AttachmentEntry = self.programs.get("ATTACHMENTS", &interface)?;
        attachment.flags = ATTACHMENT_HOST;
        self.programs.insert("ATTACHMENTS", interface, attachment)
    }

    pub fn configure(&mut self) -> Result<()> {
        self.configure_with(CONFIG_TRANSIT_AT_XDP)
    }

    pub fn configure_with(&mut self, flags: u32) -> Result<()> {
        self.programs.configure(ConfigEntry {
            droplet: HERE.octets(),
            uplink: self.uplink,
            mtu: MTU,
            flags,
            seed: 0,
        })
    }

    fn fill_endpoints(&mut self) -> Result<()> {
        for endpoint in ATTACHED {
            let Endpoint { vni, network, .. } = endpoint;
            let interface = self.interfaces[usize::from(endpoint.index)];
            let mac = endpoint.mac();
            let stamp = endpoint.stamp();
            let attachment = AttachmentEntry {
                ifindex: interface,
                vni,
                address: key(vni, endpoint.address).address,
                network,
                mac,
                flags: 0,
                outer_dscp: 0,
                class: stamp.class,
                ingress_set: ingress_set(stamp),
                egress_set: stamp.egress_set,
            };
            self.programs.insert("ATTACHMENTS", interface, attachment)?;
            for set in [attachment.ingress_set, attachment.egress_set] {
                if set != 0 {
                    self.allow_all(vni, set)?;
                }
            }
            for address in [IpAddr::V4(endpoint.address), IpAddr::V6(endpoint.v6)] {
                self.insert_local(
                    key(vni, address),
                    interface,
                    mac,
                    LOCAL_TAKES_XDP | policy_flag(endpoint),
                )?;
            }
        }
        for (vni, address, flags) in LOCALS {
            let interface = self.interfaces[usize::from(BOUNCED.index)];
            self.insert_local(
                key(vni, address),
                interface,
                LOCAL_MAC,
                flags | policy_flag(BOUNCED),
            )?;
        }
        for (row, vni, address, droplet) in REMOTES {
            self.insert_remote(row, vni, address, droplet)?;
        }
        Ok(())
    }

    /// Writes an endpoint's local row once more.
    pub fn restore_local(&mut self, endpoint: Endpoint) -> Result<()> {
        let interface = self.interfaces[usize::from(endpoint.index)];
        let key = key(endpoint.vni, endpoint.address);
        self.insert_local(
            key,
            interface,
            endpoint.mac(),
            LOCAL_TAKES_XDP | policy_flag(endpoint),
        )
    }

    /// Writes a set that denies nothing.
    fn allow_all(&mut self, vni: u32, set: u32) -> Result<()> {
        let key = GrantKey {
            set: of_vpc(vni, set),
            peer: PEER_OTHER,
        };
        self.programs
            .insert("GRANTS", key, Grant { list: 0, flags: 0 }.of(&key))
    }

    fn insert_local(&mut self, key: EndpointKey, ifindex: u32, mac: [u8; 6], flags: u16) -> Result<()> {
        let entry = LocalEntry {
            vni: key.vni,
            ifindex,
            mac,
            flags,
        };
        self.programs.set_local(key, entry)
    }

    /// Writes a row that names a droplet.
    pub fn insert_remote(
        &mut self,
        row: RemoteRow,
        vni: u32,
        address: impl Into<IpAddr>,
        droplet: Ipv4Addr,
    ) -> Result<()> {
        self.programs.set_remote(row, key(vni, address), droplet)
    }

    fn fill_networks(&mut self) -> Result<()> {
        for droplet in DROPLETS {
            self.programs
                .insert("DROPLETS", droplet.octets(), DropletEntry { flags: 0 })?;
        }
        for droplet in ASKED {
            let entry = ProbeEntry {
                secret: SECRET,
                ..ProbeEntry::default()
            };
            self.programs.insert("PROBES", droplet.octets(), entry)?;
        }
        for (vni, base, prefix, network, flags, bouncers) in SUBNETS {
            let entry = SubnetEntry {
                network,
                flags,
                bouncers: members(bouncers),
            };
            self.programs.insert_subnet(vni, base, prefix, entry)?;
        }
        for (vni, flags, dividers) in VPCS {
            let dividers = members(dividers);
            self.programs
                .insert("VPCS", vni, VpcEntry::new(vni, flags, dividers))?;
        }
        Ok(())
    }

    /// Runs a frame through a role's program at a hook.
    pub fn run(&mut self, role: Role, hook: Hook, frame: &[u8]) -> Result<Outcome> {
        self.run_segmented(role, hook, frame, 0)
    }

    /// Does the same with a GSO segment size (tc).
    pub fn run_segmented(&mut self, role: Role, hook: Hook, frame: &[u8], segment: u32) -> Result<Outcome> {
        let before = self.programs.counters()?;
        let mut outcome = self.run_uncounted(role, hook, frame, segment)?;
        outcome.counted = self.programs.counters()?;
        for (name, value) in &mut outcome.counted {
            *value -= before.get(name).copied().unwrap_or(0);
        }
        outcome
            .counted
            .retain(|name, value| *value != 0 && *name != Counter::DirectWanted.name());
        Ok(outcome)
    }

    /// Moves the calling thread into the namespace: runs need no thread of their own then.
    pub fn enter(&mut self) -> Result<()> {
        self.is_inside = true;
        self.namespace.enter()
    }

    /// Does the same without reading the counters, which takes longer than the run.
    pub fn run_uncounted(&mut self, role: Role, hook: Hook, frame: &[u8], segment: u32) -> Result<Outcome> {
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
                set(8, self.mark);
                set(40, interface);
                set(176, segment);
            }
            Hook::Xdp => {
                set(4, frame.len() as u32);
                set(12, interface);
            }
        }
        let programs = &mut self.programs;
        let mut run = || {
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
        };
        let result = if self.is_inside {
            run()
        } else {
            self.namespace.run(run)
        }?;
        output.truncate(result.data_size_out as usize);
        Ok(Outcome {
            verdict: result.return_value,
            frame: output,
            counted: BTreeMap::new(),
        })
    }
}

/// Returns the flag of local rows of an endpoint to which policies apply.
const fn policy_flag(endpoint: Endpoint) -> u16 {
    if endpoint.has_policy() {
        LOCAL_HAS_POLICY
    } else {
        0
    }
}

/// Makes one end of a veth with a program, which registers its receive queue for test runs.
fn add_interface(namespace: &Namespace, programs: &mut Programs, name: &str) -> Result<()> {
    namespace.command(&format!("ip link add {name} type veth peer name far-{name}"))?;
    namespace.command(&format!("ip link set {name} up"))?;
    namespace.command(&format!("ip link set far-{name} up"))?;
    namespace.run(|| programs.attach_xdp("xdp_pass", name))
}

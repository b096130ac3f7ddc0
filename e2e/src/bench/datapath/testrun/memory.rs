//! Kernel memory of all maps of a droplet with 100 pods, 10,000 bouncer rows, 1,000 droplets, 100 VPCs and 300
//! networks, as the kernel accounts it (`memlock` in fdinfo). The node has 16 GiB of memory, which decides the size of
//! CONNECTIONS, and the programs tell of no flows. Once more with Services in use: 1,000 of them with ten backends
//! each, and 10,000 connections. And what a set of policies adds that has 10,000 rules for pods and as many for ranges.

use std::{
    collections::BTreeMap,
    fs,
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd},
};

use anyhow::{Context, Result, bail};
use aya::maps::Map;
use thuban_common::{
    services::{ConnectionEntry, ConnectionKey, FORWARD, REVERSE},
    tables::{AttachmentEntry, DropletEntry, LocalEntry, RemoteRow, SubnetEntry, VpcEntry},
};
use transitd::{
    dataplane::{connections::entries_for, seen_flows},
    settings::FlowMode,
};

use crate::{
    bench::{
        datapath::{Case, Plan},
        float,
        policy::rules,
        results::Sample,
    },
    programs::{Programs, address, key, members},
    services::Served,
};

pub const NAME: &str = "maps-100-pods-10k-rows";
pub const WITH_SERVICES: &str = "maps-100-pods-10k-rows-services";
/// What the rules alone add.
pub const OF_RULES: &str = "maps-of-10k-rules";
/// The node's memory, bytes.
const NODE: u64 = 16 << 30;
const SERVICES: u32 = 1_000;
const BACKENDS: u32 = 10;
const CONNECTIONS: u32 = 10_000;
const RULES: usize = 10_000;

/// Measured as [`NAME`], as [`WITH_SERVICES`], or as [`OF_RULES`].
pub struct MemoryCase(pub &'static str);

impl Case for MemoryCase {
    fn name(&self) -> &'static str {
        self.0
    }

    fn metrics(&self) -> Vec<&'static str> {
        vec!["map_mib"]
    }

    fn measure(&mut self, _plan: &Plan) -> Result<Vec<Sample>> {
        // Maps of other cases are in this process, too.
        let others = maps()?;
        let own = || -> Result<u64> {
            let all = maps()?.into_iter();
            Ok(all
                .filter(|(id, _)| !others.contains_key(id))
                .map(|(_, bytes)| bytes)
                .sum())
        };
        let mut programs = Programs::open(&[
            ("CONNECTIONS", entries_for(NODE)),
            ("SEEN_FLOWS", seen_flows::entries(FlowMode::Off)),
        ])?;
        fill(&mut programs)?;
        if self.0 == WITH_SERVICES {
            fill_services(&mut programs)?;
        }
        let mut bytes = own()?;
        if self.0 == OF_RULES {
            rules::fill(&mut programs, 1, RULES)?;
            bytes = own()? - bytes;
        }
        Ok(vec![Sample::new("map_mib", "MiB", float(bytes) / float(1 << 20))])
    }
}

/// The maps by which programs tell of flows.
pub struct FlowsCase {
    pub name: String,
    /// Entries of SEEN_FLOWS.
    pub entries: u32,
}

impl Case for FlowsCase {
    fn name(&self) -> &str {
        &self.name
    }

    fn metrics(&self) -> Vec<&'static str> {
        vec!["map_mib"]
    }

    fn measure(&mut self, _plan: &Plan) -> Result<Vec<Sample>> {
        let programs = Programs::open(&[("SEEN_FLOWS", self.entries)])?;
        let mut bytes = 0;
        for name in ["SEEN_FLOWS", "FLOW_BUDGETS", "FLOW_EVENTS"] {
            let (Map::LruHashMap(data) | Map::RingBuf(data)) = programs.ebpf.map(name).context(name)? else {
                bail!("{name} is of another type");
            };
            let path = format!("/proc/self/fdinfo/{}", data.fd().as_fd().as_raw_fd());
            let text = fs::read_to_string(&path).context(path)?;
            bytes += field(&text, "memlock:").with_context(|| format!("no memory of {name}"))?;
        }
        Ok(vec![Sample::new("map_mib", "MiB", float(bytes) / float(1 << 20))])
    }
}

/// Returns a number of a file in fdinfo.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_once(':')?.1.trim().parse().ok()
}

/// Returns the bytes of every map that this process holds, by id.
fn maps() -> Result<BTreeMap<u64, u64>> {
    let mut maps = BTreeMap::new();
    for entry in fs::read_dir("/proc/self/fdinfo").context("/proc/self/fdinfo")? {
        // A descriptor that is gone by now is no map.
        let Ok(text) = fs::read_to_string(entry?.path()) else {
            continue;
        };
        if let (Some(id), Some(bytes)) = (field(&text, "map_id:"), field(&text, "memlock:")) {
            maps.insert(id, bytes);
        }
    }
    Ok(maps)
}

fn droplet(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits((172 << 24) + number)
}

fn pod(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits((10 << 24) + number)
}

fn fill(programs: &mut Programs) -> Result<()> {
    for number in 0..1_000 {
        programs.insert("DROPLETS", droplet(number).octets(), DropletEntry { flags: 0 })?;
    }
    for vni in 1..=100 {
        let entry = VpcEntry::new(vni, 0, members(&[droplet(vni)]));
        programs.insert("VPCS", vni, entry)?;
        for network in 0..3 {
            let entry = SubnetEntry {
                network: vni * 3 + network,
                flags: 0,
                bouncers: members(&[droplet(vni)]),
            };
            programs.insert_subnet(vni, pod(network << 16), 16, entry)?;
        }
        let key = key(vni, pod(vni));
        let attachment = AttachmentEntry {
            ifindex: vni,
            vni,
            address: key.address,
            network: vni * 3,
            mac: [2; 6],
            flags: 0,
            outer_dscp: 0,
            class: 0,
            ingress_set: 0,
            egress_set: 0,
        };
        programs.insert("ATTACHMENTS", vni, attachment)?;
        let local = LocalEntry {
            vni,
            ifindex: vni,
            mac: [2; 6],
            flags: 0,
        };
        programs.set_local(key, local)?;
        for number in 0..100 {
            let key = self::key(vni, pod(256 + number));
            programs.set_remote(RemoteRow::Bouncer, key, droplet(number))?;
        }
    }
    Ok(())
}

fn fill_services(programs: &mut Programs) -> Result<()> {
    for id in 0..SERVICES {
        let service = Ipv4Addr::from_bits((11 << 24) + id);
        let backends: Vec<_> = (0..BACKENDS)
            .map(|number| (pod(id * BACKENDS + number).into(), 8080))
            .collect();
        Served::new(1, id, service.into(), 80, 6).by(programs, &backends)?;
    }
    // A connection has an entry for each direction.
    for number in 0..CONNECTIONS {
        let (client, backend) = (address(pod(256)), address(pod(number)));
        for (direction, [source, destination]) in [(FORWARD, [client, backend]), (REVERSE, [backend, client])]
        {
            let key = ConnectionKey {
                vni: 1,
                ports: [(number as u16).to_be(), 80_u16.to_be()],
                source,
                destination,
                protocol: 6,
                direction,
                padding: 0,
            };
            let entry = ConnectionEntry {
                vni: 1,
                index: 0,
                time: 0,
                address: destination,
                port: 0,
                state: 0,
                service: 0,
                client_port: 0,
                padding: 0,
                payer: 1,
            };
            programs.insert("CONNECTIONS", key, entry)?;
        }
    }
    Ok(())
}

//! Kernel memory of all maps of a droplet with 100 pods, 10,000 bouncer rows, 1,000 droplets, 100 VPCs and 300
//! networks, as the kernel accounts it (`memlock` in fdinfo).

use std::{collections::BTreeMap, fs, net::Ipv4Addr};

use anyhow::{Context, Result};
use thuban_common::tables::{AttachmentEntry, DropletEntry, LocalEntry, RemoteRow, SubnetEntry, VpcEntry};

use crate::{
    bench::{
        datapath::{Case, Plan},
        float,
        results::Sample,
    },
    programs::{Programs, key, members},
};

pub const NAME: &str = "maps-100-pods-10k-rows";

pub struct MemoryCase;

impl Case for MemoryCase {
    fn name(&self) -> &'static str {
        NAME
    }

    fn metrics(&self) -> Vec<&'static str> {
        vec!["map_mib"]
    }

    fn measure(&mut self, _plan: &Plan) -> Result<Vec<Sample>> {
        // Maps of other cases are in this process, too.
        let before = maps()?;
        let mut programs = Programs::load()?;
        fill(&mut programs)?;
        let after = maps()?;
        let own = after.iter().filter(|(id, _)| !before.contains_key(id));
        let bytes: u64 = own.map(|(_, bytes)| bytes).sum();
        Ok(vec![Sample::new("map_mib", "MiB", float(bytes) / float(1 << 20))])
    }
}

/// Returns the bytes of every map that this process holds, by id.
fn maps() -> Result<BTreeMap<u64, u64>> {
    let mut maps = BTreeMap::new();
    for entry in fs::read_dir("/proc/self/fdinfo").context("/proc/self/fdinfo")? {
        // A descriptor that is gone by now is no map.
        let Ok(text) = fs::read_to_string(entry?.path()) else {
            continue;
        };
        let field = |name: &str| -> Option<u64> {
            let line = text.lines().find(|line| line.starts_with(name))?;
            line.split_once(':')?.1.trim().parse().ok()
        };
        if let (Some(id), Some(bytes)) = (field("map_id:"), field("memlock:")) {
            maps.insert(id, bytes);
        }
    }
    Ok(maps)
}

fn fill(programs: &mut Programs) -> Result<()> {
    let droplet = |number: u32| Ipv4Addr::from_bits((172 << 24) + number);
    let pod = |number: u32| Ipv4Addr::from_bits((10 << 24) + number);
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
            padding: 0,
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

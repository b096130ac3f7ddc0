//! The eBPF object as tests use it: never pinned, with tables filled row by row.

mod lent;
mod wipe;

use std::{
    collections::BTreeMap,
    env,
    fs::File,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{Array, HashMap, LpmTrie, PerCpuArray, PerCpuHashMap, PerCpuValues, RingBuf, lpm_trie::Key},
    programs::{SchedClassifier, TcAttachType, Xdp, XdpMode, links::FdLink},
};
use thuban_common::{
    counters::Counter,
    flow_events::{SeenFlowEntry, SeenFlowKey},
    packet::ipv4::mapped,
    services::{CONNECTIONS_CAPACITY, QUOTA_SHARED},
    tables::{
        ConfigEntry, DropletAddress, EndpointEntry, EndpointKey, LoadKey, LocalEntry, MAX_MEMBERS, Members,
        OnLinkEntry, RemoteRow, SOURCE_FRONT_BITS, SourceEntry, SourceKey, SubnetEntry, SubnetKey,
    },
};
use transitd::dataplane::{filter, loader::verified, sk_buff};

pub use self::lent::Lent;

/// Returns the path where `cargo xtask build-ebpf` puts the object; THUBAN_PROGRAMS names another one.
pub fn object() -> PathBuf {
    let built = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bpf/thuban-programs.o");
    env::var_os("THUBAN_PROGRAMS").map_or_else(built, PathBuf::from)
}

/// Returns an address as tables key it.
pub fn address(address: impl Into<IpAddr>) -> [u8; 16] {
    match address.into() {
        IpAddr::V4(address) => mapped(address.octets()),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Returns the key of an endpoint.
pub fn key(vni: u32, endpoint: impl Into<IpAddr>) -> EndpointKey {
    EndpointKey {
        vni,
        address: address(endpoint),
    }
}

/// Returns the members of a role.
pub fn members(droplets: &[Ipv4Addr]) -> Members {
    let mut members = Members {
        count: droplets.len() as u32,
        droplets: [[0; 4]; MAX_MEMBERS],
    };
    for (slot, droplet) in members.droplets.iter_mut().zip(droplets) {
        *slot = droplet.octets();
    }
    members
}

/// All programs and their maps, loaded into the kernel.
pub struct Programs {
    pub ebpf: Ebpf,
    /// Where programs are attached, but for agents at tc.
    links: Vec<FdLink>,
    /// The network namespaces and interfaces at which the agent is attached at tc.
    filters: Vec<(File, String)>,
}

impl Programs {
    /// Makes all maps, some of them with so many entries, and verifies no program.
    pub fn open(entries: &[(&str, u32)]) -> Result<Self> {
        let path = object();
        let layout = sk_buff::of_kernel()?;
        let mut loader = EbpfLoader::new();
        loader.override_global(sk_buff::SKB_LAYOUT, &layout, true);
        for (map, entries) in entries {
            loader.map_max_entries(map, *entries);
        }
        let ebpf = loader.load_file(&path).with_context(|| {
            format!(
                "loading {}; run `cargo xtask build-ebpf` first, as root",
                path.display()
            )
        })?;
        Ok(Self {
            ebpf,
            links: Vec::new(),
            filters: Vec::new(),
        })
    }

    /// Loads and verifies every program.
    pub fn load() -> Result<Self> {
        let mut programs = Self::open(&[])?;
        for (name, program) in programs.ebpf.programs_mut() {
            let name = name.to_owned();
            match program {
                aya::programs::Program::Xdp(program) => verified(|| program.load()),
                aya::programs::Program::SchedClassifier(program) => verified(|| program.load()),
                _ => continue,
            }
            .with_context(|| format!("verifying {name}"))?;
        }
        programs.start()?;
        Ok(programs)
    }

    /// Writes what tables hold before they have rows.
    fn start(&mut self) -> Result<()> {
        self.set("QUOTAS", QUOTA_SHARED, CONNECTIONS_CAPACITY / 2)
    }

    /// Returns the program of a tc hook.
    pub fn tc(&mut self, name: &str) -> Result<&mut SchedClassifier> {
        Ok(self
            .ebpf
            .program_mut(name)
            .with_context(|| format!("no program {name}"))?
            .try_into()?)
    }

    /// Returns the program of an XDP hook.
    pub fn xdp(&mut self, name: &str) -> Result<&mut Xdp> {
        Ok(self
            .ebpf
            .program_mut(name)
            .with_context(|| format!("no program {name}"))?
            .try_into()?)
    }

    /// Attaches a program at tc ingress of an interface of the calling thread's network namespace; the agent is
    /// attached as transitd does it.
    pub fn attach_tc(&mut self, name: &str, interface: &str) -> Result<()> {
        let context = || format!("attaching {name} to {interface}");
        if name == "agent_tc" {
            let namespace = File::open("/proc/thread-self/ns/net").context("/proc/thread-self/ns/net")?;
            self.filters.push((namespace, interface.to_owned()));
            return filter::attach(self.tc(name)?, interface).with_context(context);
        }
        let program = self.tc(name)?;
        let id = program
            .attach(interface, TcAttachType::Ingress)
            .with_context(context)?;
        let link = program.take_link(id).with_context(context)?;
        self.links.push(link.try_into()?);
        Ok(())
    }

    /// Attaches a program natively at XDP of an interface of the calling thread's network namespace.
    pub fn attach_xdp(&mut self, name: &str, interface: &str) -> Result<()> {
        let context = || format!("attaching {name} to {interface}");
        let program = self.xdp(name)?;
        let id = program.attach(interface, XdpMode::Driver).with_context(context)?;
        let link = program.take_link(id).with_context(context)?;
        self.links.push(link.try_into()?);
        Ok(())
    }

    pub fn configure(&mut self, config: ConfigEntry) -> Result<()> {
        let mut array: Array<_, ConfigEntry> = self.ebpf.map_mut("CONFIG").context("CONFIG")?.try_into()?;
        Ok(array.set(0, config, 0)?)
    }

    /// Sets flags of CONFIG beside those that are set.
    pub fn set_flags(&mut self, flags: u32) -> Result<()> {
        let config: ConfigEntry = self.element("CONFIG", 0)?;
        self.configure(ConfigEntry {
            flags: config.flags | flags,
            ..config
        })
    }

    /// Writes the range of droplets that the uplink reaches without a gateway: the first 24 bits of this address.
    pub fn set_on_link(&mut self, [a, b, c, _]: DropletAddress) -> Result<()> {
        let mut array: Array<_, OnLinkEntry> = self.ebpf.map_mut("ON_LINK").context("ON_LINK")?.try_into()?;
        let entry = OnLinkEntry {
            network: [a, b, c, 0],
            mask: [255, 255, 255, 0],
        };
        Ok(array.set(0, entry, 0)?)
    }

    /// Writes a row of one of the hash maps.
    pub fn insert<K: Pod, V: Pod>(&mut self, map: &str, key: K, entry: V) -> Result<()> {
        let mut rows: HashMap<_, K, V> = self
            .ebpf
            .map_mut(map)
            .with_context(|| map.to_owned())?
            .try_into()?;
        rows.insert(key, entry, 0)
            .with_context(|| format!("inserting into {map}"))
    }

    /// Writes the row that says where an endpoint is on this droplet.
    pub fn set_local(&mut self, key: EndpointKey, local: LocalEntry) -> Result<()> {
        self.change_endpoint(key, |entry| entry.local = local)
    }

    /// Removes the row that says where an endpoint is on this droplet.
    pub fn remove_local(&mut self, key: EndpointKey) -> Result<()> {
        let nowhere = EndpointEntry::new(key.vni).local;
        self.change_endpoint(key, |entry| entry.local = nowhere)
    }

    /// Writes a row that names a droplet.
    pub fn set_remote(&mut self, row: RemoteRow, key: EndpointKey, droplet: Ipv4Addr) -> Result<()> {
        self.change_endpoint(key, |entry| *entry.remote(row) = droplet.octets())
            .with_context(|| format!("{row:?} of {key:?}"))
    }

    fn change_endpoint(&mut self, key: EndpointKey, change: impl FnOnce(&mut EndpointEntry)) -> Result<()> {
        let mut rows: HashMap<_, EndpointKey, EndpointEntry> =
            self.ebpf.map_mut("ENDPOINTS").context("ENDPOINTS")?.try_into()?;
        let mut entry = rows.get(&key, 0).unwrap_or(EndpointEntry::new(key.vni));
        change(&mut entry);
        if entry.is_empty() {
            return rows.remove(&key).context("removing from ENDPOINTS");
        }
        rows.insert(key, entry, 0).context("inserting into ENDPOINTS")
    }

    /// Writes an element of one of the arrays.
    pub fn set<V: Pod>(&mut self, map: &str, index: u32, value: V) -> Result<()> {
        let mut array: Array<_, V> = self
            .ebpf
            .map_mut(map)
            .with_context(|| map.to_owned())?
            .try_into()?;
        Ok(array.set(index, value, 0)?)
    }

    /// Returns an element of one of the arrays.
    pub fn element<V: Pod>(&self, map: &str, index: u32) -> Result<V> {
        let array: Array<_, V> = self.ebpf.map(map).with_context(|| map.to_owned())?.try_into()?;
        Ok(array.get(&index, 0)?)
    }

    /// Has flows judged anew, as after a change of policy.
    pub fn raise_epoch(&mut self) -> Result<()> {
        let epoch: u32 = self.element("POLICY", 0)?;
        self.set("POLICY", 0, epoch + 1)
    }

    /// Makes the entry that counts a role's packets, as transitd does for a role that is here.
    pub fn count_load(&mut self, role: LoadKey) -> Result<()> {
        let mut loads: PerCpuHashMap<_, LoadKey, u64> =
            self.ebpf.map_mut("LOADS").context("LOADS")?.try_into()?;
        let cpus = aya::util::nr_cpus().map_err(|(_, error)| error);
        let zeros = PerCpuValues::try_from(vec![0; cpus?])?;
        loads.insert(role, zeros, 0).context("inserting into LOADS")
    }

    pub fn remove<K: Pod, V: Pod>(&mut self, map: &str, key: &K) -> Result<()> {
        let mut rows: HashMap<_, K, V> = self
            .ebpf
            .map_mut(map)
            .with_context(|| map.to_owned())?
            .try_into()?;
        rows.remove(key).with_context(|| format!("removing from {map}"))
    }

    pub fn get<K: Pod, V: Pod>(&self, map: &str, key: &K) -> Result<V> {
        let rows: HashMap<_, K, V> = self.ebpf.map(map).with_context(|| map.to_owned())?.try_into()?;
        rows.get(key, 0).with_context(|| format!("reading {map}"))
    }

    /// Writes a row of SUBNETS; `prefix` counts bits of the address as it is written.
    pub fn insert_subnet(
        &mut self,
        vni: u32,
        base: impl Into<IpAddr>,
        prefix: u32,
        entry: SubnetEntry,
    ) -> Result<()> {
        let mut trie: LpmTrie<_, SubnetKey, SubnetEntry> =
            self.ebpf.map_mut("SUBNETS").context("SUBNETS")?.try_into()?;
        let base = base.into();
        let before = if base.is_ipv4() { 32 + 96 } else { 32 };
        let data = SubnetKey {
            vni: vni.to_be_bytes(),
            address: address(base),
        };
        trie.insert(&Key::new(before + prefix, data), entry, 0)
            .context("inserting into SUBNETS")
    }

    /// Writes a row of `SOURCE_RANGES`; `prefix` counts bits of the client's address.
    pub fn insert_source(&mut self, key: SourceKey, prefix: u32, entry: SourceEntry) -> Result<()> {
        let map = self.ebpf.map_mut("SOURCE_RANGES").context("SOURCE_RANGES")?;
        let mut trie: LpmTrie<_, SourceKey, SourceEntry> = map.try_into()?;
        trie.insert(&Key::new(SOURCE_FRONT_BITS + prefix, key), entry, 0)
            .context("inserting into SOURCE_RANGES")
    }

    /// Returns how long and how often a program ran, while the kernel counted that.
    pub fn runs(&self, name: &str) -> Result<(Duration, u64)> {
        let program = self.ebpf.program(name);
        let program = program.with_context(|| format!("no program {name}"))?.info()?;
        Ok((program.run_time(), program.run_count()))
    }

    /// Returns a counter, summed over CPUs.
    pub fn counter(&self, counter: Counter) -> Result<u64> {
        let counters: PerCpuArray<_, u64> = self.ebpf.map("COUNTERS").context("COUNTERS")?.try_into()?;
        Ok(counters.get(&(counter as u32), 0)?.iter().sum())
    }

    /// Returns all counters that aren't zero, by name.
    pub fn counters(&self) -> Result<BTreeMap<&'static str, u64>> {
        let mut counters = BTreeMap::new();
        for counter in Counter::ALL {
            let value = self.counter(*counter)?;
            if value != 0 {
                counters.insert(counter.name(), value);
            }
        }
        Ok(counters)
    }

    /// Whether programs remember any flow that they told of.
    pub fn has_seen_flows(&self) -> Result<bool> {
        let map = self.ebpf.map("SEEN_FLOWS").context("SEEN_FLOWS")?;
        let flows: HashMap<_, SeenFlowKey, SeenFlowEntry> = map.try_into()?;
        Ok(flows.keys().next().is_some())
    }

    /// Takes the events out of DIRECT_WANTED.
    pub fn take_wanted(&mut self) -> Result<Vec<EndpointKey>> {
        let mut ring: RingBuf<_> = self
            .ebpf
            .map_mut("DIRECT_WANTED")
            .context("DIRECT_WANTED")?
            .try_into()?;
        let mut wanted = Vec::new();
        while let Some(item) = ring.next() {
            let (vni, address) = item.split_at(4);
            wanted.push(EndpointKey {
                vni: u32::from_ne_bytes(vni.try_into()?),
                address: address.try_into()?,
            });
        }
        Ok(wanted)
    }
}

//! Packets a second that one core bounces or divides, with real frames.
//!
//! A veth in one namespace: `live0` is the droplet's uplink with `transit_xdp`, `live1` is its far end. A generator
//! runs as BPF_PROG_TEST_RUN with live frames "received" at `live1`: it writes the headers anew (frames come back as
//! the last program left them) and sends the frames to `live0`. Transit sends them back, and a program at `live1` drops
//! them. Each end is served by a kernel thread of its own (threaded NAPI). Core 1 does only the work of a bouncer's
//! core: it takes a frame off the ring, runs transit, and puts the frame onto the other ring. Core 0 does the rest
//! (dropping before generating). `offered_mpps` is the rate of frames that came to the ring. Where it is above `mpps`,
//! the bouncer's core was busy all the time, and `mpps` is the most that it can do.

use std::{
    fs,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use thuban_cluster::{command::run, wait::wait_until};
use thuban_common::{counters::Counter, tables::ConfigEntry};

use super::{
    assembly::{XDP_DROP, answer, restore_and_send},
    raw::{self, Type},
    world::{BOUNCED, DIVIDED, DIVIDED_VNI, HERE, REMOTE, SECOND, THIRD, VNI, World, from_wire},
};
use crate::{
    bench::{
        datapath::{Case, Plan},
        float,
        process::{pin, place},
        results::Sample,
    },
    rig::namespace::Namespace,
};

const FRAMES: u32 = 1 << 16;
/// Bytes of Ethernet and outer IPv4, rounded up to words.
pub const REWRITTEN: usize = 40;
const GENERATOR_CORE: usize = 0;
const BOUNCER_CORE: usize = 1;

/// A world with the veth of live frames as its uplink.
pub struct Rig {
    pub world: World,
    far: u32,
    // The program that drops frames at the far end while it lives.
    _drop: OwnedFd,
}

struct LiveCase {
    name: &'static str,
    rig: Arc<Rig>,
    frame: Vec<u8>,
    generator: OwnedFd,
    counter: Counter,
}

pub fn add_cases(plan: &Plan, cases: &mut Vec<Box<dyn Case>>) -> Result<()> {
    let [from, to] = DIVIDED;
    let mut wanted = vec![
        ("live-bounce", from_wire(VNI, REMOTE, BOUNCED), Counter::Bounced),
        ("live-divide", from_wire(DIVIDED_VNI, from, to), Counter::Divided),
    ];
    wanted.retain(|(name, ..)| plan.wants_case(name));
    if wanted.is_empty() {
        return Ok(());
    }
    let rig = Arc::new(Rig::new(None)?);
    for (name, frame, counter) in wanted {
        let (beginning, _) = frame[..REWRITTEN].as_chunks();
        cases.push(Box::new(LiveCase {
            name,
            rig: Arc::clone(&rig),
            generator: raw::load(Type::Xdp, &restore_and_send(beginning, None))?,
            frame,
            counter,
        }));
    }
    Ok(())
}

impl Rig {
    /// Makes a rig, with room for more bouncer rows if a number is given.
    pub fn new(bouncer_rows: Option<u32>) -> Result<Self> {
        let mut world = World::new(bouncer_rows)?;
        let namespace = &world.namespace;
        namespace.command("ip addr del 192.0.2.1/24 dev uplink")?;
        namespace.command("ip link add live0 type veth peer name live1")?;
        for interface in ["live0", "live1"] {
            namespace.command(&format!("ip link set {interface} up"))?;
        }
        namespace.command(&format!("ip addr add {HERE}/24 dev live0"))?;
        for droplet in [SECOND, THIRD] {
            namespace.command(&format!(
                "ip neigh replace {droplet} lladdr 02:02:02:02:02:02 dev live0 nud permanent"
            ))?;
        }
        world.uplink = namespace.interface("live0")?;
        let far = namespace.interface("live1")?;
        world.programs.configure(ConfigEntry {
            droplet: HERE.octets(),
            uplink: world.uplink,
            mtu: 1500,
            flags: thuban_common::tables::CONFIG_TRANSIT_AT_XDP,
            seed: 0,
        })?;
        let World {
            namespace, programs, ..
        } = &mut world;
        namespace.run(|| programs.attach_xdp("transit_xdp", "live0"))?;
        let program = raw::load(Type::Xdp, &answer(XDP_DROP))?;
        let drop = namespace.run(|| raw::attach_xdp(program.as_fd(), far))?;
        serve(namespace, "live0", BOUNCER_CORE)?;
        serve(namespace, "live1", GENERATOR_CORE)?;
        Ok(Self {
            world,
            far,
            _drop: drop,
        })
    }

    /// Returns the millions of packets a second that transit sent on, by its counter, and that a generator offered.
    /// Takes a third of the given time, and at least a second.
    pub fn rates(
        &self,
        generator: BorrowedFd,
        frame: &[u8],
        counter: Counter,
        time: Duration,
    ) -> Result<(f64, f64)> {
        let context = raw::context(Type::Xdp, frame, self.far);
        let time = (time / 3).max(Duration::from_secs(1));
        let count = || self.world.programs.counter(counter);
        let before = count()?;
        let (frames, elapsed) = self.world.namespace.run(|| {
            pin(GENERATOR_CORE)?;
            let start = Instant::now();
            let mut frames = 0;
            while start.elapsed() < time {
                raw::run_live(generator, frame, &context, FRAMES)?;
                frames += u64::from(FRAMES);
            }
            Ok((frames, start.elapsed()))
        })?;
        let done = count()? - before;
        ensure!(done > 10_000, "only {done} of {frames} frames were sent on");
        let rate = |count| float(count) / elapsed.as_secs_f64() / 1e6;
        Ok((rate(done), rate(frames)))
    }
}

impl Case for LiveCase {
    fn name(&self) -> &str {
        self.name
    }

    fn metrics(&self) -> Vec<&'static str> {
        vec!["mpps", "offered_mpps"]
    }

    fn measure(&mut self, plan: &Plan) -> Result<Vec<Sample>> {
        let (done, offered) = self
            .rig
            .rates(self.generator.as_fd(), &self.frame, self.counter, plan.time)?;
        Ok(vec![
            Sample::new("mpps", "Mpps", done),
            Sample::new("offered_mpps", "Mpps", offered),
        ])
    }
}

/// Moves an interface's receiving to a kernel thread on one core.
fn serve(namespace: &Namespace, interface: &str, core: usize) -> Result<()> {
    let script = format!("echo 1 >/sys/class/net/{interface}/threaded");
    run("ip", &["netns", "exec", namespace.name(), "sh", "-c", &script])
        .with_context(|| format!("threaded NAPI of {interface}"))?;
    let prefix = format!("napi/{interface}-");
    let what = format!("a kernel thread that serves {interface}");
    wait_until(&what, Duration::from_secs(1), Duration::from_millis(20), || {
        let threads = threads(&prefix)?;
        for thread in &threads {
            place(*thread, core, 2)?;
        }
        Ok((!threads.is_empty()).then_some(()))
    })
}

/// Returns the threads whose name has this prefix.
fn threads(prefix: &str) -> Result<Vec<i32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("/proc")? {
        let entry = entry?;
        let Ok(number) = entry.file_name().to_string_lossy().parse() else {
            continue;
        };
        // A thread that ended meanwhile has no name.
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if name.starts_with(prefix) {
            found.push(number);
        }
    }
    Ok(found)
}

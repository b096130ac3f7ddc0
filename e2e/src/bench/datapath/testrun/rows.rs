//! The cost of a bounce as BOUNCER_ROWS grows: transit at XDP.
//!
//! `mpps_active` and `mpps_random`: packets a second of one core by live frames, as in [`super::live`]. This is the
//! rate that a bouncer sees. `ns_active` and `ns_random`: the program alone by single runs, as in [`super`]. Between
//! them 3 ms pass until a row is looked at again, so that other work of the machine has taken the caches.
//!
//! `active`: packets to a thousand endpoints in turn (to all of them where there are fewer), because caches hold the
//! rows in use. `random`: each packet to any row, so that with many rows nearly every look misses the caches. The map
//! has room for the largest size in every case. A sample in nanoseconds is the median of all its packets.

use std::{
    net::Ipv4Addr,
    os::fd::{AsFd, OwnedFd},
};

use anyhow::{Result, ensure};
use thuban_common::{counters::Counter, tables::RemoteRow};
use thuban_testkit::packets::checksum;

use super::{
    CORE,
    assembly::{Scatter, XDP_PASS, XDP_TX, answer, restore_and_send},
    live::{REWRITTEN, Rig},
    median,
    raw::{self, Type},
    world::{REMOTE, THIRD, VNI, from_wire},
};
use crate::bench::{
    datapath::{Case, Plan},
    process::pin,
    results::Sample,
};

pub const SIZES: [u32; 5] = [100, 1_000, 10_000, 100_000, 1_000_000];
const ROOM: u32 = 1 << 20;
const ACTIVE: u32 = 1_000;
const CALLS: u32 = 30_000;
/// The offset of the inner IPv4 header.
const INNER: usize = 50 + 14;

pub fn name(rows: u32) -> String {
    format!("rows-{rows}")
}

pub struct RowsCase {
    name: String,
    rows: u32,
    rig: Rig,
    idle: OwnedFd,
    random: Random,
}

/// Marsaglia's xorshift: numbers that no cache predicts.
struct Random(u32);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }
}

/// Returns an endpoint by its number, in the network that is bounced here.
fn endpoint(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits((11 << 24) + 256 + number)
}

impl RowsCase {
    pub fn new(rows: u32) -> Result<Self> {
        let mut rig = Rig::new(Some(ROOM))?;
        for number in 0..rows {
            rig.world.row(RemoteRow::Bouncer, endpoint(number), THIRD)?;
        }
        Ok(Self {
            name: name(rows),
            rows,
            rig,
            idle: raw::load(Type::Xdp, &answer(XDP_PASS))?,
            random: Random(0x9e37_79b9),
        })
    }

    /// Returns the nanoseconds of a bounce to endpoints in turn, less those of a program that does nothing.
    fn bounce(&self, endpoints: &[u32]) -> Result<f64> {
        let mut frame = from_wire(VNI, REMOTE, endpoint(0));
        let context = raw::context(Type::Xdp, &frame, self.rig.world.uplink);
        let program = self.rig.world.program("transit_xdp")?;
        let before = self.rig.world.programs.counter(Counter::Bounced)?;
        let (own, idle) = self.rig.world.namespace.run(|| {
            pin(CORE)?;
            let (mut own, mut idle) = (Vec::new(), Vec::new());
            for _ in 0..ACTIVE {
                idle.push(raw::run(self.idle.as_fd(), &frame, &context)?.1);
            }
            for number in endpoints {
                address(&mut frame, endpoint(*number));
                let (verdict, time) = raw::run(program, &frame, &context)?;
                ensure!(verdict == XDP_TX, "verdict {verdict} instead of XDP_TX");
                own.push(time);
            }
            Ok((median(own), median(idle)))
        })?;
        let bounced = self.rig.world.programs.counter(Counter::Bounced)? - before;
        ensure!(bounced == endpoints.len() as u64, "only {bounced} bounced");
        Ok(own - idle)
    }

    /// Returns the millions of live frames a second, to this many endpoints, evenly spread over the rows.
    fn rate(&self, endpoints: u32, plan: &Plan) -> Result<f64> {
        let frame = from_wire(VNI, REMOTE, endpoint(0));
        let (beginning, _) = frame[..REWRITTEN].as_chunks();
        let scatter = Scatter {
            offset: INNER as u16 + 16,
            first: endpoint(0).to_bits(),
            step: self.rows / endpoints,
            count: endpoints,
        };
        let generator = raw::load(Type::Xdp, &restore_and_send(beginning, Some(scatter)))?;
        let rates = self
            .rig
            .rates(generator.as_fd(), &frame, Counter::Bounced, plan.time)?;
        Ok(rates.0)
    }
}

impl Case for RowsCase {
    fn name(&self) -> &str {
        &self.name
    }

    fn metrics(&self) -> Vec<&'static str> {
        vec!["mpps_active", "mpps_random", "ns_active", "ns_random"]
    }

    fn measure(&mut self, plan: &Plan) -> Result<Vec<Sample>> {
        let mut any =
            |count: u32| -> Vec<u32> { (0..count).map(|_| self.random.next() % self.rows).collect() };
        let chosen = any(ACTIVE.min(self.rows));
        let random = any(CALLS);
        let active: Vec<u32> = chosen.iter().copied().cycle().take(CALLS as usize).collect();
        self.bounce(&chosen)?;
        let few = ACTIVE.min(self.rows);
        Ok(vec![
            Sample::new("mpps_active", "Mpps", self.rate(few, plan)?),
            Sample::new("mpps_random", "Mpps", self.rate(self.rows, plan)?),
            Sample::new("ns_active", "ns", self.bounce(&active)?),
            Sample::new("ns_random", "ns", self.bounce(&random)?),
        ])
    }
}

/// Writes the inner destination and the checksum of its header.
fn address(frame: &mut [u8], destination: Ipv4Addr) {
    let header = &mut frame[INNER..INNER + 20];
    header[16..20].copy_from_slice(&destination.octets());
    header[10..12].fill(0);
    let sum = checksum(header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
}

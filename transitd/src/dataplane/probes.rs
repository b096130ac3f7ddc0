//! PROBES: the droplets that this droplet probes, when each answered last, and how they are probed.
//!
//! A question takes the path of packets: `probe_tc` gives it to transit at the NIC, which sends it. No socket takes
//! part, so the node's stack stays closed to the overlay's port. Must not decide who is silent: `tasks::probe_members`
//! does.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use aya::Ebpf;
use aya::maps::{Map, MapData, MapError, PerCpuArray};
use aya::programs::{ProgramError, SchedClassifier, TestRun, TestRunOptions};
use thiserror::Error;
use thuban_common::counters::Counter;
use thuban_common::packet::probe::ProbeFrame;
use thuban_common::tables::{DropletAddress, ProbeEntry};

use super::loader::{LoadError, verified};
use super::tables::{Hash, TableError, access, data, hash, lookup, open, take};

const PROGRAM: &str = "probe_tc";
const TABLE: &str = "PROBES";
/// The counters of packets that go by way of other droplets' roles, or this one's.
const RELAYED: [Counter; 4] = [
    Counter::SentToBouncer,
    Counter::SentToDivider,
    Counter::Bounced,
    Counter::Divided,
];
/// The first of the ports from which source ports are taken, as for flows, so that questions use the paths of the
/// underlay in turn.
const FIRST_PORT: u16 = 49152;

#[derive(Debug, Error)]
pub enum ProbeError {
    #[error("cannot run program {PROGRAM}")]
    Run(#[source] ProgramError),
    #[error("the uplink does not send probes: it is down, or its queue is full")]
    Refused,
    #[error("cannot read the counters")]
    Counters(#[source] MapError),
    #[error(transparent)]
    Table(#[from] TableError),
}

pub struct Probes {
    table: Hash<DropletAddress, ProbeEntry>,
    counters: PerCpuArray<MapData, u64>,
    program: SchedClassifier,
    here: DropletAddress,
    /// The number of the last question that was sent.
    number: u16,
}

impl Probes {
    /// Loads the program and opens the pinned maps. `here`: the droplet's own address.
    pub fn open(ebpf: &mut Ebpf, maps: &Path, here: DropletAddress) -> Result<Self, LoadError> {
        let program = ebpf
            .program_mut(PROGRAM)
            .ok_or(LoadError::MissingProgram(PROGRAM))?;
        let refused = |source| LoadError::Verify {
            name: PROGRAM,
            source,
        };
        let program: &mut SchedClassifier = program.try_into().map_err(refused)?;
        verified(|| program.load()).map_err(refused)?;
        let info = program.info().map_err(refused)?;
        let tables = |source| LoadError::Tables(Box::new(source));
        let counters = data(maps, "COUNTERS").map_err(tables)?;
        let counters = PerCpuArray::try_from(Map::PerCpuArray(counters)).map_err(open("COUNTERS"));
        Ok(Self {
            table: hash(maps, TABLE).map_err(tables)?,
            counters: counters.map_err(tables)?,
            program: SchedClassifier::from_program_info(info, PROGRAM.into()).map_err(refused)?,
            here,
            number: 0,
        })
    }

    pub fn here(&self) -> DropletAddress {
        self.here
    }

    /// Returns all entries, also those of an earlier transitd.
    pub fn entries(&self) -> Result<BTreeMap<DropletAddress, ProbeEntry>, TableError> {
        self.table
            .iter()
            .collect::<Result<_, _>>()
            .map_err(access("read", TABLE))
    }

    /// Returns the droplets that an earlier transitd found silent.
    pub fn silent(&self) -> Result<BTreeSet<DropletAddress>, TableError> {
        let entries = self.entries()?.into_iter();
        let silent = entries.filter(|(_, entry)| entry.silent != 0);
        Ok(silent.map(|(droplet, _)| droplet).collect())
    }

    /// Makes the entry of a droplet that is to be asked. The entry says that the droplet was never heard.
    pub fn begin(&mut self, droplet: DropletAddress) -> Result<(), TableError> {
        let entry = ProbeEntry {
            // `RandomState` has keys from the system's randomness.
            secret: RandomState::new().hash_one(droplet) | 1,
            ..ProbeEntry::default()
        };
        self.write(droplet, entry)
    }

    pub fn end(&mut self, droplet: DropletAddress) -> Result<(), TableError> {
        take(&mut self.table, TABLE, &droplet)
    }

    /// Returns when the droplet answered last, ns since boot; 0 for never.
    pub fn heard(&self, droplet: DropletAddress) -> Result<u64, TableError> {
        let entry = lookup(TABLE, self.table.get(&droplet, 0))?;
        Ok(entry.map_or(0, |entry| entry.heard))
    }

    /// Stores for the next transitd whether the droplet is silent.
    pub fn remember(&mut self, droplet: DropletAddress, is_silent: bool) -> Result<(), TableError> {
        let Some(entry) = lookup(TABLE, self.table.get(&droplet, 0))? else {
            return Ok(());
        };
        let silent = is_silent.into();
        self.write(droplet, ProbeEntry { silent, ..entry })
    }

    /// Asks a droplet that has an entry.
    pub fn ask(&mut self, droplet: DropletAddress) -> Result<(), ProbeError> {
        let Some(entry) = lookup(TABLE, self.table.get(&droplet, 0))? else {
            return Ok(());
        };
        self.number = self.number.wrapping_add(1);
        let port = FIRST_PORT | self.number;
        let frame = ProbeFrame::wanted(self.here, droplet, entry.secret, port);
        let options = TestRunOptions {
            data_in: Some(frame.bytes()),
            ..TestRunOptions::new()
        };
        let result = self.program.test_run(options).map_err(ProbeError::Run)?;
        if result.return_value == 0 {
            Ok(())
        } else {
            Err(ProbeError::Refused)
        }
    }

    /// Returns the number of packets that this droplet gave to roles.
    pub fn relayed(&self) -> Result<u64, ProbeError> {
        let count = |counter: Counter| -> Result<u64, MapError> {
            Ok(self.counters.get(&(counter as u32), 0)?.iter().sum())
        };
        RELAYED
            .into_iter()
            .map(count)
            .sum::<Result<u64, _>>()
            .map_err(ProbeError::Counters)
    }

    fn write(&mut self, droplet: DropletAddress, entry: ProbeEntry) -> Result<(), TableError> {
        self.table
            .insert(droplet, entry, 0)
            .map_err(access("write", TABLE))
    }
}

impl fmt::Debug for Probes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Probes").finish_non_exhaustive()
    }
}

//! The rigs that traffic passes: droplets in namespaces, set up once for each case and left alone while other cases are
//! measured.
//!
//! Every path has its proof: counters of the programs that a measurement must raise, and others that it must not raise.
//! So a case measures what its name says. Cases without Thuban have none of its programs attached.

pub mod cable;
pub mod node;
pub mod switch;

use std::{net::Ipv4Addr, rc::Rc, thread, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use thuban_common::counters::Counter;

use super::{Case, Plan};
use crate::{
    bench::{
        results::Sample,
        traffic::{Ends, Measure},
    },
    rig::{namespace::Namespace, traffic::ping},
};
use node::Node;

/// Least growth of a counter that proves a path: more than ARP and a handshake cause.
const PROOF: u64 = 100;

/// Two pods on droplets, and the proof of the way between them.
pub struct Path {
    pub name: String,
    pub nodes: Rc<Vec<Node>>,
    pub client: Namespace,
    pub server: Namespace,
    pub address: Ipv4Addr,
    pub measures: &'static [Measure],
    /// Counters of nodes that traffic raises.
    pub raised: Vec<(usize, Counter)>,
    /// Counters of nodes that traffic leaves unchanged.
    pub untouched: Vec<(usize, Counter)>,
}

impl Path {
    /// Waits until the server answers a ping.
    pub fn ready(self) -> Result<Self> {
        for _ in 0..10 {
            if ping(&self.client, self.address, 56)? {
                return Ok(self);
            }
            thread::sleep(Duration::from_millis(100));
        }
        for node in self.nodes.iter() {
            if let Some(programs) = &node.programs {
                eprintln!("{}: {:?}", node.address, programs.counters()?);
            }
        }
        bail!("{}: no ping comes through", self.name)
    }

    fn counter(&self, node: usize, counter: Counter) -> Result<u64> {
        let programs = self.nodes.get(node).and_then(|node| node.programs.as_ref());
        programs
            .with_context(|| format!("no programs on droplet {}", node + 1))?
            .counter(counter)
    }

    fn counters(&self, list: &[(usize, Counter)]) -> Result<Vec<u64>> {
        list.iter()
            .map(|(node, counter)| self.counter(*node, *counter))
            .collect()
    }

    fn check(&self, raised: &[u64], untouched: &[u64]) -> Result<()> {
        let after = self.counters(&self.raised)?;
        for (((node, counter), before), after) in self.raised.iter().zip(raised).zip(after) {
            ensure!(
                after - before > PROOF,
                "droplet {} counted only {} {}",
                node + 1,
                after - before,
                counter.name()
            );
        }
        let after = self.counters(&self.untouched)?;
        for (((node, counter), before), after) in self.untouched.iter().zip(untouched).zip(after) {
            ensure!(
                after == *before,
                "droplet {} counted {} {}",
                node + 1,
                after - before,
                counter.name()
            );
        }
        Ok(())
    }
}

/// One measure on a path.
pub struct PathCase {
    pub path: Rc<Path>,
    pub measure: Measure,
}

impl Case for PathCase {
    fn name(&self) -> &str {
        &self.path.name
    }

    fn metrics(&self) -> Vec<&'static str> {
        self.measure.metrics().to_vec()
    }

    fn measure(&mut self, plan: &Plan) -> Result<Vec<Sample>> {
        let path = &self.path;
        let ends = Ends {
            client: &path.client.path(),
            server: &path.server.path(),
            own: path.address,
            address: path.address,
        };
        let (raised, untouched) = (path.counters(&path.raised)?, path.counters(&path.untouched)?);
        let samples = self.measure.run(ends, plan.time)?;
        path.check(&raised, &untouched).context("it took another way")?;
        Ok(samples)
    }
}

/// Makes cases of paths, in an order in which those of one measure follow each other.
pub fn cases(paths: Vec<Path>) -> Vec<Box<dyn Case>> {
    let paths: Vec<Rc<Path>> = paths.into_iter().map(Rc::new).collect();
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for measure in Measure::ALL {
        for path in paths.iter().filter(|path| path.measures.contains(measure)) {
            cases.push(Box::new(PathCase {
                path: Rc::clone(path),
                measure: *measure,
            }));
        }
    }
    cases
}

//! What transit must do with a frame: the frame that comes out, the programs' counters, and the driver's.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use thuban_common::counters::Counter;
use thuban_testkit::packets::ensure_same;

use crate::{
    frames::{Family, Ping, is_wanted, opened, plain, sent_on, tunnelled},
    machine::Machine,
    plan::{BOUNCED, DIRECT, ELSEWHERE, HERE, OTHER_VPC, POD, STRANGER, THREE, TWO, UNKNOWN, VPC, mac},
    request::{Counts, DriverCounts},
};

/// How long a frame may take, and how long nothing must come for a frame that is dropped.
const WAIT: Duration = Duration::from_secs(3);
const SILENCE: Duration = Duration::from_millis(300);
/// Frames sent without waiting for answers.
const BURST: u16 = 64;
/// Pings of a measurement.
const ROUNDS: u16 = 200;
/// Bytes of encapsulation.
const ENCAPSULATION: usize = 50;
/// The programs' counters that other frames of the machine move: its pods ask for neighbours and routers.
const NOISE: [Counter; 6] = [
    Counter::NotUnicast,
    Counter::Ipv6Discovery,
    Counter::RouterForbidden,
    Counter::NeighbourReplies,
    Counter::ArpReplies,
    Counter::DirectWanted,
];

/// A card of the running machine, after its droplet was made.
pub struct Bench<'a> {
    pub machine: &'a mut Machine,
    /// The card's number and MAC.
    pub card: usize,
    pub mac: [u8; 6],
    /// MTU of the card.
    pub mtu: u32,
    /// Whether transit at XDP sees the card's frames.
    pub sees_frames: bool,
}

/// What must come out.
enum Expect {
    Nothing,
    /// Exactly this frame.
    Frame(Vec<u8>),
    /// The pod's answer, in a tunnel to this droplet.
    Answer(Ping, Ipv4Addr),
    /// The machine's own answer.
    OwnAnswer(Ping),
}

struct Case {
    name: String,
    frame: Vec<u8>,
    expect: Expect,
    counted: Vec<Counter>,
    /// What the driver counts where transit at XDP sees frames.
    driver: DriverCounts,
}

const PASSED: DriverCounts = DriverCounts {
    seen: 1,
    turned: 0,
    dropped: 0,
};
const TURNED: DriverCounts = DriverCounts { turned: 1, ..PASSED };
const DROPPED: DriverCounts = DriverCounts { dropped: 1, ..PASSED };

/// The figures of a card with transit at some hook.
pub struct Outcome {
    pub passed: usize,
    pub failures: Vec<String>,
    pub driver: DriverCounts,
    /// Medians: a ping to the pod, and a frame by the bouncer.
    pub delivered: Duration,
    pub bounced: Duration,
}

impl Bench<'_> {
    /// Runs all cases. A case that fails does not end the others.
    pub fn run(&mut self) -> Result<Outcome> {
        self.warm_up()?;
        let before = self.machine.count()?;
        let mut last = before.clone();
        let mut failures = Vec::new();
        let mut passed = 0;
        for case in self.cases() {
            match self.check(&case, &mut last) {
                Ok(()) => passed += 1,
                Err(error) => failures.push(format!("{}: {error:#}", case.name)),
            }
        }
        for family in Family::ALL {
            match self.burst(family, &mut last) {
                Ok(()) => passed += 1,
                Err(error) => failures.push(format!("a burst by the bouncer, {}: {error:#}", family.name())),
            }
        }
        let driver = difference(&last, &before).driver;
        Ok(Outcome {
            passed,
            failures,
            driver,
            delivered: self.median(|bench, sequence| {
                let ping = ping(Family::V4, DIRECT, POD, 56, sequence);
                tunnelled(TWO, bench.mac, VPC, &ping.frame())
            })?,
            bounced: self.median(|bench, sequence| {
                let ping = ping(Family::V4, UNKNOWN, BOUNCED, 56, sequence);
                tunnelled(THREE, bench.mac, VPC, &ping.frame())
            })?,
        })
    }

    /// Pings the machine itself until the card works.
    fn warm_up(&mut self) -> Result<()> {
        let ping = ping(Family::V4, TWO, HERE, 56, 0);
        for _ in 0..20 {
            self.send(&plain(&ping, self.mac))?;
            if self.receive(SILENCE).is_some() {
                while self.receive(SILENCE).is_some() {}
                return Ok(());
            }
        }
        anyhow::bail!("the machine does not answer pings")
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        let full = self.mtu as usize - ENCAPSULATION;
        for family in Family::ALL {
            for (form, size) in [("", 56), (", full MTU", family.data(full))] {
                let what = format!("{}{form}", family.name());
                self.add_ways(&mut cases, family, size, &what);
            }
            self.add_drops(&mut cases, family);
        }
        let ping = ping(Family::V4, TWO, HERE, 56, 1);
        cases.push(Case {
            name: "a ping of the node passes to its stack".to_owned(),
            frame: plain(&ping, self.mac),
            expect: Expect::OwnAnswer(ping),
            counted: Vec::new(),
            driver: PASSED,
        });
        cases
    }

    /// Adds cases of a packet that arrives: here, by the bouncer, by the divider.
    fn add_ways(&self, cases: &mut Vec<Case>, family: Family, size: usize, what: &str) {
        let from = |droplet, inner: &Ping| tunnelled(droplet, self.mac, VPC, &inner.frame());
        let delivered = ping(family, DIRECT, POD, size, 1);
        let mut counted = vec![Counter::Delivered, Counter::SentDirect];
        if self.sees_frames {
            counted.push(Counter::DecapsulatedXdp);
        }
        cases.push(Case {
            name: format!("a ping is delivered and the answer goes direct, {what}"),
            frame: from(TWO, &delivered),
            expect: Expect::Answer(delivered, TWO),
            counted,
            driver: PASSED,
        });
        let bounced = ping(family, UNKNOWN, BOUNCED, size, 1);
        cases.push(Case {
            name: format!("the bouncer sends on, {what}"),
            frame: from(THREE, &bounced),
            expect: Expect::Frame(sent_on(TWO, self.mac, VPC, &bounced.frame())),
            counted: vec![Counter::Bounced],
            driver: TURNED,
        });
        let divided = ping(family, BOUNCED, ELSEWHERE, size, 1);
        cases.push(Case {
            name: format!("the divider sends on, {what}"),
            frame: from(TWO, &divided),
            expect: Expect::Frame(sent_on(THREE, self.mac, VPC, &divided.frame())),
            counted: vec![Counter::Divided],
            driver: TURNED,
        });
    }

    /// Adds cases of a packet that is dropped.
    fn add_drops(&self, cases: &mut Vec<Case>, family: Family) {
        let to_pod = |from| ping(family, from, POD, 56, 1).frame();
        for (name, droplet, vni, inner, counter) in [
            (
                "a host that is no droplet",
                STRANGER,
                VPC,
                to_pod(DIRECT),
                Counter::UnknownDroplet,
            ),
            ("another VPC", TWO, OTHER_VPC, to_pod(DIRECT), Counter::UnknownVni),
            (
                "another droplet's endpoint",
                THREE,
                VPC,
                to_pod(DIRECT),
                Counter::SourceMismatch,
            ),
        ] {
            cases.push(Case {
                name: format!("{name} is dropped, {}", family.name()),
                frame: tunnelled(droplet, self.mac, vni, &inner),
                expect: Expect::Nothing,
                counted: vec![counter],
                driver: DROPPED,
            });
        }
    }

    /// Sends a case's frame and checks everything. `last` are the counts before, and then those after.
    fn check(&mut self, case: &Case, last: &mut Counts) -> Result<()> {
        self.send(&case.frame)?;
        let frame = match case.expect {
            Expect::Nothing => self.receive(SILENCE),
            _ => self.receive(WAIT),
        };
        let counted = self.count_since(last)?;
        let context = || format!("counted {counted:?}");
        self.judge(case, frame.as_deref()).with_context(context)?;
        let should: BTreeMap<String, u64> = case
            .counted
            .iter()
            .map(|counter| (counter.name().to_owned(), 1))
            .collect();
        ensure!(counted.programs == should, "the programs {}", context());
        let driver = if self.sees_frames {
            case.driver
        } else {
            DriverCounts::default()
        };
        ensure!(counted.driver == driver, "the driver {}", context());
        Ok(())
    }

    /// Checks what came out.
    fn judge(&self, case: &Case, frame: Option<&[u8]>) -> Result<()> {
        if let Expect::Nothing = case.expect {
            ensure!(frame.is_none(), "something came out");
            return Ok(());
        }
        let frame = frame.context("nothing came out")?;
        match &case.expect {
            Expect::Nothing => Ok(()),
            Expect::Frame(should) => ensure_same(frame, should),
            Expect::Answer(ping, to) => ping.check_answer(opened(frame, self.mac, *to, VPC)?),
            Expect::OwnAnswer(ping) => {
                ensure_same(&frame[..12], &[mac(ping.from), self.mac].concat())?;
                ping.check_answer(&frame[14..])
            }
        }
    }

    /// Sends many frames at once. All must come out, as they should.
    fn burst(&mut self, family: Family, last: &mut Counts) -> Result<()> {
        let pings = (0..BURST).map(|sequence| ping(family, UNKNOWN, BOUNCED, 1000, sequence));
        let inner: Vec<Vec<u8>> = pings.map(|ping| ping.frame()).collect();
        for frame in &inner {
            self.send(&tunnelled(THREE, self.mac, VPC, frame))?;
        }
        for (number, frame) in inner.iter().enumerate() {
            let came = self.receive(WAIT);
            let came = came.with_context(|| format!("only {number} of {BURST} came"))?;
            ensure_same(&came, &sent_on(TWO, self.mac, VPC, frame))?;
        }
        let counted = self.count_since(last)?;
        let turned = if self.sees_frames { BURST } else { 0 };
        ensure!(
            counted.programs.get(Counter::Bounced.name()) == Some(&u64::from(BURST))
                && counted.driver.turned == u64::from(turned),
            "counted {counted:?}"
        );
        Ok(())
    }

    /// Returns the median of the times from a frame to what comes out for it.
    fn median(&mut self, frame: impl Fn(&Self, u16) -> Vec<u8>) -> Result<Duration> {
        let mut times = Vec::new();
        for sequence in 0..ROUNDS {
            let frame = frame(self, sequence);
            let start = Instant::now();
            self.send(&frame)?;
            self.receive(WAIT).context("a round got nothing back")?;
            times.push(start.elapsed());
        }
        times.sort_unstable();
        Ok(times[times.len() / 2])
    }

    fn count_since(&mut self, last: &mut Counts) -> Result<Counts> {
        let counts = self.machine.count()?;
        let counted = difference(&counts, last);
        *last = counts;
        Ok(counted)
    }

    fn send(&self, frame: &[u8]) -> Result<()> {
        self.machine.cables[self.card].send(frame)
    }

    fn receive(&self, time: Duration) -> Option<Vec<u8>> {
        self.machine.cables[self.card].receive(time, is_wanted)
    }
}

fn ping(family: Family, from: Ipv4Addr, to: Ipv4Addr, size: usize, sequence: u16) -> Ping {
    Ping {
        family,
        from,
        to,
        size,
        sequence,
    }
}

/// Returns what was counted in between, without what the machine does by itself.
fn difference(after: &Counts, before: &Counts) -> Counts {
    let programs = after.programs.iter().filter_map(|(name, count)| {
        let count = count - before.programs.get(name).copied().unwrap_or(0);
        let is_noise = NOISE.iter().any(|noise| noise.name() == name);
        (count > 0 && !is_noise).then(|| (name.clone(), count))
    });
    Counts {
        programs: programs.collect(),
        driver: DriverCounts {
            seen: after.driver.seen - before.driver.seen,
            turned: after.driver.turned - before.driver.turned,
            dropped: after.driver.dropped - before.driver.dropped,
        },
    }
}

//! Nanoseconds of each verdict, at tc and at XDP: the median of many single runs, less the median of a program that
//! only returns. Verdict and counter are checked before.

use std::{
    net::Ipv4Addr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use anyhow::{Result, ensure};
use thuban_common::counters::Counter;

use super::{
    CORE,
    assembly::{TC_OK, TC_REDIRECT, TC_SHOT, XDP_DROP, XDP_PASS, XDP_REDIRECT, XDP_TX, answer},
    median,
    raw::{self, Type},
    world::{
        BOUNCED, CLIENT, DIVIDED, DIVIDED_VNI, FRONT, FRONT_HERE, NEIGHBOUR, OUTSIDE, POD, REMOTE, SERVICE,
        UNKNOWN, VNI, World, from_backend, from_front, from_outside, from_pod, from_wire,
    },
};
use crate::bench::{
    datapath::{Case, Plan},
    process::pin,
    results::Sample,
};

/// Number of single runs of which a sample is the median.
const CALLS: usize = 20_000;

/// Where a frame comes from, and so which program sees it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Pod,
    /// The pod that is a client of a service.
    Client,
    /// The pod that is a backend of a front.
    Backend,
    Wire,
}

/// A verdict: its name, the frame, and the proof that it happened at tc and, if it does there, at XDP.
struct Verdict {
    name: &'static str,
    origin: Origin,
    frame: Vec<u8>,
    tc: Proof,
    xdp: Option<Proof>,
}

/// The verdict, and the counter that it raises; none, if the frame is the host's.
type Proof = (u32, Option<Counter>);

fn verdicts() -> Vec<Verdict> {
    let agent = |name, to: Ipv4Addr, counter| Verdict {
        name,
        origin: Origin::Pod,
        frame: from_pod(POD, to),
        tc: (TC_REDIRECT, Some(counter)),
        xdp: Some((XDP_REDIRECT, Some(counter))),
    };
    let transit = |name, frame, counter| Verdict {
        name,
        origin: Origin::Wire,
        frame,
        tc: (TC_REDIRECT, Some(counter)),
        xdp: Some((XDP_TX, Some(counter))),
    };
    let deliver = from_wire(VNI, REMOTE, POD);
    let [from, to] = DIVIDED;
    vec![
        agent("agent-direct", REMOTE, Counter::SentDirect),
        agent("agent-local", NEIGHBOUR, Counter::DeliveredLocal),
        agent("agent-bouncer", UNKNOWN, Counter::SentToBouncer),
        Verdict {
            // XDP leaves packets to services to tc.
            xdp: None,
            origin: Origin::Client,
            frame: from_pod(CLIENT, SERVICE),
            ..agent("agent-service", SERVICE, Counter::SentDirect)
        },
        Verdict {
            name: "agent-spoof",
            origin: Origin::Pod,
            frame: from_pod(UNKNOWN, REMOTE),
            tc: (TC_SHOT, Some(Counter::SpoofedSource)),
            xdp: Some((XDP_DROP, Some(Counter::SpoofedSource))),
        },
        Verdict {
            xdp: Some((XDP_PASS, Some(Counter::DecapsulatedXdp))),
            ..transit("transit-deliver", deliver, Counter::Delivered)
        },
        transit(
            "transit-bounce",
            from_wire(VNI, REMOTE, BOUNCED),
            Counter::Bounced,
        ),
        transit(
            "transit-divide",
            from_wire(DIVIDED_VNI, from, to),
            Counter::Divided,
        ),
        transit("front-send", from_outside(FRONT), Counter::Fronted),
        Verdict {
            // XDP leaves the backend's part to tc.
            xdp: None,
            ..transit("front-deliver", from_front(FRONT_HERE), Counter::FrontDelivered)
        },
        Verdict {
            xdp: None,
            origin: Origin::Backend,
            frame: from_backend(OUTSIDE),
            ..agent("front-answer", OUTSIDE, Counter::FrontAnswered)
        },
        Verdict {
            name: "transit-host",
            origin: Origin::Wire,
            frame: from_outside(OUTSIDE),
            tc: (TC_OK, None),
            xdp: Some((XDP_PASS, None)),
        },
    ]
}

/// The world, and at each hook a program that only returns.
struct Shared {
    world: World,
    idle_tc: OwnedFd,
    idle_xdp: OwnedFd,
}

struct VerdictCase {
    name: String,
    shared: Arc<Shared>,
    hook: Type,
    program: &'static str,
    origin: Origin,
    frame: Vec<u8>,
}

pub fn add_cases(plan: &Plan, cases: &mut Vec<Box<dyn Case>>) -> Result<()> {
    set_up(0, cases, |verdict, hook| {
        Some(format!("prog-{verdict}-{hook}")).filter(|name| plan.wants_case(name))
    })
}

/// Sets up the ends of packets that flows are told of, with these flags of CONFIG.
pub fn add_ends(mode: &str, flags: u32, cases: &mut Vec<Box<dyn Case>>) -> Result<()> {
    set_up(flags, cases, |verdict, hook| match (verdict, hook) {
        ("agent-direct", "tc") => Some(format!("{mode}-agent")),
        ("transit-deliver", "tc") => Some(format!("{mode}-delivery")),
        _ => None,
    })
}

/// Sets up the verdicts that get a name, in a world of their own.
fn set_up(
    flags: u32,
    cases: &mut Vec<Box<dyn Case>>,
    name: impl Fn(&str, &str) -> Option<String>,
) -> Result<()> {
    let mut wanted = Vec::new();
    for verdict in verdicts() {
        for (hook, word) in [(Type::SchedCls, "tc"), (Type::Xdp, "xdp")] {
            let expected = match hook {
                Type::SchedCls => Some(verdict.tc),
                Type::Xdp => verdict.xdp,
            };
            let (Some(expected), Some(name)) = (expected, name(verdict.name, word)) else {
                continue;
            };
            let program = match (verdict.origin, hook) {
                (Origin::Wire, Type::SchedCls) => "transit_tc",
                (Origin::Wire, Type::Xdp) => "transit_xdp",
                (_, Type::SchedCls) => "agent_tc",
                (_, Type::Xdp) => "agent_xdp",
            };
            wanted.push((
                name,
                hook,
                program,
                verdict.origin,
                verdict.frame.clone(),
                expected,
            ));
        }
    }
    if wanted.is_empty() {
        return Ok(());
    }
    let mut world = World::new(None)?;
    world.programs.set_flags(flags)?;
    let shared = Arc::new(Shared {
        world,
        idle_tc: raw::load(Type::SchedCls, &answer(TC_OK))?,
        idle_xdp: raw::load(Type::Xdp, &answer(XDP_PASS))?,
    });
    for (name, hook, program, origin, frame, expected) in wanted {
        let case = VerdictCase {
            name,
            shared: Arc::clone(&shared),
            hook,
            program,
            origin,
            frame,
        };
        case.check(expected)?;
        cases.push(Box::new(case));
    }
    Ok(())
}

impl VerdictCase {
    fn interface(&self) -> u32 {
        let world = &self.shared.world;
        match self.origin {
            Origin::Pod => world.pod,
            Origin::Client => world.client,
            Origin::Backend => world.neighbour,
            Origin::Wire => world.uplink,
        }
    }

    /// Runs once and checks that the run did what the case's name says.
    fn check(&self, (verdict, counter): Proof) -> Result<()> {
        let world = &self.shared.world;
        let counted = || counter.map_or(Ok(1), |counter| world.programs.counter(counter));
        let before = counted()?;
        let context = raw::context(self.hook, &self.frame, self.interface());
        let program = world.program(self.program)?;
        let (found, _) = world.namespace.run(|| raw::run(program, &self.frame, &context))?;
        ensure!(
            found == verdict && counted()? == before + u64::from(counter.is_some()),
            "{}: verdict {found} instead of {verdict}, counted {:?}",
            self.name,
            world.programs.counters()?
        );
        Ok(())
    }
}

impl Case for VerdictCase {
    fn name(&self) -> &str {
        &self.name
    }

    fn metrics(&self) -> Vec<&'static str> {
        vec!["ns_per_packet"]
    }

    fn measure(&mut self, _plan: &Plan) -> Result<Vec<Sample>> {
        let world = &self.shared.world;
        let idle = match self.hook {
            Type::SchedCls => self.shared.idle_tc.as_fd(),
            Type::Xdp => self.shared.idle_xdp.as_fd(),
        };
        let program = world.program(self.program)?;
        let context = raw::context(self.hook, &self.frame, self.interface());
        let (own, idle) = world.namespace.run(|| {
            pin(CORE)?;
            let (mut own, mut nothing) = (Vec::new(), Vec::new());
            for _ in 0..CALLS {
                own.push(raw::run(program, &self.frame, &context)?.1);
                nothing.push(raw::run(idle, &self.frame, &context)?.1);
            }
            Ok((median(own), median(nothing)))
        })?;
        Ok(vec![Sample::new("ns_per_packet", "ns", own - idle)])
    }
}

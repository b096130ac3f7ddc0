//! Programs alone: no stack, no devices; the kernel's BPF_PROG_TEST_RUN hands frames to a program.
//!
//! The measure is the time by the kernel's own clock of one run of a program on a fresh frame, many times over, less
//! the same time of a program that does nothing. There is one run at a time, because the kernel doesn't restore a
//! program's frame before a repetition, and most of our programs change it. So caches are in the state that a system
//! call leaves, not a stream of packets. The numbers are higher than those of packets in bulk, which `live-*` measures
//! (see [`live`]).

mod assembly;
mod compile;
mod frames;
mod live;
mod memory;
mod raw;
mod rows;
mod verdicts;
mod world;

use anyhow::{Context, Result};
use transitd::dataplane::seen_flows;
use transitd::settings::FlowMode;

use super::{Case, Plan};
use crate::bench::{go_on, stats};

/// The core on which programs run.
const CORE: usize = 1;

/// Sets up every case that is asked for.
pub fn add_cases(plan: &Plan, cases: &mut Vec<Box<dyn Case>>) -> Result<()> {
    verdicts::add_cases(plan, cases).context("setting up verdicts")?;
    live::add_cases(plan, cases).context("setting up live frames")?;
    for rows in rows::SIZES {
        if plan.wants_case(&rows::name(rows)) {
            go_on()?;
            let case = rows::RowsCase::new(rows).with_context(|| format!("setting up {rows} rows"))?;
            cases.push(Box::new(case));
        }
    }
    for name in [memory::NAME, memory::WITH_SERVICES, memory::OF_RULES] {
        if plan.wants_case(name) {
            cases.push(Box::new(memory::MemoryCase(name)));
        }
    }
    if plan.wants_case(compile::NAME) {
        cases.push(Box::new(compile::CompileCase));
    }
    Ok(())
}

/// Sets up what flows cost in a mode: `MODE-agent`, `MODE-delivery` and `MODE-maps`.
pub fn add_cases_of_flows(mode: &str, flows: FlowMode, cases: &mut Vec<Box<dyn Case>>) -> Result<()> {
    verdicts::add_ends(mode, seen_flows::flags(flows), cases).context("setting up verdicts")?;
    cases.push(Box::new(memory::FlowsCase {
        name: format!("{mode}-maps"),
        entries: seen_flows::entries(flows),
    }));
    Ok(())
}

/// Returns the median of nanoseconds.
fn median(times: Vec<u32>) -> f64 {
    stats::median(times.into_iter().map(f64::from))
}

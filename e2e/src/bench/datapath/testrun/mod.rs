//! Programs alone: no stack, no devices, frames handed to a program by the kernel's BPF_PROG_TEST_RUN.
//!
//! What is measured: the kernel's own clock around one run of a program on a fresh frame, many times over, less the
//! same of a program that does nothing. One run at a time, because the kernel doesn't give a program its frame back
//! as it was before a repetition, and most of ours change it. So caches are as a system call leaves them, not as a
//! stream of packets does: numbers are above those of packets in bulk, which `live-*` measures (see [`live`]).

mod assembly;
mod frames;
mod live;
mod memory;
mod raw;
mod rows;
mod verdicts;
mod world;

use anyhow::{Context, Result};

use super::{Case, Plan};
use crate::bench::{go_on, stats};

/// Where programs run.
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
    if plan.wants_case(memory::NAME) {
        cases.push(Box::new(memory::MemoryCase));
    }
    Ok(())
}

/// Of nanoseconds.
fn median(times: Vec<u32>) -> f64 {
    stats::median(times.into_iter().map(f64::from))
}

//! Programs that one test after the other uses. The verifier takes most of a second for them, and tests make hundreds
//! of droplets.
//!
//! Invariant: who gets programs finds them attached nowhere, and tables as a load makes them. Both are brought about
//! before another test can have the programs; if that fails, they are never used again.

use std::{
    ops::{Deref, DerefMut},
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::{Context, Result};
use thuban_cluster::namespace::inside;
use transitd::dataplane::filter;

use super::{Programs, wipe};

/// Programs that nobody uses.
static IDLE: Mutex<Vec<Programs>> = Mutex::new(Vec::new());

/// Programs for as long as this lives.
pub struct Lent(Option<Programs>);

impl Lent {
    /// Returns programs that another test had, or loads some.
    pub fn new() -> Result<Self> {
        let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Ok(Self(Some(idle.map_or_else(Programs::load, Ok)?)))
    }
}

impl Deref for Lent {
    type Target = Programs;

    fn deref(&self) -> &Programs {
        match &self.0 {
            Some(programs) => programs,
            None => unreachable!("programs are there until the drop"),
        }
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut Programs {
        match &mut self.0 {
            Some(programs) => programs,
            None => unreachable!("programs are there until the drop"),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(mut programs) = self.0.take() else {
            return;
        };
        if thread::panicking() {
            return;
        }
        match programs.forget() {
            Ok(()) => IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(programs),
            Err(error) => eprintln!("the next test loads programs of its own: {error:#}"),
        }
    }
}

impl Programs {
    /// Detaches the programs, and makes the tables what a load makes them.
    fn forget(&mut self) -> Result<()> {
        // A filter would go with its interface, which goes with its namespace, some time after that was removed.
        for (namespace, interface) in self.filters.drain(..) {
            inside(namespace, move || match filter::attached(&interface) {
                Ok(link) => {
                    drop(link);
                    Ok(())
                }
                // The pod went before.
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
                Err(error) => Err(error).with_context(|| format!("the filter of {interface}")),
            })?;
        }
        // This waits until no program runs any more, the agents' included.
        for link in self.links.drain(..) {
            wipe::detach(&link)?;
        }
        for (name, map) in self.ebpf.maps_mut() {
            wipe::empty(name, map).with_context(|| format!("emptying {name}"))?;
        }
        self.start()
    }
}

//! Programs in the kernel and their pinned links; the agent at tc is a filter and has none.
//!
//! Invariant: a pinned link is updated in place to this version's program (the kernel swaps it atomically) and never
//! unpinned and pinned again. Only a link whose interface is gone, or whose hook was given up, loses its pin. A
//! program that the kernel refuses leaves the old one in place. Programs of another layout, which have maps of their
//! own, stay until the maps of this one are filled.

use std::collections::BTreeSet;
use std::path::PathBuf;

use aya::Ebpf;
use aya::programs::links::FdLink;
use aya::programs::tc::SchedClassifierLink;
use aya::programs::xdp::XdpLink;
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType, Xdp, XdpMode, tc::TcAttachOptions};
use tracing::error;

use super::filter;
use super::hook::Hook;
use super::inherited::{Inherited, Wanted};
use super::loader::{LoadError, verified};
use super::pins::{LinkingError, names, open, pin, unpin};

/// The programs of this version, each loaded when first attached.
#[derive(Debug)]
pub struct Links {
    ebpf: Ebpf,
    directory: PathBuf,
    inherited: Inherited,
    kept: BTreeSet<&'static str>,
    /// Interfaces where a former transitd put a filter.
    filters: BTreeSet<String>,
}

impl Links {
    /// Returns the programs. `layouts`: directories of other layouts, whose programs may still be in place.
    pub fn new(ebpf: Ebpf, directory: PathBuf, layouts: Vec<PathBuf>) -> Self {
        Self {
            ebpf,
            directory,
            inherited: Inherited::new(layouts),
            kept: BTreeSet::new(),
            filters: BTreeSet::new(),
        }
    }

    /// Puts this version's program at the hook: into the pinned link if there is a live one, else by a new link. If
    /// another layout's programs are still in place, this waits for [`Self::take_over`].
    pub fn ensure(&mut self, hook: Hook, interface: &str) -> Result<(), LinkingError> {
        if self.inherited.is_in_place() {
            self.inherited.wait(hook, interface, Wanted::Here);
            return Ok(());
        }
        let path = self.directory.join(hook.pin_name(interface));
        if hook == Hook::AgentTc {
            self.put_filter(interface)?;
            // A former version had a link at this hook.
            return unpin(&path).and(self.inherited.release(&hook.pin_name(interface)));
        }
        if let Some(pinned) = open(&path)? {
            match self.replace(hook, interface, pinned) {
                // The link is pinned in the other layout's directory too, if a take-over was cut off.
                Ok(_) => return self.inherited.release(&hook.pin_name(interface)),
                Err(error) if error.is_dead_link() => unpin(&path)?,
                Err(error) => return Err(error.kept(hook, interface)),
            }
        }
        if let Some((old, pinned)) = self.inherited.open(&hook.pin_name(interface))? {
            match self.replace(hook, interface, pinned) {
                // This order matters: a link without a pin is gone.
                Ok(link) => {
                    pin(link, path)?;
                    return unpin(&old);
                }
                Err(error) if error.is_dead_link() => unpin(&old)?,
                Err(error) => return Err(error.kept(hook, interface)),
            }
        }
        let link = if hook.at_xdp() {
            self.attach_xdp(hook, interface)
        } else {
            self.attach_tc(hook, interface)
        }?;
        pin(link, path)
    }

    /// Replaces another layout's programs by this one's, link by link, now that the tables of this layout are filled.
    /// Then removes the rest of the other layout. A program that the kernel refuses leaves the old one in place, with
    /// its maps.
    pub fn take_over(&mut self) -> Result<(), LinkingError> {
        self.inherited.is_ready = true;
        let mut waiting = std::mem::take(&mut self.inherited.waiting);
        // Hooks that get a program come first, so that no packet meets a hook that is given up before the other hook
        // has its program.
        waiting.sort_by_key(|(_, _, wanted)| *wanted);
        for (hook, interface, wanted) in waiting {
            match wanted {
                Wanted::Here => self.ensure_or_keep(hook, &interface)?,
                Wanted::Gone => self.release(hook, &interface)?,
            }
        }
        if self.kept.is_empty() {
            self.inherited.remove()?;
        }
        Ok(())
    }

    /// Does what [`Self::ensure`] does, for a hook that a former transitd attached. An old program that stays is no
    /// failure, but is logged and remembered.
    pub fn ensure_or_keep(&mut self, hook: Hook, interface: &str) -> Result<(), LinkingError> {
        match self.ensure(hook, interface) {
            Err(kept @ LinkingError::Kept { .. }) => {
                error!(
                    error = &kept as &dyn std::error::Error,
                    interface, "an old program stays in place"
                );
                self.kept.insert(hook.program());
                Ok(())
            }
            other => other,
        }
    }

    /// Remembers that a former transitd attached its agent's filter there: the filter stays in place if this version's
    /// program cannot replace it.
    pub fn remember_filter(&mut self, interface: &str) {
        self.filters.insert(interface.to_owned());
    }

    fn put_filter(&mut self, interface: &str) -> Result<(), LinkingError> {
        let program = Hook::AgentTc.program();
        let attach = |source| LinkingError::Attach {
            program,
            interface: interface.to_owned(),
            source,
        };
        let put = match self.tc(Hook::AgentTc) {
            Ok(loaded) => filter::attach(loaded, interface).map_err(attach),
            Err(error) => Err(error.into()),
        };
        put.map_err(|source| {
            if !self.filters.contains(interface) {
                return source;
            }
            source.kept(Hook::AgentTc, interface)
        })
    }

    /// Whether programs of another layout are in place until [`Self::take_over`].
    pub fn is_replacing(&self) -> bool {
        self.inherited.is_in_place()
    }

    /// Returns the programs of this version that could not take their predecessors' places.
    pub fn kept(&self) -> impl Iterator<Item = &'static str> {
        self.kept.iter().copied()
    }

    /// Whether the hook's program is among those that the kernel runs at the interface; `runs` is the program that the
    /// interface has at XDP, or in the agent's filter.
    pub fn is_attached(&self, hook: Hook, interface: &str, runs: Option<u32>) -> Result<bool, LinkingError> {
        if hook == Hook::AgentTc {
            return Ok(runs.is_some());
        }
        let name = hook.pin_name(interface);
        let path = self.directory.join(&name);
        let own = open(&path)?.map(|link| (path, link));
        let Some((path, link)) = own.map_or_else(|| self.inherited.open(&name), |own| Ok(Some(own)))? else {
            return Ok(false);
        };
        let program = match link.info() {
            Ok(info) => info.program_id(),
            Err(source) => return Err(LinkingError::Open { path, source }),
        };
        if hook.at_xdp() {
            return Ok(runs == Some(program));
        }
        let (_, programs) =
            SchedClassifier::query_tcx(interface, TcAttachType::Ingress).map_err(|source| {
                LinkingError::Query {
                    interface: interface.to_owned(),
                    source,
                }
            })?;
        Ok(programs.iter().any(|info| info.id() == program))
    }

    /// Takes the program off the interface. A missing program is success.
    pub fn release(&self, hook: Hook, interface: &str) -> Result<(), LinkingError> {
        let name = hook.pin_name(interface);
        unpin(&self.directory.join(&name)).and(self.inherited.release(&name))
    }

    /// Does what [`Self::release`] does, for a hook that this version does not use. Another layout's program goes when
    /// the other hooks are taken over.
    pub fn give_up(&mut self, hook: Hook, interface: &str) -> Result<(), LinkingError> {
        if self.inherited.is_in_place() {
            self.inherited.wait(hook, interface, Wanted::Gone);
            return Ok(());
        }
        self.release(hook, interface)
    }

    /// Removes agent pins of veths that are not in `known`.
    pub fn sweep(&self, known: &[String]) -> Result<Vec<String>, LinkingError> {
        let mut removed = Vec::new();
        for directory in std::iter::once(&self.directory).chain(&self.inherited.directories) {
            for name in names(directory)? {
                let veth = [Hook::AgentTc, Hook::AgentXdp].iter().find_map(|hook| {
                    name.strip_prefix(hook.program())
                        .and_then(|rest| rest.strip_prefix('_'))
                });
                if veth.is_some_and(|veth| !known.iter().any(|k| k == veth)) {
                    unpin(&directory.join(&name))?;
                    removed.push(name);
                }
            }
        }
        Ok(removed)
    }

    fn replace(&mut self, hook: Hook, interface: &str, link: FdLink) -> Result<FdLink, LinkingError> {
        let program = hook.program();
        let attach = |source| LinkingError::Attach {
            program,
            interface: interface.to_owned(),
            source,
        };
        let convert = |source| LinkingError::Take {
            program,
            interface: interface.to_owned(),
            source,
        };
        // When the returned FdLink is dropped, the link lives on by its pin.
        if hook.at_xdp() {
            let link = XdpLink::try_from(link).map_err(convert)?;
            let loaded = self.xdp(hook)?;
            let id = loaded.attach_to_link(link).map_err(attach)?;
            let link = loaded.take_link(id).map_err(attach)?;
            link.try_into().map_err(convert)
        } else {
            let link = SchedClassifierLink::try_from(link).map_err(convert)?;
            let loaded = self.tc(hook)?;
            let id = loaded.attach_to_link(link).map_err(attach)?;
            let link = loaded.take_link(id).map_err(attach)?;
            link.try_into().map_err(convert)
        }
    }

    fn attach_tc(&mut self, hook: Hook, interface: &str) -> Result<FdLink, LinkingError> {
        let program = hook.program();
        let attach = |source| LinkingError::Attach {
            program,
            interface: interface.to_owned(),
            source,
        };
        let loaded = self.tc(hook)?;
        let options = TcAttachOptions::TcxOrder(LinkOrder::first());
        let id = loaded
            .attach_with_options(interface, TcAttachType::Ingress, options)
            .map_err(attach)?;
        let link = loaded.take_link(id).map_err(attach)?;
        link.try_into().map_err(|source| LinkingError::Take {
            program,
            interface: interface.to_owned(),
            source,
        })
    }

    /// Attaches in native mode only: generic XDP would cost more than tc.
    fn attach_xdp(&mut self, hook: Hook, interface: &str) -> Result<FdLink, LinkingError> {
        let program = hook.program();
        let attach = |source| LinkingError::Attach {
            program,
            interface: interface.to_owned(),
            source,
        };
        let loaded = self.xdp(hook)?;
        let id = loaded.attach(interface, XdpMode::Driver).map_err(attach)?;
        let link = loaded.take_link(id).map_err(attach)?;
        link.try_into().map_err(|source| LinkingError::Take {
            program,
            interface: interface.to_owned(),
            source,
        })
    }

    fn tc(&mut self, hook: Hook) -> Result<&mut SchedClassifier, LoadError> {
        let name = hook.program();
        let program = self
            .ebpf
            .program_mut(name)
            .ok_or(LoadError::MissingProgram(name))?;
        let verify = |source| LoadError::Verify { name, source };
        let program: &mut SchedClassifier = program.try_into().map_err(verify)?;
        if program.fd().is_err() {
            verified(|| program.load()).map_err(verify)?;
        }
        Ok(program)
    }

    fn xdp(&mut self, hook: Hook) -> Result<&mut Xdp, LoadError> {
        let name = hook.program();
        let program = self
            .ebpf
            .program_mut(name)
            .ok_or(LoadError::MissingProgram(name))?;
        let verify = |source| LoadError::Verify { name, source };
        let program: &mut Xdp = program.try_into().map_err(verify)?;
        if program.fd().is_err() {
            verified(|| program.load()).map_err(verify)?;
        }
        Ok(program)
    }
}

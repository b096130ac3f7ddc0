//! Whether the droplets of a path can be heard, and have the rows that packets need.

use thuban_rows::PolicyId;

use super::{Cause, Fault, Found, Path, Place, no, unknown};
use crate::model::rows::Key;
use crate::model::world::RoleKind;

/// How droplets stand, as far as the operator hears them.
pub trait Delivery {
    fn droplet(&self, droplet: &str) -> DropletState;

    fn row(&self, droplet: &str, key: &Key) -> RowState;

    /// Whether a droplet that is connected has acked all of its rows among these.
    fn is_served(&self, rows: &[(String, Key)]) -> bool;

    /// Whether a droplet takes packets of another one.
    fn knows(&self, droplet: &str, other: &str) -> bool;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropletState {
    Connected,
    /// It has no stream, and there is no verdict yet.
    Away,
    Suspect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowState {
    Acked,
    Unacked,
    /// The droplet's table is full.
    NoRoom,
    /// The droplet does not understand rows of the kind.
    Outdated,
}

impl<'a> Path<'a> {
    pub(super) fn droplets(&self, source: &Place<'a>, target: Option<&Place<'a>>) -> Found<()> {
        for place in [Some(source), target].into_iter().flatten() {
            match self.delivery.droplet(&place.endpoint.droplet) {
                DropletState::Connected => {}
                DropletState::Away => {
                    let message = format!("{} has no stream to the operator", place.node());
                    return Err(unknown(Cause::DropletAway, message));
                }
                DropletState::Suspect => {
                    let message = format!("{} is Suspect", place.node());
                    return Err(unknown(Cause::DropletSuspect, message));
                }
            }
        }
        // Whether another namespace's pod is on the source's droplet is not told.
        let target = target.filter(|target| !target.is_own || !is_together(source, target));
        let message = match target {
            None => format!("{} is connected", source.node()),
            Some(target) => format!("{} and {} are connected", source.node(), target.node()),
        };
        Ok(((), message))
    }

    pub(super) fn rows(&self, source: &Place<'a>, target: Option<&Place<'a>>) -> Found<()> {
        let vni = source.vpc.vni;
        let local = |place: &Place| Key::Local(vni, place.address.address.into());
        self.row(source, &Key::Vpc(vni))?;
        self.row(source, &Key::Network(vni, source.network.id))?;
        self.row(source, &local(source))?;
        if let Some(target) = target {
            self.row(target, &local(target))?;
            self.sets(source, target)?;
            if !is_together(source, target) {
                self.way(source, target)?;
            }
        } else {
            self.set(source, self.world.assignment(source.name).egress)?;
        }
        Ok((
            (),
            "the droplets have acknowledged what the path needs".to_owned(),
        ))
    }

    /// Looks at the sets by which the target's droplet judges packets: the sender's egress set too.
    fn sets(&self, source: &Place<'a>, target: &Place<'a>) -> Result<(), Fault> {
        if source.name == target.name {
            return Ok(());
        }
        self.set(target, self.world.assignment(source.name).egress)?;
        self.set(target, self.world.assignment(target.name).ingress)
    }

    /// Looks at a set at the droplet of an end. A droplet that has no room for a set denies all packets that it must
    /// judge by it.
    pub(super) fn set(&self, judge: &Place<'a>, set: Option<PolicyId>) -> Result<(), Fault> {
        let Some(set) = set else {
            return Ok(());
        };
        self.row(judge, &Key::PolicySet(judge.vpc.vni, set))
    }

    /// Looks at what passes the first packets on to another droplet.
    fn way(&self, source: &Place<'a>, target: &Place<'a>) -> Result<(), Fault> {
        if !self
            .delivery
            .knows(&target.endpoint.droplet, &source.endpoint.droplet)
        {
            let message = format!("{} does not know {} yet", target.node(), source.node());
            return Err(unknown(Cause::RowsMissing, message));
        }
        let is_served = |kind: RoleKind| {
            self.delivery
                .is_served(&self.world.serving_rows(kind, target.name))
        };
        if !is_served(RoleKind::Bouncer) {
            let message = format!("no bouncer works that knows {}", target.who());
            return Err(unknown(Cause::RolesNotServing, message));
        }
        if source.endpoint.network != target.endpoint.network && !is_served(RoleKind::Divider) {
            let message = format!("no divider of VPC {} works", source.network.vpc);
            return Err(unknown(Cause::RolesNotServing, message));
        }
        Ok(())
    }

    /// Looks at a row of the droplet of an end.
    pub(super) fn row(&self, place: &Place<'a>, key: &Key) -> Result<(), Fault> {
        let (node, kind) = (place.node(), key.kind());
        match self.delivery.row(&place.endpoint.droplet, key) {
            RowState::Acked => Ok(()),
            RowState::Unacked => {
                let message = format!("{node} has not acknowledged a row of kind {kind}");
                Err(unknown(Cause::RowsMissing, message))
            }
            RowState::NoRoom => {
                let message = format!("{node} has no room for a row of kind {kind}");
                Err(no(Cause::TableFull, message))
            }
            RowState::Outdated => {
                let message = format!("transitd of {node} does not understand rows of kind {kind}");
                Err(no(Cause::WaitsForUpgrade, message))
            }
        }
    }
}

/// Whether both are on one droplet: packets between them pass no other one.
fn is_together(source: &Place, target: &Place) -> bool {
    source.endpoint.droplet == target.endpoint.droplet
}

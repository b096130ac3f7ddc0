//! Reads which packets of pods a droplet dropped, and keeps them until the pods are told.
//!
//! Invariant: a droplet tells only of pods whose Endpoint lives on it, and only reasons that pods are told. The words
//! are this operator's.

use thuban_api::identifiers::Vni;
use thuban_common::counters::Counter;
use thuban_proto::transit::Dropped;

use super::report::MAX_PACKETS;
use super::take;
use crate::hub::Hub;
use crate::model::drop_reports::{Drops, PodName};
use crate::model::rows;
use crate::model::world::World;

impl Hub {
    /// Gathers the dropped packets that a droplet tells of.
    pub(super) fn note_drops(&self, droplet: &str, told: &[Dropped]) {
        if told.is_empty() {
            return;
        }
        let count = {
            let denials = self.denials();
            let asked = denials.asked.get(droplet).filter(|asked| asked.is_current);
            let Some(asked) = asked else { return };
            take(&asked.drop_limit, told.len())
        };
        let known = self.read(|world| {
            let told = told[..count].iter();
            told.filter_map(|dropped| read(droplet, dropped, world))
                .collect::<Vec<_>>()
        });
        let now = self.now();
        let mut denials = self.denials();
        for (pod, why) in known {
            denials.drops.note(droplet, pod, why, now);
        }
    }

    /// Takes the pods that are to be told now of dropped packets: a bounded number in a minute.
    pub fn take_drops(&self) -> Vec<(PodName, Drops)> {
        let now = self.now();
        self.denials().drops.take(now)
    }
}

fn read(droplet: &str, dropped: &Dropped, world: &World) -> Option<(PodName, (Counter, u64))> {
    let reason = Counter::of(dropped.reason).filter(|reason| reason.is_told())?;
    let address = rows::address(&dropped.address)?;
    let pod = world.pod_on(droplet, Vni::new(dropped.vni)?, address)?;
    Some((pod, (reason, dropped.packets.min(MAX_PACKETS))))
}

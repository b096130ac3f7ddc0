//! The scenes: the target of each attack, its form, and the probe that measures it.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Result, anyhow, ensure};
use thuban_proto::transit::row::Row;

use super::{
    Plan,
    flood::{self, Flood},
    probe::{self, Outcome, Probe},
    site::{Site, Tenant, exposed, service},
};
use crate::bench::transitd::Parts;

pub struct Scene {
    pub name: &'static str,
    attack: Attack,
    probes: &'static [Probe],
}

#[derive(Clone, Copy)]
enum Attack {
    /// Floods of all pods of all attackers, at the plan's rate or this one. The second flood takes nothing of others.
    Floods(Flood, Flood, Option<u32>),
    /// One pod of the VPC that measures.
    Own(Flood, Flood, Option<u32>),
    /// So many changes a second of attackers' Services by such rows; no packet at all.
    Changes(u32, fn(u8, u8) -> Row),
}

/// Names a second of one pod: enough to exhaust 4 seconds of patience and 128 places of a VPC.
const NAMES: Option<u32> = Some(100);

pub const SCENES: [Scene; 6] = [
    Scene {
        name: "connections",
        attack: Attack::Floods(Flood::Service, Flood::Nobody, None),
        probes: &[Probe::Connect, Probe::Open],
    },
    Scene {
        name: "dns",
        attack: Attack::Floods(Flood::SilentNames, Flood::OwnNames, NAMES),
        probes: &[Probe::Names],
    },
    Scene {
        name: "dns-of-one-vpc",
        attack: Attack::Own(Flood::SilentNames, Flood::OwnNames, NAMES),
        probes: &[Probe::Names],
    },
    Scene {
        name: "scan",
        attack: Attack::Floods(Flood::Scan, Flood::Nobody, None),
        probes: &[Probe::Paths],
    },
    Scene {
        name: "changes",
        attack: Attack::Changes(50, service),
        probes: &[Probe::Names, Probe::Pods],
    },
    Scene {
        name: "node-ports",
        attack: Attack::Changes(50, exposed),
        probes: &[Probe::Names, Probe::Pods],
    },
];

/// A probe's three measurements.
#[derive(Clone, Debug)]
pub struct Outcomes {
    pub probe: &'static str,
    pub alone: Outcome,
    pub control: Outcome,
    pub beside: Outcome,
}

/// Plays one round of a scene, each probe on a node of its own: the effects of an attack last for minutes.
pub fn play(scene: &Scene, plan: &Plan, parts: &Parts) -> Result<Vec<Outcomes>> {
    let one = |probe: &Probe| {
        let site = Site::up(parts, plan.attackers)?;
        ensure!(
            probe::works(site.victim.client())?,
            "the victim's Service does not answer"
        );
        let seconds = plan.seconds;
        let alone = probe.measure(&site, seconds, 0)?;
        let control = during(&site, scene.attack, true, plan, || {
            probe.measure(&site, seconds, 1)
        })?;
        let beside = during(&site, scene.attack, false, plan, || {
            probe.measure(&site, seconds, 2)
        })?;
        Ok(Outcomes {
            probe: probe.name(),
            alone,
            control,
            beside,
        })
    };
    scene.probes.iter().map(one).collect()
}

/// Does the work while the attack, or its harmless twin, goes on.
fn during<T: Send>(
    site: &Site,
    attack: Attack,
    is_control: bool,
    plan: &Plan,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let pick = |worst, harmless| if is_control { harmless } else { worst };
    let tenants: Vec<(&Tenant, u8, Flood, u32)> = match attack {
        Attack::Floods(worst, harmless, rate) => {
            let rate = rate.unwrap_or(plan.rate);
            let flood = pick(worst, harmless);
            let pods = site
                .attackers
                .iter()
                .flat_map(|tenant| [(tenant, 0), (tenant, 1)]);
            pods.map(|(tenant, pod)| (tenant, pod, flood, rate)).collect()
        }
        Attack::Own(worst, harmless, rate) => {
            vec![(&site.victim, 1, pick(worst, harmless), rate.unwrap_or(plan.rate))]
        }
        Attack::Changes(..) => Vec::new(),
    };
    let is_over = &AtomicBool::new(false);
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for (tenant, pod, flood, rate) in tenants {
            let namespace = &tenant.pods[usize::from(pod)].namespace;
            let own = (tenant.vni, tenant.address(pod));
            threads.push(scope.spawn(move || flood::send(namespace, own, flood, rate, is_over)));
        }
        if let Attack::Changes(rate, row) = attack
            && !is_control
        {
            threads.push(scope.spawn(move || Ok(change(site, rate, row, is_over))));
        }
        let result = work();
        is_over.store(true, Ordering::Relaxed);
        for thread in threads {
            let sent = thread.join().map_err(|_| anyhow!("an attacker panicked"))??;
            ensure!(sent > 0, "an attacker sent nothing");
        }
        result
    })
}

/// Backends of attackers' Services come and go.
fn change(site: &Site, rate: u32, row: fn(u8, u8) -> Row, is_over: &AtomicBool) -> u64 {
    let mut count = 0;
    while !is_over.load(Ordering::Relaxed) {
        for tenant in &site.attackers {
            let backends = 1 + (count % 2) as u8;
            site.transitd
                .operator
                .push(vec![row(tenant.vni, backends)], vec![]);
            count += 1;
        }
        thread::sleep(Duration::from_secs(1) / rate * site.attackers.len() as u32);
    }
    count
}

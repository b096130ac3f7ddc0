//! The scenes: the target of each attack, its form, and the probe that measures it.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Result, anyhow, ensure};
use thuban_proto::transit::{Row as AnyRow, row::Row};
use thuban_testkit::{operator::IN_THE_END, wait::wait_for};

use super::{
    Plan,
    flood::{self, Flood},
    policies::Policies,
    probe::{Outcome, Probe},
    site::{Site, TABLE_FULL, Tenant, changing, exposed, filler},
};
use crate::bench::transitd::Parts;

pub struct Scene {
    pub name: &'static str,
    attack: Attack,
    probes: &'static [Probe],
    /// Series of transitd's metrics that count only when attackers are held to their share. None: nobody is refused
    /// anything, and the node does what it can.
    limits: &'static [&'static str],
}

#[derive(Clone, Copy)]
enum Attack {
    /// Floods of all pods of all attackers, at the plan's rate or this one. The second flood takes nothing of others.
    Floods(Flood, Flood, Option<u32>),
    /// The same of pods with rules of network policy. The probe begins when attackers have met a limit.
    Judged(Policies, Flood, Option<u32>),
    /// One pod of the VPC that measures.
    Own(Flood, Flood, Option<u32>),
    /// So many rows a second for attackers, by VNI and number; no packet at all.
    Changes(u32, fn(u8, u32) -> Row),
}

/// Names a second of one pod: enough to exhaust 4 seconds of patience and 128 places of a VPC.
const NAMES: Option<u32> = Some(100);

/// Datagrams a second of one pod, each of which makes a flow: more than end in time.
const ACCEPTED: Option<u32> = Some(20_000);

/// Datagrams a second of one pod, to be denied: a denial costs the pod next to nothing.
const DENIED: Option<u32> = Some(10_000);

const REFUSED_NAMES: &[&str] = &[
    r#"dns_queries_total{result="limited"}"#,
    r#"dns_queries_total{result="displaced"}"#,
];
const PACED: &[&str] = &[r#"packets_total{reason="direct_paced"}"#];

pub const SCENES: [Scene; 11] = [
    // The agents' table of connections.
    Scene {
        name: "connections",
        attack: Attack::Floods(Flood::Service, Flood::Nobody, None),
        probes: &[Probe::Connect, Probe::Open],
        limits: &[r#"packets_total{reason="service_stateless"}"#],
    },
    // The node's own connections and source ports.
    Scene {
        name: "shared-service",
        attack: Attack::Floods(Flood::Shared, Flood::Nobody, None),
        probes: &[Probe::Shared],
        limits: &[
            r#"drops_total{reason="pod_connection_rate"}"#,
            r#"drops_total{reason="pod_connections"}"#,
            r#"drops_total{reason="vpc_connections"}"#,
        ],
    },
    Scene {
        name: "dns",
        attack: Attack::Floods(Flood::SilentNames, Flood::OwnNames, NAMES),
        probes: &[Probe::Names],
        limits: REFUSED_NAMES,
    },
    Scene {
        name: "dns-of-one-vpc",
        attack: Attack::Own(Flood::SilentNames, Flood::OwnNames, NAMES),
        probes: &[Probe::Names],
        limits: REFUSED_NAMES,
    },
    // Events, announcements and subscriptions.
    Scene {
        name: "scan",
        attack: Attack::Floods(Flood::Scan, Flood::Nobody, None),
        probes: &[Probe::Paths],
        limits: PACED,
    },
    // The operator's stream: subscriptions of attackers, and rows and acks of the one that measures.
    Scene {
        name: "stream",
        attack: Attack::Floods(Flood::Scan, Flood::Nobody, None),
        probes: &[Probe::Services],
        limits: PACED,
    },
    // The tables of Services.
    Scene {
        name: "tables",
        attack: Attack::Changes(500, filler),
        probes: &[Probe::Services],
        limits: &[TABLE_FULL],
    },
    // transitd's locks.
    Scene {
        name: "changes",
        attack: Attack::Changes(50, changing),
        probes: &[Probe::Names, Probe::Pods, Probe::Services],
        limits: &[],
    },
    // The node's rules.
    Scene {
        name: "node-ports",
        attack: Attack::Changes(50, exposed),
        probes: &[Probe::Names, Probe::Pods],
        limits: &[],
    },
    // The tables of rules, and the one of what they deny.
    Scene {
        name: "policy-denials",
        attack: Attack::Judged(Policies::Most, Flood::Denied, DENIED),
        probes: &[Probe::Connect, Probe::Open],
        limits: &[r#"drops_total{reason="policy_ingress"}"#],
    },
    // The table of flows that rules let pass.
    Scene {
        name: "policy-flows",
        attack: Attack::Judged(Policies::One, Flood::Accepted, ACCEPTED),
        probes: &[Probe::Connect, Probe::Open],
        limits: &[r#"packets_total{reason="policy_unvouched"}"#],
    },
];

impl Attack {
    /// Returns the rules of the pods of a scene.
    const fn policies(self) -> Policies {
        match self {
            Self::Judged(policies, ..) => policies,
            Self::Floods(..) | Self::Own(..) | Self::Changes(..) => Policies::None,
        }
    }
}

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
        let site = Site::up(parts, plan.attackers, scene.attack.policies())?;
        let alone = probe.measure(&site, plan, 0)?;
        let control = during(&site, scene.attack, true, plan, || probe.measure(&site, plan, 1))?;
        let beside = during(&site, scene.attack, false, plan, || {
            if matches!(scene.attack, Attack::Judged(..)) {
                wait_for_limit(&site, scene, IN_THE_END)?;
            }
            probe.measure(&site, plan, 2)
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

/// Plays a scene once, on one node: the probes measure, one after the other, once attackers have met a limit.
pub fn check(scene: &Scene, plan: &Plan, parts: &Parts) -> Result<()> {
    let site = Site::up(parts, plan.attackers, scene.attack.policies())?;
    during(&site, scene.attack, false, plan, || {
        if !scene.limits.is_empty() {
            wait_for_limit(&site, scene, plan.patience)?;
        }
        for probe in scene.probes {
            let outcome = probe.measure(&site, plan, 0)?;
            println!("{}, {}: {outcome:?}", scene.name, probe.name());
            ensure!(
                outcome.answered == outcome.attempts,
                "{}: {} of {} were answered",
                probe.name(),
                outcome.answered,
                outcome.attempts
            );
        }
        Ok(())
    })?;
    println!(
        "{}: attackers were refused {} times",
        scene.name,
        refused(&site, scene)?
    );
    Ok(())
}

/// Waits until attackers are refused something.
fn wait_for_limit(site: &Site, scene: &Scene, patience: Duration) -> Result<()> {
    wait_for(
        "a counter of what attackers are refused",
        patience,
        Duration::from_millis(100),
        || Ok(refused(site, scene)? > 0),
    )
}

/// Returns what the scene's limits have counted.
fn refused(site: &Site, scene: &Scene) -> Result<u64> {
    let metrics = site.transitd.metrics()?;
    Ok(scene
        .limits
        .iter()
        .filter_map(|series| metrics.get(*series))
        .sum())
}

/// Ends attackers when dropped, also by a panic of the work.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
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
    let of_all = |flood, rate: Option<u32>| {
        let rate = rate.unwrap_or(plan.rate);
        let attackers = site.attackers.iter();
        let pods = attackers.flat_map(|tenant| [(tenant, 0), (tenant, 1)]);
        pods.map(|(tenant, pod)| (tenant, pod, flood, rate)).collect()
    };
    let tenants: Vec<(&Tenant, u8, Flood, u32)> = match attack {
        Attack::Floods(worst, harmless, rate) => of_all(pick(worst, harmless), rate),
        Attack::Judged(_, worst, rate) => of_all(pick(worst, Flood::Nobody), rate),
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
        let ended = Ended(is_over);
        let result = work();
        drop(ended);
        for thread in threads {
            let sent = thread.join().map_err(|_| anyhow!("an attacker panicked"))??;
            ensure!(sent > 0, "an attacker sent nothing");
        }
        result
    })
}

/// Sends attackers' rows; returns how many.
fn change(site: &Site, rate: u32, row: fn(u8, u32) -> Row, is_over: &AtomicBool) -> u64 {
    let each = Duration::from_secs(1) / rate * site.attackers.len() as u32;
    let mut number = 0;
    while !is_over.load(Ordering::Relaxed) {
        for tenant in &site.attackers {
            let row = AnyRow {
                row: Some(row(tenant.vni, number)),
            };
            site.transitd.operator.push_raw(vec![row], vec![]);
        }
        number += 1;
        thread::sleep(each);
    }
    u64::from(number) * site.attackers.len() as u64
}

//! Probes between droplets with every kind of transit, without a daemon.

use std::{net::Ipv4Addr, thread::sleep, time::Duration};

use anyhow::{Result, ensure};
use aya::programs::{TestRun, TestRunOptions};
use thuban_common::{counters::Counter, packet::probe::ProbeFrame, tables::ProbeEntry};
use thuban_e2e::rig::{Rig, Transit, Underlay};

const SECRET: u64 = 0x1122_3344_5566_7788;
/// How often a test looks for a question and for its answer; the first waits for the neighbour.
const ANSWER_TIMEOUT: u32 = 100;

/// Sends a probe as transitd does: the first droplet asks the last.
fn ask(rig: &mut Rig) -> Result<()> {
    let [here, to] = [0, rig.droplets.len() - 1].map(|index| rig.droplets[index].address.octets());
    let droplet = rig.droplet(1)?;
    let frame = ProbeFrame::wanted(here, to, SECRET, 50_000);
    let program = droplet.programs.tc("probe_tc")?;
    let result = droplet.namespace.run(|| {
        Ok(program.test_run(TestRunOptions {
            data_in: Some(frame.bytes()),
            ..TestRunOptions::new()
        })?)
    })?;
    ensure!(result.return_value == 0, "the uplink took no probe: {result:?}");
    Ok(())
}

fn heard(rig: &mut Rig) -> Result<u64> {
    let last = rig.droplets.len();
    let to = rig.droplet(last)?.address.octets();
    let entry: ProbeEntry = rig.droplet(1)?.programs.get("PROBES", &to)?;
    Ok(entry.heard)
}

/// Waits for an answer after that of `last`, and returns when it was heard; `last` if there is none.
fn hear(rig: &mut Rig, last: u64) -> Result<u64> {
    for _ in 0..ANSWER_TIMEOUT {
        if heard(rig)? != last {
            break;
        }
        sleep(Duration::from_millis(20));
    }
    heard(rig)
}

fn asks_and_hears(transit: Transit, underlay: Underlay) -> Result<()> {
    let mut rig = Rig::new(3, transit, underlay)?;
    let to = rig.droplet(3)?.address.octets();
    let entry = ProbeEntry {
        secret: SECRET,
        ..ProbeEntry::default()
    };
    rig.droplet(1)?.programs.insert("PROBES", to, entry)?;
    let mut last = 0;
    for number in 0..3 {
        ask(&mut rig)?;
        let now = hear(&mut rig, last)?;
        ensure!(now > last, "question {number} was not answered");
        last = now;
    }
    let mut counted = |droplet: usize, counter: Counter| rig.droplet(droplet)?.programs.counter(counter);
    ensure!(counted(1, Counter::ProbesSent)? == 3);
    ensure!(counted(3, Counter::ProbesAnswered)? == 3);
    ensure!(counted(1, Counter::ProbesHeard)? == 3);
    // No droplet answers an answer.
    sleep(Duration::from_millis(200));
    for droplet in 1..=3 {
        let all = rig.droplet(droplet)?.programs.counters()?;
        let probes: u64 = all.values().sum();
        ensure!(probes == [6, 0, 3][droplet - 1], "{droplet}: {all:?}");
    }
    Ok(())
}

#[test]
fn a_droplet_asks_another_and_hears_it_by_every_way_of_transit() -> Result<()> {
    for transit in Transit::ALL {
        for underlay in [Underlay::Switched, Underlay::Routed] {
            asks_and_hears(transit, underlay)
                .map_err(|error| error.context(format!("{transit:?}, {underlay:?}")))?;
        }
    }
    Ok(())
}

#[test]
fn questions_to_droplets_on_the_link_need_no_route() -> Result<()> {
    let mut rig = Rig::new(2, Transit::Tc, Underlay::Switched)?;
    let to = rig.droplet(2)?.address.octets();
    let entry = ProbeEntry {
        secret: SECRET,
        ..ProbeEntry::default()
    };
    let droplet = rig.droplet(1)?;
    droplet.programs.insert("PROBES", to, entry)?;
    // The kernel's route has a gateway that nobody is.
    let (to, nobody) = (Ipv4Addr::from(to), Underlay::Switched.droplet(99));
    droplet
        .namespace
        .command(&format!("ip route add {to} via {nobody}"))?;
    ask(&mut rig)?;
    ensure!(hear(&mut rig, 0)? != 0, "the question went by the route");
    // A range that the droplet isn't in.
    rig.droplet(1)?.programs.set_on_link([198, 51, 100, 0])?;
    let answered = rig.droplet(2)?.programs.counter(Counter::ProbesAnswered)?;
    ask(&mut rig)?;
    sleep(Duration::from_millis(200));
    let after = rig.droplet(2)?.programs.counter(Counter::ProbesAnswered)?;
    ensure!(after == answered, "the question did not go by the route");
    Ok(())
}

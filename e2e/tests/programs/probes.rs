//! Probes between droplets: only droplets get answers, and a probe has no other effect.

use anyhow::{Result, ensure};
use thuban_common::{counters::Counter, packet::probe::ProbeFrame, tables::ProbeEntry};
use thuban_testkit::packets::{Tunnel, probe};

use crate::{
    fixture::{self, Expect, Fixture},
    frames::Packet,
    rows::{ASKED, HERE, SECOND, SECRET, TENANT, THIRD, UNREACHED, ip},
    world::{Hook, Role, World},
};

const ETHERNET: [u8; 12] = [2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2];
const WANTED: u16 = 1;
const QUESTION: u16 = 2;
const ANSWER: u16 = 3;

fn fixture(description: &'static str, frame: Vec<u8>, expect: Expect) -> Fixture {
    Fixture::new(description, Role::Transit, frame, expect)
}

fn from(sender: std::net::Ipv4Addr, kind: u16, secret: u64) -> Vec<u8> {
    Tunnel::probe(sender, HERE).around(ETHERNET, &probe(kind, secret))
}

#[test]
fn only_droplets_questions_are_answered_with_as_many_bytes() -> Result<()> {
    let answered = |to| Expect::Turned {
        to,
        kind: 3,
        counter: Counter::ProbesAnswered,
    };
    let drop = Expect::Drop;
    let stranger = ip(192, 0, 2, 99);
    let with = |change: &dyn Fn(&mut Tunnel)| {
        let mut tunnel = Tunnel::probe(SECOND, HERE);
        change(&mut tunnel);
        tunnel.around(ETHERNET, &probe(QUESTION, SECRET))
    };
    let whole = from(SECOND, QUESTION, SECRET);
    fixture::run(
        &mut World::new()?,
        &[
            fixture("of a droplet", whole.clone(), answered(SECOND)),
            fixture("with any secret", from(THIRD, QUESTION, 0), answered(THIRD)),
            fixture(
                "of a stranger",
                from(stranger, QUESTION, SECRET),
                drop(Counter::UnknownDroplet),
            ),
            fixture(
                "in this droplet's name",
                from(HERE, QUESTION, SECRET),
                drop(Counter::UnknownDroplet),
            ),
            fixture(
                "without hops left",
                with(&|tunnel| tunnel.ttl = 1),
                drop(Counter::TtlExpired),
            ),
            fixture(
                "with a VNI",
                with(&|tunnel| tunnel.vni = 100),
                drop(Counter::BadHeader),
            ),
            fixture(
                "of another protocol",
                with(&|tunnel| tunnel.protocol = 0x6558),
                drop(Counter::BadHeader),
            ),
            fixture(
                "no control frame",
                with(&|tunnel| tunnel.first[1] = 0),
                drop(Counter::BadHeader),
            ),
            fixture(
                "of another version",
                with(&|tunnel| tunnel.first[0] = 0x40),
                drop(Counter::BadHeader),
            ),
            fixture(
                "with options",
                with(&|tunnel| *tunnel = tunnel.clone().with_options(&[1, 2, 3, 0])),
                drop(Counter::BadHeader),
            ),
            fixture(
                "cut short",
                whole[..whole.len() - 1].to_vec(),
                drop(Counter::Truncated),
            ),
            fixture("of no kind", from(SECOND, 0, SECRET), drop(Counter::BadHeader)),
            fixture(
                "of an unknown kind",
                from(SECOND, 4, SECRET),
                drop(Counter::BadHeader),
            ),
            fixture(
                "to another droplet",
                Tunnel::probe(SECOND, THIRD).around(ETHERNET, &probe(QUESTION, SECRET)),
                Expect::Pass(None),
            ),
        ],
    )
}

#[test]
fn an_answer_is_noted_if_it_was_asked_for_and_never_answered() -> Result<()> {
    let mut world = World::new()?;
    let heard = |world: &World| -> Result<Vec<bool>> {
        let entry = |droplet: &std::net::Ipv4Addr| world.programs.get("PROBES", &droplet.octets());
        let heard = |entry: ProbeEntry| entry.heard != 0;
        ASKED.iter().map(|droplet| Ok(heard(entry(droplet)?))).collect()
    };
    let unasked = || Expect::Drop(Counter::ProbeUnasked);
    fixture::run(
        &mut world,
        &[
            fixture("of one that is not asked", from(THIRD, ANSWER, SECRET), unasked()),
            fixture("with another secret", from(SECOND, ANSWER, SECRET ^ 1), unasked()),
            fixture("without a secret", from(SECOND, ANSWER, 0), unasked()),
        ],
    )?;
    ensure!(
        heard(&world)? == [false, false],
        "what was not asked is not heard"
    );
    fixture::run(
        &mut world,
        &[fixture(
            "as asked",
            from(SECOND, ANSWER, SECRET),
            Expect::Taken(Counter::ProbesHeard),
        )],
    )?;
    ensure!(
        heard(&world)? == [true, false],
        "the one that answered, and no other"
    );
    Ok(())
}

#[test]
fn what_transitd_wants_asked_goes_to_those_that_it_asks_alone() -> Result<()> {
    let sent = |to| Expect::Turned {
        to,
        kind: 2,
        counter: Counter::ProbesSent,
    };
    let unasked = || Expect::Drop(Counter::ProbeUnasked);
    let made = ProbeFrame::wanted(HERE.octets(), SECOND.octets(), SECRET, 50_000);
    let mut world = World::new()?;
    fixture::run(
        &mut world,
        &[
            fixture("as transitd makes it", made.bytes().to_vec(), sent(SECOND)),
            fixture("to one that is not asked", from(THIRD, WANTED, SECRET), unasked()),
            fixture("by somebody else", from(SECOND, WANTED, 1), unasked()),
        ],
    )?;
    // XDP leaves it to tc, where the kernel finds the neighbour.
    for (hook, verdict) in [(Hook::Xdp, 2), (Hook::Tc, 7)] {
        let outcome = world.run(Role::Transit, hook, &from(UNREACHED, WANTED, SECRET))?;
        ensure!(outcome.verdict == verdict, "{hook:?}: {}", outcome.verdict);
    }
    Ok(())
}

#[test]
fn pods_send_no_probes() -> Result<()> {
    let packet = Tunnel::probe(TENANT.address, SECOND).packet(&probe(QUESTION, SECRET));
    let mut frame = Packet::udp(TENANT.mac(), TENANT.address, SECOND).bytes();
    frame.truncate(14);
    frame.extend(packet);
    let mut world = World::new()?;
    for hook in [Hook::Tc, Hook::Xdp] {
        let outcome = world.run(Role::Agent(TENANT.index), hook, &frame)?;
        let dropped = Counter::ALL.iter().filter(|counter| counter.is_drop());
        let drops: u64 = dropped
            .filter_map(|counter| outcome.counted.get(counter.name()))
            .sum();
        ensure!(drops == 1, "{hook:?}: {:?}", outcome.counted);
    }
    Ok(())
}

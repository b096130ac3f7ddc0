//! Packet fixtures: what goes in, what must come out, at both hooks.

use std::{collections::BTreeMap, net::Ipv4Addr};

use anyhow::{Context, Result, ensure};
use thuban_common::{
    counters::Counter,
    tables::{GATEWAY_MAC, TRANSIT_MAGIC},
};

use crate::{
    frames::Tunnel,
    rows::HERE,
    world::{Hook, Outcome, Role, UPLINK_MAC, World, neighbour_mac},
};

/// What must happen to a frame.
pub enum Expect {
    Drop(Counter),
    /// Unchanged to the stack; the counter is tc's, which has the last word.
    Pass(Option<Counter>),
    /// Encapsulated and sent to a droplet.
    Encapsulated {
        to: Ipv4Addr,
        vni: u32,
        traffic_class: u8,
        counter: Counter,
    },
    /// As it came, with the endpoint's MACs, to a veth of this droplet.
    Local {
        mac: [u8; 6],
    },
    /// These bytes back to the pod; XDP leaves it to tc.
    Reply {
        bytes: Vec<u8>,
        counter: Counter,
    },
    /// The outer header rewritten for the next droplet.
    Hop {
        to: Ipv4Addr,
        counter: Counter,
    },
    /// Local, where the veth takes no frames from XDP, which leaves it to tc.
    LocalAtTc {
        mac: [u8; 6],
    },
    /// The inner frame with the endpoint's MACs; `length` bytes of headers came off.
    Delivered {
        mac: [u8; 6],
        length: usize,
        vni: u32,
    },
    /// As [`Expect::Delivered`], but the inner frame is this one.
    DeliveredAs {
        inner: Vec<u8>,
        mac: [u8; 6],
        vni: u32,
    },
    /// A drop that XDP leaves to tc.
    DropAtTc(Counter),
    /// A hop that XDP can't make and leaves to tc.
    HopAtTc {
        to: Ipv4Addr,
        counter: Counter,
    },
    /// An encapsulation that XDP leaves to tc.
    EncapsulatedAtTc {
        to: Ipv4Addr,
        vni: u32,
        counter: Counter,
    },
}

pub struct Fixture {
    pub description: &'static str,
    pub role: Role,
    pub frame: Vec<u8>,
    pub expect: Expect,
    pub hooks: &'static [Hook],
}

impl Fixture {
    pub fn new(description: &'static str, role: Role, frame: Vec<u8>, expect: Expect) -> Self {
        Self {
            description,
            role,
            frame,
            expect,
            hooks: &[Hook::Tc, Hook::Xdp],
        }
    }

    /// Test runs at tc refuse IPv4 frames that are shorter than the header.
    pub fn at_xdp_only(self) -> Self {
        Self {
            hooks: &[Hook::Xdp],
            ..self
        }
    }
}

const PASS: [u32; 2] = [0, 2];
const DROP: [u32; 2] = [2, 1];
const REDIRECT: [u32; 2] = [7, 4];
const XDP_TX: u32 = 3;

/// Runs all fixtures at both hooks and reports every one that failed.
pub fn run(world: &mut World, fixtures: &[Fixture]) -> Result<()> {
    let mut failures = Vec::new();
    for fixture in fixtures {
        for &hook in fixture.hooks {
            let checked = world.run(fixture.role, hook, &fixture.frame).and_then(|outcome| {
                check(fixture, hook, &outcome)
                    .with_context(|| format!("verdict {} counted {:?}", outcome.verdict, outcome.counted))
            });
            if let Err(error) = checked {
                failures.push(format!("{} at {hook:?}: {error:#}", fixture.description));
            }
        }
    }
    ensure!(
        failures.is_empty(),
        "{} failed:\n{}",
        failures.len(),
        failures.join("\n")
    );
    Ok(())
}

fn check(fixture: &Fixture, hook: Hook, outcome: &Outcome) -> Result<()> {
    let at = |verdicts: [u32; 2]| verdicts[usize::from(hook == Hook::Xdp)];
    let input = &fixture.frame;
    let is_tc = hook == Hook::Tc;
    match &fixture.expect {
        Expect::DropAtTc(reason) if is_tc => ended(outcome, at(DROP), &[*reason]),
        Expect::Drop(reason) => ended(outcome, at(DROP), &[*reason]),
        Expect::Pass(counter) => {
            let counted: Vec<Counter> = counter.iter().copied().filter(|_| is_tc).collect();
            same(&outcome.frame, input)?;
            ended(outcome, at(PASS), &counted)
        }
        Expect::Encapsulated {
            to,
            vni,
            traffic_class,
            counter,
        } => {
            encapsulated(outcome, hook, input, *to, *vni, *traffic_class)?;
            ended(outcome, at(REDIRECT), &[*counter])
        }
        Expect::EncapsulatedAtTc { to, vni, counter } if is_tc => {
            encapsulated(outcome, hook, input, *to, *vni, 0)?;
            ended(outcome, at(REDIRECT), &[*counter])
        }
        Expect::Hop { to, counter } => {
            hopped(outcome, hook, input, *to)?;
            ended(outcome, if is_tc { at(REDIRECT) } else { XDP_TX }, &[*counter])
        }
        Expect::HopAtTc { to, counter } if is_tc => {
            hopped(outcome, hook, input, *to)?;
            ended(outcome, at(REDIRECT), &[*counter])
        }
        Expect::Reply { bytes, counter } if is_tc => {
            same(&outcome.frame, bytes)?;
            ended(outcome, at(REDIRECT), &[*counter])
        }
        Expect::LocalAtTc { mac } if is_tc => {
            same(&outcome.frame, &with_macs(input, *mac))?;
            ended(outcome, at(REDIRECT), &[Counter::DeliveredLocal])
        }
        Expect::Reply { .. }
        | Expect::DropAtTc(_)
        | Expect::LocalAtTc { .. }
        | Expect::HopAtTc { .. }
        | Expect::EncapsulatedAtTc { .. } => {
            same(&outcome.frame, input)?;
            ended(outcome, at(PASS), &[])
        }
        Expect::Local { mac } => {
            same(&outcome.frame, &with_macs(input, *mac))?;
            ended(outcome, at(REDIRECT), &[Counter::DeliveredLocal])
        }
        Expect::Delivered { mac, length, vni } => delivered(outcome, hook, &input[*length..], *mac, *vni),
        Expect::DeliveredAs { inner, mac, vni } => delivered(outcome, hook, inner, *mac, *vni),
    }
}

/// The inner frame with the endpoint's MACs: redirected at tc, behind metadata at XDP.
fn delivered(outcome: &Outcome, hook: Hook, inner: &[u8], mac: [u8; 6], vni: u32) -> Result<()> {
    let inner = with_macs(inner, mac);
    if hook == Hook::Tc {
        same(&outcome.frame, &inner)?;
        return ended(outcome, REDIRECT[0], &[Counter::Delivered]);
    }
    let (metadata, frame) = outcome.frame.split_at_checked(12).context("no metadata")?;
    same(frame, &inner)?;
    let words: Vec<u8> = [TRANSIT_MAGIC, vni]
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .collect();
    same(&metadata[..8], &words)?;
    ended(outcome, PASS[1], &[Counter::DecapsulatedXdp])
}

fn with_macs(frame: &[u8], mac: [u8; 6]) -> Vec<u8> {
    [&mac[..], &GATEWAY_MAC, &frame[12..]].concat()
}

/// The outer packet. tc's neighbour code writes the Ethernet header after the program.
fn without_ethernet(hook: Hook, frame: &[u8], to: Ipv4Addr) -> Result<&[u8]> {
    let (ethernet, rest) = frame.split_at_checked(14).context("too short")?;
    if hook == Hook::Xdp {
        let expected = [&neighbour_mac(to)[..], &UPLINK_MAC, &[8, 0]].concat();
        same(ethernet, &expected)?;
    }
    Ok(rest)
}

fn encapsulated(
    outcome: &Outcome,
    hook: Hook,
    input: &[u8],
    to: Ipv4Addr,
    vni: u32,
    class: u8,
) -> Result<()> {
    let rest = without_ethernet(hook, &outcome.frame, to)?;
    let source_port = u16::from_be_bytes([rest[20], rest[21]]);
    ensure!(source_port >= 49152, "source port {source_port}");
    let tunnel = Tunnel {
        source_port,
        traffic_class: class,
        ..Tunnel::new(HERE, to, vni)
    };
    same(rest, &tunnel.around([0; 12], input)[14..])
}

/// Outer source and destination new, TTL one less, checksum right; all else as it was.
fn hopped(outcome: &Outcome, hook: Hook, input: &[u8], to: Ipv4Addr) -> Result<()> {
    let rest = without_ethernet(hook, &outcome.frame, to)?;
    let mut expected = input[14..].to_vec();
    expected[8] -= 1;
    expected[10..12].fill(0);
    expected[12..16].copy_from_slice(&HERE.octets());
    expected[16..20].copy_from_slice(&to.octets());
    let sum = thuban_e2e::rig::traffic::checksum(&expected[..20]);
    expected[10..12].copy_from_slice(&sum.to_be_bytes());
    same(rest, &expected)
}

fn ended(outcome: &Outcome, verdict: u32, counters: &[Counter]) -> Result<()> {
    let counted: BTreeMap<&str, u64> = counters.iter().map(|counter| (counter.name(), 1)).collect();
    ensure!(outcome.counted == counted, "should have counted {counted:?}");
    ensure!(outcome.verdict == verdict, "verdict should be {verdict}");
    Ok(())
}

fn same(is: &[u8], should: &[u8]) -> Result<()> {
    let differs = is.iter().zip(should).position(|(is, should)| is != should);
    ensure!(
        is == should,
        "{} bytes instead of {}, first difference at {differs:?}:\n{is:02x?}\n{should:02x?}",
        is.len(),
        should.len()
    );
    Ok(())
}

//! Packet fixtures: the frame that goes in and the result that must come out, at both hooks.

use std::{collections::BTreeMap, net::Ipv4Addr};

use anyhow::{Context, Result, ensure};
use thuban_common::{
    counters::Counter,
    policy::{SHARED_SERVICE_CLASS, STAMP_REPLY, Stamp},
    tables::{GATEWAY_MAC, TRANSIT_MAGIC},
};

use thuban_testkit::packets::{self, checksum, ensure_same};

use crate::{
    frames::Tunnel,
    rows::{ATTACHED, Endpoint, HERE, TENANT},
    world::{Hook, Outcome, Role, UPLINK_MAC, World, neighbour_mac},
};

/// The expected result of a frame.
#[derive(Debug)]
pub enum Expect {
    Drop(Counter),
    /// The frame goes unchanged to the stack; the counter is tc's, which decides last.
    Pass(Option<Counter>),
    /// The frame is encapsulated and sent to a droplet.
    Encapsulated {
        to: Ipv4Addr,
        vni: u32,
        traffic_class: u8,
        counter: Counter,
    },
    /// The frame goes unchanged except for the endpoint's MACs to a veth of this droplet.
    Local {
        mac: [u8; 6],
    },
    /// These bytes go back to the pod; XDP leaves it to tc.
    Reply {
        bytes: Vec<u8>,
        counter: Counter,
    },
    /// The outer header is rewritten for the next droplet.
    Hop {
        to: Ipv4Addr,
        counter: Counter,
    },
    /// The probe goes back to the droplet that it names as its sender.
    Turned {
        to: Ipv4Addr,
        kind: u8,
        counter: Counter,
    },
    /// The frame ends here, and this is no loss.
    Taken(Counter),
    /// The same as Local, where the veth takes no frames from XDP, which leaves it to tc.
    LocalAtTc {
        mac: [u8; 6],
    },
    /// The inner frame with the endpoint's MACs; `length` bytes of headers came off.
    Delivered {
        mac: [u8; 6],
        length: usize,
        vni: u32,
    },
    /// The same as [`Expect::Delivered`], but the inner frame is this one.
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

    /// Restricts the fixture to XDP. Test runs at tc refuse IPv4 frames that are shorter than the header.
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
/// The offset of the inner source MAC.
const INNER_SOURCE: usize = 50 + 6;
/// The offset of the last byte of a probe's kind.
const PROBE_KIND: usize = 51;
const DELIVERED: [Counter; 2] = [Counter::Delivered, Counter::DecapsulatedXdp];

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
    let counter = judge(&fixture.expect, hook, &fixture.frame, outcome)?;
    let counted: BTreeMap<&str, u64> = counter.iter().map(|counter| (counter.name(), 1)).collect();
    ensure!(outcome.counted == counted, "should have counted {counted:?}");
    Ok(())
}

/// Checks the verdict and the frame, and returns what must have been counted.
pub fn judge(expect: &Expect, hook: Hook, input: &[u8], outcome: &Outcome) -> Result<Option<Counter>> {
    let is_xdp = usize::from(hook == Hook::Xdp);
    let is_tc = hook == Hook::Tc;
    let local = |mac: &[u8; 6]| ensure_same(&outcome.frame, &with_macs(input, *mac));
    let (verdict, counter) = match expect {
        Expect::Drop(reason) => (DROP, Some(*reason)),
        Expect::DropAtTc(reason) if is_tc => (DROP, Some(*reason)),
        Expect::Pass(counter) => {
            ensure_same(&outcome.frame, input)?;
            (PASS, counter.filter(|_| is_tc))
        }
        Expect::Encapsulated {
            to,
            vni,
            traffic_class,
            counter,
        } => {
            encapsulated(outcome, hook, input, *to, *vni, *traffic_class)?;
            (REDIRECT, Some(*counter))
        }
        Expect::EncapsulatedAtTc { to, vni, counter } if is_tc => {
            encapsulated(outcome, hook, input, *to, *vni, 0)?;
            (REDIRECT, Some(*counter))
        }
        Expect::Hop { to, counter } => {
            hopped(outcome, hook, input, *to)?;
            ([REDIRECT[0], XDP_TX], Some(*counter))
        }
        Expect::Turned { to, kind, counter } => {
            let mut turned = input.to_vec();
            turned[PROBE_KIND] = *kind;
            hopped(outcome, hook, &turned, *to)?;
            ([REDIRECT[0], XDP_TX], Some(*counter))
        }
        Expect::Taken(counter) => (DROP, Some(*counter)),
        Expect::HopAtTc { to, counter } if is_tc => {
            hopped(outcome, hook, input, *to)?;
            (REDIRECT, Some(*counter))
        }
        Expect::Reply { bytes, counter } if is_tc => {
            ensure_same(&outcome.frame, bytes)?;
            (REDIRECT, Some(*counter))
        }
        Expect::LocalAtTc { mac } if is_tc => {
            local(mac)?;
            (REDIRECT, Some(Counter::DeliveredLocal))
        }
        Expect::Local { mac } => {
            local(mac)?;
            (REDIRECT, Some(Counter::DeliveredLocal))
        }
        Expect::Reply { .. }
        | Expect::DropAtTc(_)
        | Expect::LocalAtTc { .. }
        | Expect::HopAtTc { .. }
        | Expect::EncapsulatedAtTc { .. } => {
            ensure_same(&outcome.frame, input)?;
            (PASS, None)
        }
        Expect::Delivered { mac, length, vni } => {
            delivered(outcome, hook, &input[*length..], *mac, *vni)?;
            ([REDIRECT[0], PASS[1]], Some(DELIVERED[is_xdp]))
        }
        Expect::DeliveredAs { inner, mac, vni } => {
            delivered(outcome, hook, inner, *mac, *vni)?;
            ([REDIRECT[0], PASS[1]], Some(DELIVERED[is_xdp]))
        }
    };
    ensure!(
        outcome.verdict == verdict[is_xdp],
        "verdict should be {}",
        verdict[is_xdp]
    );
    Ok(counter)
}

/// Checks the inner frame with the endpoint's MACs; at XDP it is behind metadata.
fn delivered(outcome: &Outcome, hook: Hook, inner: &[u8], mac: [u8; 6], vni: u32) -> Result<()> {
    let inner = with_macs(inner, mac);
    if hook == Hook::Tc {
        return ensure_same(&outcome.frame, &inner);
    }
    let (metadata, frame) = outcome.frame.split_at_checked(12).context("no metadata")?;
    ensure_same(frame, &inner)?;
    let words: Vec<u8> = [TRANSIT_MAGIC, vni]
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .collect();
    ensure_same(&metadata[..8], &words)
}

fn with_macs(frame: &[u8], mac: [u8; 6]) -> Vec<u8> {
    [&mac[..], &GATEWAY_MAC, &frame[12..]].concat()
}

/// Returns the outer packet. tc's neighbour code writes the Ethernet header after the program.
fn without_ethernet(hook: Hook, frame: &[u8], to: Ipv4Addr) -> Result<&[u8]> {
    let (ethernet, rest) = frame.split_at_checked(14).context("too short")?;
    if hook == Hook::Xdp {
        let expected = [&neighbour_mac(to)[..], &UPLINK_MAC, &[8, 0]].concat();
        ensure_same(ethernet, &expected)?;
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
    // Whether an agent vouches depends on what came before: tests of policy look at it.
    let mut expected = stamped(input)?;
    expected[6] |= outcome.frame[INNER_SOURCE] & STAMP_REPLY as u8;
    ensure_same(rest, &tunnel.around([0; 12], &expected)[14..])
}

/// Returns the MACs of an endpoint's frame as it goes to another droplet: its stamp.
fn stamp_of(endpoint: Endpoint) -> [u8; 12] {
    stamp_bytes(endpoint.stamp())
}

/// Returns the inner MACs that bear a stamp.
pub fn stamp_bytes(stamp: Stamp) -> [u8; 12] {
    packets::stamp(stamp.class, stamp.egress_set, stamp.flags as u8)
}

/// Returns a stamp with its REPLY as this byte has it.
fn with_reply(mut stamp: [u8; 12], byte: u8) -> [u8; 12] {
    stamp[6] |= byte & STAMP_REPLY as u8;
    stamp
}

fn stamped(frame: &[u8]) -> Result<Vec<u8>> {
    let sender = ATTACHED.iter().find(|endpoint| endpoint.mac() == frame[6..12]);
    let stamp = stamp_of(*sender.context("no endpoint sends this frame")?);
    Ok([&stamp, &frame[12..]].concat())
}

/// Returns the frame as the endpoint sent it whose stamp it bears; unchanged if no endpoint has this stamp. The node
/// sends on for clients by a shared Service, and the node is `TENANT` where there is one.
pub fn unstamped(frame: &[u8]) -> Vec<u8> {
    let shared = Stamp {
        class: SHARED_SERVICE_CLASS,
        ..TENANT.stamp()
    };
    let is_of = |stamp| frame[..12] == with_reply(stamp, frame[6]);
    let sender = if is_of(stamp_bytes(shared)) {
        Some(&TENANT)
    } else {
        ATTACHED.iter().find(|endpoint| is_of(stamp_of(**endpoint)))
    };
    sender.map_or_else(
        || frame.to_vec(),
        |endpoint| [&GATEWAY_MAC, &endpoint.mac()[..], &frame[12..]].concat(),
    )
}

/// Checks that outer source and destination are new, TTL one less, the checksum right, and everything else unchanged.
fn hopped(outcome: &Outcome, hook: Hook, input: &[u8], to: Ipv4Addr) -> Result<()> {
    let rest = without_ethernet(hook, &outcome.frame, to)?;
    let mut expected = input[14..].to_vec();
    expected[8] -= 1;
    expected[10..12].fill(0);
    expected[12..16].copy_from_slice(&HERE.octets());
    expected[16..20].copy_from_slice(&to.octets());
    if checksum(&input[14..34]) == 0 {
        let sum = checksum(&expected[..20]);
        expected[10..12].copy_from_slice(&sum.to_be_bytes());
    } else {
        // A wrong checksum stays wrong, whatever it is.
        ensure!(checksum(&rest[..20]) != 0, "a wrong checksum became right");
        expected[10..12].copy_from_slice(&rest[10..12]);
    }
    ensure_same(rest, &expected)
}

//! Random rows, of few groups, names, ports and addresses, so that they meet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use fastrand::Rng;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use thuban_api::identifiers::Vni;
use thuban_rows::{
    Block, Class, NamedPort, PolicyAction, PolicyId, PolicyPorts, PolicyRule, PolicySet, PolicyTier,
};

const PROTOCOLS: [u8; 3] = [6, 17, 132];
const PORTS: [u16; 9] = [0, 1, 2, 3, 79, 80, 81, 65_534, 65_535];
const NAMES: [&str; 3] = ["http", "dns", "web"];
/// Ports of sets that have many of them.
const MANY: u16 = 400;

pub fn seeded() -> Rng {
    let set = std::env::var("THUBAN_SEED").ok();
    let seed = set.map_or_else(|| fastrand::u64(..1 << 32), |text| text.parse().unwrap());
    println!("THUBAN_SEED={seed}");
    Rng::with_seed(seed)
}

pub fn one<T: Clone>(random: &mut Rng, of: &[T]) -> T {
    of[random.usize(..of.len())].clone()
}

fn some<T>(random: &mut Rng, most: usize, mut make: impl FnMut(&mut Rng) -> T) -> Vec<T> {
    (0..random.usize(..=most)).map(|_| make(random)).collect()
}

fn is(random: &mut Rng, one_of: u32) -> bool {
    random.u32(..one_of) == 0
}

pub fn class(random: &mut Rng, vni: Vni, id: PolicyId) -> Class {
    let name = |random: &mut Rng| NamedPort {
        name: one(random, &NAMES).to_owned(),
        protocol: one(random, &PROTOCOLS),
        port: one(random, &PORTS),
    };
    Class {
        vni,
        id,
        groups: some(random, 3, group).into_iter().collect(),
        names: some(random, 3, name).into_iter().collect(),
    }
}

fn group(random: &mut Rng) -> u64 {
    random.u64(1..6)
}

/// Returns a set; one of four has many ports.
pub fn set(random: &mut Rng, vni: Vni, id: PolicyId) -> PolicySet {
    let is_egress = random.bool();
    let (most_rules, most_ports) = one(random, &[(5, 3), (5, 3), (20, 3), (3, 200)]);
    let mut rules = some(random, most_rules, |random| rule(random, is_egress, most_ports));
    rules.sort_by_key(|rule| rule.tier);
    PolicySet {
        vni,
        id,
        is_egress,
        is_isolated: random.bool(),
        rules,
    }
}

fn rule(random: &mut Rng, is_egress: bool, most_ports: usize) -> PolicyRule {
    use PolicyAction::{Accept, Deny, Pass};
    use PolicyTier::{Admin, Baseline, NetworkPolicy};
    let ports = |random: &mut Rng| match random.u32(..3) {
        0 if is_egress => PolicyPorts::Named(
            one(random, &NAMES).into(),
            one(random, &[None, Some(6), Some(17), Some(132)]),
        ),
        _ => {
            let (a, b) = (port(random), port(random));
            let last = if random.bool() { a.max(b) } else { a.min(b) };
            let last = if most_ports > PORTS.len() { a.min(b) } else { last };
            PolicyPorts::Range(one(random, &PROTOCOLS), a.min(b), last)
        }
    };
    PolicyRule {
        tier: one(random, &[Admin, NetworkPolicy, Baseline]),
        action: one(random, &[Accept, Accept, Deny, Pass]),
        policy: Arc::from("red/web"),
        index: random.u32(..),
        anyone: is(random, 5),
        groups: some(random, 2, group).into_iter().collect(),
        blocks: if is(random, 2) {
            some(random, 3, block)
        } else {
            vec![]
        },
        ports: if is(random, 3) {
            vec![]
        } else {
            some(random, most_ports, ports)
        },
    }
}

fn block(random: &mut Rng) -> Block {
    let range = network(random);
    let mut except = some(random, 3, network);
    except.extend(is(random, 9).then_some(range));
    except.retain(|inner| range.contains(inner));
    Block { range, except }
}

fn network(random: &mut Rng) -> IpNet {
    let network = match address(random) {
        IpAddr::V4(address) => {
            let length = one(random, &[0, 8, 15, 16, 17, 22, 23, 24, 25, 31, 32]);
            IpNet::from(Ipv4Net::new(address, length).unwrap())
        }
        // Some hold the addresses into which IPv4 is mapped.
        IpAddr::V6(_) if is(random, 5) => {
            IpNet::from(Ipv6Net::new(Ipv6Addr::UNSPECIFIED, random.u8(..96)).unwrap())
        }
        IpAddr::V6(address) => {
            let length = one(random, &[0, 8, 16, 31, 32, 33, 63, 64, 126, 127, 128]);
            IpNet::from(Ipv6Net::new(address, length).unwrap())
        }
    };
    network.trunc()
}

/// The ranges of the VPC, in which half of the addresses are.
pub fn ranges() -> Vec<IpNet> {
    ["10.0.0.0/16", "fd00:1::/32"]
        .map(|range| range.parse().unwrap())
        .to_vec()
}

pub fn address(random: &mut Rng) -> IpAddr {
    let (a, b, c) = (
        random.u8(..2),
        random.u8(..4),
        one(random, &[0, 1, 127, 128, 255]),
    );
    if random.bool() {
        return Ipv4Addr::new(10, a, b, c).into();
    }
    Ipv6Addr::new(0xfd00, 1 + u16::from(a), 0, 0, 0, 0, b.into(), c.into()).into()
}

/// Returns a protocol and a port.
pub fn port_of_packet(random: &mut Rng) -> (u8, u16) {
    let protocol = one(random, &[6, 6, 17, 132, 1, 58]);
    let port = port(random);
    if PROTOCOLS.contains(&protocol) {
        (protocol, port)
    } else {
        (protocol, 0)
    }
}

fn port(random: &mut Rng) -> u16 {
    if random.bool() {
        one(random, &PORTS)
    } else {
        random.u16(..MANY)
    }
}

//! The ways out of a VPC: to the outside, to the addresses that the node serves, and the ways that stay closed. VPC 103
//! may go out, 101 has access to hosts. One network of each is private.

use std::net::Ipv4Addr;

use anyhow::Result;
use thuban_common::counters::Counter;

use crate::{
    answers::{HOST, HOST6},
    fixture::{self, Expect, Fixture},
    frames::{Packet, Packet6, Tunnel, tcp, udp},
    rows::{
        BY_NODE, BY_NODE6, DIVIDED, Endpoint, GUEST, HERE, PRIVATE, PRIVATE_GUEST, SECOND, SPREAD, TENANT,
        UNREACHED, ip, ip6,
    },
    world::{Role, World},
};

const OUTSIDE: Ipv4Addr = ip(198, 51, 100, 9);

fn fixture(description: &'static str, of: Endpoint, packet: &Packet, expect: Expect) -> Fixture {
    Fixture::new(description, Role::Agent(of.index), packet.bytes(), expect)
}

fn packet(of: Endpoint, to: Ipv4Addr) -> Packet {
    Packet::udp(of.mac(), of.address, to)
}

#[test]
fn packets_leave_where_their_vpc_may() -> Result<()> {
    let passed = || Expect::Pass(Some(Counter::ToHost));
    let forbidden = || Expect::Drop(Counter::OutsideVpc);
    let mut forged = packet(SPREAD, OUTSIDE);
    forged.from = SPREAD.address.to_bits().wrapping_add(1).into();
    let geneve = |to| packet(SPREAD, to).carrying(17, &udp(50000, 6081, &[0; 20]));
    fixture::run(
        &mut World::new()?,
        &[
            fixture("outside", SPREAD, &packet(SPREAD, OUTSIDE), passed()),
            fixture(
                "outside, not one's own source",
                SPREAD,
                &forged,
                Expect::Drop(Counter::SpoofedSource),
            ),
            fixture(
                "outside, from a VPC that may not",
                TENANT,
                &packet(TENANT, OUTSIDE),
                forbidden(),
            ),
            fixture("closed", SPREAD, &packet(SPREAD, ip(203, 0, 113, 9)), forbidden()),
            fixture(
                "beside what is closed",
                SPREAD,
                &packet(SPREAD, ip(203, 0, 114, 9)),
                passed(),
            ),
            fixture("another droplet", SPREAD, &packet(SPREAD, SECOND), forbidden()),
            fixture("this droplet", SPREAD, &packet(SPREAD, HERE), forbidden()),
            fixture(
                "a droplet, with access to hosts",
                GUEST,
                &packet(GUEST, UNREACHED),
                passed(),
            ),
            fixture(
                "Geneve in the node's name",
                SPREAD,
                &geneve(OUTSIDE),
                Expect::Drop(Counter::GeneveForbidden),
            ),
            fixture("what nodes serve", SPREAD, &packet(SPREAD, BY_NODE), passed()),
            fixture(
                "the same of a VPC that may not go out",
                DIVIDED,
                &packet(DIVIDED, BY_NODE),
                passed(),
            ),
            fixture(
                "the same of a VPC that doesn't share it",
                TENANT,
                &packet(TENANT, BY_NODE),
                forbidden(),
            ),
            fixture(
                "Geneve to what nodes serve",
                SPREAD,
                &geneve(BY_NODE),
                Expect::Drop(Counter::GeneveForbidden),
            ),
        ],
    )
}

#[test]
fn pods_of_a_private_network_do_not_leave_their_vpc() -> Result<()> {
    let passed = || Expect::Pass(Some(Counter::ToHost));
    let forbidden = || Expect::Drop(Counter::OutsideVpc);
    let by_ipv6 = |description, of: Endpoint, packet: &Packet6, expect| {
        Fixture::new(description, Role::Agent(of.index), packet.bytes(), expect)
    };
    let to = |of: Endpoint, to| Packet6::udp(of.mac(), of.v6, to);
    let outside6 = ip6(0x198, 0, 9);
    fixture::run(
        &mut World::new()?,
        &[
            fixture("outside", PRIVATE, &packet(PRIVATE, OUTSIDE), forbidden()),
            by_ipv6("outside by IPv6", PRIVATE, &to(PRIVATE, outside6), forbidden()),
            by_ipv6(
                "outside by IPv6, another network",
                SPREAD,
                &to(SPREAD, outside6),
                passed(),
            ),
            fixture("a droplet", PRIVATE, &packet(PRIVATE, SECOND), forbidden()),
            fixture("what nodes serve", PRIVATE, &packet(PRIVATE, BY_NODE), passed()),
            by_ipv6(
                "what nodes serve by IPv6",
                PRIVATE,
                &to(PRIVATE, BY_NODE6),
                passed(),
            ),
            fixture(
                "another network of the VPC",
                PRIVATE,
                &packet(PRIVATE, SPREAD.address),
                Expect::Local { mac: SPREAD.mac() },
            ),
            fixture(
                "an answer to the node",
                PRIVATE,
                &packet(PRIVATE, HOST).carrying(6, &tcp(0x12)),
                passed(),
            ),
            fixture(
                "host access: outside",
                PRIVATE_GUEST,
                &packet(PRIVATE_GUEST, OUTSIDE),
                forbidden(),
            ),
            by_ipv6(
                "host access: outside by IPv6",
                PRIVATE_GUEST,
                &to(PRIVATE_GUEST, outside6),
                forbidden(),
            ),
            fixture(
                "host access: a droplet",
                PRIVATE_GUEST,
                &packet(PRIVATE_GUEST, UNREACHED),
                forbidden(),
            ),
            fixture(
                "host access: what nodes serve",
                PRIVATE_GUEST,
                &packet(PRIVATE_GUEST, BY_NODE),
                passed(),
            ),
            fixture(
                "host access: an answer to the node",
                PRIVATE_GUEST,
                &packet(PRIVATE_GUEST, HOST).carrying(6, &tcp(0x12)),
                passed(),
            ),
            by_ipv6(
                "host access: an answer to the node by IPv6",
                PRIVATE_GUEST,
                &to(PRIVATE_GUEST, HOST6).carrying(6, &tcp(0x12)),
                passed(),
            ),
        ],
    )
}

#[test]
fn nobody_in_the_vpc_has_an_address_outside() -> Result<()> {
    let mut fixtures = Vec::new();
    for source in [BY_NODE, ip(203, 0, 113, 9), OUTSIDE] {
        let inner = Packet::udp([2; 6], source, SPREAD.address).bytes();
        let frame = Tunnel::new(SECOND, HERE, SPREAD.vni).around([2; 12], &inner);
        let expect = Expect::Drop(Counter::SourceMismatch);
        fixtures.push(Fixture::new(
            "from outside by a droplet",
            Role::Transit,
            frame,
            expect,
        ));
    }
    fixture::run(&mut World::new()?, &fixtures)
}

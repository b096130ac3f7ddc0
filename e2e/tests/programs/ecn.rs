//! Congestion marks through the tunnel (RFC 6040): copied outward, combined inward.

use anyhow::Result;
use thuban_common::counters::Counter;

use crate::{
    fixture::{self, Expect, Fixture},
    frames::{Packet, Packet6, Tunnel},
    rows::{HERE, LOCAL_MAC, SECOND, TENANT, ip, ip6},
    world::{Role, World},
};

const ETHERNET: [u8; 12] = [2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2];
/// The ECN values: Not-ECT, ECT(1), ECT(0), CE.
const NOT: u8 = 0;
const ECT1: u8 = 1;
const ECT0: u8 = 2;
const CE: u8 = 3;
/// RFC 6040 figure 4: the inner value, then the result where the outer is Not-ECT, ECT(0), ECT(1), CE.
const DECAPSULATION: [(u8, [Option<u8>; 4]); 4] = [
    (NOT, [Some(NOT), Some(NOT), Some(NOT), None]),
    (ECT0, [Some(ECT0), Some(ECT0), Some(ECT1), Some(CE)]),
    (ECT1, [Some(ECT1), Some(ECT1), Some(ECT1), Some(CE)]),
    (CE, [Some(CE), Some(CE), Some(CE), Some(CE)]),
];
const OUTER: [u8; 4] = [NOT, ECT0, ECT1, CE];
/// DSCP of the inner packet; the outer packet has another one, which does not come inside.
const DSCP: u8 = 0x28;

/// Returns a packet to a pod of this droplet, in a frame.
fn inner(is_v6: bool, class: u8) -> Vec<u8> {
    if is_v6 {
        let mut packet = Packet6::udp([2; 6], ip6(0, 1, 0x40), ip6(0, 1, 0x12));
        packet.traffic_class = class;
        packet.bytes()
    } else {
        let mut packet = Packet::udp([2; 6], ip(10, 0, 1, 40), ip(10, 0, 1, 12));
        packet.traffic_class = class;
        packet.bytes()
    }
}

#[test]
fn marks_combine_at_decapsulation() -> Result<()> {
    let mut fixtures = Vec::new();
    for is_v6 in [false, true] {
        for (inside, results) in DECAPSULATION {
            for (outside, result) in OUTER.into_iter().zip(results) {
                for options in [&[][..], &[1, 2, 3, 0]] {
                    let mut tunnel = Tunnel::new(SECOND, HERE, 100).with_options(options);
                    tunnel.traffic_class = 0xb8 | outside;
                    let frame = tunnel.around(ETHERNET, &inner(is_v6, DSCP | inside));
                    // The whole inner header is compared, with its checksum.
                    let expect = result.map_or(Expect::Drop(Counter::CongestionUnknown), |class| {
                        Expect::DeliveredAs {
                            inner: inner(is_v6, DSCP | class),
                            mac: LOCAL_MAC,
                            vni: 100,
                        }
                    });
                    let description: &'static str =
                        format!("IPv6 {is_v6}, inner {inside}, outer {outside}, options {options:?}").leak();
                    fixtures.push(Fixture::new(description, Role::Transit, frame, expect));
                }
            }
        }
    }
    fixture::run(&mut World::new()?, &fixtures)
}

#[test]
fn marks_and_dscp_go_outward() -> Result<()> {
    let mut fixtures = Vec::new();
    for class in OUTER.map(|mark| 0xb8 | mark) {
        let mut v4 = Packet::udp(TENANT.mac(), TENANT.address, ip(10, 0, 1, 50));
        v4.traffic_class = class;
        let mut v6 = Packet6::udp(TENANT.mac(), TENANT.v6, ip6(0, 1, 0x50));
        v6.traffic_class = class;
        for frame in [v4.bytes(), v6.bytes()] {
            let expect = Expect::Encapsulated {
                to: SECOND,
                vni: 100,
                traffic_class: class,
                counter: Counter::SentDirect,
            };
            fixtures.push(Fixture::new("marked", Role::Agent(TENANT.index), frame, expect));
        }
    }
    fixture::run(&mut World::new()?, &fixtures)
}

//! The senders that transit believes: each may send only the packets of certain endpoints.

use anyhow::Result;
use thuban_common::counters::Counter;

use crate::{
    fixture::{self, Expect, Fixture},
    frames::{Packet, Tunnel},
    rows::{HERE, LOCAL_MAC, SECOND, THIRD, UNREACHED, ip},
    world::{Role, World},
};

const ETHERNET: [u8; 12] = [2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2];

fn fixture(description: &'static str, frame: Vec<u8>, expect: Expect) -> Fixture {
    Fixture::new(description, Role::Transit, frame, expect)
}

#[test]
fn sources_must_live_where_their_rows_say() -> Result<()> {
    let from = |sender, source, to| {
        Tunnel::new(sender, HERE, 100).around(ETHERNET, &Packet::udp([2; 6], source, to).bytes())
    };
    let local = ip(10, 0, 1, 12);
    let delivered = || Expect::Delivered {
        mac: LOCAL_MAC,
        length: 50,
        vni: 100,
    };
    let mismatch = || Expect::Drop(Counter::SourceMismatch);
    // Rows say that 10.0.1.50 and 10.0.3.30 live on the second droplet. The second is the VPC's divider, the third the
    // bouncer of network 1.
    fixture::run(
        &mut World::new()?,
        &[
            fixture(
                "direct row, its droplet",
                from(SECOND, ip(10, 0, 1, 50), local),
                delivered(),
            ),
            fixture(
                "bouncer's row, its droplet",
                from(SECOND, ip(10, 0, 3, 30), local),
                delivered(),
            ),
            fixture(
                "direct row, a stranger",
                from(UNREACHED, ip(10, 0, 1, 50), local),
                mismatch(),
            ),
            fixture(
                "bouncer's row, a stranger",
                from(UNREACHED, ip(10, 0, 3, 30), local),
                mismatch(),
            ),
            fixture(
                "an endpoint of this droplet",
                from(UNREACHED, ip(10, 0, 1, 11), local),
                mismatch(),
            ),
            fixture(
                "by the destination's bouncer",
                from(THIRD, ip(10, 0, 1, 50), local),
                delivered(),
            ),
            fixture(
                "by the divider",
                from(SECOND, ip(10, 0, 3, 33), local),
                delivered(),
            ),
            fixture(
                "this droplet's, by the divider",
                from(SECOND, ip(10, 0, 1, 11), local),
                delivered(),
            ),
            fixture(
                "this droplet's, by the destination's former droplet",
                from(UNREACHED, ip(10, 0, 1, 11), ip(10, 0, 1, 13)),
                delivered(),
            ),
            fixture(
                "direct row, by the destination's former droplet",
                from(UNREACHED, ip(10, 0, 1, 50), ip(10, 0, 1, 13)),
                delivered(),
            ),
            fixture(
                "another destination's former droplet",
                from(UNREACHED, ip(10, 0, 1, 11), ip(10, 0, 1, 15)),
                mismatch(),
            ),
            fixture(
                "the same destination's in another VPC",
                from(UNREACHED, ip(10, 0, 1, 11), ip(10, 0, 1, 12)),
                mismatch(),
            ),
            fixture("outside the VPC", from(SECOND, ip(8, 8, 8, 8), local), mismatch()),
            fixture(
                "another VPC's range, by the destination's bouncer",
                from(THIRD, ip(10, 7, 0, 40), local),
                mismatch(),
            ),
            fixture(
                "nobody's row",
                from(UNREACHED, ip(10, 0, 1, 44), local),
                delivered(),
            ),
        ],
    )
}

#[test]
fn a_divider_believes_bouncers_of_the_sources_network() -> Result<()> {
    let from = |sender, vni, source, to| {
        Tunnel::new(sender, HERE, vni).around(ETHERNET, &Packet::udp([2; 6], source, to).bytes())
    };
    let mismatch = || Expect::Drop(Counter::SourceMismatch);
    // This droplet is the divider of VPC 102. The third one is the bouncer of network 7, of which 10.7.0.11 is. This
    // one is the bouncer of network 9, and of network 3 in VPC 100.
    fixture::run(
        &mut World::new()?,
        &[
            fixture(
                "to a divider, by the source's bouncer",
                from(THIRD, 102, ip(10, 7, 0, 11), ip(10, 7, 2, 30)),
                Expect::Hop {
                    to: SECOND,
                    counter: Counter::Bounced,
                },
            ),
            fixture(
                "to a divider, by another droplet",
                from(UNREACHED, 102, ip(10, 7, 0, 11), ip(10, 7, 2, 30)),
                mismatch(),
            ),
            fixture(
                "to a divider, by the bouncer of neither network",
                from(THIRD, 102, ip(10, 7, 2, 30), ip(10, 7, 2, 31)),
                mismatch(),
            ),
            fixture(
                "to no divider, by the source's bouncer",
                from(THIRD, 100, ip(10, 0, 1, 11), ip(10, 0, 3, 11)),
                mismatch(),
            ),
        ],
    )
}

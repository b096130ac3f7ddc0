//! The entries against the rows.

mod bounds;
mod denier;
mod directed;
mod former;
mod judged;
mod maps;
mod oracle;
mod random;
mod restarts;
mod steps;
mod waiting;

use thuban_api::identifiers::Vni;
use thuban_common::policy::{PEER_OUTSIDE, of_vpc, point};
use thuban_rows::{PolicyId, PolicySet, builders};

use super::blocks::Prefix;
use maps::Maps;
use oracle::{Packet, Peer};

const VNI: Vni = builders::VNI;

fn id(number: u32) -> PolicyId {
    builders::policy_id(number)
}

/// Returns what the maps say of a packet. `class` is the stamp's.
fn by_maps(maps: &Maps, set: &PolicySet, packet: Packet<'_>, class: u32) -> (bool, u16) {
    let own = of_vpc(set.vni.get(), set.id.get());
    let peer = match packet.peer {
        Peer::Outside => PEER_OUTSIDE,
        Peer::Class(_) | Peer::Unknown => of_vpc(set.vni.get(), class),
    };
    let address = Prefix::from(ipnet::IpNet::from(packet.address)).address;
    maps.judge(own, peer, address, point(packet.protocol, packet.port))
}

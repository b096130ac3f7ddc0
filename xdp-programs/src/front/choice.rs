//! The backend of a client's packet, by the front's tables: the one that new connections use, and the one before its
//! last change.

use thuban_common::{
    counters::Counter,
    packet::ip::IpPacket,
    policy::{AT_LAST, BY_FORMER, BY_TABLE},
    services::{BackendKey, FRONTS, SERVICE_TUNNEL, ServiceKey, has_connections},
    tables::{ConfigEntry, DropletAddress},
};

use super::connection::goes_on;
use crate::{maps, service, trace::Observed, work::Work};

/// [`ServiceKey::former`] of the table that new connections use, and of the one before it.
pub const NOW: u32 = 0;
const BEFORE: u32 = 1;

/// Chooses the backend of a packet to a front: [`Work::backend`], [`Work::home`], [`Work::is_tunnel`] and the packet's
/// new destination. Returns 0 if there is none, and leaves the destination then. A global function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn front_choose(packet: *const IpPacket, work: *mut Work, table: u32) -> u32 {
    // SAFETY: the caller's promise.
    if let (Some(packet), Some(work)) = unsafe { (packet.as_ref(), work.as_mut()) } {
        return choose(packet, work, table as u8).is_some().into();
    }
    0
}

#[inline(always)]
fn choose(packet: &IpPacket, work: &mut Work, table: u8) -> Option<()> {
    work.service = ServiceKey {
        vni: FRONTS,
        address: packet.destination,
        port: packet.ports[1],
        protocol: packet.protocol,
        former: table,
    };
    let service = maps::service(&work.service).filter(|service| service.slots != 0)?;
    work.is_tunnel = service.flags & SERVICE_TUNNEL != 0;
    let slot = service::first_slot(packet, service, true);
    work.backend = BackendKey {
        service: service.service,
        index: maps::slot(service.table, slot)?,
    };
    if !maps::read_home(&work.backend, &mut work.home) || !work.home.is_for(packet) {
        return None;
    }
    work.begin(packet);
    work.to.destination = work.home.backend.address;
    work.to.ports[1] = work.home.backend.port;
    Some(())
}

/// Chooses the backend of a packet of no connection that this droplet knows.
#[inline(never)]
pub(super) fn begin(config: &ConfigEntry, observed: &mut Observed, work: &mut Work) -> Result<(), Counter> {
    let (vni, by, packet) = (observed.vni, observed.stamp.why(), &observed.packet);
    let why = next(packet, work, vni, by, config.droplet)?;
    observed.next = work.home.droplet;
    if observed.next == config.droplet {
        work.is_known = may_begin(packet, work) && goes_on(work, vni);
        return Ok(());
    }
    if by >= AT_LAST {
        return Err(Counter::WouldReturn);
    }
    observed.stamp = observed.stamp.with_why(why);
    Ok(())
}

/// Chooses the backend of such a packet: [`Work::home`] says where it is. `by`: why this droplet, `here`, has the
/// packet. Returns why the other one gets it.
#[inline(always)]
pub fn next(
    packet: &IpPacket,
    work: &mut Work,
    vni: u32,
    by: u32,
    here: DropletAddress,
) -> Result<u32, Counter> {
    // What goes on may have begun before the table's last change. Then the droplet of the former backend knows it.
    if !may_begin(packet, work) && by == BY_TABLE {
        chosen(packet, work, vni, NOW);
        work.other.destination = work.to.destination;
        work.other.ports[1] = work.to.ports[1];
        if chosen(packet, work, vni, BEFORE) && is_former(work, here) {
            return Ok(BY_FORMER);
        }
    }
    if chosen(packet, work, vni, NOW) {
        Ok(AT_LAST)
    } else {
        Err(Counter::FrontUnknown)
    }
}

/// Whether the droplet of the chosen backend, of the table before the last change, is to be asked: not if the backend
/// only moved, nor if this droplet would have to ask itself.
#[inline(always)]
fn is_former(work: &Work, here: DropletAddress) -> bool {
    let is_same = work.other.destination == work.to.destination && work.other.ports[1] == work.to.ports[1];
    !is_same && work.home.droplet != here
}

/// Whether the packet's front has a backend in the VPC by a table. [`Work`] has it then.
#[inline(always)]
fn chosen(packet: &IpPacket, work: &mut Work, vni: u32, table: u32) -> bool {
    chooses(packet, work, table) && work.home.vni == vni
}

/// Whether the packet's front has a backend by a table. [`Work`] has it then.
#[inline(always)]
pub fn chooses(packet: &IpPacket, work: &mut Work, table: u32) -> bool {
    // SAFETY: the caller's only reference to either, and the call ends before one is used again.
    unsafe { front_choose(packet, work, table) != 0 }
}

/// Whether a packet may begin a connection. Such a packet goes where the table says.
#[inline(always)]
pub(super) fn may_begin(packet: &IpPacket, work: &Work) -> bool {
    work.signal.opens || !has_connections(packet.protocol)
}

//! GATES: whether packets of an interface are looked up in CONNECTIONS and PENDING, or in FLOWS, at all. Most pods are
//! never a client of a service, nor a backend for clients outside, nor asked by one whom policy guards; their packets
//! are spared the look-ups.
//!
//! Interfaces whose numbers differ by a multiple of [`thuban_common::services::GATES_OF_INTERFACES`] share a gate. That
//! costs one of them the look-ups, and nothing else.

use thuban_common::services::{GATE_OF_ANY, GatesEntry, gate_of};

use crate::maps::GATES;

/// Gates count time in units of 2^30 ns, about a second.
const UNIT: u32 = 30;

#[inline(always)]
fn gate(interface: u32) -> Option<&'static mut GatesEntry> {
    gate_at(gate_of(interface))
}

#[inline(always)]
fn gate_at(index: u32) -> Option<&'static mut GatesEntry> {
    // SAFETY: words of an array's element, which stays.
    GATES.get_ptr_mut(index).map(|gate| unsafe { &mut *gate })
}

/// Whether the interface's endpoint ever had a connection to a service, or something pending.
#[inline(always)]
pub fn is_open(interface: u32) -> bool {
    gate(interface).is_some_and(|gate| gate.services != 0)
}

/// Whether the interface's endpoint ever had a connection of a client outside, by a front.
#[inline(always)]
pub fn is_open_for_fronts(interface: u32) -> bool {
    gate(interface).is_some_and(|gate| gate.fronts != 0)
}

/// From now on the endpoint's packets are looked up as answers to clients outside.
#[inline(always)]
pub fn open_for_fronts(interface: u32) {
    if let Some(gate) = gate(interface).filter(|gate| gate.fronts == 0) {
        gate.fronts = 1;
        if let Some(any) = gate_at(GATE_OF_ANY) {
            any.fronts = 1;
        }
    }
}

/// Opens the interface's gate: from now on its packets are looked up in CONNECTIONS and, until `pending_until`, in
/// PENDING.
#[inline(always)]
pub fn open(interface: u32, pending_until: u64) {
    let Some(gate) = gate(interface) else {
        return;
    };
    if gate.services == 0 {
        gate.services = 1;
        if let Some(any) = gate_at(GATE_OF_ANY) {
            any.services = 1;
        }
    }
    let until = (pending_until >> UNIT) as u32;
    if gate.pending_until < until {
        gate.pending_until = until;
    }
}

/// Whether FLOWS ever had a flow to the interface's endpoint.
#[inline(always)]
pub fn has_flows(interface: u32) -> bool {
    gate(interface).is_some_and(|gate| gate.flows != 0)
}

/// From now on the endpoint's packets are looked up in FLOWS.
#[inline(always)]
pub fn open_for_flows(interface: u32) {
    if let Some(gate) = gate(interface).filter(|gate| gate.flows == 0) {
        gate.flows = 1;
    }
}

#[inline(always)]
pub fn is_pending_open(interface: u32, now: u64) -> bool {
    gate(interface).is_some_and(|gate| (now >> UNIT) as u32 <= gate.pending_until)
}

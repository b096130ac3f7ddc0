//! Reads what droplets say of the backends that they check.
//!
//! Invariant: the words are this operator's. However often droplets speak, a service's rows change at most once in
//! [`super::LOOK_FOR_SUSPECTS`].

use thuban_api::identifiers::Vni;
use thuban_proto::MAX_CHECKS;
use thuban_proto::transit::{CheckFailure, CheckState, Checked, Checks};

use super::Hub;
use crate::model::rows::address;
use crate::model::world::{VipMembers, VipName};

/// The most Vips that are written at once.
const MAX_WRITTEN: usize = 50;

impl Hub {
    /// Notes what a droplet says of its backends.
    pub fn note_checks(&self, droplet: &str, report: &Checks) {
        let state = &mut *self.lock();
        for checked in report.checked.iter().take(MAX_CHECKS) {
            let front = Vni::new(checked.vni).zip(address(&checked.front));
            if let (Some(front), Some(backend)) = (front, address(&checked.backend)) {
                state.world.note_check(droplet, front, backend, failure(checked));
            }
        }
    }

    /// Takes load balancers whose Vips may say something else of their members. While programs are held back there are
    /// none: droplets are still to say what fails.
    pub fn take_members(&self) -> Vec<(VipName, VipMembers)> {
        let state = &mut *self.lock();
        if state.held.is_some() {
            return Vec::new();
        }
        state.world.take_unwritten_members(MAX_WRITTEN)
    }

    pub fn give_members_back(&self, name: VipName) {
        self.lock().world.give_members_back(name);
    }
}

/// Returns why a backend fails, if it does.
fn failure(checked: &Checked) -> Option<String> {
    if checked.state() != CheckState::Failing {
        return None;
    }
    Some(match checked.failure() {
        CheckFailure::Refused => "the pod refuses the connection".to_owned(),
        CheckFailure::Timeout => "the pod does not answer in time".to_owned(),
        CheckFailure::Unreachable => "the node can't reach the pod, or the connection breaks".to_owned(),
        CheckFailure::NoHttp => "the answer is not HTTP".to_owned(),
        CheckFailure::Status => format!("the answer has the status {}", checked.status),
        CheckFailure::Unspecified => "the check fails".to_owned(),
    })
}

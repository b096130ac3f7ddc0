//! Reads what droplets say of the backends that they check.
//!
//! Invariant: the words are this operator's. However much droplets say, each is heard of so many backends a second, and
//! rows change as often as budgets of services and VPCs allow (`model::world`).

use thuban_api::identifiers::Vni;
use thuban_proto::MAX_CHECKS;
use thuban_proto::transit::{CheckFailure, CheckState, Checked};

use super::Hub;
use crate::model::rows::address;
use crate::model::world::{VipMembers, VipName};
use crate::rate_limit::RateLimit;

/// The most Vips that are written at once.
const MAX_WRITTEN: usize = 50;

/// How many backends' states a droplet may tell a second for long. A transitd tells each state twice in 10 s at most,
/// and all of them each 30 s.
const CHECKED_A_SECOND: u32 = MAX_CHECKS as u32 / 4;
/// How many it may tell at once.
const CHECKED_AT_ONCE: u32 = 4 * MAX_CHECKS as u32;

/// How much of what a droplet says of backends counts.
pub(super) struct CheckLimit {
    rate: RateLimit,
    /// Where the next words begin to count if they are too many. So all count at some time, and not only the first
    /// VPCs.
    next: usize,
}

impl CheckLimit {
    fn new() -> Self {
        Self {
            rate: RateLimit::new(CHECKED_A_SECOND, CHECKED_AT_ONCE),
            next: 0,
        }
    }

    /// Returns the words that count.
    fn take<'a>(&mut self, checked: &'a [Checked]) -> impl Iterator<Item = &'a Checked> + use<'a> {
        let all = &checked[..checked.len().min(MAX_CHECKS)];
        let count = self.rate.take_up_to(all.len() as u32) as usize;
        let mut start = 0;
        if count < all.len() {
            start = self.next % all.len();
            self.next = start + count;
        }
        all[start..].iter().chain(&all[..start]).take(count)
    }
}

impl Hub {
    /// Notes what a droplet says of its backends. What is too much is lost until the droplet tells all again:
    /// then other words count.
    pub fn note_checks(&self, droplet: &str, checked: &[Checked]) {
        let state = &mut *self.lock();
        if !state.world.is_droplet(droplet) {
            return;
        }
        let limit = state.check_limits.entry(droplet.to_owned());
        for checked in limit.or_insert_with(CheckLimit::new).take(checked) {
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

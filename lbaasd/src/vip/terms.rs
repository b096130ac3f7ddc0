//! What a Vip's pool decides: how the addresses are announced, and what serves them. A pool can't change either, and a
//! Vip keeps both for as long as it has the addresses.

use kube::runtime::reflector::{ObjectRef, Store};
use thuban_api::{AnnounceBy, IpPool, PoolClass, PoolDriver, Vip, VipStatus};

use super::{Context, Outcome, has_addresses};

/// Whether only pods of one VPC reach a Vip. The class of a pool can't be changed.
pub fn is_private(vip: &Vip, context: &Context) -> bool {
    let pool = context.pools.get(&ObjectRef::new(&vip.spec.pool));
    vip.status.as_ref().is_some_and(VipStatus::is_private)
        || pool.is_some_and(|pool| pool.spec.class == PoolClass::Private)
}

/// Returns what serves a Vip's addresses, or is going to. Only a pool that the Vip names has another driver than `Xdp`.
pub fn driver_of(vip: &Vip, context: &Context) -> PoolDriver {
    match &vip.status {
        Some(status) if has_addresses(vip) => status.driver,
        _ => {
            let pool = context.pools.get(&ObjectRef::new(&vip.spec.pool));
            pool.map(|pool| pool.spec.driver).unwrap_or_default()
        }
    }
}

/// What the pool of leases says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub announce: AnnounceBy,
    pub driver: PoolDriver,
}

impl Terms {
    /// Returns the terms of the leases' pool; `None` if it is not known.
    pub fn of(outcome: &Outcome, pools: &Store<IpPool>) -> Option<Self> {
        let (Outcome::Granted(grants) | Outcome::Refused(_, _, grants)) = outcome else {
            return None;
        };
        let pool = pools.get(&ObjectRef::new(&grants.first()?.lease.pool))?;
        Some(Self {
            announce: pool.spec.announce,
            driver: pool.spec.driver,
        })
    }

    /// Writes them into a Vip's status. They stay as long as a node may announce the addresses. Returns whether they
    /// changed.
    pub fn set(self, vip: &mut Vip) -> bool {
        let status = vip.status.get_or_insert_with(VipStatus::default);
        let has = Self {
            announce: status.announce,
            driver: status.driver,
        };
        let is_new = status.announcers.is_empty() && has != self;
        if is_new {
            (status.announce, status.driver) = (self.announce, self.driver);
        }
        is_new
    }
}

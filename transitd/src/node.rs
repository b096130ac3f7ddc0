//! The running droplet: the parts that do not change after start, the locked parts, and the signals between tasks.
//!
//! The state's lock is held only for looks and changes in memory and in tables. Work that waits for the kernel's locks
//! of interfaces, or for processes, has locks of its own. Locks are taken in this order: links; netfilter; services;
//! state.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rtnetlink::Handle;
use tokio::sync::{Notify, OwnedMutexGuard, watch};

use crate::askers::Askers;
use crate::attachments::AttachmentId;
use crate::attachments::store::Store;
use crate::contact::Contact;
use crate::dataplane::denials::Followed;
use crate::dataplane::hooks::TransitHook;
use crate::dataplane::links::Links;
use crate::dataplane::services::Services;
use crate::dataplane::traced::Traced;
use crate::endpoints::Endpoints;
use crate::follow::followers::Followers;
use crate::netfilter::Netfilter;
use crate::netlink::uplink::Uplink;
use crate::path_probes::PathProbes;
use crate::settings::RunSettings;
use crate::shaped::Shaped;
use crate::state::State;

/// Bytes that encapsulation takes from the underlay's MTU.
pub const ENCAPSULATION: u32 = thuban_common::tables::ENCAPSULATION_LENGTH as u32;

#[derive(Debug)]
pub struct Node {
    pub settings: RunSettings,
    pub uplink: Uplink,
    /// Where transit runs; chosen at start.
    pub transit_hook: TransitHook,
    pub store: Store,
    pub netlink: Handle,
    pub boot_id: String,
    pub endpoints: Endpoints,
    pub askers: Arc<Askers>,
    pub contact: Contact,
    pub shaped: Shaped,
    /// Who follows the packets of endpoints.
    pub traces: Followers<Traced>,
    /// Who follows denied packets.
    pub denials: Followers<Followed>,
    /// The bounds of probes that the operator asks for.
    pub path_probes: PathProbes,
    /// Notified when attachments come and go.
    pub attached: Notify,
    /// Notified when the operator asks what is denied.
    pub asked: Notify,
    /// Notified when a stream to the operator has brought its snapshot.
    pub opened: Notify,
    state: Mutex<State>,
    services: Mutex<Services>,
    links: Mutex<Links>,
    netfilter: Mutex<Netfilter>,
    changed: watch::Sender<u64>,
    locks: Mutex<HashMap<AttachmentId, Arc<tokio::sync::Mutex<()>>>>,
}

/// The facts that were found at start.
#[derive(Debug)]
pub struct Fixed {
    pub uplink: Uplink,
    pub transit_hook: TransitHook,
    pub store: Store,
    pub netlink: Handle,
    pub boot_id: String,
    pub endpoints: Endpoints,
    pub askers: Arc<Askers>,
    pub contact: Contact,
    pub services: Services,
    pub links: Links,
    pub netfilter: Netfilter,
}

impl Node {
    pub fn new(settings: RunSettings, fixed: Fixed, state: State) -> Self {
        let Fixed {
            uplink,
            transit_hook,
            store,
            netlink,
            boot_id,
            endpoints,
            askers,
            contact,
            services,
            links,
            netfilter,
        } = fixed;
        askers.publish(state.askers());
        askers.keep();
        let (changed, _) = watch::channel(0);
        let locks = Mutex::default();
        let maps = settings.pins.maps();
        Self {
            settings,
            uplink,
            transit_hook,
            store,
            netlink,
            boot_id,
            endpoints,
            askers,
            contact,
            shaped: Shaped::default(),
            traces: Followers::new(maps.clone()),
            denials: Followers::new(maps),
            path_probes: PathProbes::default(),
            attached: Notify::new(),
            asked: Notify::new(),
            opened: Notify::new(),
            state: Mutex::new(state),
            services: Mutex::new(services),
            links: Mutex::new(links),
            netfilter: Mutex::new(netfilter),
            changed,
            locks,
        }
    }

    /// Locks the state. The lock is never held across an await.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the services. The lock may be held for long, so a thread that holds the state must not wait for it.
    pub fn services(&self) -> MutexGuard<'_, Services> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the links. The lock may be held for as long as the kernel's lock of interfaces is waited for. Must not be
    /// called within the runtime's tasks.
    pub fn links(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks netfilter. The lock may be held for as long as nft takes. Must not be called within the runtime's tasks.
    pub fn netfilter(&self) -> MutexGuard<'_, Netfilter> {
        self.netfilter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn pod_mtu(&self) -> u32 {
        self.uplink.mtu.saturating_sub(ENCAPSULATION)
    }

    /// Wakes the tasks that wait for rows.
    pub fn announce(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Locks one attachment, so that one ADD, DEL or reclaim at a time works on it; those of different attachments run
    /// in parallel.
    pub async fn lock(&self, id: &AttachmentId) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
            // A lock with a single reference is held by nobody else.
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            locks.entry(id.clone()).or_default().clone()
        };
        lock.lock_owned().await
    }
}

//! Looks at steady objects now and then, in case a watch has missed a change that concerns them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use kube::runtime::reflector::{ObjectRef, Store};
use tokio::time::MissedTickBehavior;

use crate::controller::runtime::objects::Object;
use crate::hub::Trigger;

/// How often each object is looked at.
const RESYNC_EVERY: Duration = Duration::from_mins(5);
/// The number of parts of a kind: one part is looked at after the other.
const PARTS: u32 = 64;

/// Wakes all objects of a kind, part by part: a timer for each object would cost half a kilobyte.
pub async fn resync<K: Object + 'static>(store: Store<K>, trigger: Trigger<K>) {
    let mut turns = tokio::time::interval(RESYNC_EVERY / PARTS);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for part in (0..u64::from(PARTS)).cycle() {
        turns.tick().await;
        let all = store.state().into_iter();
        let its_turn = all.filter(|object| {
            let mut hasher = DefaultHasher::new();
            let meta = object.meta();
            (meta.namespace.as_deref(), meta.name.as_deref()).hash(&mut hasher);
            hasher.finish() % u64::from(PARTS) == part
        });
        for object in its_turn {
            trigger.wake(ObjectRef::from_obj(&*object));
        }
    }
}

//! Two lanes for the objects of a kind: objects that end, and all others. Each lane has workers of its own, so that a
//! burst of creations does not hold deletions up, nor the reverse.
//!
//! Invariant: one lane at a time works on an object. An object that ends while the other lane works on it waits,
//! without a worker, until that work is over. So the writes of an object stay in order.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::runtime::reflector::{ObjectRef, Store};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::controller::runtime::objects::Object;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Objects that are made or that serve.
    Living,
    Ending,
}

/// The queue of a lane.
pub type Woken<K> = UnboundedReceiver<ObjectRef<K>>;

/// The lanes of one kind.
pub struct Lanes<K: Object + 'static> {
    objects: Store<K>,
    is_ending: Box<dyn Fn(&K) -> bool + Send + Sync>,
    living: UnboundedSender<ObjectRef<K>>,
    ending: UnboundedSender<ObjectRef<K>>,
    /// The objects that a lane works on, and whether the other lane wanted to meanwhile.
    in_work: Mutex<HashMap<ObjectRef<K>, bool>>,
}

/// The work of a lane on an object: until it is dropped the other lane leaves the object alone.
pub struct Work<K: Object + 'static> {
    lanes: Arc<Lanes<K>>,
    object: ObjectRef<K>,
}

impl<K: Object + 'static> Lanes<K> {
    /// Returns the lanes of these objects, and the queue of each lane.
    pub fn new(
        objects: Store<K>,
        is_ending: impl Fn(&K) -> bool + Send + Sync + 'static,
    ) -> (Arc<Self>, [(Lane, Woken<K>); 2]) {
        let (living, woken) = unbounded_channel();
        let (ending, woken_to_end) = unbounded_channel();
        let lanes = Self {
            objects,
            is_ending: Box::new(is_ending),
            living,
            ending,
            in_work: Mutex::default(),
        };
        let queues = [(Lane::Living, woken), (Lane::Ending, woken_to_end)];
        (Arc::new(lanes), queues)
    }

    fn in_work(&self) -> MutexGuard<'_, HashMap<ObjectRef<K>, bool>> {
        self.in_work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lane_of(&self, object: &K) -> Lane {
        if (self.is_ending)(object) {
            Lane::Ending
        } else {
            Lane::Living
        }
    }

    /// Puts an object into the queue of its lane.
    pub fn wake(&self, object: ObjectRef<K>) {
        let known = self.objects.get(&object);
        let lane = known.map_or(Lane::Living, |known| self.lane_of(&known));
        self.put(lane, object);
    }

    fn put(&self, lane: Lane, object: ObjectRef<K>) {
        let queue = match lane {
            Lane::Ending => &self.ending,
            Lane::Living => &self.living,
        };
        // The lane has ended: the operator is stopping.
        let _ = queue.send(object);
    }

    /// Begins work on an object, and returns the object as it is now. Returns nothing if the object is gone, belongs to
    /// the other lane now, or is in the other lane's work. The lane that it belongs to is woken then, after that work.
    pub fn begin(self: &Arc<Self>, lane: Lane, object: &ObjectRef<K>) -> Option<(Work<K>, Arc<K>)> {
        let mut in_work = self.in_work();
        if let Some(is_wanted) = in_work.get_mut(object) {
            *is_wanted = true;
            return None;
        }
        in_work.insert(object.clone(), false);
        drop(in_work);
        let work = Work {
            lanes: self.clone(),
            object: object.clone(),
        };
        // The store is read after the other lane's work, of which it may show the end. The lane is asked for again: the
        // object, or the pod that it depends on, may have ended in the queue.
        let known = self.objects.get(object)?;
        let its_lane = self.lane_of(&known);
        if its_lane != lane {
            drop(work);
            self.put(its_lane, object.clone());
            return None;
        }
        Some((work, known))
    }
}

impl<K: Object + 'static> Drop for Work<K> {
    fn drop(&mut self) {
        let is_wanted = self.lanes.in_work().remove(&self.object);
        if is_wanted == Some(true) {
            self.lanes.wake(self.object.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::runtime::reflector::store::Writer;
    use kube::runtime::reflector::{ObjectRef, store};
    use kube::runtime::watcher::Event;
    use serde_json::json;
    use thuban_api::Vpc;

    use super::{Lane, Lanes, Woken};

    fn vpc(name: &str, is_deleted: bool) -> Vpc {
        let mut metadata = json!({"name": name});
        if is_deleted {
            metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        let vpc = json!({"metadata": metadata, "spec": {"cidrs": ["10.0.0.0/16"]}});
        serde_json::from_value(vpc).unwrap()
    }

    fn apply(writer: &mut Writer<Vpc>, name: &str, is_deleted: bool) {
        writer.apply_watcher_event(&Event::Apply(vpc(name, is_deleted)));
    }

    fn is_ending(vpc: &Vpc) -> bool {
        vpc.metadata.deletion_timestamp.is_some()
    }

    fn names(queue: &mut Woken<Vpc>) -> Vec<String> {
        std::iter::from_fn(|| queue.try_recv().ok())
            .map(|object| object.name)
            .collect()
    }

    #[test]
    fn a_deletion_waits_behind_no_creation() {
        let (reader, mut writer) = store::<Vpc>();
        let (lanes, [(_, mut living), (_, mut ending)]) = Lanes::new(reader, is_ending);
        for number in 0..100 {
            let name = format!("v{number}");
            apply(&mut writer, &name, number == 99);
            lanes.wake(ObjectRef::new(&name));
        }
        assert_eq!(names(&mut living).len(), 99);
        assert_eq!(names(&mut ending), ["v99"]);
    }

    #[test]
    fn one_lane_at_a_time_works_on_an_object() {
        let (reader, mut writer) = store::<Vpc>();
        let (lanes, [(_, mut living), (_, mut ending)]) = Lanes::new(reader, is_ending);
        let red = ObjectRef::<Vpc>::new("red");
        apply(&mut writer, "red", false);
        let (work, _) = lanes.begin(Lane::Living, &red).unwrap();
        apply(&mut writer, "red", true);
        lanes.wake(red.clone());
        assert_eq!(names(&mut ending), ["red"]);
        assert!(lanes.begin(Lane::Ending, &red).is_none(), "it is being written");
        assert!(names(&mut ending).is_empty());
        drop(work);
        assert_eq!(names(&mut ending), ["red"], "now it is its turn");
        let (work, known) = lanes.begin(Lane::Ending, &red).unwrap();
        assert!(is_ending(&known));
        drop(work);
        assert!(names(&mut ending).is_empty() && names(&mut living).is_empty());
    }

    #[test]
    fn objects_that_end_in_the_queue_change_lanes() {
        let (reader, mut writer) = store::<Vpc>();
        let (lanes, [(_, mut living), (_, mut ending)]) = Lanes::new(reader, is_ending);
        let red = ObjectRef::<Vpc>::new("red");
        apply(&mut writer, "red", false);
        lanes.wake(red.clone());
        apply(&mut writer, "red", true);
        assert_eq!(names(&mut living), ["red"]);
        assert!(lanes.begin(Lane::Living, &red).is_none());
        assert_eq!(names(&mut ending), ["red"]);
        // Another object of the name was made while the deletion waited.
        apply(&mut writer, "red", false);
        assert!(lanes.begin(Lane::Ending, &red).is_none());
        assert_eq!(names(&mut living), ["red"]);
        assert!(lanes.begin(Lane::Living, &red).is_some());
    }

    #[test]
    fn an_object_that_is_gone_is_left_alone() {
        let (reader, mut writer) = store::<Vpc>();
        let (lanes, [(_, mut living), _]) = Lanes::new(reader, is_ending);
        let red = ObjectRef::<Vpc>::new("red");
        apply(&mut writer, "red", true);
        writer.apply_watcher_event(&Event::Delete(vpc("red", true)));
        assert!(lanes.begin(Lane::Ending, &red).is_none());
        assert!(lanes.in_work().is_empty() && names(&mut living).is_empty());
    }
}

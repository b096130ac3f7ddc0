//! The objects of the fake API server and the rules of its writes: versions, generations, subresources, preconditions,
//! finalizers. Pure: no time, no faults.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use crate::kind::Kind;

/// (kind, namespace or empty, name).
pub type Name = (Kind, String, String);

/// A field of a newer CRD, in the spec and the status of each of our objects.
const NEWER: &str = "newer";

/// An answer that is not a success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: u16,
    pub reason: &'static str,
    /// The cause of the failure, in the form for machines.
    cause: Option<&'static str>,
}

pub const NOT_FOUND: Failure = failure(404, "NotFound");
pub const CONFLICT: Failure = failure(409, "Conflict");
pub const EXISTS: Failure = failure(409, "AlreadyExists");
pub const INVALID: Failure = failure(422, "Invalid");
pub const FORBIDDEN: Failure = failure(403, "Forbidden");
const NAMESPACE_ENDING: Failure = Failure {
    cause: Some("NamespaceTerminating"),
    ..FORBIDDEN
};
pub const GONE: Failure = failure(410, "Expired");
pub const INTERNAL: Failure = failure(500, "InternalError");

const fn failure(code: u16, reason: &'static str) -> Failure {
    Failure {
        code,
        reason,
        cause: None,
    }
}

impl Failure {
    pub fn status(self) -> Value {
        let causes: Vec<Value> = self.cause.iter().map(|cause| json!({"reason": cause})).collect();
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.reason, "reason": self.reason, "code": self.code, "details": {"causes": causes},
        })
    }
}

#[derive(Clone, Debug)]
pub struct Object {
    pub value: Arc<Value>,
    pub bytes: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    Added,
    Modified,
    Deleted,
}

/// An event of a watch.
#[derive(Clone, Debug)]
pub struct Event {
    pub version: u64,
    pub kind: EventKind,
    pub object: Bytes,
}

/// A change by a write; the invariants look at it.
#[derive(Clone, Debug)]
pub struct Change {
    pub name: Name,
    pub old: Option<Arc<Value>>,
    pub new: Option<Arc<Value>>,
}

#[derive(Debug, Default)]
pub struct Preconditions {
    pub uid: Option<String>,
    pub version: Option<String>,
}

/// All objects at one time.
#[derive(Clone, Debug)]
pub struct Backup(BTreeMap<Name, Object>);

#[derive(Debug, Default)]
pub struct Store {
    version: u64,
    made: u64,
    objects: BTreeMap<Name, Object>,
    events: BTreeMap<Kind, Vec<Event>>,
    /// The oldest version from which a watch can be resumed.
    pub compacted: u64,
    /// The changes since they were last taken.
    changes: Vec<Change>,
    /// Seconds since the beginning, for creation timestamps.
    pub seconds: u64,
    /// How often a backup was restored.
    pub restores: u64,
}

fn timestamp(seconds: u64) -> String {
    format!(
        "2026-01-01T{:02}:{:02}:{:02}Z",
        seconds / 3600 % 24,
        seconds / 60 % 60,
        seconds % 60
    )
}

pub fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    value.pointer(path).and_then(Value::as_str).unwrap_or_default()
}

/// Returns an object's condition of a type.
pub fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    let all = object.pointer("/status/conditions")?.as_array()?;
    all.iter().find(|told| text(told, "/type") == kind)
}

pub fn is_deleting(value: &Value) -> bool {
    value.pointer("/metadata/deletionTimestamp").is_some()
}

pub fn finalizers(value: &Value) -> usize {
    value
        .pointer("/metadata/finalizers")
        .and_then(Value::as_array)
        .map_or(0, Vec::len)
}

/// Applies a merge patch (RFC 7386).
fn merge(value: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *value = patch.clone();
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    let members = value.as_object_mut().unwrap();
    for (name, change) in patch {
        if change.is_null() {
            members.remove(name);
        } else {
            merge(members.entry(name.clone()).or_insert(Value::Null), change);
        }
    }
}

/// Returns which of spec and status lost the field of the newer CRD.
pub fn lost_newer(change: &Change) -> Option<&'static str> {
    let (old, new) = (change.old.as_ref()?, change.new.as_ref()?);
    let has = |value: &Value, part: &str| value.get(part).is_some_and(|part| part.get(NEWER).is_some());
    ["spec", "status"]
        .into_iter()
        .find(|part| has(old, part) && !has(new, part))
}

fn object_mut<'a>(value: &'a mut Value, key: &str) -> &'a mut Map<String, Value> {
    let entry = &mut value[key];
    if !entry.is_object() {
        *entry = json!({});
    }
    entry.as_object_mut().unwrap()
}

impl Store {
    pub fn version(&self) -> u64 {
        self.version
    }

    pub fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<&Object> {
        self.objects.get(&(kind, namespace.to_owned(), name.to_owned()))
    }

    pub fn value(&self, kind: Kind, namespace: &str, name: &str) -> Option<&Arc<Value>> {
        self.get(kind, namespace, name).map(|object| &object.value)
    }

    pub fn all(&self, kind: Kind) -> impl Iterator<Item = (&Name, &Object)> {
        self.objects
            .range((kind, String::new(), String::new())..)
            .take_while(move |(name, _)| name.0 == kind)
    }

    pub fn values(&self, kind: Kind) -> impl Iterator<Item = &Arc<Value>> {
        self.all(kind).map(|(_, object)| &object.value)
    }

    pub fn names(&self, kind: Kind) -> Vec<String> {
        self.all(kind).map(|((_, _, name), _)| name.clone()).collect()
    }

    /// Returns the events of a kind after a version.
    pub fn events_after(&self, kind: Kind, version: u64) -> &[Event] {
        let Some(events) = self.events.get(&kind) else {
            return &[];
        };
        let start = events.partition_point(|event| event.version <= version);
        &events[start..]
    }

    pub fn last_event(&self, kind: Kind) -> u64 {
        self.events
            .get(&kind)
            .and_then(|events| events.last())
            .map_or(0, |event| event.version)
    }

    pub fn backup(&self) -> Backup {
        Backup(self.objects.clone())
    }

    /// Puts the objects of a backup in the place of all others. No watch goes on. Versions grow on, as after a restore
    /// that bumps etcd's revision.
    pub fn restore(&mut self, backup: Backup) {
        self.objects = backup.0;
        self.version += 1;
        self.compacted = self.version;
        self.restores += 1;
    }

    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    pub fn create(
        &mut self,
        kind: Kind,
        namespace: &str,
        name: &str,
        mut value: Value,
    ) -> Result<Bytes, Failure> {
        let key = (kind, namespace.to_owned(), name.to_owned());
        if self.objects.contains_key(&key) {
            return Err(EXISTS);
        }
        if matches!(
            kind,
            Kind::Endpoint
                | Kind::Service
                | Kind::EndpointSlice
                | Kind::NetworkPolicy
                | Kind::PolicyState
                | Kind::PathTrace
                | Kind::Event
        ) {
            let space = self.value(Kind::Namespace, "", namespace).ok_or(NOT_FOUND)?;
            if is_deleting(space) {
                return Err(NAMESPACE_ENDING);
            }
        }
        self.made += 1;
        let uid = format!(
            "{:08x}-1111-4222-8333-{:012x}",
            (self.made as u32).wrapping_mul(0x9e37_79b1),
            self.made
        );
        let metadata = object_mut(&mut value, "metadata");
        metadata.insert("name".into(), name.into());
        if !namespace.is_empty() {
            metadata.insert("namespace".into(), namespace.into());
        }
        metadata.insert("uid".into(), uid.into());
        metadata.insert("generation".into(), 1.into());
        metadata.insert("creationTimestamp".into(), timestamp(self.seconds).into());
        metadata.remove("deletionTimestamp");
        if kind.is_ours() {
            value.as_object_mut().unwrap().remove("status");
            object_mut(&mut value, "spec").insert(NEWER.into(), true.into());
        }
        Ok(self.put(key, value, EventKind::Added))
    }

    /// Applies a merge patch to metadata and spec, or with `is_status` to the status alone.
    pub fn patch(
        &mut self,
        kind: Kind,
        namespace: &str,
        name: &str,
        patch: &Value,
        is_status: bool,
    ) -> Result<Bytes, Failure> {
        let mut value = (**self.value(kind, namespace, name).ok_or(NOT_FOUND)?).clone();
        let had_status = value.get("status").is_some();
        merge(&mut value, patch);
        if is_status && !had_status {
            // A newer operator, which shares the work, writes this field.
            value["status"][NEWER] = true.into();
        }
        // A patch without a version holds for every version; the operator's patches have one.
        if text(patch, "/metadata/resourceVersion").is_empty() {
            return Err(INVALID);
        }
        self.replace(kind, namespace, name, value, is_status)
    }

    /// Replaces metadata and spec, or with `is_status` the status alone.
    fn replace(
        &mut self,
        kind: Kind,
        namespace: &str,
        name: &str,
        mut value: Value,
        is_status: bool,
    ) -> Result<Bytes, Failure> {
        let key = (kind, namespace.to_owned(), name.to_owned());
        let old = self.objects.get(&key).cloned().ok_or(NOT_FOUND)?;
        let given = text(&value, "/metadata/resourceVersion");
        if given.is_empty() {
            return Err(INVALID);
        }
        let uid = text(&value, "/metadata/uid");
        let is_other = !uid.is_empty() && uid != text(&old.value, "/metadata/uid");
        if is_other || given != text(&old.value, "/metadata/resourceVersion") {
            return Err(CONFLICT);
        }
        if is_status {
            let mut new = (*old.value).clone();
            new["status"] = value["status"].take();
            value = new;
        } else {
            let members = value.as_object_mut().unwrap();
            match old.value.get("status") {
                Some(status) => members.insert("status".into(), status.clone()),
                None => members.remove("status"),
            };
            if matches!(kind, Kind::Endpoint | Kind::IpClaim | Kind::VniClaim)
                && members.get("spec") != old.value.get("spec")
            {
                return Err(INVALID);
            }
            let is_changed = members.get("spec") != old.value.get("spec");
            let metadata = object_mut(&mut value, "metadata");
            for field in [
                "name",
                "namespace",
                "uid",
                "generation",
                "creationTimestamp",
                "deletionTimestamp",
            ] {
                match old.value["metadata"].get(field) {
                    Some(kept) => metadata.insert(field.into(), kept.clone()),
                    None => metadata.remove(field),
                };
            }
            if is_changed {
                let generation = old.value["metadata"]["generation"].as_i64().unwrap_or(1);
                metadata.insert("generation".into(), (generation + 1).into());
            }
            if is_deleting(&value) && finalizers(&value) > finalizers(&old.value) {
                return Err(INVALID);
            }
        }
        if value == *old.value {
            // Nothing is written, as in the API server.
            return Ok(old.bytes);
        }
        if is_deleting(&value) && finalizers(&value) == 0 {
            return Ok(self.drop_object(&key));
        }
        Ok(self.put(key, value, EventKind::Modified))
    }

    pub fn delete(
        &mut self,
        kind: Kind,
        namespace: &str,
        name: &str,
        preconditions: &Preconditions,
        foreground: bool,
    ) -> Result<Bytes, Failure> {
        let key = (kind, namespace.to_owned(), name.to_owned());
        let old = self.objects.get(&key).cloned().ok_or(NOT_FOUND)?;
        let differs = |wanted: &Option<String>, path: &str| {
            wanted
                .as_ref()
                .is_some_and(|wanted| wanted != text(&old.value, path))
        };
        if differs(&preconditions.uid, "/metadata/uid")
            || differs(&preconditions.version, "/metadata/resourceVersion")
        {
            return Err(CONFLICT);
        }
        if is_deleting(&old.value) {
            return Ok(old.bytes);
        }
        if finalizers(&old.value) == 0 && !foreground && kind != Kind::Pod {
            return Ok(self.drop_object(&key));
        }
        let mut value = (*old.value).clone();
        let now = timestamp(self.seconds);
        let metadata = object_mut(&mut value, "metadata");
        metadata.insert("deletionTimestamp".into(), now.into());
        if foreground {
            let finalizers = metadata.entry("finalizers").or_insert_with(|| json!([]));
            finalizers
                .as_array_mut()
                .unwrap()
                .push("foregroundDeletion".into());
        }
        Ok(self.put(key, value, EventKind::Modified))
    }

    /// Deletes an object as a user does: a policy denies it for an Endpoint of a pod.
    pub fn delete_as_user(
        &mut self,
        kind: Kind,
        namespace: &str,
        name: &str,
        foreground: bool,
    ) -> Result<Bytes, Failure> {
        let old = self.value(kind, namespace, name).ok_or(NOT_FOUND)?;
        if kind == Kind::Endpoint && !text(old, "/spec/podRef/uid").is_empty() {
            return Err(INVALID);
        }
        self.delete(kind, namespace, name, &Preconditions::default(), foreground)
    }

    /// Changes an object as another writer does, whatever version the object has.
    pub fn edit(&mut self, kind: Kind, namespace: &str, name: &str, change: impl FnOnce(&mut Value)) -> bool {
        let Some(old) = self.value(kind, namespace, name).cloned() else {
            return false;
        };
        let mut value = (*old).clone();
        change(&mut value);
        if value.get("spec") != old.get("spec") {
            let generation = old["metadata"]["generation"].as_i64().unwrap_or(1);
            value["metadata"]["generation"] = (generation + 1).into();
        }
        if value == *old {
            return true;
        }
        let key = (kind, namespace.to_owned(), name.to_owned());
        if is_deleting(&value) && finalizers(&value) == 0 && kind != Kind::Pod {
            self.drop_object(&key);
        } else {
            self.put(key, value, EventKind::Modified);
        }
        true
    }

    /// Takes an object away at once, as kubelet does with a pod that has ended.
    pub fn purge(&mut self, kind: Kind, namespace: &str, name: &str) {
        let key = (kind, namespace.to_owned(), name.to_owned());
        if self.objects.contains_key(&key) {
            self.drop_object(&key);
        }
    }

    fn put(&mut self, key: Name, mut value: Value, event: EventKind) -> Bytes {
        self.version += 1;
        let members = value.as_object_mut().unwrap();
        members.insert("kind".into(), key.0.name().into());
        members.insert("apiVersion".into(), key.0.api_version().into());
        value["metadata"]["resourceVersion"] = self.version.to_string().into();
        let object = Object {
            bytes: serde_json::to_vec(&value).unwrap().into(),
            value: Arc::new(value),
        };
        let bytes = object.bytes.clone();
        self.note(key.0, event, bytes.clone());
        let new = Some(object.value.clone());
        let old = self.objects.insert(key.clone(), object).map(|old| old.value);
        self.changes.push(Change { name: key, old, new });
        bytes
    }

    fn drop_object(&mut self, key: &Name) -> Bytes {
        let old = self.objects.remove(key).unwrap();
        self.version += 1;
        let mut value = (*old.value).clone();
        value["metadata"]["resourceVersion"] = self.version.to_string().into();
        let bytes = Bytes::from(serde_json::to_vec(&value).unwrap());
        self.note(key.0, EventKind::Deleted, bytes.clone());
        self.changes.push(Change {
            name: key.clone(),
            old: Some(old.value),
            new: None,
        });
        bytes
    }

    fn note(&mut self, kind: Kind, event: EventKind, object: Bytes) {
        let version = self.version;
        self.events.entry(kind).or_default().push(Event {
            version,
            kind: event,
            object,
        });
    }
}

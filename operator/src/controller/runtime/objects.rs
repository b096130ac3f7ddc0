//! Writes of objects: a patch of the changed fields under resourceVersion, a delete under UID and resourceVersion, and
//! our own finalizer helper.
//!
//! Invariant: a field of a newer CRD that this version doesn't know is never written, so it stays.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::object::HasStatus;
use kube::core::response::StatusCause;
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use thiserror::Error;
use thuban_api::{Condition, ConditionStatus, FINALIZER};

/// A failed operation on an object.
#[derive(Debug, Error)]
#[error("{operation} {object}: {}", self.message())]
pub struct WriteError {
    operation: &'static str,
    object: String,
    source: Box<kube::Error>,
}

impl WriteError {
    /// Whether another writer changed the object meanwhile: the caller reads again and decides again.
    pub fn is_conflict(&self) -> bool {
        matches!(&*self.source, kube::Error::Api(status) if status.code == 409)
    }

    /// Returns the kind of answer, for counting.
    pub fn category(&self) -> &'static str {
        match &*self.source {
            kube::Error::Api(status) => match status.code {
                403 => "forbidden",
                404 => "not_found",
                409 => "conflict",
                400 | 422 => "invalid",
                429 => "throttled",
                _ => "server",
            },
            _ => "unreachable",
        }
    }

    /// Returns the API server's message.
    pub fn message(&self) -> String {
        match &*self.source {
            kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
            other => other.to_string(),
        }
    }

    /// Whether the API server understood the request and denied it: by a quota, a webhook (which may answer anything),
    /// a policy, or a rule of the kind. An immediate retry would be denied again.
    pub fn is_denied(&self) -> bool {
        match &*self.source {
            kube::Error::Api(status) => {
                (400..500).contains(&status.code) && !matches!(status.code, 401 | 404 | 408..=410 | 429)
            }
            _ => false,
        }
    }

    /// Whether the request was denied because its namespace ends.
    pub fn is_namespace_ending(&self) -> bool {
        self.is_denied() && self.causes().any(|cause| cause.reason == "NamespaceTerminating")
    }

    pub fn is_forbidden(&self) -> bool {
        matches!(&*self.source, kube::Error::Api(status) if status.code == 403)
    }

    /// Whether the object breaks a rule of its kind, which names the field. A policy may answer the same code, without
    /// a field.
    pub fn is_invalid(&self) -> bool {
        matches!(&*self.source, kube::Error::Api(status) if status.code == 422)
            && self.causes().any(|cause| !cause.field.is_empty())
    }

    fn causes(&self) -> impl Iterator<Item = &StatusCause> {
        let details = match &*self.source {
            kube::Error::Api(status) => status.details.as_ref(),
            _ => None,
        };
        details.into_iter().flat_map(|details| &details.causes)
    }

    /// Returns how long the API server wants to be left alone (`Retry-After`), if it says so.
    pub fn retry_after(&self) -> Option<Duration> {
        let kube::Error::Api(status) = &*self.source else {
            return None;
        };
        let seconds = status.details.as_ref()?.retry_after_seconds;
        (seconds > 0).then(|| Duration::from_secs(seconds.into()))
    }

    pub fn is_not_found(&self) -> bool {
        matches!(&*self.source, kube::Error::Api(status) if status.code == 404)
    }
}

pub fn failed<'a>(operation: &'static str, object: &'a str) -> impl FnOnce(kube::Error) -> WriteError + 'a {
    move |source| WriteError {
        operation,
        object: object.to_owned(),
        source: Box::new(source),
    }
}

/// How long the API server may take to answer; after that it counts as away. The request may have been carried out all
/// the same.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

/// Bounds the time of a request, so that the workflow of its object goes on.
pub async fn bounded<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let silent = || kube::Error::Service("the API server does not answer".into());
    let answer = tokio::time::timeout(REQUEST_TIMEOUT, request).await;
    answer.unwrap_or_else(|_| Err(silent()))
}

/// Returns the object as the API server has it now.
pub async fn get<K: Object>(api: &Api<K>, name: &str) -> Result<Option<K>, WriteError> {
    bounded(api.get_opt(name)).await.map_err(failed("get", name))
}

/// Returns all objects of a kind as the API server has them now.
pub async fn list<K: Object>(api: &Api<K>) -> Result<Vec<K>, WriteError> {
    list_by(api, &ListParams::default()).await
}

async fn list_by<K: Object>(api: &Api<K>, parameters: &ListParams) -> Result<Vec<K>, WriteError> {
    let answer = bounded(api.list(parameters)).await;
    answer
        .map(|list| list.items)
        .map_err(failed("list", K::plural(&()).as_ref()))
}

/// Returns the objects with that field, which is one of the CRD's `selectableFields`.
pub async fn list_where<K: Object>(api: &Api<K>, field: &str, value: &str) -> Result<Vec<K>, WriteError> {
    let parameters = ListParams::default().fields(&format!("{field}={value}"));
    list_by(api, &parameters).await
}

pub trait Object:
    Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync
{
}
impl<T: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync> Object
    for T
{
}

pub async fn create<K: Object>(api: &Api<K>, object: &K) -> Result<K, WriteError> {
    let result = bounded(api.create(&PostParams::default(), object)).await;
    crash_point::<K>("create");
    result.map_err(failed("create", &object.name_any()))
}

/// Writes the parts of metadata and spec that differ from `old`, if the API server still has that version.
pub async fn update<K: Object>(api: &Api<K>, old: &K, new: &K) -> Result<K, WriteError> {
    let name = old.name_any();
    let result = async {
        let patch = Patch::Merge(changes(old, new)?);
        bounded(api.patch(&name, &PatchParams::default(), &patch)).await
    };
    let result = result.await;
    crash_point::<K>("update");
    result.map_err(failed("update", &name))
}

/// Writes the parts of the status that differ from `old`, if the API server still has that version.
pub async fn update_status<K: Object>(api: &Api<K>, old: &K, new: &K) -> Result<K, WriteError> {
    let name = old.name_any();
    let result = async {
        let patch = Patch::Merge(changes(old, new)?);
        bounded(api.patch_status(&name, &PatchParams::default(), &patch)).await
    };
    let result = result.await;
    crash_point::<K>("status");
    result.map_err(failed("update the status of", &name))
}

/// Writes a status, unless it is the stored one.
pub async fn write_status<K>(api: &Api<K>, object: &K, status: K::Status) -> Result<(), WriteError>
where
    K: Object + HasStatus,
    K::Status: PartialEq,
{
    if object.status() == Some(&status) {
        return Ok(());
    }
    let mut changed = object.clone();
    *changed.status_mut() = Some(status);
    update_status(api, object, &changed).await.map(drop)
}

/// Returns a merge patch that makes `old` into `new` and holds for that version only.
fn changes<K: Object>(old: &K, new: &K) -> Result<Value, kube::Error> {
    let read = |object: &K| serde_json::to_value(object).map_err(kube::Error::SerdeError);
    let mut patch = difference(&read(old)?, &read(new)?);
    patch["metadata"]["resourceVersion"] = old.resource_version().into();
    Ok(patch)
}

/// Returns the difference as a merge patch (RFC 7386): a removed field is null, a list is written whole.
fn difference(old: &Value, new: &Value) -> Value {
    let (Value::Object(old), Value::Object(new)) = (old, new) else {
        return new.clone();
    };
    let gone = old.keys().filter(|name| !new.contains_key(*name));
    let gone = gone.map(|name| (name.clone(), Value::Null));
    let changed = new.iter().filter(|(name, value)| old.get(*name) != Some(value));
    let changed = changed.map(|(name, value)| {
        let old = old.get(name).unwrap_or(&Value::Null);
        (name.clone(), difference(old, value))
    });
    Value::Object(gone.chain(changed).collect())
}

/// Deletes exactly this version of this object; an object that is gone is a success.
pub async fn delete<K: Object>(api: &Api<K>, object: &K) -> Result<(), WriteError> {
    let preconditions = Preconditions {
        uid: object.meta().uid.clone(),
        resource_version: object.meta().resource_version.clone(),
    };
    let name = object.name_any();
    let parameters = DeleteParams::background().preconditions(preconditions);
    let result = bounded(api.delete(&name, &parameters)).await;
    crash_point::<K>("delete");
    match result {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(failed("delete", &name)(error)),
    }
}

/// Ends the process after a write, for tests of crashes: `THUBAN_CRASH=create/IpClaim` ends it after the first write of
/// that kind.
#[cfg(feature = "failpoints")]
fn crash_point<K: Object>(operation: &str) {
    if std::env::var("THUBAN_CRASH").is_ok_and(|armed| armed == format!("{operation}/{}", K::kind(&()))) {
        std::process::abort();
    }
}

#[cfg(not(feature = "failpoints"))]
fn crash_point<K: Object>(_: &str) {}

pub fn has_finalizer<K: Object>(object: &K) -> bool {
    object.finalizers().iter().any(|finalizer| finalizer == FINALIZER)
}

pub async fn add_finalizer<K: Object>(api: &Api<K>, object: &K) -> Result<K, WriteError> {
    let mut guarded = object.clone();
    guarded.finalizers_mut().push(FINALIZER.to_owned());
    update(api, object, &guarded).await
}

/// Removes the finalizer, with which the object is deleted. An object that is already gone is a success.
pub async fn remove_finalizer<K: Object>(api: &Api<K>, object: &K) -> Result<(), WriteError> {
    let mut released = object.clone();
    released
        .finalizers_mut()
        .retain(|finalizer| finalizer != FINALIZER);
    match update(api, object, &released).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns an owner reference: the deletion of the owner deletes the object too.
pub fn owner<K: Resource<DynamicType = ()>>(owner: &K) -> Option<OwnerReference> {
    owner.controller_owner_ref(&())
}

pub fn condition(
    kind: &str,
    is_true: bool,
    reason: &str,
    message: &str,
    generation: Option<i64>,
) -> Condition {
    Condition {
        kind: kind.to_owned(),
        status: if is_true {
            ConditionStatus::True
        } else {
            ConditionStatus::False
        },
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: Timestamp::now().to_string(),
        observed_generation: generation,
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::{Value, json};
    use thuban_api::{Bouncer, FINALIZER, Phase};

    use super::{changes, failed};

    fn bouncer(object: &Value) -> Bouncer {
        serde_json::from_value(object.clone()).unwrap()
    }

    #[test]
    fn a_patch_names_what_changed_and_nothing_else() {
        let stored = json!({
            "metadata": {"name": "b", "resourceVersion": "7", "finalizers": [FINALIZER]},
            "spec": {"vpc": "red", "network": "red-1", "droplet": "n0", "newer": 1},
            "status": {"phase": "Init", "droplet": "n0", "conditions": [], "newer": {"field": 1}},
        });
        let old = bouncer(&stored);
        assert_eq!(
            changes(&old, &old).unwrap(),
            json!({"metadata": {"resourceVersion": "7"}})
        );
        let mut new = old.clone();
        new.metadata.finalizers = None;
        new.spec.droplet = Some("n1".into());
        let status = new.status.as_mut().unwrap();
        status.phase = Phase::Provisioned;
        status.droplet = None;
        let patch = json!({
            "metadata": {"resourceVersion": "7", "finalizers": null},
            "spec": {"droplet": "n1"},
            "status": {"phase": "Provisioned", "droplet": null},
        });
        assert_eq!(changes(&old, &new).unwrap(), patch);
    }

    #[test]
    fn denied_failed_and_invalid_writes_are_told_apart() {
        let of = |code: u16, cause: &Value| {
            let status: Status = serde_json::from_value(json!({
                "status": "Failure", "message": "by whom", "reason": "", "code": code, "details": {"causes": [cause]},
            }))
            .unwrap();
            failed("create", "x")(kube::Error::Api(Box::new(status)))
        };
        let none = json!({});
        let denied = [400, 403, 418, 422].map(|code| of(code, &none).is_denied());
        let failed = [401, 404, 408, 409, 410, 429, 500, 503].map(|code| of(code, &none).is_denied());
        assert_eq!((denied, failed), ([true; 4], [false; 8]));
        assert!(of(422, &json!({"field": "spec.network"})).is_invalid());
        assert!(!of(422, &json!({"message": "a policy"})).is_invalid());
        assert!(of(403, &json!({"reason": "NamespaceTerminating"})).is_namespace_ending());
        assert!(!of(403, &none).is_namespace_ending());
        assert_eq!(of(403, &none).to_string(), "create x: by whom");
    }
}

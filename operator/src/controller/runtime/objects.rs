//! Writes as the design wants them: replace under resourceVersion, delete under UID and resourceVersion, our own
//! finalizer helper.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, PostParams, Preconditions};
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use thuban_api::{Condition, ConditionStatus, FINALIZER};

/// What went wrong, at which object.
#[derive(Debug, Error)]
#[error("{operation} {object}: {source}")]
pub struct WriteError {
    operation: &'static str,
    object: String,
    source: Box<kube::Error>,
}

impl WriteError {
    /// Somebody else wrote meanwhile: read again and decide anew.
    pub fn is_conflict(&self) -> bool {
        matches!(&*self.source, kube::Error::Api(status) if status.code == 409)
    }

    /// For counting: what kind of answer it was.
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

    pub fn is_forbidden(&self) -> bool {
        matches!(&*self.source, kube::Error::Api(status) if status.code == 403)
    }

    /// The object breaks a rule of its kind: trying again changes nothing.
    pub fn is_invalid(&self) -> bool {
        matches!(&*self.source, kube::Error::Api(status) if status.code == 422)
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

/// An API server that does not answer for so long is away. What was asked for may have happened all the same.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

/// No request keeps its object from being looked at again.
pub async fn bounded<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let silent = || kube::Error::Service("the API server does not answer".into());
    let answer = tokio::time::timeout(REQUEST_TIMEOUT, request).await;
    answer.unwrap_or_else(|_| Err(silent()))
}

/// The object as the API server has it now.
pub async fn get<K: Object>(api: &Api<K>, name: &str) -> Result<Option<K>, WriteError> {
    bounded(api.get_opt(name)).await.map_err(failed("get", name))
}

/// All objects of a kind as the API server has them now.
pub async fn list<K: Object>(api: &Api<K>) -> Result<Vec<K>, WriteError> {
    list_by(api, &ListParams::default()).await
}

async fn list_by<K: Object>(api: &Api<K>, parameters: &ListParams) -> Result<Vec<K>, WriteError> {
    let answer = bounded(api.list(parameters)).await;
    answer
        .map(|list| list.items)
        .map_err(failed("list", K::plural(&()).as_ref()))
}

/// Objects with that field, one of the CRD's `selectableFields`.
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

/// Replaces metadata and spec.
pub async fn replace<K: Object>(api: &Api<K>, object: &K) -> Result<K, WriteError> {
    let name = object.name_any();
    let result = bounded(api.replace(&name, &PostParams::default(), object)).await;
    crash_point::<K>("update");
    result.map_err(failed("update", &name))
}

/// Replaces the status.
pub async fn replace_status<K: Object>(api: &Api<K>, object: &K) -> Result<K, WriteError> {
    let name = object.name_any();
    let result = bounded(api.replace_status(&name, &PostParams::default(), object)).await;
    crash_point::<K>("status");
    result.map_err(failed("update the status of", &name))
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

/// For tests of crashes: `THUBAN_CRASH=create/IpClaim` ends the process after the first such write.
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
    let mut object = object.clone();
    object.finalizers_mut().push(FINALIZER.to_owned());
    replace(api, &object).await
}

/// The object goes with this; one that is gone already is a success.
pub async fn remove_finalizer<K: Object>(api: &Api<K>, object: &K) -> Result<(), WriteError> {
    let mut object = object.clone();
    object.finalizers_mut().retain(|finalizer| finalizer != FINALIZER);
    match replace(api, &object).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}

/// An owner whose deletion takes the object with it.
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

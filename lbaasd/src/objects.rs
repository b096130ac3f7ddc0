//! Changes of one object's status under its resourceVersion.

use std::fmt::Debug;

use kube::api::PostParams;
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How often a change begins anew because others changed the object meanwhile.
const TRIES: usize = 8;

/// Returns the API of the kind in an object's namespace.
pub fn api_of<K>(client: &Client, object: &K) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    Api::namespaced(client.clone(), &object.namespace().unwrap_or_default())
}

/// Writes what `change` makes of an object's status. `change` returns whether it changed anything. Returns the object
/// as it is then; `None` if another one has its name, or none.
///
/// The object as the caller knows it is often the latest one. So it is written first, under its version, and read only
/// if that is refused or `change` does nothing to it. What is returned is always the API server's.
pub async fn change_status<K>(
    client: &Client,
    object: &K,
    change: impl FnMut(&mut K) -> bool,
) -> Result<Option<K>, kube::Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Serialize,
{
    change_status_by(&api_of(client, object), object, change).await
}

/// Does the same by this API.
pub async fn change_status_by<K>(
    api: &Api<K>,
    object: &K,
    mut change: impl FnMut(&mut K) -> bool,
) -> Result<Option<K>, kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize,
{
    let name = object.name_any();
    // A write without a version would take effect whatever others wrote.
    let mut known = object.meta().resource_version.is_some().then(|| object.clone());
    let mut tries = 0;
    loop {
        let (current, is_read) = match known.take() {
            Some(known) => (Some(known), false),
            None => (api.get_opt(&name).await?, true),
        };
        let Some(mut current) = current else {
            return Ok(None);
        };
        if current.meta().uid != object.meta().uid {
            return Ok(None);
        }
        if !change(&mut current) {
            if is_read {
                return Ok(Some(current));
            }
            continue;
        }
        let written = api.replace_status(&name, &PostParams::default(), &current).await;
        tries += 1;
        match written {
            Err(kube::Error::Api(status)) if status.code == 409 && tries < TRIES => {}
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(None),
            written => return written.map(Some),
        }
    }
}

#[cfg(test)]
mod tests;

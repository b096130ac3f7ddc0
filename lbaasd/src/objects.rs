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

/// Reads an object and writes what `change` makes of its status. `change` returns whether it changed anything. Returns
/// the object as it is then; `None` if another one has its name, or none.
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
    let mut tries = 0;
    loop {
        let Some(mut current) = api.get_opt(&name).await? else {
            return Ok(None);
        };
        if current.meta().uid != object.meta().uid {
            return Ok(None);
        }
        if !change(&mut current) {
            return Ok(Some(current));
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

//! Writes the members of load balancers into the status of their Vips. All else there is lbaasd's.
//!
//! Invariant: a Vip is written only if its members are others than it says, at most once in [`LOOK`].

use std::sync::Arc;
use std::time::Duration;

use kube::Api;
use thuban_api::Vip;
use tokio::time::sleep;
use tracing::warn;

use crate::controller::context::Context;
use crate::controller::runtime::objects::{WriteError, get, update_status};
use crate::model::world::{VipMembers, VipName};

/// How often is looked which Vips are to be written.
const LOOK: Duration = Duration::from_secs(2);

/// Writes for as long as the process leads.
pub async fn write(context: Arc<Context>) {
    loop {
        sleep(LOOK).await;
        for (name, members) in context.hub.take_members() {
            let Err(error) = write_one(&name, members, &context).await else {
                continue;
            };
            if !error.is_conflict() {
                let (namespace, name) = &name;
                warn!(namespace, name, %error, "the members of a Vip are not written");
            }
            // A right that is missing comes with the next version of the manifests.
            if error.is_conflict() || !error.is_denied() && !error.is_not_found() {
                context.hub.give_members_back(name);
            }
        }
    }
}

async fn write_one(
    (namespace, name): &VipName,
    members: VipMembers,
    context: &Context,
) -> Result<(), WriteError> {
    let vips: Api<Vip> = Api::namespaced(context.client.clone(), namespace);
    // Load balancers may not be installed, or the Vip may be gone.
    let Some(vip) = get(&vips, name).await? else {
        return Ok(());
    };
    let before = vip.status.clone().unwrap_or_default();
    let mut status = before.clone();
    status.members = members.listed;
    (status.member_count, status.failing_members) = (members.count, members.failing);
    if status == before {
        return Ok(());
    }
    let mut changed = vip.clone();
    changed.status = Some(status);
    update_status(&vips, &vip, &changed).await.map(drop)
}

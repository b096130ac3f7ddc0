//! Bouncer: the role of a droplet for one network; its life is that of every role.

use kube::runtime::reflector::Store;
use thuban_api::{Bouncer, RoleStatus};

use super::context::Context;
use super::network::has_endpoints;
use super::role::Role;
use crate::hub::Waiter;
use crate::model::rows::Key;
use crate::model::world::World;

impl Role for Bouncer {
    fn parent(&self) -> &str {
        &self.spec.network
    }

    fn droplet(&self) -> Option<&str> {
        self.spec.droplet.as_deref()
    }

    fn place_on(&mut self, droplet: String) {
        self.spec.droplet = Some(droplet);
    }

    fn status(&self) -> Option<&RoleStatus> {
        self.status.as_ref()
    }

    fn set_status(&mut self, status: RoleStatus) {
        self.status = Some(status);
    }

    fn all(context: &Context) -> &Store<Self> {
        &context.stores.bouncers
    }

    fn waiter(name: String) -> Waiter {
        Waiter::Bouncer(name)
    }

    fn rows(&self, world: &World, droplet: &str) -> Vec<(String, Key)> {
        world.network_rows(&self.spec.network, droplet)
    }

    fn forget(world: &mut World, name: &str) {
        world.set_bouncer(name, None);
    }

    fn is_held(&self, context: &Context) -> bool {
        let network = context.network(&self.spec.network);
        let is_leaving = network.is_some_and(|network| network.metadata.deletion_timestamp.is_some());
        is_leaving && has_endpoints(&self.spec.network, context)
    }
}

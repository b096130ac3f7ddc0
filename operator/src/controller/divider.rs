//! Divider: the role of a droplet for one VPC; its life is that of every role.

use kube::runtime::reflector::Store;
use thuban_api::{Divider, RoleStatus};

use super::context::Context;
use super::network::is_accepted;
use super::role::Role;
use crate::hub::Waiter;
use crate::model::rows::Key;
use crate::model::world::World;

impl Role for Divider {
    fn parent(&self) -> &str {
        &self.spec.vpc
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
        &context.stores.dividers
    }

    fn waiter(name: String) -> Waiter {
        Waiter::Divider(name)
    }

    fn rows(&self, world: &World, droplet: &str) -> Vec<(String, Key)> {
        world.divider_rows(&self.spec.vpc, droplet)
    }

    fn forget(world: &mut World, name: &str) {
        world.set_divider(name, None);
    }

    fn is_held(&self, context: &Context) -> bool {
        let vpc = context.vpc(&self.spec.vpc);
        let is_leaving = vpc.is_some_and(|vpc| vpc.metadata.deletion_timestamp.is_some());
        let networks = context.stores.networks.state();
        is_leaving
            && networks
                .iter()
                .any(|network| network.spec.vpc == self.spec.vpc && is_accepted(network))
    }
}

//! Divider: the role of a droplet for one VPC; its life is that of every role.

use kube::runtime::reflector::Store;
use thuban_api::{Divider, RoleStatus};

use super::context::Context;
use super::network::is_accepted;
use super::role::Role;
use crate::hub::Waiter;
use crate::model::rows::Key;
use crate::model::world::{self, RoleId, World};

impl Role for Divider {
    const KIND: &'static str = "Divider";

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

    fn tables(&self, world: &World, droplet: &str) -> Vec<(String, Key)> {
        world.divider_tables(&self.spec.vpc, droplet)
    }

    fn lists(&self, world: &World) -> Vec<(String, Key)> {
        world.divider_lists(&self.spec.vpc)
    }

    fn set(world: &mut World, name: &str, role: Option<world::Role>) {
        world.set_divider(name, role);
    }

    fn list(world: &mut World, id: RoleId) {
        world.list_divider(id);
    }

    fn part(world: &mut World, id: RoleId) {
        world.part_divider(id);
    }

    fn has_left(world: &World, name: &str) -> bool {
        world.has_divider_left(name)
    }

    fn leave(world: &mut World, id: RoleId) {
        world.leave_divider(id);
    }

    fn take_back(world: &mut World, id: RoleId) {
        world.take_divider_back(id);
    }

    fn is_listed(world: &World, name: &str) -> bool {
        world.is_divider_listed(name)
    }

    fn forget(world: &mut World, id: RoleId) {
        world.forget_divider(id);
    }

    fn has_other(world: &World, name: &str) -> bool {
        world.has_other_divider(name)
    }

    fn is_in_use(&self, context: &Context) -> bool {
        // Networks whose VPC is gone are served no more.
        let networks = context.networks_of(&self.spec.vpc);
        context.vpc(&self.spec.vpc).is_some() && networks.iter().any(|network| is_accepted(network))
    }
}

//! Bouncer: the role of a droplet for one network; its life is that of every role.

use kube::runtime::reflector::Store;
use thuban_api::{Bouncer, RoleStatus};

use super::context::Context;
use super::network::has_endpoints;
use super::role::Role;
use crate::hub::Waiter;
use crate::model::rows::Key;
use crate::model::world::{self, RoleId, World};

impl Role for Bouncer {
    const KIND: &'static str = "Bouncer";

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

    fn tables(&self, world: &World, droplet: &str) -> Vec<(String, Key)> {
        world.bouncer_tables(&self.spec.network, droplet)
    }

    fn lists(&self, world: &World) -> Vec<(String, Key)> {
        world.bouncer_lists(&self.spec.network)
    }

    fn set(world: &mut World, name: &str, role: Option<world::Role>) {
        world.set_bouncer(name, role);
    }

    fn list(world: &mut World, id: RoleId) {
        world.list_bouncer(id);
    }

    fn part(world: &mut World, id: RoleId) {
        world.part_bouncer(id);
    }

    fn has_left(world: &World, name: &str) -> bool {
        world.has_bouncer_left(name)
    }

    fn leave(world: &mut World, id: RoleId) {
        world.leave_bouncer(id);
    }

    fn take_back(world: &mut World, id: RoleId) {
        world.take_bouncer_back(id);
    }

    fn is_listed(world: &World, name: &str) -> bool {
        world.is_bouncer_listed(name)
    }

    fn forget(world: &mut World, id: RoleId) {
        world.forget_bouncer(id);
    }

    fn has_other(world: &World, name: &str) -> bool {
        world.has_other_bouncer(name)
    }

    fn is_in_use(&self, context: &Context) -> bool {
        // Endpoints may outlive their network: an operator that saw it late gave them addresses.
        context.network(&self.spec.network).is_some() && has_endpoints(&self.spec.network, context)
    }
}

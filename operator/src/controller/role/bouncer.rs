//! Bouncer: the role of a droplet for one network; it has the life of every role.

use kube::runtime::reflector::Store;
use thuban_api::Bouncer;

use crate::controller::context::Context;
use crate::controller::role::kind::Role;
use crate::model::world::RoleKind;

impl Role for Bouncer {
    const KIND: RoleKind = RoleKind::Bouncer;

    fn parent(&self) -> &str {
        &self.spec.network
    }

    fn droplet(&self) -> Option<&str> {
        self.spec.droplet.as_deref()
    }

    fn place_on(&mut self, droplet: String) {
        self.spec.droplet = Some(droplet);
    }

    fn all(context: &Context) -> &Store<Self> {
        &context.stores.bouncers
    }

    fn is_in_use(&self, context: &Context) -> bool {
        // Endpoints may outlive their network: an operator that saw the network's end late gave them addresses.
        context.network(&self.spec.network).is_some()
            && context.hub.read(|world| world.population(&self.spec.network)) > 0
    }
}

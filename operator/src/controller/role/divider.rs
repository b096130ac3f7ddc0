//! Divider: the role of a droplet for one VPC; it has the life of every role.

use kube::runtime::reflector::Store;
use thuban_api::Divider;

use crate::controller::context::Context;
use crate::controller::role::kind::Role;
use crate::model::ranges::is_accepted;
use crate::model::world::RoleKind;

impl Role for Divider {
    const KIND: RoleKind = RoleKind::Divider;

    fn parent(&self) -> &str {
        &self.spec.vpc
    }

    fn droplet(&self) -> Option<&str> {
        self.spec.droplet.as_deref()
    }

    fn place_on(&mut self, droplet: String) {
        self.spec.droplet = Some(droplet);
    }

    fn all(context: &Context) -> &Store<Self> {
        &context.stores.dividers
    }

    fn is_in_use(&self, context: &Context) -> bool {
        // Networks whose VPC is gone are no longer served.
        let networks = context.networks_of(&self.spec.vpc);
        context.vpc(&self.spec.vpc).is_some() && networks.iter().any(|network| is_accepted(network))
    }
}

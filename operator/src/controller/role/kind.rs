//! The functions of a divider or a bouncer that the workflow of roles needs.

use kube::ResourceExt;
use kube::core::object::HasStatus;
use kube::runtime::reflector::Store;
use thuban_api::{Phase, RoleStatus};

use crate::controller::context::{Context, found};
use crate::controller::runtime::objects::Object;
use crate::hub::Waiter;
use crate::model::rows::Key;
use crate::model::world::{self, RoleId, RoleKind, World};

/// A divider or a bouncer.
pub trait Role: Object + HasStatus<Status = RoleStatus> + 'static {
    const KIND: RoleKind;
    /// Returns the name of the divider's VPC, or of the bouncer's network.
    fn parent(&self) -> &str;
    fn droplet(&self) -> Option<&str>;
    fn place_on(&mut self, droplet: String);
    fn all(context: &Context) -> &Store<Self>;
    /// Whether the roles of its parent may be in use.
    fn is_in_use(&self, context: &Context) -> bool;

    fn id(&self) -> RoleId<'_> {
        let meta = self.meta();
        RoleId {
            kind: Self::KIND,
            name: meta.name.as_deref().unwrap_or_default(),
            uid: meta.uid.as_deref().unwrap_or_default(),
        }
    }

    fn waiter(&self) -> Waiter {
        Waiter::Role(Self::KIND, self.name_any())
    }

    /// Returns the rows that its droplet needs to serve.
    fn tables(&self, world: &World, droplet: &str) -> Vec<(String, Key)> {
        world.role_tables(Self::KIND, self.parent(), droplet)
    }

    /// Returns the rows that tell users where the role is.
    fn published_rows(&self, world: &World) -> Vec<(String, Key)> {
        world.published_rows(Self::KIND, self.parent())
    }

    /// Returns the droplet where users have the role. Roles of operators that wrote no `status.droplet` serve where
    /// they are.
    fn serves_on(&self) -> Option<&str> {
        let status = self.status()?;
        let provisioned = self.droplet().filter(|_| status.phase == Phase::Provisioned);
        status.droplet.as_deref().or(provisioned)
    }

    fn is_leaving(&self) -> bool {
        self.status().is_some_and(|status| status.leaving)
    }

    /// Returns the role in the form that the world has.
    fn in_world(&self) -> world::Role {
        world::Role {
            uid: self.uid().unwrap_or_default(),
            parent: self.parent().to_owned(),
            serves_on: self.serves_on().map(str::to_owned),
            placed_on: self.droplet().map(str::to_owned),
            is_leaving: self.is_leaving(),
        }
    }
}

/// Returns the roles of a parent.
pub fn roles_of<R: Role>(parent: &str, context: &Context) -> Vec<std::sync::Arc<R>> {
    found(R::all(context), &context.index.roles_of(R::KIND, parent))
}

//! Dividers and bouncers, which have the same status.

use kube::ResourceExt;
use thuban_api::{Bouncer, Divider, Phase, RoleStatus};

use crate::conditions::lacking;

/// How many roles are named.
const NAMED: usize = 2;

/// A Divider or Bouncer.
pub trait Role: ResourceExt {
    fn status(&self) -> Option<&RoleStatus>;
    fn wanted_droplet(&self) -> Option<&str>;

    /// Returns the droplet that serves, or else the one that should.
    fn droplet(&self) -> Option<&str> {
        let serving = self.status().and_then(|status| status.droplet.as_deref());
        serving.or_else(|| self.wanted_droplet())
    }

    fn phase(&self) -> Phase {
        self.status().map(|status| status.phase).unwrap_or_default()
    }
}

impl Role for Divider {
    fn status(&self) -> Option<&RoleStatus> {
        self.status.as_ref()
    }

    fn wanted_droplet(&self) -> Option<&str> {
        self.spec.droplet.as_deref()
    }
}

impl Role for Bouncer {
    fn status(&self) -> Option<&RoleStatus> {
        self.status.as_ref()
    }

    fn wanted_droplet(&self) -> Option<&str> {
        self.spec.droplet.as_deref()
    }
}

/// Returns what the first roles that do not work say; none if no role says anything.
pub fn messages<'a, R: Role + 'a>(roles: impl Iterator<Item = &'a R>) -> Option<String> {
    let told = roles.filter_map(|role| {
        let condition = lacking(&role.status()?.conditions)?;
        Some(format!("{} {}", role.name_any(), condition.message))
    });
    let told: Vec<String> = told.take(NAMED).collect();
    (!told.is_empty()).then(|| told.join(", "))
}

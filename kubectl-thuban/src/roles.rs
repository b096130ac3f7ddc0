//! Dividers and bouncers, which have the same status.

use kube::ResourceExt;
use thuban_api::{Bouncer, Divider, Phase, RoleStatus};

use crate::conditions::lacking;
use crate::report::{Problem, STATUS};

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

/// Returns what is wrong with an object that has roles. `own`: what its conditions say; for the reason `waits` the
/// roles tell more. `numbers`: how many roles it has, and how many of them work.
pub fn lacks_roles(
    name: &str,
    own: Option<Problem>,
    (roles, waits): (&str, &str),
    numbers: Option<(u32, u32)>,
    told: impl FnOnce() -> Option<String>,
) -> Option<Problem> {
    if let Some(mut problem) = own {
        if problem.reason == waits
            && let Some(told) = told()
        {
            problem.message = told;
        }
        return Some(problem);
    }
    let (wanted, working) = numbers?;
    (working < wanted).then(|| {
        let message = format!("{working} of {wanted} {roles}");
        let message = told().map_or_else(|| message.clone(), |told| format!("{message}: {told}"));
        Problem::new(STATUS, name, "RolesNotWorking", message)
    })
}

//! Networks: which are Ready, whether all of their bouncers work, and which run out of addresses.

use kube::ResourceExt;
use thuban_api::Network;

use super::{count, seen};
use crate::conditions::problem;
use crate::objects::{Seen, Tenancy, Unseen};
use crate::report::{Line, Problem};
use crate::roles::{lacks_roles, messages};

pub const PART: &str = "networks";
pub const ADDRESSES: &str = "addresses";

pub fn line(tenancy: &Tenancy) -> Line {
    seen(PART, judge(tenancy))
}

fn judge(tenancy: &Tenancy) -> Result<Line, Unseen> {
    let networks = tenancy.networks.as_ref().map_err(Clone::clone)?;
    let problems: Vec<_> = networks
        .iter()
        .filter_map(|network| lacks(network, tenancy))
        .collect();
    let good = networks.len() - problems.len();
    Ok(Line::new(PART, count(good, networks.len(), "Ready"), problems))
}

fn lacks(network: &Network, tenancy: &Tenancy) -> Option<Problem> {
    let (name, status) = (network.name_any(), network.status.clone().unwrap_or_default());
    let bouncers = tenancy.bouncers.iter().flatten();
    let told = || messages(bouncers.filter(|bouncer| bouncer.spec.network == name));
    let numbers = status.bouncers.zip(status.working_bouncers);
    let own = problem("Network", &name, status.phase, &status.conditions);
    lacks_roles(&name, own, ("bouncers", "BouncersNotProvisioned"), numbers, told)
}

/// A network and its IPv4 addresses.
struct Usage {
    network: String,
    used: u64,
    capacity: u64,
}

impl Usage {
    fn of(network: &Network) -> Option<Self> {
        let status = network.status.as_ref()?;
        let capacity = status.capacity.filter(|capacity| *capacity > 0)?;
        Some(Self {
            network: network.name_any(),
            used: status.allocated?,
            capacity,
        })
    }

    /// As the operator's event `AddressesNearlyUsedUp` has it.
    fn is_nearly_used_up(&self) -> bool {
        self.used.saturating_mul(10) >= self.capacity.saturating_mul(9)
    }

    fn text(&self) -> String {
        format!("{} {} of {} used", self.network, self.used, self.capacity)
    }
}

/// Says which networks run out of IPv4 addresses, or which one has the fewest left in proportion.
pub fn addresses(networks: &Seen<Vec<Network>>) -> Line {
    let networks = match networks {
        Ok(networks) => networks,
        Err(unseen) => return Line::unseen(ADDRESSES, unseen),
    };
    let usages: Vec<Usage> = networks.iter().filter_map(Usage::of).collect();
    let nearly: Vec<&Usage> = usages.iter().filter(|usage| usage.is_nearly_used_up()).collect();
    if nearly.is_empty() {
        let fullest = usages
            .iter()
            .max_by_key(|usage| u128::from(usage.used) * 1_000_000 / u128::from(usage.capacity));
        let text = fullest.map_or_else(|| "none".to_owned(), |usage| format!("at most {}", usage.text()));
        return Line::new(ADDRESSES, text, Vec::new());
    }
    let texts: Vec<String> = nearly.iter().map(|usage| usage.text()).collect();
    let problem = |usage: &Usage| {
        let message = format!("{} of {} used", usage.used, usage.capacity);
        Problem::new(
            "Network",
            usage.network.as_str(),
            "AddressesNearlyUsedUp",
            message,
        )
    };
    let problems = nearly.into_iter().map(problem).collect();
    Line {
        // The reason is in no text: it says the same as the numbers.
        text: texts.join("; "),
        ..Line::new(ADDRESSES, "", problems)
    }
}

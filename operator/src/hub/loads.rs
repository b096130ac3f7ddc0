//! The packets that droplets' roles passed on, by their reports.

use std::collections::{BTreeMap, HashMap};

use thuban_api::identifiers::{NetworkId, Vni};

/// A bouncer's VPC and network, or a divider's VPC.
pub(super) type Of = (Vni, Option<NetworkId>);

/// The last report of each droplet.
#[derive(Debug, Default)]
pub(super) struct Loads {
    /// Packets a second, by droplet.
    of: HashMap<Of, BTreeMap<String, u64>>,
    /// What each droplet has reported of.
    on: HashMap<String, Vec<Of>>,
}

impl Loads {
    /// Replaces the report of a droplet.
    pub fn report(&mut self, droplet: &str, roles: impl Iterator<Item = (Of, u64)>) {
        self.forget(droplet);
        let mut reported = Vec::new();
        for (of, packets) in roles {
            let droplets = self.of.entry(of).or_default();
            if droplets.insert(droplet.to_owned(), packets).is_none() {
                reported.push(of);
            }
        }
        if !reported.is_empty() {
            self.on.insert(droplet.to_owned(), reported);
        }
    }

    /// Forgets the report of a droplet.
    pub fn forget(&mut self, droplet: &str) {
        for of in self.on.remove(droplet).into_iter().flatten() {
            if let Some(droplets) = self.of.get_mut(&of) {
                droplets.remove(droplet);
                if droplets.is_empty() {
                    self.of.remove(&of);
                }
            }
        }
    }

    /// Returns what all droplets reported together.
    pub fn of(&self, of: Of) -> u64 {
        let droplets = self.of.get(&of).into_iter();
        droplets.flat_map(BTreeMap::values).sum()
    }
}

#[cfg(test)]
mod tests {
    use thuban_rows::builders::{network_id, vni};

    use super::Loads;

    #[test]
    fn a_report_replaces_the_last_one_of_its_droplet_alone() {
        let mut loads = Loads::default();
        let (divider, bouncer) = ((vni(7), None), (vni(7), Some(network_id(1))));
        loads.report("a", [(divider, 5), (bouncer, 7), (divider, 6)].into_iter());
        loads.report("b", [(bouncer, 1)].into_iter());
        assert_eq!((loads.of(divider), loads.of(bouncer)), (6, 8));
        loads.report("a", [(bouncer, 2)].into_iter());
        assert_eq!((loads.of(divider), loads.of(bouncer)), (0, 3));
        loads.forget("a");
        loads.report("b", std::iter::empty());
        assert!(loads.of.is_empty() && loads.on.is_empty());
    }
}

//! Dividers and bouncers of the world: where they serve, and who is told of them.

use std::collections::{BTreeMap, BTreeSet};

use super::{Key, Owner, Role, RoleId, World};

impl World {
    pub fn set_divider(&mut self, name: &str, role: Option<Role>) {
        for parent in self.dividers.set(name, role) {
            self.touch_vpc(&parent);
        }
    }

    pub fn set_bouncer(&mut self, name: &str, role: Option<Role>) {
        for parent in self.bouncers.set(name, role) {
            self.touch_bouncers(&parent);
        }
    }

    /// Other droplets have the tables of the network's bouncers.
    fn touch_bouncers(&mut self, network: &str) {
        self.touch_network(network);
        let vpc = self.networks.get(network).map(|network| network.vpc.clone());
        if let Some(vpc) = vpc {
            self.touch_services(&vpc);
        }
    }

    /// The divider is ready at its new place: users may have it there.
    pub fn list_divider(&mut self, id: RoleId) {
        let parent = self.dividers.list(id);
        self.dirty.extend(parent.map(Owner::Vpc));
    }

    /// As [`Self::list_divider`].
    pub fn list_bouncer(&mut self, id: RoleId) {
        let parent = self.bouncers.list(id);
        self.dirty.extend(parent.map(Owner::Network));
    }

    /// The divider is going to leave: nobody counts on it any more, its users have it still.
    pub fn part_divider(&mut self, id: RoleId) {
        self.dividers.part(id);
    }

    /// Users are to forget the divider; its tables stay.
    pub fn leave_divider(&mut self, id: RoleId) {
        let parent = self.dividers.leave(id);
        self.dirty.extend(parent.map(Owner::Vpc));
    }

    /// A divider that left serves on: its tables come back, users are told of it by [`Self::list_divider`].
    pub fn take_divider_back(&mut self, id: RoleId) {
        if let Some(parent) = self.dividers.take_back(id) {
            self.touch_vpc(&parent);
        }
    }

    /// Whether users are told of the divider where it should be.
    pub fn is_divider_listed(&self, name: &str) -> bool {
        self.dividers.is_listed(name)
    }

    /// The divider's tables go.
    pub fn forget_divider(&mut self, id: RoleId) {
        if let Some(parent) = self.dividers.forget(id) {
            self.touch_vpc(&parent);
        }
    }

    /// Whether users were told to forget the divider.
    pub fn has_divider_left(&self, name: &str) -> bool {
        self.dividers.has_left(name)
    }

    /// Whether users have another divider of the same parent, one that stays.
    pub fn has_other_divider(&self, name: &str) -> bool {
        self.dividers.has_other(name)
    }

    /// As [`Self::part_divider`].
    pub fn part_bouncer(&mut self, id: RoleId) {
        self.bouncers.part(id);
    }

    /// As [`Self::leave_divider`].
    pub fn leave_bouncer(&mut self, id: RoleId) {
        let parent = self.bouncers.leave(id);
        self.dirty.extend(parent.map(Owner::Network));
    }

    /// As [`Self::take_divider_back`].
    pub fn take_bouncer_back(&mut self, id: RoleId) {
        if let Some(parent) = self.bouncers.take_back(id) {
            self.touch_bouncers(&parent);
        }
    }

    /// As [`Self::is_divider_listed`].
    pub fn is_bouncer_listed(&self, name: &str) -> bool {
        self.bouncers.is_listed(name)
    }

    /// The bouncer's tables go.
    pub fn forget_bouncer(&mut self, id: RoleId) {
        if let Some(parent) = self.bouncers.forget(id) {
            self.touch_bouncers(&parent);
        }
    }

    /// As [`Self::has_divider_left`].
    pub fn has_bouncer_left(&self, name: &str) -> bool {
        self.bouncers.has_left(name)
    }

    /// As [`Self::has_other_divider`].
    pub fn has_other_bouncer(&self, name: &str) -> bool {
        self.bouncers.has_other(name)
    }

    /// The tables of the VPC's divider on a droplet.
    pub fn divider_tables(&self, vpc: &str, droplet: &str) -> Vec<(String, Key)> {
        let networks = self.networks.iter().filter(|(_, network)| network.vpc == vpc);
        let owners = networks.map(|(name, _)| Owner::Network(name.clone()));
        let owners = owners.chain([Owner::Vpc(vpc.to_owned())]);
        let keys = owners.flat_map(|owner| self.keys_of(&owner));
        keys.filter(|(at, _)| at == droplet).cloned().collect()
    }

    /// The tables of the network's bouncer on a droplet: a row for each endpoint, and one for each address of the VPC's
    /// services.
    pub fn bouncer_tables(&self, network: &str, droplet: &str) -> Vec<(String, Key)> {
        let members = self.members.get(network).into_iter().flat_map(BTreeMap::values);
        let owners = members.flatten().cloned().map(Owner::Endpoint);
        let parent = self.networks.get(network).map(|network| network.vpc.clone());
        let owners = owners
            .chain([Owner::Network(network.to_owned())])
            .chain(parent.map(Owner::Vpc));
        let services = self.networks.get(network).map(|network| network.vpc.as_str());
        let services = services.into_iter().flat_map(|vpc| self.services_of_vpc(vpc));
        let owners = owners.chain(services.cloned().map(Owner::Service));
        let keys = owners.flat_map(|owner| self.keys_of(&owner));
        keys.filter(|(at, key)| at == droplet && !matches!(key, Key::Local(..) | Key::Direct(..)))
            .cloned()
            .collect()
    }

    /// The rows that tell who the VPC's dividers are.
    pub fn divider_lists(&self, vpc: &str) -> Vec<(String, Key)> {
        self.keys_of(&Owner::Vpc(vpc.to_owned())).cloned().collect()
    }

    /// The rows that tell who the network's bouncers are.
    pub fn bouncer_lists(&self, network: &str) -> Vec<(String, Key)> {
        self.keys_of(&Owner::Network(network.to_owned()))
            .cloned()
            .collect()
    }

    /// Where users are told that the VPC's dividers are.
    pub fn divider_members(&self, vpc: &str) -> BTreeSet<&str> {
        self.dividers.members(vpc)
    }

    /// Where users are told that the network's bouncers are.
    pub fn bouncer_members(&self, network: &str) -> BTreeSet<&str> {
        self.bouncers.members(network)
    }
}

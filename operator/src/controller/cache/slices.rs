//! Indexes of the slices of each Service and of the Services that name an address. The watches keep them, so that a
//! change wakes only the Services that it concerns.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use crate::controller::cache::index::set_member;

/// (namespace, name).
type Name = (String, String);

/// The content of a slice when it was last seen.
#[derive(Debug)]
struct Known {
    service: String,
    addresses: Box<[IpAddr]>,
}

#[derive(Debug, Default)]
struct Sets {
    known: HashMap<Name, Known>,
    /// Names of slices by Service.
    of: HashMap<Name, BTreeSet<String>>,
    /// Services that name an address, by namespace, each with the slice that names it.
    naming: HashMap<(String, IpAddr), BTreeSet<(String, String)>>,
    /// Names of Services by namespace.
    services: HashMap<String, BTreeSet<String>>,
}

impl Sets {
    fn note(&mut self, (namespace, slice): &Name, known: &Known, is_there: bool) {
        let service = (namespace.clone(), known.service.clone());
        set_member(&mut self.of, service, slice.clone(), is_there);
        for address in &known.addresses {
            let key = (namespace.clone(), *address);
            set_member(
                &mut self.naming,
                key,
                (known.service.clone(), slice.clone()),
                is_there,
            );
        }
    }
}

#[derive(Debug, Default)]
pub struct Slices(Mutex<Sets>);

impl Slices {
    fn sets<T>(&self, work: impl FnOnce(&mut Sets) -> T) -> T {
        // No code under the lock panics half-way through a change.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes the content of a slice and the Service that it is of; none: the slice is gone. Returns the Services that
    /// the slice was of and is of.
    pub fn set(
        &self,
        namespace: &str,
        slice: &str,
        said: Option<(String, Box<[IpAddr]>)>,
    ) -> BTreeSet<String> {
        self.sets(|sets| {
            let name = (namespace.to_owned(), slice.to_owned());
            let mut concerned = BTreeSet::new();
            if let Some(old) = sets.known.remove(&name) {
                sets.note(&name, &old, false);
                concerned.insert(old.service);
            }
            if let Some((service, addresses)) = said {
                let known = Known { service, addresses };
                sets.note(&name, &known, true);
                concerned.insert(known.service.clone());
                sets.known.insert(name, known);
            }
            concerned
        })
    }

    /// Returns the names of the slices of a Service.
    pub fn of(&self, namespace: &str, service: &str) -> Vec<String> {
        let key = (namespace.to_owned(), service.to_owned());
        self.sets(|sets| sets.of.get(&key).into_iter().flatten().cloned().collect())
    }

    /// Returns the Services of the namespace whose slices name an address.
    pub fn naming(&self, namespace: &str, address: IpAddr) -> BTreeSet<String> {
        let key = (namespace.to_owned(), address);
        self.sets(|sets| {
            let naming = sets.naming.get(&key).into_iter().flatten();
            naming.map(|(service, _)| service.clone()).collect()
        })
    }

    pub fn service(&self, namespace: &str, name: &str, is_there: bool) {
        self.sets(|sets| {
            set_member(
                &mut sets.services,
                namespace.to_owned(),
                name.to_owned(),
                is_there,
            );
        });
    }

    /// Returns the names of the Services of a namespace.
    pub fn services_of(&self, namespace: &str) -> Vec<String> {
        self.sets(|sets| {
            let services = sets.services.get(namespace).into_iter().flatten();
            services.cloned().collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::Slices;

    #[test]
    fn an_address_leads_to_the_services_that_name_it_now() {
        let slices = Slices::default();
        let set = |slice: &str, service: &str, addresses: &[&str]| {
            let addresses = addresses.iter().map(|address| address.parse().unwrap());
            let concerned = slices.set("red", slice, Some((service.into(), addresses.collect())));
            concerned.into_iter().collect::<Vec<_>>()
        };
        let naming = |address: &str| {
            let address: IpAddr = address.parse().unwrap();
            slices.naming("red", address).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(set("web-1", "web", &["10.0.1.2", "10.0.1.3"]), ["web"]);
        assert_eq!(set("web-2", "web", &["10.0.1.3"]), ["web"]);
        assert_eq!(set("all-1", "all", &["10.0.1.3"]), ["all"]);
        assert_eq!(naming("10.0.1.3"), ["all", "web"]);
        assert_eq!(slices.of("red", "web"), ["web-1", "web-2"]);
        assert!(slices.naming("blue", [10, 0, 1, 3].into()).is_empty());
        // The slice names fewer addresses, passes to another Service, and goes.
        set("web-1", "web", &["10.0.1.2"]);
        assert_eq!(naming("10.0.1.3"), ["all", "web"], "by its other slice");
        assert_eq!(
            set("web-2", "all", &["10.0.1.3"]),
            ["all", "web"],
            "both are woken"
        );
        assert_eq!(naming("10.0.1.3"), ["all"]);
        assert_eq!(slices.set("red", "web-1", None).len(), 1);
        assert!(naming("10.0.1.2").is_empty() && slices.of("red", "web").is_empty());
    }
}

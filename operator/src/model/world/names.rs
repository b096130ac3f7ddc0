//! Sets of endpoints that are small and many: a network has few endpoints on a droplet, an address few holders.

use super::EndpointName;

/// Sorted, with no room to spare.
#[derive(Debug, Default)]
pub(super) struct Names(Vec<EndpointName>);

impl Names {
    pub fn insert(&mut self, name: &EndpointName) {
        if let Err(place) = self.0.binary_search(name) {
            self.0.reserve_exact(1);
            self.0.insert(place, name.clone());
        }
    }

    pub fn remove(&mut self, name: &EndpointName) {
        if let Ok(place) = self.0.binary_search(name) {
            self.0.remove(place);
        }
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'a> IntoIterator for &'a Names {
    type Item = &'a EndpointName;
    type IntoIter = std::slice::Iter<'a, EndpointName>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

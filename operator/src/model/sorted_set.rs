//! Small sets, of which there are many: a network has few endpoints on a droplet, an address few holders, an Endpoint
//! few claims.

/// A sorted list without spare capacity.
#[derive(Debug)]
pub struct SortedSet<T>(Vec<T>);

impl<T> Default for SortedSet<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Ord + Clone> SortedSet<T> {
    pub fn insert(&mut self, item: &T) {
        if let Err(place) = self.0.binary_search(item) {
            self.0.reserve_exact(1);
            self.0.insert(place, item.clone());
        }
    }

    pub fn remove(&mut self, item: &T) {
        if let Ok(place) = self.0.binary_search(item) {
            self.0.remove(place);
        }
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }
}

impl<'a, T: Ord + Clone> IntoIterator for &'a SortedSet<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

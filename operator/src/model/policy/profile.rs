//! What a pod has that policies see: its labels and the names of its ports.

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use thuban_rows::NamedPort;

use super::Labels;

/// What policies see of a pod, apart from where it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Profile {
    pub labels: Labels,
    pub ports: BTreeSet<NamedPort>,
}

/// All profiles in use: the pods of a workload share one. A cluster has tens of thousands of pods.
static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Known {
    profiles: HashSet<Arc<Profile>>,
    /// How many there may be before those that nobody has are dropped.
    most: usize,
}

const LEAST: usize = 1024;

impl Profile {
    /// Returns the one copy of the profile.
    pub fn shared(self) -> Arc<Self> {
        let known = &mut *KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(profile) = known.profiles.get(&self) {
            return Arc::clone(profile);
        }
        if known.profiles.len() >= known.most {
            known.profiles.retain(|profile| Arc::strong_count(profile) > 1);
            known.most = LEAST.max(2 * known.profiles.len());
        }
        let profile = Arc::new(self);
        known.profiles.insert(Arc::clone(&profile));
        profile
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Profile;

    #[test]
    fn equal_profiles_are_one() {
        let profile = |app: &str| {
            let labels = [("app".to_owned(), app.to_owned())].into();
            Profile {
                labels,
                ..Profile::default()
            }
            .shared()
        };
        let web = profile("web");
        assert!(Arc::ptr_eq(&web, &profile("web")) && !Arc::ptr_eq(&web, &profile("db")));
        for number in 0..3000 {
            profile(&number.to_string());
        }
        assert!(Arc::ptr_eq(&web, &profile("web")), "it is in use");
    }
}

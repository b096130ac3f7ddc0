//! `version`: of the plugin, of the leading operator, and of transitd on droplets.

use std::collections::BTreeMap;

use serde::Serialize;
use thuban_api::Droplet;

use crate::objects::{ControlPlane, Seen};
use crate::report::{PLUGIN, Verdict};

/// Versions of Thuban's parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Versions {
    pub verdict: Verdict,
    pub plugin: &'static str,
    pub operator: Option<String>,
    /// The number of droplets of each version.
    pub droplets: BTreeMap<String, usize>,
    /// What could not be looked at.
    pub unseen: Vec<String>,
}

/// Finds the versions. That they differ is what `check` judges.
pub fn versions(control_plane: &ControlPlane, droplets: &Seen<Vec<Droplet>>) -> Versions {
    let lease = control_plane.lease.as_ref().err();
    let unseen = lease.into_iter().chain(droplets.as_ref().err());
    let unseen: Vec<String> = unseen.map(ToString::to_string).collect();
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    for droplet in droplets.iter().flatten() {
        *numbers.entry(droplet.spec.program_version.clone()).or_default() += 1;
    }
    Versions {
        verdict: Verdict::from_findings(false, !unseen.is_empty()),
        plugin: PLUGIN,
        operator: control_plane.version().map(str::to_owned),
        droplets: numbers,
        unseen,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::versions;
    use crate::report::{PLUGIN, Verdict};
    use crate::testing;

    #[test]
    fn droplets_are_counted_by_their_version() {
        let mut objects = testing::status();
        let all = versions(&objects.control_plane, &objects.droplets);
        assert_eq!(all.droplets, BTreeMap::from([(PLUGIN.to_owned(), 2)]));
        assert_eq!(all.operator.as_deref(), Some(PLUGIN));
        assert_eq!(all.verdict, Verdict::Good);
        objects.droplets.as_mut().unwrap()[0].spec.program_version = "0.0.1".to_owned();
        let all = versions(&objects.control_plane, &objects.droplets);
        assert_eq!(all.droplets.len(), 2);
    }
}

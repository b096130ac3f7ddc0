//! The pods that ask the cluster's DNS by this node's view: the VPC of each address, and the names that the VPC sees.
//!
//! DNS reads what was published last, and never waits for the node's state. The published source is kept in a file, so
//! that a transitd that starts answers at once, as its predecessor did.
//!
//! Invariant: before anybody is told that an attachment is gone, or that names are out of sight, both the published
//! source and the file say so.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use serde::{Deserialize, Serialize};
use thuban_rows::{ServiceName, Visible};

use crate::attachments::store::Owner;
use crate::boot_file::BootFile;
use crate::dns::{Asker, Domain, View, Views};

/// The version of the file. A file of another version is not believed.
const VERSION: Version = Version::First;

/// The VPC of each address, and the names that each VPC sees.
#[derive(Debug, Default)]
pub struct Source {
    pub vpcs: HashMap<IpAddr, u32>,
    pub visible: HashMap<u32, Arc<Visible>>,
}

#[derive(Debug)]
pub struct Askers {
    domain: Domain,
    /// The published source. The lock is held for a look or a swap alone.
    published: RwLock<Arc<Published>>,
    file: BootFile<Content>,
}

#[derive(Debug, Default)]
struct Published {
    vpcs: HashMap<IpAddr, u32>,
    views: HashMap<u32, Made>,
}

/// A view, and the names that it was made of.
type Made = (Arc<Visible>, Arc<View>);

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Version {
    First,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    version: Version,
    askers: Vec<(IpAddr, u32)>,
    views: Vec<(u32, Names)>,
}

/// [`Visible`], Services as namespace and name.
#[derive(Debug, Serialize, Deserialize)]
struct Names {
    namespaces: BTreeSet<String>,
    services: BTreeSet<(String, String)>,
    hidden: BTreeSet<(String, String)>,
}

impl Askers {
    /// Returns the pods and names that an earlier transitd of this boot kept.
    pub fn open(path: PathBuf, owner: Owner, domain: Domain) -> Self {
        let file: BootFile<Content> = BootFile::new(path, owner);
        let kept = file.load().map(Source::from).unwrap_or_default();
        let askers = Self {
            domain,
            published: RwLock::default(),
            file,
        };
        askers.publish(kept);
        askers
    }

    fn published(&self) -> Arc<Published> {
        let published = self.published.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&published)
    }

    /// Returns the names that each VPC sees.
    pub fn visible(&self) -> HashMap<u32, Arc<Visible>> {
        let published = self.published();
        let views = published.views.iter();
        views
            .map(|(vpc, (visible, _))| (*vpc, Arc::clone(visible)))
            .collect()
    }

    /// Publishes `source` for DNS, from now on. Callers hold the lock of the state that `source` is made of, so that a
    /// later source never comes first.
    pub fn publish(&self, source: Source) {
        let before = self.published();
        let views = source.visible.into_iter().map(|(vpc, visible)| {
            let same = before
                .views
                .get(&vpc)
                .filter(|(of, _)| Arc::ptr_eq(of, &visible) || *of == visible);
            let view = same.map_or_else(
                || Arc::new(View::new(self.domain.clone(), (*visible).clone())),
                |(_, view)| Arc::clone(view),
            );
            (vpc, (visible, view))
        });
        let published = Published {
            vpcs: source.vpcs,
            views: views.collect(),
        };
        *self.published.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(published);
    }

    /// Keeps what is published in the file.
    pub fn keep(&self) {
        self.file.keep(|| Content::from(&*self.published()));
    }
}

impl Views for Askers {
    fn of(&self, source: IpAddr) -> Option<Asker> {
        let published = self.published();
        let vpc = *published.vpcs.get(&source)?;
        let (_, view) = published.views.get(&vpc)?;
        let view = Arc::clone(view);
        Some(Asker { vpc, view })
    }
}

impl From<&Published> for Content {
    fn from(published: &Published) -> Self {
        let mut askers: Vec<_> = published.vpcs.iter().map(|(of, vpc)| (*of, *vpc)).collect();
        askers.sort_unstable();
        let views = published.views.iter();
        let mut views: Vec<_> = views
            .map(|(vpc, (visible, _))| (*vpc, Names::from(&**visible)))
            .collect();
        views.sort_unstable_by_key(|(vpc, _)| *vpc);
        Self {
            version: VERSION,
            askers,
            views,
        }
    }
}

impl From<Content> for Source {
    fn from(content: Content) -> Self {
        let Content {
            version: Version::First,
            askers,
            views,
        } = content;
        let views = views.into_iter();
        Self {
            vpcs: askers.into_iter().collect(),
            visible: views.map(|(vpc, names)| (vpc, Arc::new(names.into()))).collect(),
        }
    }
}

impl From<&Visible> for Names {
    fn from(visible: &Visible) -> Self {
        let pairs = |services: &BTreeSet<ServiceName>| {
            let services = services.iter();
            services
                .map(|service| (service.namespace.clone(), service.name.clone()))
                .collect()
        };
        Self {
            namespaces: visible.namespaces.clone(),
            services: pairs(&visible.services),
            hidden: pairs(&visible.hidden),
        }
    }
}

impl From<Names> for Visible {
    fn from(names: Names) -> Self {
        let services = |pairs: BTreeSet<(String, String)>| {
            let pairs = pairs.into_iter();
            pairs
                .map(|(namespace, name)| ServiceName::new(namespace, name))
                .collect()
        };
        Self {
            namespaces: names.namespaces,
            services: services(names.services),
            hidden: services(names.hidden),
        }
    }
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::Name;

    use super::*;

    fn owner(boot_id: &str) -> Owner {
        let (node, boot_id) = ("a".into(), boot_id.into());
        Owner { node, boot_id }
    }

    fn open(path: &std::path::Path, boot_id: &str) -> Askers {
        let domain = Domain::parse(crate::dns::DEFAULT_DOMAIN).unwrap();
        Askers::open(path.to_owned(), owner(boot_id), domain)
    }

    fn source(addresses: &[(&str, u32)]) -> Source {
        let visible = Visible {
            namespaces: ["red".into()].into(),
            services: [ServiceName::new("blue", "shared")].into(),
            hidden: [ServiceName::new("red", "moved")].into(),
        };
        let vpcs = addresses.iter();
        Source {
            vpcs: vpcs.map(|(of, vpc)| (of.parse().unwrap(), *vpc)).collect(),
            visible: [(7, Arc::new(visible))].into(),
        }
    }

    fn sees(askers: &Askers, address: &str, name: &str) -> Option<bool> {
        let asker = askers.of(address.parse().unwrap())?;
        let name = Name::from_ascii(format!("{name}.svc.cluster.local.")).unwrap();
        Some(asker.view.shows(&name))
    }

    #[test]
    fn the_next_transitd_of_this_boot_knows_who_sees_what() {
        let path = std::env::temp_dir().join(format!("thuban-askers-{}", std::process::id()));
        let askers = open(&path, "boot");
        askers.publish(source(&[("10.0.1.5", 7), ("10.0.1.6", 8)]));
        askers.keep();
        let next = open(&path, "boot");
        for askers in [&askers, &next] {
            let shown = ["web.red", "shared.blue", "moved.red", "web.green"];
            assert_eq!(
                shown.map(|name| sees(askers, "10.0.1.5", name)),
                [Some(true), Some(true), Some(false), Some(false)]
            );
            assert_eq!(sees(askers, "10.0.1.6", "web.red"), None, "a VPC without a view");
            assert_eq!(sees(askers, "10.0.1.7", "web.red"), None);
        }
        next.publish(source(&[]));
        next.keep();
        assert_eq!(
            sees(&open(&path, "boot"), "10.0.1.5", "web.red"),
            None,
            "it is gone"
        );
        next.publish(source(&[("10.0.1.5", 7)]));
        next.keep();
        let text = std::fs::read_to_string(&path).unwrap();
        for (boot_id, content) in [
            ("next", text.clone()),
            ("boot", text.replace("10.0.1.5", "10.0.1.6")),
            ("boot", text[..text.len() / 2].to_owned()),
        ] {
            std::fs::write(&path, &content).unwrap();
            assert_eq!(sees(&open(&path, boot_id), "10.0.1.5", "web.red"), None);
            assert!(!path.exists(), "{content}");
        }
    }

    #[test]
    fn a_view_is_made_once_for_what_a_vpc_sees() {
        let path = std::env::temp_dir().join(format!("thuban-views-{}", std::process::id()));
        let askers = open(&path, "boot");
        let view = || askers.of("10.0.1.5".parse().unwrap()).unwrap().view;
        askers.publish(source(&[("10.0.1.5", 7)]));
        let first = view();
        askers.publish(source(&[("10.0.1.5", 7), ("10.0.1.6", 7)]));
        assert!(Arc::ptr_eq(&first, &view()));
    }
}

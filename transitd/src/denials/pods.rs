//! The names of this node's pods, from the daemon's files.

use std::collections::HashMap;
use std::path::Path;

use thuban_common::policy::{DenialRecord, in_vpc};
use thuban_common::tables::EndpointKey;

use crate::attachments::store::{self, StoreError};

/// The pods by their addresses, and by the host's ends of their interfaces.
#[derive(Debug, Default)]
pub struct Pods {
    by_address: HashMap<EndpointKey, String>,
    by_interface: HashMap<u32, String>,
}

impl Pods {
    pub fn read(state_dir: &Path) -> Result<Self, StoreError> {
        let mut pods = Self::default();
        for attachment in store::observe(&state_dir.join("attachments"))? {
            if attachment.is_host() {
                continue;
            }
            let pod = attachment.pod();
            pods.by_address
                .extend(attachment.keys().map(|key| (key, pod.clone())));
            pods.by_interface.insert(attachment.host_ifindex, pod);
        }
        Ok(pods)
    }

    pub fn has(&self, pod: &str) -> bool {
        self.by_interface.values().any(|known| known == pod)
    }

    /// Whether the packet is from the pod or to it.
    pub fn is_of(&self, pod: &str, record: &DenialRecord) -> bool {
        let at = self.by_interface.get(&record.key.interface);
        let ends = self.names(record);
        at.into_iter()
            .chain(ends.iter().flatten())
            .any(|known| known == pod)
    }

    /// Returns the pods that the packet is from and to, those of them that are on this node.
    pub fn names(&self, record: &DenialRecord) -> [Option<String>; 2] {
        let (vni, _) = in_vpc(record.key.set);
        [record.entry.source, record.entry.destination]
            .map(|address| self.by_address.get(&EndpointKey { vni, address }).cloned())
    }
}

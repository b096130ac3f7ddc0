//! ptp and bridge of containernetworking-plugins, each with host-local, each on a node of its own.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::{Parts, contestant::Contestant};
use crate::{
    bench::{
        node::Folder,
        plugin::{Plugin, Pod},
    },
    rig::namespace::Namespace,
};

pub struct Other {
    name: &'static str,
    plugin: Plugin,
    node: Namespace,
    /// The folder of addresses that were given out.
    _folder: Folder,
}

impl Other {
    pub fn ptp(parts: &Parts) -> Result<Self> {
        Self::new("ptp", parts, &json!({}))
    }

    pub fn bridge(parts: &Parts) -> Result<Self> {
        Self::new("bridge", parts, &json!({"bridge": "cni0", "isGateway": true}))
    }

    /// Makes a contestant without masquerading, as with Thuban: iptables would make it slower.
    fn new(name: &'static str, parts: &Parts, more: &serde_json::Value) -> Result<Self> {
        let folder = Folder::new(name)?;
        let mut configuration = json!({
            "cniVersion": "1.0.0", "name": format!("bench-{name}"), "type": name, "mtu": 1450,
            "ipam": {
                "type": "host-local", "subnet": "10.1.0.0/16", "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": folder.path(),
            },
        });
        if let (Some(target), Some(more)) = (configuration.as_object_mut(), more.as_object()) {
            target.extend(more.clone());
        }
        Ok(Self {
            name,
            plugin: Plugin::new(&parts.others.join(name), &configuration),
            node: Namespace::new(name)?,
            _folder: folder,
        })
    }
}

impl Contestant for Other {
    fn name(&self) -> &'static str {
        self.name
    }

    fn node(&self) -> &Namespace {
        &self.node
    }

    fn add_here(&self, pod: &Pod) -> Result<Duration> {
        self.plugin.call("ADD", pod)
    }

    fn del_here(&self, pod: &Pod) -> Result<Duration> {
        self.plugin.call("DEL", pod)
    }
}

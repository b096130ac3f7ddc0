//! Thuban: the plugin and transitd.
//!
//! The rows of all pods exist before, as on a node whose operator is quicker than its runtime. So only the plugin and
//! transitd are measured.

use std::{net::Ipv4Addr, time::Duration};

use anyhow::Result;
use thuban_proto::transit::{DropletRow, LocalRow, NetworkRow, VpcRow, row::Row};

use super::{Parts, contestant::Contestant};
use crate::{
    bench::{
        plugin::Pod,
        transitd::{NODE, Transitd},
    },
    rig::namespace::Namespace,
};

const VNI: u32 = 7;
const NETWORK: u32 = 0x0a00_0000;

pub struct Thuban {
    transitd: Transitd,
}

impl Thuban {
    /// Brings up transitd with rows for this many pods.
    pub fn up(parts: &Parts, pods: usize) -> Result<Self> {
        let transitd = Transitd::up(&parts.own, rows(pods), &[])?;
        Ok(Self { transitd })
    }

    pub fn memory_mib(&self) -> Result<f64> {
        self.transitd.memory_mib()
    }
}

impl Contestant for Thuban {
    fn name(&self) -> &'static str {
        "thuban"
    }

    fn node(&self) -> &Namespace {
        &self.transitd.node
    }

    fn add_here(&self, pod: &Pod) -> Result<Duration> {
        self.transitd.plugin.call("ADD", pod)
    }

    fn del_here(&self, pod: &Pod) -> Result<Duration> {
        self.transitd.plugin.call("DEL", pod)
    }
}

/// Returns one VPC and one network, with all roles on this node.
fn rows(pods: usize) -> Vec<Row> {
    let mut rows = vec![
        Row::Droplet(DropletRow {
            address: NODE.octets().to_vec(),
            ..DropletRow::default()
        }),
        Row::Vpc(VpcRow {
            vni: VNI,
            cidrs: vec!["10.0.0.0/16".into()],
            dividers: vec![NODE.octets().to_vec()],
            divider_here: true,
            ..VpcRow::default()
        }),
        Row::Network(NetworkRow {
            vni: VNI,
            network: NETWORK,
            cidrs: vec!["10.0.0.0/16".into()],
            bouncers: vec![NODE.octets().to_vec()],
            bouncer_here: true,
            ..NetworkRow::default()
        }),
    ];
    rows.extend((0..pods).map(|number| {
        let [high, low] = (number as u16 + 2).to_be_bytes();
        let uid = format!("bench-{number}");
        Row::Local(LocalRow {
            vni: VNI,
            address: Ipv4Addr::new(10, 0, high, low).to_ipv6_mapped().octets().to_vec(),
            network: NETWORK,
            prefix_length: 16,
            gateway: "10.0.0.1".into(),
            mac: vec![2, 7, 10, 0, high, low],
            pod_uid: uid.clone(),
            pod_namespace: "bench".into(),
            pod_name: uid,
            vpc_name: "bench".into(),
            network_name: "bench".into(),
            ready: true,
            ..LocalRow::default()
        })
    }));
    rows
}

//! Nodes without a Droplet, and Droplets without a Node.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use thuban_api::Droplet;

use super::seen;
use crate::objects::{Seen, Unseen};
use crate::report::{CHECK, Line, Problem};

const PART: &str = "nodes";

pub fn line(nodes: &Seen<Vec<Node>>, droplets: &Seen<Vec<Droplet>>) -> Line {
    seen(PART, judge(nodes, droplets))
}

fn judge(nodes: &Seen<Vec<Node>>, droplets: &Seen<Vec<Droplet>>) -> Result<Line, Unseen> {
    let nodes = names(nodes.as_ref().map_err(Clone::clone)?);
    let droplets = names(droplets.as_ref().map_err(Clone::clone)?);
    let lacking = nodes.difference(&droplets);
    let lacking = lacking.map(|name| Problem::new(CHECK, name, "NodeWithoutDroplet", ""));
    let left = droplets.difference(&nodes);
    let left = left.map(|name| Problem::new(CHECK, name, "DropletWithoutNode", ""));
    let summary = format!("{} nodes, {} droplets", nodes.len(), droplets.len());
    Ok(Line::new(PART, summary, lacking.chain(left).collect()))
}

fn names<K: ResourceExt>(objects: &[K]) -> BTreeSet<String> {
    objects.iter().map(ResourceExt::name_any).collect()
}

//! Ranges of VPCs and networks against addresses of nodes, and against ranges of pods and Services. The operator
//! refuses most of these at once; others came later, or are in no value of the installation.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use thuban_api::DEFAULT_NAME;
use thuban_api::cidr::Cidr;

use super::seen;
use crate::objects::{CheckObjects, Unseen};
use crate::report::{CHECK, Line, Problem};

/// A range that a VPC or network has or wants.
struct Range {
    /// The object's kind and name.
    object: String,
    vpc: String,
    cidr: Cidr,
}

/// Makes a line for each list that ranges are compared with.
pub fn lines(objects: &CheckObjects) -> [Line; 2] {
    [
        seen("node ranges", with_nodes(objects)),
        seen("Service ranges", with_services(objects)),
    ]
}

fn with_nodes(objects: &CheckObjects) -> Result<Line, Unseen> {
    let ranges = ranges(objects)?;
    let nodes = objects.surroundings.nodes.as_ref().map_err(Clone::clone)?;
    let mut problems = Vec::new();
    for range in &ranges {
        for node in nodes {
            problems.extend(touched(range, node));
        }
    }
    let summary = format!("{} ranges, {} nodes", ranges.len(), nodes.len());
    Ok(Line::new("node ranges", summary, problems))
}

/// Returns what of a node a range touches.
fn touched(range: &Range, node: &Node) -> Option<Problem> {
    let (object, name) = (range.object.as_str(), node.name_any());
    if let Some(address) = addresses(node).find(|address| range.cidr.contains_address(*address)) {
        let message = format!("{} has the address {address} of node {name}", range.cidr);
        return Some(Problem::new(CHECK, object, "RangeHasNode", message));
    }
    // The VPC `default` is usually made of the ranges that nodes have for pods.
    let spec = node.spec.as_ref().filter(|_| range.vpc != DEFAULT_NAME)?;
    let mut of_pods = spec
        .pod_cidrs
        .iter()
        .flatten()
        .filter_map(|cidr| cidr.parse::<Cidr>().ok());
    let other = of_pods.find(|other| other.overlaps(range.cidr))?;
    let message = format!("{} touches {other} of node {name}", range.cidr);
    Some(Problem::new(CHECK, object, "RangeTouchesPodRange", message))
}

fn addresses(node: &Node) -> impl Iterator<Item = IpAddr> {
    let addresses = node.status.iter().flat_map(|status| &status.addresses).flatten();
    addresses
        .filter(|address| address.type_ == "InternalIP")
        .filter_map(|address| address.address.parse().ok())
}

fn with_services(objects: &CheckObjects) -> Result<Line, Unseen> {
    let ranges = ranges(objects)?;
    let service_cidrs = match &objects.surroundings.service_cidrs {
        Ok(service_cidrs) => service_cidrs,
        // An API server before 1.33: the operator knows the ranges by THUBAN_SERVICE_CIDRS alone.
        Err(Unseen::NotInstalled(_)) => {
            return Ok(Line::new(
                "Service ranges",
                "the API server has no ServiceCIDRs",
                Vec::new(),
            ));
        }
        Err(unseen) => return Err(unseen.clone()),
    };
    let mut problems = Vec::new();
    for service_cidr in service_cidrs {
        let cidrs = service_cidr.spec.iter().flat_map(|spec| &spec.cidrs).flatten();
        for other in cidrs.filter_map(|cidr| cidr.parse::<Cidr>().ok()) {
            for range in ranges.iter().filter(|range| range.cidr.overlaps(other)) {
                let name = service_cidr.name_any();
                let message = format!("{} touches {other} of ServiceCIDR {name}", range.cidr);
                problems.push(Problem::new(
                    CHECK,
                    range.object.as_str(),
                    "RangeTouchesServices",
                    message,
                ));
            }
        }
    }
    let summary = format!("{} ranges, {} ServiceCIDRs", ranges.len(), service_cidrs.len());
    Ok(Line::new("Service ranges", summary, problems))
}

/// Returns all ranges of VPCs, in force or not, and those of networks that are in no range of their VPC.
fn ranges(objects: &CheckObjects) -> Result<Vec<Range>, Unseen> {
    let vpcs = objects.vpcs.as_ref().map_err(Clone::clone)?;
    let networks = objects.networks.as_ref().map_err(Clone::clone)?;
    let mut ranges = Vec::new();
    for vpc in vpcs {
        let name = vpc.name_any();
        let in_force = vpc.status.iter().flat_map(|status| &status.cidrs);
        for cidr in parsed(vpc.spec.cidrs.iter().chain(in_force)) {
            ranges.push(Range {
                object: format!("Vpc {name}"),
                vpc: name.clone(),
                cidr,
            });
        }
    }
    for network in networks {
        let vpc = network.spec.vpc.as_str();
        let in_force = network.status.iter().flat_map(|status| &status.cidrs);
        for cidr in parsed(network.spec.cidrs.iter().chain(in_force)) {
            let is_covered = |range: &Range| range.vpc == vpc && range.cidr.contains(cidr);
            if !ranges.iter().any(is_covered) {
                ranges.push(Range {
                    object: format!("Network {}", network.name_any()),
                    vpc: vpc.to_owned(),
                    cidr,
                });
            }
        }
    }
    Ok(ranges)
}

/// Returns each range once, without those that can't be read.
fn parsed<'a>(cidrs: impl Iterator<Item = &'a String>) -> BTreeSet<Cidr> {
    cidrs.filter_map(|cidr| cidr.parse().ok()).collect()
}

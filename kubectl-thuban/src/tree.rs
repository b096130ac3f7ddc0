//! `tree`: VPCs with what is in them. VPCs and networks that the user may not list are known by their endpoints.

use std::collections::BTreeSet;

use kube::ResourceExt;
use serde::Serialize;
use thuban_api::{EndpointType, Network, Phase, Vpc};

use crate::conditions::lacking;
use crate::endpoints::{Row, State};
use crate::objects::{Seen, Tenancy};
use crate::report::Verdict;
use crate::roles::Role;

/// All VPCs, or one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tree {
    pub verdict: Verdict,
    pub vpcs: Vec<VpcBranch>,
    /// What could not be looked at.
    pub unseen: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VpcBranch {
    pub name: String,
    pub vni: Option<u32>,
    /// The ranges in force.
    pub ranges: Vec<String>,
    /// Absent if the user may not list VPCs, or there is none of this name.
    pub phase: Option<Phase>,
    pub reason: Option<String>,
    /// `spec.sharedServices`, as it is written.
    pub shared_services: Option<Vec<String>>,
    pub dividers: Vec<RoleLeaf>,
    pub networks: Vec<NetworkBranch>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkBranch {
    pub name: String,
    pub ranges: Vec<String>,
    pub phase: Option<Phase>,
    pub reason: Option<String>,
    pub bouncers: Vec<RoleLeaf>,
    pub endpoints: Vec<Row>,
}

/// A divider or bouncer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RoleLeaf {
    pub name: String,
    pub droplet: Option<String>,
    pub phase: Phase,
    pub reason: Option<String>,
}

/// Makes the tree. `only`: the name of the only VPC.
pub fn tree(tenancy: &Tenancy, only: Option<&str>) -> Tree {
    let rows: Vec<Row> = tenancy.endpoints.list.iter().flatten().map(Row::of).collect();
    let networks: BTreeSet<(String, String)> = tenancy
        .networks
        .iter()
        .flatten()
        .map(|network| (network.spec.vpc.clone(), network.name_any()))
        .chain(rows.iter().filter(|row| !row.vpc.is_empty()).map(place))
        .collect();
    let names: BTreeSet<String> = tenancy
        .vpcs
        .iter()
        .flatten()
        .map(ResourceExt::name_any)
        .chain(networks.iter().map(|(vpc, _)| vpc.clone()))
        .collect();
    let is_wanted = |name: &&String| only.is_none_or(|only| only == name.as_str());
    let vpcs: Vec<VpcBranch> = names
        .iter()
        .filter(is_wanted)
        .map(|name| {
            let of_vpc = networks.iter().filter(|(vpc, _)| vpc == name);
            let inner = of_vpc.map(|(_, network)| network_branch(network, &rows, tenancy));
            vpc_branch(name, inner.collect(), tenancy)
        })
        .collect();
    let unseen = unseen(tenancy);
    let has_problems = vpcs.iter().any(has_problems);
    Tree {
        verdict: Verdict::from_findings(has_problems, !unseen.is_empty()),
        vpcs,
        unseen,
    }
}

fn place(row: &Row) -> (String, String) {
    (row.vpc.clone(), row.network.clone())
}

fn vpc_branch(name: &str, networks: Vec<NetworkBranch>, tenancy: &Tenancy) -> VpcBranch {
    let mut vpcs = tenancy.vpcs.iter().flatten();
    let vpc: Option<&Vpc> = vpcs.find(|vpc| vpc.name_any() == name);
    let status = vpc.map(|vpc| vpc.status.clone().unwrap_or_default());
    let dividers = tenancy.dividers.iter().flatten();
    VpcBranch {
        name: name.to_owned(),
        vni: status.as_ref().and_then(|status| status.vni),
        ranges: status
            .as_ref()
            .map(|status| status.cidrs.clone())
            .unwrap_or_default(),
        phase: status.as_ref().map(|status| status.phase),
        reason: status
            .as_ref()
            .and_then(|status| Some(lacking(&status.conditions)?.reason.clone())),
        shared_services: vpc.and_then(|vpc| vpc.spec.shared_services.clone()),
        dividers: leaves(dividers.filter(|divider| divider.spec.vpc == name)),
        networks,
    }
}

fn network_branch(name: &str, rows: &[Row], tenancy: &Tenancy) -> NetworkBranch {
    let mut networks = tenancy.networks.iter().flatten();
    let network: Option<&Network> = networks.find(|network| network.name_any() == name);
    let status = network.map(|network| network.status.clone().unwrap_or_default());
    let bouncers = tenancy.bouncers.iter().flatten();
    let mut endpoints: Vec<Row> = rows.iter().filter(|row| row.network == name).cloned().collect();
    endpoints.sort_by_key(|row| {
        let rank = match row.kind {
            EndpointType::Host => 0,
            EndpointType::Scaled => 1,
            EndpointType::Simple => 2,
        };
        (rank, row.namespace.clone(), row.name.clone())
    });
    NetworkBranch {
        name: name.to_owned(),
        ranges: status
            .as_ref()
            .map(|status| status.cidrs.clone())
            .unwrap_or_default(),
        phase: status.as_ref().map(|status| status.phase),
        reason: status
            .as_ref()
            .and_then(|status| Some(lacking(&status.conditions)?.reason.clone())),
        bouncers: leaves(bouncers.filter(|bouncer| bouncer.spec.network == name)),
        endpoints,
    }
}

fn leaves<'a, R: Role + 'a>(roles: impl Iterator<Item = &'a R>) -> Vec<RoleLeaf> {
    let leaf = |role: &R| RoleLeaf {
        name: role.name_any(),
        droplet: role.droplet().map(str::to_owned),
        phase: role.phase(),
        reason: role
            .status()
            .and_then(|status| Some(lacking(&status.conditions)?.reason.clone())),
    };
    let mut leaves: Vec<RoleLeaf> = roles.map(leaf).collect();
    leaves.sort_by(|one, other| one.name.cmp(&other.name));
    leaves
}

fn unseen(tenancy: &Tenancy) -> Vec<String> {
    fn why<T>(seen: &Seen<T>) -> Option<String> {
        seen.as_ref().err().map(ToString::to_string)
    }
    let all = [
        why(&tenancy.vpcs),
        why(&tenancy.networks),
        why(&tenancy.dividers),
        why(&tenancy.bouncers),
        why(&tenancy.endpoints.list),
    ];
    all.into_iter().flatten().collect()
}

fn has_problems(vpc: &VpcBranch) -> bool {
    let is_init = |phase: Option<Phase>| phase == Some(Phase::Init);
    let lacks = |role: &RoleLeaf| role.reason.is_some() || role.phase == Phase::Init;
    let of_network = |network: &NetworkBranch| {
        is_init(network.phase)
            || network.reason.is_some()
            || network.bouncers.iter().any(lacks)
            || network.endpoints.iter().any(|row| row.state == State::Waits)
    };
    is_init(vpc.phase)
        || vpc.reason.is_some()
        || vpc.dividers.iter().any(lacks)
        || vpc.networks.iter().any(of_network)
}

#[cfg(test)]
mod tests {
    use super::tree;
    use crate::objects::Unseen;
    use crate::report::Verdict;
    use crate::testing;

    #[test]
    fn a_vpc_has_its_networks_roles_and_endpoints() {
        let tree = tree(&testing::status().tenancy, Some("red"));
        assert_eq!(tree.verdict, Verdict::Good);
        let [vpc] = &tree.vpcs[..] else {
            panic!("{tree:?}");
        };
        assert_eq!((vpc.name.as_str(), vpc.vni), ("red", Some(7)));
        assert_eq!(vpc.dividers[0].droplet.as_deref(), Some("node-a"));
        assert_eq!(
            vpc.shared_services.as_deref(),
            Some(&["default/registry".to_owned()][..])
        );
        let [network] = &vpc.networks[..] else {
            panic!("{vpc:?}");
        };
        assert_eq!(network.bouncers[0].name, "red-web-b0");
        let endpoints: Vec<_> = network
            .endpoints
            .iter()
            .map(|row| (row.name.as_str(), row.addresses.join(",")))
            .collect();
        assert_eq!(endpoints[0], ("shop-00000000", "10.96.0.7".to_owned()));
        assert!(endpoints.contains(&("web-1-00000000", "10.0.1.2".to_owned())));
    }

    #[test]
    fn a_tenant_sees_vpcs_and_networks_by_its_endpoints() {
        let mut tenancy = testing::status().tenancy;
        let forbidden = |resource| Unseen::Forbidden {
            verb: "list",
            resource,
        };
        tenancy.vpcs = Err(forbidden("vpcs.thuban.dev"));
        tenancy.networks = Err(forbidden("networks.thuban.dev"));
        tenancy.dividers = Err(forbidden("dividers.thuban.dev"));
        tenancy.bouncers = Err(forbidden("bouncers.thuban.dev"));
        let tree = tree(&tenancy, None);
        assert_eq!(tree.verdict, Verdict::Unseen);
        assert_eq!(tree.unseen.len(), 4);
        assert_eq!(tree.vpcs[0].name, "red");
        assert_eq!(tree.vpcs[0].phase, None);
        assert_eq!(tree.vpcs[0].networks[0].name, "red-web");
    }

    #[test]
    fn a_vpc_of_another_name_is_not_there() {
        assert!(tree(&testing::status().tenancy, Some("green")).vpcs.is_empty());
    }
}

//! The tree as text.

use std::fmt::Write;

use thuban_api::{EndpointType, Phase};

use crate::endpoints::{Row, State};
use crate::tree::{NetworkBranch, RoleLeaf, Tree, VpcBranch};

/// A line, and what belongs below it.
struct Branch {
    text: String,
    inner: Vec<Branch>,
}

impl Branch {
    fn leaf(text: String) -> Self {
        let inner = Vec::new();
        Self { text, inner }
    }
}

/// Returns the text of a tree.
pub fn tree(tree: &Tree) -> String {
    let mut text = String::new();
    for vpc in &tree.vpcs {
        let branch = vpc_branch(vpc);
        let _ = writeln!(text, "{}", branch.text);
        add_inner(&mut text, "", &branch.inner);
    }
    if tree.vpcs.is_empty() && tree.unseen.is_empty() {
        text.push_str("no VPCs\n");
    }
    for why in &tree.unseen {
        let _ = writeln!(text, "---- {why}");
    }
    text
}

fn add_inner(text: &mut String, indent: &str, branches: &[Branch]) {
    for (place, branch) in branches.iter().enumerate() {
        let is_last = place + 1 == branches.len();
        let (corner, below) = if is_last {
            ("└─ ", "   ")
        } else {
            ("├─ ", "│  ")
        };
        let _ = writeln!(text, "{indent}{corner}{}", branch.text);
        add_inner(text, &format!("{indent}{below}"), &branch.inner);
    }
}

fn vpc_branch(vpc: &VpcBranch) -> Branch {
    let number = vpc.vni.map(|vni| format!("VNI {vni}")).unwrap_or_default();
    let state = state(vpc.phase, vpc.reason.as_deref());
    let text = joined(&[
        &format!("VPC {}", vpc.name),
        &number,
        &vpc.ranges.join(", "),
        &state,
    ]);
    let shared = vpc.shared_services.as_ref().map(|shared| {
        let shared = if shared.is_empty() {
            "none".to_owned()
        } else {
            shared.join(", ")
        };
        Branch::leaf(format!("shared Services: {shared}"))
    });
    let dividers = vpc.dividers.iter().map(|divider| role("divider", divider));
    let networks = vpc.networks.iter().map(network_branch);
    Branch {
        text,
        inner: dividers.chain(shared).chain(networks).collect(),
    }
}

fn network_branch(network: &NetworkBranch) -> Branch {
    let state = state(network.phase, network.reason.as_deref());
    let name = format!("network {}", network.name);
    let bouncers = network.bouncers.iter().map(|bouncer| role("bouncer", bouncer));
    Branch {
        text: joined(&[&name, &network.ranges.join(", "), &state]),
        inner: bouncers.chain(network.endpoints.iter().map(endpoint)).collect(),
    }
}

fn role(kind: &str, role: &RoleLeaf) -> Branch {
    let place = role.droplet.as_ref().map(|droplet| format!("on {droplet}"));
    let state = state(Some(role.phase), role.reason.as_deref());
    Branch::leaf(joined(&[
        &format!("{kind} {}", role.name),
        &place.unwrap_or_default(),
        &state,
    ]))
}

fn endpoint(row: &Row) -> Branch {
    let name = match (row.kind, &row.pod) {
        (EndpointType::Simple, Some(pod)) => format!("pod {}/{pod}", row.namespace),
        (EndpointType::Simple, None) => format!("endpoint {}/{}", row.namespace, row.name),
        (EndpointType::Scaled, _) => {
            let service = row.service.as_deref().unwrap_or(&row.name);
            format!("service {}/{service}", row.namespace)
        }
        (EndpointType::Host, _) => format!("node {}", row.name),
    };
    let place = match (row.kind, &row.node) {
        (EndpointType::Simple, Some(node)) => format!("on {node}"),
        _ => String::new(),
    };
    let backends = row
        .backends
        .map(|number| format!("{number} {}", if number == 1 { "backend" } else { "backends" }))
        .unwrap_or_default();
    let state = match (row.state, &row.reason) {
        (State::Waits, reason) => reason.clone().unwrap_or_else(|| "waits".to_owned()),
        (State::Unattached, _) => "no pod".to_owned(),
        (State::Provisioned, _) => String::new(),
    };
    Branch::leaf(joined(&[
        &name,
        &row.addresses.join(","),
        &place,
        &backends,
        &state,
    ]))
}

/// Returns what is to be said of a state: nothing if all is well.
fn state(phase: Option<Phase>, reason: Option<&str>) -> String {
    match (phase, reason) {
        (_, Some(reason)) => reason.to_owned(),
        (Some(Phase::Init), None) => "Init".to_owned(),
        (Some(Phase::Provisioned) | None, None) => String::new(),
    }
}

fn joined(parts: &[&str]) -> String {
    let parts: Vec<&str> = parts.iter().copied().filter(|part| !part.is_empty()).collect();
    parts.join("  ")
}

//! Faults of network policies: of both ends, of droplets without room, and where policies do not apply.

use serde_json::{Value, json};
use thuban_rows::MAX_RULES;

use super::{LEAVING, OUTSIDE, RowState, Scene, TO_SERVICE, Target, WITHIN, is_fine, is_named, name, pod};
use crate::model::world::services::tests::{exposed, service};
use crate::model::world::tests::droplet_address;

#[test]
fn a_policy_that_denies_is_named() {
    let of_server =
        |ingress: Value| json!({"podSelector": {"matchLabels": {"app": "server"}}, "ingress": ingress});
    let closed = of_server(json!([]));
    let closed = |scene: &mut Scene| scene.policy("ns", &closed);
    is_named(
        "ingress",
        closed,
        "policies",
        "PolicyDenies",
        "no ingress rule of it accepts",
    );
    let egress = json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [
        {"to": [{"podSelector": {"matchLabels": {"app": "other"}}}]}]});
    let egress = |scene: &mut Scene| scene.policy("ns", &egress);
    is_named(
        "egress",
        egress,
        "policies",
        "PolicyDenies",
        "selects client, and no egress rule",
    );
    let of_port = of_server(json!([{"ports": [{"port": 8080}]}]));
    is_fine("its port", |scene| scene.policy("ns", &of_port), &WITHIN);
    let other_port = |scene: &mut Scene| {
        scene.policy("ns", &of_port);
        scene.question.port = Some(8081);
    };
    is_named("port", other_port, "policies", "PolicyDenies", "ns/closed");
    let no_port = |scene: &mut Scene| {
        scene.policy("ns", &of_port);
        scene.question.port = None;
    };
    is_named("no port", no_port, "policies", "PortNeeded", "server");
    let by_rule = |scene: &mut Scene| {
        let spec = json!({
            "tier": "Admin", "priority": 1, "subject": {"namespaces": {}},
            "ingress": [{"name": "none", "action": "Deny", "from": [{"namespaces": {}}]}],
        });
        let spec = serde_json::from_value(spec).unwrap();
        scene.world.set_cluster_policy("lockdown", Some(&spec)).unwrap();
        scene.world.roll_out(0);
        scene.world.flush();
    };
    let word = "ClusterNetworkPolicy lockdown denies the packets by spec.ingress[0]";
    is_named("rule", by_rule, "policies", "PolicyDenies", word);
}

#[test]
fn a_pod_with_too_many_rules_is_named() {
    let rules = vec![json!({}); MAX_RULES + 1];
    let many = json!({"podSelector": {"matchLabels": {"app": "server"}}, "ingress": rules});
    let many = |scene: &mut Scene| scene.policy("ns", &many);
    is_named("many", many, "policies", "TooManyRules", "rules apply to packets");
}

#[test]
fn policies_of_a_droplet_that_is_away_are_not_known() {
    let closed = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
    let within = |scene: &mut Scene| {
        scene.policy("ns", &closed);
        scene.played.away = Some("d3");
    };
    is_named("within", within, "droplets", "DropletAway", "d3");
    let to_service = |scene: &mut Scene| {
        within(scene);
        scene.ask_service("ns", "web");
    };
    is_named("to a Service", to_service, "droplets", "DropletAway", "d3");
    let outside = |scene: &mut Scene| {
        scene.vpc(|red| red.egress = true);
        scene.policy("ns", &closed);
        scene.played.row = Some(("d2", RowState::Unacked));
        scene.ask_address(OUTSIDE);
    };
    is_named("outside", outside, "rows", "RowsMissing", "d2");
}

/// Plants a droplet without room for sets of policies.
fn without_room(policy: Value, droplet: &'static str) -> impl FnOnce(&mut Scene) {
    move |scene: &mut Scene| {
        scene.policy("ns", &policy);
        scene.played.set = Some((droplet, RowState::NoRoom));
    }
}

#[test]
fn a_judge_without_room_for_policies_is_named() {
    let ingress = json!({"podSelector": {"matchLabels": {"app": "server"}}, "ingress": [{}]});
    let egress = json!({"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"],
        "egress": [{}]});
    for policy in [&ingress, &egress] {
        let full = without_room(policy.clone(), "d3");
        is_named("receiver", full, "rows", "TableFull", "d3 has no room");
        // The sender's droplet judges none of these packets.
        is_fine("sender", without_room(policy.clone(), "d2"), &WITHIN);
    }
    let outside = |scene: &mut Scene| {
        scene.vpc(|red| red.egress = true);
        without_room(egress.clone(), "d2")(scene);
        scene.ask_address(OUTSIDE);
    };
    is_named("outside", outside, "rows", "TableFull", "d2 has no room");
}

#[test]
fn a_former_leaders_policies_make_the_answer_unknown() {
    let taken_over = |scene: &mut Scene| {
        scene.policy("ns", &json!({"podSelector": {}}));
        scene.world.stage_policies(0);
        scene.world.flush();
    };
    is_named(
        "taken over",
        taken_over,
        "policies",
        "PolicyChanges",
        "policies of client change",
    );
    let acked = |scene: &mut Scene| {
        taken_over(scene);
        while scene.world.policies_acked("red") {
            scene.world.flush();
        }
    };
    is_named("acked", acked, "policies", "PolicyDenies", "ns/closed");
}

#[test]
fn a_pod_always_reaches_itself() {
    let closed = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
    let itself = |scene: &mut Scene| {
        scene.policy("ns", &closed);
        scene.played.set = Some(("d2", RowState::NoRoom));
        scene.question.target = Target::Pod(pod("ns", "client"));
    };
    is_fine("itself", itself, &WITHIN);
    let by_service = |scene: &mut Scene| {
        itself(scene);
        scene
            .world
            .set_service(&name("ns", "web-1"), Some(service("web", "1", 10)));
        scene.ask_service("ns", "web");
    };
    is_fine("by a Service", by_service, &TO_SERVICE);
}

#[test]
fn only_cluster_policies_keep_a_pod_from_its_own_node() {
    let node = |number: u64| droplet_address(number).to_string();
    let ask = |scene: &mut Scene, number: u64| {
        scene.vpc(|red| red.host_access = true);
        scene.policy("ns", &json!({"podSelector": {}, "policyTypes": ["Egress"]}));
        scene.ask_address(&node(number));
    };
    is_fine("own", |scene| ask(scene, 2), &LEAVING);
    is_named(
        "another",
        |scene| ask(scene, 3),
        "policies",
        "PolicyDenies",
        "ns/closed",
    );
    let node_port = |scene: &mut Scene| {
        let mut web = service("web", "1", 11);
        web.exposed = exposed(30_080);
        scene.world.set_service(&name("ns", "web-1"), Some(web));
        ask(scene, 2);
        scene.question.port = Some(30_080);
    };
    is_named("a NodePort", node_port, "policies", "PolicyDenies", "ns/closed");
    let denied = |scene: &mut Scene| {
        let spec = json!({
            "tier": "Admin", "priority": 1, "subject": {"namespaces": {}},
            "egress": [{"name": "nodes", "action": "Deny", "to": [{"networks": [format!("{}/32", node(2))]}]}],
        });
        let spec = serde_json::from_value(spec).unwrap();
        scene.world.set_cluster_policy("no-nodes", Some(&spec)).unwrap();
        ask(scene, 2);
    };
    is_named("a rule", denied, "policies", "PolicyDenies", "no-nodes");
}

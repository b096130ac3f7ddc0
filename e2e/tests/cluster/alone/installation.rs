//! The state that the install manifests alone bring up.

use crate::flows::wait_settled;
use crate::support::{condition, get, wait_provisioned};
use crate::tenants::tenants;

#[test]
fn every_node_is_ready_and_a_provisioned_droplet_of_its_node() {
    let cluster = &tenants().cluster;
    for node in cluster.nodes().unwrap() {
        let object = get(cluster, &["node", &node]).unwrap();
        assert_eq!(condition(&object, "Ready").unwrap()["status"], "True", "{node}");
        let droplet = get(cluster, &["droplet", &node]).unwrap();
        assert_eq!(droplet["status"]["phase"], "Provisioned", "{node}");
        assert_eq!(
            droplet["spec"]["ip"],
            cluster.node_address(&node).unwrap().to_string()
        );
        let owner = &droplet["metadata"]["ownerReferences"][0];
        assert_eq!(
            (&owner["kind"], &owner["uid"]),
            (&"Node".into(), &object["metadata"]["uid"]),
            "{node}"
        );
    }
}

#[test]
fn installation_creates_default_vpc_and_network() {
    let cluster = &tenants().cluster;
    wait_provisioned(cluster, "vpcs.thuban.dev/default").unwrap();
    wait_provisioned(cluster, "networks.thuban.dev/default").unwrap();
    for (kind, name) in [
        ("dividers", "vpcs.thuban.dev/default"),
        ("bouncers", "networks.thuban.dev/default"),
    ] {
        let parent = get(cluster, &[name]).unwrap();
        assert_eq!(parent["spec"][kind], 2, "{name}");
        let droplets = wait_settled(cluster, kind, "default", 2).unwrap();
        assert_ne!(droplets[0], droplets[1], "{kind} of {name}: one may die");
    }
}

#[test]
fn roles_belong_to_their_parents_and_are_provisioned() {
    let cluster = &tenants().cluster;
    for (role, parent_kind, parent_field) in [("dividers", "Vpc", "vpc"), ("bouncers", "Network", "network")]
    {
        let roles = get(cluster, &[&format!("{role}.thuban.dev")]).unwrap();
        let roles = roles["items"].as_array().unwrap();
        assert!(!roles.is_empty(), "no {role}");
        for role in roles {
            let name = &role["metadata"]["name"];
            assert_eq!(role["status"]["phase"], "Provisioned", "{name}");
            assert_eq!(
                role["metadata"]["ownerReferences"][0]["kind"], parent_kind,
                "{name}"
            );
            assert_eq!(
                role["metadata"]["ownerReferences"][0]["name"], role["spec"][parent_field],
                "{name}"
            );
        }
    }
}

#[test]
fn endpoints_are_provisioned_and_hold_their_claims() {
    let tenants = tenants();
    for pod in &tenants.pods {
        let endpoints = get(&tenants.cluster, &["endpoints.thuban.dev", "-n", &pod.namespace]).unwrap();
        let endpoint = endpoints["items"]
            .as_array()
            .unwrap()
            .iter()
            .find(|endpoint| endpoint["spec"]["podRef"]["name"] == pod.name.as_str())
            .unwrap_or_else(|| panic!("{} has no Endpoint", pod.name));
        assert_eq!(endpoint["status"]["phase"], "Provisioned");
        assert_eq!(endpoint["status"]["addresses"][0], pod.address.to_string());
        assert_eq!(endpoint["status"]["droplet"], pod.node.as_str());
        let claim = get(
            &tenants.cluster,
            &[
                "ipclaims.thuban.dev",
                &format!("{}.{}", pod.namespace, pod.address),
            ],
        )
        .unwrap();
        let owner = &claim["spec"]["ownerUid"];
        let owners = [&endpoint["metadata"]["uid"], &endpoint["spec"]["podRef"]["uid"]];
        assert!(owners.contains(&owner), "{}: {owner}", pod.name);
    }
}

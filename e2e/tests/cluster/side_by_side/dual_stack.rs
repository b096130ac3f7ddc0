//! Networks with an IPv6 range: two addresses for every new pod. Both work within the VPC and from the pod's node.
//! Neither works from another VPC that has the same addresses.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::support::{
    NOT_REACHED, Pod, REACHED, addresses, apply, condition, delete, get, http_hostname, netexec_manifest,
    running,
};
use crate::tenant::{Tenant, manifests};
use crate::tenants::tenants;

/// Returns the names of the claims of a pod's endpoint.
fn claims(cluster: &Cluster, pod: &Pod) -> Vec<String> {
    let claims = get(cluster, &["ipclaims.thuban.dev"]).unwrap();
    let prefix = format!("{}-", pod.name);
    let of_pod = |claim: &&Value| {
        let name = claim["spec"]["endpointName"].as_str().unwrap_or_default();
        claim["spec"]["endpointNamespace"] == pod.namespace.as_str() && name.starts_with(&prefix)
    };
    let mut names: Vec<_> = claims["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter(of_pod)
        .map(|claim| claim["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn dual_stack_pods_use_both_addresses_only_in_their_vpc() {
    let cluster = &tenants().cluster;
    let nodes = cluster.nodes().unwrap();
    let ranges = (
        ["10.20.0.0/16", "fd00:20::/48"],
        ["10.20.1.0/24", "fd00:20:0:1::/64"],
    );
    let tenants = ["dual", "twin"].map(|name| Tenant::new(cluster, name, &ranges.0, &ranges.1).unwrap());
    let manifests = [
        netexec_manifest("dual", "first", &nodes[0], None),
        netexec_manifest("dual", "second", &nodes[1], None),
        netexec_manifest("twin", "other", &nodes[2], None),
    ];
    // The pods are made one after the other: each gets the lowest free address.
    let pods = manifests.map(|manifest| {
        apply(cluster, std::slice::from_ref(&manifest)).unwrap();
        let field = |name: &str| manifest["metadata"][name].as_str().unwrap().to_owned();
        running(cluster, &field("namespace"), &field("name")).unwrap()
    });
    let [first, second, other] = &pods;
    let of = |pod: &Pod| addresses(cluster, pod);
    assert_eq!(of(first), of(other), "two VPCs, the same addresses");
    assert_eq!(of(first)[0], IpAddr::from(first.address));
    assert_eq!(of(first)[1], "fd00:20:0:1::2".parse::<Ipv6Addr>().unwrap());
    let object = get(cluster, &["pod", "-n", "dual", "first"]).unwrap();
    let reported = json!([{"ip": "10.20.1.2"}, {"ip": "fd00:20:0:1::2"}]);
    assert_eq!(object["status"]["podIPs"], reported);
    assert_eq!(
        claims(cluster, first),
        ["dual.10.20.1.2", "dual.fd000020000000010000000000000002"]
    );

    for (from, to) in [(first, second), (second, first)] {
        for address in of(to) {
            assert_eq!(from.tcp(address, REACHED).unwrap(), to.name, "{address}");
        }
    }
    for address in of(second) {
        let answer = other.tcp(address, NOT_REACHED);
        assert!(answer.is_err(), "another VPC reaches {address}: {answer:?}");
    }
    for address in of(other) {
        assert_eq!(other.tcp(address, REACHED).unwrap(), "other", "its own {address}");
        assert_eq!(
            second.tcp(address, REACHED).unwrap(),
            "first",
            "its VPC's {address}"
        );
    }
    // Kubelet's probes do the same, from each node to its own pod.
    for pod in &pods {
        for address in of(pod) {
            let answer = cluster.in_node(&pod.node, || http_hostname(address, REACHED));
            assert_eq!(answer.unwrap(), pod.name, "{} to {address}", pod.node);
        }
        let stranger = pods.iter().find(|other| other.node != pod.node).unwrap();
        for address in of(pod) {
            let answer = cluster.in_node(&stranger.node, || http_hostname(address, NOT_REACHED));
            let reached_itself = answer.as_ref().is_ok_and(|name| *name == stranger.name);
            assert!(answer.is_err() || reached_itself, "{}: {answer:?}", stranger.node);
        }
    }
    // The pod ignores everything that a router on the link could say.
    let conf = first.command(&["ip", "-6", "route", "show", "default"]).unwrap();
    assert!(conf.contains("via fe80::5468:7562:6101 dev eth0"), "{conf}");

    delete(cluster, &["pod", "-n", "dual", "first"]).unwrap();
    cluster
        .wait_for("both claims are freed", Duration::from_mins(2), || {
            Ok(claims(cluster, first).is_empty())
        })
        .unwrap();
    let rows = cluster.exec_on_node(&nodes[0], &["ip", "-6", "route", "show", "table", "6081"]);
    assert!(!rows.unwrap().contains("fd00:20:0:1::2"));
    for tenant in tenants {
        tenant.remove().unwrap();
    }
}

#[test]
fn a_network_that_gets_an_ipv6_range_gives_it_to_new_pods() {
    let cluster = &tenants().cluster;
    let nodes = cluster.nodes().unwrap();
    let tenant = Tenant::new(cluster, "later", &["10.21.0.0/16"], &["10.21.1.0/24"]).unwrap();
    apply(cluster, &[netexec_manifest("later", "before", &nodes[0], None)]).unwrap();
    let before = running(cluster, "later", "before").unwrap();
    assert_eq!(addresses(cluster, &before).len(), 1);
    let ranges = (
        ["10.21.0.0/16", "fd00:21::/48"],
        ["10.21.1.0/24", "fd00:21:0:1::/64"],
    );
    apply(cluster, &manifests("later", &ranges.0, &ranges.1)).unwrap();
    cluster
        .wait_for("the IPv6 range in force", Duration::from_secs(30), || {
            let network = get(cluster, &["networks.thuban.dev", "later"])?;
            Ok(network["status"]["cidrs"] == json!(ranges.1))
        })
        .unwrap();
    let manifests = ["after", "after-too"].map(|name| netexec_manifest("later", name, &nodes[1], None));
    apply(cluster, &manifests).unwrap();
    let [after, too] = ["after", "after-too"].map(|name| running(cluster, "later", name).unwrap());
    for pod in [&after, &too] {
        assert_eq!(addresses(cluster, pod).len(), 2, "{}", pod.name);
    }
    assert_eq!(addresses(cluster, &before).len(), 1, "it stays as it was made");
    assert_eq!(before.tcp(after.address, REACHED).unwrap(), "after");
    for address in addresses(cluster, &too) {
        assert_eq!(after.tcp(address, REACHED).unwrap(), "after-too", "{address}");
    }
    tenant.remove().unwrap();
}

#[test]
fn invalid_ipv6_ranges_are_refused_with_field_and_remedy() {
    let cluster = &tenants().cluster;
    let rejected = |object: &Value, words: &[&str]| {
        let error = apply(cluster, std::slice::from_ref(object))
            .expect_err("the API server took it")
            .to_string();
        for word in words {
            assert!(error.contains(word), "{error:?} does not say {word:?}");
        }
    };
    for range in [
        "fd00:22::1/48",
        "fd00:22::/129",
        "::ffff:10.0.0.0/112",
        "fd00:22::/121",
    ] {
        let [vpc, ..] = manifests("bad6", &["10.22.0.0/16", range], &["10.22.1.0/24"]);
        rejected(&vpc, &["spec.cidrs", "fd00::/48"]);
    }
    for ranges in [
        ["10.22.1.0/24", "fd00:22::/63"],
        ["10.22.1.0/24", "fd00:22::/121"],
        ["10.22.1.0/24", "fd00:22::1/64"],
        ["10.22.1.0/31", "fd00:22::/64"],
    ] {
        let [_, network, _] = manifests("bad6", &["10.22.0.0/16"], &ranges);
        rejected(&network, &["spec.cidrs", "/64 to /120"]);
    }
    for ranges in [&["fd00:22::/64"][..], &["fd00:22::/64", "10.22.1.0/24"]] {
        let [_, network, _] = manifests("bad6", &["10.22.0.0/16"], ranges);
        rejected(&network, &["spec.cidrs", "IPv4", "after it"]);
    }
    for (range, word) in [
        ("fe80::/64", "link-local"),
        ("ff05::/64", "multicast"),
        ("2002::/48", "6to4"),
        ("::/64", "loopback"),
    ] {
        let [vpc, ..] = manifests("bad6", &["10.22.0.0/16", range], &["10.22.1.0/24"]);
        apply(cluster, &[vpc]).unwrap();
        let mut message = String::new();
        cluster
            .wait_for(&format!("{range} refused"), Duration::from_secs(20), || {
                let vpc = get(cluster, &["vpcs.thuban.dev", "bad6"])?;
                let accepted = condition(&vpc, "Accepted").filter(|it| it["status"] == "False");
                message = accepted.map(|it| it["message"].to_string()).unwrap_or_default();
                Ok(message.contains(word))
            })
            .unwrap();
        assert!(message.contains("spec.cidrs"), "{message}");
        delete(cluster, &["vpcs.thuban.dev", "bad6"]).unwrap();
    }
}

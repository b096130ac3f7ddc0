use thuban_api::Condition;

use super::report;
use crate::objects::{CheckObjects, Unseen};
use crate::report::{Level, Problem, Verdict};
use crate::testing::{self, now};

fn problems(objects: &CheckObjects) -> Vec<Problem> {
    let report = report(objects, "thuban-system", now());
    report.problems().cloned().collect()
}

/// Returns the only problem.
fn only(objects: &CheckObjects) -> Problem {
    let found = problems(objects);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(!found[0].remedy.is_empty(), "{found:?}");
    found[0].clone()
}

#[test]
fn a_healthy_cluster_passes() {
    let report = report(&testing::check(), "thuban-system", now());
    assert_eq!(report.verdict, Verdict::Good, "{report:?}");
    assert!(report.lines.iter().all(|line| line.level == Level::Ok));
}

#[test]
fn versions_that_differ_are_told() {
    let mut objects = testing::check();
    objects.droplets.as_mut().unwrap()[1].spec.program_version = "0.0.1".to_owned();
    let found = only(&objects);
    assert_eq!(
        (found.object.as_str(), found.reason.as_str()),
        ("node-b", "VersionsDiffer")
    );
    assert_eq!(found.message, "transitd 0.0.1 on 1 of 2 droplets");
    let mut objects = testing::check();
    let lease = objects.control_plane.lease.as_mut().unwrap().as_mut().unwrap();
    let annotations = lease.metadata.annotations.as_mut().unwrap();
    annotations.insert("thuban.dev/version".to_owned(), "9.0.0".to_owned());
    let reasons: Vec<_> = problems(&objects)
        .into_iter()
        .map(|problem| problem.reason)
        .collect();
    assert_eq!(reasons, ["VersionsDiffer", "PluginDiffers"]);
    let mut objects = testing::check();
    objects.control_plane.lease = Ok(None);
    assert_eq!(only(&objects).reason, "VersionUnknown");
}

#[test]
fn nodes_without_droplets_are_told() {
    let mut objects = testing::check();
    let nodes = objects.surroundings.nodes.as_mut().unwrap();
    nodes.push(testing::node("node-c", "192.0.2.13", "10.244.3.0/24"));
    let found = only(&objects);
    assert_eq!(
        (found.object.as_str(), found.reason.as_str()),
        ("node-c", "NodeWithoutDroplet")
    );
    let mut objects = testing::check();
    objects.surroundings.nodes.as_mut().unwrap().pop();
    assert_eq!(only(&objects).reason, "DropletWithoutNode");
}

#[test]
fn ranges_that_touch_nodes_pods_or_services_are_told() {
    for (cidr, reason) in [
        ("192.0.2.0/24", "RangeHasNode"),
        ("10.244.2.0/24", "RangeTouchesPodRange"),
        ("10.96.7.0/24", "RangeTouchesServices"),
    ] {
        let mut objects = testing::check();
        let red = &mut objects.vpcs.as_mut().unwrap()[1];
        red.spec.cidrs.push(cidr.to_owned());
        let found = problems(&objects);
        assert!(
            found
                .iter()
                .all(|problem| problem.object == "Vpc red" && problem.reason == reason),
            "{cidr}: {found:?}"
        );
        assert!(!found.is_empty(), "{cidr}");
        // The range of a network that is in no range of its VPC.
        let mut objects = testing::check();
        let web = &mut objects.networks.as_mut().unwrap()[1];
        web.spec.cidrs.push(cidr.to_owned());
        let found = problems(&objects);
        assert_eq!(found[0].object, "Network red-web", "{cidr}");
    }
}

#[test]
fn other_network_plugins_and_kube_proxy_are_told() {
    let mut objects = testing::check();
    let sets = objects.surroundings.daemon_sets.as_mut().unwrap();
    sets.push(testing::daemon_set("kube-system", "cilium", "/etc/cni/net.d"));
    sets.push(testing::daemon_set("kube-system", "kube-proxy", "/lib/modules"));
    sets.push(testing::daemon_set("kube-system", "logs", "/var/log"));
    let reasons: Vec<_> = problems(&objects)
        .into_iter()
        .map(|problem| (problem.object, problem.reason))
        .collect();
    let expected = [
        ("kube-system/cilium", "OtherNetworkPlugin"),
        ("kube-system/kube-proxy", "KubeProxy"),
    ];
    assert_eq!(
        reasons,
        expected.map(|(object, reason)| (object.to_owned(), reason.to_owned()))
    );
}

#[test]
fn advice_of_vpcs_is_told() {
    let mut objects = testing::check();
    let red = &mut objects.vpcs.as_mut().unwrap()[1];
    let crowded: Condition = testing::object(testing::condition(
        "Crowded",
        "True",
        "DropletsShared",
        "2 dividers are on 1 droplet",
    ));
    red.status.as_mut().unwrap().conditions.push(crowded);
    let found = only(&objects);
    assert_eq!(
        (found.object.as_str(), found.reason.as_str()),
        ("Vpc red", "DropletsShared")
    );
}

#[test]
fn what_is_forbidden_is_said_and_the_rest_is_checked() {
    let mut objects = testing::check();
    objects.surroundings.nodes = Err(Unseen::Forbidden {
        verb: "list",
        resource: "nodes",
    });
    // As an API server before 1.33, which is no fault.
    objects.surroundings.service_cidrs = Err(Unseen::NotInstalled("servicecidrs.networking.k8s.io"));
    let report = report(&objects, "thuban-system", now());
    assert_eq!(report.verdict, Verdict::Unseen);
    let unseen: Vec<_> = report
        .lines
        .iter()
        .filter(|line| line.level == Level::Unseen)
        .map(|line| line.part)
        .collect();
    assert_eq!(unseen, ["nodes", "node ranges"]);
}

//! In a tenth of the VPCs, a NetworkPolicy lets the pods of one app receive from those of the other app alone.

use std::hint::black_box;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId};
use k8s_openapi::api::networking::v1::{NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicySpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use crate::scene::{APPS, Scene, endpoint, name, network, profile};

/// One of so many VPCs has a policy.
const POLICED: usize = 10;
/// The time between two looks of the hub, milliseconds.
const PAUSE: u64 = 20;
/// Members that come: of the app whose pods the policy selects, and of the other app.
const SELECTED: usize = 101;
const OTHER: usize = 100;

fn policy() -> NetworkPolicySpec {
    let pods = |app: &str| {
        Some(LabelSelector {
            match_labels: Some([("app".to_owned(), app.to_owned())].into()),
            ..LabelSelector::default()
        })
    };
    let [other, selected] = APPS;
    let peer = NetworkPolicyPeer {
        pod_selector: pods(other),
        ..NetworkPolicyPeer::default()
    };
    NetworkPolicySpec {
        pod_selector: pods(selected),
        ingress: Some(vec![NetworkPolicyIngressRule {
            from: Some(vec![peer]),
            ..NetworkPolicyIngressRule::default()
        }]),
        ..NetworkPolicySpec::default()
    }
}

impl Scene {
    fn add_policies(&mut self) {
        let policy = policy();
        let rest = self.middle() % POLICED;
        for vpc in (0..self.vpcs()).filter(|vpc| vpc % POLICED == rest) {
            let namespace = network(vpc, 0);
            let outcome = self.world.set_network_policy(&namespace, "app", 0, Some(&policy));
            assert!(outcome.is_ok(), "the policy is well-formed");
        }
        let waiting = self.world.stage_policies(self.now);
        self.end_steps(waiting);
        self.roll_out();
    }

    /// Rolls policies out for as long as there are news, as the hub does.
    fn roll_out(&mut self) {
        while self.world.has_policy_news() {
            self.now += PAUSE;
            let waiting = self.world.roll_out(self.now);
            self.end_steps(waiting);
        }
    }

    /// Goes on in VPCs with a step that waits for acks, until none does.
    fn end_steps(&mut self, mut waiting: Vec<String>) {
        self.settle();
        while !waiting.is_empty() {
            waiting.retain(|vpc| self.world.policies_acked(vpc));
            self.settle();
        }
    }

    /// An endpoint of the first network of a VPC in the middle comes, and goes.
    fn come_and_go_judged(&mut self, member: usize, on: &str) {
        let vpc = self.middle();
        let name = name(&network(vpc, 0), member);
        let endpoint = endpoint(vpc, 0, member, on.to_owned());
        for state in [Some(endpoint), None] {
            self.world.set_endpoint(&name, state);
            self.settle();
            self.roll_out();
        }
    }

    /// A member of the first network of a VPC in the middle takes the label of the other app, and its own again.
    fn change_label(&mut self, member: usize) {
        let vpc = self.middle();
        let name = name(&network(vpc, 0), member);
        for labelled in [member + 1, member] {
            let mut endpoint = endpoint(vpc, 0, member, self.home(vpc, member));
            endpoint.profile = Some(profile(labelled));
            self.world.set_endpoint(&name, Some(endpoint));
            self.settle();
            self.roll_out();
        }
    }
}

/// Adds the policies, and measures what endpoints that they concern cost.
pub fn events(group: &mut BenchmarkGroup<'_, WallTime>, size: usize, scene: &mut Scene) {
    scene.add_policies();
    let home = scene.home(scene.middle(), 3);
    for (event, member) in [
        ("endpoint under a policy comes and goes", SELECTED),
        ("peer of a policy comes and goes", OTHER),
    ] {
        group.bench_function(BenchmarkId::new(event, size), |bench| {
            bench.iter(|| scene.come_and_go_judged(member, &home));
        });
    }
    group.bench_function(
        BenchmarkId::new("label of a pod changes and returns", size),
        |bench| {
            bench.iter(|| scene.change_label(1));
        },
    );
    group.bench_function(BenchmarkId::new("policies without news", size), |bench| {
        bench.iter(|| black_box(scene.world.has_policy_news()));
    });
    // Each step of a policy that waits for acks makes these.
    group.bench_function(BenchmarkId::new("marks of open streams", size), |bench| {
        bench.iter(|| black_box(scene.acks.marks()));
    });
}

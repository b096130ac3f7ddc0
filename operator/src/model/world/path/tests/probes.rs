//! The packets of probes, and who is asked what became of them.

use super::{OUTSIDE, PodState, Scene, Target, member, pod};
use crate::model::world::path::ProbePlan;

fn plan(scene: &Scene) -> Option<ProbePlan> {
    scene.world.plan_probe(&scene.question, &scene.played)
}

fn droplets(plan: &ProbePlan) -> Vec<&str> {
    plan.droplets
        .iter()
        .map(|(droplet, _)| droplet.as_str())
        .collect()
}

#[test]
fn a_probe_asks_the_droplets_of_its_way() {
    let mut scene = Scene::new();
    let to_pod = plan(&scene).unwrap();
    assert_eq!((to_pod.protocol, to_pod.port), (6, Some(8080)));
    assert_eq!((to_pod.is_told, to_pod.target.as_str()), (true, "server"));
    assert_eq!(droplets(&to_pod)[0], "d2");
    assert!(droplets(&to_pod).contains(&"d3"), "{to_pod:?}");
    let (name, address) = &to_pod.droplets[0];
    assert_eq!(to_pod.droplet_at(*address), Some(name.as_str()));
    scene.question.port = None;
    assert_eq!(plan(&scene).unwrap().protocol, 1, "an echo");
    scene.ask_service("ns", "web");
    let to_service = plan(&scene).unwrap();
    assert_eq!((to_service.port, to_service.is_told), (Some(80), true));
    assert!(droplets(&to_service).contains(&"d3"), "{to_service:?}");
    scene.ask_address(OUTSIDE);
    let outside = plan(&scene).unwrap();
    assert_eq!(droplets(&outside), ["d2"]);
    assert_eq!(outside.target, OUTSIDE);
}

#[test]
fn of_others_pods_only_the_answer_is_told() {
    let mut scene = Scene::new();
    scene.put(member("web", 5, 13, ("near", "pod")));
    scene.question.target = Target::Pod(pod("near", "pod"));
    let near = plan(&scene).unwrap();
    assert_eq!((near.is_told, near.target.as_str()), (false, "the target"));
    assert_eq!(droplets(&near), ["d2"]);
    scene.put(member("web", 2, 13, ("near", "pod")));
    assert_eq!(plan(&scene).unwrap(), near, "on whichever droplet it is");
    scene.put(member("shop", 4, 12, ("far", "pod")));
    scene.question.target = Target::Pod(pod("far", "pod"));
    assert_eq!(plan(&scene), None);
}

#[test]
fn without_an_end_nothing_is_sent() {
    let mut scene = Scene::new();
    scene.question.source.state = PodState::Missing;
    assert_eq!(plan(&scene), None);
}

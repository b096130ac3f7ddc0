//! What an answer tells of other namespaces and VPCs.

use std::net::IpAddr;

use serde_json::json;
use thuban_api::PathVerdict;

use super::{PodState, Scene, Target, is_named, member, name, pod, service, texts};

#[test]
fn of_other_namespaces_only_reachability_is_told() {
    let secrets = ["blue", "shop", "10.0.0.12", "10.0.0.13", "d4", "d5", "closed"];
    let ask = |fault: &dyn Fn(&mut Scene)| {
        let mut scene = Scene::new();
        scene.put(member("shop", 4, 12, ("far", "pod")));
        scene.put(member("web", 5, 13, ("near", "pod")));
        fault(&mut scene);
        let judgement = scene.judge();
        let said = texts(&judgement);
        for secret in secrets {
            assert!(!said.contains(secret), "{secret}: {said}");
        }
        (judgement, said)
    };
    let missing = PodState::Missing;
    let of = |target: &str, state: Option<&PodState>| {
        let mut target = pod(target, "pod");
        target.state = state.unwrap_or(&target.state).clone();
        move |scene: &mut Scene| scene.question.target = Target::Pod(target.clone())
    };
    // Another VPC's pod and no pod at all are told of in the same words.
    let (in_blue, _) = ask(&of("far", None));
    let (nobody, _) = ask(&of("far", Some(&missing)));
    assert_eq!(in_blue, nobody);
    assert_eq!(in_blue.reason.as_deref(), Some("NotInVpc"));
    let (reached, said) = ask(&of("near", None));
    assert_eq!(reached.verdict, PathVerdict::Ok, "{said}");
    // Whether it is on the source's droplet is not told.
    let together = |scene: &mut Scene| {
        scene.put(member("web", 2, 13, ("near", "pod")));
        of("near", None)(scene);
    };
    assert_eq!(ask(&together).0, reached);
    let denied = |scene: &mut Scene| {
        of("near", None)(scene);
        scene.policy("near", &json!({"podSelector": {}}));
    };
    let (denied, said) = ask(&denied);
    assert_eq!(denied.reason.as_deref(), Some("PolicyDenies"), "{said}");
    let suspect = |scene: &mut Scene| {
        of("near", None)(scene);
        scene.played.suspect = Some("d5");
    };
    let (suspect, said) = ask(&suspect);
    assert_eq!(suspect.reason.as_deref(), Some("DropletSuspect"), "{said}");
}

#[test]
fn of_others_pods_that_wait_only_that_is_told() {
    let waits = |scene: &mut Scene| {
        let mut waiting = member("web", 5, 13, ("near", "pod"));
        waiting.ready = false;
        scene.put(waiting);
    };
    let by_name = |scene: &mut Scene| {
        waits(scene);
        scene.question.target = Target::Pod(pod("near", "pod"));
    };
    let word = "the target is not Provisioned";
    is_named("by name", by_name, "target", "TargetNotReady", word);
    let by_address = |scene: &mut Scene| {
        waits(scene);
        scene.ask_address("10.0.0.13");
    };
    is_named("by address", by_address, "target", "TargetNotReady", word);
}

#[test]
fn the_number_of_others_backends_is_not_told() {
    let judge = |namespace: &str| {
        let mut scene = Scene::new();
        let (mut till, second) = (service("web", "4", 13), service("web", "4", 14));
        let backends = second.tables[0].1[0].backends.iter().copied();
        till.tables[0].1[0].backends.extend(backends);
        till.tables[0].0 = IpAddr::from([10, 96, 0, 13]);
        till.name = "till".into();
        for (host, pod) in [(13, "first"), (14, "second")] {
            scene.put(member("web", 4, host, (namespace, pod)));
        }
        scene.world.set_service(&name(namespace, "till-1"), Some(till));
        let first = json!({"podSelector": {"matchLabels": {"app": "first"}}});
        scene.policy(namespace, &first);
        scene.ask_service(namespace, "till");
        let judgement = scene.judge();
        assert_eq!(
            judgement.reason.as_deref(),
            Some("PolicyDenies"),
            "{judgement:#?}"
        );
        texts(&judgement)
    };
    assert!(judge("ns").contains("1 of 2 backends: NetworkPolicy ns/closed"));
    let said = judge("near");
    assert!(!said.contains("of 2") && !said.contains("1 of"), "{said}");
}

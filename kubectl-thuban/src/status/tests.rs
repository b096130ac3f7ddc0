use serde_json::json;
use thuban_api::{Condition, Phase};

use super::{is_installed, report};
use crate::objects::{StatusObjects, Unseen};
use crate::report::{Level, Line, Verdict};
use crate::testing::{self, now};

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Condition {
    testing::object(testing::condition(kind, status, reason, message))
}

fn forbidden(resource: &'static str) -> Unseen {
    Unseen::Forbidden {
        verb: "list",
        resource,
    }
}

/// Returns the line of a part.
fn line(objects: &StatusObjects, part: &str) -> Line {
    let report = report(objects, now());
    let mut lines = report.lines.into_iter();
    lines.find(|line| line.part == part).unwrap()
}

#[test]
fn a_healthy_cluster_has_nothing_to_say() {
    let report = report(&testing::status(), now());
    assert_eq!(report.verdict, Verdict::Good);
    assert_eq!(report.thuban.as_deref(), Some(report.plugin));
    let lines: Vec<_> = report
        .lines
        .iter()
        .map(|line| (line.part, line.text.as_str()))
        .collect();
    assert_eq!(
        lines,
        [
            ("operator", "2/2, leader on node-a, epoch 7"),
            ("droplets", "2 connected"),
            ("VPCs", "2 Ready"),
            ("networks", "2 Ready"),
            ("addresses", "at most red-web 3 of 252 used"),
            ("endpoints", "2 Provisioned, 0 wait, 1 without a pod"),
        ]
    );
}

#[test]
fn an_operator_that_is_not_there_or_does_not_lead_is_told() {
    let mut objects = testing::status();
    objects.control_plane.pods = Err(forbidden("pods"));
    assert_eq!(line(&objects, "operator").text, "2/2, leader operator-1, epoch 7");
    let lease = objects.control_plane.lease.as_mut().unwrap().as_mut().unwrap();
    let spec = lease.spec.as_mut().unwrap();
    spec.renew_time = serde_json::from_value(json!("2026-11-28T11:50:00.000000Z")).unwrap();
    assert_eq!(line(&objects, "operator").problems[0].reason, "LeaseOld");
    let lease = objects.control_plane.lease.as_mut().unwrap().as_mut().unwrap();
    lease.spec.as_mut().unwrap().holder_identity = Some(String::new());
    let deployment = objects.control_plane.deployment.as_mut().unwrap();
    let status = deployment.as_mut().unwrap().status.as_mut().unwrap();
    status.ready_replicas = None;
    let reasons: Vec<_> = line(&objects, "operator")
        .problems
        .into_iter()
        .map(|problem| problem.reason)
        .collect();
    assert_eq!(reasons, ["OperatorNotReady", "NoLeader"]);
    objects.control_plane.deployment = Ok(None);
    let line = line(&objects, "operator");
    assert_eq!(line.problems[0].reason, "NoOperator");
    assert!(line.problems[0].remedy.contains("--system-namespace"));
}

#[test]
fn a_droplet_that_is_away_says_for_how_long() {
    let mut objects = testing::status();
    let droplet = &mut objects.droplets.as_mut().unwrap()[1];
    let status = droplet.status.as_mut().unwrap();
    status.conditions[1] = condition("Ready", "False", "Suspect", "a long message");
    let line = line(&objects, "droplets");
    assert_eq!(line.level, Level::Warn);
    assert_eq!(line.text, "1/2 connected; node-b Suspect: for 14 s");
    assert!(
        line.problems[0].remedy.contains("6082"),
        "{}",
        line.problems[0].remedy
    );
}

#[test]
fn a_network_says_what_its_bouncers_wait_for() {
    let mut objects = testing::status();
    let network = &mut objects.tenancy.networks.as_mut().unwrap()[1];
    let status = network.status.as_mut().unwrap();
    status.phase = Phase::Init;
    let message = "waits for bouncers: red-web-b0";
    status.conditions[1] = condition("Ready", "False", "BouncersNotProvisioned", message);
    let told = line(&objects, "networks").text;
    assert_eq!(
        told,
        format!("1/2 Ready; red-web BouncersNotProvisioned: {message}")
    );
    let bouncer = &mut objects.tenancy.bouncers.as_mut().unwrap()[1];
    let status = bouncer.status.as_mut().unwrap();
    status.conditions[1] = condition(
        "Ready",
        "False",
        "Filling",
        "waits until droplet node-b has its tables",
    );
    let told = line(&objects, "networks").text;
    assert!(
        told.ends_with(": red-web-b0 waits until droplet node-b has its tables"),
        "{told}"
    );
}

#[test]
fn lost_roles_are_told_though_the_phase_stays() {
    let mut objects = testing::status();
    let vpc = &mut objects.tenancy.vpcs.as_mut().unwrap()[1];
    vpc.status.as_mut().unwrap().working_dividers = Some(0);
    let line = line(&objects, "VPCs");
    assert_eq!(line.text, "1/2 Ready; red RolesNotWorking: 0 of 1 dividers");
    assert!(line.problems[0].remedy.contains("dividers"));
}

#[test]
fn an_object_that_nobody_has_judged_is_told() {
    let mut objects = testing::status();
    objects.tenancy.vpcs.as_mut().unwrap()[1].status = None;
    assert_eq!(line(&objects, "VPCs").text, "1/2 Ready; red NotJudged");
}

#[test]
fn networks_that_run_out_of_addresses_are_named() {
    let mut objects = testing::status();
    let network = &mut objects.tenancy.networks.as_mut().unwrap()[1];
    network.status.as_mut().unwrap().allocated = Some(243);
    let line = line(&objects, "addresses");
    assert_eq!(line.text, "red-web 243 of 252 used");
    assert_eq!(line.problems[0].reason, "AddressesNearlyUsedUp");
}

#[test]
fn endpoints_that_wait_say_why() {
    let mut objects = testing::status();
    let list = objects.tenancy.endpoints.list.as_mut().unwrap();
    list.push(testing::endpoint_that_waits(
        "red",
        "web-2",
        "NetworkFull",
        "full",
    ));
    let told = line(&objects, "endpoints").text;
    assert!(
        told.starts_with("2 Provisioned, 1 wait") && told.ends_with("red/web-2 NetworkFull: full"),
        "{told}"
    );
}

#[test]
fn what_tenants_have_is_no_part_of_the_installation() {
    let is_well = |objects: &StatusObjects| is_installed(&report(objects, now()));
    let mut objects = testing::status();
    let waiting = testing::endpoint_that_waits("red", "web-2", "NetworkFull", "full");
    objects.tenancy.endpoints.list.as_mut().unwrap().push(waiting);
    objects.tenancy.vpcs.as_mut().unwrap()[1].status = None;
    let network = &mut objects.tenancy.networks.as_mut().unwrap()[1];
    network.status.as_mut().unwrap().allocated = Some(243);
    assert_eq!(report(&objects, now()).verdict, Verdict::Found);
    assert!(is_well(&objects));
    objects.tenancy.vpcs.as_mut().unwrap()[0].status = None;
    assert!(!is_well(&objects), "the VPC default");
    let mut objects = testing::status();
    objects.droplets.as_mut().unwrap()[1].status = None;
    assert!(!is_well(&objects), "a droplet");
    let mut objects = testing::status();
    objects.control_plane.deployment = Ok(None);
    assert!(!is_well(&objects), "the operator");
}

#[test]
fn what_is_forbidden_is_said_and_the_rest_is_shown() {
    let mut objects = testing::status();
    objects.control_plane.lease = Err(forbidden("the operator's Lease"));
    objects.droplets = Err(forbidden("droplets.thuban.dev"));
    objects.tenancy.vpcs = Err(forbidden("vpcs.thuban.dev"));
    objects.tenancy.networks = Err(forbidden("networks.thuban.dev"));
    objects.tenancy.endpoints.namespace = Some("red".to_owned());
    let told = report(&objects, now());
    assert_eq!(told.verdict, Verdict::Unseen);
    assert_eq!(told.thuban, None);
    let unseen = told.lines.iter().filter(|line| line.level == Level::Unseen);
    assert_eq!(unseen.count(), 5);
    assert_eq!(
        line(&objects, "droplets").text,
        "you may not list droplets.thuban.dev"
    );
    assert!(line(&objects, "endpoints").text.ends_with("in namespace red"));
}

#[test]
fn an_empty_cluster_is_no_fault_of_vpcs() {
    let mut objects = testing::status();
    objects.droplets = Ok(Vec::new());
    objects.tenancy.vpcs = Ok(Vec::new());
    objects.tenancy.networks = Ok(Vec::new());
    objects.tenancy.endpoints.list = Ok(Vec::new());
    let told = report(&objects, now());
    assert_eq!(told.verdict, Verdict::Good);
    for part in ["droplets", "VPCs", "networks", "addresses"] {
        assert_eq!(line(&objects, part).text, "none");
    }
}

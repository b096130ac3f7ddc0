use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use thuban_api::Vip;
use thuban_api::reasons;
use thuban_api::routes::{Announced, PasswordProblem, Report, Serving};

use super::passwords::without_password;
use super::{entry, let_announce, may_have, note};

const ADDRESS: &str = "203.0.113.7";

fn vip(status: &Value) -> Vip {
    let mut vip = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
        "metadata": {"name": "web", "namespace": "red", "uid": "v1"},
        "spec": {"service": "web", "ipFamilies": ["IPv4"]},
        "status": {"addresses": [ADDRESS], "conditions": [{"type": "Accepted", "status": "True", "reason": "Valid",
            "message": "", "lastTransitionTime": ""}]},
    });
    for (field, value) in status.as_object().unwrap() {
        vip["status"][field] = value.clone();
    }
    serde_json::from_value(vip).unwrap()
}

fn deleted(mut vip: Vip) -> Vip {
    vip.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    vip.status.as_mut().unwrap().withdrawn_at = Some("2026-01-01T00:00:30Z".into());
    vip
}

fn report(sequence: u64, announces: bool) -> Report {
    let address = ADDRESS.parse().unwrap();
    let announced = Announced {
        uid: "v1".into(),
        address,
    };
    Report {
        sequence,
        announced: if announces { vec![announced] } else { Vec::new() },
        serves: vec![serving(ADDRESS, "red/web")],
        version: String::new(),
        without_password: Vec::new(),
    }
}

fn serving(address: &str, service: &str) -> Serving {
    Serving {
        address: address.parse().unwrap(),
        service: service.to_owned(),
        on_link: false,
    }
}

fn noted(vip: &mut Vip, report: &Report) -> bool {
    note(vip, "node-a", report, true, Timestamp::now())
}

#[test]
fn only_a_node_that_serves_an_address_gets_it() {
    let address = ADDRESS.parse().unwrap();
    assert!(may_have(&vip(&json!({})), "node-a", address, &report(1, false)));
    assert!(!may_have(
        &deleted(vip(&json!({}))),
        "node-a",
        address,
        &report(1, false)
    ));
    // Until its name is gone, clients come.
    let mut goes = deleted(vip(&json!({})));
    goes.status.as_mut().unwrap().withdrawn_at = None;
    assert!(may_have(&goes, "node-a", address, &report(1, false)));
    let mut others = report(1, false);
    others.serves = vec![serving("203.0.113.8", "red/web")];
    assert!(!may_have(&vip(&json!({})), "node-a", address, &others));
    let never_accepted = vip(&json!({"conditions": []}));
    assert!(!may_have(&never_accepted, "node-a", address, &report(1, false)));
    // If a change was refused, what is served is as it was.
    for (reason, may) in [
        ("ProfileNotFound", true),
        ("PortNotFound", true),
        ("NameTaken", false),
        ("ServiceNotServed", false),
    ] {
        let refused = json!({"conditions": [{"type": "Accepted", "status": "False", "reason": reason,
            "message": "", "lastTransitionTime": ""}]});
        assert_eq!(
            may_have(&vip(&refused), "node-a", address, &report(1, false)),
            may,
            "{reason}"
        );
    }
}

#[test]
fn a_node_gets_an_address_only_for_the_service_that_it_leads_to() {
    let (mut vip, address) = (vip(&json!({})), ADDRESS.parse().unwrap());
    let says = |service: &str| Report {
        serves: vec![serving(ADDRESS, service)],
        ..report(1, false)
    };
    assert!(may_have(&vip, "node-a", address, &says("red/web")));
    for other in ["blue/web", "red/other", "red", ""] {
        assert!(!may_have(&vip, "node-a", address, &says(other)), "{other}");
    }
    let mut both = says("red/web");
    both.serves.push(serving(ADDRESS, "blue/web"));
    assert!(
        !may_have(&vip, "node-a", address, &both),
        "it has an old row, too"
    );
    both.serves.push(serving("203.0.113.8", "blue/web"));
    both.serves.remove(1);
    assert!(may_have(&vip, "node-a", address, &both), "of another address");
    // A speaker that has just started does not know the Service yet, and goes on.
    let_announce(&mut vip, "node-a", 1);
    assert!(may_have(&vip, "node-a", address, &says("")));
    assert!(!may_have(&vip, "node-b", address, &says("")));
    assert!(!may_have(&vip, "node-a", address, &says("blue/web")));
}

#[test]
fn a_node_gets_an_address_of_l2_only_on_its_link() {
    let (vip, address) = (vip(&json!({"announce": "L2"})), ADDRESS.parse().unwrap());
    let mut says = report(1, false);
    assert!(!may_have(&vip, "node-a", address, &says));
    says.serves[0].on_link = true;
    assert!(may_have(&vip, "node-a", address, &says));
}

#[test]
fn only_a_later_request_says_that_a_node_withdrew() {
    let mut vip = deleted(vip(&json!({})));
    assert!(let_announce(&mut vip, "node-a", 5));
    assert!(!let_announce(&mut vip, "node-a", 4), "an abandoned request");
    assert!(
        !noted(&mut vip, &report(5, false)),
        "the request before the answer"
    );
    assert!(!noted(&mut vip, &report(4, false)), "an abandoned request");
    assert_eq!(entry(&vip, "node-a"), Some(5));
    assert!(noted(&mut vip, &report(6, true)), "the node announces");
    assert_eq!(entry(&vip, "node-a"), Some(5));
    assert!(noted(&mut vip, &report(7, false)));
    assert_eq!(entry(&vip, "node-a"), None);
}

#[test]
fn a_node_that_is_to_announce_stays_an_announcer() {
    let mut vip = vip(&json!({"announcers": [{"node": "node-a", "sequence": 5}]}));
    assert!(!noted(&mut vip, &report(6, false)));
    assert!(
        note(&mut vip, "node-a", &report(6, false), false, Timestamp::now()),
        "no peer any more"
    );
    assert_eq!(entry(&vip, "node-a"), None);
}

#[test]
fn who_announces_is_told() {
    let mut vip = vip(&json!({"announcers": [{"node": "node-a", "sequence": 5}]}));
    assert!(noted(&mut vip, &report(6, true)));
    assert!(!noted(&mut vip, &report(7, true)), "nothing new");
    assert_eq!(vip.status.as_ref().unwrap().announced_by, ["node-a"]);
    // A node that was started anew knows the address, and not whose it is.
    let mut anew = report(8, true);
    anew.announced[0].uid = String::new();
    assert!(!noted(&mut vip, &anew));
    assert!(noted(&mut vip, &report(9, false)));
    assert!(vip.status.unwrap().announced_by.is_empty());
}

#[test]
fn a_missing_password_is_told_with_field_and_place() {
    let problems = [
        PasswordProblem::NotFound,
        PasswordProblem::Invalid,
        PasswordProblem::Unreadable,
    ];
    for problem in problems {
        let (reason, note) = without_password(problem, "leaf");
        let place = "spec.passwordSecret: Secret leaf in namespace thuban-bgp ";
        assert!(note.starts_with(place), "{note}");
        let is_explained = reasons::named(reason).any(|reason| reason.is_of("BgpPeer"));
        assert!(is_explained, "{reason}");
    }
}

#[test]
fn a_report_says_nothing_of_passwords_if_all_are_there() {
    let mut report = report(1, false);
    let text = serde_json::to_string(&report).unwrap();
    // An lbaasd from before there were passwords takes the report, too.
    assert!(!text.contains("assword"), "{text}");
    assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    let told = json!({"peer": "leaf", "problem": "NotFound"});
    report.without_password = vec![serde_json::from_value(told).unwrap()];
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
}

#[test]
fn no_node_gets_a_private_address() {
    let (public, private) = (vip(&json!({})), vip(&json!({"vpc": "red"})));
    let address = ADDRESS.parse().unwrap();
    assert!(may_have(&public, "node-a", address, &report(1, false)));
    assert!(!may_have(&private, "node-a", address, &report(1, false)));
}

use thuban_api::{PathHop, PathStep};

use crate::connectivity::{self, Finding, State};
use crate::endpoints::listing;
use crate::report::{Line, PLUGIN, Problem, Report, Verdict};
use crate::{explain, status, testing, tree, version};

use super::Style;

const PLAIN: Style = Style {
    is_wide: false,
    has_colour: false,
};
const WIDE: Style = Style {
    is_wide: true,
    has_colour: false,
};

fn faulty() -> Report {
    let problems = ["a", "b", "c"].map(|name| Problem::new("Network", name, "RangeOverlaps", "taken"));
    let lines = vec![
        Line::new("VPCs", "4 Ready", Vec::new()),
        Line::new("networks", "0/3 Ready", problems.into()),
    ];
    Report::new(Some("0.2.0"), lines)
}

#[test]
fn a_report_has_a_title_and_a_line_for_each_part() {
    let text = super::report(&status::report(&testing::status(), testing::now()), PLAIN);
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines[0].starts_with("Thuban ") && lines[0].contains("plugin "),
        "{text}"
    );
    assert_eq!(lines[1], "OK    operator       2/2, leader on node-a, epoch 7");
    assert_eq!(lines.len(), 7, "{text}");
}

#[test]
fn a_line_that_warns_has_its_remedy_below() {
    let text = super::report(&faulty(), PLAIN);
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines[2].starts_with("WARN  networks       0/3 Ready; a RangeOverlaps: taken; "),
        "{text}"
    );
    assert!(
        lines[3].starts_with("                     choose a free range"),
        "{text}"
    );
    assert_eq!(lines.len(), 4, "{text}");
}

#[test]
fn a_wide_report_has_each_problem_and_its_remedy() {
    let mut report = faulty();
    let message = "network \"d\" has no free IPv4 address; append an IPv4 range";
    let full = Problem::new("Network", "d", "NetworkFull", message);
    report.lines[1].problems.push(full);
    let shared = Problem::new("Network", "e", "DropletsShared", "node-a");
    report.lines[1].problems.push(shared);
    let text = super::report(&report, WIDE);
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    assert_eq!(lines[2], "WARN  networks       0/3 Ready");
    assert_eq!(lines[3], "a RangeOverlaps: taken");
    assert_eq!(lines[5], "c RangeOverlaps: taken");
    assert_eq!(lines[6], "-> choose a free range");
    assert!(lines[7].starts_with("d NetworkFull: "), "{text}");
    assert_eq!(lines[8], "e DropletsShared: node-a");
    assert!(lines[9].starts_with("-> add nodes"), "{text}");
    assert_eq!(lines.len(), 10, "{text}");
}

#[test]
fn colour_is_in_the_word_alone() {
    let style = Style {
        has_colour: true,
        ..PLAIN
    };
    let text = super::report(&faulty(), style);
    assert!(text.contains("\x1b[33mWARN\x1b[0m  networks"), "{text}");
    assert!(!super::report(&faulty(), PLAIN).contains('\x1b'));
}

#[test]
fn the_documented_fields_of_json_are_there() {
    let report = serde_json::to_value(faulty()).unwrap();
    assert_eq!(report["verdict"], "found");
    assert_eq!(report["thuban"], "0.2.0");
    assert_eq!(report["lines"][0]["level"], "ok");
    let line = &report["lines"][1];
    assert_eq!(line["level"], "warn");
    assert_eq!(line["part"], "networks");
    for field in ["object", "reason", "message", "remedy"] {
        assert!(line["problems"][0][field].is_string(), "{line}");
    }
    let tenancy = testing::status().tenancy;
    let tree = serde_json::to_value(tree::tree(&tenancy, None)).unwrap();
    let red = &tree["vpcs"][1];
    assert_eq!(red["sharedServices"][0], "default/registry");
    assert_eq!(red["networks"][0]["bouncers"][0]["droplet"], "node-b");
    let listed = serde_json::to_value(listing(&tenancy.endpoints)).unwrap();
    let endpoint = &listed["endpoints"][2];
    assert_eq!(endpoint["type"], "Simple");
    assert_eq!(endpoint["state"], "Provisioned");
    assert_eq!(endpoint["addresses"][0], "10.0.1.2");
}

#[test]
fn a_table_of_endpoints_has_a_row_for_each() {
    let mut endpoints = testing::status().tenancy.endpoints;
    let list = endpoints.list.as_mut().unwrap();
    list.push(testing::endpoint_that_waits(
        "red",
        "web-2",
        "NetworkFull",
        "none is free",
    ));
    let listing = listing(&endpoints);
    let text = super::endpoints(&listing, PLAIN);
    let cells: Vec<&str> = text.lines().nth(3).unwrap().split_whitespace().collect();
    assert_eq!(
        cells,
        [
            "red",
            "web-1-00000000",
            "web-1",
            "red",
            "red-web",
            "10.0.1.2",
            "node-a",
            "Provisioned"
        ]
    );
    assert!(
        text.contains("NetworkFull") && !text.contains("none is free"),
        "{text}"
    );
    assert!(super::endpoints(&listing, WIDE).contains("NetworkFull: none is free"));
}

#[test]
fn an_answer_has_its_verdict_first_and_its_remedy_last() {
    let text = super::answer(&testing::answer("NO", "PolicyDenies"), PLAIN);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines,
        [
            "NO  red/web-0 > red/db-0:5432/tcp",
            " ok    source    VPC red, red-web, 10.0.1.3",
            " FAIL  policies  PolicyDenies: denied",
            "                 -> accept them",
        ]
    );
    let text = super::answer(&testing::answer("OK", ""), PLAIN);
    assert!(
        text.starts_with("OK  ") && text.ends_with("policies  accepted\n"),
        "{text}"
    );
    let colourful = Style {
        has_colour: true,
        ..PLAIN
    };
    let text = super::answer(&testing::answer("UNKNOWN", "PortNeeded"), colourful);
    assert!(text.starts_with("\x1b[33mUNKNOWN\x1b[0m  red/web-0"), "{text}");
}

#[test]
fn hops_and_the_answer_of_a_probe_come_last() {
    let mut answer = testing::answer("NO", "ProbeRefused");
    let hop = |node: &str, program: &str, verdict: &str, next: &str, microseconds: u32| PathHop {
        node: node.to_owned(),
        program: program.to_owned(),
        verdict: verdict.to_owned(),
        next: (!next.is_empty()).then(|| next.to_owned()),
        microseconds,
    };
    answer.hops = vec![
        hop("node-b", "agent", "sent_to_divider", "node-a", 0),
        hop("node-a10", "transit", "delivered", "db-0", 1_388),
        hop("node-c", "transit", "dropped, policy_ingress", "", 7),
    ];
    answer.answer = answer.steps.pop().map(|step| PathStep {
        name: "answer".to_owned(),
        ..step
    });
    let text = super::answer(&answer, PLAIN);
    let lines: Vec<&str> = text.lines().skip(2).collect();
    assert_eq!(
        lines,
        [
            " +0.000 ms  node-b    agent     sent_to_divider, node-a",
            " +1.388 ms  node-a10  transit   delivered to db-0",
            " +0.007 ms  node-c    transit   dropped, policy_ingress",
            " FAIL  answer    ProbeRefused: denied",
            "                 -> accept them",
        ]
    );
}

#[test]
fn an_answer_for_programs_has_the_documented_fields() {
    let answer = serde_json::to_value(testing::answer("NO", "PolicyDenies")).unwrap();
    assert_eq!(answer["verdict"], "NO");
    assert_eq!(answer["path"], "red/web-0 > red/db-0:5432/tcp");
    assert_eq!(answer["reason"], "PolicyDenies");
    assert_eq!(answer["steps"][1]["state"], "fail");
    assert!(answer["evaluatedAt"].is_string(), "{answer}");
}

#[test]
fn a_connectivity_test_has_lines_and_a_summary() {
    let finding = |state: State, message: &str| Finding {
        group: "pairs",
        check: "red > web-0 (TCP)".to_owned(),
        state,
        message: message.to_owned(),
    };
    let checks = vec![
        finding(State::Ok, "red/web-0 answered"),
        finding(State::Fail, "no answer in time"),
    ];
    let lines: Vec<String> = checks.iter().map(|one| super::finding(one, PLAIN)).collect();
    assert_eq!(
        lines,
        [
            " ok    pairs      red > web-0 (TCP): red/web-0 answered\n",
            " FAIL  pairs      red > web-0 (TCP): no answer in time\n",
        ]
    );
    let report = connectivity::Report {
        verdict: Verdict::Found,
        plugin: PLUGIN,
        checks,
        error: Some("stopped by the user".to_owned()),
        left: vec!["VPC red: is being deleted".to_owned()],
        remedy: "ask why".to_owned(),
    };
    assert_eq!(
        super::connectivity(&report, PLAIN),
        "NO       1 checks passed, 1 failed, 0 skipped\n         stopped by the user\n         \
         not deleted: VPC red: is being deleted\n         -> ask why\n"
    );
    let value = serde_json::to_value(&report).unwrap();
    assert_eq!(value["checks"][1]["state"], "fail");
    assert_eq!(value["verdict"], "found");
}

#[test]
fn a_tree_is_drawn() {
    let text = super::tree(&tree::tree(&testing::status().tenancy, Some("red")));
    assert_eq!(
        text,
        "VPC red  VNI 7  10.0.0.0/16\n\
         ├─ divider red-d0  on node-a\n\
         ├─ shared Services: default/registry\n\
         └─ network red-web  10.0.1.0/24\n   \
            ├─ bouncer red-web-b0  on node-b\n   \
            ├─ service red/shop  10.96.0.7\n   \
            ├─ endpoint red/kept  10.0.1.50  no pod\n   \
            └─ pod red/web-1  10.0.1.2  on node-a\n"
    );
}

#[test]
fn names_and_versions_are_explained() {
    let text = super::explanations(&explain::explain("outside_vpc"));
    assert!(text.starts_with("outside_vpc (drop)\n  meaning"), "{text}");
    let objects = testing::status();
    let text = super::versions(&version::versions(&objects.control_plane, &objects.droplets));
    assert!(
        text.contains("transitd  ") && text.contains(" on 2 droplets"),
        "{text}"
    );
}

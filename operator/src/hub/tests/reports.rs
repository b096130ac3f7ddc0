//! Tests of droplets' reports of attachments: which of them count, and for what.

use std::time::Duration;

use thuban_proto::transit::Attachment;
use thuban_rows::Kinds;

use super::{V4, VNI, attachment, endpoint, hub, is_live, name};
use crate::hub::Report;

#[tokio::test(start_paused = true)]
async fn a_report_that_nothing_bears_out_blocks_no_address_for_long() {
    let (hub, _woken) = hub();
    let (_, _first) = hub.open("a", &[], &[], Kinds::all());
    tokio::time::advance(Duration::from_secs(299)).await;
    hub.attach("a", &attachment(), false);
    assert!(is_live(&hub, ""), "etcd may have lost the pod");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(!is_live(&hub, ""));
    let (_, _second) = hub.open("a", &[attachment()], &[], Kinds::all());
    assert!(!is_live(&hub, ""), "a new stream is no new droplet");
    let is_bound = |report: &Report| report.droplet == "a" && report.uid == "u1" && report.vni == VNI;
    assert!(hub.is_live(VNI, V4, "", |report, _| is_bound(report).then_some(true)));
    assert!(
        !hub.is_live(VNI, V4, "u1", |_, _| Some(true)),
        "not to the pod itself"
    );
    hub.open("b", &[attachment()], &[], Kinds::all());
    assert!(is_live(&hub, ""), "another droplet that was away");
}

#[test]
fn only_its_own_droplet_wakes_an_endpoint_by_a_report() {
    let (hub, mut woken) = hub();
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    while woken.try_recv().is_ok() {}
    for removed in [false, true] {
        hub.attach("a", &attachment(), removed);
        assert!(woken.try_recv().is_err());
        hub.attach("c", &attachment(), removed);
        assert!(woken.try_recv().is_ok());
    }
}

#[test]
fn a_report_on_anothers_pod_says_nothing_about_its_attachment() {
    let (hub, _woken) = hub();
    let (_, _home) = hub.open("c", &[], &[], Kinds::all());
    let (_, _thief) = hub.open("a", &[], &[], Kinds::all());
    for number in 0..100 {
        let forged = Attachment {
            container_id: format!("c{number}"),
            ..attachment()
        };
        hub.attach("a", &forged, false);
    }
    assert!(!hub.may_be_attached("u1", "c"));
    assert!(hub.attached_addresses("u1", "c", VNI).is_empty());
    hub.attach("c", &attachment(), false);
    assert!(hub.may_be_attached("u1", "c"), "its own report has room");
    assert_eq!(hub.attached_addresses("u1", "c", VNI), [V4]);
}

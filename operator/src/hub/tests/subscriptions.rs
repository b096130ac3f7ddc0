//! Tests of what a droplet may ask for: addresses of VPCs in which it has a part, up to a quota.

use std::net::{IpAddr, Ipv4Addr};

use thuban_proto::transit::row;
use thuban_rows::Kinds;

use super::{ADDRESS, V4, V6, VNI, endpoint, holding, hub, name, received};
use crate::metrics;
use crate::model::world::RoleKind;

/// Returns how many subscriptions were refused for this reason, in all tests of this process.
fn refused(reason: &str) -> u64 {
    let series = format!(r#"thuban_operator_subscriptions_refused_total{{reason="{reason}"}}"#);
    let text = metrics::text().unwrap();
    let mut lines = text.lines();
    let line = lines.find_map(|line| line.strip_prefix(&series)?.trim().parse().ok());
    line.unwrap_or_default()
}

#[test]
fn only_droplets_of_the_vpc_may_ask_where_an_address_is() {
    let (hub, _woken) = hub();
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    hub.update(|world| world.set_droplet("stranger", Some(Ipv4Addr::new(172, 16, 0, 9))));
    let before = refused("no_part");
    assert!(!hub.subscribe("stranger", VNI, V4, true));
    let (_, mut stream) = hub.open("stranger", &[], &[(VNI, V4), (VNI, V6)], Kinds::all());
    let rows = &received(&mut stream)[0].upserts;
    assert!(
        rows.iter()
            .all(|row| matches!(row.row, Some(row::Row::Droplet(_)))),
        "{rows:?}"
    );
    assert!(refused("no_part") >= before + 3, "each is counted");
}

#[test]
fn a_droplet_asks_for_no_more_addresses_than_its_quota() {
    let (hub, _woken) = hub();
    let before = refused("quota");
    let address = |number: u32| IpAddr::from(Ipv4Addr::from(u32::from(ADDRESS) + number));
    let granted = (0..5000).filter(|number| hub.subscribe("a", VNI, address(*number), true));
    assert_eq!(granted.count(), 4096);
    assert!(refused("quota") >= before + 904);
}

#[test]
fn a_droplet_is_told_nothing_of_a_vpc_that_it_has_left() {
    let (hub, _woken) = hub();
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    let mut streams = ["a", "b", "c"].map(|droplet| {
        let (id, stream) = hub.open(droplet, &[], &[], Kinds::all());
        assert!(hub.ack(droplet, id, 1));
        (id, stream)
    });
    assert!(hub.subscribe("a", VNI, V4, true));
    assert!(hub.ack("a", streams[0].0, 2));
    received(&mut streams[0].1);
    hub.update(|world| world.set_role(RoleKind::Divider, "red-d0", None));
    let left = received(&mut streams[0].1);
    let deletes: usize = left.iter().map(|program| program.deletes.len()).sum();
    assert_eq!(deletes, 3, "the VPC's, the network's and the address's row");
    // It acks nothing of that.
    assert!(hub.ack("b", streams[1].0, 2) && hub.ack("c", streams[2].0, 2));
    hub.update(|world| world.set_endpoint(&name(), None));
    assert!(hub.ack("b", streams[1].0, 3) && hub.ack("c", streams[2].0, 3));
    assert!(
        received(&mut streams[0].1).is_empty(),
        "another's end is not told"
    );
    assert_eq!(holding(&hub, &[V4], &[]), ["a"], "the row that it had");
    assert_eq!(holding(&hub, &[V6], &[]), [""; 0], "and no other one");
}

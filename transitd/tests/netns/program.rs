//! Programs over the stream: the rows that reach the tables, the rows that are nacked, and the rows that a new snapshot
//! removes.

use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::{AddressKey, BouncerRow, NackReason, RowKey, VpcRow, row::Row, row_key::Key};

use crate::rig::{NODE, Rig, base_rows, local, mapped};

#[test]
fn rows_reach_the_tables_and_leave_them() {
    let rig = Rig::new(base_rows());
    assert_eq!(rig.rows("VPCS").len(), 2);
    assert_eq!(rig.rows("SUBNETS").len(), 4);
    let remote = Row::Bouncer(BouncerRow {
        address6: vec![],
        vni: 7,
        address: mapped(9),
        droplet: vec![192, 0, 2, 2],
    });
    rig.operator.push_and_wait(vec![remote], vec![]);
    assert_eq!(rig.rows("BOUNCER_ROWS")[0]["entry"]["droplet"], "192.0.2.2");
    let key = Key::Bouncer(AddressKey {
        vni: 7,
        address: mapped(9),
    });
    rig.operator
        .push_and_wait(vec![], vec![RowKey { key: Some(key) }]);
    assert!(rig.rows("BOUNCER_ROWS").is_empty());
}

#[test]
fn a_row_that_is_not_valid_is_nacked_and_the_others_are_applied() {
    let rig = Rig::new(base_rows());
    let bad = Row::Vpc(VpcRow {
        vni: 1 << 24,
        cidrs: vec!["10.9.0.0/16".into()],
        ..Default::default()
    });
    let good = Row::Vpc(VpcRow {
        vni: 9,
        cidrs: vec!["10.9.0.0/16".into()],
        ..Default::default()
    });
    rig.operator.push_and_wait(vec![bad, good], vec![]);
    let nack = rig
        .operator
        .wait_for("the nack", |m| matches!(m, Message::Nack(_)));
    let Message::Nack(nack) = nack else { unreachable!() };
    assert_eq!(nack.reason(), NackReason::Invalid);
    assert_eq!(nack.key.unwrap().key, Some(Key::Vpc(1 << 24)));
    assert_eq!(rig.rows("VPCS").len(), 3);
}

#[test]
fn the_same_address_of_another_vpc_on_this_droplet_is_nacked() {
    let mut rig = Rig::new(base_rows());
    rig.operator.push_and_wait(vec![local(7, "red", 5)], vec![]);
    rig.operator.push_and_wait(vec![local(8, "blue", 5)], vec![]);
    let Message::Nack(nack) = rig
        .operator
        .wait_for("the nack", |m| matches!(m, Message::Nack(_)))
    else {
        unreachable!()
    };
    assert_eq!(nack.reason(), NackReason::AddressInUseOnNode);
    assert!(
        !nack.message.contains("red"),
        "never the other tenant: {}",
        nack.message
    );
    assert_eq!(
        nack.key.unwrap().key,
        Some(Key::Local(AddressKey {
            vni: 8,
            address: mapped(5)
        }))
    );
    rig.add_pod("red");
    let netns = rig.pod_namespace("blue");
    assert_eq!(rig.add("blue", "blue", &netns).unwrap_err().code, 11);
}

#[test]
fn a_full_table_is_nacked_and_leaves_the_others_right() {
    let rig = Rig::new(base_rows());
    // VPCS holds 16384: two are there.
    let vpc = |vni| {
        Row::Vpc(VpcRow {
            vni,
            dividers: vec![NODE.to_vec()],
            ..Default::default()
        })
    };
    rig.operator
        .push_and_wait((100..100 + 16384).map(vpc).collect(), vec![]);
    let full = |m: &&Message| matches!(m, Message::Nack(nack) if nack.reason() == NackReason::TableFull);
    let nacks = rig
        .operator
        .shared
        .lock()
        .unwrap()
        .received
        .iter()
        .filter(full)
        .count();
    assert_eq!(nacks, 2);
    assert_eq!(rig.rows("VPCS").len(), 16384);
    rig.operator.push_and_wait(
        vec![],
        (100..100 + 16384)
            .map(|vni| RowKey {
                key: Some(Key::Vpc(vni)),
            })
            .collect(),
    );
    assert_eq!(rig.rows("VPCS").len(), 2);
}

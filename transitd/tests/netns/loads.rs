//! The packets that this droplet's roles pass on: they are counted while the roles are here, and reported to the
//! operator while there are any.

use std::time::Duration;

use thuban_proto::transit::{
    BouncerRow, DropletRow, Load, NetworkRow, VpcRow, droplet_message::Message, row::Row,
};

use crate::rig::{NODE, Rig, base_rows, eventually, local, mapped};
use crate::wire::Peer;

const NETWORK: u32 = 0x0a00_0100;

/// Returns a rig where 10.0.1.99 lives on the second droplet, and the second network is bounced there.
fn rig() -> Rig {
    let mut rows = base_rows();
    for last in [2, 3] {
        rows.push(Row::Droplet(DropletRow {
            address: vec![192, 0, 2, last],
            ..DropletRow::default()
        }));
    }
    rows.push(Row::Bouncer(BouncerRow {
        vni: 7,
        address: mapped(99),
        droplet: vec![192, 0, 2, 2],
        address6: vec![],
    }));
    rows.push(Row::Network(NetworkRow {
        vni: 7,
        network: 0x0a00_0200,
        cidrs: vec!["10.0.2.0/24".into()],
        bouncers: vec![vec![192, 0, 2, 2]],
        ..NetworkRow::default()
    }));
    rows.push(local(7, "p", 5));
    let mut rig = Rig::prepare(rows);
    rig.flags = vec!["--load-interval".into(), "1".into()];
    rig.start();
    rig.operator.wait_for_ack();
    rig
}

fn is_load(message: &Message) -> bool {
    matches!(message, Message::Load(_))
}

fn load_of(load: &Load, network: u32) -> u64 {
    let role = |role: &&thuban_proto::transit::RoleLoad| (role.vni, role.network) == (7, network);
    load.roles
        .iter()
        .find(role)
        .map_or(0, |role| role.packets_per_second)
}

/// Waits until a load of that role is reported; returns the whole load.
fn told(rig: &Rig, network: u32) -> Load {
    let is_it = |m: &Message| matches!(m, Message::Load(load) if load_of(load, network) > 0);
    match rig.operator.wait_for("the load", is_it) {
        Message::Load(load) => load,
        _ => unreachable!(),
    }
}

#[test]
fn inline_roles_and_transit_count_load_and_report_end_once() {
    let mut rig = rig();
    rig.add_pod("p");
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(rig.operator.count(is_load), 0, "nothing is passed on");
    // The pod's agent sends these: this droplet bounces for its network, and divides for the other.
    assert!(!rig.ping("p", "10.0.1.99"));
    let load = told(&rig, NETWORK);
    assert!(load.roles.len() == 1 && load_of(&load, NETWORK) <= 4, "{load:?}");
    assert!(!rig.ping("p", "10.0.2.9"));
    told(&rig, 0);
    // The end of the first role's load was reported while the second role's echo requests waited.
    let is_end = |m: &Message| matches!(m, Message::Load(load) if load.roles.is_empty());
    eventually("the end of the load", || {
        let shared = rig.operator.shared.lock().unwrap();
        let last = shared.received.iter().rfind(|message| is_load(message));
        last.is_some_and(is_end)
    });
    let ends = rig.operator.count(is_end);
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(rig.operator.count(is_end), ends, "told once");
    // Transit passes these on for others.
    rig.operator.forget_received();
    let third = Peer::new(&rig, 3);
    for _ in 0..100 {
        for destination in ["10.0.1.99", "10.0.2.9"] {
            third.send(7, "10.0.1.98".parse().unwrap(), destination.parse().unwrap());
        }
        // The source is the pod's own address, and the packet comes from elsewhere: it is dropped.
        third.send(7, "10.0.1.5".parse().unwrap(), "10.0.1.99".parse().unwrap());
    }
    for network in [NETWORK, 0] {
        rig.operator.wait_for(
            "the load by transit",
            |m| matches!(m, Message::Load(load) if load_of(load, network) > 0),
        );
    }
    rig.operator.wait_for("its end", is_end);
    let shared = rig.operator.shared.lock().unwrap();
    let sum = |network| -> u64 {
        let loads = shared.received.iter().filter_map(|message| match message {
            Message::Load(load) => Some(load_of(load, network)),
            _ => None,
        });
        loads.sum()
    };
    // An interval is a second; rates are rounded up.
    assert!((95..=110).contains(&sum(NETWORK)), "{}", sum(NETWORK));
    assert!((95..=110).contains(&sum(0)), "{}", sum(0));
}

#[test]
fn entries_come_and_go_with_the_roles_and_outlive_transitd() {
    let mut rig = rig();
    rig.add_pod("p");
    assert_eq!(rig.rows("LOADS").len(), 4, "a divider and a bouncer of two VPCs");
    assert!(!rig.ping("p", "10.0.1.99"));
    told(&rig, NETWORK);
    rig.kill();
    assert!(!rig.ping("p", "10.0.1.99"));
    rig.start();
    rig.operator.wait_for_ack();
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(
        rig.operator.count(is_load),
        0,
        "of the time before nothing is told"
    );
    assert_eq!(rig.rows("LOADS").len(), 4);
    assert!(!rig.ping("p", "10.0.1.99"));
    told(&rig, NETWORK);
    let not_here = [
        Row::Vpc(VpcRow {
            vni: 7,
            cidrs: vec!["10.0.0.0/16".into()],
            dividers: vec![NODE.to_vec()],
            ..VpcRow::default()
        }),
        Row::Network(NetworkRow {
            vni: 7,
            network: NETWORK,
            cidrs: vec!["10.0.1.0/24".into()],
            bouncers: vec![NODE.to_vec()],
            ..NetworkRow::default()
        }),
    ];
    rig.operator.push_and_wait(not_here.to_vec(), vec![]);
    let of_vpc = |rig: &Rig| {
        rig.rows("LOADS")
            .iter()
            .filter(|row| row["key"]["vni"] == 7)
            .count()
    };
    assert_eq!(of_vpc(&rig), 0);
    rig.kill();
    rig.operator
        .shared
        .lock()
        .unwrap()
        .rows
        .retain(|row| !matches!(row, Row::Vpc(vpc) if vpc.vni == 8));
    rig.start();
    rig.operator.wait_for_ack();
    eventually("the sweep takes the divider's", || rig.rows("LOADS").len() == 1);
}

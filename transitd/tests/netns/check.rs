//! CHECK by the real plugin: it looks at everything that ADD made, in the kernel, and leaves alone what others add.

use serde_json::{Value, json};
use thuban_proto::transit::{RowKey, row::Row, row_key::Key};

use crate::rig::{Rig, dual, dual_rows, eventually, mapped};

fn rig() -> (Rig, Value) {
    let mut rows: Vec<Row> = dual_rows();
    rows.push(dual(7, "p1", 5));
    let mut rig = Rig::new(rows);
    rig.pod_namespace("p1");
    let result = rig.plugin_add("p1");
    (rig, result)
}

/// Returns the error of CHECK with its code, or nothing.
fn check(rig: &Rig, result: &Value) -> Option<(u64, String)> {
    let (exit, error) = rig.plugin("CHECK", "p1", "1.1.0", json!({ "prevResult": result }));
    (exit != 0).then(|| {
        (
            error["code"].as_u64().unwrap(),
            error["msg"].as_str().unwrap().to_owned(),
        )
    })
}

#[test]
fn each_loss_in_the_pod_is_named_and_its_repair_is_seen() {
    let (rig, result) = rig();
    let gateway6 = result["routes"][1]["gw"].as_str().unwrap().to_owned();
    let host = result["interfaces"][0]["name"].as_str().unwrap().to_owned();
    assert_eq!(check(&rig, &result), None);
    let neighbour = |gateway: &str| {
        format!("ip neighbour replace {gateway} lladdr 02:54:68:75:62:61 dev eth0 nud permanent")
    };
    for (damage, repair, named) in [
        (
            "ip route del default".to_owned(),
            "ip route add default via 10.0.1.1 dev eth0".to_owned(),
            "default route via 10.0.1.1",
        ),
        (
            "ip -6 route del default".to_owned(),
            format!("ip -6 route add default via {gateway6} dev eth0"),
            "default route via fe80",
        ),
        (
            "ip neighbour del 10.0.1.1 dev eth0".to_owned(),
            neighbour("10.0.1.1"),
            "neighbour 10.0.1.1",
        ),
        (
            format!("ip neighbour del {gateway6} dev eth0"),
            neighbour(&gateway6),
            "neighbour fe80",
        ),
        (
            "ip -6 address del fd00:1::5/64 dev eth0".to_owned(),
            "ip -6 address add fd00:1::5/64 dev eth0 nodad".to_owned(),
            "address fd00:1::5",
        ),
        (
            "ip link set eth0 address 02:00:00:00:00:99".to_owned(),
            // The kernel forgets all neighbours when the MAC changes.
            format!(
                "ip link set eth0 address 02:07:0a:00:01:05; {}; {}",
                neighbour("10.0.1.1"),
                neighbour(&gateway6)
            ),
            "another MAC than 02:07:0a:00:01:05",
        ),
    ] {
        assert!(rig.in_pod("p1", &damage), "{damage}");
        let (code, message) = check(&rig, &result).unwrap();
        assert!(
            code == 104 && message.contains(named),
            "{damage}: {code} {message}"
        );
        assert!(rig.in_pod("p1", &repair), "{repair}");
        // The kernel drops a neighbour's route for a moment when the MAC changes.
        eventually("repaired", || check(&rig, &result).is_none());
    }
    for (damage, named) in [
        ("ip address del 10.0.1.5/24 dev eth0", "address 10.0.1.5"),
        ("ip link set eth0 down", "interface eth0"),
        ("ip link set eth0 name other", "interface eth0"),
        (
            "ip link add eth0 type veth peer name x; ip link set eth0 up",
            "interface eth0",
        ),
    ] {
        assert!(rig.in_pod("p1", damage), "{damage}");
        let (code, message) = check(&rig, &result).unwrap();
        assert!(
            code == 104 && message.contains(named),
            "{damage}: {code} {message}"
        );
    }
    assert!(rig.in_pod("p1", "ip link del other"));
    let (code, message) = check(&rig, &result).unwrap();
    assert!(code == 104 && message.contains(&host), "{code} {message}");
}

#[test]
fn each_loss_on_the_node_is_named_and_its_repair_is_seen() {
    let (rig, result) = rig();
    let host = result["interfaces"][0]["name"].as_str().unwrap().to_owned();
    assert_eq!(check(&rig, &result), None);
    let says = |what: &str, named: &str| {
        let (code, message) = check(&rig, &result).unwrap_or_else(|| panic!("{what} was not seen"));
        assert!(code == 104 && message.contains(named), "{what}: {code} {message}");
    };
    for (table, address) in [("", "10.0.1.5"), ("-6 ", "fd00:1::5")] {
        let route = rig.on_node(&format!("ip {table}route show table 6081 {address}"));
        rig.on_node(&format!("ip {table}route del table 6081 {address}"));
        says("the host's route", &format!("host's route to {address}"));
        rig.on_node(&format!("ip {table}route add table 6081 {}", route.trim()));
        assert_eq!(check(&rig, &result), None, "{route}");
    }
    // Its row is removed behind transitd's back, and by the operator.
    let bpffs = rig.pins();
    let map = bpffs.join("maps/ATTACHMENTS").display().to_string();
    let rows = |action: &str| {
        rig.on_node(&format!(
            "key=$(bpftool -j map dump pinned {map} | grep -o '\"key\":\\[[^]]*\\]' | head -1 \
             | tr -d '\"[]' | sed 's/key://; s/,/ /g'); bpftool map {action} pinned {map} key $key"
        ))
    };
    rows("lookup");
    rows("delete");
    says("the row in the kernel", "no table row leads 10.0.1.5");
    let (rig, result) = self::rig();
    let key = thuban_proto::transit::AddressKey {
        vni: 7,
        address: mapped(5),
    };
    rig.operator.push_and_wait(
        vec![],
        vec![RowKey {
            key: Some(Key::Local(key)),
        }],
    );
    let (code, message) = check(&rig, &result).unwrap();
    assert!(code == 104 && message.contains("no table row"), "{message}");
    rig.operator.push_and_wait(vec![dual(7, "p1", 5)], vec![]);
    assert_eq!(check(&rig, &result), None);
    let host2 = result["interfaces"][0]["name"].as_str().unwrap();
    rig.on_node(&format!("tc filter del dev {host2} ingress"));
    let (code, message) = check(&rig, &result).unwrap();
    assert!(
        code == 104 && message.contains("agent_tc is not attached"),
        "{message}"
    );
    rig.on_node(&format!("ip link set {host2} down"));
    assert!(check(&rig, &result).unwrap().1.contains(host2));
    drop(host);
}

#[test]
fn prev_result_must_match_but_chained_plugins_may_extend() {
    let (rig, result) = rig();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut changed = result.clone();
        change(&mut changed);
        check(&rig, &changed)
    };
    assert!(
        with(&|r| r["ips"][0]["address"] = json!("10.0.1.6/24"))
            .unwrap()
            .1
            .contains("10.0.1.5")
    );
    assert!(
        with(&|r| r["interfaces"][0]["name"] = json!("thb00000000000"))
            .unwrap()
            .1
            .contains("prevResult")
    );
    assert!(
        with(&|r| r["interfaces"][1]["mac"] = json!("02:00:00:00:00:01"))
            .unwrap()
            .1
            .contains("02:07")
    );
    let more = with(&|r| {
        r["interfaces"]
            .as_array_mut()
            .unwrap()
            .push(json!({"name": "ifb0"}));
        r["ips"]
            .as_array_mut()
            .unwrap()
            .push(json!({"address": "10.99.0.1/24", "interface": 2}));
        r["routes"]
            .as_array_mut()
            .unwrap()
            .push(json!({"dst": "10.98.0.0/16"}));
    });
    assert_eq!(more, None);
    // A later plugin took the default route away and says so.
    assert!(rig.in_pod("p1", "ip route del default"));
    assert!(check(&rig, &result).is_some());
    assert_eq!(with(&|r| r["routes"] = json!([])), None);
}

#[test]
fn check_uses_files_alone_after_restart_without_operator() {
    let (mut rig, result) = rig();
    rig.kill();
    // The operator's epoch is lower than the one that transitd saw: transitd applies nothing of it.
    rig.operator.shared.lock().unwrap().epoch = 0;
    rig.start();
    eventually("transitd answers", || check(&rig, &result).is_none());
    assert!(rig.in_pod("p1", "ip route del default"));
    assert_eq!(check(&rig, &result).unwrap().0, 104);
}

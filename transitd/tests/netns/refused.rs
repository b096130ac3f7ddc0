//! Programs that cannot replace their predecessors: the old ones stay, and transitd reports that.

use object::{Object, ObjectSection, ObjectSymbol};
use serde_json::{Value, json};

use crate::rig::{Rig, base_rows, eventually, local};

/// The first byte of a call.
const CALL: u8 = 0x85;
/// Register 10 becomes 0.
const WRITE_TO_FRAME_POINTER: [u8; 8] = [0xb7, 0x0a, 0, 0, 0, 0, 0, 0];

fn rig() -> Rig {
    let mut rows = base_rows();
    rows.extend([local(7, "p1", 5), local(7, "p2", 6), local(7, "p3", 7)]);
    let mut rig = Rig::new(rows);
    for pod in ["p1", "p2", "p3"] {
        rig.pod_namespace(pod);
    }
    rig.plugin_add("p1");
    rig.plugin_add("p2");
    rig
}

/// Writes the same object in which these programs begin with a write to the frame pointer, which the verifier refuses.
fn broken(rig: &Rig, programs: &[&str]) -> std::path::PathBuf {
    let mut bytes = std::fs::read(&rig.programs).unwrap();
    let offsets: Vec<u64> = {
        let file = object::File::parse(&*bytes).unwrap();
        let offset = |name: &&str| {
            let symbol = file.symbols().find(|symbol| symbol.name() == Ok(name)).unwrap();
            let section = file.section_by_index(symbol.section_index().unwrap()).unwrap();
            section.file_range().unwrap().0 + symbol.address()
        };
        programs.iter().map(offset).collect()
    };
    for offset in offsets {
        // The loader looks for the functions that calls name.
        let mut at = offset as usize;
        while bytes[at] == CALL {
            at += 8;
        }
        bytes[at..at + 8].copy_from_slice(&WRITE_TO_FRAME_POINTER);
    }
    let path = rig.directory.join("broken.o");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Returns pinned links with the ids of the programs that they run and their own ids; and `agent_tc_<interface>` for
/// each filter of an agent, with its interface's index as its own id.
fn attached(rig: &Rig) -> Vec<(String, Value, Value)> {
    let links = rig.pins().join("links");
    let mut found: Vec<_> = std::fs::read_dir(&links)
        .unwrap()
        .map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let shown = rig.on_node(&format!(
                "bpftool -j link show pinned {}",
                links.join(&name).display()
            ));
            let shown: Value = serde_json::from_str(&shown).unwrap();
            (name, shown["prog_id"].clone(), shown["id"].clone())
        })
        .collect();
    let interfaces: Value = serde_json::from_str(&rig.on_node("ip -j link show type veth")).unwrap();
    for interface in interfaces.as_array().unwrap() {
        let name = interface["ifname"].as_str().unwrap();
        let filters = rig.on_node(&format!("tc -j filter show dev {name} ingress"));
        let filters: Value = serde_json::from_str(&filters).unwrap();
        let programs = filters
            .as_array()
            .unwrap()
            .iter()
            .map(|f| &f["options"]["prog"]["id"]);
        for program in programs.filter(|id| id.is_number()) {
            found.push((
                format!("agent_tc_{name}"),
                program.clone(),
                interface["ifindex"].clone(),
            ));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

#[test]
fn refused_program_leaves_the_old_one_and_is_reported() {
    let mut rig = rig();
    eventually("ready", || rig.directory.join("run/ready").exists());
    let before = attached(&rig);
    assert_eq!(before.len(), 3, "{before:?}");
    let good = rig.programs.clone();
    rig.kill();
    rig.programs = broken(&rig, &["agent_tc", "transit_tc"]);
    rig.start();
    rig.operator.wait_for_ack();
    assert_eq!(attached(&rig), before, "the very same programs\n{}", rig.log());
    assert!(rig.ping("p1", "10.0.1.6") && rig.ping_from_node("10.0.1.5"));
    for program in ["agent_tc", "transit_tc"] {
        let said = format!("the old {program} stays on");
        assert!(rig.log().contains(&said), "{said}: {}", rig.log());
    }
    // transitd cannot serve an ADD, and does not let a rolling update go on to the next node.
    assert!(!rig.directory.join("run/ready").exists());
    let (exit, error) = rig.plugin("ADD", "p3", "1.1.0", json!({}));
    assert_eq!((exit, &error["code"]), (1, &json!(102)), "{error}");
    assert!(!rig.in_pod("p3", "ip link show eth0"));
    std::fs::remove_file(rig.directory.join("run/served")).unwrap();
    let (_, error) = rig.plugin("STATUS", "p3", "1.1.0", json!({}));
    assert_eq!(error["code"], 50);
    assert!(
        error["msg"].as_str().unwrap().contains("the kernel refuses"),
        "{error}"
    );
    assert_eq!(rig.plugin("DEL", "p2", "1.1.0", json!({})), (0, Value::Null));
    // Programs that the kernel accepts replace the old ones in the same places.
    rig.kill();
    rig.programs = good;
    rig.start();
    eventually("ready", || rig.directory.join("run/ready").exists());
    let after = attached(&rig);
    assert_eq!(after.len(), 2, "{after:?}");
    for (name, program, link) in &after {
        let (_, old, old_link) = before.iter().find(|(other, _, _)| other == name).unwrap();
        assert!(program != old && link == old_link, "{name}");
    }
    rig.plugin_add("p3");
    assert!(rig.ping("p3", "10.0.1.5"));
}

#[test]
fn refused_program_stops_daemon_with_reason_on_fresh_node() {
    let mut rig = Rig::prepare(base_rows());
    rig.programs = broken(&rig, &["transit_tc"]);
    rig.start();
    assert_eq!(rig.wait_for_exit(), Some(1));
    assert!(rig.log().contains("transit_tc"), "{}", rig.log());
    assert!(!rig.directory.join("conf/05-thuban.conflist").exists());
}

#[test]
fn a_veth_that_was_replaced_under_its_name_gets_its_agent_again() {
    let mut rig = rig();
    let before = attached(&rig);
    let host = before[0].0.strip_prefix("agent_tc_").unwrap().to_owned();
    rig.kill();
    rig.on_node(&format!(
        "ip link del {host} && ip link add {host} address 02:54:68:75:62:61 type veth peer name other"
    ));
    rig.start();
    rig.operator.wait_for_ack();
    let after = attached(&rig);
    assert_eq!(after.len(), before.len());
    for ((name, _, link), (_, _, old)) in after.iter().zip(&before) {
        assert_eq!(name.ends_with(&host), link != old, "{name}: {before:?} {after:?}");
    }
    assert!(!rig.log().contains("stays in place"), "{}", rig.log());
}

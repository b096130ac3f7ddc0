//! A node that runs out of something: disk, rows, file descriptors, memory. An ADD names the missing resource and
//! leaves nothing, existing pods go on, and everything works again when there is room.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use object::{Object, ObjectSection, ObjectSymbol};
use serde_json::{Value, json};

use crate::rig::{Rig, base_rows, eventually, local};
use crate::socket::usage;

fn prepare() -> Rig {
    let mut rows = base_rows();
    rows.extend([local(7, "p1", 5), local(7, "p2", 6), local(7, "p3", 7)]);
    let mut rig = Rig::prepare(rows);
    for pod in ["p1", "p2", "p3"] {
        rig.pod_namespace(pod);
    }
    rig
}

fn start(rig: &mut Rig) {
    rig.start();
    rig.operator.wait_for_ack();
    eventually("ready", || rig.probe(false).0 == 0);
}

/// Asserts that the ADD fails with that code, that its text contains all of these, and that nothing of it stays.
fn assert_refused(rig: &Rig, pod: &str, code: u32, parts: &[&str]) {
    let before = rig.traces();
    let (exit, error) = rig.plugin("ADD", pod, "1.1.0", json!({}));
    assert_eq!((exit, &error["code"]), (1, &json!(code)), "{error}");
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{parts:?}: {error}");
    assert!(!rig.in_pod(pod, "ip link show eth0"));
    assert_eq!(rig.traces(), before, "undone");
}

fn sh(script: &str) {
    let status = Command::new("sh").args(["-ec", script]).status().unwrap();
    assert!(status.success(), "{script}");
}

/// A small file system, unmounted when dropped.
struct Small(PathBuf);

impl Small {
    fn mount(path: &Path) -> Self {
        sh(&format!("mount -t tmpfs -o size=64k none {}", path.display()));
        Self(path.to_owned())
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Fills the file system of transitd's state, until no room comes back for a while. Files of this boot are removed
/// first: transitd removes them when it can't write them, which would make room.
fn fill(filler: &Path) {
    let mut filled = 0;
    for name in ["askers", "contact", "endpoints", "ports"] {
        let _ = std::fs::remove_file(filler.with_file_name(name));
    }
    loop {
        sh(&format!(
            "dd if=/dev/zero bs=1k 2>/dev/null >> {} || true",
            filler.display()
        ));
        let now = std::fs::metadata(filler).unwrap().len();
        if now == filled {
            return;
        }
        filled = now;
        std::thread::sleep(Duration::from_millis(300));
    }
}

#[test]
fn a_full_disk_refuses_adds_by_name_and_harms_no_pod() {
    let mut rig = prepare();
    let state = rig.directory.join("state");
    let _small = Small::mount(&state);
    start(&mut rig);
    rig.plugin_add("p1");
    let filler = state.join("filler");
    fill(&filler);
    assert_refused(&rig, "p2", 5, &["cannot write", "p2_eth0.json", "No space left"]);
    assert!(rig.ping_from_node("10.0.1.5"));
    // transitd can't store a new leader's epoch, so it does not obey the leader; the existing state stays.
    rig.operator.shared.lock().unwrap().epoch = 5;
    rig.operator.hang_up();
    eventually("said", || {
        rig.log().contains("epoch") && rig.log().contains("No space left")
    });
    assert!(rig.ping_from_node("10.0.1.5"));
    // A DEL needs no room. A DEL that would have to wait is refused, so that the runtime repeats it.
    rig.kill();
    let (exit, error) = rig.plugin("DEL", "p1", "1.1.0", json!({}));
    assert_eq!(exit, 1, "{error}");
    rig.start();
    eventually("alive", || rig.probe(true).0 == 0);
    assert_eq!(rig.plugin("DEL", "p1", "1.1.0", json!({})), (0, Value::Null));
    std::fs::remove_file(filler).unwrap();
    eventually("room again", || rig.probe(false).0 == 0);
    rig.plugin_add("p1");
    rig.plugin_add("p2");
    assert!(rig.ping("p1", "10.0.1.6"));
}

/// Writes the same programs with a smaller map.
pub fn shrunk(rig: &Rig, map: &str, entries: u32) -> PathBuf {
    let path = rig.directory.join("shrunk.o");
    shrink(&rig.programs, map, entries, &path);
    path
}

pub fn shrink(programs: &Path, map: &str, entries: u32, to: &Path) {
    let mut bytes = std::fs::read(programs).unwrap();
    let offset = {
        let file = object::File::parse(&*bytes).unwrap();
        let symbol = file.symbols().find(|symbol| symbol.name() == Ok(map)).unwrap();
        let section = file.section_by_index(symbol.section_index().unwrap()).unwrap();
        section.file_range().unwrap().0 + symbol.address()
    } as usize;
    // Type, size of key, size of value, number of entries.
    bytes[offset + 12..offset + 16].copy_from_slice(&entries.to_le_bytes());
    std::fs::write(to, bytes).unwrap();
}

#[test]
fn a_full_table_refuses_adds_by_name_and_harms_no_pod() {
    for map in ["ENDPOINTS", "ATTACHMENTS"] {
        let mut rig = prepare();
        rig.programs = shrunk(&rig, map, 2);
        start(&mut rig);
        rig.plugin_add("p1");
        rig.plugin_add("p2");
        assert_refused(&rig, "p3", 11, &[&format!("table {map} is full")]);
        assert!(rig.ping("p1", "10.0.1.6"));
        assert_eq!(rig.del("p2"), None);
        rig.plugin_add("p3");
        assert!(rig.ping("p1", "10.0.1.7"));
    }
}

#[test]
fn without_file_descriptors_adds_are_refused_and_harm_no_pod() {
    let mut rig = prepare();
    start(&mut rig);
    rig.plugin_add("p1");
    let daemon = rig.daemon_id();
    let limit = |soft: usize| sh(&format!("prlimit --pid {daemon} --nofile={soft}:4096"));
    eventually("quiet", || {
        let (now, _) = usage(&rig);
        std::thread::sleep(std::time::Duration::from_millis(200));
        usage(&rig).0 == now
    });
    let (open, _) = usage(&rig);
    // The limits go from none at all to nearly enough: each step of an ADD fails once.
    let (mut codes, mut kept) = (Vec::new(), 0);
    for spare in 0..24 {
        let before = rig.traces();
        limit(open + spare);
        let (exit, answer) = rig.plugin("ADD", "p2", "1.1.0", json!({}));
        limit(1024);
        if exit == 0 {
            codes.push(0);
            break;
        }
        codes.push(answer["code"].as_u64().unwrap());
        if rig.log().matches("could not be undone").count() > kept {
            // Undoing needs descriptors, too. What is left goes with the runtime's DEL.
            kept += 1;
            assert_eq!(rig.del("p2"), None, "{spare}");
        }
        eventually("undone", || rig.traces() == before);
        assert!(!rig.in_pod("p2", "ip link show eth0"), "{spare}: {answer}");
        assert!(rig.ping_from_node("10.0.1.5"), "{spare}");
    }
    println!("codes with 0, 1, … file descriptors to spare: {codes:?}");
    assert!(codes.len() > 2 && codes.last() == Some(&0), "{codes:?}");
    assert!(
        codes.iter().all(|code| [0, 4, 5, 11, 102].contains(code)),
        "{codes:?}"
    );
    assert!(rig.ping("p2", "10.0.1.5"));
    assert_eq!(rig.daemon_id(), daemon);
    assert_eq!(rig.probe(false).0, 0, "the very same process serves");
}

#[test]
fn without_memory_pods_go_on_and_all_is_right_afterwards() {
    let mut rig = prepare();
    start(&mut rig);
    rig.plugin_add("p1");
    rig.plugin_add("p2");
    let (_, resident) = usage(&rig);
    // The daemon gets no more address space than it has: the next allocation fails, and a process without memory ends.
    sh(&format!(
        "prlimit --pid {} --as={}:",
        rig.daemon_id(),
        resident * 1024
    ));
    let (exit, error) = rig.plugin("ADD", "p3", "1.1.0", json!({}));
    println!("ADD without memory: {exit}, {error}");
    assert_eq!(exit, 1);
    assert!(rig.ping_from_node("10.0.1.5"));
    assert!(rig.ping("p1", "10.0.1.6"));
    rig.kill();
    start(&mut rig);
    // A runtime does this after an ADD that failed.
    assert_eq!(rig.del("p3"), None);
    rig.plugin_add("p3");
    assert!(rig.ping("p3", "10.0.1.5"));
    for pod in ["p1", "p2", "p3"] {
        assert_eq!(rig.del(pod), None);
    }
    assert_eq!(rig.traces(), Vec::<String>::new());
}

//! SIGKILL at the system calls of ADD and DEL, in the plugin and in transitd. Leftovers that belong to nobody are
//! removed, and nothing that belongs to somebody is touched.
//!
//! strace ends the process when one of its threads comes to its n-th call of a kind. The kinds are those whose effects
//! can be seen from outside. Tests take every fifth call of each kind, the first among them, or every
//! `THUBAN_KILL_STRIDE`-th.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use thuban_testkit::wait::wait_for;

use crate::plugin::binary;
use crate::rig::{Rig, base_rows, eventually, local};

/// Netlink; tables and pins; offloads; files; the pod's namespace, and its thread's end; answers.
const OF_TRANSITD: [&str; 9] = [
    "sendto", "bpf", "ioctl", "unlink", "rename", "fsync", "setns", "exit", "writev",
];
const OF_PLUGIN: [&str; 6] = ["connect", "writev", "recvfrom", "epoll_wait", "fsync", "write"];
/// A number of calls of a kind that neither program reaches in one verb.
const MAX_CALLS: usize = 100;

fn rig() -> Rig {
    let mut rows = base_rows();
    rows.extend([local(7, "p1", 5), local(7, "p2", 6), local(8, "p3", 7)]);
    let mut rig = Rig::new(rows);
    for pod in ["p1", "p2", "p3"] {
        rig.pod_namespace(pod);
    }
    rig.plugin_add("p2");
    rig.plugin_add("p3");
    rig
}

fn stride() -> usize {
    let given = std::env::var("THUBAN_KILL_STRIDE").ok();
    given.map_or(5, |text| text.parse().unwrap())
}

/// Returns everything that attachments leave, and files that are neither done nor thrown away.
fn traces(rig: &Rig) -> Vec<String> {
    let mut traces = rig.traces();
    for folder in ["state/spool", "state"] {
        let entries = std::fs::read_dir(rig.directory.join(folder))
            .into_iter()
            .flatten();
        traces.extend(entries.map(|entry| format!("{folder}/{}", entry.unwrap().file_name().display())));
    }
    // The first DEL that waits makes the spool. The last contact with the operator comes with the stream, not with a
    // pod.
    traces.retain(|trace| trace != "state/spool" && trace != "state/contact");
    // The kernel tells late that a link's other end is up.
    for (late, soon) in [("NO-CARRIER,", ""), (",LOWER_UP", ""), ("state DOWN", "state UP")] {
        for trace in &mut traces {
            *trace = trace.replace(late, soon);
        }
    }
    traces.sort();
    traces
}

/// Finds the boundaries to kill at: the kind of call, and its number. The rest of a kind is skipped once no process
/// dies there.
pub fn boundaries(kinds: &[&'static str], mut dies_at: impl FnMut(&'static str, usize) -> bool) {
    let stride = stride();
    for kind in kinds {
        for number in (1..MAX_CALLS).step_by(stride) {
            if !dies_at(kind, number) {
                break;
            }
        }
    }
}

fn strace(call: &str, number: usize) -> Command {
    let mut strace = Command::new("/usr/bin/strace");
    strace
        .args(["-f", "-qq", "-o", "/dev/null", "-e"])
        .arg(format!("trace={call}"))
        .arg("-e")
        .arg(format!("inject={call}:signal=SIGKILL:when={number}"));
    strace
}

/// strace on all threads of a process, until it is dropped.
pub struct Armed(Child);

impl Armed {
    /// Has the process killed at a call of that kind and number.
    pub fn new(process: u32, call: &str, number: usize) -> Self {
        Self::attach(strace(call, number), process)
    }

    /// Has strace watch the process.
    pub fn attach(mut strace: Command, process: u32) -> Self {
        let child = strace
            .args(["-p", &process.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("strace is there: cargo xtask deps");
        let armed = Self(child);
        let tasks = Path::new("/proc").join(process.to_string()).join("task");
        eventually("strace has all threads", || {
            let Ok(entries) = std::fs::read_dir(&tasks) else {
                return true;
            };
            entries.flatten().all(|task| {
                // The thread is gone or dead already: the daemon makes such calls at other times too.
                std::fs::read_to_string(task.path().join("status")).map_or(true, |status| {
                    !status.contains("TracerPid:\t0\n") || status.contains("State:\tZ")
                })
            })
        });
        armed
    }

    /// Waits until strace has written its last lines, after the end of the process.
    pub fn wait(mut self) {
        self.0.wait().unwrap();
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        // SIGKILL: the kernel lets go of the threads. strace itself may wait for a thread that is dead.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether the daemon is dead. Waits a moment, because a process that was killed ends after its sockets.
pub fn died(rig: &mut Rig) -> bool {
    let (moment, pause) = (Duration::from_millis(300), Duration::from_millis(10));
    wait_for("the daemon's death", moment, pause, || Ok(rig.is_dead())).is_ok()
}

/// The runtime's part: a DEL, or no DEL and the namespace goes.
#[derive(Clone, Copy, Debug)]
enum Runtime {
    DeletesBeforeRestart,
    DeletesAfterRestart,
    Forgets,
}

const RUNTIMES: [Runtime; 3] = [
    Runtime::DeletesBeforeRestart,
    Runtime::DeletesAfterRestart,
    Runtime::Forgets,
];

fn delete(rig: &Rig) {
    assert_eq!(
        rig.plugin("DEL", "p1", "1.1.0", json!({})),
        (0, Value::Null),
        "{}",
        rig.log()
    );
}

/// Brings the node back, and compares it with its state before the pod.
fn recover(rig: &mut Rig, runtime: Runtime, before: &[String], what: &str) {
    if matches!(runtime, Runtime::DeletesBeforeRestart) {
        delete(rig);
    }
    if matches!(runtime, Runtime::Forgets) {
        rig.remove_namespace("p1");
    }
    if rig.is_dead() {
        rig.start();
        rig.operator.wait_for_ack();
    }
    if matches!(runtime, Runtime::DeletesAfterRestart) {
        delete(rig);
    }
    let (patience, pause) = (Duration::from_secs(20), Duration::from_millis(100));
    let waited = wait_for("the state before the pod", patience, pause, || {
        Ok(traces(rig) == before)
    });
    assert!(
        waited.is_ok(),
        "{what}, {runtime:?}: {waited:?}, {:#?}\nbefore {before:#?}",
        traces(rig)
    );
    assert!(
        rig.ping_from_node("10.0.1.6") && rig.ping_from_node("10.0.1.7"),
        "{what}: neighbours"
    );
    if matches!(runtime, Runtime::Forgets) {
        rig.pod_namespace("p1");
    }
}

/// Asserts that the pod can come and go as if nothing had happened.
fn works(rig: &Rig, before: &[String]) {
    rig.plugin_add("p1");
    assert!(rig.ping("p1", "10.0.1.6"), "{}", rig.log());
    delete(rig);
    assert_eq!(traces(rig), before);
}

/// Does what each runtime would do after the kill of this number, in turns. After no kill, the pod is removed as usual.
fn go_on(rig: &mut Rig, kill: Option<usize>, before: &[String], what: &str) {
    let runtime = kill.map_or(Runtime::DeletesAfterRestart, |kill| RUNTIMES[kill % 3]);
    recover(rig, runtime, before, what);
}

#[test]
fn transitd_killed_in_an_add_leaves_nothing() {
    let mut rig = rig();
    let before = traces(&rig);
    let mut kills = 0;
    boundaries(&OF_TRANSITD, |call, number| {
        let armed = Armed::new(rig.daemon_id(), call, number);
        let (exit, _) = rig.plugin("ADD", "p1", "1.1.0", json!({}));
        drop(armed);
        let has_died = died(&mut rig);
        // If transitd died after the answer, the ADD has succeeded.
        assert!(exit == 0 || has_died, "{}", rig.log());
        let what = format!("killed at {call} {number} of ADD");
        go_on(&mut rig, has_died.then_some(kills), &before, &what);
        kills += usize::from(has_died);
        has_died
    });
    println!("transitd was killed at {kills} boundaries of ADD");
    assert!(kills >= 7, "only {kills} boundaries");
    works(&rig, &before);
}

#[test]
fn an_attachments_file_is_synced_before_it_has_its_name() {
    let mut rig = rig();
    let calls = rig.directory.join("calls");
    let mut strace = Command::new("/usr/bin/strace");
    strace
        .args(["-f", "-y", "-qq", "-e", "trace=fsync,rename", "-o"])
        .arg(&calls);
    let watching = Armed::attach(strace, rig.daemon_id());
    rig.plugin_add("p1");
    rig.kill();
    watching.wait();
    let calls = std::fs::read_to_string(calls).unwrap();
    let calls = ends_of_calls(&calls);
    let of_file: Vec<&String> = calls
        .iter()
        .filter(|line| line.contains("/attachments"))
        .collect();
    let place = |what: &str| of_file.iter().position(|line| line.contains(what));
    let [synced, renamed] = [".tmp>)", "rename("].map(|what| place(what).ok_or(&calls).unwrap());
    assert!(synced < renamed, "{calls:?}");
    let after = &of_file[renamed + 1..];
    assert!(
        after.iter().any(|line| line.contains("fsync(")),
        "the folder: {calls:?}"
    );
}

/// Returns the calls that strace wrote down, in the order in which they ended. strace writes a call in two lines if
/// another thread did something meanwhile.
fn ends_of_calls(written: &str) -> Vec<String> {
    let mut begun = HashMap::new();
    let mut calls = Vec::new();
    for line in written.lines() {
        let (thread, call) = line.split_once(' ').unwrap_or_default();
        if let Some(beginning) = call.strip_suffix(" <unfinished ...>") {
            begun.insert(thread, beginning);
        } else if let Some((_, end)) = call.split_once(" resumed>") {
            calls.push(format!("{}{end}", begun.remove(thread).unwrap_or_default()));
        } else {
            calls.push(call.to_owned());
        }
    }
    calls
}

#[test]
fn transitd_killed_in_a_del_finishes_it_later() {
    let mut rig = rig();
    let before = traces(&rig);
    let mut kills = 0;
    boundaries(&OF_TRANSITD, |call, number| {
        rig.plugin_add("p1");
        let armed = Armed::new(rig.daemon_id(), call, number);
        let (exit, error) = rig.plugin("DEL", "p1", "1.1.0", json!({}));
        drop(armed);
        assert_eq!(exit, 0, "{error}");
        let has_died = died(&mut rig);
        let what = format!("killed at {call} {number} of DEL");
        go_on(&mut rig, has_died.then_some(kills), &before, &what);
        kills += usize::from(has_died);
        has_died
    });
    println!("transitd was killed at {kills} boundaries of DEL");
    assert!(kills >= 4, "only {kills} boundaries");
    works(&rig, &before);
}

/// Runs the plugin until its `number`-th such call; returns whether it was killed there.
fn cut_off(rig: &Rig, verb: &str, call: &str, number: usize) -> bool {
    let mut command = strace(call, number);
    command.arg(binary());
    let output = rig.plugin_by(command, verb, "p1", "1.1.0", json!({}));
    // strace ends in the same way as the process that it started.
    let killed = std::os::unix::process::ExitStatusExt::signal(&output.status) == Some(9);
    assert!(killed || output.status.success(), "{output:?}");
    killed
}

#[test]
fn plugin_killed_in_add_leaves_nothing_unknown_to_runtime() {
    let mut rig = rig();
    let before = traces(&rig);
    let mut kills = 0;
    boundaries(&OF_PLUGIN, |call, number| {
        let killed = cut_off(&rig, "ADD", call, number);
        // The DEL comes while the attaching goes on, or never comes.
        let runtime = RUNTIMES[1 + kills % 2];
        recover(
            &mut rig,
            runtime,
            &before,
            &format!("plugin killed at {call} {number} of ADD"),
        );
        kills += usize::from(killed);
        killed
    });
    println!("the plugin was killed at {kills} boundaries of ADD");
    assert!(kills >= 4, "only {kills} boundaries");
    works(&rig, &before);
}

#[test]
fn a_plugin_killed_in_a_del_leaves_nothing() {
    let mut rig = rig();
    let before = traces(&rig);
    let mut kills = 0;
    for is_away in [false, true] {
        boundaries(&OF_PLUGIN, |call, number| {
            rig.plugin_add("p1");
            // With transitd away the plugin writes to its spool.
            if is_away {
                rig.kill();
            }
            let killed = cut_off(&rig, "DEL", call, number);
            let runtime = RUNTIMES[1 + kills % 2];
            recover(
                &mut rig,
                runtime,
                &before,
                &format!("plugin killed at {call} {number} of DEL"),
            );
            kills += usize::from(killed);
            killed
        });
    }
    println!("the plugin was killed at {kills} boundaries of DEL");
    assert!(kills >= 5, "only {kills} boundaries");
    works(&rig, &before);
}

//! The CNI plugin as a runtime runs it: the real binary against the rig's transitd, with every verb in every version.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::rig::{Rig, base_rows, dual, dual_rows, local};

/// The binary that cargo builds beside transitd.
pub fn binary() -> PathBuf {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_transitd")).with_file_name("thuban");
    assert!(path.exists(), "build the plugin first: cargo build -p thuban-cni");
    path
}

/// Exit code, and the content of stdout: null where stdout is empty.
pub type Answer = (i32, Value);

impl Rig {
    /// Returns the rig's namespace of a pod.
    pub fn netns(&self, pod: &str) -> String {
        format!("/run/netns/{}-{pod}", self.name)
    }

    /// Returns the plugin's part of a configuration list, with more keys.
    pub fn configuration(&self, version: &str, more: Value) -> Value {
        let mut configuration = json!({
            "cniVersion": version,
            "name": "thuban",
            "type": "thuban",
            "socket": self.directory.join("run/cni.sock"),
            "spool": self.directory.join("state/spool"),
        });
        let Value::Object(more) = more else { unreachable!() };
        configuration.as_object_mut().unwrap().extend(more);
        configuration
    }

    /// Runs a verb for a pod whose container has its name.
    pub fn plugin(&self, verb: &str, pod: &str, version: &str, more: Value) -> Answer {
        let output = self.plugin_by(Command::new(binary()), verb, pod, version, more);
        let value = if output.stdout.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&output.stdout).unwrap()
        };
        (output.status.code().unwrap(), value)
    }

    /// Does the same with a command of the caller's, which may be killed before it ends.
    pub fn plugin_by(
        &self,
        mut command: Command,
        verb: &str,
        pod: &str,
        version: &str,
        more: Value,
    ) -> Output {
        let arguments = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME={pod};K8S_POD_UID={pod}");
        let mut child = command
            .env_clear()
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", pod)
            .env("CNI_NETNS", self.netns(pod))
            .env("CNI_IFNAME", "eth0")
            .env("CNI_ARGS", arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let text = self.configuration(version, more).to_string();
        // A plugin that is killed reads nothing.
        let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
        child.wait_with_output().unwrap()
    }

    pub fn plugin_add(&self, pod: &str) -> Value {
        let (exit, result) = self.plugin("ADD", pod, "1.1.0", json!({}));
        assert_eq!(exit, 0, "{result}");
        result
    }
}

#[test]
fn every_version_adds_checks_and_deletes() {
    let mut rows = dual_rows();
    rows.push(dual(7, "p1", 5));
    let mut rig = Rig::new(rows);
    rig.pod_namespace("p1");
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let dns = json!({"dns": {"nameservers": ["10.0.0.10"]}, "unknown": {"a": [1]}});
        let (exit, result) = rig.plugin("ADD", "p1", version, dns);
        assert_eq!((exit, &result["cniVersion"]), (0, &json!(version)), "{result}");
        let interfaces = &result["interfaces"];
        assert_eq!(interfaces[1]["sandbox"], json!(rig.netns("p1")));
        assert_eq!(
            interfaces[1]["mtu"],
            if version == "1.1.0" {
                json!(1450)
            } else {
                Value::Null
            }
        );
        assert_eq!(result["ips"][0]["address"], "10.0.1.5/24");
        assert_eq!(
            result["ips"][0]["version"],
            if version == "0.4.0" {
                json!("4")
            } else {
                Value::Null
            }
        );
        assert_eq!(result["routes"][0], json!({"dst": "0.0.0.0/0", "gw": "10.0.1.1"}));
        assert_eq!(result["routes"][1]["dst"], "::/0");
        assert_eq!(result["dns"], json!({"nameservers": ["10.0.0.10"]}));
        let seen = rig.on_node(&format!(
            "ip -o link show {}",
            interfaces[0]["name"].as_str().unwrap()
        ));
        assert!(seen.contains(interfaces[0]["mac"].as_str().unwrap()), "{seen}");

        let previous = json!({ "prevResult": result });
        assert_eq!(
            rig.plugin("CHECK", "p1", version, previous.clone()),
            (0, Value::Null)
        );
        let (exit, error) = rig.plugin("ADD", "p1", version, json!({}));
        assert_eq!((exit, &error["code"]), (1, &json!(100)), "{error}");
        assert_eq!(
            rig.plugin("DEL", "p1", version, previous.clone()),
            (0, Value::Null)
        );
        assert_eq!(rig.traces(), Vec::<String>::new());
        assert_eq!(
            rig.plugin("DEL", "p1", version, json!({})),
            (0, Value::Null),
            "again"
        );
        let (exit, error) = rig.plugin("CHECK", "p1", version, previous);
        assert_eq!((exit, &error["code"]), (1, &json!(3)), "{error}");
    }
}

#[test]
fn future_version_changes_nothing_and_error_lists_supported() {
    let mut rows = base_rows();
    rows.push(local(7, "p1", 5));
    let mut rig = Rig::new(rows);
    rig.pod_namespace("p1");
    for verb in ["ADD", "DEL", "CHECK", "GC", "STATUS"] {
        let (exit, error) = rig.plugin(verb, "p1", "1.2.0", json!({"cni.dev/valid-attachments": []}));
        assert_eq!((exit, &error["code"]), (1, &json!(1)), "{verb}: {error}");
        assert!(
            error["msg"].as_str().unwrap().contains("0.4.0, 1.0.0, 1.1.0"),
            "{error}"
        );
    }
    let (exit, answer) = rig.plugin("VERSION", "p1", "1.2.0", json!({}));
    assert_eq!(
        (exit, &answer["supportedVersions"]),
        (0, &json!(["0.4.0", "1.0.0", "1.1.0"]))
    );
    assert_eq!(rig.traces(), Vec::<String>::new());
}

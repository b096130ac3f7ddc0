//! Programs of others drive the real plugin: cnitool, libcni as runtimes have it, and plugins that run after Thuban.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::plugin::{Answer, binary};
use crate::rig::{Rig, base_rows, eventually, local};

/// Returns the folder of the Go tools, which xtask builds from `e2e/cni`.
fn tools() -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/cni-tools");
    assert!(
        folder.join("cnitool").exists(),
        "build the tools first: cargo xtask cni-tools"
    );
    folder
}

/// Returns a node with pods' namespaces, the plugins in one folder, and the conflist that transitd wrote.
fn rig(pods: &[(&str, u8)]) -> Rig {
    let mut rows = base_rows();
    rows.extend(pods.iter().map(|(pod, last)| local(7, pod, *last)));
    let mut rig = Rig::new(rows);
    let plugins = rig.directory.join("plugins");
    std::fs::create_dir(&plugins).unwrap();
    std::fs::create_dir(rig.directory.join("cache")).unwrap();
    std::os::unix::fs::symlink(binary(), plugins.join("thuban")).unwrap();
    for other in ["portmap", "tuning"] {
        std::os::unix::fs::symlink(tools().join(other), plugins.join(other)).unwrap();
    }
    for (pod, _) in pods {
        rig.pod_namespace(pod);
    }
    eventually("the conflist", || conflist(&rig).exists());
    rig
}

fn conflist(rig: &Rig) -> PathBuf {
    rig.directory.join("conf/05-thuban.conflist")
}

/// Writes a changed copy of the conflist.
fn changed(rig: &Rig, change: impl FnOnce(&mut Value)) -> PathBuf {
    let mut list: Value = serde_json::from_slice(&std::fs::read(conflist(rig)).unwrap()).unwrap();
    change(&mut list);
    let path = rig.directory.join("changed.conflist");
    std::fs::write(&path, list.to_string()).unwrap();
    path
}

/// Runs a command as a runtime does, in the node's namespace; libcni's default cache is this rig's.
fn command(rig: &Rig, pod: &str, line: &str) -> Answer {
    let script = format!(
        "mkdir -p /var/lib/cni && mount --bind {} /var/lib/cni && exec {line}",
        rig.directory.join("cache").display()
    );
    let output = Command::new("nsenter")
        .arg(format!("--net=/run/netns/{}", rig.node()))
        .args(["unshare", "--mount", "sh", "-c", &script])
        .env("CNI_PATH", rig.directory.join("plugins"))
        .env("NETCONFPATH", rig.directory.join("conf"))
        .env(
            "CNI_ARGS",
            format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME={pod};K8S_POD_UID={pod}"),
        )
        .env(
            "CAP_ARGS",
            r#"{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}"#,
        )
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    let value = serde_json::from_str(&text).unwrap_or(Value::String(text + &errors));
    (output.status.code().unwrap(), value)
}

fn cnitool(rig: &Rig, verb: &str, pod: &str) -> Answer {
    let tool = tools().join("cnitool");
    command(
        rig,
        pod,
        &format!("{} {verb} thuban {}", tool.display(), rig.netns(pod)),
    )
}

fn driver(rig: &Rig, verb: &str, list: &std::path::Path, pod: &str, valid: &str) -> Answer {
    let (tool, cache) = (tools().join("driver"), rig.directory.join("cache"));
    let line = format!(
        "{} {verb} {} {} {pod} {} {valid}",
        tool.display(),
        list.display(),
        cache.display(),
        rig.netns(pod)
    );
    command(rig, pod, &line)
}

fn done(answer: Answer) -> Value {
    assert_eq!(answer.0, 0, "{}", answer.1);
    answer.1
}

#[test]
fn cnitool_runs_every_verb_of_the_installed_conflist() {
    let rig = rig(&[("p1", 5)]);
    done(cnitool(&rig, "status", "p1"));
    let result = done(cnitool(&rig, "add", "p1"));
    assert_eq!(result["cniVersion"], "1.1.0", "the newest of the list: {result}");
    assert_eq!(result["interfaces"][1]["mtu"], 1450);
    // A busy machine answers later than one ping waits.
    eventually("the node reaches it", || rig.ping_from_node("10.0.1.5"));
    done(cnitool(&rig, "check", "p1"));
    assert!(rig.in_pod("p1", "ip route del default"));
    let (exit, said) = cnitool(&rig, "check", "p1");
    assert!(
        exit != 0 && said.to_string().contains("default route via 10.0.1.1"),
        "{said}"
    );
    done(cnitool(&rig, "del", "p1"));
    assert_eq!(rig.traces(), Vec::<String>::new());
    done(cnitool(&rig, "del", "p1"));
    // cnitool gives no list, and the missing list must not be taken for an empty one.
    let (exit, said) = cnitool(&rig, "gc", "p1");
    assert!(
        exit != 0 && said.to_string().contains("cni.dev/valid-attachments"),
        "{said}"
    );
}

#[test]
fn libcni_runs_every_verb_in_every_version() {
    let rig = rig(&[("p1", 5), ("p2", 6)]);
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let list = changed(&rig, |list| {
            list["cniVersion"] = json!(version);
            list["cniVersions"] = json!([version]);
        });
        let supported = done(driver(&rig, "VERSION", &list, "p1", ""));
        assert_eq!(supported["supportedVersions"], json!(["0.4.0", "1.0.0", "1.1.0"]));
        done(driver(&rig, "STATUS", &list, "p1", ""));
        for pod in ["p1", "p2"] {
            let result = done(driver(&rig, "ADD", &list, pod, ""));
            assert_eq!(result["cniVersion"], version);
            done(driver(&rig, "CHECK", &list, pod, ""));
        }
        let (exit, error) = driver(&rig, "ADD", &list, "p1", "");
        assert_eq!((exit, &error["code"]), (1, &json!(100)), "{error}");
        // libcni deletes the attachments that it remembers and that are not in the list, and with 1.1.0 calls GC.
        done(driver(&rig, "GC", &list, "p1", "p1"));
        assert!(rig.in_pod("p1", "ip link show eth0") && !rig.in_pod("p2", "ip link show eth0"));
        done(driver(&rig, "DEL", &list, "p1", ""));
        assert_eq!(rig.traces(), Vec::<String>::new());
    }
    let list = changed(&rig, |list| {
        list["cniVersion"] = json!("1.0.0");
        list["cniVersions"] = json!(["1.0.0"]);
    });
    assert_eq!(
        driver(&rig, "ADD", &list, "nobody", "").1["code"],
        4,
        "no namespace"
    );
}

#[test]
fn a_runtime_sees_no_restart_of_transitd_but_an_add_to_repeat() {
    let mut rig = rig(&[("p1", 5), ("p2", 6)]);
    let list = conflist(&rig);
    eventually("ready", || rig.directory.join("run/ready").exists());
    done(driver(&rig, "ADD", &list, "p1", ""));
    rig.kill();
    done(driver(&rig, "STATUS", &list, "p1", ""));
    done(driver(&rig, "DEL", &list, "p1", ""));
    assert_eq!(driver(&rig, "ADD", &list, "p2", "").1["code"], 11);
    rig.start();
    rig.operator.wait_for_ack();
    done(driver(&rig, "ADD", &list, "p2", ""));
    done(driver(&rig, "DEL", &list, "p2", ""));
    eventually("the DEL of before is done", || rig.traces().is_empty());
}

#[test]
fn portmap_and_tuning_run_after_thuban_and_not_before() {
    let rig = rig(&[("p1", 5)]);
    let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}, "backend": "iptables"});
    let tuning = json!({
        "type": "tuning",
        "sysctl": {"net.core.somaxconn": "500"},
        "dataDir": rig.directory.join("tuning"),
    });
    let list = changed(&rig, |list| {
        let plugins = list["plugins"].as_array_mut().unwrap();
        plugins.extend([portmap.clone(), tuning.clone()]);
    });
    let sysctl = || rig.in_pod_text("p1", "cat /proc/sys/net/core/somaxconn");
    let before = sysctl();
    let result = done(driver(&rig, "ADD", &list, "p1", ""));
    assert_eq!(result["ips"][0]["address"], "10.0.1.5/24");
    assert_eq!(sysctl().trim(), "500");
    assert!(rig.on_node("iptables-save -t nat").contains("10.0.1.5:80"));
    assert!(rig.ping_from_node("10.0.1.5"));
    done(driver(&rig, "CHECK", &list, "p1", ""));
    assert!(rig.in_pod("p1", "echo 400 > /proc/sys/net/core/somaxconn"));
    let (exit, error) = driver(&rig, "CHECK", &list, "p1", "");
    assert_eq!(exit, 1, "tuning's own CHECK is asked: {error}");
    assert!(rig.in_pod("p1", "echo 500 > /proc/sys/net/core/somaxconn"));
    done(driver(&rig, "CHECK", &list, "p1", ""));
    done(driver(&rig, "DEL", &list, "p1", ""));
    assert!(!rig.on_node("iptables-save -t nat").contains("10.0.1.5:80"));
    assert_eq!(rig.traces(), Vec::<String>::new());
    assert_ne!(before.trim(), "500");
    // Thuban is second in the list: the plugin refuses with the reason, and nothing is left.
    let list = changed(&rig, |list| {
        let plugins = list["plugins"].as_array_mut().unwrap();
        plugins.insert(0, json!({"type": "other"}));
    });
    std::fs::write(
        rig.directory.join("plugins/other"),
        "#!/bin/sh\n[ \"$CNI_COMMAND\" = VERSION ] && exec echo '{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"1.1.0\"]}'\n\
         [ \"$CNI_COMMAND\" = ADD ] && echo '{\"cniVersion\":\"1.1.0\"}'\nexit 0\n",
    )
    .unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(rig.directory.join("plugins/other"), mode).unwrap();
    let (exit, error) = driver(&rig, "ADD", &list, "p1", "");
    assert_eq!((exit, &error["code"]), (1, &json!(7)), "{error}");
    assert!(
        error["msg"]
            .as_str()
            .unwrap()
            .contains("must be the first plugin"),
        "{error}"
    );
    assert_eq!(rig.traces(), Vec::<String>::new());
}

//! Takes Thuban off a local cluster, in whatever state it is: `kubectl thuban uninstall`, and then the script on the
//! nodes. It can be repeated.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use thuban_cluster::Cluster;

use crate::build::{root, run_command};
use crate::{install, plugin};

const ON_A_NODE: &str = "install/remove-from-node.sh";

pub fn run(name: &str) -> Result<()> {
    run_with(name, None)
}

/// Does the same, and gives pods up when none has gone for as long as `patience`.
pub fn run_with(name: &str, patience: Option<Duration>) -> Result<()> {
    let cluster = Cluster::named(name)?;
    let open = open_nodes(&cluster)?;
    let result = remove(&cluster, patience);
    for node in &open {
        cluster.kubectl(&["uncordon", node])?;
    }
    result?;
    println!(
        "nothing of Thuban is left on cluster {name}; nodes stay NotReady until they get another CNI plugin"
    );
    Ok(())
}

fn remove(cluster: &Cluster, patience: Option<Duration>) -> Result<()> {
    let mut plugin = plugin::of(cluster.instance())?;
    plugin.args(["uninstall", "--yes"]);
    if let Some(patience) = patience {
        plugin.args(["--pods-timeout", &patience.as_secs().to_string()]);
    }
    run_command(&mut plugin)?;
    let script = script()?;
    let mut left = Vec::new();
    for node in cluster.nodes()? {
        if cluster.node_pid(&node).is_err() {
            println!("{node} is down: if it comes back, run {ON_A_NODE} there");
            continue;
        }
        cluster
            .exec_on_node(&node, &["sh", "-c", &script, "sh", "remove"])
            .with_context(|| format!("run {ON_A_NODE} on {node}"))?;
        let check = format!("( {script}\n) || true");
        let found = cluster.exec_on_node(&node, &["sh", "-c", &check, "sh", "check"])?;
        left.extend(found.lines().map(|line| format!("{node}: {line}")));
        println!("{node}: clean");
    }
    if !left.is_empty() {
        bail!("left on cluster {}: {}", cluster.name(), left.join(", "));
    }
    Ok(())
}

fn script() -> Result<String> {
    let path = root().join(ON_A_NODE);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// Returns the nodes that take pods.
fn open_nodes(cluster: &Cluster) -> Result<Vec<String>> {
    let nodes = install::get(cluster, &["nodes"])?;
    let nodes = nodes["items"].as_array().into_iter().flatten();
    Ok(nodes
        .filter(|node| node["spec"]["unschedulable"] != true)
        .filter_map(|node| node["metadata"]["name"].as_str().map(str::to_owned))
        .collect())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::{ON_A_NODE, root};

    /// The script only looks here, and changes nothing.
    #[test]
    fn the_script_looks_in_the_folders_that_transitd_noted() {
        let folder = std::env::temp_dir().join(format!("thuban-noted-{}", std::process::id()));
        let (state, bin, conf) = (folder.join("state"), folder.join("bin"), folder.join("conf"));
        for made in [&state, &bin, &conf] {
            fs::create_dir_all(made).unwrap();
        }
        let noted = format!("bin={}\nconf={}\n", bin.display(), conf.display());
        fs::write(state.join("cni-folders"), noted).unwrap();
        let files = [bin.join("thuban"), conf.join("05-thuban.conflist")];
        for file in &files {
            fs::write(file, "").unwrap();
        }
        let script = root().join(ON_A_NODE);
        let check = |named: Option<&str>| {
            let mut command = Command::new("sh");
            command.arg(&script).arg("check").env("THUBAN_STATE_DIR", &state);
            for variable in ["CNI_BIN_DIR", "CNI_CONF_DIR"] {
                match named {
                    Some(folder) => command.env(variable, folder),
                    None => command.env_remove(variable),
                };
            }
            let output = command.output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            files
                .iter()
                .filter(|file| said.contains(&format!("file {}\n", file.display())))
                .count()
        };
        let found = (check(None), check(Some("/nowhere")));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, (2, 0), "a folder that is named counts before a noted one");
    }
}

//! The state of a cluster in which something did not come up: pods, events and logs. Never fails.

use thuban_cluster::Cluster;

use crate::plugin;

const WIDTH: usize = 400;

/// Prints everything to standard error.
pub fn print(cluster: &Cluster) {
    for verb in ["status", "check"] {
        let output =
            plugin::built(cluster.instance()).map(|mut plugin| plugin.args([verb, "-o", "wide"]).output());
        if let Some(Ok(output)) = output {
            eprintln!("---- kubectl thuban {verb}");
            eprint!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
    let questions: [(&str, &[&str]); 8] = [
        ("nodes", &["get", "nodes", "-o", "wide"]),
        ("pods", &["get", "pods", "-A", "-o", "wide"]),
        (
            "objects",
            &[
                "get",
                "droplets,vpcs.thuban.dev,networks.thuban.dev,dividers,bouncers",
            ],
        ),
        ("endpoints", &["get", "endpoints.thuban.dev", "-A"]),
        ("leases", &["get", "leases", "-n", "thuban-system"]),
        (
            "pods that wait",
            &[
                "describe",
                "pods",
                "-A",
                "--field-selector=status.phase=Pending",
                "--show-events=false",
            ],
        ),
        ("events", &["get", "events", "-A", "--sort-by=.lastTimestamp"]),
        ("daemon set", &["describe", "daemonset", "-n", "thuban-system"]),
    ];
    for (title, arguments) in questions {
        show(cluster, title, arguments, 40);
    }
    for workload in ["thuban-operator", "transitd"] {
        let selector = format!("app.kubernetes.io/name={workload}");
        for which in ["--previous=false", "--previous=true"] {
            let title = format!("logs of {workload} ({which})");
            let arguments = [
                "logs",
                "-n",
                "thuban-system",
                "-l",
                &selector,
                "--prefix",
                "--tail=25",
                which,
            ];
            show(cluster, &title, &arguments, 80);
        }
    }
}

/// Prints the answer's last lines.
fn show(cluster: &Cluster, title: &str, arguments: &[&str], lines: usize) {
    let text = match cluster.kubectl(arguments) {
        Ok(text) => text,
        // Most pods have no previous container.
        Err(_) if arguments.contains(&"--previous=true") => return,
        Err(error) => format!("{error:#}"),
    };
    eprintln!("---- {title}");
    let all: Vec<&str> = text.lines().collect();
    for line in &all[all.len().saturating_sub(lines)..] {
        // Some log lines carry a whole API answer.
        let end = line.char_indices().nth(WIDTH).map_or(line.len(), |(end, _)| end);
        eprintln!("{}", &line[..end]);
    }
}

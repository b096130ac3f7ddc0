//! The dashboards of `charts/thuban/files/dashboards`: each query is one that Prometheus reads, each panel has words of
//! its own, and each link to a runbook is an alert's.

use std::{collections::BTreeSet, fs, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::build::{root, run_command};

const FOLDER: &str = "charts/thuban/files/dashboards";

/// Checks all of them. `runbooks` are the addresses of the alerts' runbooks.
pub fn check(runbooks: &BTreeSet<String>) -> Result<()> {
    let (mut uids, mut all) = (BTreeSet::new(), Vec::new());
    for entry in fs::read_dir(root().join(FOLDER)).with_context(|| format!("reading {FOLDER}"))? {
        let path = entry?.path();
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let dashboard: Value =
            serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))?;
        let uid = dashboard["uid"].as_str().unwrap_or_default().to_owned();
        ensure!(
            uid.starts_with("thuban-") && uids.insert(uid.clone()),
            "{}: uid {uid:?}",
            path.display()
        );
        let queries = queries(&dashboard, runbooks).with_context(|| path.display().to_string())?;
        for query in &queries {
            ensure!(
                !plain(query).contains('$'),
                "{}: an unknown variable in {query}",
                path.display()
            );
        }
        all.extend(queries);
    }
    ensure!(!all.is_empty(), "{FOLDER} has no queries");
    // A rule is the form in which promtool reads a query without a server.
    let rule = |(number, query): (usize, &String)| json!({"record": format!("dashboard:query:{number}"), "expr": plain(query)});
    let rules: Vec<Value> = all.iter().enumerate().map(rule).collect();
    let file = root().join("target/dashboard-queries.yaml");
    fs::create_dir_all(root().join("target")).context("making target")?;
    let groups = json!({"groups": [{"name": "dashboards", "rules": rules}]});
    fs::write(&file, serde_yaml_ng::to_string(&groups)?)
        .with_context(|| format!("writing {}", file.display()))?;
    run_command(Command::new("promtool").args(["check", "rules"]).arg(&file))
}

/// Returns the queries of a dashboard.
fn queries(dashboard: &Value, runbooks: &BTreeSet<String>) -> Result<Vec<String>> {
    let (mut titles, mut queries) = (BTreeSet::new(), Vec::new());
    for panel in panels(dashboard) {
        let title = panel["title"].as_str().unwrap_or_default();
        ensure!(
            !title.is_empty() && titles.insert(title),
            "a panel without a title of its own: {title:?}"
        );
        if panel["type"] == "row" {
            continue;
        }
        let about = panel["description"].as_str().unwrap_or_default();
        ensure!(!about.is_empty(), "panel {title:?} has no description");
        for link in panel["links"].as_array().into_iter().flatten() {
            let url = link["url"].as_str().unwrap_or_default();
            ensure!(
                runbooks.contains(url),
                "panel {title:?} links to {url}, which is no alert's runbook"
            );
        }
        for target in panel["targets"].as_array().into_iter().flatten() {
            queries.push(
                target["expr"]
                    .as_str()
                    .context("a target without expr")?
                    .to_owned(),
            );
        }
    }
    Ok(queries)
}

/// Returns all panels, those in rows that are folded included.
fn panels(of: &Value) -> Vec<&Value> {
    let own = of["panels"].as_array().into_iter().flatten();
    own.flat_map(|panel| std::iter::once(panel).chain(panels(panel)))
        .collect()
}

/// Returns a query with values in place of Grafana's variables.
fn plain(query: &str) -> String {
    let mut query = query.replace("$__rate_interval", "5m").replace("$__range", "1h");
    for name in ["node", "instance", "kind"] {
        query = query.replace(&format!("${name}"), ".*");
    }
    query
}

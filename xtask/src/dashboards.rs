//! The dashboards of `charts/thuban/files/dashboards`: each query is one that Prometheus reads, each panel has words of
//! its own, and each link to a runbook is an alert's. [`ask`] tries all queries at a Prometheus that scrapes Thuban.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::{
    build::{root, run_command},
    prometheus::Server,
};

/// The page that describes all metrics.
const METRICS: &str = "docs/metrics.md";
const FOLDER: &str = "charts/thuban/files/dashboards";

/// Checks all of them. `runbooks` are the addresses of the alerts' runbooks.
pub fn check(runbooks: &BTreeSet<String>) -> Result<()> {
    let (mut uids, mut all) = (BTreeSet::new(), Vec::new());
    for (path, dashboard) in read_all()? {
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

/// Asks a Prometheus all queries, and prints how many have series. Fails if a query names a metric that the processes
/// which it scrapes don't have.
pub fn ask(server: &Server) -> Result<()> {
    let mut known = server.metrics()?;
    ensure!(!known.is_empty(), "{server} has scraped nothing yet");
    let page = root().join(METRICS);
    known.extend(documented(
        &fs::read_to_string(&page).with_context(|| format!("reading {}", page.display()))?,
    ));
    let (mut counts, mut quiet, mut wrong) = (BTreeMap::new(), Vec::new(), Vec::new());
    for (_, dashboard) in read_all()? {
        for panel in panels(&dashboard) {
            let title = panel["title"].as_str().unwrap_or_default();
            for target in panel["targets"].as_array().into_iter().flatten() {
                let query = plain(target["expr"].as_str().context("a target without expr")?);
                let verdict = judge(&query, !server.query(&query)?.is_empty(), &known);
                *counts.entry(verdict.words()).or_insert(0) += 1;
                match verdict {
                    Verdict::Quiet => quiet.push(title.to_owned()),
                    Verdict::Unknown(metric) => wrong.push(format!("{title}: {metric}")),
                    Verdict::Series | Verdict::NotInstalled => {}
                }
            }
        }
    }
    for (words, count) in counts {
        println!("{count:>5} queries {words}");
    }
    if !quiet.is_empty() {
        println!("without series now: {}", quiet.join("; "));
    }
    if !wrong.is_empty() {
        bail!("no process has these metrics: {}", wrong.join("; "));
    }
    Ok(())
}

/// What came of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Series,
    /// Its metrics exist, and have no series: what they count has not happened.
    Quiet,
    /// It is of a process that is not installed.
    NotInstalled,
    /// This metric does not exist.
    Unknown(String),
}

impl Verdict {
    fn words(&self) -> &'static str {
        match self {
            Self::Series => "have series",
            Self::Quiet => "have none now: what they show has not happened",
            Self::NotInstalled => "are of processes that are not scraped",
            Self::Unknown(_) => "name an unknown metric",
        }
    }
}

/// Returns the metrics that the page has: each table's head says how the names of its rows begin. What has not happened
/// is on no page of a process, because there a metric with labels comes with its first series.
fn documented(page: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut beginning = None;
    for line in page.lines().filter(|line| !line.starts_with("|--")) {
        let cell = line.strip_prefix("| ").and_then(|row| row.split(" |").next());
        let mut quoted = cell.unwrap_or_default().split('`').skip(1).step_by(2);
        if cell.is_some_and(|cell| cell.starts_with("name (")) {
            beginning = quoted.next().and_then(|name| name.strip_suffix('…'));
        } else if cell.is_none() {
            beginning = None;
        } else if let Some(beginning) = beginning {
            names.extend(quoted.map(|name| format!("{beginning}{name}")));
        }
    }
    names
}

/// Judges a query by the names of the metrics that exist.
fn judge(query: &str, has_series: bool, known: &BTreeSet<String>) -> Verdict {
    if has_series {
        return Verdict::Series;
    }
    let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    for metric in words.filter(|word| word.starts_with("thuban_")) {
        // Prometheus knows a histogram, and a counter of OpenMetrics, without these endings.
        let endings = ["_bucket", "_count", "_sum", "_total"];
        let mut names = endings.iter().filter_map(|ending| metric.strip_suffix(ending));
        if known.contains(metric) || names.any(|name| known.contains(name)) {
            continue;
        }
        let process: Vec<&str> = metric.splitn(3, '_').take(2).collect();
        let process = format!("{}_", process.join("_"));
        if known.iter().any(|name| name.starts_with(&process)) {
            return Verdict::Unknown(metric.to_owned());
        }
        return Verdict::NotInstalled;
    }
    Verdict::Quiet
}

/// Returns all dashboards, each with its file.
fn read_all() -> Result<Vec<(PathBuf, Value)>> {
    let entries = fs::read_dir(root().join(FOLDER)).with_context(|| format!("reading {FOLDER}"))?;
    let read = |entry: std::io::Result<fs::DirEntry>| -> Result<(PathBuf, Value)> {
        let path = entry?.path();
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let dashboard = serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))?;
        Ok((path, dashboard))
    };
    entries.map(read).collect()
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Verdict, documented, judge};

    #[test]
    fn the_page_names_the_metrics_of_each_process() {
        let page = "\
            | name (`thuban_operator_…`) | labels |\n|---|---|\n| `leader` | |\n| `a_total`, `b` | kind (`x`) |\n\n\
            | other | `thing` |\n|---|---|\n| `epoch` | |\n";
        let names = ["leader", "a_total", "b"].map(|name| format!("thuban_operator_{name}"));
        assert_eq!(documented(page), names.into());
    }

    #[test]
    fn a_query_without_series_is_wrong_only_if_its_metric_is() {
        let known = [
            "thuban_operator_ack_duration_seconds",
            "thuban_operator_nacks",
            "thuban_operator_leader",
        ];
        let known: BTreeSet<String> = known.map(str::to_owned).into();
        let of = |query: &str| judge(query, false, &known);
        assert_eq!(of("sum(rate(thuban_operator_nacks_total[5m]))"), Verdict::Quiet);
        assert_eq!(
            of("rate(thuban_operator_ack_duration_seconds_bucket{le=\"1\"}[5m])"),
            Verdict::Quiet
        );
        assert_eq!(
            of("thuban_operator_leader == thuban_operator_lead"),
            Verdict::Unknown("thuban_operator_lead".into())
        );
        assert_eq!(of("sum(thuban_speaker_peers)"), Verdict::NotInstalled);
        assert_eq!(of("count(ALERTS)"), Verdict::Quiet);
        assert_eq!(judge("thuban_operator_lead", true, &known), Verdict::Series);
    }
}

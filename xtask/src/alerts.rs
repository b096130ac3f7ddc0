//! The alerts of `charts/thuban/files/alerts.yaml`, judged by Prometheus' own promtool: their syntax, and what they say
//! to series of numbers (`e2e/alerts/alerts.test.yaml`). Each alert leads to a heading of `docs/runbooks/`.

use std::{collections::BTreeSet, fs, process::Command};

use anyhow::{Context, Result, ensure};
use serde_yaml_ng::Value;

use crate::{
    build::{root, run_command},
    dashboards, deps,
};

const ALERTS: &str = "charts/thuban/files/alerts.yaml";

/// Checks alerts, and the dashboards that link to their runbooks.
pub fn check() -> Result<()> {
    let runbooks = runbooks()?;
    deps::ensure_more(&deps::ALERT_PACKAGES)?;
    for arguments in [
        ["check", "rules", ALERTS],
        ["test", "rules", "e2e/alerts/alerts.test.yaml"],
    ] {
        run_command(Command::new("promtool").current_dir(root()).args(arguments))?;
    }
    dashboards::check(&runbooks)
}

/// Checks that each alert's runbook has a heading of the alert's name. Returns the addresses of the runbooks.
fn runbooks() -> Result<BTreeSet<String>> {
    let read = |path: &str| fs::read_to_string(root().join(path)).with_context(|| format!("reading {path}"));
    let rules: Value = serde_yaml_ng::from_str(&read(ALERTS)?)?;
    let groups = rules["groups"].as_sequence().into_iter().flatten();
    let rules = groups.flat_map(|group| group["rules"].as_sequence().into_iter().flatten());
    let (mut names, mut urls) = (BTreeSet::new(), BTreeSet::new());
    for rule in rules {
        let name = rule["alert"].as_str().context("a rule without a name")?;
        let url = rule["annotations"]["runbook_url"].as_str().unwrap_or_default();
        let (page, anchor) = url
            .rsplit_once("/main/")
            .and_then(|(_, page)| page.split_once('#'))
            .with_context(|| format!("{name}: runbook_url {url} is no heading of a page"))?;
        ensure!(
            anchor == name.to_lowercase(),
            "{name}: runbook_url leads to {anchor}"
        );
        let heading = format!("## {name}");
        ensure!(
            read(page)?.lines().any(|line| line == heading),
            "{page} has no heading {heading}"
        );
        ensure!(names.insert(name.to_owned()), "{name} is there twice");
        urls.insert(url.to_owned());
    }
    ensure!(!names.is_empty(), "{ALERTS} has no alerts");
    Ok(urls)
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_alert_has_a_runbook() {
        super::runbooks().unwrap();
    }
}

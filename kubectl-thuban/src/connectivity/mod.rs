//! `connectivity test`: makes pods in two VPCs with equal addresses, lets them ask each other, says who answered, and
//! deletes all that it made.
//!
//! [`plan`], [`manifests`], [`checks`] and [`pods`] are pure. [`rights`] asks whether the user may do all this, and
//! [`facts`] reads the cluster. [`run`] makes objects and reads the pods' answers from their logs, [`clean`] deletes.
//! No command is run in a pod.

mod checks;
mod clean;
mod facts;
mod manifests;
mod plan;
mod pods;
mod rights;
mod run;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use checks::{Finding, State};
pub use manifests::RUN_LABEL;

use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kube::Client;
use serde::Serialize;
use tokio::time::timeout;

use crate::arguments::{Format, TestOptions};
use crate::error::CliError;
use crate::fetch::Cluster;
use crate::render::{self, Style};
use crate::report::{PLUGIN, Verdict};
use crate::stop::stopped;

use checks::Facts;
use plan::{ALONE, Plan, Side, TWINS};
use run::{Run, Tell};

/// How long objects may take until they are deleted.
const CLEAN_TIMEOUT: Duration = Duration::from_mins(2);

/// What the test found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    pub verdict: Verdict,
    /// The version of the plugin.
    pub plugin: &'static str,
    pub checks: Vec<Finding>,
    /// Why not all was checked, if the test ended early.
    pub error: Option<String>,
    /// Objects of the test that are still there.
    pub left: Vec<String>,
    /// What to ask about packets that do not arrive; empty if all arrived.
    pub remedy: String,
}

impl Report {
    fn new(plan: &Plan, checks: Vec<Finding>, error: Option<CliError>, left: Vec<String>) -> Self {
        let has_failed = checks.iter().any(|finding| finding.state == State::Fail);
        let remedy = if has_failed {
            // The server of the client's network and node: the client has ended, and has no address any more.
            let [near, ..] = TWINS;
            let namespace = plan.namespace(Side::A);
            format!(
                "repeat the test with --keep, and ask what keeps packets from arriving, such as: kubectl thuban why \
                 {namespace}/{near} {namespace}/{ALONE}:8080"
            )
        } else {
            String::new()
        };
        Self {
            verdict: Verdict::from_findings(has_failed, error.is_some() || !left.is_empty()),
            plugin: PLUGIN,
            checks,
            error: error.map(|error| error.to_string()),
            left,
            remedy,
        }
    }

    /// Returns how many checks ended so.
    pub fn count(&self, state: State) -> usize {
        self.checks
            .iter()
            .filter(|finding| finding.state == state)
            .count()
    }
}

/// Runs the test and prints what it finds. For people each check is printed as it ends.
pub async fn test(cluster: &Cluster, output: Format, options: &TestOptions) -> Result<Verdict, CliError> {
    let client = &cluster.client();
    let plan = Box::pin(prepare(client, cluster.system_namespace(), options)).await?;
    let facts = Box::pin(gather(client, cluster.system_namespace())).await?;
    let is_text = matches!(output, Format::Table | Format::Wide);
    let style = Style::of(output);
    let mut show = |finding: &Finding| {
        if is_text {
            // What can't be printed now is in the report.
            let _ = render::write(&render::finding(finding, style));
        }
    };
    let report = Box::pin(test_plan(client, &plan, &facts, options, &mut show)).await;
    render::print(output, &report, |style| render::connectivity(&report, style))?;
    Ok(report.verdict)
}

/// Runs a plan to its end, to its time limit, or until the user stops it. Deletes its objects in any case.
async fn test_plan(
    client: &Client,
    plan: &Plan,
    facts: &Facts,
    options: &TestOptions,
    show: &mut dyn FnMut(&Finding),
) -> Report {
    let mut findings = Vec::new();
    let mut tell = |finding: Finding| {
        show(&finding);
        findings.push(finding);
    };
    let limit = Duration::from_secs(options.timeout);
    let error = Box::pin(bounded(client, plan, facts, limit, &mut tell))
        .await
        .err();
    if options.keep {
        say(&format!("kept; this deletes all: {}", removal(plan)));
        return Report::new(plan, findings, error, Vec::new());
    }
    say("deleting what the test has made");
    let left = tokio::select! {
        left = Box::pin(clean::clean(client, plan, CLEAN_TIMEOUT)) => left,
        () = stopped() => vec![format!("stopped before all was deleted; this deletes the rest: {}", removal(plan))],
    };
    Report::new(plan, findings, error, left)
}

/// Runs a plan, at most so long, and not after the user stops it.
async fn bounded(
    client: &Client,
    plan: &Plan,
    facts: &Facts,
    limit: Duration,
    tell: Tell<'_>,
) -> Result<(), CliError> {
    let run = Run::new(client.clone(), plan);
    tokio::select! {
        ended = timeout(limit, Box::pin(run.go(facts, tell))) => ended.unwrap_or_else(|_| {
            Err(CliError::Late { seconds: limit.as_secs(), waiting: run.waiting() })
        }),
        () = stopped() => Err(CliError::Stopped),
    }
}

/// Returns the command that deletes all objects of a run.
fn removal(plan: &Plan) -> String {
    let selector = manifests::selector(plan);
    format!("kubectl delete namespaces,networks.thuban.dev,vpcs.thuban.dev -l {selector}")
}

/// Tells progress on standard error. `eprintln!` would panic if its reader has gone, and the objects would stay.
fn say(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Looks whether the test can run, and makes its plan.
async fn prepare(client: &Client, system: &str, options: &TestOptions) -> Result<Plan, CliError> {
    let prefix = options.namespace_prefix.as_str();
    Box::pin(rights::require(client, &plan::namespace(prefix, Side::A))).await?;
    let image = match &options.image {
        Some(image) => image.clone(),
        None => facts::image(client, system).await?,
    };
    let nodes = facts::choose(facts::nodes(client).await?, &options.nodes)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let run = format!("{:x}-{:x}", now.as_nanos(), std::process::id());
    Plan::new(prefix, &image, options.cidr, &nodes, &run)
        .ok_or_else(|| CliError::RangeTooSmall(options.cidr.to_string()))
}

async fn gather(client: &Client, system: &str) -> Result<Facts, CliError> {
    let (kubernetes, api_servers) = facts::api_servers(client).await?;
    Ok(Facts {
        kubernetes,
        api_servers,
        dns: facts::dns(client, system).await?,
    })
}

/// Says why a request failed.
fn failed(error: kube::Error) -> CliError {
    match error {
        kube::Error::Api(status) if status.code == 409 => CliError::Exists(status),
        kube::Error::Api(status) if !status.message.is_empty() => CliError::Refused(status),
        error => CliError::Api {
            resource: "objects of the test",
            error,
        },
    }
}

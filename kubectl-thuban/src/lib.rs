//! kubectl thuban: reads objects ([`fetch`]), judges them ([`status`], [`check`], [`tree`], [`endpoints`]), and prints
//! reports ([`render`]). The judgements are pure: lists of objects in, a report out. [`trace`], [`sysdump`] and
//! [`uninstall`] have [`kubectl`] run what needs more than objects. [`observe`] asks thuban-observe about flows.
//!
//! It works by the rights of its user. What these don't allow is named, and the rest is shown. It changes nothing, but
//! for [`why`], which makes a PathTrace and deletes it, [`connectivity`], which makes pods and deletes them, and
//! [`uninstall`].

pub mod arguments;
pub mod check;
mod conditions;
pub mod connectivity;
pub mod endpoints;
pub mod error;
pub mod explain;
pub mod fetch;
pub mod kubectl;
pub mod objects;
pub mod observe;
pub mod render;
pub mod report;
mod roles;
pub mod status;
mod stop;
pub mod sysdump;
#[cfg(test)]
mod testing;
pub mod trace;
pub mod tree;
pub mod uninstall;
pub mod values;
pub mod version;
mod wait;
pub mod why;

use std::path::Path;
use std::time::Duration;

use clap::CommandFactory;
use k8s_openapi::jiff::Timestamp;

use crate::arguments::{Arguments, Connection, ConnectivityVerb, Format, Uninstall, Verb};
use crate::endpoints::Row;
use crate::error::CliError;
use crate::fetch::{Cluster, Scope};
use crate::kubectl::Kubectl;
use crate::report::Verdict;
use crate::uninstall::{NODE_SCRIPT, Removal};
use crate::why::{Answer, Question};

/// The name of the program, which shells complete.
const PROGRAM: &str = "kubectl-thuban";

/// Runs a command.
pub async fn run(arguments: Arguments) -> Result<Verdict, CliError> {
    let Arguments {
        connection,
        output,
        verb,
    } = arguments;
    match verb {
        Verb::Status(wait) => {
            let cluster = Cluster::connect(&connection).await?;
            let report = wait::status(&cluster, wait.seconds).await?;
            render::print(output, &report, |style| render::report(&report, style))?;
            Ok(report.verdict)
        }
        Verb::Check => check_cluster(&connection, output).await,
        Verb::Tree { vpc } => show_tree(&connection, output, vpc).await,
        Verb::Endpoints => list_endpoints(&connection, output).await,
        Verb::Why {
            source,
            target,
            probe,
        } => ask_why(&connection, output, [&source, &target], probe).await,
        Verb::Trace(trace) => {
            let (cluster, kubectl) = (Cluster::connect(&connection).await?, Kubectl::new(&connection));
            Box::pin(trace::run(&cluster, &kubectl, &trace, output)).await
        }
        Verb::Flows(options) => {
            let (cluster, kubectl) = (Cluster::connect(&connection).await?, Kubectl::new(&connection));
            let is_all = connection.all_namespaces;
            Box::pin(observe::show_flows(&cluster, kubectl, is_all, &options, output)).await
        }
        Verb::Top(options) => {
            let (cluster, kubectl) = (Cluster::connect(&connection).await?, Kubectl::new(&connection));
            let is_all = connection.all_namespaces;
            Box::pin(observe::show_top(&cluster, kubectl, is_all, &options, output)).await
        }
        Verb::Ui(options) => {
            let (cluster, kubectl) = (Cluster::connect(&connection).await?, Kubectl::new(&connection));
            Box::pin(observe::show_ui(
                &cluster,
                kubectl,
                connection.all_namespaces,
                &options,
            ))
            .await
        }
        Verb::Sysdump(options) => {
            let (cluster, kubectl) = (Cluster::connect(&connection).await?, Kubectl::new(&connection));
            let summary = Box::pin(sysdump::run(&cluster, &kubectl, &options)).await?;
            render::print(output, &summary, |_| summary.text())?;
            Ok(summary.verdict)
        }
        Verb::Values { env } => find_values(&connection, output, env).await,
        Verb::Uninstall(options) => remove(&connection, options).await,
        Verb::Connectivity {
            verb: ConnectivityVerb::Test(options),
        } => {
            let cluster = Cluster::connect(&connection).await?;
            Box::pin(connectivity::test(&cluster, output, &options)).await
        }
        Verb::Explain { reason } => explain_reason(output, reason),
        Verb::Version => show_versions(&connection, output).await,
        Verb::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), PROGRAM, &mut script);
            render::write(&String::from_utf8_lossy(&script))?;
            Ok(Verdict::Good)
        }
        Verb::Man { dir } => write_manual(&dir),
    }
}

fn write_manual(folder: &Path) -> Result<Verdict, CliError> {
    let written = clap_mangen::generate_to(Arguments::command(), folder);
    written.map_err(|error| CliError::Manual {
        path: folder.display().to_string(),
        error,
    })?;
    Ok(Verdict::Good)
}

async fn check_cluster(connection: &Connection, output: Format) -> Result<Verdict, CliError> {
    let cluster = Cluster::connect(connection).await?;
    let objects = cluster.check().await?;
    let report = check::report(&objects, &connection.system_namespace, Timestamp::now());
    render::print(output, &report, |style| {
        // Each finding is a line of its own, with its remedy.
        let style = render::Style {
            is_wide: true,
            ..style
        };
        render::report(&report, style)
    })?;
    Ok(report.verdict)
}

async fn show_tree(
    connection: &Connection,
    output: Format,
    vpc: Option<String>,
) -> Result<Verdict, CliError> {
    let cluster = Cluster::connect(connection).await?;
    let tenancy = cluster.tenancy().await?;
    let tree = tree::tree(&tenancy, vpc.as_deref());
    if let Some(vpc) = vpc.filter(|_| tree.vpcs.is_empty() && tree.unseen.is_empty()) {
        return Err(CliError::NoVpc(vpc));
    }
    render::print(output, &tree, |_| render::tree(&tree))?;
    Ok(tree.verdict)
}

async fn list_endpoints(connection: &Connection, output: Format) -> Result<Verdict, CliError> {
    let cluster = Cluster::connect(connection).await?;
    let scope = if connection.all_namespaces {
        Scope::All
    } else {
        Scope::Namespace
    };
    let listing = endpoints::listing(&cluster.endpoints(scope).await?);
    render::print(output, &listing, |style| render::endpoints(&listing, style))?;
    Ok(listing.verdict)
}

async fn ask_why(
    connection: &Connection,
    output: Format,
    [source, target]: [&str; 2],
    probe: bool,
) -> Result<Verdict, CliError> {
    let cluster = Cluster::connect(connection).await?;
    let question = Question {
        probe,
        ..Question::read(source, target, cluster.namespace())?
    };
    let mut answer = Answer::new(&question, cluster.ask(&question).await?);
    if let Some((namespace, pod)) = answer.withheld(&question)
        && let Some(endpoint) = cluster.endpoint_of(namespace, pod).await?
    {
        answer.add_place(&Row::of(&endpoint));
    }
    render::print(output, &answer, |style| render::answer(&answer, style))?;
    Ok(answer.outcome())
}

async fn find_values(connection: &Connection, output: Format, is_env: bool) -> Result<Verdict, CliError> {
    let cluster = Cluster::connect(connection).await?;
    let settings = values::settings(&Box::pin(cluster.lists()).await?)?;
    render::print(output, &settings, |_| values::text(&settings, is_env))?;
    Ok(Verdict::Good)
}

async fn remove(connection: &Connection, options: Uninstall) -> Result<Verdict, CliError> {
    if options.node_script {
        render::write(NODE_SCRIPT)?;
        return Ok(Verdict::Good);
    }
    let removal = Removal {
        kubectl: Kubectl::new(connection),
        namespace: connection.system_namespace.clone(),
        pods: Duration::from_secs(options.pods_timeout),
    };
    let removed = tokio::task::spawn_blocking(move || {
        if !options.yes {
            uninstall::confirm(&removal)?;
        }
        uninstall::run(&removal)
    });
    let cordoned = removed.await??;
    eprintln!("nothing of Thuban is left in the API server. On each node, run as root what this prints:");
    eprintln!("  kubectl thuban uninstall --node-script");
    if !cordoned.is_empty() {
        eprintln!("and then: kubectl uncordon {}", cordoned.join(" "));
    }
    Ok(Verdict::Good)
}

fn explain_reason(output: Format, name: String) -> Result<Verdict, CliError> {
    let explanations = explain::explain(&name);
    if explanations.is_empty() {
        let similar = explain::similar(&name);
        return Err(CliError::UnknownReason { name, similar });
    }
    render::print(output, &explanations, |_| render::explanations(&explanations))?;
    Ok(Verdict::Good)
}

async fn show_versions(connection: &Connection, output: Format) -> Result<Verdict, CliError> {
    let cluster = Cluster::connect(connection).await?;
    let (control_plane, droplets) = tokio::try_join!(cluster.control_plane(), cluster.droplets())?;
    let versions = version::versions(&control_plane, &droplets);
    render::print(output, &versions, |_| render::versions(&versions))?;
    Ok(versions.verdict)
}

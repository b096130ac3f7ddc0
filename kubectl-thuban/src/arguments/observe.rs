//! Options of the verbs that ask thuban-observe.

use clap::{Args, ValueEnum};

// Where thuban-observe is.
#[derive(Clone, Debug, Args)]
pub struct ObservePlace {
    /// Namespace of thuban-observe. Default: that of its Service; `thuban-observe` if you may not list Services.
    #[arg(long, env = "THUBAN_OBSERVE_NAMESPACE", value_name = "NAMESPACE")]
    pub observe_namespace: Option<String>,
}

impl ObservePlace {
    /// Returns the namespace, if the user named it.
    pub fn named(&self) -> Option<&str> {
        self.observe_namespace.as_deref().filter(|name| !name.is_empty())
    }
}

#[derive(Clone, Debug, Args)]
pub struct Flows {
    /// Goes on with the flows that follow, until Ctrl-C.
    #[arg(short, long)]
    pub follow: bool,
    /// Flows of this pod of the namespace.
    #[arg(long)]
    pub pod: Option<String>,
    /// Flows in this VPC.
    #[arg(long)]
    pub vpc: Option<String>,
    /// Flows from or to this address or pod.
    #[arg(long, value_name = "ADDRESS|NAMESPACE/POD")]
    pub peer: Option<String>,
    /// Flows that passed, or that were dropped.
    #[arg(long, value_enum)]
    pub verdict: Option<FlowVerdict>,
    /// Flows of so many seconds until now.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub since: Option<u64>,
    /// At most so many flows that were seen before. Default: 100.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub last: Option<u64>,
    #[command(flatten)]
    pub place: ObservePlace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FlowVerdict {
    Passed,
    Dropped,
}

impl FlowVerdict {
    /// Returns the word of thuban-observe's parameter.
    pub fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Dropped => "dropped",
        }
    }
}

#[derive(Clone, Debug, Args)]
pub struct TopOptions {
    /// What is counted.
    #[arg(value_enum, default_value_t = TopBy::Pods)]
    pub by: TopBy,
    /// Shows it again each 2 seconds, or after so many, until Ctrl-C.
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2",
        value_parser = clap::value_parser!(u64).range(1..=3_600)
    )]
    pub watch: Option<u64>,
    #[command(flatten)]
    pub place: ObservePlace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TopBy {
    Pods,
    Networks,
    Vpcs,
    Reasons,
}

impl TopBy {
    /// Returns the word of thuban-observe's parameter.
    pub fn word(self) -> &'static str {
        match self {
            Self::Pods => "pod",
            Self::Networks => "network",
            Self::Vpcs => "vpc",
            Self::Reasons => "reason",
        }
    }
}

#[derive(Clone, Debug, Args)]
pub struct Ui {
    /// Port of 127.0.0.1. Default: a free one.
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub port: u16,
    /// Opens the page in your browser.
    #[arg(long)]
    pub open: bool,
    #[command(flatten)]
    pub place: ObservePlace,
}

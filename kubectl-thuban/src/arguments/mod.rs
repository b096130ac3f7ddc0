//! The command line.

mod examples;
mod observe;

pub use observe::{FlowVerdict, Flows, ObservePlace, TopBy, TopOptions, Ui};

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use thuban_api::SYSTEM_NAMESPACE;
use thuban_api::cidr::Cidr;

use examples::{
    CHECK_EXAMPLES, COMPLETIONS_EXAMPLES, CONNECTIVITY_EXAMPLES, ENDPOINTS_EXAMPLES, EXAMPLES,
    EXPLAIN_EXAMPLES, FLOWS_EXAMPLES, MAN_EXAMPLES, STATUS_EXAMPLES, SYSDUMP_EXAMPLES, TEST_EXAMPLES,
    TOP_EXAMPLES, TRACE_EXAMPLES, TREE_EXAMPLES, UI_EXAMPLES, UNINSTALL_EXAMPLES, VALUES_EXAMPLES,
    VERSION_EXAMPLES, WHY_EXAMPLES,
};

/// Says how Thuban stands in a cluster, and why. It changes nothing, but for `uninstall`; `why` and `connectivity test`
/// make objects and delete them.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-thuban",
    bin_name = "kubectl thuban",
    version,
    after_help = EXAMPLES
)]
pub struct Arguments {
    #[command(flatten)]
    pub connection: Connection,
    /// Form of the output.
    #[arg(
        short,
        long,
        global = true,
        value_enum,
        value_name = "FORMAT",
        default_value_t = Format::Table
    )]
    pub output: Format,
    #[command(subcommand)]
    pub verb: Verb,
}

// Which cluster is asked, for which namespace, and as whom. No doc comment: it would become the help of the command.
#[derive(Clone, Debug, Args)]
pub struct Connection {
    /// Context of the kubeconfig.
    #[arg(long, global = true)]
    pub context: Option<String>,
    /// Path of the kubeconfig. Default: that of KUBECONFIG, or ~/.kube/config.
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of endpoints and flows. Default: that of the context; for `status` and `tree` all that you may list.
    #[arg(short, long, global = true)]
    pub namespace: Option<String>,
    /// Endpoints or flows of all namespaces.
    #[arg(short = 'A', long, global = true, conflicts_with = "namespace")]
    pub all_namespaces: bool,
    /// User to act as.
    #[arg(long = "as", global = true, value_name = "USER")]
    pub as_user: Option<String>,
    /// The kubectl that runs commands in pods and forwards ports. Default: that of PATH.
    #[arg(
        long,
        global = true,
        env = "THUBAN_KUBECTL",
        value_name = "FILE",
        default_value = "kubectl"
    )]
    pub kubectl: PathBuf,
    /// Namespace that Thuban is installed in.
    #[arg(
        long,
        global = true,
        env = "THUBAN_NAMESPACE",
        value_name = "NAMESPACE",
        default_value = SYSTEM_NAMESPACE
    )]
    pub system_namespace: String,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Shows what works and what does not: operator, droplets, VPCs, networks, addresses, endpoints.
    #[command(after_help = STATUS_EXAMPLES)]
    Status(Wait),
    /// Looks for what may go wrong: versions, nodes, ranges, other network plugins.
    #[command(after_help = CHECK_EXAMPLES)]
    Check,
    /// Shows VPCs with their dividers, networks, bouncers and endpoints.
    #[command(after_help = TREE_EXAMPLES)]
    Tree {
        /// The only VPC.
        vpc: Option<String>,
    },
    /// Lists endpoints, and why some are not Provisioned.
    #[command(after_help = ENDPOINTS_EXAMPLES)]
    Endpoints,
    /// Says what keeps packets of a pod from a pod, a Service or an address.
    #[command(after_help = WHY_EXAMPLES)]
    Why {
        /// The pod that sends: POD or NAMESPACE/POD.
        source: String,
        /// The target: POD, NAMESPACE/POD, svc/SERVICE, svc/NAMESPACE/SERVICE or an address, and behind it :PORT or
        /// :PORT/PROTOCOL.
        target: String,
        /// Has the pod send one packet to the target, and shows what nodes on the way did with it, and the answer.
        #[arg(long)]
        probe: bool,
    },
    /// Shows the packets of a pod as its node's programs see them, with the names of pods.
    #[command(after_help = TRACE_EXAMPLES)]
    Trace(Trace),
    /// Shows flows with the names of their ends, as thuban-observe remembers and hears them.
    #[command(after_help = FLOWS_EXAMPLES)]
    Flows(Flows),
    /// Shows who sends most in the last minute, or why packets are dropped.
    #[command(after_help = TOP_EXAMPLES)]
    Top(TopOptions),
    /// Opens the page of VPCs and their traffic, by a server on this machine.
    #[command(after_help = UI_EXAMPLES)]
    Ui(Ui),
    /// Collects objects, events, logs and nodes' tables in an archive. Never Secrets.
    #[command(after_help = SYSDUMP_EXAMPLES)]
    Sysdump(Sysdump),
    /// Reads the cluster, and prints the values with which Thuban is installed on it.
    #[command(after_help = VALUES_EXAMPLES)]
    Values {
        /// Print lines of install/config.env instead of the chart's values.
        #[arg(long)]
        env: bool,
    },
    /// Removes Thuban from the cluster, with all that is in its VPCs.
    #[command(after_help = UNINSTALL_EXAMPLES)]
    Uninstall(Uninstall),
    /// Tests the network by pods that it makes and deletes.
    #[command(after_help = CONNECTIVITY_EXAMPLES)]
    Connectivity {
        #[command(subcommand)]
        verb: ConnectivityVerb,
    },
    /// Says what a reason means, and what to do about it.
    #[command(after_help = EXPLAIN_EXAMPLES)]
    Explain {
        /// Reason of a condition or an event, or name of a counter. Upper and lower case are the same.
        reason: String,
    },
    /// Shows the versions of plugin, operator and droplets.
    #[command(after_help = VERSION_EXAMPLES)]
    Version,
    /// Prints a script by which a shell completes words.
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Writes manual pages into a folder, for those who package the plugin.
    #[command(hide = true, after_help = MAN_EXAMPLES)]
    Man {
        /// The folder. It must exist.
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub enum ConnectivityVerb {
    /// Checks pairs of pods, isolation of VPCs, Services, DNS, ways out, and a network policy.
    #[command(after_help = TEST_EXAMPLES)]
    Test(TestOptions),
}

#[derive(Clone, Debug, Args)]
pub struct TestOptions {
    /// Seconds until the test gives up, without the time to delete its objects.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 180,
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    pub timeout: u64,
    /// Image of the pods, with /bin/thuban-connectivity in it. Default: transitd's image, which every node has.
    #[arg(long)]
    pub image: Option<String>,
    /// A node of the pods. May be given twice. Default: the first two, by name, that take pods.
    #[arg(long = "node", value_name = "NODE")]
    pub nodes: Vec<String>,
    /// Beginning of the names of namespaces, VPCs and networks.
    #[arg(
        long,
        value_name = "PREFIX",
        default_value = "thuban-connectivity",
        value_parser = prefix
    )]
    pub namespace_prefix: String,
    /// Range of both VPCs, IPv4 and /23 or larger. Services, nodes and the VPC `default` may have no address in it.
    #[arg(long, value_name = "CIDR", default_value = "10.213.0.0/16")]
    pub cidr: Cidr,
    /// Deletes nothing, so that you can look at the pods.
    #[arg(long)]
    pub keep: bool,
}

/// Reads the beginning of names that are DNS labels.
fn prefix(text: &str) -> Result<String, String> {
    const LONGEST: usize = 50;
    let is_fit = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
    let starts = text.starts_with(|letter: char| is_fit(letter) && letter != '-');
    if starts && text.len() <= LONGEST && text.chars().all(is_fit) {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "use a-z, 0-9 and -, at most {LONGEST} of them, and begin with a letter or a digit"
        ))
    }
}

#[derive(Clone, Copy, Debug, Args)]
pub struct Wait {
    /// Waits until the installation is well, 60 seconds at most if no number is given. What tenants have is waited for
    /// for 10 seconds.
    #[arg(
        long = "wait",
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "60"
    )]
    pub seconds: Option<u64>,
}

#[derive(Clone, Debug, Args)]
pub struct Trace {
    /// The pod: POD or NAMESPACE/POD.
    pub pod: String,
    /// Stop after this number of packets. Default: 100, or none with --follow.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Go on until Ctrl-C, for an hour at most. Default: 30 seconds.
    #[arg(long)]
    pub follow: bool,
}

#[derive(Clone, Debug, Args)]
pub struct Sysdump {
    /// The archive. Default: thuban-sysdump-TIME.tar.gz in this folder. It must not exist.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// A node of which tables and logs are collected. May be repeated. Default: 20 nodes, those that are not well
    /// first.
    #[arg(long = "node", value_name = "NODE")]
    pub nodes: Vec<String>,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct Uninstall {
    /// Ask nothing.
    #[arg(long)]
    pub yes: bool,
    /// Seconds without a pod that ends, after which pods are deleted without their kubelet.
    #[arg(long, value_name = "SECONDS", default_value_t = 45)]
    pub pods_timeout: u64,
    /// Print the script that removes Thuban's traces from a node, and do nothing else.
    #[arg(long)]
    pub node_script: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    #[default]
    Table,
    Wide,
    Json,
    Yaml,
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::{Arguments, ConnectivityVerb, Format, Verb};

    #[test]
    fn the_command_line_is_consistent_and_has_examples() {
        let command = Arguments::command();
        command.clone().debug_assert();
        for verb in command.get_subcommands() {
            let help = verb.get_after_help().map(ToString::to_string);
            assert!(
                help.is_some_and(|help| help.starts_with("Examples:")),
                "{}",
                verb.get_name()
            );
        }
    }

    #[test]
    fn a_test_has_a_prefix_that_begins_names() {
        let read = |more: &[&str]| {
            let line = [&["kubectl-thuban", "connectivity", "test"][..], more].concat();
            Arguments::try_parse_from(line)
        };
        let Verb::Connectivity {
            verb: ConnectivityVerb::Test(options),
        } = read(&[]).unwrap().verb
        else {
            panic!("another verb");
        };
        assert_eq!(options.namespace_prefix, "thuban-connectivity");
        assert_eq!((options.timeout, options.keep), (180, false));
        assert!(read(&["--namespace-prefix", "net-7"]).is_ok());
        for bad in ["", "-a", "A", "a.b", "a".repeat(51).as_str()] {
            let line = format!("--namespace-prefix={bad}");
            assert!(read(&[line.as_str()]).is_err(), "{bad}");
        }
        assert!(read(&["--timeout", "0"]).is_err());
        assert!(read(&["--cidr", "10.0.0.1/16"]).is_err());
    }

    #[test]
    fn global_flags_stand_before_or_after_the_verb() {
        for line in [
            "kubectl-thuban -n red -o json status --wait",
            "kubectl-thuban status --wait -n red -o json",
        ] {
            let arguments = Arguments::try_parse_from(line.split(' ')).unwrap();
            assert_eq!(arguments.connection.namespace.as_deref(), Some("red"));
            assert_eq!(arguments.output, Format::Json);
            assert!(matches!(arguments.verb, Verb::Status(wait) if wait.seconds == Some(60)));
        }
        let both = Arguments::try_parse_from(["kubectl-thuban", "endpoints", "-A", "-n", "red"]);
        assert!(both.is_err());
    }
}

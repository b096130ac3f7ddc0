//! The command line of lbaasctl.

use std::convert::Infallible;
use std::ffi::OsString;
use std::net::IpAddr;
use std::str::FromStr;

use clap::builder::PossibleValuesParser;
use clap::builder::TypedValueParser as _;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use serde::de::{DeserializeOwned, Error as _, IntoDeserializer, value};
use thuban_api::{IpFamily, VipMode, VipPort, VipProtocol};

const USAGE: &str = "lbaasctl [OPTIONS] [NAMESPACE/]NAME SERVICE PORT PROTOCOL [PROFILE]...
       lbaasctl [OPTIONS] <COMMAND>";
const EXAMPLES: &str = "Examples:
  lbaasctl shop web 443 tcp --wait            a Vip `shop` for port 443 of Service `web`
  lbaasctl red/shop web 443 udp               its port 443 by UDP, too; in the namespace `red`
  lbaasctl shop web 443 tcp office sticky     with these VipProfiles
  lbaasctl shop web 443 tcp --pool gold --address 203.0.113.7 --dns-name shop.red.apps.example.com
  lbaasctl list -A -o yaml
  lbaasctl members shop
  lbaasctl delete shop --wait=120

A Vip whose name is a command is given as NAMESPACE/NAME. `lbaasctl help make` lists the options of a Vip.
Exit codes: 1 if something was refused, failed, or was not ready in time; 2 if the command line is wrong.";

/// Gives Services of Kubernetes addresses outside: makes Vips, and shows them.
#[derive(Debug, Parser)]
#[command(name = "lbaasctl", version, override_usage = USAGE, after_help = EXAMPLES)]
pub struct Arguments {
    /// Namespace. Default: that of the kubeconfig's context.
    #[arg(short, long, global = true)]
    pub namespace: Option<String>,
    /// Context of the kubeconfig.
    #[arg(long, global = true)]
    pub context: Option<String>,
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Makes a Vip, adds a port to it, or sets its profiles. The word `make` can be left out.
    Make(Make),
    /// Lists Vips.
    List {
        /// Of all namespaces.
        #[arg(short = 'A', long)]
        all_namespaces: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Shows a Vip.
    Get {
        /// [NAMESPACE/]NAME of the Vip.
        name: Name,
        #[command(flatten)]
        output: Output,
    },
    /// Shows the backends of a Vip, and whether they are ready.
    Members {
        /// [NAMESPACE/]NAME of the Vip.
        name: Name,
        #[command(flatten)]
        output: Output,
    },
    /// Shows Vips, and again when they change.
    Watch {
        /// [NAMESPACE/]NAME of the only Vip.
        name: Option<Name>,
    },
    /// Deletes a Vip.
    Delete {
        /// [NAMESPACE/]NAME of the Vip.
        name: Name,
        #[command(flatten)]
        wait: Wait,
    },
    /// Lists pools of addresses.
    Pools {
        #[command(flatten)]
        output: Output,
    },
}

/// What a user wants of a Vip. What is not set stays as it is.
#[derive(Clone, Debug, Args)]
pub struct Make {
    /// [NAMESPACE/]NAME of the Vip.
    pub name: Name,
    /// Service whose pods are reached.
    pub service: String,
    /// Port of the Service.
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// tcp, udp or sctp.
    #[arg(ignore_case = true, value_parser = words::<VipProtocol>(["TCP", "UDP", "SCTP"]))]
    pub protocol: VipProtocol,
    /// VipProfiles of the namespace, which replace those that the Vip has.
    #[arg(value_name = "PROFILE")]
    pub profiles: Vec<String>,
    /// IpPool of the addresses.
    #[arg(long)]
    pub pool: Option<String>,
    /// Wanted address, at most one of each family.
    #[arg(long = "address")]
    pub addresses: Vec<IpAddr>,
    /// Family of which the Vip has an address; both can be given.
    #[arg(long = "family", ignore_case = true, value_parser = words::<IpFamily>(["IPv4", "IPv6"]))]
    pub families: Vec<IpFamily>,
    /// How clients reach backends.
    #[arg(long, ignore_case = true, value_parser = words::<VipMode>(["Dsr", "Tunnel", "Node"]))]
    pub mode: Option<VipMode>,
    /// Name of the addresses in DNS.
    #[arg(long)]
    pub dns_name: Option<String>,
    /// Seconds for which clients are answered after the name of the deleted Vip is gone.
    #[arg(long)]
    pub drain_seconds: Option<u32>,
    #[command(flatten)]
    pub wait: Wait,
}

impl Make {
    pub fn vip_port(&self) -> VipPort {
        VipPort {
            port: self.port,
            protocol: self.protocol,
        }
    }
}

#[derive(Clone, Copy, Debug, Args)]
pub struct Wait {
    /// Waits until it is done, 60 seconds at most if no number is given.
    #[arg(
        long = "wait",
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "60"
    )]
    pub seconds: Option<u64>,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct Output {
    /// Prints objects instead of a table.
    #[arg(short = 'o', long = "output", value_name = "FORMAT")]
    pub format: Option<Format>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Json,
    Yaml,
}

/// The name of a Vip, and its namespace if that is said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub namespace: Option<String>,
    pub name: String,
}

impl FromStr for Name {
    type Err = Infallible;

    /// What is no name, the API server refuses.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let (namespace, name) = match text.split_once('/') {
            Some((namespace, name)) => (Some(namespace.to_owned()), name),
            None => (None, text),
        };
        Ok(Self {
            namespace,
            name: name.to_owned(),
        })
    }
}

/// Returns a parser of words of the API, in any case.
fn words<T: DeserializeOwned + Clone + Send + Sync + 'static>(
    words: impl IntoIterator<Item = &'static str> + Clone + Send + Sync + 'static,
) -> impl clap::builder::TypedValueParser<Value = T> {
    PossibleValuesParser::new(words.clone()).try_map(move |given| {
        let mut words = words.clone().into_iter();
        let word = words.find(|word| word.eq_ignore_ascii_case(&given));
        let word = word.ok_or_else(|| value::Error::custom(&given))?;
        T::deserialize(IntoDeserializer::<value::Error>::into_deserializer(word))
    })
}

/// Reads the command line. Ends the process if it is wrong, or asks for help.
pub fn parse(given: impl Iterator<Item = OsString>) -> Arguments {
    Arguments::parse_from(with_verb(given.collect()))
}

/// Adds `make` if the first argument that is no option is no command.
fn with_verb(mut given: Vec<OsString>) -> Vec<OsString> {
    let command = Arguments::command();
    let options = || {
        let of_verbs = command.get_subcommands().flat_map(clap::Command::get_arguments);
        command.get_arguments().chain(of_verbs)
    };
    let takes_next = |option: &str| {
        options().any(|argument| {
            let is_it = argument
                .get_long()
                .is_some_and(|long| option == format!("--{long}"))
                || argument
                    .get_short()
                    .is_some_and(|short| option == format!("-{short}"));
            is_it && argument.get_action().takes_values() && !argument.is_require_equals_set()
        })
    };
    let mut words = given.iter().skip(1).map(|word| word.to_string_lossy());
    while let Some(word) = words.next() {
        if takes_next(&word) {
            words.next();
        } else if !word.starts_with('-') {
            if word != "help" && command.find_subcommand(&*word).is_none() {
                given.insert(1, "make".into());
            }
            break;
        }
    }
    given
}

#[cfg(test)]
mod tests;

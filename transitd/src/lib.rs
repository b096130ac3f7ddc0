//! The parts of transitd, for the daemon and for tools that play its side of the operator's stream without a data
//! plane.

pub mod askers;
pub mod attachments;
pub mod boot;
pub mod boot_file;
pub mod checks;
pub mod cni;
pub mod contact;
pub mod daemon;
pub mod dataplane;
pub mod denials;
pub mod dial;
pub mod dns;
pub mod endpoints;
pub mod flows;
pub mod follow;
pub mod inspect;
pub mod install;
pub mod metrics;
pub mod metrics_page;
pub mod netfilter;
pub mod netlink;
pub mod node;
pub mod operator;
pub mod path_probes;
pub mod program;
pub mod rejection;
pub mod rules;
pub mod scrape;
pub mod servers;
pub mod settings;
pub mod shaped;
pub mod socket;
pub mod state;
pub mod tasks;
pub mod trace;
mod words;

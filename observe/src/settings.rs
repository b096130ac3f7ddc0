//! Settings of the process, from its environment.

use std::net::IpAddr;

use clap::Parser;
use thuban_telemetry::control;

/// Tells readers of flows: droplets report to it, and readers ask it by namespace.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Settings {
    /// Address that droplets connect to: that of this pod.
    #[arg(long, env = "POD_IP")]
    pub pod_ip: IpAddr,
    /// TCP port that droplets and readers connect to, by TLS.
    #[arg(long, env = "THUBAN_OBSERVE_PORT", default_value_t = 6091)]
    pub port: u16,
    /// TCP port of metrics and health probes, at the same address. Metrics are read by https, with a bearer token whose
    /// owner may `get` the path `/metrics`; probes by everybody. 0 turns both off.
    #[arg(long, env = "THUBAN_OBSERVE_METRICS_PORT", default_value_t = 6092)]
    pub metrics_port: u16,
    #[command(subcommand)]
    pub command: Option<control::Command>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Settings;

    #[test]
    fn settings_are_consistent() {
        Settings::command().debug_assert();
    }
}

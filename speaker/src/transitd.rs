//! Asks transitd which addresses of load balancers this node serves.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use thuban_proto::inspect::inspect_client::InspectClient;
use thuban_proto::inspect::{ServedAddress, ServedReply, ServedRequest};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::{info, warn};

use crate::deadlines::now;

/// How often transitd is asked.
const POLL: Duration = Duration::from_millis(200);
/// How long its answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// An answer of transitd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// Addresses, each with the Services that it leads to (`namespace/name`).
    pub services: BTreeSet<(IpAddr, String)>,
    /// When transitd was asked.
    pub at: Duration,
}

/// Asks the transitd at a socket again and again. What it does not answer changes nothing.
pub async fn follow(socket: PathBuf, answers: watch::Sender<Option<Served>>) {
    let mut transitd = InspectClient::new(crate::channel(socket));
    let mut ticks = interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_silent = false;
    loop {
        ticks.tick().await;
        let at = now();
        match timeout(ANSWER_TIMEOUT, transitd.served(ServedRequest {})).await {
            Ok(Ok(reply)) => {
                if std::mem::take(&mut is_silent) {
                    info!("transitd answers again");
                }
                let services = services(reply.into_inner());
                answers.send_replace(Some(Served { services, at }));
            }
            failed => {
                if !std::mem::replace(&mut is_silent, true) {
                    let error = failed.map_or_else(
                        |_| "no answer in time".to_owned(),
                        |failed| failed.map_or_else(|status| status.to_string(), |_| String::new()),
                    );
                    warn!(error, "transitd doesn't answer, trying again");
                }
            }
        }
    }
}

/// Reads addresses. Other lengths than those of addresses are of no use.
fn services(reply: ServedReply) -> BTreeSet<(IpAddr, String)> {
    let read = |served: ServedAddress| {
        let bytes = served.address.as_slice();
        let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
        let address = v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from));
        Some((address.ok()?, served.service))
    };
    reply.served.into_iter().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_both_families_are_read() {
        let v4: IpAddr = "192.0.2.1".parse().unwrap();
        let v6: IpAddr = "2001:db8::1".parse().unwrap();
        let served = |address: Vec<u8>| ServedAddress {
            address,
            service: "red/web".into(),
        };
        let octets = v6.to_string().parse::<std::net::Ipv6Addr>().unwrap().octets();
        let reply = ServedReply {
            served: vec![
                served(vec![192, 0, 2, 1]),
                served(vec![1]),
                served(octets.to_vec()),
            ],
        };
        let both = [v4, v6].map(|address| (address, "red/web".to_owned()));
        assert_eq!(services(reply), both.into());
    }
}

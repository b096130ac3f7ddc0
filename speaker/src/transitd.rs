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
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn addresses_of_both_families_are_read() {
        let v4 = Ipv4Addr::new(192, 0, 2, 1);
        let v6 = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
        let served = |address: Vec<u8>| ServedAddress {
            address,
            service: "red/web".into(),
        };
        let reply = ServedReply {
            served: vec![
                served(v4.octets().to_vec()),
                served(vec![1]),
                served(v6.octets().to_vec()),
            ],
        };
        let both = [IpAddr::from(v4), IpAddr::from(v6)].map(|address| (address, "red/web".to_owned()));
        assert_eq!(services(reply), both.into());
    }
}

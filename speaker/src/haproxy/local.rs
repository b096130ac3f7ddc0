//! Has the node take the packets to addresses that HAProxy serves: routes of type local in a table of their own, which
//! a rule looks up for TCP alone.
//!
//! The addresses are not the node's own ones. So the kernel answers no ARP request for them: which node does is
//! decided elsewhere. Without such addresses there is no rule, so packets of other nodes take their usual way.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use futures::TryStreamExt;
use netlink_packet_route::IpProtocol;
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteScope, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute};
use nix::libc;
use rtnetlink::{Handle, RouteMessageBuilder, RuleAddRequest};
use thiserror::Error;
use thuban_common::host_stack::PROXY_TABLE;
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::ledger::SharedLedger;

/// How often routes are compared with what is announced, if nothing is heard.
const LOOK: Duration = Duration::from_secs(1);
/// The link of the routes: loopback is the first one of each network namespace.
const LOOPBACK: u32 = 1;

#[derive(Debug, Error)]
pub enum LocalError {
    #[error("opening a netlink socket: {0}")]
    Socket(#[source] io::Error),
    #[error("{0} is no address of a route")]
    Address(IpAddr),
    #[error("the kernel refuses to {action}: {source}")]
    Request {
        action: &'static str,
        source: rtnetlink::Error,
    },
}

pub struct Local {
    handle: Handle,
    /// The addresses with a route; `None`: an earlier speaker may have left some.
    known: Option<BTreeSet<IpAddr>>,
}

impl Local {
    pub fn connect() -> Result<Self, LocalError> {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(LocalError::Socket)?;
        tokio::spawn(connection);
        Ok(Self { handle, known: None })
    }

    /// Has the node take packets to these addresses and to no others of the table.
    pub async fn sync(&mut self, wanted: &BTreeSet<IpAddr>) -> Result<(), LocalError> {
        if self.known.as_ref() == Some(wanted) {
            return Ok(());
        }
        // A failure leaves the rest to the next look.
        let known = match self.known.take() {
            Some(known) => known,
            None => self.list().await?,
        };
        for address in known.difference(wanted) {
            let deleted = self.handle.route().del(route(*address)?).execute().await;
            tolerate(deleted, libc::ESRCH, "delete a route")?;
        }
        for is_ipv4 in [true, false] {
            if wanted.iter().any(|address| address.is_ipv4() == is_ipv4) {
                self.add_rule(is_ipv4).await?;
            }
        }
        for address in wanted.difference(&known) {
            let added = self.handle.route().add(route(*address)?).execute().await;
            tolerate(added, libc::EEXIST, "add a route")?;
        }
        self.known = Some(wanted.clone());
        Ok(())
    }

    /// Returns the addresses with a route.
    async fn list(&self) -> Result<BTreeSet<IpAddr>, LocalError> {
        let queries = [
            RouteMessageBuilder::<Ipv4Addr>::new().build(),
            RouteMessageBuilder::<Ipv6Addr>::new().build(),
        ];
        let mut listed = BTreeSet::new();
        for query in queries {
            let mut routes = self.handle.route().get(query).execute();
            let failed = |source| LocalError::Request {
                action: "list routes",
                source,
            };
            while let Some(route) = routes.try_next().await.map_err(failed)? {
                listed.extend(address_of(&route));
            }
        }
        Ok(listed)
    }

    async fn add_rule(&self, is_ipv4: bool) -> Result<(), LocalError> {
        let added = if is_ipv4 {
            of_tcp(self.handle.rule().add().v4()).execute().await
        } else {
            of_tcp(self.handle.rule().add().v6()).execute().await
        };
        tolerate(added, libc::EEXIST, "add a rule")
    }
}

/// Keeps the routes to what the node announces, for ever.
pub async fn follow(ledger: SharedLedger) {
    let mut answers = ledger.lock().answers();
    let mut local = None;
    let mut is_failing = false;
    loop {
        let wanted = ledger.lock().local_addresses();
        let synced = match &wanted {
            Some(wanted) => sync(&mut local, wanted).await,
            None => Ok(()),
        };
        match synced {
            Ok(()) => is_failing = false,
            Err(error) if !is_failing => {
                is_failing = true;
                warn!(%error, "the node does not take packets to HAProxy's addresses yet, trying again");
            }
            Err(_) => {}
        }
        tokio::select! {
            () = sleep(LOOK) => {}
            _ = answers.changed() => {}
        }
    }
}

async fn sync(local: &mut Option<Local>, wanted: &BTreeSet<IpAddr>) -> Result<(), LocalError> {
    let mut connected = match local.take() {
        Some(local) => local,
        None => Local::connect()?,
    };
    // A connection without an answer is of no use afterwards.
    let synced = timeout(LOOK, connected.sync(wanted)).await.unwrap_or(Ok(()));
    if synced.is_ok() && connected.known.is_some() {
        *local = Some(connected);
    }
    synced
}

fn of_tcp<T>(rule: RuleAddRequest<T>) -> RuleAddRequest<T> {
    let mut rule = rule
        .table_id(PROXY_TABLE)
        .priority(PROXY_TABLE)
        .action(RuleAction::ToTable);
    let protocol = RuleAttribute::IpProtocol(IpProtocol::Tcp);
    rule.message_mut().attributes.push(protocol);
    rule
}

fn route(address: IpAddr) -> Result<RouteMessage, LocalError> {
    let length = if address.is_ipv4() { 32 } else { 128 };
    let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(address, length);
    let route = route.map_err(|_| LocalError::Address(address))?;
    Ok(route
        .table_id(PROXY_TABLE)
        .kind(RouteType::Local)
        .scope(RouteScope::Host)
        .output_interface(LOOPBACK)
        .build())
}

/// Returns the address of a route of the table.
fn address_of(route: &RouteMessage) -> Option<IpAddr> {
    if !route.attributes.contains(&RouteAttribute::Table(PROXY_TABLE)) {
        return None;
    }
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Destination(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })
}

/// Takes an error of this number for success.
fn tolerate(
    result: Result<(), rtnetlink::Error>,
    number: i32,
    action: &'static str,
) -> Result<(), LocalError> {
    match result {
        Err(rtnetlink::Error::NetlinkError(message))
            if message.code.map(|code| -code.get()) == Some(number) =>
        {
            Ok(())
        }
        other => other.map_err(|source| LocalError::Request { action, source }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_route_is_known_by_its_table() {
        for text in ["203.0.113.7", "2001:db8::7"] {
            let address: IpAddr = text.parse().unwrap();
            let own = route(address).unwrap();
            assert_eq!(address_of(&own), Some(address));
            assert_eq!(own.header.kind, RouteType::Local);
        }
        let other =
            RouteMessageBuilder::<IpAddr>::new().destination_prefix("203.0.113.7".parse().unwrap(), 32);
        assert_eq!(address_of(&other.unwrap().build()), None);
    }
}

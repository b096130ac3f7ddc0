//! Which addresses and ports HAProxy can take. One that another process has would keep a whole configuration from its
//! start, those of all other tenants too.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use thuban_api::proxies::{Proxy, ProxyPort};
use tokio::time::Instant;

/// How long a port is left to a process that has ended.
const RESERVED: Duration = Duration::from_hours(1);

/// The ports that other processes have at all addresses, or had not long ago. While such a process starts anew, its
/// port is free. If HAProxy took it, the process could not start: kubelet, say, or the API server.
#[derive(Debug, Default)]
pub struct Reserved(BTreeMap<u16, Instant>);

impl Reserved {
    /// Whether HAProxy may take a port. `is_free`: no other process has it now.
    pub fn admits(&mut self, port: u16, is_free: bool, now: Instant) -> bool {
        if !is_free {
            self.0.insert(port, now);
        }
        let seen = self.0.get(&port);
        seen.is_none_or(|seen| now.duration_since(*seen) >= RESERVED)
    }
}

/// Whether no other process has an address and port, or the port at all addresses. HAProxy's own sockets don't count:
/// the kernel lets sockets of one user share a port if all of them want to, as HAProxy's do.
pub fn is_free(address: IpAddr, port: u16) -> bool {
    let bound = bind(SocketAddr::new(address, port));
    !bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

/// Nobody gets connections by the socket, because it does not listen.
fn bind(at: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    // The address is no address of an interface.
    if at.is_ipv4() {
        socket.set_freebind_v4(true)?;
    } else {
        socket.set_only_v6(true)?;
        socket.set_freebind_v6(true)?;
    }
    socket.bind(&at.into())
}

/// Leaves out the ports of a Vip that are not free. Returns these, too.
pub fn without_taken(
    mut proxy: Proxy,
    mut is_free: impl FnMut(IpAddr, u16) -> bool,
) -> (Proxy, Vec<ProxyPort>) {
    let addresses = proxy.addresses.clone();
    let is_usable = |port: &ProxyPort| addresses.iter().all(|address| is_free(*address, port.port));
    let (free, taken) = proxy.ports.into_iter().partition(is_usable);
    proxy.ports = free;
    (proxy, taken)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::haproxy::config::tests::shop;

    #[test]
    fn a_port_is_kept_for_a_process_that_starts_anew() {
        let (mut reserved, began) = (Reserved::default(), Instant::now());
        assert!(reserved.admits(6443, true, began), "nobody had it");
        assert!(!reserved.admits(6443, false, began));
        let later = began + Duration::from_mins(59);
        assert!(!reserved.admits(6443, true, later));
        assert!(reserved.admits(443, true, later), "another port");
        assert!(reserved.admits(6443, true, began + RESERVED));
    }

    #[test]
    fn a_port_that_another_process_has_is_left_out() {
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = other.local_addr().unwrap().port();
        assert!(!is_free(Ipv4Addr::LOCALHOST.into(), port));
        drop(other);
        assert!(is_free(Ipv4Addr::LOCALHOST.into(), port));
        let (left, taken) = without_taken(shop(), |_, port| port != 443);
        assert!(left.ports.is_empty());
        assert_eq!(taken, shop().ports);
    }
}

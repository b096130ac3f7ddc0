//! Which addresses and ports HAProxy can take. One that another process has would keep a whole configuration from its
//! start, those of all other tenants too.

use std::io;
use std::net::{IpAddr, SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};
use thuban_api::proxies::{Proxy, ProxyPort};

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
pub fn without_taken(mut proxy: Proxy, is_free: impl Fn(IpAddr, u16) -> bool) -> (Proxy, Vec<ProxyPort>) {
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

//! Host state of the node and of attachments through rtnetlink: links, addresses, routes, rules, neighbours, sysctls.
//!
//! Invariant: nothing here changes the uplink's MTU or touches links that are not Thuban's.

pub mod aggregation;
pub mod ethtool;
pub mod host;
pub mod host_end;
pub mod namespace;
pub mod observe;
pub mod on_link;
pub mod pod;
pub mod shaper;
pub mod sysctl;
pub mod traffic;
pub mod uplink;
pub mod veth;
pub mod virtio;

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use futures::TryStreamExt;
use futures::channel::mpsc::{UnboundedReceiver, unbounded};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage, LinkXdp};
use netlink_packet_route::route::{RouteAttribute, RouteMessage};
use rtnetlink::packet_core::NetlinkMessage;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::sys::SocketAddr;
use rtnetlink::{Handle, LinkUnspec, MulticastGroup, new_multicast_connection};
use thiserror::Error;
use tokio::time::timeout;
use tracing::warn;

/// Reports of changes. What has changed is better asked for: reports may be lost.
pub type Changes = UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>;

/// How long the kernel may take for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Error)]
pub enum NetlinkError {
    #[error("the kernel's answer has no end")]
    NoEnd,
    #[error("cannot open a netlink socket")]
    Socket(#[source] std::io::Error),
    #[error("cannot {action} {object}")]
    Request {
        action: &'static str,
        object: String,
        source: rtnetlink::Error,
    },
    #[error("interface {0} is not there")]
    NoInterface(String),
    #[error("interface {0} has no IPv4 address; give --node-ip")]
    NoAddress(String),
    #[error("no interface holds {0}; give --interface or correct --node-ip")]
    NoInterfaceWith(Ipv4Addr),
    #[error("there is no IPv4 default route; give --interface or --node-ip")]
    NoDefaultRoute,
    #[error("interface {0} exists already in the pod's network namespace")]
    InterfaceExists(String),
    #[error("this kernel's VXLAN devices cannot filter VNIs (Linux 5.18 or later can)")]
    NoVniFilter,
    #[error("cannot write {value} to {path}")]
    Sysctl {
        path: PathBuf,
        value: &'static str,
        source: std::io::Error,
    },
    #[error(
        "IPv6 is disabled on this node, but the pod's network has it: set net.ipv6.conf.all.disable_ipv6 to 0, \
         or choose a network without an IPv6 range"
    )]
    Ipv6Disabled,
    #[error(
        "this node's kernel has no IPv6 (net.ipv6.conf.all.disable_ipv6, {path}), but the pod's network has it: \
         boot without ipv6.disable=1, or choose a network without an IPv6 range"
    )]
    Ipv6Missing { path: PathBuf, source: std::io::Error },
    #[error("{operation} failed for {interface}")]
    Ethtool {
        operation: &'static str,
        interface: String,
        source: std::io::Error,
    },
    #[error("{path} is not a network namespace of a pod")]
    NotANamespace { path: PathBuf },
    #[error("cannot enter network namespace {path}")]
    Namespace { path: PathBuf, source: std::io::Error },
    #[error("the thread in network namespace {path} died")]
    Thread { path: PathBuf },
}

/// Returns the error number, if the error came from the kernel.
pub fn error_number(error: &rtnetlink::Error) -> Option<i32> {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.code.map(|code| -code.get()),
        _ => None,
    }
}

/// Opens a netlink connection in the calling thread's network namespace. Its task ends with the last handle.
pub fn connect() -> Result<Handle, NetlinkError> {
    let (connection, handle, _) = rtnetlink::new_connection().map_err(NetlinkError::Socket)?;
    tokio::spawn(connection);
    Ok(handle)
}

/// Waits for an answer of the kernel, on a connection that nothing else uses. A list that the kernel gives up for lack
/// of memory has no end, and its connection is of no use afterwards.
pub async fn in_time<T>(answer: impl Future<Output = Result<T, NetlinkError>>) -> Result<T, NetlinkError> {
    timeout(ANSWER_TIMEOUT, answer)
        .await
        .unwrap_or(Err(NetlinkError::NoEnd))
}

/// Opens a socket that reports each change of these kinds. If the kernel refuses, nothing is ever reported.
pub fn changes(groups: &[MulticastGroup]) -> Changes {
    match new_multicast_connection(groups) {
        Ok((connection, _, changes)) => {
            tokio::spawn(connection);
            changes
        }
        Err(error) => {
            warn!(
                error = &error as &dyn std::error::Error,
                "changes of {groups:?} are not heard of, only looked for at each scan"
            );
            unbounded().1
        }
    }
}

/// Runs `work` on a thread of its own, with a netlink connection of its own in this thread's network namespace. The
/// kernel answers some requests (deleting a link) only after many milliseconds, and serves the requests of one
/// connection in their order. So requests for several pods would wait for each other. `None`: the thread died.
pub async fn aside<T, F>(work: F) -> Result<Option<T>, NetlinkError>
where
    T: Send + 'static,
    F: AsyncFnOnce(Handle) -> T + Send + 'static,
{
    let body = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(NetlinkError::Socket)?;
        runtime.block_on(async { Ok(work(connect()?).await) })
    };
    tokio::task::spawn_blocking(body)
        .await
        .map_or(Ok(None), |result| result.map(Some))
}

/// Returns the link of that name, or `None`.
pub async fn find_link(handle: &Handle, name: &str) -> Result<Option<LinkMessage>, NetlinkError> {
    match handle.link().get().match_name(name).execute().try_next().await {
        Ok(link) => Ok(link),
        Err(error) if error_number(&error) == Some(libc::ENODEV) => Ok(None),
        Err(source) => Err(NetlinkError::Request {
            action: "look up",
            object: name.to_owned(),
            source,
        }),
    }
}

/// Sets a link up; `name` is for the error.
pub async fn set_up(handle: &Handle, index: u32, name: &str) -> Result<(), NetlinkError> {
    set_up_with(handle, index, name, LinkFlags::empty()).await
}

/// Sets a link up, and these flags of it.
async fn set_up_with(handle: &Handle, index: u32, name: &str, flags: LinkFlags) -> Result<(), NetlinkError> {
    let mut up = LinkUnspec::new_with_index(index).up().build();
    up.header.flags |= flags;
    up.header.change_mask |= flags;
    let request = handle.link().change(up);
    request.execute().await.map_err(failed("set up", name))
}

/// Adds a permanent neighbour, or replaces the one that has the address; `name` is for the error.
async fn add_neighbour(
    handle: &Handle,
    (index, name): (u32, &str),
    address: IpAddr,
    mac: &[u8],
) -> Result<(), NetlinkError> {
    let request = handle.neighbours().add(index, address);
    let request = request.link_layer_address(mac).replace();
    request
        .execute()
        .await
        .map_err(failed("add the neighbour on", name))
}

/// Returns the table of a route. The header has no room for numbers above 255.
fn table(route: &RouteMessage) -> u32 {
    let wide = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    wide.unwrap_or(route.header.table.into())
}

pub fn is_up(link: &LinkMessage) -> bool {
    link.header.flags.contains(LinkFlags::Up)
}

pub fn mac(link: &LinkMessage) -> Option<&[u8]> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Address(mac) => Some(mac.as_slice()),
        _ => None,
    })
}

/// Returns the id of the program that the link has at XDP.
pub fn xdp_program(link: &LinkMessage) -> Option<u32> {
    let xdp = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Xdp(xdp) => Some(xdp),
        _ => None,
    })?;
    xdp.iter().find_map(|attribute| match attribute {
        LinkXdp::ProgId(id) => Some(*id),
        _ => None,
    })
}

/// Maps a request's error, naming the operation and the object.
fn failed(
    action: &'static str,
    object: impl std::fmt::Display,
) -> impl FnOnce(rtnetlink::Error) -> NetlinkError {
    let object = object.to_string();
    move |source| NetlinkError::Request {
        action,
        object,
        source,
    }
}

/// Maps a request's error as [`failed`] does, with "it is there already" as success.
fn tolerate_exists(result: Result<(), rtnetlink::Error>) -> Result<(), rtnetlink::Error> {
    match result {
        Err(error) if error_number(&error) == Some(libc::EEXIST) => Ok(()),
        other => other,
    }
}

/// Maps a request's error as [`failed`] does, with "it is not there" as success.
fn tolerate_missing(result: Result<(), rtnetlink::Error>) -> Result<(), rtnetlink::Error> {
    match result {
        Err(error)
            if matches!(
                error_number(&error),
                Some(libc::ENODEV | libc::ESRCH | libc::ENOENT)
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

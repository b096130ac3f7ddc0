//! CHECK: whether everything that ADD made is still there, and the runtime remembers the same. Reads only.
//!
//! Compares the runtime's `prevResult`, the attachment, and the kernel: both ends of the veth, addresses, routes,
//! table rows, programs. Anything that plugins after Thuban added is theirs. Only routes that `prevResult` lists
//! count, because such a plugin may have taken one away.

use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::Arc;

use thuban_common::tables::{GATEWAY_MAC, HOST_SOURCE_V6};
use thuban_proto::cni::{CheckRequest, Previous};
use tokio::task::block_in_place;

use super::error::{AttachmentError, Difference};
use crate::attachments::{Attachment, AttachmentId, mac_text};
use crate::dataplane::filter;
use crate::dataplane::hook::Hook;
use crate::dataplane::hooks::AgentHook;
use crate::netlink::{self, namespace, observe, veth};
use crate::node::Node;

pub async fn run(node: &Arc<Node>, request: CheckRequest) -> Result<(), AttachmentError> {
    let id = AttachmentId::new(&request.container_id, &request.ifname)?;
    let _lock = node.lock(&id).await;
    let attachment = node.state().attachments.get(&id).cloned();
    let Some(attachment) = attachment else {
        let AttachmentId { container_id, ifname } = id;
        return Err(AttachmentError::Unknown { container_id, ifname });
    };
    let previous = request.previous.unwrap_or_default();
    compare(&attachment, &previous)?;
    host(node, &attachment).await?;
    rows(node, &attachment)?;
    pod(&attachment, &previous, request.netns.into()).await
}

fn compare(attachment: &Attachment, previous: &Previous) -> Result<(), Difference> {
    let differs = |field, expected| Err(Difference::Previous { field, expected });
    if !previous.host_interfaces.contains(&attachment.host_interface) {
        return differs("interfaces", attachment.host_interface.clone());
    }
    let mac = mac_text(attachment.mac);
    if !previous.mac.is_empty() && !previous.mac.eq_ignore_ascii_case(&mac) {
        return differs("interfaces", mac);
    }
    for address in attachment.addresses() {
        let listed = previous.addresses.iter().any(|text| {
            let text = text.split_once('/').map_or(text.as_str(), |(address, _)| address);
            text.parse() == Ok(address)
        });
        if !listed {
            return differs("ips", address.to_string());
        }
    }
    Ok(())
}

async fn host(node: &Node, attachment: &Attachment) -> Result<(), AttachmentError> {
    let name = &attachment.host_interface;
    let link = netlink::find_link(&node.netlink, name).await?.filter(|link| {
        let is_ours = link.header.index == attachment.host_ifindex;
        is_ours && netlink::is_up(link) && netlink::mac(link) == Some(&GATEWAY_MAC[..])
    });
    let Some(link) = link else {
        return Err(Difference::HostInterface(name.clone()).into());
    };
    for address in attachment.addresses() {
        if !veth::has_route(&node.netlink, address, attachment.host_ifindex).await? {
            return Err(Difference::HostRoute(address).into());
        }
    }
    // The connection is this check's own: the kernel refuses a second listing on one connection.
    let at_tc = filter::program(&netlink::connect()?, attachment.host_ifindex).await?;
    // A pod made for XDP has its agent at tc if transit moved to tc.
    let at_xdp = attachment.takes_xdp && node.settings.agent_hook == AgentHook::Xdp;
    let hooks = [
        Some((Hook::AgentTc, at_tc)),
        at_xdp.then_some((Hook::AgentXdp, netlink::xdp_program(&link))),
    ];
    // The lock of links may be held for as long as the kernel's lock of interfaces is.
    block_in_place(|| {
        let links = node.links();
        for (hook, runs) in hooks.into_iter().flatten() {
            if !links.is_attached(hook, name, runs)? {
                let (program, interface) = (hook.program(), name.clone());
                return Err(Difference::Program { program, interface }.into());
            }
        }
        Ok(())
    })
}

fn rows(node: &Node, attachment: &Attachment) -> Result<(), AttachmentError> {
    let state = node.state();
    let index = attachment.host_ifindex;
    let is_sender = state.tables.attachment_in_kernel(index)?.is_some_and(|entry| {
        (entry.vni, entry.address, entry.mac) == (attachment.vni, attachment.key().address, attachment.mac)
    });
    if !is_sender {
        return Err(Difference::Row(attachment.address.into()).into());
    }
    for (key, address) in attachment.keys().zip(attachment.addresses()) {
        let leads_here = state
            .tables
            .local_in_kernel(&key)?
            .is_some_and(|entry| entry.ifindex == index);
        if !leads_here {
            return Err(Difference::Row(address).into());
        }
    }
    Ok(())
}

async fn pod(attachment: &Attachment, previous: &Previous, netns: PathBuf) -> Result<(), AttachmentError> {
    let namespace = namespace::open(&netns)?;
    let name = attachment.id.ifname.clone();
    let seen = {
        let name = name.clone();
        namespace::run(namespace, &netns, async move || observe::interface(&name).await).await?
    };
    let seen = seen
        .filter(|seen| seen.is_up && seen.peer == Some(attachment.host_ifindex))
        .ok_or(Difference::PodInterface(name))?;
    if seen.mac != attachment.mac {
        return Err(Difference::PodMac(mac_text(attachment.mac)).into());
    }
    if let Some(lost) = attachment
        .addresses()
        .find(|address| !seen.addresses.contains(address))
    {
        return Err(Difference::Address(lost).into());
    }
    let gateways = attachment.addresses().map(|address| match address {
        IpAddr::V4(_) => (IpAddr::from(attachment.gateway), "0.0.0.0/0"),
        IpAddr::V6(_) => (Ipv6Addr::from(HOST_SOURCE_V6).into(), "::/0"),
    });
    for (gateway, destination) in gateways {
        let listed = previous.routes.iter().any(|route| {
            let via = route
                .gateway
                .parse()
                .map_or(route.gateway.is_empty(), |via: IpAddr| via == gateway);
            route.destination == destination && via
        });
        if listed && !seen.gateways.contains(&gateway) {
            return Err(Difference::Route(gateway).into());
        }
        // An older transitd made pods that ask for the gateway.
        if !seen.asks && !seen.neighbours.contains(&(gateway, GATEWAY_MAC.to_vec())) {
            return Err(Difference::Neighbour(gateway).into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attachments::tests::attachment;

    #[test]
    fn prev_result_must_match_attachment_and_may_have_more() {
        let attachment = attachment("a", 1);
        let previous = Previous {
            host_interfaces: vec!["other".into(), attachment.host_interface.clone()],
            mac: "02:00:0A:00:01:05".into(),
            addresses: vec!["10.9.9.9/24".into(), "10.0.1.5/24".into()],
            routes: vec![],
        };
        compare(&attachment, &previous).unwrap();
        let changes: [fn(&mut Previous); 3] = [
            |p| p.host_interfaces.truncate(1),
            |p| p.mac = "02:00:0a:00:01:06".into(),
            |p| p.addresses.truncate(1),
        ];
        for change in changes {
            let mut other = previous.clone();
            change(&mut other);
            assert!(compare(&attachment, &other).is_err(), "{other:?}");
        }
    }
}

//! The steps that make an attachment and those that take it apart.
//!
//! Invariant: rows and agent are in place before the pod's end is up, and the file is there before success is
//! reported. A failure undoes every step. Teardown fences first, goes through all steps even if some fail, and takes
//! missing things as done.

use std::net::IpAddr;
use std::sync::Arc;

use rtnetlink::Handle;
use thuban_rows::LocalEndpoint;
use tracing::warn;

use super::error::AttachmentError;
use super::request::ValidatedAdd;
use crate::attachments::{Attachment, AttachmentId, report};
use crate::boot;
use crate::dataplane::hook::Hook;
use crate::dataplane::hooks::AgentHook;
use crate::dataplane::tables::TableKey;
use crate::netfilter::conntrack;
use crate::netlink::host_end::HOST_END;
use crate::netlink::veth::{self, VethPlan};
use crate::netlink::{self, aside, host, namespace, pod, shaper, sysctl};
use crate::node::Node;

/// Sets up an attachment on a thread of its own, as [`aside`] says.
pub async fn setup(
    node: &Arc<Node>,
    request: ValidatedAdd,
    endpoint: LocalEndpoint,
) -> Result<Attachment, AttachmentError> {
    let node = Arc::clone(node);
    aside(async move |netlink| make(&node, &netlink, &request, &endpoint).await)
        .await?
        .ok_or(AttachmentError::Interrupted)?
}

/// Sets up the node's own endpoint, as [`setup`] does a pod's. The addresses and routes of its interface are set up
/// later.
pub async fn setup_host(node: &Arc<Node>, endpoint: LocalEndpoint) -> Result<Attachment, AttachmentError> {
    let node = Arc::clone(node);
    aside(async move |netlink| {
        let request = ValidatedAdd {
            id: AttachmentId::host(HOST_END),
            netns: String::new(),
            pod_uid: endpoint.pod_uid.clone(),
            pod_namespace: node.settings.namespace.clone(),
            pod_name: node.settings.node_name.clone(),
            cni_network: String::new(),
            asked_at: boot::nanoseconds(),
        };
        make(&node, &netlink, &request, &endpoint).await
    })
    .await?
    .ok_or(AttachmentError::Interrupted)?
}

/// Removes what is there of an attachment, on a thread of its own, as [`aside`] says. `attachment` is what is known of
/// it, if anything.
pub async fn teardown(
    node: &Arc<Node>,
    id: &AttachmentId,
    attachment: Option<Attachment>,
) -> Result<(), AttachmentError> {
    let (node, id) = (Arc::clone(node), id.clone());
    aside(async move |netlink| take_apart(&node, &netlink, &id, attachment.as_ref()).await)
        .await?
        .ok_or(AttachmentError::Interrupted)?
}

async fn make(
    node: &Node,
    netlink: &Handle,
    request: &ValidatedAdd,
    endpoint: &LocalEndpoint,
) -> Result<Attachment, AttachmentError> {
    let pod_namespace = if endpoint.host {
        namespace::own()?
    } else {
        namespace::open(request.netns.as_ref())?
    };
    if endpoint.address6.is_some() {
        // This check comes before anything is made. A pod without IPv6 changes nothing of the node's IPv6.
        sysctl::require_ipv6(&node.settings.proc_sys_net)?;
        host::setup_ipv6(netlink).await?;
    }
    let plan = VethPlan {
        host_interface: request.id.host_interface(),
        pod_interface: request.id.ifname.clone(),
        pod_mac: endpoint.mac.0,
        mtu: node.pod_mtu(),
        address: endpoint.address,
        address6: endpoint.address6.map(|net| net.addr()),
    };
    // An ADD that a crash cut off left the veth; no attachment of that name exists.
    veth::delete(netlink, &plan.host_interface).await?;
    let host_ifindex = veth::create(netlink, &plan, &pod_namespace).await?;
    let attachment = Attachment {
        id: request.id.clone(),
        netns: request.netns.clone(),
        pod_uid: request.pod_uid.clone(),
        pod_namespace: request.pod_namespace.clone(),
        pod_name: request.pod_name.clone(),
        vni: endpoint.vni.get(),
        network: endpoint.network.get(),
        address: endpoint.address,
        prefix_length: endpoint.prefix_length,
        gateway: endpoint.gateway,
        address6: endpoint.address6,
        mac: endpoint.mac.0,
        mtu: plan.mtu,
        host_interface: plan.host_interface.clone(),
        host_ifindex,
        generation: next_generation(node),
        takes_xdp: node.settings.agent_hook == AgentHook::Xdp && !endpoint.host,
        asked_at: request.asked_at,
        cni_network: request.cni_network.clone(),
        boot_id: node.boot_id.clone(),
    };
    match finish(node, netlink, &attachment, &plan, pod_namespace).await {
        Ok(()) => Ok(attachment),
        Err(error) => {
            if let Err(undo) = take_apart(node, netlink, &attachment.id, Some(&attachment)).await {
                warn!(
                    error = &undo as &dyn std::error::Error,
                    "a failed ADD could not be undone entirely"
                );
            }
            Err(error)
        }
    }
}

async fn finish(
    node: &Node,
    netlink: &Handle,
    attachment: &Attachment,
    plan: &VethPlan,
    pod_namespace: std::fs::File,
) -> Result<(), AttachmentError> {
    let agent_at_xdp = attachment.takes_xdp;
    let proc_sys_net = &node.settings.proc_sys_net;
    sysctl::disable_rp_filter(proc_sys_net, &plan.host_interface)?;
    if plan.address6.is_some() {
        sysctl::enable_ipv6_on_host(proc_sys_net, &plan.host_interface)?;
    }
    {
        let mut links = node.links();
        links.ensure(Hook::AgentTc, &plan.host_interface)?;
        if agent_at_xdp {
            links.ensure(Hook::AgentXdp, &plan.host_interface)?;
        }
    }
    let rates = {
        let mut state = node.state();
        state
            .attachments
            .insert(attachment.id.clone(), attachment.clone());
        state.refresh(&attachment.pod_uid)?;
        if state
            .tables
            .get(&TableKey::Attachment(attachment.host_ifindex))
            .is_none()
        {
            let (namespace, name) = (attachment.pod_namespace.clone(), attachment.pod_name.clone());
            return Err(AttachmentError::Changed { namespace, name });
        }
        node.askers.publish(state.askers());
        // From here on the attachment is seen by the task that follows changes of the rates.
        state.rates(attachment).unwrap_or_default()
    };
    node.askers.keep();
    node.attached.notify_one();
    if attachment.is_host() {
        node.store.write(attachment)?;
        netlink::set_up(netlink, attachment.host_ifindex, &plan.host_interface).await?;
        node.state().send(report::change(attachment, false));
        return Ok(());
    }
    // Both ends are limited while they are down: the kernel would make changes of an end that is up wait.
    if let Some(rate) = rates.ingress {
        shaper::limit(netlink, (attachment.host_ifindex, &plan.host_interface), rate).await?;
    }
    veth::connect_host(netlink, plan, attachment.host_ifindex).await?;
    node.store.write(attachment)?;
    let pod_plan = pod::PodPlan {
        interface: plan.pod_interface.clone(),
        address: plan.address,
        prefix_length: attachment.prefix_length,
        gateway: attachment.gateway,
        address6: attachment.address6,
        agent_at_xdp,
        egress_rate: rates.egress,
        proc_sys_net: proc_sys_net.clone(),
    };
    let path = std::path::PathBuf::from(&attachment.netns);
    namespace::run(pod_namespace, &path, async move || pod::setup(pod_plan).await).await?;
    node.shaped.note(attachment.generation, rates);
    node.state().send(report::change(attachment, false));
    Ok(())
}

async fn take_apart(
    node: &Node,
    netlink: &Handle,
    id: &AttachmentId,
    attachment: Option<&Attachment>,
) -> Result<(), AttachmentError> {
    let mut errors: Vec<AttachmentError> = Vec::new();
    let host_interface = id.host_interface();
    if let Some(attachment) = attachment {
        let mut state = node.state();
        errors.extend(state.fence(attachment).err().map(Into::into));
        state.attachments.remove(id);
        // An older sandbox of the same pod that still is there carries the traffic again.
        errors.extend(state.refresh(&attachment.pod_uid).err().map(Into::into));
        node.askers.publish(state.askers());
        drop(state);
        node.askers.keep();
        node.attached.notify_one();
    }
    if attachment.is_none()
        && let Ok(Some(link)) = crate::netlink::find_link(netlink, &host_interface).await
    {
        // Only the name is known: rows that a crash left for this interface are removed all the same.
        errors.extend(
            node.state()
                .fence_interface(link.header.index)
                .err()
                .map(Into::into),
        );
    }
    if let Some(attachment) = attachment {
        for address in attachment.addresses() {
            let removed = veth::delete_route(netlink, address, attachment.host_ifindex).await;
            errors.extend(removed.err().map(Into::into));
        }
    }
    let deleted = veth::delete(netlink, &host_interface).await;
    // A veth that stays keeps its agents.
    if deleted.is_ok() {
        let released = node.links().release(Hook::AgentXdp, &host_interface);
        errors.extend(released.err().map(Into::into));
    }
    errors.extend(deleted.err().map(Into::into));
    // No packet of the attachment is on its way any more that could create connections anew.
    let forgotten = attachment.map_or(Ok(()), |attachment| {
        conntrack::forget(attachment.host_ifindex)?;
        // Another sandbox of the same pod goes on.
        let is_held = |address: &IpAddr| {
            let state = node.state();
            let mut others = state.attachments.values();
            others.any(|other| other.addresses().any(|held| held == *address))
        };
        let mut addresses = attachment.addresses().filter(|address| !is_held(address));
        addresses.try_for_each(conntrack::forget_answered_by)
    });
    match forgotten {
        Ok(()) => errors.extend(node.store.remove(id).err().map(Into::into)),
        // The file stays: without it nobody would know which connections to remove.
        Err(error) => errors.push(AttachmentError::Conntrack(error)),
    }
    if errors.is_empty() {
        // The address may go to another endpoint only now.
        if let Some(attachment) = attachment {
            node.state().send(report::change(attachment, true));
        }
        return Ok(());
    }
    // A repeated removal finds the attachment again.
    if let Some(attachment) = attachment {
        node.state().attachments.insert(id.clone(), attachment.clone());
    }
    Err(AttachmentError::Teardown(errors))
}

/// Returns a generation later than every attachment's, whichever clock its transitd used.
fn next_generation(node: &Node) -> u64 {
    let now = boot::nanoseconds();
    let highest = node
        .state()
        .attachments
        .values()
        .map(|attachment| attachment.generation)
        .max();
    highest.map_or(now, |highest| now.max(highest + 1))
}

//! The pod's end of the veth, inside the pod's network namespace: offloads, address, up, default route.

use std::net::Ipv4Addr;

use rtnetlink::{LinkUnspec, RouteMessageBuilder};

use super::{NetlinkError, connect, ethtool, failed, find_link, veth};

/// Offloads that decapsulation by `bpf_skb_adjust_room` cannot restore on the receiving side.
const OFF: [&str; 4] = [
    "tx-udp_tnl-segmentation",
    "tx-udp_tnl-csum-segmentation",
    "tx-udp-segmentation",
    "tx-sctp-segmentation",
];
/// With the agent at XDP frames must leave the pod whole and checksummed.
const OFF_XDP: [&str; 5] = [
    "tx-checksum-ip-generic",
    "tx-tcp-segmentation",
    "tx-tcp6-segmentation",
    "tx-tcp-ecn-segmentation",
    "tx-generic-segmentation",
];

/// What the pod's end gets.
#[derive(Clone, Debug)]
pub struct PodPlan {
    pub interface: String,
    pub address: Ipv4Addr,
    pub prefix_length: u8,
    pub gateway: Ipv4Addr,
    pub agent_at_xdp: bool,
}

/// Runs in the pod's namespace. Last step of ADD: with it the pod can send.
pub async fn setup(plan: PodPlan) -> Result<(), NetlinkError> {
    let handle = connect()?;
    let name = &plan.interface;
    ethtool::turn_off(name, &OFF)?;
    if plan.agent_at_xdp {
        ethtool::turn_off(name, &OFF_XDP)?;
    }
    let link = find_link(&handle, name)
        .await?
        .ok_or_else(|| NetlinkError::NoInterface(name.clone()))?;
    let index = link.header.index;
    veth::add_address(&handle, index, plan.address, plan.prefix_length).await?;
    let up = LinkUnspec::new_with_index(index).up().build();
    handle
        .link()
        .change(up)
        .execute()
        .await
        .map_err(failed("set up", name))?;
    if plan.agent_at_xdp {
        // XDP_REDIRECT into a veth needs NAPI at this end; the kernel takes the request only from a link that is up.
        ethtool::turn_on(name, &["rx-gro"])?;
    }
    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(Ipv4Addr::UNSPECIFIED, 0)
        .gateway(plan.gateway)
        .output_interface(index)
        .build();
    handle
        .route()
        .add(route)
        .execute()
        .await
        .map_err(failed("add the default route via", plan.gateway))
}

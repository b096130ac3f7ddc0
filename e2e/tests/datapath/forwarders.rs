//! Pods that forward what came over the overlay: a tenant's gateways. The kernel still takes such frames for a
//! tunnel's. See `grow` in `xdp-programs/src/frame/tc.rs`.

use std::{
    io::Write,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use thuban_common::counters::Counter;
use thuban_e2e::rig::{
    droplet::Pod,
    namespace::Namespace,
    traffic::{End, transfer_by},
};
use thuban_testkit::wait::wait_until;

use crate::{counter, each};

const PORT: u16 = 7900;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// A port that the gateway doesn't lead on.
const OTHER_PORT: u16 = 7901;
/// Enough for hundreds of GSO frames.
const BULK: usize = 4 << 20;
/// What transitd turns off at pods, and a pod may turn on again.
const TUNNEL_OFFLOADS: &str = "tx-udp_tnl-segmentation on tx-udp_tnl-csum-segmentation on";

/// Makes a pod lead connections to its port on to another address, in its own name.
fn lead_on(gateway: &Namespace, to: IpAddr) -> Result<()> {
    let (family, all) = match to {
        IpAddr::V4(_) => ("ip", "ipv4/ip_forward"),
        IpAddr::V6(_) => ("ip6", "ipv6/conf/all/forwarding"),
    };
    gateway.sysctl(all, "1")?;
    for line in [
        format!("nft add table {family} gateway"),
        format!("nft add chain {family} gateway in {{ type nat hook prerouting priority -100 ; }}"),
        format!("nft add chain {family} gateway out {{ type nat hook postrouting priority 100 ; }}"),
        format!("nft add rule {family} gateway in tcp dport {PORT} dnat to {to}"),
        format!("nft add rule {family} gateway out tcp dport {PORT} masquerade"),
    ] {
        gateway.command(&line)?;
    }
    Ok(())
}

/// Bulk both ways, by the gateway's address.
fn exchange(from: End, gateway: IpAddr, to: End) -> Result<()> {
    transfer_by(from, to, PORT, SocketAddr::from((gateway, PORT)), BULK)?;
    Ok(())
}

/// A namespace behind a pod, by a veth of its own.
fn behind(gateway: &Pod) -> Result<Namespace> {
    let namespace = Namespace::new("behind")?;
    let pod = &gateway.namespace;
    pod.command(&format!(
        "ip link add inner type veth peer name eth0 netns {}",
        namespace.name()
    ))?;
    for line in [
        "ip addr add 192.168.77.1/24 dev inner",
        "ip addr add fd00:77::1/64 dev inner nodad",
        "ip link set inner up",
    ] {
        pod.command(line)?;
    }
    for line in [
        "ip addr add 192.168.77.2/24 dev eth0",
        "ip addr add fd00:77::2/64 dev eth0 nodad",
        "ip link set eth0 up",
        "ip route add default via 192.168.77.1",
        "ip route add default via fd00:77::1",
    ] {
        namespace.command(line)?;
    }
    Ok(namespace)
}

#[test]
fn a_gateway_pod_sends_on_over_the_overlay() -> Result<()> {
    each(|topology| {
        let (first, gateway, other) = (&topology.first, &topology.second, &topology.other);
        lead_on(&gateway.namespace, other.end().address)?;
        for offloads in ["", TUNNEL_OFFLOADS] {
            if !offloads.is_empty() {
                gateway
                    .namespace
                    .command(&format!("ethtool -K eth0 {offloads}"))?;
            }
            exchange(first.end(), gateway.address.into(), other.end())
                .with_context(|| offloads.to_owned())?;
            ensure!(
                counter(topology, 2, Counter::AdjustRoomFailed)? == 0,
                "{offloads}"
            );
        }
        Ok(())
    })
}

#[test]
fn a_gateway_pod_sends_on_to_what_is_behind_it() -> Result<()> {
    let ends: [IpAddr; 2] = [
        Ipv4Addr::new(192, 168, 77, 2).into(),
        Ipv6Addr::new(0xfd00, 0x77, 0, 0, 0, 0, 0, 2).into(),
    ];
    each(|topology| {
        let (first, gateway) = (&topology.first, &topology.second);
        let far = behind(gateway)?;
        for to in ends {
            lead_on(&gateway.namespace, to)?;
        }
        for offloads in ["", "tso off gso off tx off"] {
            if !offloads.is_empty() {
                gateway
                    .namespace
                    .command(&format!("ethtool -K inner {offloads}"))?;
                far.command(&format!("ethtool -K eth0 {offloads}"))?;
            }
            for (from, seen, to) in [
                (first.end(), IpAddr::from(gateway.address), ends[0]),
                (first.end6(), gateway.address6.into(), ends[1]),
            ] {
                let far = End {
                    namespace: &far,
                    address: to,
                };
                exchange(from, seen, far).with_context(|| format!("to {to}, {offloads}"))?;
            }
        }
        Ok(())
    })
}

#[test]
fn a_gateway_pod_sends_on_by_a_tunnel_of_its_own() -> Result<()> {
    each(|topology| {
        let (first, gateway, other) = (&topology.first, &topology.second, &topology.other);
        let net = |host| Ipv4Addr::new(10, 91, 0, host);
        for (near, far, host) in [(gateway, other, 1), (other, gateway, 2)] {
            let (local, remote) = (near.address, far.address);
            for line in [
                format!(
                    "ip link add tunnel type vxlan id 9 local {local} remote {remote} dstport 4789 dev eth0"
                ),
                format!("ip addr add {}/24 dev tunnel", net(host)),
                "ip link set tunnel mtu 1400 up".to_owned(),
            ] {
                near.namespace.command(&line)?;
            }
        }
        lead_on(&gateway.namespace, net(2).into())?;
        let far = End {
            namespace: &other.namespace,
            address: net(2).into(),
        };
        exchange(first.end(), gateway.address.into(), far)?;
        ensure!(counter(topology, 2, Counter::AdjustRoomFailed)? == 0);
        // Large frames of its own tunnel can't be segmented once more.
        ensure!(counter(topology, 2, Counter::TunnelSegments)? == 0);
        let gateway = &gateway.namespace;
        gateway.command(&format!("ethtool -K eth0 {TUNNEL_OFFLOADS}"))?;
        let listener = other
            .namespace
            .run(|| Ok(TcpListener::bind((net(2), OTHER_PORT))?))?;
        let mut stream = gateway.run(|| Ok(TcpStream::connect((net(2), OTHER_PORT))?))?;
        stream.set_nonblocking(true)?;
        let written = stream.write(&vec![0; 1 << 16])?;
        let what = format!("a count of the {written} bytes that were written");
        wait_until(&what, ANSWER_TIMEOUT, Duration::from_millis(20), || {
            let counted = counter(topology, 2, Counter::TunnelSegments)?;
            Ok((counted > 0).then_some(()))
        })?;
        drop(listener);
        Ok(())
    })
}

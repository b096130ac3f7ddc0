//! Work that pods' stacks and their own tunnels leave to the NIC must be done correctly: checksums, segmentation,
//! forwarding.

use std::{
    net::{Ipv4Addr, UdpSocket},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::sys::{
    socket::{
        MsgFlags, SockaddrIn, recv, sendto, setsockopt,
        sockopt::{ReceiveTimeout, UdpGsoSegment},
    },
    time::{TimeVal, TimeValLike},
};
use thuban_cluster::wait::uninterrupted;
use thuban_common::counters::Counter;
use thuban_e2e::rig::{droplet::Pod, traffic::End};

use crate::{
    counter, each,
    paths::{exchange, exchange_between},
};

/// Sends ten datagrams in one call; they must arrive as ten.
fn send_segmented(from: End, to: End) -> Result<()> {
    let receiver = to.namespace.run(|| Ok(UdpSocket::bind((to.address, 7601))?))?;
    receiver.set_read_timeout(Some(Duration::from_secs(2)))?;
    let sender = from.namespace.run(|| Ok(UdpSocket::bind((from.address, 0))?))?;
    setsockopt(&sender, UdpGsoSegment, &1000)?;
    let payload: Vec<u8> = (0..10_000_u32).map(|index| (index / 1000) as u8).collect();
    ensure!(sender.send_to(&payload, (to.address, 7601))? == payload.len());
    let mut buffer = [0; 2000];
    for number in 0..10 {
        let length = uninterrupted(|| receiver.recv(&mut buffer))
            .with_context(|| format!("datagram {number} to {}", to.address))?;
        ensure!(length == 1000, "{length} bytes");
        ensure!(
            buffer[..length].iter().all(|byte| *byte == number),
            "datagram {number}"
        );
    }
    Ok(())
}

#[test]
fn udp_segments_arrive_as_datagrams() -> Result<()> {
    each(|topology| {
        for direct in [false, true] {
            if direct {
                topology.make_direct()?;
            }
            for to in [&topology.neighbour, &topology.second, &topology.other] {
                send_segmented(topology.first.end(), to.end())?;
                send_segmented(topology.first.end6(), to.end6())?;
            }
        }
        Ok(())
    })
}

#[test]
fn pods_without_offloads_are_served_as_well() -> Result<()> {
    each(|topology| {
        for pod in [&topology.first, &topology.second] {
            pod.namespace
                .command("ethtool -K eth0 tx off rx off tso off gso off gro off sg off")?;
        }
        exchange(&topology.first, &topology.second).context("both without")?;
        exchange(&topology.first, &topology.other).context("one without")?;
        exchange(&topology.first, &topology.neighbour).context("to the same droplet")
    })
}

/// The kernel here has no SCTP. For a network it matters that the packets arrive as they were sent.
#[test]
fn sctp_packets_arrive_unchanged() -> Result<()> {
    each(|topology| {
        let raw = |pod: &Pod| {
            pod.namespace.run(|| {
                // SAFETY: a plain system call. nix has no name for the protocol.
                #[allow(unsafe_code)]
                let descriptor =
                    unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 132) };
                ensure!(descriptor >= 0, "{}", std::io::Error::last_os_error());
                // SAFETY: the descriptor was just made.
                #[allow(unsafe_code)]
                Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
            })
        };
        for to in [&topology.neighbour, &topology.second, &topology.other] {
            let (sender, receiver) = (raw(&topology.first)?, raw(to)?);
            setsockopt(&receiver, ReceiveTimeout, &TimeVal::seconds(2))?;
            for size in [12_u32, 500, 1430] {
                let mut packet: Vec<u8> = (0..size).map(|index: u32| (index * 7) as u8).collect();
                packet[..4].copy_from_slice(&[0x1f, 0x40, 0x1f, 0x41]);
                let [a, b, c, d] = to.address.octets();
                let address = SockaddrIn::new(a, b, c, d, 0);
                sendto(sender.as_raw_fd(), &packet, &address, MsgFlags::empty())?;
                let mut buffer = [0; 2000];
                let receive = || Ok(recv(receiver.as_raw_fd(), &mut buffer, MsgFlags::empty())?);
                let length =
                    uninterrupted(receive).with_context(|| format!("{size} bytes to {}", to.address))?;
                ensure!(buffer[20..length] == packet, "{size} bytes differ");
            }
        }
        Ok(())
    })
}

/// A pod is a router of its own overlay: packets that were decapsulated here are forwarded, encapsulated by the pod,
/// and encapsulated again.
#[test]
fn a_pod_forwards_between_its_own_tunnels() -> Result<()> {
    each(|topology| {
        let middle = &topology.second;
        middle.namespace.sysctl("ipv4/ip_forward", "1")?;
        let mut ends = Vec::new();
        for (number, pod) in [(1_u8, &topology.first), (2, &topology.other)] {
            let net = |host| Ipv4Addr::new(10, 90, number, host);
            for (near, far, host) in [(pod, middle, 1), (middle, pod, 2)] {
                let link = format!("tunnel{number}");
                let (local, remote) = (near.address, far.address);
                near.namespace.command(&format!(
                    "ip link add {link} type vxlan id {number} local {local} remote {remote} dstport 479{number} dev eth0"
                ))?;
                near.namespace
                    .command(&format!("ip addr add {}/24 dev {link}", net(host)))?;
                near.namespace
                    .command(&format!("ip link set {link} mtu 1400 up"))?;
            }
            pod.namespace
                .command(&format!("ip route add 10.90.0.0/16 via {}", net(2)))?;
            ends.push(End {
                namespace: &pod.namespace,
                address: net(1).into(),
            });
        }
        exchange_between(ends[0], ends[1], 1400)?;
        ensure!(counter(topology, 2, Counter::AdjustRoomFailed)? == 0);
        Ok(())
    })
}

/// A pod that raises its own MTU is told the path's MTU.
#[test]
fn pods_that_raise_their_mtu_are_told() -> Result<()> {
    each(|topology| {
        topology.make_direct()?;
        for pod in [&topology.first, &topology.second] {
            pod.namespace.command("ip link set eth0 mtu 1500")?;
        }
        let (first, second) = (&topology.first, &topology.second);
        for (from, to) in [(first.end(), second.end()), (first.end6(), second.end6())] {
            thuban_e2e::rig::traffic::transfer(from, to, 4 << 20)?;
        }
        ensure!(counter(topology, 1, Counter::TooBigAnswered)? > 0);
        Ok(())
    })
}

//! Isolation of VPCs, and the rejection of senders with false identities.

use std::{
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use thuban_cluster::wait::uninterrupted;
use thuban_common::{
    counters::Counter,
    tables::{AttachmentEntry, DropletEntry, GATEWAY_MAC, RemoteRow},
};
use thuban_e2e::rig::{
    Transit,
    capture::{self, Wire},
    droplet::Pod,
    topology::{BLUE, RED, Topology},
    traffic::{echo_udp, ping},
};
use thuban_testkit::packets::{self, Tunnel};

use crate::{counter, each};

/// Returns a socket of a pod that waits a moment for a datagram.
pub fn listen(
    namespace: &thuban_e2e::rig::namespace::Namespace,
    address: Ipv4Addr,
    port: u16,
) -> Result<UdpSocket> {
    let socket = namespace.run(|| Ok(UdpSocket::bind((address, port))?))?;
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    Ok(socket)
}

/// Returns an inner Ethernet frame with a datagram.
pub fn datagram(from: Ipv4Addr, to: Ipv4Addr, port: u16) -> Vec<u8> {
    let (from, to) = (SocketAddrV4::new(from, 7777), SocketAddrV4::new(to, port));
    packets::ethernet(&packets::datagram(from, to, b"hi"))
}

/// Returns Geneve around an inner frame, to a droplet's MAC.
pub fn geneve(
    topology: &Topology,
    from: Ipv4Addr,
    droplet: usize,
    vni: u32,
    inner: &[u8],
) -> Result<Vec<u8>> {
    let droplet = &topology.rig.droplets[droplet - 1];
    let mac = droplet.namespace.command("cat /sys/class/net/uplink/address")?;
    let mut macs = [2, 9, 9, 9, 9, 9, 2, 9, 9, 9, 9, 9];
    for (byte, digits) in macs.iter_mut().zip(mac.trim().split(':')) {
        *byte = u8::from_str_radix(digits, 16)?;
    }
    Ok(Tunnel::new(from, droplet.address, vni).around(macs, inner))
}

#[test]
fn vpcs_with_the_same_addresses_do_not_mix() -> Result<()> {
    each(|topology| {
        let red = listen(&topology.second.namespace, topology.second.address, 7100)?;
        let blue = listen(
            &topology.second_blue.namespace,
            topology.second_blue.address,
            7100,
        )?;
        for (pod, word) in [(&topology.first, b"red "), (&topology.first_blue, b"blue")] {
            let sender = listen(&pod.namespace, pod.address, 0)?;
            for _ in 0..20 {
                sender.send_to(word, (topology.second.address, 7100))?;
            }
        }
        for (socket, word) in [(red, b"red "), (blue, b"blue")] {
            let mut buffer = [0; 16];
            for _ in 0..20 {
                let length = uninterrupted(|| socket.recv(&mut buffer))?;
                ensure!(
                    &buffer[..length] == word,
                    "{:?} at the pod of {word:?}",
                    &buffer[..length]
                );
            }
            ensure!(
                uninterrupted(|| socket.recv(&mut buffer)).is_err(),
                "one more than were sent"
            );
        }
        // The other VPC has neither this address nor a way out.
        ensure!(
            !ping(&topology.first_blue.namespace, topology.neighbour.address, 8)?,
            "a pod of the other VPC"
        );
        ensure!(
            counter(topology, 3, Counter::NoEndpoint)? > 0,
            "its bouncer knows no such endpoint"
        );
        ensure!(
            !ping(&topology.first_blue.namespace, topology.other.address, 8)?,
            "a network of the other VPC"
        );
        ensure!(counter(topology, 1, Counter::OutsideVpc)? > 0);
        Ok(())
    })
}

#[test]
fn geneve_on_the_wire_carries_the_vni_of_the_sender() -> Result<()> {
    each(|topology| {
        let wire = Wire::open(&topology.rig.bridge, "d2")?;
        for (pod, to, vni) in [
            (&topology.first, &topology.second, RED),
            (&topology.first_blue, &topology.second_blue, BLUE),
        ] {
            let frames = thread::scope(|scope| {
                let collector = scope.spawn(|| {
                    wire.collect(Duration::from_millis(600), |frame| capture::vni(frame).is_some())
                });
                thread::sleep(Duration::from_millis(100));
                let answer = echo_udp(pod.end(), to.end(), 100);
                (collector.join(), answer)
            });
            let (Ok(frames), answer) = frames else {
                anyhow::bail!("the collector panicked")
            };
            ensure!(answer?, "no echo in VPC {vni}");
            ensure!(!frames.is_empty(), "nothing on the wire");
            for frame in frames {
                ensure!(
                    capture::vni(&frame) == Some(vni),
                    "VNI {:?} instead of {vni}",
                    capture::vni(&frame)
                );
            }
        }
        Ok(())
    })
}

#[test]
fn a_pod_cannot_take_another_address() -> Result<()> {
    each(|topology| {
        let second = listen(&topology.neighbour.namespace, topology.neighbour.address, 7200)?;
        let forged = Ipv4Addr::new(10, 0, 1, 99);
        topology
            .first
            .namespace
            .command(&format!("ip addr add {forged}/32 dev eth0"))?;
        let liar = listen(&topology.first.namespace, forged, 0)?;
        liar.send_to(b"x", (topology.neighbour.address, 7200))?;
        ensure!(
            uninterrupted(|| second.recv(&mut [0; 8])).is_err(),
            "a forged source was delivered"
        );
        // The kernel sends its ARP request from the address that it sends from; the neighbour may be known already.
        ensure!(
            counter(topology, 1, Counter::SpoofedSource)? + counter(topology, 1, Counter::SpoofedArp)? > 0
        );
        ensure!(
            ping(&topology.first.namespace, topology.neighbour.address, 8)?,
            "its own address still works"
        );
        liar.send_to(b"x", (topology.neighbour.address, 7200))?;
        ensure!(
            uninterrupted(|| second.recv(&mut [0; 8])).is_err(),
            "a forged source was delivered"
        );
        ensure!(counter(topology, 1, Counter::SpoofedSource)? > 0);

        topology
            .first
            .namespace
            .command("ip link set eth0 address 02:00:00:00:00:77")?;
        ensure!(
            !ping(&topology.first.namespace, topology.neighbour.address, 8)?,
            "a forged MAC"
        );
        ensure!(counter(topology, 1, Counter::SpoofedMac)? > 0);
        Ok(())
    })
}

#[test]
fn forged_geneve_is_dropped() -> Result<()> {
    each(|topology| {
        let victim = listen(&topology.second.namespace, topology.second.address, 7300)?;
        let [one, three] = [0, 2].map(|index| topology.rig.droplets[index].address);
        // A row says that the neighbour's home is droplet 1.
        topology
            .rig
            .droplet(2)?
            .set_row(RemoteRow::Direct, RED, topology.neighbour.address, one)?;
        let wire = Wire::open(&topology.rig.bridge, "br0")?;
        let inner = datagram(topology.neighbour.address, topology.second.address, 7300);
        let bridge = Ipv4Addr::new(172, 31, 99, 254);
        let cases = [
            (
                bridge,
                RED,
                Counter::UnknownDroplet,
                "an address that is no droplet",
            ),
            (one, 4242, Counter::UnknownVni, "an unknown VNI"),
            (
                topology.rig.droplets[1].address,
                RED,
                Counter::UnknownDroplet,
                "the droplet's own address",
            ),
        ];
        for (from, vni, reason, what) in cases {
            let before = counter(topology, 2, reason)?;
            wire.inject(&geneve(topology, from, 2, vni, &inner)?)?;
            ensure!(
                uninterrupted(|| victim.recv(&mut [0; 8])).is_err(),
                "delivered from {what}"
            );
            ensure!(
                counter(topology, 2, reason)? == before + 1,
                "{} did not rise for {what}",
                reason.name()
            );
        }
        // Droplet 3 is the network's bouncer here, so it may pass packets on. A droplet without a role may not.
        let stranger = Ipv4Addr::new(172, 31, 99, 77);
        let entry = DropletEntry { flags: 0 };
        topology
            .rig
            .droplet(2)?
            .programs
            .insert("DROPLETS", stranger.octets(), entry)?;
        wire.inject(&geneve(topology, stranger, 2, RED, &inner)?)?;
        ensure!(
            uninterrupted(|| victim.recv(&mut [0; 8])).is_err(),
            "a source that lives elsewhere was believed"
        );
        ensure!(counter(topology, 2, Counter::SourceMismatch)? == 1);
        for from in [one, three] {
            wire.inject(&geneve(topology, from, 2, RED, &inner)?)?;
            ensure!(
                uninterrupted(|| victim.recv(&mut [0; 8])).is_ok(),
                "the same frame from {from} is right"
            );
        }
        Ok(())
    })
}

#[test]
fn a_pod_cannot_reach_droplets() -> Result<()> {
    each(|topology| {
        let droplet = topology.rig.droplets[0].address;
        let pod = listen(&topology.first.namespace, topology.first.address, 0)?;
        // With aggregation, a device of the droplet has Geneve's port.
        let ports = if topology.transit == Transit::Aggregated {
            &[7600][..]
        } else {
            &[6081, 7600]
        };
        for port in ports {
            let host = listen(&topology.rig.droplets[0].namespace, droplet, *port)?;
            pod.send_to(b"x", (droplet, *port))?;
            ensure!(
                uninterrupted(|| host.recv(&mut [0; 8])).is_err(),
                "a pod spoke to its droplet"
            );
        }
        ensure!(counter(topology, 1, Counter::OutsideVpc)? >= ports.len() as u64);
        Ok(())
    })
}

#[test]
fn loops_end_with_the_ttl() -> Result<()> {
    each(|topology| {
        // WouldReturn stops a loop of two, so the packet goes round all three.
        let lost = Ipv4Addr::new(10, 0, 1, 200);
        let [one, two, three] = [0, 1, 2].map(|index| topology.rig.droplets[index].address);
        topology
            .rig
            .droplet(3)?
            .set_row(RemoteRow::Forward, RED, lost, two)?;
        topology
            .rig
            .droplet(2)?
            .set_row(RemoteRow::Forward, RED, lost, one)?;
        topology
            .rig
            .droplet(1)?
            .set_row(RemoteRow::Forward, RED, lost, three)?;
        ensure!(!ping(&topology.first.namespace, lost, 8)?);
        let expired: u64 = (1..=3)
            .map(|droplet| counter(topology, droplet, Counter::TtlExpired))
            .sum::<Result<u64>>()?;
        ensure!(expired == 1, "{expired} packets expired");
        Ok(())
    })
}

#[test]
fn what_xdp_decapsulated_is_not_given_to_another_vpc() -> Result<()> {
    // Between XDP and tc the interface may have become another pod's; tc at the NIC does everything in one step.
    let mut topology = Topology::new(Transit::Xdp)?;
    let victim = listen(&topology.second.namespace, topology.second.address, 7400)?;
    let sender = listen(&topology.first.namespace, topology.first.address, 0)?;
    sender.send_to(b"x", (topology.second.address, 7400))?;
    ensure!(uninterrupted(|| victim.recv(&mut [0; 8])).is_ok());
    let Pod { interface, mac, .. } = topology.second;
    let programs = &mut topology.rig.droplet(2)?.programs;
    let mut row: AttachmentEntry = programs.get("ATTACHMENTS", &interface)?;
    ensure!(row.mac == mac);
    row.vni = BLUE;
    programs.insert("ATTACHMENTS", interface, row)?;
    sender.send_to(b"x", (topology.second.address, 7400))?;
    ensure!(
        uninterrupted(|| victim.recv(&mut [0; 8])).is_err(),
        "delivered to another VPC"
    );
    ensure!(counter(&topology, 2, Counter::NoAttachment)? > 0);
    Ok(())
}

#[test]
fn corrupt_datagram_in_verified_tunnel_packet_is_not_received() -> Result<()> {
    each(|topology| {
        // The packet passes a veth with GRO, which verifies the tunnel packet and marks it as verified for the next
        // reader. Veths leave GRO out for a sender that passes whole TCP frames.
        for command in [
            "ip link add in0 type veth peer name in1",
            "ip link set in1 master br0 up",
            "ip link set in0 up",
            "ethtool -K in0 tso off",
            "ethtool -K in1 gro on",
        ] {
            topology.rig.bridge.command(command)?;
        }
        let wire = Wire::open(&topology.rig.bridge, "in0")?;
        let (from, to) = (topology.first.address, topology.second.address);
        let socket = listen(&topology.second.namespace, to, 7600)?;
        let sender = topology.rig.droplets[0].address;
        let mut frame = datagram(from, to, 7600);
        for (sum, is_right) in [([0, 0], true), ([0xbe, 0xef], false)] {
            // Zero means that the datagram has no checksum.
            frame[40..42].copy_from_slice(&sum);
            wire.inject(&geneve(topology, sender, 2, RED, &frame)?)?;
            ensure!(
                uninterrupted(|| socket.recv(&mut [0; 8])).is_ok() == is_right,
                "checksum {sum:02x?}"
            );
        }
        Ok(())
    })
}

#[test]
fn a_pod_cannot_tag_frames() -> Result<()> {
    each(|topology| {
        let neighbour = listen(&topology.neighbour.namespace, topology.neighbour.address, 7500)?;
        let wire = Wire::open(&topology.first.namespace, "eth0")?;
        let mut frame = datagram(topology.first.address, topology.neighbour.address, 7500);
        frame[..6].copy_from_slice(&GATEWAY_MAC);
        frame[6..12].copy_from_slice(&topology.first.mac);
        wire.inject(&frame)?;
        ensure!(
            uninterrupted(|| neighbour.recv(&mut [0; 8])).is_ok(),
            "without a tag it is right"
        );
        frame.splice(12..12, [0x81, 0, 0, 5]);
        wire.inject(&frame)?;
        ensure!(
            uninterrupted(|| neighbour.recv(&mut [0; 8])).is_err(),
            "a tagged frame was delivered"
        );
        ensure!(counter(topology, 1, Counter::VlanTagged)? == 1);
        Ok(())
    })
}

//! A pod chooses where the NIC writes a checksum into its frame. It is written after all programs have judged the
//! frame.

use anyhow::{Context, Result, ensure};
use thuban_cluster::wait::uninterrupted;
use thuban_common::counters::Counter;
use thuban_e2e::rig::capture::Wire;
use thuban_testkit::packets::{self, Ipv4, udp};

use crate::{counter, each, isolation::listen};

const PORT: u16 = 7700;
/// Bytes of Ethernet and IPv4.
const HEADERS: u16 = 14 + 20;
/// The place of UDP's checksum, behind the IP header.
const FIELD: u16 = 6;

/// Returns a frame of a pod, with these MACs.
fn frame(macs: &[u8], packet: &[u8]) -> Vec<u8> {
    [macs, &[8, 0], packet].concat()
}

#[test]
fn a_checksum_is_written_over_nothing_that_was_judged() -> Result<()> {
    each(|topology| {
        topology.make_direct()?;
        let first = &topology.first;
        let wire = Wire::open_for_unfinished(&first.namespace, "eth0")?;
        let macs = [[2, 0, 0, 0, 0, 1], first.mac].concat();
        for to in [&topology.neighbour, &topology.second] {
            let receiver = listen(&to.namespace, to.address, PORT)?;
            let payload = b"0123456789abcdef";
            let datagram = Ipv4::new(17, first.address, to.address).around(&udp(7777, PORT, payload));
            let whole = frame(&macs, &datagram);
            let mut buffer = [0; 100];
            // The kernel takes no sum that begins before byte 20 (`virtio_net_hdr_to_skb`).
            for place in 20..whole.len() as u16 - 1 {
                let is_fine = place == HEADERS + FIELD || place >= HEADERS + 8;
                let before = counter(topology, 1, Counter::ChecksumMisplaced)?;
                wire.inject_unfinished(&whole, place, 0)
                    .with_context(|| format!("place {place}"))?;
                let dropped = counter(topology, 1, Counter::ChecksumMisplaced)? - before;
                ensure!(
                    dropped == u64::from(!is_fine),
                    "place {place} to {}: {dropped} dropped",
                    to.address
                );
            }
            // What came of these has wrong checksums or another payload.
            receiver.set_nonblocking(true)?;
            while uninterrupted(|| receiver.recv(&mut buffer)).is_ok() {}
            receiver.set_nonblocking(false)?;
            // As stacks do it: the field holds the sum of addresses, protocol and length.
            let mut stack = whole.clone();
            let pseudo = [
                &first.address.octets()[..],
                &to.address.octets(),
                &[0, 17],
                &(8 + payload.len() as u16).to_be_bytes(),
            ];
            let sum = !packets::checksum(&pseudo.concat());
            let field = usize::from(HEADERS + FIELD);
            stack[field..field + 2].copy_from_slice(&sum.to_be_bytes());
            wire.inject_unfinished(&stack, HEADERS, FIELD)?;
            let length = uninterrupted(|| receiver.recv(&mut buffer)).context("as stacks do it")?;
            ensure!(buffer[..length] == *payload);
            // A fragment, and a packet with options, have nothing to be written.
            let before = counter(topology, 1, Counter::ChecksumMisplaced)?;
            let mut fragment = whole.clone();
            fragment[20] = 0x20;
            fragment[24..26].fill(0);
            let sum = packets::checksum(&fragment[14..34]);
            fragment[24..26].copy_from_slice(&sum.to_be_bytes());
            wire.inject_unfinished(&fragment, HEADERS, FIELD)?;
            ensure!(counter(topology, 1, Counter::ChecksumMisplaced)? - before == 1);
        }
        Ok(())
    })
}

//! Endpoints that move or go while others still have a direct row to their old place.

use std::{
    net::{Ipv4Addr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use thuban_cluster::wait::uninterrupted;
use thuban_common::{counters::Counter, tables::RemoteRow};
use thuban_e2e::{
    programs::key,
    rig::{
        namespace::Namespace,
        topology::{BLUE, Topology},
    },
};

use crate::{counter, each, isolation::listen};

const PORT: u16 = 7800;
const STEP: Duration = Duration::from_millis(300);

/// Sends numbered datagrams from blue's first pod to the address of its second pod, one a millisecond, while `work`
/// runs; returns how many were sent.
fn while_sending(topology: &mut Topology, work: impl FnOnce(&mut Topology) -> Result<()>) -> Result<u32> {
    let (from, to) = (topology.first_blue.address, topology.second_blue.address);
    let socket = topology
        .first_blue
        .namespace
        .run(|| Ok(UdpSocket::bind((from, 0))?))?;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut number = 0_u32;
            while !is_over.load(Ordering::Relaxed) {
                // An error reports an earlier datagram's ICMP answer.
                let _ = socket.send_to(&number.to_be_bytes(), (to, PORT));
                number += 1;
                thread::sleep(Duration::from_millis(1));
            }
            number
        });
        let outcome = work(topology);
        is_over.store(true, Ordering::Relaxed);
        let sent = sender.join().unwrap_or(0);
        outcome.map(|()| sent)
    })
}

/// Returns a socket that keeps all datagrams that arrive until it is read.
fn keep(namespace: &Namespace, address: Ipv4Addr) -> Result<UdpSocket> {
    let socket = listen(namespace, address, PORT)?;
    setsockopt(&socket, RcvBufForce, &(32 << 20))?;
    Ok(socket)
}

/// Returns all numbers that arrived, in the order of their arrival.
fn received(socket: &UdpSocket) -> Vec<u32> {
    let mut numbers = Vec::new();
    let mut buffer = [0; 4];
    while uninterrupted(|| socket.recv(&mut buffer)).is_ok() {
        numbers.push(u32::from_be_bytes(buffer));
    }
    numbers
}

/// The steps of a move: the new droplet accepts the endpoint, the old one forwards, then the droplets with a row are
/// told.
#[test]
fn a_one_way_flow_loses_nothing_when_its_receiver_moves() -> Result<()> {
    each(|topology| {
        let [_, two, three] = [0, 1, 2].map(|index| topology.rig.droplets[index].address);
        let address = topology.second_blue.address;
        topology
            .rig
            .droplet(1)?
            .set_row(RemoteRow::Direct, BLUE, address, two)?;
        let old = keep(&topology.second_blue.namespace, address)?;
        let moved = topology.rig.droplet(3)?.add_pod(BLUE, 3, address)?;
        let new = keep(&moved.namespace, address)?;
        let sent = while_sending(topology, |topology| {
            thread::sleep(STEP);
            topology
                .rig
                .droplet(3)?
                .set_row(RemoteRow::Forwarder, BLUE, address, two)?;
            let before = topology.rig.droplet(2)?;
            before.set_row(RemoteRow::Forward, BLUE, address, three)?;
            before.programs.remove_local(key(BLUE, address))?;
            thread::sleep(STEP);
            topology
                .rig
                .droplet(1)?
                .set_row(RemoteRow::Direct, BLUE, address, three)?;
            thread::sleep(STEP);
            Ok(())
        })?;
        let (before, after) = (received(&old), received(&new));
        let all: Vec<u32> = before.iter().chain(&after).copied().collect();
        println!(
            "{sent} sent, {} before the move, {} after",
            before.len(),
            after.len()
        );
        ensure!(all.len() == sent as usize, "{} of {sent} arrived", all.len());
        ensure!(all.is_sorted(), "out of order");
        ensure!(!before.is_empty() && !after.is_empty());
        ensure!(counter(topology, 2, Counter::Forwarded)? > 0);
        ensure!(counter(topology, 3, Counter::SourceMismatch)? == 0);
        Ok(())
    })
}

#[test]
fn a_stale_direct_row_leads_to_nobody_else() -> Result<()> {
    each(|topology| {
        let two = topology.rig.droplets[1].address;
        let address = topology.second_blue.address;
        ensure!(address == topology.second.address, "red has the address as well");
        topology
            .rig
            .droplet(1)?
            .set_row(RemoteRow::Direct, BLUE, address, two)?;
        let red = keep(&topology.second.namespace, address)?;
        let blue = keep(&topology.second_blue.namespace, address)?;
        let sent = while_sending(topology, |topology| {
            thread::sleep(STEP);
            topology
                .rig
                .droplet(2)?
                .programs
                .remove_local(key(BLUE, address))?;
            thread::sleep(STEP);
            Ok(())
        })?;
        let arrived = received(&blue).len() as u64;
        ensure!(arrived > 0 && received(&red).is_empty(), "red got blue's packets");
        let dropped = counter(topology, 2, Counter::NoEndpoint)?;
        ensure!(
            arrived + dropped == u64::from(sent),
            "{arrived} + {dropped} of {sent}"
        );
        Ok(())
    })
}

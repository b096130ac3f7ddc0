//! Connectivity between pods, by TCP, UDP and ICMP.

use std::collections::{BTreeSet, HashMap};

use crate::support::{REACHED, nobody_reaches};
use crate::tenants::{VPCS, tenants};

#[test]
fn red_and_blue_hold_equal_addresses_at_the_same_time() {
    let tenants = tenants();
    let addresses = |vpc| {
        tenants
            .vpc(vpc)
            .iter()
            .map(|pod| pod.address)
            .collect::<BTreeSet<_>>()
    };
    let both: Vec<_> = addresses("red")
        .intersection(&addresses("blue"))
        .copied()
        .collect();
    assert!(
        both.len() >= 2,
        "red {:?} and blue {:?} share too few",
        addresses("red"),
        addresses("blue")
    );
    // Pods with equal addresses are never on one droplet: kubelet there knows only an address.
    let mut holders = HashMap::new();
    for pod in &tenants.pods {
        let other = holders.insert((&pod.node, pod.address), &pod.name);
        assert!(
            other.is_none(),
            "{} and {other:?} have one address on one node",
            pod.name
        );
    }
}

#[test]
fn every_pod_reaches_exactly_the_addressed_pod_of_its_vpc() {
    let tenants = tenants();
    for (vpc, _) in VPCS {
        for client in tenants.vpc(vpc) {
            for server in tenants.vpc(vpc) {
                let pair = format!("{} -> {} {}", client.name, server.name, server.address);
                let tcp = client
                    .tcp(server.address, REACHED)
                    .unwrap_or_else(|error| panic!("TCP {pair}: {error:#}"));
                assert_eq!(tcp, server.name, "TCP {pair}");
                let udp = client
                    .udp(server.address, REACHED)
                    .unwrap_or_else(|error| panic!("UDP {pair}: {error:#}"));
                assert_eq!(udp, server.name, "UDP {pair}");
                client
                    .ping(server.address, REACHED)
                    .unwrap_or_else(|error| panic!("ICMP {pair}: {error:#}"));
            }
        }
    }
}

#[test]
fn no_pod_reaches_an_address_that_only_another_vpc_has() {
    let tenants = tenants();
    for (vpc, _) in VPCS {
        let own: BTreeSet<_> = tenants.vpc(vpc).iter().map(|pod| pod.address).collect();
        let foreign: BTreeSet<_> = tenants
            .pods
            .iter()
            .filter(|pod| pod.namespace != vpc && !own.contains(&pod.address))
            .collect_addresses();
        let clients = tenants.vpc(vpc).into_iter().step_by(2);
        nobody_reaches(clients.flat_map(|client| foreign.iter().map(move |address| (client, *address))));
    }
}

trait CollectAddresses {
    fn collect_addresses(self) -> BTreeSet<std::net::Ipv4Addr>;
}

impl<'a, I: Iterator<Item = &'a crate::support::Pod>> CollectAddresses for I {
    fn collect_addresses(self) -> BTreeSet<std::net::Ipv4Addr> {
        self.map(|pod| pod.address).collect()
    }
}

#[test]
fn a_large_transfer_arrives_whole_both_ways_between_all_nodes() {
    let tenants = tenants();
    let pods = tenants.network("red-web");
    for (client, server) in pods.iter().flat_map(|a| pods.iter().map(move |b| (*a, *b))) {
        if client.node != server.node {
            crate::transfer::echo(client, server, 8 << 20)
                .unwrap_or_else(|error| panic!("{}->{}: {error:#}", client.name, server.name));
        }
    }
}

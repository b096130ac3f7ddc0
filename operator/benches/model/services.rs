//! Each VPC has a Service that reaches all of its backends from everywhere, and one that keeps traffic on its node.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId};
use thuban_operator::model::world::{EndpointName, Service};
use thuban_rows::{Backend, Port};

use crate::scene::{Scene, address, network};

/// Backends of a Service.
const BACKENDS: usize = 5;

fn name(vpc: usize, is_local: bool) -> EndpointName {
    let service = if is_local { "local" } else { "spread" };
    (network(vpc, 0), service.to_owned())
}

fn backend(member: usize) -> Backend {
    Backend {
        address: IpAddr::V4(address(0, member)),
        port: 8080,
    }
}

impl Scene {
    /// Returns a Service of a VPC's first network, with so many of the network's members as backends.
    fn service(&self, vpc: usize, is_local: bool, backends: usize) -> Service {
        let (network, name) = name(vpc, is_local);
        let address = Ipv4Addr::from(0x0a60_0001 + 2 * vpc as u32 + u32::from(is_local));
        let members = 0..backends;
        let port = Port {
            protocol: 6,
            port: 80,
            affinity: 0,
            local: is_local,
            backends: members.clone().map(backend).collect(),
        };
        let homes = members.filter(|_| is_local);
        let homes = homes.map(|member| (backend(member).address, self.home(vpc, member)));
        Service {
            network,
            born: (None, name.clone()),
            name,
            by_node: false,
            by_peers: false,
            tables: vec![(IpAddr::V4(address), vec![port])],
            own_addresses: Vec::new(),
            exposed: Vec::new(),
            outside: Vec::new(),
            fronts: Vec::new(),
            tunnel: false,
            clients: None,
            check: None,
            homes: homes.collect(),
            hints: BTreeMap::new(),
            health_port: None,
            recorded: None,
        }
    }

    fn add_services(&mut self) {
        for vpc in 0..self.vpcs() {
            // The namespace of the Services is at home in their network.
            let network = network(vpc, 0);
            self.world.set_namespace(&network, Some(&network));
            for is_local in [false, true] {
                let service = self.service(vpc, is_local, BACKENDS);
                self.world.set_service(&name(vpc, is_local), Some(service));
            }
        }
        self.settle();
    }
}

/// Adds the Services, and measures what their backends and endpoints cost.
pub fn events(group: &mut BenchmarkGroup<'_, WallTime>, size: usize, scene: &mut Scene) {
    scene.add_services();
    let vpc = scene.middle();
    for (event, is_local) in [
        ("service backend comes and goes", false),
        ("local service backend comes and goes", true),
    ] {
        let name = name(vpc, is_local);
        let states = [BACKENDS + 1, BACKENDS].map(|backends| scene.service(vpc, is_local, backends));
        group.bench_function(BenchmarkId::new(event, size), |bench| {
            bench.iter(|| {
                for service in &states {
                    scene.world.set_service(&name, Some(service.clone()));
                    scene.settle();
                }
            });
        });
    }
    let elsewhere = scene.elsewhere(vpc);
    let event = BenchmarkId::new("first endpoint of a droplet, local service", size);
    group.bench_function(event, |bench| {
        bench.iter(|| scene.come_and_go(100, elsewhere.clone()));
    });
}

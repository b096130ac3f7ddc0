//! The cost of events in the model alone: no client, no lock, no stream. `cargo bench -p thuban-operator` measures
//! clusters of 10^3 to 10^5 endpoints. The cost of an event must not depend on the size of the cluster.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, criterion_group, criterion_main};
use thuban_api::identifiers::{MacAddr, Vni};
use thuban_operator::model::acks::Acks;
use thuban_operator::model::bandwidth::{Bandwidth, Limits};
use thuban_operator::model::world::{
    Address, Endpoint, EndpointName, Membership, Network, Pod, Role, RoleKind, Vpc, World,
};
use thuban_rows::Kinds;
use thuban_rows::builders::{network_id, vni};

/// Numbers of endpoints.
const SIZES: [usize; 3] = [1_000, 10_000, 100_000];
/// Endpoints on a droplet.
const ON_DROPLET: usize = 20;
/// Networks of a VPC, and endpoints of a network.
const NETWORKS: usize = 5;
const MEMBERS: usize = 20;
/// Droplets on which a VPC has endpoints.
const SPREAD: usize = 20;

/// A cluster in which all is acked.
struct Scene {
    world: World,
    acks: Acks,
    droplets: usize,
}

fn droplet(number: usize) -> String {
    format!("droplet-{number}")
}

fn network(vpc: usize, number: usize) -> String {
    format!("vpc-{vpc}-{number}")
}

fn name(network: &str, member: usize) -> EndpointName {
    (network.to_owned(), format!("pod-{member}"))
}

/// Returns a member's address. All VPCs have the same addresses.
fn address(number: usize, member: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, number as u8, member as u8 + 2)
}

fn vni_of(vpc: usize) -> Vni {
    vni(vpc as u32 + 1)
}

fn endpoint(vpc: usize, number: usize, member: usize, on: String) -> Endpoint {
    let address = address(number, member);
    let network = network(vpc, number);
    Endpoint {
        droplet: on,
        previous: None,
        pod: Pod {
            namespace: network.clone(),
            name: format!("pod-{member}"),
            uid: format!("{network}-{member}"),
        },
        network,
        profile: None,
        asked: Bandwidth::default(),
        is_host: false,
        membership: Membership::Member(Address {
            address,
            prefix_length: 24,
            gateway: Ipv4Addr::new(10, 0, number as u8, 1),
            mac: MacAddr::of(address),
            address6: None,
        }),
        ready: true,
    }
}

fn serving(parent: &str, on: String) -> Role {
    Role {
        parent: parent.to_owned(),
        serves_on: Some(on.clone()),
        placed_on: Some(on),
        ..Role::default()
    }
}

impl Scene {
    fn new(endpoints: usize) -> Self {
        let droplets = endpoints / ON_DROPLET;
        let mut scene = Self {
            world: World::default(),
            acks: Acks::new(0),
            droplets,
        };
        for number in 0..droplets {
            let address = Ipv4Addr::from(0xac10_0001 + number as u32);
            scene.world.set_droplet(&droplet(number), Some(address));
        }
        for vpc in 0..endpoints / (NETWORKS * MEMBERS) {
            scene.add_vpc(vpc);
        }
        scene.world.flush();
        for number in 0..droplets {
            scene.open(&droplet(number));
        }
        scene
    }

    fn add_vpc(&mut self, vpc: usize) {
        let vpc_name = format!("vpc-{vpc}");
        let row = Vpc {
            vni: vni_of(vpc),
            cidrs: vec!["10.0.0.0/16".into()],
            host_access: false,
            egress: false,
            reject: false,
            egress_rate: None,
            dscp: None,
            shared: Vec::new(),
        };
        self.world.set_vpc(&vpc_name, Some(row));
        let divider = serving(&vpc_name, self.home(vpc, 0));
        self.world
            .set_role(RoleKind::Divider, &format!("{vpc_name}-d0"), Some(divider));
        for number in 0..NETWORKS {
            let network = network(vpc, number);
            let row = Network {
                vpc: vpc_name.clone(),
                id: network_id(number as u32 + 1),
                cidrs: vec![format!("10.0.{number}.0/24")],
                private: false,
                limits: Limits::default(),
            };
            self.world.set_network(&network, Some(row));
            for role in 0..2 {
                let bouncer = serving(&network, self.home(vpc, number + role));
                self.world
                    .set_role(RoleKind::Bouncer, &format!("{network}-b{role}"), Some(bouncer));
            }
            for member in 0..MEMBERS {
                let endpoint = endpoint(vpc, number, member, self.home(vpc, member));
                self.world.set_endpoint(&name(&network, member), Some(endpoint));
            }
        }
    }

    /// Returns one of the droplets of a VPC.
    fn home(&self, vpc: usize, number: usize) -> String {
        droplet((vpc * NETWORKS + number % SPREAD) % self.droplets)
    }

    fn open(&mut self, droplet: &str) {
        let snapshot = self.world.snapshot(droplet);
        let sequence = self
            .acks
            .open(droplet, (1, Kinds::all()), snapshot.rows.keys(), 0);
        self.acks.ack(droplet, 1, sequence, 0);
        black_box(snapshot);
    }

    /// Tells droplets what has changed, and has them ack it.
    fn settle(&mut self) {
        let acks = &self.acks;
        let deltas = self.world.flush_to(|droplet| acks.is_connected(droplet));
        for (droplet, delta) in &deltas {
            if let Some(sequence) = self.acks.send(droplet, delta, 0) {
                self.acks.ack(droplet, 1, sequence, 0);
            }
        }
        black_box(deltas);
    }

    /// An endpoint of a VPC in the middle comes to a droplet, and goes.
    fn come_and_go(&mut self, member: usize, on: String) {
        let vpc = self.droplets / 10;
        let name = name(&network(vpc, 0), member);
        let endpoint = endpoint(vpc, 0, member, on);
        self.world.set_endpoint(&name, Some(endpoint));
        self.settle();
        self.world.set_endpoint(&name, None);
        self.settle();
    }
}

fn events(group: &mut BenchmarkGroup<'_, WallTime>, size: usize) {
    let mut scene = Scene::new(size);
    let vpc = scene.droplets / 10;
    let home = scene.home(vpc, 3);
    group.bench_function(BenchmarkId::new("endpoint comes and goes", size), |bench| {
        bench.iter(|| scene.come_and_go(100, home.clone()));
    });
    // Its VPC has no other endpoint there.
    let elsewhere = droplet((vpc * NETWORKS + SPREAD + 7) % scene.droplets);
    group.bench_function(BenchmarkId::new("first endpoint of a droplet", size), |bench| {
        bench.iter(|| scene.come_and_go(100, elsewhere.clone()));
    });
    let bouncer = format!("{}-b0", network(vpc, 0));
    let places = [home.clone(), scene.home(vpc, 4)];
    group.bench_function(BenchmarkId::new("bouncer moves and returns", size), |bench| {
        bench.iter(|| {
            for place in &places {
                let role = serving(&network(vpc, 0), place.clone());
                scene.world.set_role(RoleKind::Bouncer, &bouncer, Some(role));
                scene.settle();
            }
        });
    });
    group.bench_function(BenchmarkId::new("droplet dials", size), |bench| {
        bench.iter(|| scene.open(&home));
    });
    look_ups(group, size, (&scene, vpc, &home));
}

fn look_ups(
    group: &mut BenchmarkGroup<'_, WallTime>,
    size: usize,
    (scene, vpc, home): (&Scene, usize, &str),
) {
    let (number, address) = (vni_of(vpc), IpAddr::V4(address(2, 5)));
    group.bench_function(BenchmarkId::new("holder of an address", size), |bench| {
        bench.iter(|| {
            let known = scene.world.has_vni(number);
            black_box((known, scene.world.holder(number, address)))
        });
    });
    group.bench_function(BenchmarkId::new("roles on a droplet", size), |bench| {
        bench.iter(|| black_box(scene.world.roles_on(home)));
    });
    group.bench_function(BenchmarkId::new("residents of a droplet", size), |bench| {
        bench.iter(|| black_box(scene.world.residents(home)));
    });
    group.bench_function(BenchmarkId::new("droplets with rows of a VPC", size), |bench| {
        bench.iter(|| black_box(scene.acks.holding_vni(number, 0).count()));
    });
}

fn model(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("model");
    group
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    for size in SIZES {
        events(&mut group, size);
    }
    group.finish();
}

criterion_group!(benches, model);
criterion_main!(benches);

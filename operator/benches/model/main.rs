//! The cost of events in the model alone: no client, no lock, no stream. `cargo bench -p thuban-operator` measures
//! clusters of 10^3 to 10^5 endpoints. The cost of an event must not depend on the size of the cluster.
//!
//! The events of `services` and `policies` come last, because they add objects to the cluster.

mod policies;
mod scene;
mod services;

use std::hint::black_box;
use std::net::IpAddr;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, criterion_group, criterion_main};
use thuban_operator::model::world::RoleKind;

use scene::{Scene, address, network, serving, vni_of};

/// Numbers of endpoints.
const SIZES: [usize; 3] = [1_000, 10_000, 100_000];

fn events(group: &mut BenchmarkGroup<'_, WallTime>, size: usize) {
    let mut scene = Scene::new(size);
    let vpc = scene.middle();
    let home = scene.home(vpc, 3);
    group.bench_function(BenchmarkId::new("endpoint comes and goes", size), |bench| {
        bench.iter(|| scene.come_and_go(100, home.clone()));
    });
    let elsewhere = scene.elsewhere(vpc);
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
    services::events(group, size, &mut scene);
    policies::events(group, size, &mut scene);
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

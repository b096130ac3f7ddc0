//! The control plane as a client outside sees it: Services that are made at once, each until its first answer, and a
//! Service whose backends change.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::{
    Plan,
    failover::ask,
    objects::{self, BURST, BURST_POOL, POOL, SPACE, Wanted},
    site::{self, Site, node_of},
};
use crate::bench::{
    float, go_on,
    pods::Pod,
    results::{Results, Sample},
    services::{
        change::effect,
        site::client,
        traffic::{ANSWERS, Target},
    },
};

pub const CASE: &str = "control-plane";
/// Parallel requests to the API server.
const PARALLEL: usize = 16;
/// How long a client waits for an answer, and until it asks again.
const WITHIN: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(40);
const READY_TIMEOUT: Duration = Duration::from_mins(1);
/// The Service whose backends change.
const MOVING: &str = "moving";
const PAUSE_OF_CHANGES: Duration = Duration::from_millis(300);

pub fn measure(site: &Site, plan: &Plan, runtime: &Runtime, results: &mut Results) -> Result<()> {
    let api = runtime.block_on(client(&site.cluster))?;
    let times = burst(site, plan.services, runtime, &api)?;
    println!("{} Services are answered", times.len());
    for time in times {
        results.add(
            CASE,
            &[Sample::new("answered_ms", "ms", time.as_secs_f64() * 1e3)],
        );
    }
    let all = format!("pool={BURST_POOL}");
    site.cluster
        .kubectl(&["delete", "service", "-n", SPACE, "-l", &all])?;
    changes(site, plan.changes, runtime, &api, results)
}

/// Makes Services; returns for each the time from the beginning until an address of their pool was first answered.
fn burst(site: &Site, count: usize, runtime: &Runtime, api: &Client) -> Result<Vec<Duration>> {
    let (first, addresses) = BURST;
    ensure!(count < addresses as usize, "the pool has {addresses} addresses");
    let (start, answered) = (Instant::now(), AtomicUsize::new(0));
    thread::scope(|scope| {
        let (answered, client) = (&answered, &site.client);
        let clients: Vec<_> = (0..addresses)
            .map(|number| {
                let server = (Ipv4Addr::from_bits(first.to_bits() + number), ANSWERS);
                scope.spawn(move || client.run(|| Ok(first_answer(server.into(), start, count, answered))))
            })
            .collect();
        let services = (0..count).map(|number| Wanted {
            pool: BURST_POOL,
            ..site::answers(&format!("burst-{number}"))
        });
        runtime.block_on(make(api, services.collect()))?;
        let mut times = Vec::new();
        for client in clients {
            times.extend(client.join().map_err(|_| anyhow!("a client panicked"))??);
        }
        ensure!(
            times.len() >= count,
            "only {} of {count} Services are answered",
            times.len()
        );
        Ok(times)
    })
}

/// Asks until there is an answer, or so many others have one.
fn first_answer(
    server: SocketAddr,
    start: Instant,
    count: usize,
    answered: &AtomicUsize,
) -> Option<Duration> {
    while answered.load(Ordering::Relaxed) < count && start.elapsed() < READY_TIMEOUT {
        if ask(server, WITHIN).is_ok() {
            answered.fetch_add(1, Ordering::Relaxed);
            return Some(start.elapsed());
        }
        thread::sleep(PAUSE);
    }
    None
}

/// Makes Services, several at once.
pub async fn make(api: &Client, services: Vec<Wanted>) -> Result<()> {
    let services = services.into_iter().map(|wanted| async move {
        let all: Api<Service> = Api::namespaced(api.clone(), SPACE);
        let service = serde_json::from_value(wanted.of_thuban())?;
        let made = all.create(&PostParams::default(), &service).await;
        made.with_context(|| format!("making {}", wanted.name)).map(drop)
    });
    stream::iter(services)
        .buffer_unordered(PARALLEL)
        .try_collect()
        .await
}

/// Gives a Service other backends, there and back.
fn changes(site: &Site, count: usize, runtime: &Runtime, api: &Client, results: &mut Results) -> Result<()> {
    let half = site.servers.len() / 2;
    let backends = |is_second: bool| {
        let skip = if is_second { half } else { 0 };
        endpoints(&site.servers, skip..skip + half)
    };
    objects::apply(
        &site.cluster,
        &[json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": MOVING, "namespace": SPACE, "labels": {"kubernetes.io/service-name": MOVING}},
            "addressType": "IPv4", "endpoints": backends(false),
            "ports": [{"name": format!("tcp-{ANSWERS}"), "port": ANSWERS}],
        })],
    )?;
    let address = site.balance(&Wanted {
        name: MOVING.to_owned(),
        label: None,
        ports: vec![(ANSWERS, "TCP")],
        pool: POOL,
        by_node: false,
    })?;
    // The other ports are those of other Services with these backends.
    let target = Target::new(address, 4);
    let slices: Api<EndpointSlice> = Api::namespaced(api.clone(), SPACE);
    for number in 0..count {
        go_on()?;
        let is_second = number % 2 == 0;
        let is_wanted = |server| (usize::from(server) >= half) == is_second;
        let effect = effect(&site.client, &target, is_wanted, || {
            let patch = Patch::Merge(json!({"endpoints": backends(is_second)}));
            let parameters = PatchParams::default();
            let patched = slices.patch(MOVING, &parameters, &patch);
            runtime.block_on(patched).context("changing the slice").map(drop)
        })?;
        results.add(
            CASE,
            &[
                Sample::new("change_ms", "ms", effect.seen.as_secs_f64() * 1e3),
                Sample::new("change_written_ms", "ms", effect.written.as_secs_f64() * 1e3),
                Sample::new("change_failed", "connections", float(effect.failed as u64)),
            ],
        );
        thread::sleep(PAUSE_OF_CHANGES);
    }
    Ok(())
}

fn endpoints(servers: &[Pod], range: std::ops::Range<usize>) -> Value {
    let endpoint = |index: usize| {
        let (address, node) = (servers[index].address, node_of(index));
        json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true}})
    };
    range.map(endpoint).collect()
}

//! Services and their EndpointSlices, written by hand: a few that are measured, one whose slice changes, and as many
//! others as the size needs. Each has four backends.

use std::{
    collections::HashMap,
    net::Ipv4Addr,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use thuban_api::{Endpoint, Phase};

use super::{
    pods::{Pods, SPACE},
    traffic::{ANSWERS, SINK, Target},
};
use crate::bench::{float, go_on, pods::Pod};

/// The number of Services that are measured, of each kind. Connections take them in turns, because a Service's place
/// among iptables' rules is random.
const MEASURED: u16 = 4;
/// The number of Services that always exist: those that are measured, and the one that changes.
pub const LEAST: usize = 2 * MEASURED as usize + 1;
pub const MOVING: &str = "moving";
/// Parallel requests.
const PARALLEL: usize = 16;
const SAY: Duration = Duration::from_secs(5);
const READY_TIMEOUT: Duration = Duration::from_mins(20);
/// How long to wait for the next Endpoint. One that takes longer does not come: the droplets have no room for it.
const STALLED: Duration = Duration::from_secs(30);

/// The objects that exist.
#[derive(Debug, Default)]
pub struct Made {
    /// Backends on the client's node.
    pub near: Vec<Target>,
    /// Backends on another node.
    pub far: Vec<Target>,
    pub moving: Option<Target>,
    /// The last of the other Services. It shows that kube-proxy has seen all.
    pub last: Option<Target>,
    others: usize,
    /// ClusterIPs of the Services that existed before, by name.
    known: HashMap<String, Ipv4Addr>,
}

impl Made {
    fn count(&self) -> usize {
        self.near.len() + self.far.len() + usize::from(self.moving.is_some()) + self.others
    }

    /// Returns all targets that are used.
    pub fn targets(&self) -> impl Iterator<Item = &Target> {
        self.near.iter().chain(&self.far).chain(&self.moving)
    }

    /// Returns the address of a Service, which is made if it doesn't exist.
    async fn find_or_make(&self, client: &Client, name: &str, backends: &[Pod]) -> Result<Ipv4Addr> {
        match self.known.get(name) {
            Some(address) => Ok(*address),
            None => make(client, name, backends).await,
        }
    }

    /// Makes more Services, up to the size.
    pub async fn grow(&mut self, client: &Client, pods: &Pods, size: usize) -> Result<()> {
        if self.count() == 0 {
            self.known = there(client).await?;
            for (word, backends) in [("near", &pods.near), ("far", &pods.far)] {
                let mut targets = Vec::new();
                for way in 1..=MEASURED {
                    let address = self
                        .find_or_make(client, &format!("{word}-{way}"), backends)
                        .await?;
                    targets.push(Target::new(address, way));
                }
                *(if word == "near" {
                    &mut self.near
                } else {
                    &mut self.far
                }) = targets;
            }
            let address = self.find_or_make(client, MOVING, &pods.near).await?;
            self.moving = Some(Target::new(address, MEASURED + 1));
        }
        let more = self.others..size.saturating_sub(LEAST).max(self.others);
        if more.is_empty() {
            return Ok(());
        }
        let (made, total) = (AtomicUsize::new(0), more.len());
        let others = stream::iter(more.clone()).map(|number| {
            let (made, this) = (&made, &*self);
            let backends = if number % 2 == 0 { &pods.near } else { &pods.far };
            async move {
                let address = this
                    .find_or_make(client, &format!("other-{number}"), backends)
                    .await?;
                made.fetch_add(1, Ordering::Relaxed);
                anyhow::Ok((number, address))
            }
        });
        let work = others.buffer_unordered(PARALLEL).try_collect::<Vec<_>>();
        let addresses = said("Services made", total, || made.load(Ordering::Relaxed), work).await?;
        let last = addresses.into_iter().max();
        self.last = last.map(|(_, address)| Target::new(address, MEASURED + 1));
        self.others = more.end;
        Ok(())
    }
}

/// Returns the Services with slices that another run left.
async fn there(client: &Client) -> Result<HashMap<String, Ipv4Addr>> {
    let services: Api<Service> = Api::namespaced(client.clone(), SPACE);
    let all = services
        .list(&ListParams::default())
        .await
        .context("listing Services")?;
    let named = |service: Service| {
        let address = service.spec?.cluster_ip?.parse().ok()?;
        Some((service.metadata.name?, address))
    };
    Ok(all.items.into_iter().filter_map(named).collect())
}

/// Does `work` and prints the progress every few seconds.
async fn said<T>(
    what: &str,
    total: usize,
    count: impl Fn() -> usize,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let start = Instant::now();
    tokio::pin!(work);
    loop {
        match tokio::time::timeout(SAY, &mut work).await {
            Ok(done) => {
                println!("  {what}: {} ({:.1} s)", count(), start.elapsed().as_secs_f32());
                return done;
            }
            Err(_) => println!(
                "  {what}: {} of {total} ({:.0} s)",
                count(),
                start.elapsed().as_secs_f32()
            ),
        }
        go_on()?;
    }
}

/// Makes a Service after its slice; returns its address.
async fn make(client: &Client, name: &str, backends: &[Pod]) -> Result<Ipv4Addr> {
    let ports: Vec<_> = ports(name).into_iter().collect();
    let service = json!({
        "metadata": {"name": name, "namespace": SPACE},
        "spec": {"ports": ports.iter().map(|(name, port)| json!({"name": name, "port": port})).collect::<Vec<_>>()},
    });
    let slice = json!({
        "metadata": {"name": name, "namespace": SPACE, "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4", "endpoints": endpoints(backends),
        "ports": ports.iter().map(|(name, port)| json!({"name": name, "port": port})).collect::<Vec<_>>(),
    });
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), SPACE);
    let slice = serde_json::from_value(slice)?;
    slices
        .create(&PostParams::default(), &slice)
        .await
        .with_context(|| format!("making the slice {name}"))?;
    let services: Api<Service> = Api::namespaced(client.clone(), SPACE);
    let service = serde_json::from_value(service)?;
    let service = services
        .create(&PostParams::default(), &service)
        .await
        .with_context(|| format!("making the Service {name}"))?;
    let address = service.spec.and_then(|spec| spec.cluster_ip);
    Ok(address.context("a ClusterIP")?.parse()?)
}

/// Returns the ports of a Service. The other Services have one port, like most Services.
fn ports(name: &str) -> Vec<(&'static str, u16)> {
    if name.starts_with("other") {
        vec![("answers", ANSWERS)]
    } else {
        vec![("answers", ANSWERS), ("sink", SINK)]
    }
}

fn endpoints(backends: &[Pod]) -> Value {
    let endpoint = |pod: &Pod| json!({"addresses": [pod.address], "conditions": {"ready": true}});
    backends.iter().map(endpoint).collect()
}

/// Gives other backends to the Service that changes.
pub async fn change(client: &Client, backends: &[Pod]) -> Result<()> {
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), SPACE);
    let patch = json!({"endpoints": endpoints(backends)});
    slices
        .patch(MOVING, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .context("changing the slice")?;
    Ok(())
}

/// Waits until Thuban's Endpoints of all Services are Provisioned, or until no more come. Returns how many are
/// Provisioned.
pub async fn provisioned(client: &Client, size: usize) -> Result<usize> {
    let endpoints: Api<Endpoint> = Api::namespaced(client.clone(), SPACE);
    let start = Instant::now();
    let mut said = start;
    let mut most = (0, start);
    loop {
        let all = endpoints.list_metadata(&ListParams::default().match_any()).await;
        // The Endpoints of Services exist soon. The long list of their states is worth its time only then.
        let there = all.context("listing Endpoints")?.items.len();
        let mut ready = 0;
        if there >= size {
            let all = endpoints.list(&ListParams::default().match_any()).await?;
            let is_ready = |endpoint: &&Endpoint| {
                endpoint.spec.service_ref.is_some()
                    && endpoint
                        .status
                        .as_ref()
                        .is_some_and(|status| status.phase == Phase::Provisioned)
            };
            ready = all.items.iter().filter(is_ready).count();
        }
        let seconds = start.elapsed().as_secs_f32();
        if there + ready > most.0 {
            most = (there + ready, Instant::now());
        }
        let is_all = ready >= size || most.1.elapsed() > STALLED;
        if is_all {
            println!("  Endpoints Provisioned: {ready} of {size} ({seconds:.1} s more)");
            return Ok(ready);
        }
        if start.elapsed() > READY_TIMEOUT {
            bail!("{ready} of {size} Endpoints are Provisioned after {seconds:.0} s");
        }
        if said.elapsed() > SAY {
            println!("  Endpoints made: {there}, Provisioned: {ready} of {size} ({seconds:.0} s)");
            said = Instant::now();
        }
        go_on()?;
        let pause = 0.2 + float(there as u64) / 5000.0;
        tokio::time::sleep(Duration::from_secs_f64(pause)).await;
    }
}

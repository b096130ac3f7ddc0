//! Endpoints made and removed in bulk: the cost of one in rows and in writes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, api::PostParams};
use thuban_api::DEFAULT_ROLES;

use super::{
    Bench, FEW_ENDPOINTS,
    hollow::{Book, Hollow},
    metrics::{self, Metrics, Request},
    progress::{patience, until},
    tally::Count,
    tenants::{Tenants, at_once},
    track::{Place, Step, pod_name},
};
use crate::bench::float;

/// Parallel requests.
const PARALLEL: usize = 32;
/// Endpoints that are under way at a time: the operator is kept busy, but not overloaded.
const WINDOW: u64 = 200;
/// Endpoints of the drain: enough for a mean.
const DRAINED: usize = 2000;
/// How long the rows of existing objects may take.
const SETTLED: Duration = Duration::from_mins(1);
/// The resources that the operator writes for an endpoint.
pub(super) const OF_ENDPOINTS: [&str; 4] = ["endpoints", "endpoints/status", "ipclaims", "ipclaims/status"];
/// The objects that must have been made before a droplet is told that an endpoint is ready.
const BEFORE_READY: [&str; 2] = ["endpoints", "ipclaims"];

/// Makes and removes single pods; cheap to clone into tasks.
#[derive(Clone)]
pub struct Hand {
    pub admin: Client,
    pub book: Arc<Book>,
    pub tenants: Tenants,
    pub droplets: Arc<[Arc<Hollow>]>,
    pub networks: usize,
}

impl Hand {
    /// Returns a new pod's number. The pod's place is a function of the number, and different for the endpoints of one
    /// network.
    pub fn add(&self) -> Result<usize> {
        self.book.track.add(|number| Place {
            network: number % self.networks,
            droplet: scatter(number as u64) as usize % self.droplets.len(),
        })
    }

    pub async fn create(&self, number: usize) -> Result<()> {
        let place = self.book.track.place(number).context("a pod without a place")?;
        let pod = self.tenants.pod(number, place.network, place.droplet)?;
        let api: Api<Pod> = Api::namespaced(self.admin.clone(), &self.tenants.namespace(place.network));
        self.book.track.note(number, Step::Sent);
        api.create(&PostParams::default(), &pod)
            .await
            .with_context(|| format!("pod {number}"))?;
        self.book.track.note(number, Step::Answered);
        Ok(())
    }

    /// Ends a pod as kubelet does: CNI DEL, then the object goes.
    pub async fn delete(&self, number: usize) -> Result<()> {
        let place = self.book.track.place(number).context("a pod without a place")?;
        let api: Api<Pod> = Api::namespaced(self.admin.clone(), &self.tenants.namespace(place.network));
        self.book.track.note(number, Step::Deleted);
        self.droplets[place.droplet].detach(number);
        api.delete(&pod_name(number), &at_once())
            .await
            .with_context(|| format!("deleting pod {number}"))?;
        Ok(())
    }
}

/// Maps consecutive numbers to distant ones (the finalizer of splitmix64).
fn scatter(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) >> 1
}

impl Bench {
    pub(super) fn hand(&self, droplets: usize, networks: usize) -> Hand {
        Hand {
            admin: self.plane.admin.clone(),
            book: Arc::clone(&self.book),
            tenants: self.tenants,
            droplets: self.fleet.droplets.iter().take(droplets).cloned().collect(),
            networks,
        }
    }

    /// Measures the rows of an endpoint while there are few droplets.
    pub(super) async fn few(&mut self, droplets: usize, networks: usize) -> Result<()> {
        let hand = self.hand(droplets, networks);
        let endpoints = FEW_ENDPOINTS.min(self.plan.endpoints);
        self.make(&hand, endpoints, "10").await
    }

    /// Returns the counters once the operator has written all earlier events. It writes events beside the workflows, so
    /// that events of networks and roles would count as the endpoints'.
    async fn untold(&self) -> Result<Metrics> {
        let end = Instant::now() + patience(self.plan.endpoints);
        let mut before = metrics::read(&self.plane.admin).await?;
        loop {
            tokio::time::sleep(Duration::from_secs(2)).await;
            let now = metrics::read(&self.plane.admin).await?;
            let told = now.since(&before).writes(|request| request.is(&["events"]));
            if told == 0.0 || Instant::now() > end {
                return Ok(now);
            }
            before = now;
        }
    }

    /// Makes all endpoints except those that exist already.
    pub(super) async fn load(&mut self) -> Result<()> {
        let endpoints = self.plan.endpoints.saturating_sub(self.live.len());
        if endpoints == 0 {
            return Ok(());
        }
        self.phase(&format!("{endpoints} endpoints"));
        let hand = self.hand(self.plan.droplets, self.plan.networks);
        let before = self.untold().await?;
        let (start, cpu) = (Instant::now(), self.operator.usage()?.cpu_seconds);
        self.make(&hand, endpoints, "1000").await?;
        let seconds = start.elapsed().as_secs_f64();
        let cpu = self.operator.usage()?.cpu_seconds - cpu;
        let made = float(endpoints as u64);
        self.report.add("load_rate", "1/s", made / seconds);
        self.report
            .add("load_cpu_ms_per_endpoint", "ms", cpu * 1000.0 / made);
        let change = metrics::read(&self.plane.admin).await?.since(&before);
        tell(&change, endpoints);
        let per = |resources: &[&str]| change.writes(|request| request.is(resources)) / made;
        self.report.add("writes_per_endpoint", "", per(&OF_ENDPOINTS));
        let before_ready = |request: &Request| request.verb == "POST" && request.is(&BEFORE_READY);
        self.report
            .add("writes_before_ready", "", change.writes(before_ready) / made);
        self.report.add("events_per_endpoint", "", per(&["events"]));
        self.report.add(
            "network_writes_per_endpoint",
            "",
            per(&["networks/status", "networks"]),
        );
        self.report.add(
            "refused_writes_per_endpoint",
            "",
            change.refused.values().sum::<f64>() / made,
        );
        Ok(())
    }

    /// Makes this many endpoints, waits until their droplets may go on with ADD, and counts rows.
    async fn make(&mut self, hand: &Hand, endpoints: usize, name: &str) -> Result<()> {
        self.wait_for_rows().await?;
        let rows = self.book.tally.now();
        let track = &self.book.track;
        let first = track.added();
        let numbers: Vec<usize> = (0..endpoints).map(|_| hand.add()).collect::<Result<_>>()?;
        let (provisioned, ready) = (track.count(Step::Provisioned), track.count(Step::Ready));
        let sent = AtomicUsize::new(0);
        let make = |number: usize| {
            let sent = &sent;
            async move {
                let on_the_way = || {
                    let sent = sent.load(Ordering::Relaxed) as u64;
                    sent.saturating_sub(track.count(Step::Provisioned) - provisioned)
                };
                while on_the_way() > WINDOW {
                    super::go_on()?;
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                sent.fetch_add(1, Ordering::Relaxed);
                hand.create(number).await
            }
        };
        let all = stream::iter(numbers.iter().copied())
            .map(make)
            .buffer_unordered(PARALLEL)
            .try_for_each(|()| std::future::ready(Ok(())));
        let wait = until("endpoints Provisioned", endpoints, patience(endpoints), || {
            Ok((track.count(Step::Provisioned) - provisioned) as usize)
        });
        let wait = async { wait.await.err() };
        let (made, waited) = futures::future::join(all, wait).await;
        made?;
        let ready_all = until(
            "endpoints ready at their droplets",
            endpoints,
            Duration::from_secs(20),
            || Ok((track.count(Step::Ready) - ready) as usize),
        );
        let problem = waited.or(ready_all.await.err());
        let counts = self.book.tally.since(&rows);
        let per = |count: u64| float(count) / float(endpoints as u64);
        let all = first..first + endpoints;
        println!(
            "  rows per endpoint: {:.3} new (local {:.3}, bouncers {:.3}), {:.3} ready, {:.3} repeated; \
             others: {:.3} of VPCs and networks, {} of droplets, {} snapshots' rows",
            per(counts.endpoint_rows()),
            per(counts.of(Count::Local)),
            per(counts.of(Count::Bouncer)),
            per(counts.of(Count::Ready)),
            per(counts.of(Count::Repeated)),
            per(counts.of(Count::Vpc) + counts.of(Count::Network)),
            counts.of(Count::Droplet),
            counts.of(Count::Snapshot)
        );
        let times = track.between(all, Step::Sent, Step::Provisioned);
        self.report.add_times(&format!("load_provisioned_{name}"), &times);
        let name = |metric: &str| format!("{metric}_{name}");
        self.report
            .add(&name("rows_per_endpoint"), "", per(counts.endpoint_rows()));
        self.report
            .add(&name("ready_rows_per_endpoint"), "", per(counts.of(Count::Ready)));
        self.report.add(
            &name("repeated_rows_per_endpoint"),
            "",
            per(counts.of(Count::Repeated)),
        );
        self.report.add(
            &name("role_rows_per_endpoint"),
            "",
            per(counts.of(Count::Vpc) + counts.of(Count::Network)),
        );
        if let Some(problem) = problem {
            super::go_on()?;
            let left = track.left(Step::Sent, Step::Provisioned);
            let some = left.iter().take(5).map(|number| pod_name(*number));
            let some = some.collect::<Vec<_>>().join(" ");
            self.report
                .problem(format!("{problem:#}; not Provisioned: {some} …"));
        }
        self.live.extend(numbers);
        Ok(())
    }

    /// Removes endpoints and waits until their claims are gone, too.
    pub(super) async fn drain(&mut self) -> Result<()> {
        let endpoints = DRAINED.min(self.live.len());
        self.phase(&format!("{endpoints} endpoints go"));
        let hand = self.hand(self.plan.droplets, self.plan.networks);
        let gone = self.book.track.count(Step::Gone);
        // Claims of the churn may still rest.
        let before = self.await_claims(&Metrics::default(), gone).await?;
        let numbers: Vec<usize> = self.live.drain(..endpoints).collect();
        let start = Instant::now();
        stream::iter(numbers.iter().copied())
            .map(|number| hand.delete(number))
            .buffer_unordered(PARALLEL)
            .try_for_each(|()| std::future::ready(Ok(())))
            .await?;
        let track = &self.book.track;
        let waited = until("endpoints gone", endpoints, Duration::from_mins(3), || {
            Ok((track.count(Step::Gone) - gone) as usize)
        });
        if let Err(error) = waited.await {
            super::go_on()?;
            self.report.problem(format!("{error:#}"));
        }
        let rate = float(endpoints as u64) / start.elapsed().as_secs_f64();
        self.report.add("drain_rate", "1/s", rate);
        let after = self.await_claims(&before, endpoints as u64).await?;
        let change = after.since(&before);
        tell(&change, endpoints);
        let writes = change.writes(|request| request.is(&OF_ENDPOINTS));
        let to_gone = writes / float(endpoints as u64);
        self.report.add("writes_to_gone", "", to_gone);
        if let Some(made) = self.report.value("writes_per_endpoint") {
            self.report.add("writes_per_life", "", made + to_gone);
        }
        Ok(())
    }

    /// Waits until this many claims were deleted since then; claims rest for 30 s before.
    async fn await_claims(&mut self, since: &Metrics, wanted: u64) -> Result<Metrics> {
        let end = Instant::now() + Duration::from_mins(2);
        loop {
            let now = metrics::read(&self.plane.admin).await?;
            let freed = now
                .since(since)
                .writes(|request| request.verb == "DELETE" && request.resource == "ipclaims");
            if freed >= float(wanted) {
                return Ok(now);
            }
            if Instant::now() > end {
                self.report
                    .problem(format!("{freed} of {wanted} claims are gone after two minutes"));
                return Ok(now);
            }
            super::go_on()?;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// Returns the local and bouncer rows that all droplets hold, and those that they should hold.
    fn rows(&self) -> [(usize, usize); 2] {
        let live = self.live.len();
        // Each node has an endpoint of its own, in the network `default`.
        let own = self.fleet.droplets.len();
        let own_bounced = own * DEFAULT_ROLES as usize;
        let held = self.fleet.droplets.iter().map(|droplet| droplet.endpoint_rows());
        [
            held.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1)),
            (live + own, live * self.plan.bouncers as usize + own_bounced),
        ]
    }

    /// Waits until the droplets have the rows of all earlier objects and no more rows come. Otherwise rows of nodes'
    /// own endpoints would count as other endpoints' rows.
    async fn wait_for_rows(&self) -> Result<()> {
        let end = Instant::now() + SETTLED;
        let mut before = self.book.tally.now();
        while Instant::now() < end {
            super::go_on()?;
            tokio::time::sleep(Duration::from_secs(1)).await;
            let [held, wanted] = self.rows();
            if held == wanted && self.book.tally.since(&before).endpoint_rows() == 0 {
                return Ok(());
            }
            before = self.book.tally.now();
        }
        let [held, wanted] = self.rows();
        bail!(
            "droplets hold {} local and {} bouncer rows instead of {} and {}",
            held.0,
            held.1,
            wanted.0,
            wanted.1
        )
    }

    /// Checks that the droplets hold the rows of exactly the endpoints that exist, and know each other.
    pub(super) async fn check_rows(&mut self) {
        match self.wait_for_rows().await {
            Ok(()) => {
                let [(locals, bouncers), _] = self.rows();
                println!("  droplets hold {locals} local and {bouncers} bouncer rows");
            }
            Err(error) => self.report.problem(format!("{error:#}")),
        }
        let droplets = &self.fleet.droplets;
        let knows_all = |droplet: &&Arc<Hollow>| droplet.known_droplets() + 1 == droplets.len();
        let knowing = droplets.iter().filter(knows_all).count();
        if knowing < droplets.len() {
            let text = format!("{knowing} of {} droplets know all others", droplets.len());
            self.report.problem(text);
        }
    }
}

/// Prints the writes per endpoint by verb and resource.
fn tell(change: &Metrics, endpoints: usize) {
    let endpoints = float(endpoints as u64);
    for (request, count) in &change.done {
        if count / endpoints > 0.002 {
            println!(
                "  {:<7} {:<22} {:.3} per endpoint",
                request.verb,
                request.resource,
                count / endpoints
            );
        }
    }
    for (request, count) in &change.refused {
        println!(
            "  {:<7} {:<22} {count:.0} refused",
            request.verb, request.resource
        );
    }
}

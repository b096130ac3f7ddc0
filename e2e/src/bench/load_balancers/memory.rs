//! Memory of cidrd, lbaasd and of the maps of load balancers, among many of these.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use thuban_cluster::NODES;
use tokio::runtime::Runtime;

use super::{
    Plan,
    control::make,
    objects::{MANY_POOL, SPACE, Wanted},
    site::{self, Site},
};
use crate::bench::{
    float, go_on,
    results::{Results, Sample},
    services::{
        memory::{maps_mib, process_mib},
        site::client,
    },
};

pub const CASE: &str = "memory";
/// Maps that grow with load balancers.
const MAPS: [&str; 5] = ["SERVICES", "SLOTS", "BACKENDS", "HOMES", "SOURCE_RANGES"];
const DAEMONS: [(&str, &str); 3] = [
    ("lbaasd", "lbaasd_rss_mib"),
    ("cidrd", "cidrd_rss_mib"),
    ("thuban-speaker", "speaker_rss_mib"),
];
/// How long to wait for the next address.
const STALLED: Duration = Duration::from_mins(1);
const LOOK: Duration = Duration::from_secs(2);
/// The time until rows and routes are there, too.
const SETTLE: Duration = Duration::from_secs(10);

pub fn measure(site: &Site, plan: &Plan, runtime: &Runtime, results: &mut Results) -> Result<()> {
    let before = most_maps(site)?;
    let start = Instant::now();
    let wanted = (0..plan.vips).map(|number| Wanted {
        pool: MANY_POOL,
        ..site::answers(&format!("many-{number}"))
    });
    let api = runtime.block_on(client(&site.cluster))?;
    runtime.block_on(make(&api, wanted.collect()))?;
    let served = served(site, plan.vips)?;
    println!(
        "{served} of {} load balancers have an address ({:.0} s)",
        plan.vips,
        start.elapsed().as_secs_f32()
    );
    thread::sleep(SETTLE);
    let after = most_maps(site)?;
    let mut samples = vec![
        Sample::new("load_balancers", "", float(served as u64)),
        Sample::new("filled_s", "s", start.elapsed().as_secs_f64()),
        Sample::new("maps_before_mib", "MiB", before),
        Sample::new("maps_mib", "MiB", after),
    ];
    for (name, metric) in DAEMONS {
        let all = NODES
            .iter()
            .filter_map(|node| process_mib(&site.cluster, node, name));
        let most = all
            .max_by(f64::total_cmp)
            .with_context(|| format!("no {name} runs"))?;
        samples.push(Sample::new(metric, "MiB", most));
    }
    results.add(CASE, &samples);
    Ok(())
}

/// Waits until all have an address, or until no more get one. Returns how many have one.
fn served(site: &Site, count: usize) -> Result<usize> {
    let (mut most, mut changed) = (0, Instant::now());
    let path = "jsonpath={.items[*].status.loadBalancer.ingress[0].ip}";
    let all = format!("pool={MANY_POOL}");
    while most < count && changed.elapsed() < STALLED {
        go_on()?;
        thread::sleep(LOOK);
        let list = site
            .cluster
            .kubectl(&["get", "service", "-n", SPACE, "-l", &all, "-o", path])?;
        let now = list.split_whitespace().count();
        if now > most {
            (most, changed) = (now, Instant::now());
        }
    }
    Ok(most)
}

/// Returns the MiB of the maps on the node where they take most.
fn most_maps(site: &Site) -> Result<f64> {
    let mut most = 0.0_f64;
    for node in NODES {
        most = most.max(maps_mib(&site.cluster, node, &MAPS)?);
    }
    Ok(most)
}

//! From the change of an EndpointSlice to its effect: a client makes a connection every few milliseconds, and the first of
//! a row of connections that all reach the new backends is when the change has come.

use std::{
    ops::Range,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use tokio::runtime::Runtime;

use super::{
    objects,
    pods::{BACKENDS, Pod},
    site::Site,
    traffic::{Target, ask},
};
use crate::bench::process::{CLIENT_CORE, pin};

/// Between connections.
const PAUSE: Duration = Duration::from_millis(2);
/// Connections in a row that reach the new backends.
const ROW: usize = 10;
const WITHIN: Duration = Duration::from_millis(500);
/// After which no more changes are made in a turn.
const BUDGET: Duration = Duration::from_secs(45);
const PATIENCE: Duration = Duration::from_mins(1);

/// Numbers of the backends far from the client; those near have the numbers from 0.
pub const FAR: Range<u8> = 100..100 + BACKENDS as u8;

/// What one change took.
#[derive(Clone, Copy, Debug)]
pub struct Effect {
    /// From before it was sent until the API server had answered.
    pub written: Duration,
    /// From before it was sent until connections reach the new backends, and no other.
    pub seen: Duration,
    /// Connections that nobody answered meanwhile.
    pub failed: usize,
}

/// Changes the slice so often, there and back, with a pause after each.
pub fn effects(site: &Site, runtime: &Runtime, count: usize, pause: Duration) -> Result<Vec<Effect>> {
    let target = site.made.moving.as_ref().context("the Service that changes")?;
    let mut effects = Vec::new();
    let start = Instant::now();
    for number in 0..count.next_multiple_of(2) {
        let is_far = number % 2 == 0;
        // Back where it was before.
        if is_far && start.elapsed() > BUDGET {
            break;
        }
        let backends = if is_far { &site.pods.far } else { &site.pods.near };
        effects.push(effect(site, runtime, target, backends, is_far)?);
        // Not always as long, so that no period of anybody's is met.
        thread::sleep(pause.mul_f64(1.0 + 0.1 * f64::from((number % 5) as u8)));
    }
    Ok(effects)
}

fn effect(site: &Site, runtime: &Runtime, target: &Target, backends: &[Pod], is_far: bool) -> Result<Effect> {
    let (tell, begins) = mpsc::channel();
    thread::scope(|scope| {
        let prober = scope.spawn(move || {
            site.pods.client.run(|| {
                pin(CLIENT_CORE)?;
                probe(target, |number| FAR.contains(&number) == is_far, &tell)
            })
        });
        begins.recv().context("the client has ended")?;
        let sent = Instant::now();
        let written = runtime.block_on(objects::change(&site.client, backends));
        let written = written.map(|()| sent.elapsed());
        let (since, failed) = prober.join().map_err(|_| anyhow!("the client panicked"))??;
        Ok(Effect {
            written: written?,
            seen: since.saturating_duration_since(sent),
            failed,
        })
    })
}

/// Since when all connections reach a wanted backend, and how many failed before. Tells when it has begun.
fn probe(
    target: &Target,
    is_wanted: impl Fn(u8) -> bool,
    tell: &mpsc::Sender<()>,
) -> Result<(Instant, usize)> {
    let start = Instant::now();
    let (mut since, mut row, mut failed) = (None, 0, 0);
    loop {
        match ask(target, WITHIN) {
            Ok(number) if is_wanted(number) => {
                since.get_or_insert_with(Instant::now);
                row += 1;
            }
            answer => {
                failed += usize::from(answer.is_err());
                (since, row) = (None, 0);
            }
        }
        if let Some(since) = since.filter(|_| row == ROW) {
            return Ok((since, failed));
        }
        if start.elapsed() > PATIENCE {
            bail!("a change has no effect after {} s", PATIENCE.as_secs());
        }
        // The first has been answered by an old backend.
        let _ = tell.send(());
        thread::sleep(PAUSE);
    }
}

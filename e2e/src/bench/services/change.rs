//! The time from a change of an EndpointSlice to its effect. A client makes a connection every few milliseconds. The
//! change has arrived at the first of a row of connections that all reach the new backends.

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
    pods::BACKENDS,
    site::Site,
    traffic::{Target, ask},
};
use crate::bench::{
    pods::Pod,
    process::{CLIENT_CORE, pin},
};

/// The pause between connections.
const PAUSE: Duration = Duration::from_millis(2);
/// The number of connections in a row that reach the new backends.
const ROW: usize = 10;
const WITHIN: Duration = Duration::from_millis(500);
/// The time after which a turn makes no more changes.
const BUDGET: Duration = Duration::from_secs(45);
const READY_TIMEOUT: Duration = Duration::from_mins(1);

/// Numbers of the backends far from the client; the near ones have the numbers from 0.
pub const FAR: Range<u8> = 100..100 + BACKENDS as u8;

/// The times of one change.
#[derive(Clone, Copy, Debug)]
pub struct Effect {
    /// The time from before the change was sent until the API server had answered.
    pub written: Duration,
    /// The time from before the change was sent until connections reach the new backends, and no other.
    pub seen: Duration,
    /// Connections that nobody answered meanwhile.
    pub failed: usize,
}

/// Changes the slice this often, there and back, with a pause after each.
pub fn effects(site: &Site, runtime: &Runtime, count: usize, pause: Duration) -> Result<Vec<Effect>> {
    let target = site.made.moving.as_ref().context("the Service that changes")?;
    let mut effects = Vec::new();
    let start = Instant::now();
    for number in 0..count.next_multiple_of(2) {
        let is_far = number % 2 == 0;
        // The slice is back at its first backends.
        if is_far && start.elapsed() > BUDGET {
            break;
        }
        let backends = if is_far { &site.pods.far } else { &site.pods.near };
        let is_wanted = |number| FAR.contains(&number) == is_far;
        effects.push(effect(&site.pods.client, target, is_wanted, || {
            runtime.block_on(objects::change(&site.client, backends))
        })?);
        // The pause varies, so that it does not match any period.
        thread::sleep(pause.mul_f64(1.0 + 0.1 * f64::from((number % 5) as u8)));
    }
    Ok(effects)
}

/// Makes a change, after which the client's connections to the target reach only wanted backends, by their numbers.
pub fn effect(
    client: &Pod,
    target: &Target,
    is_wanted: impl Fn(u8) -> bool + Send,
    change: impl FnOnce() -> Result<()>,
) -> Result<Effect> {
    let (tell, begins) = mpsc::channel();
    thread::scope(|scope| {
        let prober = scope.spawn(move || {
            client.run(|| {
                pin(CLIENT_CORE)?;
                probe(target, is_wanted, &tell)
            })
        });
        begins.recv().context("the client has ended")?;
        let sent = Instant::now();
        let written = change().map(|()| sent.elapsed());
        let (since, failed) = prober.join().map_err(|_| anyhow!("the client panicked"))??;
        Ok(Effect {
            written: written?,
            seen: since.saturating_duration_since(sent),
            failed,
        })
    })
}

/// Returns since when all connections reach a wanted backend, and how many failed before. Signals when it has begun.
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
        if start.elapsed() > READY_TIMEOUT {
            bail!("a change has no effect after {} s", READY_TIMEOUT.as_secs());
        }
        // An old backend has answered the first connection.
        let _ = tell.send(());
        thread::sleep(PAUSE);
    }
}

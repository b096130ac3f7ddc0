//! The time from a change of an EndpointSlice to its effect. A client begins a connection every few milliseconds, even
//! if others have no answer yet. The change has arrived at the first of a row of connections that all reach the new
//! backends.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Mutex, PoisonError, mpsc},
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

/// The time between the beginnings of two connections.
const STEP: Duration = Duration::from_millis(4);
/// How long a client waits for each step of a connection. TCP repeats a lost SYN only after a second.
const WITHIN: Duration = Duration::from_millis(100);
/// Connections under way at once: more than begin while one may last.
const WORKERS: u32 = 76;
/// The number of connections in a row that reach the new backends.
const ROW: usize = 10;
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
    is_wanted: impl Fn(u8) -> bool + Send + Sync,
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
    is_wanted: impl Fn(u8) -> bool + Sync,
    tell: &mpsc::Sender<()>,
) -> Result<(Instant, usize)> {
    let (start, seen) = (Instant::now(), Mutex::new(Seen::default()));
    // The threads are in the caller's network namespace, and have its priority.
    thread::scope(|scope| {
        for worker in 0..WORKERS {
            let (is_wanted, seen, tell) = (&is_wanted, &seen, tell.clone());
            scope.spawn(move || connect(target, (start, worker), is_wanted, seen, &tell));
        }
    });
    let seen = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
    let Some(since) = seen.since.filter(|_| seen.is_over()) else {
        bail!("a change has no effect after {} s", READY_TIMEOUT.as_secs());
    };
    Ok((since, seen.failed))
}

/// Connects again and again, as one of the workers, until the change has arrived.
fn connect(
    target: &Target,
    (start, worker): (Instant, u32),
    is_wanted: &impl Fn(u8) -> bool,
    seen: &Mutex<Seen>,
    tell: &mpsc::Sender<()>,
) {
    let lock = || seen.lock().unwrap_or_else(PoisonError::into_inner);
    for number in (worker..).step_by(WORKERS as usize) {
        let begins = start + STEP * number;
        thread::sleep(begins.saturating_duration_since(Instant::now()));
        if lock().is_over() || start.elapsed() > READY_TIMEOUT {
            return;
        }
        let end = match ask(target, WITHIN) {
            Ok(backend) if is_wanted(backend) => End::Wanted(Instant::now()),
            Ok(_) => End::Other,
            Err(_) => End::Failed,
        };
        lock().note(number, end);
        // An old backend has answered the first connection.
        let _ = tell.send(());
    }
}

/// What became of a connection.
#[derive(Clone, Copy, Debug)]
enum End {
    /// A wanted backend answered then.
    Wanted(Instant),
    Other,
    Failed,
}

/// What became of the connections, in the order in which they began.
#[derive(Debug, Default)]
struct Seen {
    /// Connections that have ended before an earlier one.
    ahead: BTreeMap<u32, End>,
    /// The first connection that has not ended.
    next: u32,
    /// When the first connection of the row was answered, and how many the row has.
    since: Option<Instant>,
    row: usize,
    failed: usize,
}

impl Seen {
    fn is_over(&self) -> bool {
        self.row >= ROW
    }

    /// Notes the end of a connection. What ends after the row is complete does not count.
    fn note(&mut self, number: u32, end: End) {
        self.ahead.insert(number, end);
        while !self.is_over()
            && let Some(end) = self.ahead.remove(&self.next)
        {
            self.next += 1;
            if let End::Wanted(at) = end {
                self.since.get_or_insert(at);
                self.row += 1;
            } else {
                self.failed += usize::from(matches!(end, End::Failed));
                (self.since, self.row) = (None, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is seen of connections that end in this order.
    fn seen(ends: impl IntoIterator<Item = (u32, End)>) -> Seen {
        let mut seen = Seen::default();
        for (number, end) in ends {
            seen.note(number, end);
        }
        seen
    }

    #[test]
    fn a_connection_without_answer_holds_no_other_up() {
        let start = Instant::now();
        let at = |number| start + STEP * number;
        let later = (1..=10).map(|number| (number, End::Wanted(at(number))));
        let mut seen = seen(later);
        assert!(
            !seen.is_over(),
            "the first connection may still reach an old backend"
        );
        seen.note(0, End::Failed);
        assert!(seen.is_over());
        assert_eq!((seen.since, seen.failed), (Some(at(1)), 1));
    }

    #[test]
    fn the_change_has_arrived_after_the_last_old_answer() {
        let start = Instant::now();
        let end = |number: u32| match number {
            4 => End::Failed,
            0..=2 | 5 => End::Other,
            _ => End::Wanted(start + STEP * number),
        };
        let seen = |count: u32| seen((0..count).map(|number| (number, end(number))));
        assert!(!seen(15).is_over());
        let all = seen(30);
        assert!(all.is_over());
        assert_eq!((all.since, all.failed), (Some(start + STEP * 6), 1));
    }
}

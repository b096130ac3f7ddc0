//! The levels of the log, which a command changes for a while.
//!
//! Invariant: the levels of the process's start come back after the time that the last change said.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use thiserror::Error;
use tokio::time::sleep;
use tracing::{Level, error, info};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::reload::{self, Handle};

/// What brings back the levels of the process's start.
pub const DEFAULT: &str = "default";

/// The log of this process, once it has begun.
static LOG: OnceLock<Levels> = OnceLock::new();

#[derive(Debug, Error)]
pub enum LevelsError {
    #[error("the log of this process has not begun")]
    NotBegun,
    #[error(
        "say a level for all parts too: error, warn, info, debug or trace, as in `info,transitd::cni=debug`"
    )]
    NoLevelForAll,
    #[error("these are no levels of a log: {0}")]
    Parse(#[source] ParseError),
    #[error("the levels can't be changed: {0}")]
    Reload(#[source] reload::Error),
}

type Reload = Box<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>;

/// The levels of a log, and how they are changed.
pub struct Levels {
    reload: Reload,
    /// Those of the process's start
    begun: String,
    state: Mutex<State>,
}

struct State {
    levels: String,
    /// How many times the levels were changed
    changes: u64,
}

/// Keeps the handle of the log that begins with these levels. Only the first log of a process counts.
pub fn keep<S: 'static>(begun: &str, handle: Handle<EnvFilter, S>) {
    let reload = Box::new(move |filter: EnvFilter| handle.reload(filter));
    // A second log could not begin anyway.
    let _ = LOG.set(Levels::new(begun, reload));
}

/// Returns the levels of this process's log.
pub fn of_process() -> Result<&'static Levels, LevelsError> {
    LOG.get().ok_or(LevelsError::NotBegun)
}

impl Levels {
    fn new(begun: &str, reload: Reload) -> Self {
        let state = State {
            levels: begun.to_owned(),
            changes: 0,
        };
        Self {
            reload,
            begun: begun.to_owned(),
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says the levels in force, and those of the start.
    pub fn describe(&self) -> String {
        let state = self.state();
        format!("levels: {}\nlevels of the start: {}\n", state.levels, self.begun)
    }

    /// Changes the levels for this time. [`DEFAULT`] brings back those of the start. Must be called in a runtime.
    pub fn change(&'static self, levels: &str, time: Duration) -> Result<(), LevelsError> {
        if levels == DEFAULT {
            let mut state = self.state();
            self.put(&mut state, &self.begun)?;
            drop(state);
            info!(levels = self.begun, "the log has the levels of the start again");
            return Ok(());
        }
        check(levels)?;
        let mut state = self.state();
        self.put(&mut state, levels)?;
        let change = state.changes;
        drop(state);
        info!(
            levels,
            seconds = time.as_secs(),
            "the log's levels were changed by a command"
        );
        tokio::spawn(async move {
            sleep(time).await;
            self.end(change);
        });
        Ok(())
    }

    /// Brings back the levels of the start, unless others were set since.
    fn end(&self, change: u64) {
        let mut state = self.state();
        if state.changes != change {
            return;
        }
        let ended = self.put(&mut state, &self.begun);
        drop(state);
        match ended {
            Ok(()) => info!(levels = self.begun, "the log has the levels of the start again"),
            Err(error) => error!(%error, "the log keeps its levels"),
        }
    }

    fn put(&self, state: &mut State, levels: &str) -> Result<(), LevelsError> {
        let filter = EnvFilter::try_new(levels).map_err(LevelsError::Parse)?;
        (self.reload)(filter).map_err(LevelsError::Reload)?;
        levels.clone_into(&mut state.levels);
        state.changes += 1;
        Ok(())
    }
}

/// Refuses levels that name parts alone. The log would be silent about all other parts, and a level with a typing error
/// is the name of a part.
fn check(levels: &str) -> Result<(), LevelsError> {
    let mut parts = levels.split(',');
    if parts.any(|part| part.trim().parse::<Level>().is_ok()) {
        Ok(())
    } else {
        Err(LevelsError::NoLevelForAll)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use super::*;

    const TIME: Duration = Duration::from_mins(10);
    /// A second less than [`TIME`]
    const ALMOST: Duration = Duration::from_secs(599);

    type Seen = Arc<Mutex<Vec<String>>>;

    fn levels() -> (&'static Levels, Seen) {
        let seen = Seen::default();
        let sees = seen.clone();
        let reload = move |filter: EnvFilter| {
            sees.lock().unwrap().push(filter.to_string());
            Ok::<(), reload::Error>(())
        };
        (Box::leak(Box::new(Levels::new("info", Box::new(reload)))), seen)
    }

    #[tokio::test(start_paused = true)]
    async fn the_levels_of_the_start_come_back() {
        let (levels, seen) = levels();
        levels.change("debug", TIME).unwrap();
        assert!(levels.describe().starts_with("levels: debug\n"));
        sleep(ALMOST).await;
        assert_eq!(*seen.lock().unwrap(), ["debug"]);
        sleep(Duration::from_secs(2)).await;
        assert_eq!(*seen.lock().unwrap(), ["debug", "info"]);
        assert!(levels.describe().starts_with("levels: info\n"));
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_change_of_levels_says_its_time() {
        let (levels, seen) = levels();
        levels.change("debug", TIME).unwrap();
        sleep(TIME / 2).await;
        levels.change("trace", TIME).unwrap();
        sleep(ALMOST).await;
        assert_eq!(*seen.lock().unwrap(), ["debug", "trace"]);
        levels.change(DEFAULT, TIME).unwrap();
        sleep(TIME).await;
        assert_eq!(*seen.lock().unwrap(), ["debug", "trace", "info"]);
    }

    #[tokio::test]
    async fn levels_that_would_silence_the_log_are_refused() {
        let (levels, seen) = levels();
        for refused in ["", "debgu", "transitd::cni=debug", "default,transitd=debug"] {
            let error = levels.change(refused, TIME).unwrap_err();
            assert!(matches!(error, LevelsError::NoLevelForAll), "{refused}: {error}");
        }
        let error = levels.change("info,transitd=debgu", TIME).unwrap_err();
        assert!(matches!(error, LevelsError::Parse(_)), "{error}");
        assert!(seen.lock().unwrap().is_empty());
        levels.change("transitd::cni=debug,info", TIME).unwrap();
        assert_eq!(seen.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_change_reaches_a_log_that_runs() {
        let log = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new("info"))
            .with_filter_reloading();
        let handle = log.reload_handle();
        let reload = Box::new(move |filter: EnvFilter| handle.reload(filter));
        let levels: &'static Levels = Box::leak(Box::new(Levels::new("info", reload)));
        let _log = tracing::subscriber::set_default(log.finish());
        assert!(!tracing::enabled!(Level::DEBUG));
        levels.change("debug", TIME).unwrap();
        assert!(tracing::enabled!(Level::DEBUG));
        levels.change(DEFAULT, TIME).unwrap();
        assert!(!tracing::enabled!(Level::DEBUG));
    }
}

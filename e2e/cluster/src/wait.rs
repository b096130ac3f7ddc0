//! Waits for what comes sooner or later. An error says what was waited for, and how long.

use std::{
    io::{self, ErrorKind},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// Repeats a call that a signal or work for the task interrupted: the kernel doesn't resume calls of sockets that have
/// timeouts.
pub fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Looks until something is there, with a pause after each look, and returns it. An error of a look ends the wait.
pub fn wait_until<T>(
    what: &str,
    patience: Duration,
    pause: Duration,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let end = Instant::now() + patience;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() > end {
            bail!("waited {} s for {what}", patience.as_secs_f32());
        }
        thread::sleep(pause);
    }
}

/// Asks until there is an answer, with a pause after each question. An error of a question counts as no answer yet. An
/// error of `go_on` ends the wait at once. The error has that of the last question, too.
pub fn wait_for_answer<T>(
    what: &str,
    patience: Duration,
    pause: Duration,
    mut go_on: impl FnMut() -> Result<()>,
    mut ask: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let mut last = None;
    let waited = wait_until(what, patience, pause, || {
        go_on()?;
        let (answer, error) = match ask() {
            Ok(answer) => (answer, None),
            Err(error) => (None, Some(error)),
        };
        last = error;
        Ok(answer)
    });
    waited.map_err(|waited| match last {
        Some(error) => error.context(waited),
        None => waited,
    })
}

/// Asks until the answer is yes, with a pause after each. An error counts as a no; the last error is returned when the
/// patience ends.
pub fn wait_for(
    what: &str,
    patience: Duration,
    pause: Duration,
    mut ask: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let yes = || Ok(ask()?.then_some(()));
    wait_for_answer(what, patience, pause, || Ok(()), yes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use anyhow::bail;

    use super::{wait_for, wait_until};

    const PATIENCE: Duration = Duration::from_millis(20);
    const PAUSE: Duration = Duration::from_millis(1);

    #[test]
    fn the_first_thing_that_is_there_is_returned() {
        let mut looks = 0..;
        let found = wait_until("a third look", Duration::from_mins(1), PAUSE, || {
            Ok(looks.next().filter(|look| *look == 2))
        });
        assert_eq!(found.unwrap(), 2);
    }

    #[test]
    fn an_error_ends_a_look_and_is_a_no_of_an_answer() {
        let mut times = 0;
        let found = wait_until::<()>("nothing", Duration::from_mins(1), PAUSE, || {
            times += 1;
            bail!("broken")
        });
        assert_eq!((found.unwrap_err().to_string().as_str(), times), ("broken", 1));
        let mut times = 0;
        let waited = wait_for("a second answer", Duration::from_mins(1), PAUSE, || {
            times += 1;
            if times < 2 {
                bail!("broken");
            }
            Ok(true)
        });
        assert!(waited.is_ok());
    }

    #[test]
    fn an_error_says_what_was_waited_for_and_how_long() {
        let no = wait_for("a yes", PATIENCE, PAUSE, || Ok(false)).unwrap_err();
        assert_eq!(format!("{no:#}"), "waited 0.02 s for a yes");
        let broken = wait_for("a yes", PATIENCE, PAUSE, || bail!("broken")).unwrap_err();
        assert_eq!(format!("{broken:#}"), "waited 0.02 s for a yes: broken");
    }
}

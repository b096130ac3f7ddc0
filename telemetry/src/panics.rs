//! Handles panics: the process logs the panic and ends.

use std::panic;
use std::process;

use tracing::error;

/// Makes a panic of any thread or task end the process, whether the build unwinds or not: nothing else would notice
/// that a task is gone. The log must be set up before.
pub fn abort_on_panic() {
    let said_by_std = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let location = info.location().map(ToString::to_string).unwrap_or_default();
        let panic = info.payload_as_str().unwrap_or("a panic without a text");
        error!(panic, location, "a panic ends this process");
        // With a backtrace, if the environment asks for one.
        said_by_std(info);
        process::abort();
    }));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use super::*;

    /// The variable in the environment of the process that panics.
    const PANICS: &str = "THUBAN_TEST_PANICS";
    const SIGABRT: i32 = 6;

    #[test]
    fn a_panic_of_a_task_is_logged_and_ends_the_process() {
        if std::env::var_os(PANICS).is_some() {
            tracing_subscriber::fmt().with_ansi(false).init();
            abort_on_panic();
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let _ = runtime.block_on(runtime.spawn(async { panic!("on purpose") }));
            return;
        }
        let test = "panics::tests::a_panic_of_a_task_is_logged_and_ends_the_process";
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(PANICS, "1")
            .output()
            .unwrap();
        assert_eq!(child.status.signal(), Some(SIGABRT), "{child:?}");
        let log = String::from_utf8(child.stdout).unwrap();
        assert!(
            log.contains("ERROR") && log.contains("panic=\"on purpose\""),
            "{log}"
        );
        assert!(log.contains("telemetry/src/panics.rs:"), "{log}");
    }
}

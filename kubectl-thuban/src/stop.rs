//! The end of a command by its user. Who waits for it has the time to clean up.

use std::future::pending;

use tokio::signal::unix::{SignalKind, signal};

/// Waits for Ctrl-C, for the signal that ends processes, or for the end of the terminal.
pub async fn stopped() {
    let (Ok(mut interrupt), Ok(mut end), Ok(mut hangup)) = (
        signal(SignalKind::interrupt()),
        signal(SignalKind::terminate()),
        signal(SignalKind::hangup()),
    ) else {
        return pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = end.recv() => {}
        _ = hangup.recv() => {}
    }
}

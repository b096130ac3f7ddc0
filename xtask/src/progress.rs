//! Prints every 20 seconds that long work goes on.

use std::{
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

const INTERVAL: Duration = Duration::from_secs(20);

/// Does `work`, and prints a line of elapsed time every 20 seconds.
pub fn watched<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let (done, waiting) = channel::<()>();
    let begin = Instant::now();
    thread::scope(|scope| {
        scope.spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = waiting.recv_timeout(INTERVAL) {
                let elapsed = begin.elapsed().as_secs();
                println!("    {what}: {} min {:02} s", elapsed / 60, elapsed % 60);
            }
        });
        let made = work();
        drop(done);
        made
    })
}

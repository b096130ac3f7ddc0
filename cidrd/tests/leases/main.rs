//! Random schedules of cidrds and holders over one API server, with a clock that the test owns: requests are slow, get
//! lost before or after they took effect, and cidrds end between any two writes.
//!
//! After each step: an address has one holder, a holder has one address, and nobody gets an address before its
//! quarantine is over. `THUBAN_SCHEDULES=N` runs N schedules (100).

// Helpers of tests: a failure that they find ends the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod directed;
mod holder;
mod server;
mod tls;
mod world;

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use holder::Holder;
use server::Server;
use world::World;

/// How long a schedule is, by its own clock.
const LENGTH: Duration = Duration::from_hours(1);
/// Addresses of the pool.
const ADDRESSES: &str = "203.0.113.4/30";
/// More holders than addresses.
const HOLDERS: u64 = 6;
const SERVERS: usize = 2;

fn schedules() -> u64 {
    let text = std::env::var("THUBAN_SCHEDULES").unwrap_or_else(|_| "100".to_owned());
    text.parse().expect("THUBAN_SCHEDULES is a number")
}

/// Runs the schedule of a seed. Returns what happened in it.
fn run(seed: u64) -> world::Seen {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = World::new(seed);
        let end = Instant::now() + LENGTH;
        let servers: Vec<_> = (0..SERVERS).map(|_| Server::new(&world)).collect();
        let mut tasks = JoinSet::new();
        for server in &servers {
            tasks.spawn(server.clone().live());
        }
        for number in 0..HOLDERS {
            // Two leaders now and then.
            for _ in 0..=u8::from(world.chance(3)) {
                tasks.spawn(Holder::new(&world, &servers, number).live());
            }
        }
        tokio::select! {
            () = sleep_until(end) => {}
            ended = tasks.join_next() => {
                let ended = ended.expect("there are tasks");
                panic!("a task ended: {ended:?}");
            }
        }
        world.seen()
    })
}

#[test]
fn an_address_has_one_holder_and_a_holder_one_address() {
    let mut seen = world::Seen::default();
    for seed in 0..schedules() {
        let ran = std::panic::catch_unwind(|| run(seed));
        match ran {
            Ok(ran) => seen.add(&ran),
            Err(panic) => {
                eprintln!("seed {seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    eprintln!("{seen:?}");
    assert!(
        seen.is_whole(),
        "schedules that lack something prove little: {seen:?}"
    );
}

//! The relay with a played thuban-observe, over TLS.

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use thuban_proto::observe::{Flow, FlowMode, Lost};
use thuban_testkit::observe::Observer;
use tokio::runtime::Runtime;

use super::queue::Queue;
use super::relay::{self, Droplet, Pace};
use super::session::{MAX_FLOWS, MAX_ON_THE_WAY};
use crate::dial::lease::Locator;
use crate::metrics::FlowMetrics;

/// Long enough for many reports at the tests' pace.
const A_WHILE: Duration = Duration::from_millis(200);
static NEXT: AtomicU32 = AtomicU32::new(0);

/// A relay that runs, and who listens.
struct World {
    observer: Observer,
    queue: Arc<Queue>,
    folder: PathBuf,
    /// Runs the relay until it is dropped.
    _runtime: Runtime,
}

fn pace() -> Pace {
    Pace {
        report: Duration::from_millis(5),
        quiet: Duration::from_millis(50),
        silence: Duration::from_mins(1),
        steady: Duration::ZERO,
        retry: Duration::from_millis(5)..=Duration::from_millis(20),
    }
}

impl World {
    /// Starts a relay after `prepare`.
    fn new(pace: Pace, prepare: impl FnOnce(&Observer, &Queue)) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("thuban-flows-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("token"), "first\n").unwrap();
        let observer = Observer::start(TcpListener::bind("127.0.0.1:0").unwrap(), &folder);
        let queue = Arc::new(Queue::new(FlowMetrics::default()));
        prepare(&observer, &queue);
        let locator = Locator::Fixed {
            address: observer.address.clone(),
            bundle: observer.ca.clone(),
        };
        let droplet = Droplet {
            name: "node-a".into(),
            mode: FlowMode::Drops,
            token_file: folder.join("token"),
        };
        let runtime = Runtime::new().unwrap();
        let relayed = Arc::clone(&queue);
        runtime.spawn(async move { relay::run(locator, &droplet, &relayed, &pace).await });
        Self {
            observer,
            queue,
            folder,
            _runtime: runtime,
        }
    }

    fn wait_for_flows(&self, count: usize) {
        self.observer.wait_for("flows", |heard| {
            heard
                .reports
                .iter()
                .map(|report| report.flows.len())
                .sum::<usize>()
                >= count
        });
    }

    fn packets(&self) -> Vec<u64> {
        self.observer.flows().iter().map(|flow| flow.packets).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Returns flows that are told apart by their packets.
fn flows(packets: std::ops::Range<u64>) -> Vec<Flow> {
    let flow = |packets| Flow {
        packets,
        ..Flow::default()
    };
    packets.map(flow).collect()
}

fn lost(budget: u64, stream: u64) -> Lost {
    Lost {
        budget,
        stream,
        ..Lost::default()
    }
}

#[test]
fn events_are_told_in_their_order_by_a_named_droplet() {
    let count = 2 * MAX_FLOWS as u64 + 7;
    let world = World::new(pace(), |_, queue| queue.add(flows(0..count)));
    world.wait_for_flows(count as usize);
    world.queue.add(flows(count..count + 3));
    world.wait_for_flows(count as usize + 3);
    assert_eq!(world.packets(), (0..count + 3).collect::<Vec<_>>());
    let heard = world.observer.heard.lock().unwrap();
    let names: Vec<_> = heard.reports.iter().map(|report| &report.droplet).collect();
    assert_eq!(names[0], "node-a");
    assert!(names[1..].iter().all(|name| name.is_empty()), "{names:?}");
    for report in &heard.reports {
        assert!(report.flows.len() <= MAX_FLOWS);
        assert_eq!((report.mode(), report.lost), (FlowMode::Drops, None));
    }
    assert_eq!(heard.tokens, ["Bearer first"]);
    assert_eq!(world.queue.metrics.connected.get(), 1);
}

#[test]
fn a_droplet_without_flows_reports_once_in_a_while() {
    let world = World::new(pace(), |_, _| {});
    // More than may be on the way.
    world
        .observer
        .wait_for("reports", |heard| heard.reports.len() > MAX_ON_THE_WAY + 2);
    assert!(world.observer.flows().is_empty());
}

#[test]
fn eight_reports_are_on_the_way_and_the_rest_waits() {
    let count = 10 * MAX_FLOWS;
    let world = World::new(pace(), |observer, queue| {
        observer.be_silent(true);
        queue.add(flows(0..count as u64));
    });
    let come = |world: &World| world.observer.heard.lock().unwrap().reports.len();
    world
        .observer
        .wait_for("eight reports", |heard| heard.reports.len() >= MAX_ON_THE_WAY);
    sleep(A_WHILE);
    assert_eq!(come(&world), MAX_ON_THE_WAY);
    world.observer.be_silent(false);
    world.wait_for_flows(count);
    assert_eq!(world.packets(), (0..count as u64).collect::<Vec<_>>());
    assert_eq!(world.queue.metrics.lost("stream"), 0);
}

#[test]
fn a_report_lost_with_its_stream_is_counted_not_sent_again() {
    let world = World::new(pace(), |observer, queue| {
        observer.be_silent(true);
        queue.add(flows(0..3));
        queue.lose(lost(5, 0));
    });
    world.wait_for_flows(3);
    world.observer.hang_up();
    world
        .observer
        .wait_for("another stream", |heard| heard.tokens.len() == 2);
    world.observer.be_silent(false);
    world.queue.add(flows(3..4));
    world.wait_for_flows(4);
    assert_eq!(world.packets(), [0, 1, 2, 3]);
    world.observer.wait_for("losses", |heard| {
        heard
            .reports
            .iter()
            .filter(|report| report.lost.is_some())
            .count()
            == 2
    });
    // What a report told of losses comes again, because nobody has acknowledged it.
    assert_eq!(world.observer.lost(), [lost(5, 0), lost(5, 3)]);
    assert_eq!(world.queue.metrics.lost("stream"), 3);
    assert_eq!(world.queue.metrics.lost("budget"), 5);
}

#[test]
fn losses_are_told_once() {
    let world = World::new(pace(), |_, queue| queue.lose(lost(5, 2)));
    world.observer.wait_for("losses", |heard| {
        heard.reports.iter().any(|report| report.lost.is_some())
    });
    sleep(A_WHILE);
    world.queue.lose(lost(1, 0));
    world.observer.wait_for("more losses", |heard| {
        heard
            .reports
            .iter()
            .filter(|report| report.lost.is_some())
            .count()
            >= 2
    });
    sleep(A_WHILE);
    assert_eq!(world.observer.lost(), [lost(5, 2), lost(1, 0)]);
}

#[test]
fn a_stream_whose_reports_nobody_acknowledges_is_left() {
    let silent = Pace {
        silence: A_WHILE,
        ..pace()
    };
    let world = World::new(silent, |observer, queue| {
        observer.be_silent(true);
        queue.add(flows(0..3));
    });
    world
        .observer
        .wait_for("three streams", |heard| heard.tokens.len() >= 3);
    assert_eq!(world.packets(), [0, 1, 2]);
    assert_eq!(world.queue.metrics.lost("stream"), 3);
}

#[test]
fn streams_that_end_soon_are_dialled_ever_later() {
    let hasty = Pace {
        steady: Duration::from_mins(1),
        retry: Duration::from_millis(5)..=Duration::from_mins(5),
        ..pace()
    };
    let world = World::new(hasty, |_, _| {});
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) {
        sleep(Duration::from_millis(20));
        world.observer.hang_up();
    }
    // Each pause is a quarter of all the time at least. Pauses that stay short make more than 40 streams.
    let streams = world.observer.heard.lock().unwrap().tokens.len();
    assert!((2..=20).contains(&streams), "{streams}");
}

#[test]
fn each_attempt_reads_the_token_again() {
    let world = World::new(pace(), |_, _| {});
    world
        .observer
        .wait_for("a stream", |heard| heard.tokens.len() == 1);
    std::fs::write(world.folder.join("token"), "second").unwrap();
    world.observer.hang_up();
    world
        .observer
        .wait_for("another stream", |heard| heard.tokens.len() == 2);
    let heard = world.observer.heard.lock().unwrap();
    assert_eq!(heard.tokens, ["Bearer first", "Bearer second"]);
}

#[test]
fn without_thuban_observe_nothing_waits_or_grows() {
    let world = World::new(pace(), |observer, queue| {
        // Nobody can verify it now.
        std::fs::write(&observer.ca, "").unwrap();
        queue.add(flows(0..9000));
    });
    sleep(A_WHILE);
    assert_eq!(world.observer.heard.lock().unwrap().tokens.len(), 0);
    assert_eq!(world.queue.metrics.lost("stream"), 9000 - 8192);
    assert_eq!(world.queue.metrics.connected.get(), 0);
}

//! Samples of CPU and memory over the whole run: of the operator, the API server, etcd and the bench itself.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::process::usage;

const EVERY: Duration = Duration::from_millis(500);

/// A sample at one time.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Seconds since the start of the run.
    pub seconds: f64,
    /// Cores that the operator kept busy since the last point.
    pub operator_cores: f64,
    pub operator_rss_mib: f64,
    /// Cores of API server, etcd and the bench's own process.
    pub server_cores: f64,
    pub etcd_cores: f64,
    pub bench_cores: f64,
}

#[derive(Debug, Default)]
struct Shared {
    operator: AtomicU32,
    stop: AtomicBool,
    points: Mutex<Vec<Point>>,
}

#[derive(Debug)]
pub struct Sampler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Starts the sampler. `server` and `etcd` are processes.
    pub fn start(server: Vec<i32>, etcd: Vec<i32>) -> Self {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let thread = thread::spawn(move || sample(&own, &server, &etcd));
        Self {
            shared,
            thread: Some(thread),
        }
    }

    /// Sets the process that is the operator now.
    pub fn operator(&self, process: u32) {
        self.shared.operator.store(process, Ordering::Relaxed);
    }

    pub fn points(&self) -> Vec<Point> {
        let points = self.shared.points.lock();
        points.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn sample(shared: &Shared, server: &[i32], etcd: &[i32]) {
    let start = Instant::now();
    let cpu = |processes: &[i32]| {
        let each = processes.iter().map(|process| {
            u32::try_from(*process)
                .ok()
                .and_then(|process| usage(process).ok())
                .map_or(0.0, |usage| usage.cpu_seconds)
        });
        each.sum::<f64>()
    };
    let own = [i32::try_from(std::process::id()).unwrap_or_default()];
    let mut last: Option<(Instant, u32, [f64; 4])> = None;
    while !shared.stop.load(Ordering::Relaxed) {
        thread::sleep(EVERY);
        let process = shared.operator.load(Ordering::Relaxed);
        let operator = usage(process);
        if process != 0 && operator.is_err() && shared.operator.load(Ordering::Relaxed) == process {
            super::OPERATOR_GONE.store(true, Ordering::Relaxed);
        }
        let operator = operator.unwrap_or_default();
        let now = [operator.cpu_seconds, cpu(server), cpu(etcd), cpu(&own)];
        let at = Instant::now();
        if let Some((then, known, before)) = last
            && known == process
        {
            let passed = at.duration_since(then).as_secs_f64();
            let cores = |index: usize| ((now[index] - before[index]) / passed).max(0.0);
            let point = Point {
                seconds: start.elapsed().as_secs_f64(),
                operator_cores: cores(0),
                operator_rss_mib: operator.rss_mib,
                server_cores: cores(1),
                etcd_cores: cores(2),
                bench_cores: cores(3),
            };
            let points = shared.points.lock();
            points.unwrap_or_else(PoisonError::into_inner).push(point);
        }
        last = Some((at, process, now));
    }
}

//! The times of each pod's steps, by the bench's own clock. A pod is known by its number, which is in its name.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// The steps of a pod. Each happens once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Step {
    /// The time just before the request that creates the pod, bound.
    Sent,
    /// The request is answered.
    Answered,
    /// Its Endpoint is Provisioned, as the bench's watch shows it.
    Provisioned,
    /// Its droplet has the row that lets ADD go on.
    Ready,
    /// The time just before the request that deletes the pod.
    Deleted,
    /// Its Endpoint is gone, as the bench's watch shows it.
    Gone,
}

const STEPS: usize = Step::Gone as usize + 1;

/// The place of a pod: its index among the droplets and among the networks.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub droplet: usize,
    pub network: usize,
}

#[derive(Debug, Default)]
struct Pod {
    place: OnceLock<Place>,
    /// The time of each step in microseconds since the start, plus 1; 0 is never.
    steps: [AtomicU64; STEPS],
}

/// All pods of a run.
#[derive(Debug)]
pub struct Track {
    start: Instant,
    pods: Vec<Pod>,
    next: AtomicU64,
    counts: [AtomicU64; STEPS],
}

/// Returns the name of a pod. It is short, because it is part of many names.
pub fn pod_name(number: usize) -> String {
    format!("p{number}")
}

/// Returns the number in a pod's name.
pub fn pod_number(name: &str) -> Option<usize> {
    name.strip_prefix('p')?.parse().ok()
}

impl Track {
    pub fn new(capacity: usize) -> Self {
        Self {
            start: Instant::now(),
            pods: (0..capacity).map(|_| Pod::default()).collect(),
            next: AtomicU64::new(0),
            counts: Default::default(),
        }
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_micros() as u64 + 1
    }

    /// Returns the seconds since the start.
    pub fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// Adds a pod; returns its number.
    pub fn add(&self, place: impl FnOnce(usize) -> Place) -> Result<usize> {
        let number = self.next.fetch_add(1, Ordering::Relaxed) as usize;
        let Some(pod) = self.pods.get(number) else {
            bail!("more than {} pods", self.pods.len());
        };
        pod.place.get_or_init(|| place(number));
        Ok(number)
    }

    pub fn place(&self, number: usize) -> Option<Place> {
        self.pods.get(number)?.place.get().copied()
    }

    /// Notes the time of a step when it happens first.
    pub fn note(&self, number: usize, step: Step) {
        let Some(pod) = self.pods.get(number) else { return };
        let noted =
            pod.steps[step as usize].compare_exchange(0, self.now(), Ordering::Relaxed, Ordering::Relaxed);
        if noted.is_ok() {
            self.counts[step as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn has(&self, number: usize, step: Step) -> bool {
        let pod = self.pods.get(number);
        pod.is_some_and(|pod| pod.steps[step as usize].load(Ordering::Relaxed) > 0)
    }

    /// Returns how many pods have reached a step.
    pub fn count(&self, step: Step) -> u64 {
        self.counts[step as usize].load(Ordering::Relaxed)
    }

    /// Returns how many pods were added. It is the next pod's number.
    pub fn added(&self) -> usize {
        self.next.load(Ordering::Relaxed) as usize
    }

    /// Returns the seconds from the start to a step of a pod, if the pod reached it.
    pub fn at(&self, number: usize, step: Step) -> Option<f64> {
        let micros = self.pods.get(number)?.steps[step as usize].load(Ordering::Relaxed);
        (micros > 0).then(|| Duration::from_micros(micros - 1).as_secs_f64())
    }

    /// Returns the milliseconds between two steps, of the pods that reached both.
    pub fn between(&self, pods: impl Iterator<Item = usize>, from: Step, to: Step) -> Vec<f64> {
        let took = |number| Some((self.at(number, to)? - self.at(number, from)?).max(0.0) * 1000.0);
        pods.filter_map(took).collect()
    }

    /// Returns the pods that reached one step and not the other.
    pub fn left(&self, from: Step, to: Step) -> Vec<usize> {
        (0..self.added())
            .filter(|number| self.has(*number, from) && !self.has(*number, to))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Place, Step, Track, pod_name, pod_number};

    #[test]
    fn a_step_counts_once_and_times_are_between_steps() {
        let track = Track::new(1);
        let place = |_| Place {
            droplet: 3,
            network: 4,
        };
        let number = track.add(place).unwrap();
        assert!(track.add(place).is_err(), "there is room for one");
        track.note(number, Step::Sent);
        track.note(number, Step::Provisioned);
        track.note(number, Step::Provisioned);
        assert_eq!(track.count(Step::Provisioned), 1);
        assert_eq!(track.between(0..1, Step::Sent, Step::Provisioned).len(), 1);
        assert!(track.between(0..1, Step::Sent, Step::Gone).is_empty());
        assert_eq!(track.left(Step::Sent, Step::Gone), [0]);
        assert_eq!(pod_number(&pod_name(17)), Some(17));
        assert_eq!(pod_number("transitd-1"), None);
    }
}

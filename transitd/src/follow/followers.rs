//! The daemon's side: one task reads a ring buffer as long as somebody follows, and gives each follower what it wants.
//!
//! Invariant: the task waits for no follower. Records that a follower has no room for are counted, and the follower is
//! told their number. Without followers nothing is open, and programs write nothing.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thiserror::Error;
use thuban_proto::inspect::FollowReply;
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tracing::warn;

use super::{LEASE, Source, now};
use crate::cni::error::chain;
use crate::dataplane::counters::{CounterError, Counters};
use crate::dataplane::ring::{Ring, RingError, decode};
use crate::dataplane::tables::TableError;

/// The most followers of a ring buffer at a time.
pub const MAX_FOLLOWERS: usize = 8;
/// The most records that wait for a follower.
const QUEUE: usize = 4096;
/// The time between renewals of the lease.
const RENEWAL: Duration = Duration::from_secs(1);
/// The most records that are given in a row.
const BATCH: usize = 256;
/// The time between two full batches. The rest of the daemon needs the CPUs too, and what does not fit into the ring
/// buffer meanwhile is counted.
const PAUSE: Duration = Duration::from_millis(1);

/// What a follower gets. The first reply is empty: records come from then on.
pub type Replies = ReceiverStream<Result<FollowReply, Status>>;

#[derive(Debug, Error)]
pub enum FollowError {
    #[error("{} `transitd {}` run on this node, which is the most at a time: end one of them first", MAX_FOLLOWERS, .0)]
    TooMany(&'static str),
    #[error("transitd is ending")]
    Ending,
    #[error(transparent)]
    Tables(#[from] TableError),
    #[error(transparent)]
    Counters(#[from] CounterError),
    #[error(transparent)]
    Ring(#[from] RingError),
}

impl From<&FollowError> for Status {
    fn from(error: &FollowError) -> Self {
        let message = chain(error);
        match error {
            FollowError::TooMany(_) => Self::resource_exhausted(message),
            FollowError::Ending => Self::unavailable(message),
            FollowError::Tables(_) | FollowError::Counters(_) | FollowError::Ring(_) => {
                Self::internal(message)
            }
        }
    }
}

/// Those that follow a ring buffer.
pub struct Followers<S: Source> {
    maps: PathBuf,
    shared: Arc<Mutex<Shared<S>>>,
}

impl<S: Source> fmt::Debug for Followers<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Followers").field(&S::RING).finish()
    }
}

impl<S: Source> Followers<S> {
    /// `maps`: the directory of pinned maps.
    pub fn new(maps: PathBuf) -> Self {
        Self {
            maps,
            shared: Arc::new(Mutex::new(Shared::new())),
        }
    }

    /// Begins to follow, until the replies are dropped. Must be called within the runtime.
    pub fn follow(&self, wanted: S::Wanted) -> Result<Replies, FollowError> {
        let mut shared = lock(&self.shared);
        shared.check_room()?;
        if shared.source.is_none() {
            let records = Records::open::<S>(&self.maps)?;
            shared.source = Some(S::open(&self.maps)?);
            tokio::spawn(read(Arc::clone(&self.shared), records));
        }
        shared.add(wanted)
    }

    /// Ends all followers: calls in flight keep the daemon from ending. Nobody can follow any more.
    pub fn close(&self) {
        let mut shared = lock(&self.shared);
        shared.is_closed = true;
        shared.end();
    }
}

fn lock<S: Source>(shared: &Mutex<Shared<S>>) -> MutexGuard<'_, Shared<S>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The open ring buffer, and the counter of what it had no room for.
struct Records {
    ring: Ring,
    counters: Counters,
    lost: u64,
}

impl Records {
    /// Opens the pinned ring buffer, and empties it of records that an earlier reader left.
    fn open<S: Source>(maps: &Path) -> Result<Self, FollowError> {
        let mut ring = Ring::open(maps, S::RING)?;
        ring.clear();
        let counters = Counters::open(maps)?;
        Ok(Self {
            ring,
            lost: counters.get(S::LOST)?,
            counters,
        })
    }

    /// Waits for records, and gives them to the followers.
    async fn give<S: Source>(&mut self, shared: &Mutex<Shared<S>>) -> Result<(), FollowError> {
        let is_full = self.ring.read(BATCH, |record| lock(shared).give(record)).await?;
        if is_full {
            sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Returns the number of records without room since the last call.
    fn take_lost<S: Source>(&mut self) -> Result<u64, FollowError> {
        let lost = self.counters.get(S::LOST)?;
        let before = std::mem::replace(&mut self.lost, lost);
        Ok(lost.saturating_sub(before))
    }
}

/// Reads the ring buffer until nobody follows.
async fn read<S: Source>(shared: Arc<Mutex<Shared<S>>>, mut records: Records) {
    let mut renewal = interval_at(Instant::now() + RENEWAL, RENEWAL);
    renewal.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let done = tokio::select! {
            given = records.give(&shared) => given.map(|()| true),
            _ = renewal.tick() => records.take_lost::<S>().and_then(|lost| lock(&shared).renew(lost)),
        };
        match done {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return lock(&shared).fail(&error),
        }
    }
}

/// What the task and the calls share.
struct Shared<S: Source> {
    /// There is one as long as the task reads.
    source: Option<S>,
    followers: Vec<Follower<S::Wanted>>,
    is_closed: bool,
}

impl<S: Source> Shared<S> {
    const fn new() -> Self {
        Self {
            source: None,
            followers: Vec::new(),
            is_closed: false,
        }
    }

    fn forget_gone(&mut self) {
        self.followers.retain(|follower| !follower.replies.is_closed());
    }

    fn check_room(&mut self) -> Result<(), FollowError> {
        self.forget_gone();
        if self.is_closed {
            return Err(FollowError::Ending);
        }
        if self.followers.len() >= MAX_FOLLOWERS {
            return Err(FollowError::TooMany(S::VERB));
        }
        Ok(())
    }

    fn add(&mut self, wanted: S::Wanted) -> Result<Replies, FollowError> {
        let (replies, receiver) = mpsc::channel(QUEUE);
        let mut follower = Follower {
            wanted,
            replies,
            lost: 0,
            lost_in_ring: 0,
        };
        follower.tell(Vec::new());
        self.followers.push(follower);
        if let Err(error) = self.lease() {
            self.followers.pop();
            return Err(error.into());
        }
        Ok(ReceiverStream::new(receiver))
    }

    /// Has programs write what somebody wants.
    fn lease(&mut self) -> Result<(), TableError> {
        let Some(source) = &mut self.source else {
            return Ok(());
        };
        let followers = self.followers.iter();
        let wanted: Vec<&S::Wanted> = followers.map(|follower| &follower.wanted).collect();
        source.lease(&wanted, now() + LEASE.as_nanos() as u64)
    }

    /// Gives a record to everybody who wants it.
    fn give(&mut self, bytes: &[u8]) {
        let Some(record) = decode::<S::Record>(bytes) else {
            return;
        };
        for follower in &mut self.followers {
            if S::is_wanted(&follower.wanted, &record) {
                follower.tell(bytes.to_vec());
            }
        }
    }

    /// Renews the lease, and tells what was lost. Returns whether somebody still follows; without followers all is
    /// closed.
    fn renew(&mut self, lost_in_ring: u64) -> Result<bool, FollowError> {
        self.forget_gone();
        if self.followers.is_empty() {
            self.end();
            return Ok(false);
        }
        self.lease()?;
        for follower in &mut self.followers {
            follower.lost_in_ring += lost_in_ring;
            if follower.has_lost() {
                follower.tell(Vec::new());
            }
        }
        Ok(true)
    }

    /// Ends all followers for a reason.
    fn fail(&mut self, error: &FollowError) {
        warn!(
            ring = S::RING,
            error = error as &dyn std::error::Error,
            "nobody can follow any more what programs write: commands end"
        );
        for follower in &self.followers {
            // Where there is no room, the end alone has to do.
            let _ = follower.replies.try_send(Err(Status::from(error)));
        }
        self.end();
    }

    fn end(&mut self) {
        self.followers.clear();
        if let Err(error) = self.lease() {
            warn!(
                ring = S::RING,
                error = &error as &dyn std::error::Error,
                "programs go on to write what nobody reads, until the lease ends"
            );
        }
        self.source = None;
    }
}

struct Follower<W> {
    wanted: W,
    replies: mpsc::Sender<Result<FollowReply, Status>>,
    /// Records that were dropped since the last reply.
    lost: u64,
    lost_in_ring: u64,
}

impl<W> Follower<W> {
    const fn has_lost(&self) -> bool {
        self.lost != 0 || self.lost_in_ring != 0
    }

    /// Tells a record, or none, with what was lost before it.
    fn tell(&mut self, record: Vec<u8>) {
        let records = u64::from(!record.is_empty());
        let reply = FollowReply {
            record,
            lost: self.lost,
            lost_in_ring: self.lost_in_ring,
        };
        match self.replies.try_send(Ok(reply)) {
            Ok(()) => (self.lost, self.lost_in_ring) = (0, 0),
            Err(TrySendError::Full(_)) => self.lost += records,
            // It has hung up. The next renewal forgets it.
            Err(TrySendError::Closed(_)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use thuban_common::counters::Counter;
    use tokio_stream::StreamExt;

    use super::*;

    /// A ring buffer of numbers. Who follows wants one of them.
    #[derive(Default)]
    struct Played {
        leased: Vec<u64>,
        is_broken: bool,
    }

    impl Source for Played {
        type Record = u64;
        type Wanted = u64;
        const RING: &'static str = "PLAYED";
        const VERB: &'static str = "play";
        const LOST: Counter = Counter::TraceLost;

        fn open(_: &Path) -> Result<Self, TableError> {
            Ok(Self::default())
        }

        fn lease(&mut self, wanted: &[&u64], until: u64) -> Result<(), TableError> {
            assert!(until > now());
            self.leased = wanted.iter().copied().copied().collect();
            if self.is_broken {
                return Err(TableError::Full { name: Self::RING });
            }
            Ok(())
        }

        fn is_wanted(wanted: &u64, record: &u64) -> bool {
            wanted == record
        }
    }

    fn shared() -> Shared<Played> {
        Shared {
            source: Some(Played::default()),
            ..Shared::new()
        }
    }

    fn follow(shared: &mut Shared<Played>, wanted: u64) -> Result<Replies, FollowError> {
        shared.check_room()?;
        shared.add(wanted)
    }

    fn give(shared: &mut Shared<Played>, record: u64) {
        shared.give(&record.to_ne_bytes());
    }

    fn leased(shared: &Shared<Played>) -> &[u64] {
        &shared.source.as_ref().unwrap().leased
    }

    /// Returns what waits for the follower.
    fn take(replies: &mut Replies) -> Vec<FollowReply> {
        let next = || replies.next().now_or_never().flatten();
        std::iter::from_fn(next).collect::<Result<_, _>>().unwrap()
    }

    fn reply(record: Option<u64>, lost: u64, lost_in_ring: u64) -> FollowReply {
        FollowReply {
            record: record.map_or_else(Vec::new, |record| record.to_ne_bytes().to_vec()),
            lost,
            lost_in_ring,
        }
    }

    #[test]
    fn each_follower_gets_what_it_wants_alone() {
        let mut shared = shared();
        let mut first = follow(&mut shared, 1).unwrap();
        let mut second = follow(&mut shared, 2).unwrap();
        let mut also = follow(&mut shared, 2).unwrap();
        assert_eq!(leased(&shared), [1, 2, 2]);
        for record in [2, 1, 3, 2] {
            give(&mut shared, record);
        }
        shared.give(&[1]);
        let expected = |records: &[u64]| {
            let begins = reply(None, 0, 0);
            let records = records.iter().map(|record| reply(Some(*record), 0, 0));
            std::iter::once(begins).chain(records).collect::<Vec<_>>()
        };
        assert_eq!(take(&mut first), expected(&[1]));
        assert_eq!(take(&mut second), expected(&[2, 2]));
        assert_eq!(take(&mut also), expected(&[2, 2]));
    }

    #[test]
    fn a_slow_follower_hears_how_many_records_it_lost() {
        let mut shared = shared();
        let mut slow = follow(&mut shared, 1).unwrap();
        let mut other = follow(&mut shared, 2).unwrap();
        // The first reply waits too.
        for _ in 0..QUEUE + 2 {
            give(&mut shared, 1);
        }
        give(&mut shared, 2);
        assert_eq!(take(&mut other)[1..], [reply(Some(2), 0, 0)]);
        assert_eq!(take(&mut slow).len(), QUEUE);
        give(&mut shared, 1);
        give(&mut shared, 1);
        assert_eq!(take(&mut slow), [reply(Some(1), 3, 0), reply(Some(1), 0, 0)]);
    }

    #[test]
    fn losses_are_told_without_a_further_record() {
        let mut shared = shared();
        let mut slow = follow(&mut shared, 1).unwrap();
        for _ in 0..QUEUE {
            give(&mut shared, 1);
        }
        assert!(shared.renew(5).unwrap(), "there is no room to tell it");
        assert_eq!(take(&mut slow).len(), QUEUE);
        assert!(shared.renew(2).unwrap());
        assert_eq!(take(&mut slow), [reply(None, 1, 7)]);
        assert!(shared.renew(0).unwrap());
        assert_eq!(take(&mut slow), []);
    }

    #[test]
    fn the_lease_ends_with_the_last_follower() {
        let mut shared = shared();
        let first = follow(&mut shared, 1).unwrap();
        let second = follow(&mut shared, 2).unwrap();
        drop(first);
        assert!(shared.renew(0).unwrap());
        assert_eq!(leased(&shared), [2]);
        drop(second);
        assert!(!shared.renew(0).unwrap());
        assert!(shared.source.is_none());
    }

    #[test]
    fn only_so_many_follow_at_a_time() {
        let mut shared = shared();
        let mut all: Vec<Replies> = (0..8)
            .map(|wanted| follow(&mut shared, wanted).unwrap())
            .collect();
        let refused = Status::from(&follow(&mut shared, 9).unwrap_err());
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(refused.message().contains("8 `transitd play` run"), "{refused}");
        all.pop();
        assert!(follow(&mut shared, 9).is_ok(), "one has gone");
        assert_eq!(leased(&shared), [0, 1, 2, 3, 4, 5, 6, 9]);
    }

    #[test]
    fn who_can_not_be_leased_does_not_follow() {
        let mut shared = shared();
        let mut first = follow(&mut shared, 1).unwrap();
        shared.source.as_mut().unwrap().is_broken = true;
        assert!(follow(&mut shared, 2).is_err());
        let error = shared.renew(0).unwrap_err();
        shared.fail(&error);
        assert!(shared.source.is_none() && shared.followers.is_empty());
        let told: Vec<_> = std::iter::from_fn(|| first.next().now_or_never().flatten()).collect();
        assert!(told[0].is_ok());
        assert_eq!(told[1].as_ref().unwrap_err().code(), tonic::Code::Internal);
    }

    #[test]
    fn a_daemon_that_ends_ends_its_followers() {
        let followers: Followers<Played> = Followers::new(PathBuf::new());
        let mut replies = {
            let mut shared = lock(&followers.shared);
            shared.source = Some(Played::default());
            follow(&mut shared, 1).unwrap()
        };
        followers.close();
        assert_eq!(take(&mut replies), [reply(None, 0, 0)]);
        assert!(matches!(replies.next().now_or_never(), Some(None)));
        assert!(matches!(followers.follow(1), Err(FollowError::Ending)));
    }
}

//! Admits connections to the stream server, and limits how many there are at a time.
//!
//! Invariant: connections without proof of identity have a limit, in total and for each place that they come from, and
//! a time. At a place's limit the newest connection is admitted in place of the oldest: a caller that dials and proves
//! itself at once is not kept out by callers of its place that dial and keep silent. At the limit of all, any
//! connection of the fullest place goes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use ipnet::IpNet;
use thuban_client::jitter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tonic::transport::server::Connected;
use tracing::debug;

use crate::hub::Hub;
use crate::metrics;

/// Source ports that transitd leaves to pods whose connections carry their node's address. A node's own ports are
/// above, by the kernel's default.
const PORTS_OF_PODS: RangeInclusive<u16> = 10_000..=32_767;
/// How often the door looks for connections that have not proven themselves in time.
const LOOK: Duration = Duration::from_millis(500);
/// How long the door waits after an error of the listener, such as a lack of descriptors.
const LISTENER_RETRY: Duration = Duration::from_millis(100);

/// Limits on connections without proof.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most connections from one place.
    pub of_place: usize,
    pub total: usize,
    /// How long a connection may go without proof.
    pub patience: Duration,
    /// The most tokens that the API server is asked about at a time; one for each place.
    pub reviews: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            of_place: 16,
            // All droplets of a large cluster dial a new leader at once, and wait until their tokens are reviewed.
            total: 8192,
            patience: Duration::from_mins(1),
            reviews: 32,
        }
    }
}

/// A place that connections come from. One place can use up its own limit without harm to others. A place is an
/// address, and whether the port is one that pods have behind their node's address.
type Place = (IpAddr, bool);

struct Held {
    place: Place,
    /// The time since which the connection waits; none while it serves a droplet.
    waits_since: Option<Instant>,
    /// The connection ends when this is dropped.
    _hold: oneshot::Sender<()>,
}

struct Waiting {
    ids: BTreeSet<u64>,
    review: Arc<Semaphore>,
}

#[derive(Default)]
struct State {
    next_id: u64,
    held: BTreeMap<u64, Held>,
    /// Connections without proof, oldest first.
    waiting: HashMap<Place, Waiting>,
    waiting_count: usize,
    /// The connection that serves each droplet.
    serving: HashMap<String, u64>,
}

impl State {
    fn wait(&mut self, id: u64, place: Place) {
        let waiting = self.waiting.entry(place).or_insert_with(|| Waiting {
            ids: BTreeSet::new(),
            review: Arc::new(Semaphore::new(1)),
        });
        self.waiting_count += usize::from(waiting.ids.insert(id));
    }

    fn stop_waiting(&mut self, id: u64, place: Place) {
        let Some(waiting) = self.waiting.get_mut(&place) else {
            return;
        };
        self.waiting_count -= usize::from(waiting.ids.remove(&id));
        if waiting.ids.is_empty() {
            self.waiting.remove(&place);
        }
    }

    fn end(&mut self, id: u64) {
        if let Some(held) = self.held.remove(&id) {
            self.stop_waiting(id, held.place);
        }
    }

    /// Notes that the connection serves no droplet any more, and has the whole time again to prove itself.
    fn rest(&mut self, id: u64) {
        let Some(held) = self.held.get_mut(&id).filter(|held| held.waits_since.is_none()) else {
            return;
        };
        held.waits_since = Some(Instant::now());
        let place = held.place;
        self.wait(id, place);
    }

    /// Ends the oldest connection of a place that has its share, or any of the place with the most connections. There
    /// the oldest may be the next whose token is reviewed: if each new one ended it, nobody would come to that.
    fn make_room(&mut self, place: Place, limits: &Limits, has_share: bool) -> bool {
        let of_place = self.waiting.get(&place).map_or(0, |waiting| waiting.ids.len());
        let ended = if has_share && of_place >= limits.of_place {
            let own = self.waiting.get(&place);
            own.and_then(|waiting| waiting.ids.first().copied())
        } else if self.waiting_count >= limits.total {
            let most = self.waiting.values().max_by_key(|waiting| waiting.ids.len());
            most.and_then(|waiting| {
                let drawn = jitter::below(waiting.ids.len());
                waiting.ids.iter().nth(drawn).copied()
            })
        } else {
            None
        };
        if let Some(ended) = ended {
            self.end(ended);
        }
        ended.is_some()
    }
}

pub struct Door {
    /// The hub; none while nodes are not known yet: then the limits are the only protection.
    hub: watch::Receiver<Option<Arc<Hub>>>,
    /// Ranges from which droplets may come besides Nodes' addresses; one address there may have many droplets.
    sources: Vec<IpNet>,
    limits: Limits,
    reviews: Arc<Semaphore>,
    state: Mutex<State>,
}

impl Door {
    pub fn new(hub: watch::Receiver<Option<Arc<Hub>>>, sources: Vec<IpNet>, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            hub,
            sources,
            limits,
            reviews: Arc::new(Semaphore::new(limits.reviews)),
            state: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of connections that are held, and of those without proof.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        let state = self.lock();
        (state.held.len(), state.waiting_count)
    }

    fn is_source(&self, address: IpAddr) -> bool {
        self.sources.iter().any(|range| range.contains(&address))
    }

    /// Whether a node may have the address.
    fn is_known(&self, address: IpAddr) -> bool {
        let hub = self.hub.borrow().clone();
        self.is_source(address) || hub.is_none_or(|hub| hub.is_node_address(address))
    }

    /// Takes a connection, if it comes from a place where droplets are.
    fn admit(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) -> Option<Connection> {
        let address = from.ip().to_canonical();
        if !self.is_known(address) {
            metrics::refuses("address");
            return None;
        }
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "a connection ended at once");
            return None;
        }
        let place = (address, PORTS_OF_PODS.contains(&from.port()));
        let (hold, end) = oneshot::channel();
        let mut state = self.lock();
        if state.make_room(place, &self.limits, !self.is_source(address)) {
            metrics::refuses("crowded");
        }
        let id = state.next_id;
        state.next_id += 1;
        let held = Held {
            place,
            waits_since: Some(Instant::now()),
            _hold: hold,
        };
        state.held.insert(id, held);
        state.wait(id, place);
        let caller = Caller {
            door: self.clone(),
            place,
            id,
        };
        Some(Connection { stream, end, caller })
    }

    /// Ends connections that have not proven themselves in time.
    fn look(&self) {
        let state = &mut *self.lock();
        let patience = self.limits.patience;
        let is_late = |held: &Held| held.waits_since.is_some_and(|since| since.elapsed() >= patience);
        let late: Vec<u64> = state
            .held
            .iter()
            .filter(|(_, held)| is_late(held))
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            metrics::refuses("late");
            state.end(id);
        }
    }

    /// Yields the connections that are admitted.
    pub fn incoming(self: Arc<Self>, listener: TcpListener) -> impl Stream<Item = io::Result<Connection>> {
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        futures::stream::unfold((self, listener, look), |(door, listener, mut look)| async move {
            loop {
                tokio::select! {
                    accepted = listener.accept() => match accepted {
                        Ok((stream, from)) => if let Some(connection) = door.admit(stream, from) {
                            return Some((Ok(connection), (door, listener, look)));
                        },
                        Err(error) => {
                            debug!(%error, "a connection was not taken");
                            tokio::time::sleep(LISTENER_RETRY).await;
                        }
                    },
                    _ = look.tick() => door.look(),
                }
            }
        })
    }
}

/// The peer of a connection, as far as it is known.
#[derive(Clone)]
pub struct Caller {
    door: Arc<Door>,
    place: Place,
    id: u64,
}

impl Caller {
    /// Waits until the API server may be asked about a token of this caller's.
    pub async fn review(&self) -> Option<(Option<OwnedSemaphorePermit>, OwnedSemaphorePermit)> {
        let own = if self.door.is_source(self.place.0) {
            None
        } else {
            let waiting = self
                .door
                .lock()
                .waiting
                .get(&self.place)
                .map(|waiting| waiting.review.clone());
            match waiting {
                Some(review) => Some(review.acquire_owned().await.ok()?),
                None => None,
            }
        };
        let any = self.door.reviews.clone().acquire_owned().await.ok()?;
        Some((own, any))
    }

    /// Notes that the connection serves a droplet until the answer is dropped, or until another connection serves it.
    pub fn serves(&self, droplet: &str) -> Serving {
        let state = &mut *self.door.lock();
        if let Some(held) = state.held.get_mut(&self.id) {
            held.waits_since = None;
            state.stop_waiting(self.id, self.place);
        }
        let former = state.serving.insert(droplet.to_owned(), self.id);
        if let Some(former) = former.filter(|former| *former != self.id) {
            state.rest(former);
        }
        Serving {
            caller: self.clone(),
            droplet: droplet.to_owned(),
        }
    }
}

pub struct Serving {
    caller: Caller,
    droplet: String,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let state = &mut *self.caller.door.lock();
        if state.serving.get(&self.droplet) == Some(&self.caller.id) {
            state.serving.remove(&self.droplet);
            state.rest(self.caller.id);
        }
    }
}

/// A connection that ends when the door says so.
pub struct Connection {
    stream: TcpStream,
    end: oneshot::Receiver<()>,
    caller: Caller,
}

impl Connection {
    fn is_ended(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match Pin::new(&mut self.end).poll(context) {
            Poll::Pending => Ok(()),
            Poll::Ready(_) => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.caller.door.lock().end(self.caller.id);
    }
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.is_ended(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.is_ended(context)?;
        Pin::new(&mut self.stream).poll_write(context, buffer)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.is_ended(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A connection that was ended waits for nothing.
        self.is_ended(context)?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

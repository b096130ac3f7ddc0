//! The kinds of objects that the operator knows. Each kind has a watch that feeds its store and says what a change
//! means; most have a controller that reconciles objects that are woken.

use std::future::Future;
use std::sync::Arc;

use futures::StreamExt;
use kube::Api;
use kube::runtime::controller::{self, Action, Config};
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::{Controller, watcher};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::controller::context::Context;
use crate::controller::runtime::error::{ReconcileError, retry};
use crate::controller::runtime::lanes::{Lane, Lanes, Woken};
use crate::controller::runtime::objects::Object;
use crate::controller::runtime::watch::{Change, Serving, watch};
use crate::hub::Trigger;
use crate::metrics::{self, Queue};

/// How many objects of a lane are reconciled at the same time. A kind has two lanes.
const CONCURRENCY: u16 = 64;

/// Starts one watch, and signals when its store and the world have all objects that exist.
type StartWatch = Box<dyn FnOnce(&Arc<Context>, &mut JoinSet<()>) -> oneshot::Receiver<()> + Send>;
type StartController = Box<dyn FnOnce(&Arc<Context>, &mut JoinSet<()>) + Send>;

/// The registered kinds, which start once there is a context.
#[derive(Default)]
pub struct Kinds {
    serving: Serving,
    watches: Vec<StartWatch>,
    controllers: Vec<StartController>,
}

impl Kinds {
    /// Returns a registry of kinds that not every API server has, or allows this operator to read: there are no objects
    /// then.
    pub fn if_served() -> Self {
        Self {
            serving: Serving::Optional,
            ..Self::default()
        }
    }

    /// Registers a kind that is only read. `strip` leaves the parts of an object that are kept; `on_change` is called
    /// with every change.
    pub fn watch<K: Object + 'static>(
        &mut self,
        strip: fn(&mut K),
        on_change: fn(&Context, &Change<K>),
    ) -> Store<K> {
        let (reader, writer) = store::<K>();
        let serving = self.serving;
        self.watches.push(Box::new(move |context, tasks| {
            let api: Api<K> = Api::all(context.client.clone());
            let context = context.clone();
            let (sender, filled) = oneshot::channel();
            let on_change = move |change| on_change(&context, &change);
            tasks.spawn(async move { watch(api, serving, writer, strip, sender, on_change).await });
            filled
        }));
        reader
    }

    /// Registers a kind that is read, and whose objects are reconciled whenever the trigger wakes them.
    pub fn register<K, F>(
        &mut self,
        trigger: &mut Trigger<K>,
        strip: fn(&mut K),
        on_change: fn(&Context, &Change<K>),
        reconcile: fn(Arc<K>, Arc<Context>) -> F,
    ) -> Store<K>
    where
        K: Object + 'static,
        F: Future<Output = Result<Action, ReconcileError>> + Send + 'static,
    {
        let is_ending = |object: &K, _: &Context| object.meta().deletion_timestamp.is_some();
        self.register_with_end(trigger, strip, on_change, is_ending, reconcile)
    }

    /// Does the same for a kind whose objects may end before they are deleted. `is_ending` puts an object into the lane
    /// of deletions.
    pub fn register_with_end<K, F>(
        &mut self,
        trigger: &mut Trigger<K>,
        strip: fn(&mut K),
        on_change: fn(&Context, &Change<K>),
        is_ending: fn(&K, &Context) -> bool,
        reconcile: fn(Arc<K>, Arc<Context>) -> F,
    ) -> Store<K>
    where
        K: Object + 'static,
        F: Future<Output = Result<Action, ReconcileError>> + Send + 'static,
    {
        let reader = self.watch(strip, on_change);
        let woken = trigger.listen();
        let objects = reader.clone();
        self.controllers.push(Box::new(move |context, tasks| {
            let judging = context.clone();
            let (lanes, queues) = Lanes::new(objects.clone(), move |object| is_ending(object, &judging));
            let queue = Queue::<K>::default();
            for (lane, woken) in queues {
                let lane = (lane, lanes.clone(), queue.clone());
                control(tasks, context, lane, objects.clone(), woken, reconcile);
            }
            tasks.spawn(sort(woken, lanes, queue));
        }));
        reader
    }

    /// Starts all watches. Each returned receiver signals that its watch has brought all objects that exist.
    pub fn start_watches(
        &mut self,
        context: &Arc<Context>,
        tasks: &mut JoinSet<()>,
    ) -> Vec<oneshot::Receiver<()>> {
        let watches = self.watches.drain(..);
        watches.map(|start| start(context, tasks)).collect()
    }

    pub fn start_controllers(self, context: &Arc<Context>, tasks: &mut JoinSet<()>) {
        for start in self.controllers {
            start(context, tasks);
        }
    }
}

/// Puts woken objects into their lanes.
async fn sort<K: Object + 'static>(mut woken: Woken<K>, lanes: Arc<Lanes<K>>, queue: Queue<K>) {
    while let Some(object) = woken.recv().await {
        queue.add(&object);
        lanes.wake(object);
    }
}

/// Runs the controller of one lane.
fn control<K, F>(
    tasks: &mut JoinSet<()>,
    context: &Arc<Context>,
    (lane, lanes, queue): (Lane, Arc<Lanes<K>>, Queue<K>),
    reader: Store<K>,
    woken: Woken<K>,
    reconcile: fn(Arc<K>, Arc<Context>) -> F,
) where
    K: Object + 'static,
    F: Future<Output = Result<Action, ReconcileError>> + Send + 'static,
{
    let objects = futures::stream::pending::<Result<K, watcher::Error>>();
    let controller = Controller::for_stream(objects, reader)
        .with_config(Config::default().concurrency(CONCURRENCY))
        .reconcile_on(UnboundedReceiverStream::new(woken));
    let context = context.clone();
    let looked_at = queue.clone();
    let observe = move |object: Arc<K>, context: Arc<Context>| {
        let begun = lanes.begin(lane, &ObjectRef::from_obj(&*object));
        let looked_at = looked_at.clone();
        async move {
            let Some((work, object)) = begun else {
                return Ok(Action::await_change());
            };
            let result = metrics::observed(looked_at, object.clone(), reconcile(object, context)).await;
            drop(work);
            result
        }
    };
    tasks.spawn(async move {
        // Errors were logged and backed off by `retry`.
        controller
            .run(observe, retry, context)
            .for_each(|result| {
                if let Err(controller::Error::ObjectNotFound(object)) = result {
                    queue.gone(&object.name, object.namespace.as_deref());
                }
                std::future::ready(())
            })
            .await;
    });
}

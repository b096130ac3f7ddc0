//! The kinds of objects that the operator knows. Each kind has a watch that feeds its store and says what a change
//! means; most have a controller that reconciles objects that are woken.

use std::future::Future;
use std::sync::Arc;

use futures::StreamExt;
use kube::Api;
use kube::runtime::controller::{self, Action, Config};
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::{Controller, watcher};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::controller::context::Context;
use crate::controller::runtime::error::{ReconcileError, retry};
use crate::controller::runtime::objects::Object;
use crate::controller::runtime::watch::{Change, Serving, watch};
use crate::hub::Trigger;
use crate::metrics::{self, Queue};

/// How many objects of a kind are reconciled at the same time.
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
        let reader = self.watch(strip, on_change);
        let woken = trigger.listen();
        let objects = reader.clone();
        self.controllers.push(Box::new(move |context, tasks| {
            control(tasks, context, objects, woken, reconcile);
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

fn control<K, F>(
    tasks: &mut JoinSet<()>,
    context: &Arc<Context>,
    reader: Store<K>,
    woken: UnboundedReceiver<ObjectRef<K>>,
    reconcile: fn(Arc<K>, Arc<Context>) -> F,
) where
    K: Object + 'static,
    F: Future<Output = Result<Action, ReconcileError>> + Send + 'static,
{
    let objects = futures::stream::pending::<Result<K, watcher::Error>>();
    let queue = Queue::<K>::default();
    let waiting = queue.clone();
    let woken = UnboundedReceiverStream::new(woken).inspect(move |object| waiting.add(object));
    let controller = Controller::for_stream(objects, reader)
        .with_config(Config::default().concurrency(CONCURRENCY))
        .reconcile_on(woken);
    let context = context.clone();
    let looked_at = queue.clone();
    let observe = move |object: Arc<K>, context| {
        metrics::observed(looked_at.clone(), object.clone(), reconcile(object, context))
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

//! Wires it up: watches that feed stores, world and triggers, and one kube controller a kind.

use std::collections::HashMap;
use std::future::Future;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::runtime::controller::{self, Action, Config};
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::{Controller, watcher};
use kube::{Api, Client};
use thuban_api::cidr::Cidr;
use thuban_api::{Bouncer, Divider, Droplet, Endpoint, IpClaim, Network, VniClaim, Vpc};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tracing::info;

use crate::controller::cache::claim_locks::ClaimLocks;
use crate::controller::cache::index::Index;
use crate::controller::cache::placements::Placements;
use crate::controller::cache::policies_told::PoliciesTold;
use crate::controller::cache::reservations::Reservations;
use crate::controller::cache::slices::Slices;
use crate::controller::cache::stores::Stores;
use crate::controller::cache::strip;
use crate::controller::context::Context;
use crate::controller::endpoint::scaled::sync_service;
use crate::controller::endpoint::sync::sync_endpoint;
use crate::controller::endpoint::{self, pod};
use crate::controller::runtime::error::{ReconcileError, retry};
use crate::controller::runtime::events::Events;
use crate::controller::runtime::heartbeat::Heartbeats;
use crate::controller::runtime::objects::Object;
use crate::controller::runtime::rate_limit::RateLimit;
use crate::controller::runtime::resync::resync;
use crate::controller::runtime::waits::Waits;
use crate::controller::runtime::watch::{Change, watch};
use crate::controller::service::observe as observe_services;
use crate::controller::{claim, droplet, network, network_policy, observe, role, service, vni_claim, vpc};
use crate::hub::{Hub, Triggers};
use crate::metrics::{self, Queue};
use crate::model::cached::{NetworkPolicy, Pod};
use crate::model::service::{EndpointSlice, Service};
use crate::model::validation::RefusedRanges;
use crate::model::was_ready;

/// How many objects of a kind are reconciled at the same time.
const CONCURRENCY: u16 = 64;

/// Writes of numbers that only people look at: a large cluster's churn is not to double the writes.
const COUNTS_A_SECOND: u32 = 10;
const COUNTS_AT_ONCE: u32 = 50;

/// Between two looks at whether all is adopted.
const ADOPTION_LOOK: Duration = Duration::from_millis(20);

struct Receivers {
    vpcs: UnboundedReceiver<ObjectRef<Vpc>>,
    networks: UnboundedReceiver<ObjectRef<Network>>,
    dividers: UnboundedReceiver<ObjectRef<Divider>>,
    bouncers: UnboundedReceiver<ObjectRef<Bouncer>>,
    droplets: UnboundedReceiver<ObjectRef<Droplet>>,
    endpoints: UnboundedReceiver<ObjectRef<Endpoint>>,
    pods: UnboundedReceiver<ObjectRef<Pod>>,
    claims: UnboundedReceiver<ObjectRef<IpClaim>>,
    vni_claims: UnboundedReceiver<ObjectRef<VniClaim>>,
    services: UnboundedReceiver<ObjectRef<Service>>,
    network_policies: UnboundedReceiver<ObjectRef<NetworkPolicy>>,
}

fn channels() -> (Triggers, Receivers) {
    let (vpcs, vpc_receiver) = unbounded_channel();
    let (networks, network_receiver) = unbounded_channel();
    let (dividers, divider_receiver) = unbounded_channel();
    let (bouncers, bouncer_receiver) = unbounded_channel();
    let (droplets, droplet_receiver) = unbounded_channel();
    let (endpoints, endpoint_receiver) = unbounded_channel();
    let (pods, pod_receiver) = unbounded_channel();
    let (claims, claim_receiver) = unbounded_channel();
    let (vni_claims, vni_claim_receiver) = unbounded_channel();
    let (services, service_receiver) = unbounded_channel();
    let (network_policies, network_policy_receiver) = unbounded_channel();
    let triggers = Triggers {
        vpcs,
        networks,
        dividers,
        bouncers,
        droplets,
        endpoints,
        pods,
        claims,
        vni_claims,
        services,
        network_policies,
    };
    let receivers = Receivers {
        vpcs: vpc_receiver,
        networks: network_receiver,
        dividers: divider_receiver,
        bouncers: bouncer_receiver,
        droplets: droplet_receiver,
        endpoints: endpoint_receiver,
        pods: pod_receiver,
        claims: claim_receiver,
        vni_claims: vni_claim_receiver,
        services: service_receiver,
        network_policies: network_policy_receiver,
    };
    (triggers, receivers)
}

/// Where clouds tell a node of itself: link-local, of which agents pass no IPv6, and what one of them has for IPv6.
const METADATA: [&str; 2] = ["169.254.0.0/16", "fd00:ec2::254/128"];

/// What one leadership is run with.
#[derive(Debug)]
pub struct Options {
    pub epoch: u64,
    /// For how long nobody led before.
    pub vacancy: Duration,
    /// Ranges that no VPC may touch.
    pub refused: RefusedRanges,
    /// Where Services have their addresses.
    pub service_ranges: Vec<Cidr>,
    /// Where Services may have `externalIPs`.
    pub external_ranges: Vec<Cidr>,
    /// Ranges of nodes and underlay.
    pub underlay_ranges: Vec<Cidr>,
    /// Range of the default VPC.
    pub default_range: Cidr,
    /// Droplets have a view of the cluster's DNS, at this ClusterIP, for each VPC.
    pub cluster_dns: Option<IpAddr>,
}

/// Starts watches and controllers, and returns once every store and the world are filled.
pub async fn start(client: Client, options: Options, tasks: &mut JoinSet<()>) -> Arc<Hub> {
    let Options {
        epoch,
        vacancy,
        refused,
        service_ranges,
        external_ranges,
        underlay_ranges,
        default_range,
        cluster_dns,
    } = options;
    let (triggers, receivers) = channels();
    let hub = Arc::new(Hub::new(epoch, triggers));
    hub.hold_back(vacancy);
    let ranges = service_ranges.iter().map(ToString::to_string).collect();
    let closed = underlay_ranges.iter().map(ToString::to_string);
    let closed = closed.chain(METADATA.map(str::to_owned)).collect();
    hub.update(|world| {
        world.set_service_ranges(ranges);
        world.set_closed_ranges(closed);
        world.set_cluster_dns(cluster_dns);
    });
    let (pods, pod_writer) = store::<Pod>();
    let (namespaces, namespace_writer) = store::<Namespace>();
    let (nodes, node_writer) = store::<Node>();
    let (vpcs, vpc_writer) = store::<Vpc>();
    let (networks, network_writer) = store::<Network>();
    let (endpoints, endpoint_writer) = store::<Endpoint>();
    let (dividers, divider_writer) = store::<Divider>();
    let (bouncers, bouncer_writer) = store::<Bouncer>();
    let (droplets, droplet_writer) = store::<Droplet>();
    let (ip_claims, ip_claim_writer) = store::<IpClaim>();
    let (vni_claims, vni_claim_writer) = store::<VniClaim>();
    let (services, service_writer) = store::<Service>();
    let (slices, slice_writer) = store::<EndpointSlice>();
    let (network_policies, network_policy_writer) = store::<NetworkPolicy>();
    let stores = Stores {
        pods,
        namespaces,
        nodes,
        vpcs,
        networks,
        endpoints,
        dividers,
        bouncers,
        droplets,
        ip_claims,
        vni_claims,
        services,
        slices,
        network_policies,
    };
    let context = Arc::new(Context {
        client: client.clone(),
        hub: hub.clone(),
        stores,
        events: Events::start(client.clone(), tasks),
        refused,
        service_ranges,
        external_ranges,
        default_range,
        shared_by_default: [("default", "kubernetes")]
            .into_iter()
            .chain(cluster_dns.is_some().then_some(("kube-system", "kube-dns")))
            .map(|(namespace, name)| (namespace.to_owned(), name.to_owned()))
            .collect(),
        reservations: Reservations::default(),
        waits: Waits::default(),
        claim_locks: ClaimLocks::default(),
        placements: Placements::default(),
        index: Index::default(),
        slices: Slices::default(),
        policies_told: PoliciesTold::default(),
        counts: RateLimit::new(COUNTS_A_SECOND, COUNTS_AT_ONCE),
        heartbeats: Heartbeats::default(),
        seen: Mutex::new(HashMap::new()),
    });
    let mut feed = Feed {
        client,
        context: context.clone(),
        filling: Vec::new(),
    };
    feed.watch(tasks, pod_writer, strip::pod, observe::on_pod);
    feed.watch(tasks, namespace_writer, strip::namespace, observe::on_namespace);
    feed.watch(tasks, node_writer, strip::node, observe::on_node);
    feed.watch(tasks, vpc_writer, strip::any, observe::on_vpc);
    feed.watch(tasks, network_writer, strip::any, observe::on_network);
    feed.watch(tasks, endpoint_writer, strip::any, observe::on_endpoint);
    feed.watch(tasks, divider_writer, strip::any, observe::on_role);
    feed.watch(tasks, bouncer_writer, strip::any, observe::on_role);
    feed.watch(tasks, droplet_writer, strip::any, observe::on_droplet);
    feed.watch(tasks, ip_claim_writer, strip::any, observe::on_ip_claim);
    feed.watch(tasks, vni_claim_writer, strip::any, observe::on_vni_claim);
    feed.watch(
        tasks,
        service_writer,
        strip::service,
        observe_services::on_service,
    );
    feed.watch(tasks, slice_writer, strip::slice, observe_services::on_slice);
    // Nothing waits for what is only told of.
    let filling = std::mem::take(&mut feed.filling);
    feed.watch(
        tasks,
        network_policy_writer,
        strip::network_policy,
        network_policy::on_change,
    );
    // Whoever is served or reconciled before the world is whole would be taken for gone.
    for filled in filling {
        let _ = filled.await;
    }
    info!("caches are filled");
    // What depends on objects of other kinds was judged in the order in which the lists came: a droplet without its
    // Node, a network that leaves without its endpoints. Claims would be freed and rows lost by that.
    for droplet in context.stores.droplets.state() {
        observe::on_droplet(&context, &Change::Applied((*droplet).clone()));
    }
    for network in context.stores.networks.state() {
        observe::on_network(&context, &Change::Applied((*network).clone()));
    }
    observe::sync_all_namespaces(&context);
    for endpoint in context.stores.endpoints.state() {
        sync_endpoint(&endpoint, &context);
    }
    // Their backends are endpoints.
    for endpoint in context.stores.endpoints.state() {
        sync_service(&endpoint, &context);
    }
    role::unpublish_leaving::<Divider>(&context);
    role::unpublish_leaving::<Bouncer>(&context);
    metrics::leads(&context);
    let stores = &context.stores;
    control(
        tasks,
        &context,
        stores.vpcs.clone(),
        receivers.vpcs,
        vpc::reconcile,
    );
    control(
        tasks,
        &context,
        stores.networks.clone(),
        receivers.networks,
        network::reconcile,
    );
    control(
        tasks,
        &context,
        stores.dividers.clone(),
        receivers.dividers,
        role::reconcile::<Divider>,
    );
    control(
        tasks,
        &context,
        stores.bouncers.clone(),
        receivers.bouncers,
        role::reconcile::<Bouncer>,
    );
    control(
        tasks,
        &context,
        stores.droplets.clone(),
        receivers.droplets,
        droplet::reconcile,
    );
    control(
        tasks,
        &context,
        stores.endpoints.clone(),
        receivers.endpoints,
        endpoint::reconcile,
    );
    control(
        tasks,
        &context,
        stores.pods.clone(),
        receivers.pods,
        pod::reconcile,
    );
    control(
        tasks,
        &context,
        stores.ip_claims.clone(),
        receivers.claims,
        claim::reconcile,
    );
    control(
        tasks,
        &context,
        stores.vni_claims.clone(),
        receivers.vni_claims,
        vni_claim::reconcile,
    );
    control(
        tasks,
        &context,
        stores.services.clone(),
        receivers.services,
        service::reconcile,
    );
    control(
        tasks,
        &context,
        stores.network_policies.clone(),
        receivers.network_policies,
        network_policy::reconcile,
    );
    tasks.spawn(resync(stores.endpoints.clone(), hub.triggers.endpoints.clone()));
    tasks.spawn(resync(stores.ip_claims.clone(), hub.triggers.claims.clone()));
    tasks.spawn(serve_when_adopted(context));
    hub
}

/// Pods may run whose Endpoint the API server has lost (a restore): they get it back before any droplet gets a program,
/// which would lack their rows.
async fn serve_when_adopted(context: Arc<Context>) {
    let is_expected = |droplet: &str| {
        let object = context.stores.droplets.get(&ObjectRef::new(droplet));
        object.is_some_and(|object| was_ready(&object))
    };
    while !context.hub.is_adopted(is_expected) {
        tokio::time::sleep(ADOPTION_LOOK).await;
    }
    context.hub.serve();
    info!("droplets get their programs");
    std::future::pending::<()>().await;
}

struct Feed {
    client: Client,
    context: Arc<Context>,
    filling: Vec<oneshot::Receiver<()>>,
}

impl Feed {
    fn watch<K: Object + 'static>(
        &mut self,
        tasks: &mut JoinSet<()>,
        writer: Writer<K>,
        strip: fn(&mut K),
        handle: fn(&Context, &Change<K>),
    ) {
        let api: Api<K> = Api::all(self.client.clone());
        let context = self.context.clone();
        let (sender, filled) = oneshot::channel();
        self.filling.push(filled);
        tasks.spawn(
            async move { watch(api, writer, strip, sender, |change| handle(&context, &change)).await },
        );
    }
}

fn control<K, F>(
    tasks: &mut JoinSet<()>,
    context: &Arc<Context>,
    reader: Store<K>,
    triggers: UnboundedReceiver<ObjectRef<K>>,
    reconcile: fn(Arc<K>, Arc<Context>) -> F,
) where
    K: Object + 'static,
    F: Future<Output = Result<Action, ReconcileError>> + Send + 'static,
{
    let objects = futures::stream::pending::<Result<K, watcher::Error>>();
    let queue = Queue::<K>::default();
    let waiting = queue.clone();
    let triggers = UnboundedReceiverStream::new(triggers).inspect(move |object| waiting.add(object));
    let controller = Controller::for_stream(objects, reader)
        .with_config(Config::default().concurrency(CONCURRENCY))
        .reconcile_on(triggers);
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

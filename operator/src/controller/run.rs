//! Connects everything: every kind with its watch and its controller, and the order in which a leadership begins.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use kube::runtime::reflector::ObjectRef;
use thuban_api::cluster_dns::ClusterDns;
use thuban_api::{Bouncer, Divider};
use tokio::task::JoinSet;
use tracing::info;

use crate::controller::cache::stores::Stores;
use crate::controller::cache::strip;
use crate::controller::context::Context;
pub use crate::controller::context::Options;
use crate::controller::endpoint::scaled::sync_service;
use crate::controller::endpoint::sync::sync_endpoint;
use crate::controller::endpoint::{self, pod};
use crate::controller::kinds::Kinds;
use crate::controller::runtime::events::Events;
use crate::controller::runtime::resync::resync;
use crate::controller::runtime::turns::Turns;
use crate::controller::runtime::watch::Change;
use crate::controller::service::observe::{on_service, on_slice};
use crate::controller::service::service_range;
use crate::controller::{
    attach, claim, cluster_network_policy, crowding, droplet, dropped, network, network_policy, node,
    observe, path_trace, policy_state, role, service, vip_members, vni_claim, vpc,
};
use crate::hub::{Hub, Report, Triggers};
use crate::metrics;
use crate::model::droplet::was_ready;

/// How long the operator waits between two looks at whether all attachments have their Endpoints.
const ADOPTION_RETRY: Duration = Duration::from_millis(20);

/// Ranges of the clouds' metadata services: IPv4 link-local (agents pass no IPv6 link-local packets), and the IPv6
/// address of one cloud's service.
const METADATA: [&str; 2] = ["169.254.0.0/16", "fd00:ec2::254/128"];

/// Names each kind once: what is kept of its objects, what a change of one means, and who reconciles them. `optional`
/// takes the kinds that not every API server has.
fn register(kinds: &mut Kinds, optional: &mut Kinds, triggers: &mut Triggers) -> Stores {
    Stores {
        pods: kinds.register(&mut triggers.pods, strip::pod, observe::on_pod, pod::reconcile),
        namespaces: kinds.watch(strip::namespace, observe::on_namespace),
        nodes: kinds.watch(strip::node, node::on_node),
        vpcs: kinds.register(&mut triggers.vpcs, strip::any, observe::on_vpc, vpc::reconcile),
        networks: kinds.register(
            &mut triggers.networks,
            strip::any,
            observe::on_network,
            network::reconcile,
        ),
        endpoints: kinds.register_with_end(
            &mut triggers.endpoints,
            strip::any,
            observe::on_endpoint,
            endpoint::is_ending,
            endpoint::reconcile,
        ),
        dividers: kinds.register(
            &mut triggers.dividers,
            strip::any,
            observe::on_role,
            role::reconcile,
        ),
        bouncers: kinds.register(
            &mut triggers.bouncers,
            strip::any,
            observe::on_role,
            role::reconcile,
        ),
        droplets: kinds.register(
            &mut triggers.droplets,
            strip::any,
            observe::on_droplet,
            droplet::reconcile,
        ),
        ip_claims: kinds.register(
            &mut triggers.claims,
            strip::any,
            observe::on_ip_claim,
            claim::reconcile,
        ),
        vni_claims: kinds.register(
            &mut triggers.vni_claims,
            strip::any,
            observe::on_vni_claim,
            vni_claim::reconcile,
        ),
        services: kinds.register(
            &mut triggers.services,
            strip::service,
            on_service,
            service::reconcile,
        ),
        slices: kinds.watch(strip::slice, on_slice),
        service_cidrs: optional.register(
            &mut triggers.service_cidrs,
            strip::any,
            service_range::on_service_cidr,
            service_range::reconcile,
        ),
        network_policies: kinds.register(
            &mut triggers.network_policies,
            strip::network_policy,
            network_policy::on_change,
            network_policy::reconcile,
        ),
        cluster_policies: optional.register(
            &mut triggers.cluster_policies,
            strip::any,
            cluster_network_policy::on_change,
            cluster_network_policy::reconcile,
        ),
        policy_states: optional.watch(strip::any, policy_state::on_change),
    }
}

/// Registers the questions of users. Nothing depends on them: nobody waits for their list.
fn register_questions(triggers: &mut Triggers) -> Kinds {
    let mut questions = Kinds::if_served();
    questions.register(
        &mut triggers.path_traces,
        strip::path_trace,
        path_trace::on_change,
        path_trace::reconcile,
    );
    questions
}

/// Starts watches and controllers, and returns once every store and the world are filled.
pub async fn start(client: Client, options: Options, tasks: &mut JoinSet<()>) -> Arc<Hub> {
    let mut kinds = Kinds::default();
    let mut optional = Kinds::if_served();
    let mut triggers = Triggers::default();
    let stores = register(&mut kinds, &mut optional, &mut triggers);
    let mut questions = register_questions(&mut triggers);
    let hub = Arc::new(make_hub(&options, triggers));
    let events = Events::start(client.clone(), tasks);
    let context = Arc::new(Context::new(client, hub.clone(), stores, events, options));
    let mut filling = kinds.start_watches(&context, tasks);
    filling.extend(optional.start_watches(&context, tasks));
    drop(questions.start_watches(&context, tasks));
    // Before the world is complete, objects that it lacks would be taken for deleted.
    for filled in filling {
        let _ = filled.await;
    }
    info!("caches are filled");
    judge_again(&context).await;
    hub.end_filling();
    // These go through all objects of a kind, so that changes while the world was filled left them alone.
    node::sync_node_addresses(&context);
    observe::sync_all_namespaces(&context);
    metrics::leads(&context);
    kinds.start_controllers(&context, tasks);
    optional.start_controllers(&context, tasks);
    questions.start_controllers(&context, tasks);
    let stores = &context.stores;
    tasks.spawn(resync(stores.pods.clone(), hub.triggers.pods.clone()));
    tasks.spawn(resync(stores.endpoints.clone(), hub.triggers.endpoints.clone()));
    tasks.spawn(resync(stores.ip_claims.clone(), hub.triggers.claims.clone()));
    tasks.spawn(dropped::tell(context.clone()));
    tasks.spawn(vip_members::write(context.clone()));
    tasks.spawn(crowding::keep(context.clone()));
    tasks.spawn(serve_when_adopted(context));
    start_hub(&hub, tasks);
    hub
}

/// Starts what the hub does by itself.
fn start_hub(hub: &Arc<Hub>, tasks: &mut JoinSet<()>) {
    let resending = hub.clone();
    tasks.spawn(async move { resending.send_again_when_due().await });
    let watching = hub.clone();
    tasks.spawn(async move { watching.leave_suspects_out().await });
    let rolling_out = hub.clone();
    tasks.spawn(async move { rolling_out.roll_policies_out().await });
    let asking = hub.clone();
    tasks.spawn(async move { asking.ask_for_denials().await });
}

/// Makes a hub that knows the installation's settings, and holds programs back.
fn make_hub(options: &Options, triggers: Triggers) -> Hub {
    let hub = Hub::new(options.epoch, triggers);
    hub.begin_filling();
    hub.hold_back(options.vacancy);
    hub.distrust_node_ports(options.node_port_lease);
    let ranges = options.service_ranges.iter().map(ToString::to_string).collect();
    let closed = options.underlay_ranges.iter().map(ToString::to_string);
    let closed = closed.chain(METADATA.map(str::to_owned)).collect();
    hub.update(|world| {
        world.set_service_ranges(ranges);
        world.set_closed_ranges(closed);
        let cluster_dns = options.cluster_dns.into_iter().flat_map(ClusterDns::addresses);
        world.set_cluster_dns(cluster_dns.collect());
    });
    hub
}

/// Judges objects again that depend on objects of other kinds. They were judged in the order in which the lists
/// arrived: a droplet without its Node, a network that leaves without its endpoints. Claims would be freed and rows
/// lost by that.
async fn judge_again(context: &Context) {
    let mut turns = Turns::default();
    node::sync_node_addresses(context);
    for droplet in context.stores.droplets.state() {
        observe::on_droplet(context, &Change::Applied((*droplet).clone()));
        turns.pass().await;
    }
    for network in context.stores.networks.state() {
        observe::on_network(context, &Change::Applied((*network).clone()));
        turns.pass().await;
    }
    observe::sync_all_namespaces(context);
    for endpoint in context.stores.endpoints.state() {
        sync_endpoint(&endpoint, context);
        turns.pass().await;
    }
    // The backends of Services are endpoints.
    for endpoint in context.stores.endpoints.state() {
        sync_service(&endpoint, context);
        turns.pass().await;
    }
    role::unpublish_leaving::<Divider>(context);
    role::unpublish_leaving::<Bouncer>(context);
}

/// Serves droplets once pods whose Endpoint the API server has lost (by a restore) have it again. A program without
/// their rows must not reach a droplet before.
async fn serve_when_adopted(context: Arc<Context>) {
    let is_expected = |droplet: &str| {
        let object = context.stores.droplets.get(&ObjectRef::new(droplet));
        object.is_some_and(|object| was_ready(&object))
    };
    let is_bound = |report: &Report| attach::is_bound(report, &context);
    while !context.hub.is_adopted(is_expected, is_bound) {
        tokio::time::sleep(ADOPTION_RETRY).await;
    }
    while context.hub.serve_some() {
        tokio::task::yield_now().await;
    }
    info!("droplets get their programs");
    std::future::pending::<()>().await;
}

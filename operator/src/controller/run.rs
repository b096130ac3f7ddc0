//! Connects everything: every kind with its watch and its controller, and the order in which a leadership begins.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::Client;
use kube::runtime::reflector::ObjectRef;
use thuban_api::cluster_dns::ClusterDns;
use thuban_api::{
    Bouncer, ClusterNetworkPolicy, Divider, Droplet, Endpoint, IpClaim, Network, PolicyState, VniClaim, Vpc,
};
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
use crate::controller::runtime::watch::Change;
use crate::controller::service::observe::{on_service, on_slice};
use crate::controller::service::service_range;
use crate::controller::{
    attach, claim, cluster_network_policy, droplet, dropped, heartbeat_owners, network, network_policy,
    observe, policy_state, role, service, vip_members, vni_claim, vpc,
};
use crate::hub::{Hub, Report, Triggers};
use crate::metrics;
use crate::model::cached::{NetworkPolicy, Pod};
use crate::model::droplet::was_ready;
use crate::model::service::{EndpointSlice, Service};

/// How long the operator waits between two looks at whether all attachments have their Endpoints.
const ADOPTION_RETRY: Duration = Duration::from_millis(20);

/// Ranges of the clouds' metadata services: IPv4 link-local (agents pass no IPv6 link-local packets), and the IPv6
/// address of one cloud's service.
const METADATA: [&str; 2] = ["169.254.0.0/16", "fd00:ec2::254/128"];

/// Starts watches and controllers, and returns once every store and the world are filled.
pub async fn start(client: Client, options: Options, tasks: &mut JoinSet<()>) -> Arc<Hub> {
    let mut kinds = Kinds::default();
    let (pods, pod_triggers) = kinds.register::<Pod, _>(strip::pod, observe::on_pod, pod::reconcile);
    let namespaces = kinds.watch::<Namespace>(strip::namespace, observe::on_namespace);
    let nodes = kinds.watch::<Node>(strip::node, observe::on_node);
    let (vpcs, vpc_triggers) = kinds.register::<Vpc, _>(strip::any, observe::on_vpc, vpc::reconcile);
    let (networks, network_triggers) =
        kinds.register::<Network, _>(strip::any, observe::on_network, network::reconcile);
    let (endpoints, endpoint_triggers) =
        kinds.register::<Endpoint, _>(strip::any, observe::on_endpoint, endpoint::reconcile);
    let (dividers, divider_triggers) =
        kinds.register::<Divider, _>(strip::any, observe::on_role, role::reconcile);
    let (bouncers, bouncer_triggers) =
        kinds.register::<Bouncer, _>(strip::any, observe::on_role, role::reconcile);
    let (droplets, droplet_triggers) =
        kinds.register::<Droplet, _>(strip::any, observe::on_droplet, droplet::reconcile);
    let (ip_claims, ip_claim_triggers) =
        kinds.register::<IpClaim, _>(strip::any, observe::on_ip_claim, claim::reconcile);
    let (vni_claims, vni_claim_triggers) =
        kinds.register::<VniClaim, _>(strip::any, observe::on_vni_claim, vni_claim::reconcile);
    let (services, service_triggers) =
        kinds.register::<Service, _>(strip::service, on_service, service::reconcile);
    let slices = kinds.watch::<EndpointSlice>(strip::slice, on_slice);
    let mut optional = Kinds::if_served();
    let (service_cidrs, service_cidr_triggers) = optional.register::<ServiceCIDR, _>(
        strip::any,
        service_range::on_service_cidr,
        service_range::reconcile,
    );
    let (network_policies, network_policy_triggers) = kinds.register::<NetworkPolicy, _>(
        strip::network_policy,
        network_policy::on_change,
        network_policy::reconcile,
    );
    let (cluster_policies, cluster_policy_triggers) = optional.register::<ClusterNetworkPolicy, _>(
        strip::any,
        cluster_network_policy::on_change,
        cluster_network_policy::reconcile,
    );
    let policy_states = optional.watch::<PolicyState>(strip::any, policy_state::on_change);
    let triggers = Triggers {
        vpcs: vpc_triggers,
        networks: network_triggers,
        dividers: divider_triggers,
        bouncers: bouncer_triggers,
        droplets: droplet_triggers,
        endpoints: endpoint_triggers,
        pods: pod_triggers,
        claims: ip_claim_triggers,
        vni_claims: vni_claim_triggers,
        services: service_triggers,
        service_cidrs: service_cidr_triggers,
        network_policies: network_policy_triggers,
        cluster_policies: cluster_policy_triggers,
    };
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
        service_cidrs,
        network_policies,
        cluster_policies,
        policy_states,
    };
    let hub = Arc::new(make_hub(&options, triggers));
    let events = Events::start(client.clone(), tasks);
    let context = Arc::new(Context::new(client, hub.clone(), stores, events, options));
    let mut filling = kinds.start_watches(&context, tasks);
    filling.extend(optional.start_watches(&context, tasks));
    // Before the world is complete, objects that it lacks would be taken for deleted.
    for filled in filling {
        let _ = filled.await;
    }
    info!("caches are filled");
    judge_again(&context);
    metrics::leads(&context);
    kinds.start_controllers(&context, tasks);
    optional.start_controllers(&context, tasks);
    let stores = &context.stores;
    tasks.spawn(resync(stores.pods.clone(), hub.triggers.pods.clone()));
    tasks.spawn(resync(stores.endpoints.clone(), hub.triggers.endpoints.clone()));
    tasks.spawn(resync(stores.ip_claims.clone(), hub.triggers.claims.clone()));
    tasks.spawn(heartbeat_owners::tend(context.clone()));
    tasks.spawn(dropped::tell(context.clone()));
    tasks.spawn(vip_members::write(context.clone()));
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
fn judge_again(context: &Context) {
    for droplet in context.stores.droplets.state() {
        observe::on_droplet(context, &Change::Applied((*droplet).clone()));
    }
    for network in context.stores.networks.state() {
        observe::on_network(context, &Change::Applied((*network).clone()));
    }
    observe::sync_all_namespaces(context);
    for endpoint in context.stores.endpoints.state() {
        sync_endpoint(&endpoint, context);
    }
    // The backends of Services are endpoints.
    for endpoint in context.stores.endpoints.state() {
        sync_service(&endpoint, context);
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
    context.hub.serve();
    info!("droplets get their programs");
    std::future::pending::<()>().await;
}

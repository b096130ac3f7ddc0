//! Puts the daemon together: adopt what is there, attach, then serve.
//!
//! Invariant: every step that can fail for a reason of this node comes before the CNI socket is there. After that only
//! back-off can happen. Stopping leaves maps, links, veths, routes and files in place.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rtnetlink::Handle;
use thiserror::Error;
use thuban_authority::{Ca, CertificateError, ServerCertificate};
use thuban_common::tables::{CONFIG_TRANSIT_AT_XDP, ConfigEntry, EndpointKey, OnLinkEntry};
use thuban_proto::cni::cni_client::CniClient;
use thuban_proto::cni::{CniError, StatusRequest};
use thuban_telemetry::Guard;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;
use tonic::transport::Endpoint;
use tracing::{error, info, warn};

use crate::askers::Askers;
use crate::attachments::store::{Loaded, Owner, Store, StoreError};
use crate::attachments::{Attachment, AttachmentId};
use crate::boot_file::BootFile;
use crate::cni;
use crate::contact::Contact;
use crate::dataplane::connections;
use crate::dataplane::events;
use crate::dataplane::filter;
use crate::dataplane::hook::Hook;
use crate::dataplane::hooks::{self, AgentHook, TransitHook, TransitHookChoice};
use crate::dataplane::links::Links;
use crate::dataplane::loader::{self, LoadError};
use crate::dataplane::pins::LinkingError;
use crate::dataplane::probes::Probes;
use crate::dataplane::ring::RingError;
use crate::dataplane::seen_flows;
use crate::dataplane::services::{Marks, Services};
use crate::dataplane::tables::{TableError, Tables, write_config, write_on_link};
use crate::endpoints::Endpoints;
use crate::install::{self, InstallError};
use crate::metrics::Reclaimed;
use crate::metrics_page::MetricsPage;
use crate::netfilter::ruleset::OwnAddresses;
use crate::netfilter::{Netfilter, NetfilterError, limits};
use crate::netlink::host_end::HOST_END;
use crate::netlink::uplink::{self, Uplink};
use crate::netlink::{self, NetlinkError, aggregation, ethtool, host, sysctl, veth};
use crate::node::{Fixed, Node};
use crate::operator::client;
use crate::operator::epoch::{Epoch, EpochError};
use crate::program::Silent;
use crate::servers;
use crate::settings::{Aggregation, FlowMode, MetricsAddress, RunSettings};
use crate::socket::{self, ServerError};
use crate::state::State;
use crate::state::policies::Policies;
use crate::tasks::{
    check_backends, dns_views, expire_connections, expire_policies, follow_routes, health_checks,
    host_endpoint, limit_pods, node_port_lease, probe_members, reclaim, register, report_denials,
    report_loads, restore_rules, shape_pods, subscribe, tell_flows, watch_uplink,
};
use crate::{boot, metrics};

/// The most wanted rows that wait to be asked for; agents ask again for those beyond.
const WANTED_QUEUE: usize = 1024;

/// How long a probe may take: less than kubelet's timeout.
const PROBE_TIMEOUT: Duration = Duration::from_secs(4);

/// How long the daemon waits for calls in flight when it stops: less than the chart's `terminationGracePeriodSeconds`.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// The reason why a probe fails.
#[derive(Debug, Error)]
pub enum ProbeError {
    #[error("no process listens on the socket")]
    Connect(#[from] tonic::transport::Error),
    #[error("it does not answer within {} s", PROBE_TIMEOUT.as_secs())]
    Silent,
    #[error("it cannot answer")]
    Call(#[from] tonic::Status),
    #[error("it can't serve ADD: {0}")]
    NotReady(String),
}

#[derive(Debug, Error)]
pub enum DaemonError {
    #[error("--node-name (NODE_NAME) is empty: expected the node's name")]
    NodeName,
    #[error("cannot read the boot id")]
    BootId(#[source] std::io::Error),
    #[error("cannot look for layouts in the bpffs")]
    Layouts(#[source] std::io::Error),
    #[error("cannot make a client for the API server")]
    Kubernetes(#[source] thuban_client::ClientError),
    #[error("cannot start threads for DNS")]
    Dns(#[source] std::io::Error),
    #[error("cannot make the certificate of the page of metrics")]
    Certificate(#[from] CertificateError),
    #[error("cannot listen for signals")]
    Signal(#[source] std::io::Error),
    #[error("the uplink has changed: it was {was} and is {now}; transitd must start again")]
    UplinkChanged { was: Uplink, now: Uplink },
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    #[error(transparent)]
    Netfilter(#[from] NetfilterError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Links(#[from] LinkingError),
    #[error(transparent)]
    Tables(#[from] TableError),
    #[error(transparent)]
    Events(#[from] RingError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Epoch(#[from] EpochError),
    #[error(transparent)]
    Install(#[from] InstallError),
    #[error(transparent)]
    Server(#[from] ServerError),
}

pub async fn run(settings: RunSettings) -> Result<(), DaemonError> {
    if settings.node_name.is_empty() {
        return Err(DaemonError::NodeName);
    }
    // Nothing has been touched yet: nothing happens on a node whose configuration keeps it from talking to its API
    // server.
    let kubernetes = if settings.operator_address.is_some() {
        None
    } else {
        Some(thuban_client::in_cluster().map_err(DaemonError::Kubernetes)?)
    };
    if let Some(directory) = settings.socket.parent() {
        // A ready file of the last transitd says nothing about this one.
        let _ = std::fs::remove_file(directory.join(install::READY_FILE));
    }
    if let Some(binary) = &settings.cni_binary {
        install::binary(binary, &settings.cni_bin_dir)?;
        if let Err(error) = install::note_folders(&settings.state_dir, settings.cni_folders_on_node()) {
            warn!(
                error = &error as &dyn std::error::Error,
                "the folders of the runtime are not noted: name them to remove-from-node.sh"
            );
        }
    }
    thuban_telemetry::traces::begin("transitd", &settings.node_name);
    let (node, wanted, probes) = start(settings).await?;
    let locator = servers::operator(&node.settings, kubernetes.as_ref());
    let epoch = Epoch::open(node.settings.state_dir.join("epoch"))?;
    tokio::spawn(client::run(Arc::clone(&node), locator, epoch));
    tokio::spawn(subscribe::run(Arc::clone(&node), wanted));
    tokio::spawn(report_loads::run(Arc::clone(&node)));
    tokio::spawn(report_denials::run(Arc::clone(&node)));
    if let Some(locator) = servers::observe(&node.settings, kubernetes.as_ref()) {
        tokio::spawn(tell_flows::run(Arc::clone(&node), locator));
    }
    tokio::spawn(host_endpoint::run(Arc::clone(&node)));
    tokio::spawn(health_checks::run(Arc::clone(&node)));
    tokio::spawn(check_backends::run(Arc::clone(&node)));
    tokio::spawn(expire_connections::run(Arc::clone(&node)));
    tokio::spawn(expire_policies::run(Arc::clone(&node)));
    tokio::spawn(reclaim::run(Arc::clone(&node)));
    tokio::spawn(restore_rules::run(Arc::clone(&node)));
    tokio::spawn(limit_pods::run(Arc::clone(&node)));
    tokio::spawn(shape_pods::run(Arc::clone(&node)));
    tokio::spawn(follow_routes::run(Arc::clone(&node)));
    tokio::spawn(node_port_lease::run(Arc::clone(&node)));
    tokio::spawn(probe_members::run(Arc::clone(&node), probes));
    tokio::spawn(install::when_synced(Arc::clone(&node)));
    serve_metrics(&node, kubernetes.as_ref())?;
    if let Some(client) = kubernetes {
        tokio::spawn(register::run(Arc::clone(&node), client));
    }
    let mut terminate = signal(SignalKind::terminate()).map_err(DaemonError::Signal)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(DaemonError::Signal)?;
    let stopped = Arc::clone(&node);
    let (stopping, is_stopping) = oneshot::channel();
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stopped.traces.close();
        stopped.denials.close();
        info!("stopping; the data plane stays as it is");
        let _ = stopping.send(());
    };
    let serving = cni::serve(Arc::clone(&node), stop);
    tokio::select! {
        served = serving => Ok(served?),
        () = overdue(is_stopping) => {
            warn!("stopping, though a call is still in flight: its client does not read");
            Ok(())
        }
        now = watch_uplink::run(&node) => Err(DaemonError::UplinkChanged {
            was: node.uplink.clone(),
            now,
        }),
    }
}

/// Waits until the daemon has been stopping for longer than a call may take. A client that does not read keeps its
/// connection open for ever.
async fn overdue(is_stopping: oneshot::Receiver<()>) {
    if is_stopping.await.is_err() {
        std::future::pending::<()>().await;
    }
    sleep(STOP_TIMEOUT).await;
}

/// Serves metrics, if they are wanted: on loopback to everybody there, at the node's address to who may get them.
/// Without a client of the API server nobody can prove that.
fn serve_metrics(node: &Arc<Node>, client: Option<&kube::Client>) -> Result<(), DaemonError> {
    const SETTING: &str = "THUBAN_TRANSITD_METRICS_PORT";
    let Some(address) = metrics_address(node) else {
        return Ok(());
    };
    let pages = MetricsPage::new(Arc::clone(node));
    match node.settings.metrics_address {
        MetricsAddress::Loopback => {
            tokio::spawn(thuban_telemetry::serve(address, SETTING, pages));
        }
        MetricsAddress::Node => {
            let certificate = Arc::new(own_certificate()?);
            let guard = Guard::new(certificate, client.cloned()).map_err(CertificateError::from)?;
            tokio::spawn(thuban_telemetry::serve_guarded(address, SETTING, pages, guard));
        }
    }
    Ok(())
}

/// Makes a certificate that nobody can verify: transitd has no key of a CA, because a node may be taken over.
fn own_certificate() -> Result<ServerCertificate, CertificateError> {
    const NAME: &str = "transitd";
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let ca = Ca::make(NAME, since.unwrap_or_default().as_secs())?;
    Ok(ServerCertificate::new(ca.sign(NAME)?))
}

fn metrics_address(node: &Node) -> Option<SocketAddr> {
    let address = match node.settings.metrics_address {
        MetricsAddress::Loopback => Ipv4Addr::LOCALHOST,
        MetricsAddress::Node => node.uplink.address,
    };
    let port = node.settings.metrics_port;
    (port != 0).then(|| SocketAddr::new(address.into(), port))
}

/// Adopts the pins and the attachments, attaches every program, and clears what crashes left.
async fn start(
    mut settings: RunSettings,
) -> Result<(Arc<Node>, mpsc::Receiver<EndpointKey>, Probes), DaemonError> {
    let boot_id = boot::id().map_err(DaemonError::BootId)?;
    let owner = Owner {
        node: settings.node_name.clone(),
        boot_id: boot_id.clone(),
    };
    let askers = answer_queries(&settings, &owner)?;
    let netlink = netlink::connect()?;
    let uplink = uplink::find(&netlink, settings.interface.as_deref(), settings.node_ip).await?;
    let store = Store::open(settings.state_dir.join("attachments"), owner.clone())?;
    let endpoints = Endpoints::new(settings.state_dir.join("endpoints"), owner.clone());
    let contact = Contact::new(settings.state_dir.join("contact"), owner.clone());
    let ports = BootFile::new(settings.state_dir.join("ports"), owner);
    let attachments = load_attachments(&store)?;
    metrics::adopts(attachments.len());

    host::setup(&netlink, &settings.proc_sys_net, &uplink.name).await?;
    let own = OwnAddresses {
        dns: settings.cluster_dns,
        underlay: uplink.address,
        pod_ports: pod_ports(&settings),
    };
    let mut netfilter = Netfilter::new(settings.nft(), own, ports);
    netfilter.ensure()?;
    let maps = settings.pins.maps();
    let layouts = settings.pins.other_layouts().map_err(DaemonError::Layouts)?;
    if !layouts.is_empty() {
        info!(
            ?layouts,
            "programs of another layout stay in place until the operator's rows are here"
        );
    }
    let mut ebpf = loader::load(&settings.programs, &settings.pins, settings.flow_mode())?;
    events::watch_log(&mut ebpf);
    // It isn't known yet where transit will be. The flag is set, because the tc program must accept frames that XDP
    // decapsulates.
    write_config(&maps, config(&uplink, TransitHook::Xdp, settings.flow_mode()))?;
    // Routes may have changed since the last transitd; `follow_routes` looks at them soon.
    write_on_link(&maps, OnLinkEntry::NONE)?;
    connections::write_room(&maps)?;
    let services = Services::open(&maps)?;
    let probes = Probes::open(&mut ebpf, &maps, uplink.address.octets())?;
    let mut links = Links::new(ebpf, settings.pins.links(), layouts);
    let mut state = State::new(
        Tables::open(&maps)?,
        Policies::open(&maps)?,
        &services,
        Marks::open(&maps)?,
        own,
        attachments,
    );
    state.is_replacing = links.is_replacing();
    state.remember(endpoints.load());
    state.remember_silent(Silent(probes.silent()?));
    state.visible_before = askers.visible();
    state.heard = contact.load();
    let attaching = Attaching {
        links: &mut links,
        netfilter: &mut netfilter,
        netlink: &netlink,
        settings: &settings,
    };
    let transit_hook = attaching.transit(&state, &uplink).await?;
    write_config(&maps, config(&uplink, transit_hook, settings.flow_mode()))?;
    settings.agent_hook = hooks::agent(settings.agent_hook, transit_hook);
    adopt(&mut state, &mut links, &netlink, settings.agent_hook).await?;
    netfilter.limit(state.limited_pods())?;

    let (sender, wanted) = mpsc::channel(WANTED_QUEUE);
    events::watch_wanted(&maps, sender)?;
    let fixed = Fixed {
        uplink,
        transit_hook,
        store,
        netlink,
        boot_id,
        endpoints,
        askers,
        contact,
        services,
        links,
        netfilter,
    };
    Ok((Arc::new(Node::new(settings, fixed, state)), wanted, probes))
}

/// Starts DNS. DNS comes first, because pods wait for it while the rest of the start takes its time.
fn answer_queries(settings: &RunSettings, owner: &Owner) -> Result<Arc<Askers>, DaemonError> {
    let path = settings.state_dir.join("askers");
    let askers = Askers::open(path, owner.clone(), settings.cluster_domain.clone());
    let askers = Arc::new(askers);
    if let Some(cluster_dns) = settings.cluster_dns {
        dns_views::start(Arc::clone(&askers), cluster_dns).map_err(DaemonError::Dns)?;
    } else {
        info!("THUBAN_CLUSTER_DNS is not set: only the VPC that nodes are in has the cluster's DNS");
    }
    Ok(askers)
}

/// Returns the source ports for connections of pods.
fn pod_ports(settings: &RunSettings) -> Option<(u16, u16)> {
    let own = sysctl::local_ports(&settings.proc_sys_net)?;
    let ports = limits::pod_ports(&own);
    if ports.is_none() {
        warn!(
            first = own.start(),
            last = own.end(),
            "net.ipv4.ip_local_port_range leaves no ports apart: pods can take those of the node's own connections"
        );
    }
    ports.map(RangeInclusive::into_inner)
}

fn config(uplink: &Uplink, transit: TransitHook, flows: FlowMode) -> ConfigEntry {
    let flags = match transit {
        TransitHook::Xdp => CONFIG_TRANSIT_AT_XDP,
        TransitHook::Tc => 0,
    };
    ConfigEntry {
        droplet: uplink.address.octets(),
        uplink: uplink.ifindex,
        mtu: uplink.mtu,
        flags: flags | seen_flows::flags(flows),
        // Random bits of the system; never 0.
        seed: RandomState::new().hash_one(0) as u32 | 1,
    }
}

/// The things that attaching transit needs.
struct Attaching<'a> {
    links: &'a mut Links,
    netfilter: &'a mut Netfilter,
    netlink: &'a Handle,
    settings: &'a RunSettings,
}

impl Attaching<'_> {
    /// Chooses transit's hook and, where that is tc and frames come segmented, has them aggregated.
    async fn transit(self, state: &State, uplink: &Uplink) -> Result<TransitHook, DaemonError> {
        let Self {
            links,
            netfilter,
            netlink,
            settings,
        } = self;
        let nic = hooks::examine(&uplink.name)?;
        let choice = settings.transit_hook;
        // Agents at XDP need transit at XDP.
        let wanted = settings.aggregation == Aggregation::Auto
            && settings.agent_hook == AgentHook::Tc
            && choice != TransitHookChoice::Xdp
            && !nic.passes_gso;
        // The rule comes before a device that would take packets to the port, and stays as long as there is one.
        let has_device = netlink::find_link(netlink, aggregation::LINK).await?.is_some();
        let (droplets, are_all) = state.droplets_to_protect();
        netfilter.claim_port(wanted || has_device);
        netfilter.protect_port(droplets.clone(), are_all)?;
        let mut aggregates = wanted && has_aggregation(netlink).await;
        let preferred = hooks::preferred(choice, &nic, aggregates);
        let hook = hooks::attach(links, choice, preferred, &uplink.name)?;
        aggregates &= hook == TransitHook::Tc;
        if aggregates {
            ethtool::turn_on(&uplink.name, &["rx-gro"])?;
        } else {
            aggregation::teardown(netlink).await?;
            netfilter.claim_port(false);
            netfilter.protect_port(droplets, are_all)?;
        }
        info!(
            uplink = uplink.name,
            address = %uplink.address,
            mtu = uplink.mtu,
            hook = hook.name(),
            aggregates,
            "transit attached"
        );
        Ok(hook)
    }
}

async fn has_aggregation(netlink: &Handle) -> bool {
    match aggregation::setup(netlink).await {
        Ok(()) => true,
        Err(error) => {
            warn!(
                error = &error as &dyn std::error::Error,
                "received segments are not aggregated: no VXLAN in this kernel, or UDP port 6081 is taken"
            );
            false
        }
    }
}

fn load_attachments(store: &Store) -> Result<BTreeMap<AttachmentId, Attachment>, DaemonError> {
    let Loaded {
        attachments,
        of_other_boots,
        errors,
    } = store.load()?;
    for failure in errors {
        metrics::disbelieves(&failure);
        error!(
            error = &failure as &dyn std::error::Error,
            "an attachment file was put aside; its pod must be made again"
        );
    }
    if of_other_boots > 0 {
        metrics::reclaims(Reclaimed::Rebooted, of_other_boots);
        info!(
            attachments = of_other_boots,
            "the node was booted again: nothing of its attachments is there any more"
        );
    }
    let keyed = attachments.into_iter().map(|a| (a.id.clone(), a));
    Ok(keyed.collect())
}

/// Puts this version's program at the agents of living veths. Removes veths, rows, routes and pins without an
/// attachment.
async fn adopt(
    state: &mut State,
    links: &mut Links,
    netlink: &Handle,
    agent_hook: AgentHook,
) -> Result<(), DaemonError> {
    let living = veth::list(netlink).await?;
    let (known, orphans): (Vec<_>, Vec<_>) = living
        .into_iter()
        .partition(|(name, _)| state.attachments.values().any(|a| a.host_interface == *name));
    let indexes: Vec<u32> = known.iter().map(|(_, index)| *index).collect();
    let mut gone = state.interfaces();
    gone.retain(|index| !indexes.contains(index));
    for index in &gone {
        state.fence_interface(*index)?;
    }
    metrics::reclaims(Reclaimed::Rows, gone.len());
    for (name, _) in &orphans {
        warn!(interface = name, "removing a veth without an attachment");
        veth::delete(netlink, name).await?;
    }
    metrics::reclaims(Reclaimed::Veth, orphans.len());
    let mut with_host = indexes.clone();
    if state.attachments.values().any(Attachment::is_host)
        && let Some(link) = netlink::find_link(netlink, HOST_END).await?
    {
        with_host.push(link.header.index);
    }
    veth::sweep_routes(netlink, &with_host).await?;
    if state.attachments.values().any(|a| a.address6.is_some()) {
        host::setup_ipv6(netlink).await?;
    }
    for (name, index) in &known {
        if filter::program(netlink, *index).await?.is_some() {
            links.remember_filter(name);
        }
        links.ensure_or_keep(Hook::AgentTc, name)?;
        // A pod made for tc sends unsummed and unsegmented frames, which XDP can't redirect.
        let takes_xdp = |a: &Attachment| a.host_interface == *name && a.takes_xdp;
        if agent_hook == AgentHook::Xdp && state.attachments.values().any(takes_xdp) {
            links.ensure_or_keep(Hook::AgentXdp, name)?;
        } else {
            links.give_up(Hook::AgentXdp, name)?;
        }
    }
    let names: Vec<String> = known.into_iter().map(|(name, _)| name).collect();
    let removed = links.sweep(&names)?;
    metrics::reclaims(Reclaimed::Pin, removed.len());
    info!(
        attachments = names.len(),
        orphans = orphans.len(),
        pins_removed = removed.len(),
        "adopted"
    );
    Ok(())
}

/// Asks the daemon for the probes: whether it answers and, unless `alive`, whether it would serve an ADD.
pub async fn status(socket: PathBuf, alive: bool) -> Result<(), ProbeError> {
    let work = async {
        let channel = Endpoint::from_static("http://transitd")
            .connect_with_connector(socket::connector(socket))
            .await?;
        let reply = CniClient::new(channel).status(StatusRequest {}).await?;
        Ok(reply.into_inner())
    };
    let reply = tokio::time::timeout(PROBE_TIMEOUT, work)
        .await
        .unwrap_or(Err(ProbeError::Silent))?;
    match reply.error {
        Some(CniError { message, .. }) if !alive => Err(ProbeError::NotReady(message)),
        _ => Ok(()),
    }
}

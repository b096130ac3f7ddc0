//! kube-network-policies (sigs.k8s.io) on plain routing: it judges the first packet of each connection in user space.
//!
//! Its program runs unmodified at both nodes, and learns pods and policies from an API server. Only the rules that
//! lead packets to its queue are the bench's ([`queue`] says why). Its cases share the rig: before each measure the
//! API server gets the policy of the case, first without the rule that lets the client in.

mod daemon;
mod objects;
mod queue;

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path as Folder, PathBuf},
    rc::Rc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use thuban_cluster::{Cluster, NODES, bare, wait::wait_for};

use super::nft::PODS;
use crate::{
    bench::{
        api_server::ApiServer,
        datapath::{
            Case, Plan,
            rigs::{Path, PathCase, cable},
        },
        results::Sample,
        traffic::Measure,
    },
    rig::traffic::{End, echo_udp},
};
use daemon::Daemon;

/// Name of the cluster of which only etcd and the API server exist.
const CLUSTER: &str = "policy";
/// How long a policy takes at most until it is in force.
const EFFECT_TIMEOUT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(100);
/// How long a policy is in force before a measure begins. After a change the program writes its table, and on this
/// kernel tries it five times more. A connection that began just then was seen to take a second more.
const SETTLE_TIME: Duration = Duration::from_secs(1);

/// The programs that the cases need.
#[derive(Clone, Debug)]
pub struct Parts {
    /// Folder with etcd, kube-apiserver and kubectl.
    pub binaries: PathBuf,
    /// The program of kube-network-policies.
    pub program: PathBuf,
}

/// The rig with its API server and the programs at both nodes.
pub struct Site {
    daemons: Vec<Daemon>,
    cluster: Cluster,
    server: ApiServer,
    path: Rc<Path>,
}

impl Site {
    /// Sets all up, and proves that each node alone obeys the policy. The programs' logs are written to `folder`.
    pub fn up(parts: &Parts, folder: &Folder) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let path = Rc::new(cable::path(cable::spec_of("plain-seg")?)?);
        let server = ApiServer::up(CLUSTER, &parts.binaries)?;
        let mut site = Self {
            daemons: Vec::new(),
            cluster: server.cluster()?,
            server,
            path,
        };
        let instance = site.server.instance();
        let token = objects::create(&site.cluster)?;
        for (node, name) in site.path.nodes.iter().zip(NODES) {
            bare::connect(instance, name, node.namespace.name())?;
            let log = folder.join(format!("kube-network-policies-{name}.log"));
            let daemon = Daemon::start(parts, instance, name, &node.namespace, &token, log)?;
            site.daemons.push(daemon);
        }
        for (daemon, node) in site.daemons.iter().zip(site.path.nodes.iter()) {
            daemon.await_queue(&node.namespace)?;
        }
        site.prove()?;
        Ok(site)
    }

    /// Leads packets to one program after the other, and then to both.
    fn prove(&self) -> Result<()> {
        let ends = || self.path.nodes.iter().zip(PODS);
        for (node, pod) in ends() {
            queue::lead(&node.namespace, pod)?;
            self.enforce(1)?;
            queue::remove(&node.namespace)?;
        }
        for (node, pod) in ends() {
            queue::lead(&node.namespace, pod)?;
        }
        Ok(())
    }

    /// Puts the policy with that many entries in the place of the one before. On the way it proves that the policy is
    /// asked: no datagram comes through without the entry for the pods' label.
    fn enforce(&self, entries: usize) -> Result<()> {
        for (allows, what) in [
            (false, "the policy to stop datagrams"),
            (true, "a datagram to come through"),
        ] {
            objects::apply_policy(&self.cluster, entries, allows)?;
            wait_for(what, EFFECT_TIMEOUT, POLL, || Ok(self.passes()? == allows))
                .with_context(|| self.logs())?;
        }
        Ok(())
    }

    /// Whether a datagram from the client is answered. It is of a new connection, unlike a second ping.
    fn passes(&self) -> Result<bool> {
        let [client, server] = [&self.path.client, &self.path.server];
        let end = |namespace, address: Ipv4Addr| End {
            namespace,
            address: address.into(),
        };
        echo_udp(end(client, PODS[0]), end(server, self.path.address), 56)
    }

    fn logs(&self) -> String {
        let logs: Vec<String> = self
            .daemons
            .iter()
            .map(|daemon| daemon.log().display().to_string())
            .collect();
        format!("kube-network-policies; see {}", logs.join(" and "))
    }
}

/// A measure with a policy of that many entries in each direction.
pub struct SiteCase {
    pub name: &'static str,
    pub entries: usize,
    pub measure: Measure,
    pub site: Rc<Site>,
}

impl Case for SiteCase {
    fn name(&self) -> &str {
        self.name
    }

    fn metrics(&self) -> Vec<&'static str> {
        self.measure.metrics().to_vec()
    }

    fn measure(&mut self, plan: &Plan) -> Result<Vec<Sample>> {
        self.site.enforce(self.entries)?;
        thread::sleep(SETTLE_TIME);
        let mut case = PathCase {
            path: Rc::clone(&self.site.path),
            measure: self.measure,
        };
        case.measure(plan).with_context(|| self.site.logs())
    }
}

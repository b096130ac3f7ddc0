//! Brings HAProxy to what lbaasd said.
//!
//! What a member gets and what a certificate is change in the worker, also while a reload has to wait. All else is a
//! reload, and reloads are some seconds apart: each leaves a worker behind until its connections have ended. What
//! HAProxy refuses is left out, so that no tenant keeps the others from what they want.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;
use thuban_api::TlsVersion;
use thuban_api::proxies::{Pem, Proxy, ProxyMember};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::config::{certificate_path, config, listener_name};
use super::control::{Control, ControlError, Info, MemberState};
use super::folder::{Folder, FolderError};
use super::ports::{Reserved, is_free, without_taken};
use super::reloads::Reloads;
use crate::ledger::SharedLedger;

/// How often HAProxy is looked at, if nothing is heard.
const LOOK: Duration = Duration::from_secs(1);
/// How long a new worker may take to its first connection.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long HAProxy may take to check a configuration.
const CHECK_TIMEOUT: Duration = Duration::from_secs(20);
/// How often a new worker is looked for.
const POLL: Duration = Duration::from_millis(100);

#[derive(Debug, Error)]
pub enum ManagerError {
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error("checking HAProxy's configuration by {}: {source}", program.display())]
    Check { program: PathBuf, source: io::Error },
    #[error("HAProxy does not check its configuration in time")]
    SlowCheck,
    #[error("HAProxy takes no configuration at all: the log says why")]
    Broken,
    #[error("HAProxy has no worker with its new configuration: its log says why")]
    NotLoaded,
}

/// What a worker has.
#[derive(Debug)]
struct Applied {
    /// The Vips as they are in the text of the configuration.
    proxies: Vec<Proxy>,
    worker: Info,
    /// What members get, as far as it is known, by listener and member.
    members: BTreeMap<(String, String), MemberState>,
    /// Certificates, by their files.
    certificates: BTreeMap<PathBuf, Pem>,
}

pub struct Manager {
    folder: Folder,
    control: Control,
    /// The program that checks configurations.
    program: PathBuf,
    applied: Option<Applied>,
    /// Vips, without their members, that HAProxy does not take.
    refused: Vec<Proxy>,
    /// Ports that HAProxy leaves to other processes.
    reserved: Reserved,
    /// The same for each Vip, as they were told.
    taken: BTreeSet<(String, u16)>,
    reloads: Reloads,
    /// Whether it is told that something fails.
    is_failing: bool,
}

impl Manager {
    pub fn new(folder: Folder, program: PathBuf) -> Self {
        Self {
            control: Control::new(folder.socket()),
            folder,
            program,
            applied: None,
            refused: Vec::new(),
            reserved: Reserved::default(),
            taken: BTreeSet::new(),
            reloads: Reloads::default(),
            is_failing: false,
        }
    }

    /// Brings HAProxy closer to what is wanted. Returns what it serves: addresses with their Services.
    pub async fn sync(&mut self, wanted: Option<&[Proxy]>) -> BTreeSet<(IpAddr, String)> {
        match self.try_sync(wanted).await {
            Ok(()) => self.is_failing = false,
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    warn!(%error, "HAProxy is not as wanted, trying again");
                }
            }
        }
        let proxies = self.applied.iter().flat_map(|applied| &applied.proxies);
        served(proxies)
    }

    async fn try_sync(&mut self, wanted: Option<&[Proxy]>) -> Result<(), ManagerError> {
        let worker = match self.control.info().await {
            Ok(worker) => worker,
            Err(error) => {
                self.applied = None;
                return Err(error.into());
            }
        };
        if self
            .applied
            .as_ref()
            .is_some_and(|applied| applied.worker != worker)
        {
            // It has started anew.
            self.applied = None;
        }
        if self.applied.is_none() {
            self.adopt(worker);
        }
        let Some(wanted) = wanted else {
            return Ok(());
        };
        let usable = self.usable(wanted);
        let is_near = |applied: &Applied| !needs_reload(&applied.proxies, &usable);
        let is_near = self.applied.as_ref().is_some_and(is_near);
        if self.adjust(&usable).await? && is_near {
            return Ok(());
        }
        self.reload(usable).await
    }

    /// Takes over a worker whose configuration an earlier speaker wrote.
    fn adopt(&mut self, worker: Info) {
        let written = self.folder.read_applied();
        let is_its = |proxies: &Vec<Proxy>| config(proxies, self.folder.path()).digest == worker.digest;
        self.applied = written.filter(is_its).map(|proxies| Applied {
            proxies,
            worker,
            members: BTreeMap::new(),
            certificates: BTreeMap::new(),
        });
    }

    /// Leaves out what HAProxy can't have.
    fn usable(&mut self, wanted: &[Proxy]) -> Vec<Proxy> {
        self.refused
            .retain(|refused| wanted.iter().any(|wanted| without_members(wanted) == *refused));
        let mut all_taken = BTreeSet::new();
        let mut usable = Vec::new();
        let (reserved, now) = (&mut self.reserved, Instant::now());
        for proxy in wanted {
            if self.refused.contains(&without_members(proxy)) {
                continue;
            }
            let is_usable = |address, port| reserved.admits(port, is_free(address, port), now);
            let (proxy, taken) = without_taken(proxy.clone(), is_usable);
            let vip = format!("{}/{}", proxy.namespace, proxy.name);
            all_taken.extend(taken.iter().map(|port| (vip.clone(), port.port)));
            usable.push(proxy);
        }
        for (vip, port) in all_taken.difference(&self.taken) {
            warn!(
                vip,
                port,
                "another process of the node has the port, or had it within an hour: HAProxy does not serve it here"
            );
        }
        self.taken = all_taken;
        usable
    }

    /// Starts a worker with another configuration, which takes the new connections.
    async fn reload(&mut self, proxies: Vec<Proxy>) -> Result<(), ManagerError> {
        if !self.reloads.begin(Instant::now()) {
            return Ok(());
        }
        self.folder.write_certificates(&proxies)?;
        let proxies = self.checked(proxies).await?;
        let wanted = config(&proxies, self.folder.path());
        self.folder.write(&self.folder.config(), wanted.text.as_bytes())?;
        self.folder.keep_applied(&proxies)?;
        self.control.reload().await?;
        let loaded = timeout(RELOAD_TIMEOUT, self.loaded(&wanted.digest)).await;
        let worker = loaded.map_err(|_| ManagerError::NotLoaded)?;
        self.folder.remove_certificates_but(&proxies);
        info!(
            vips = proxies.len(),
            worker = worker.pid,
            "HAProxy has another configuration"
        );
        let folder = self.folder.path();
        let certificate = |proxy: &Proxy| Some((certificate_path(proxy, folder), proxy.tls.clone()?.pem));
        let certificates = proxies.iter().filter_map(certificate).collect();
        self.applied = Some(Applied {
            members: configured(&proxies),
            proxies,
            worker,
            certificates,
        });
        Ok(())
    }

    /// Waits for a worker with this configuration.
    async fn loaded(&self, digest: &str) -> Info {
        loop {
            if let Ok(worker) = self.control.info().await
                && worker.digest == digest
            {
                return worker;
            }
            sleep(POLL).await;
        }
    }

    /// Returns the Vips that HAProxy takes. What HAProxy refuses is halved: a tenant whose Vip is refused again and
    /// again must not have every other Vip checked alone each time.
    async fn checked(&mut self, proxies: Vec<Proxy>) -> Result<Vec<Proxy>, ManagerError> {
        let mut taken = Vec::new();
        // The next one is at the end.
        let mut parts = vec![proxies];
        let mut is_sound = false;
        while let Some(mut part) = parts.pop() {
            if self.check(&part).await? {
                taken.append(&mut part);
                continue;
            }
            if !is_sound && !self.check(&[]).await? {
                return Err(ManagerError::Broken);
            }
            is_sound = true;
            if let [proxy] = part.as_slice() {
                let (namespace, name) = (&proxy.namespace, &proxy.name);
                warn!(
                    namespace,
                    name, "HAProxy does not take this Vip: this node does not serve it"
                );
                self.refused.push(without_members(proxy));
            } else if part.len() > 1 {
                parts.append(&mut halves(part));
            }
        }
        Ok(taken)
    }

    /// Whether HAProxy takes a configuration.
    async fn check(&self, proxies: &[Proxy]) -> Result<bool, ManagerError> {
        let candidate = self.folder.candidate();
        let text = config(proxies, self.folder.path()).text;
        self.folder.write(&candidate, text.as_bytes())?;
        let mut command = Command::new(&self.program);
        command.arg("-c").arg("-f").arg(&candidate);
        let checked = timeout(CHECK_TIMEOUT, command.kill_on_drop(true).output()).await;
        let checked = checked.map_err(|_| ManagerError::SlowCheck)?;
        let checked = checked.map_err(|source| ManagerError::Check {
            program: self.program.clone(),
            source,
        })?;
        if !checked.status.success() {
            let said = String::from_utf8_lossy(&checked.stderr);
            warn!(%said, "HAProxy does not take a configuration");
        }
        Ok(checked.status.success())
    }

    /// Changes members and certificates of the Vips that need no reload. Returns whether the worker took all of that.
    /// What it does not take holds up no other Vip.
    async fn adjust(&mut self, wanted: &[Proxy]) -> Result<bool, ManagerError> {
        let (control, folder) = (&self.control, &self.folder);
        let Some(applied) = &mut self.applied else {
            return Ok(false);
        };
        let mut is_enough = true;
        for has in &applied.proxies {
            let Some(wanted) = alike(has, wanted) else {
                continue;
            };
            if let Some(tls) = &wanted.tls {
                let path = certificate_path(wanted, folder.path());
                if applied.certificates.get(&path) != Some(&tls.pem) {
                    let set = control.set_certificate(&path.to_string_lossy(), &tls.pem).await;
                    if let Err(error) = set {
                        // A long chain of certificates exceeds HAProxy's buffer.
                        warn!(%error, "a certificate needs a reload");
                        is_enough = false;
                    } else {
                        folder.write(&path, tls.pem.text().as_bytes())?;
                        info!(
                            vip = wanted.name,
                            namespace = wanted.namespace,
                            "another certificate is set"
                        );
                        applied.certificates.insert(path, tls.pem.clone());
                    }
                }
            }
            for member in &has.members {
                let state = state_of(member, wanted);
                for port in &has.ports {
                    let key = (listener_name(has, *port), member.node.clone());
                    if applied.members.get(&key) != Some(&state) {
                        let set = control.set_member(&key.0, &key.1, state).await;
                        match set {
                            Ok(()) => {
                                applied.members.insert(key, state);
                            }
                            Err(error @ ControlError::Refused { .. }) => {
                                warn!(%error, "a member needs a reload");
                                is_enough = false;
                            }
                            Err(error) => return Err(error.into()),
                        }
                    }
                }
            }
        }
        Ok(is_enough)
    }
}

/// Returns both halves of two Vips or more, the second half first.
fn halves(mut proxies: Vec<Proxy>) -> Vec<Vec<Proxy>> {
    let second = proxies.split_off(proxies.len() / 2);
    vec![second, proxies]
}

/// Whether a worker with the configuration for these Vips can't be brought to what is wanted.
fn needs_reload(has: &[Proxy], wanted: &[Proxy]) -> bool {
    let is_same = |(has, wanted): (&Proxy, &Proxy)| {
        let is_known = |member: &ProxyMember| {
            let mut known = has.members.iter();
            known.any(|known| known.node == member.node && known.address == member.address)
        };
        shape(has) == shape(wanted) && wanted.members.iter().all(is_known)
    };
    has.len() != wanted.len() || !has.iter().zip(wanted).all(is_same)
}

/// Returns the Vip among the wanted ones, in their order, that a worker can be brought to without a reload.
fn alike<'a>(has: &Proxy, wanted: &'a [Proxy]) -> Option<&'a Proxy> {
    let order = |proxy: &Proxy| (&proxy.namespace, &proxy.name).cmp(&(&has.namespace, &has.name));
    let found = wanted.get(wanted.binary_search_by(order).ok()?)?;
    (shape(has) == shape(found)).then_some(found)
}

/// Returns a Vip without what changes in a worker. That it ends TLS does not.
fn shape(proxy: &Proxy) -> (Proxy, Option<TlsVersion>) {
    let version = proxy.tls.as_ref().map(|tls| tls.min_version);
    let shape = Proxy {
        tls: None,
        ..without_members(proxy)
    };
    (shape, version)
}

fn without_members(proxy: &Proxy) -> Proxy {
    Proxy {
        members: Vec::new(),
        ..proxy.clone()
    }
}

/// Returns what members get by the configuration, by listener and member.
fn configured(proxies: &[Proxy]) -> BTreeMap<(String, String), MemberState> {
    let of_port = |proxy: &Proxy, port| {
        let listener = listener_name(proxy, port);
        let state = |member: &ProxyMember| {
            let key = (listener.clone(), member.node.clone());
            (key, MemberState::Weight(member.weight))
        };
        proxy.members.iter().map(state).collect::<Vec<_>>()
    };
    let of_proxy = |proxy: &Proxy| {
        let members = proxy.ports.iter().flat_map(|port| of_port(proxy, *port));
        members.collect::<Vec<_>>()
    };
    proxies.iter().flat_map(of_proxy).collect()
}

/// Returns what a member of the configuration is to get.
fn state_of(member: &ProxyMember, wanted: &Proxy) -> MemberState {
    let mut members = wanted.members.iter();
    let found = members.find(|wanted| wanted.node == member.node && wanted.address == member.address);
    found.map_or(MemberState::Out, |wanted| MemberState::Weight(wanted.weight))
}

/// Returns the addresses that Vips serve at one port at least, with their Services.
fn served<'a>(proxies: impl Iterator<Item = &'a Proxy>) -> BTreeSet<(IpAddr, String)> {
    let serving = proxies.filter(|proxy| !proxy.ports.is_empty());
    let addresses = serving.flat_map(|proxy| {
        let service = format!("{}/{}", proxy.namespace, proxy.name);
        let addresses = proxy.addresses.iter();
        addresses.map(move |address| (*address, service.clone()))
    });
    addresses.collect()
}

/// Keeps HAProxy as lbaasd wants it, and tells the ledger what it serves.
pub async fn follow(
    mut manager: Manager,
    mut wanted: watch::Receiver<Option<Vec<Proxy>>>,
    ledger: SharedLedger,
) {
    loop {
        let now = wanted.borrow_and_update().clone();
        let serving = manager.sync(now.as_deref()).await;
        ledger.lock().proxied(serving);
        tokio::select! {
            () = sleep(LOOK) => {}
            changed = wanted.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::haproxy::config::tests::shop;

    #[test]
    fn members_and_certificates_need_no_reload() {
        let has = [shop()];
        let mut wanted = shop();
        wanted.members.pop();
        wanted.members[0].weight = 7;
        assert!(!needs_reload(&has, &[wanted.clone()]));
        assert_eq!(state_of(&has[0].members[0], &wanted), MemberState::Weight(7));
        assert_eq!(state_of(&has[0].members[1], &wanted), MemberState::Out);
        assert!(
            needs_reload(&[wanted.clone()], &has),
            "a node that HAProxy does not know"
        );
        wanted.members[0].address = "192.0.2.99".parse().unwrap();
        assert!(needs_reload(&has, &[wanted]), "a node with another address");
    }

    #[test]
    fn a_vip_is_adjusted_while_another_one_waits_for_a_reload() {
        let named = |name: &str| Proxy {
            name: name.to_owned(),
            ..shop()
        };
        let mut wanted = [named("a"), named("shop"), named("z")];
        wanted[1].members.clear();
        assert_eq!(alike(&shop(), &wanted), Some(&wanted[1]));
        wanted[1].idle_seconds = Some(9);
        assert_eq!(alike(&shop(), &wanted), None, "it needs a reload itself");
        assert_eq!(alike(&named("gone"), &wanted), None);
    }

    #[test]
    fn what_else_changes_needs_a_reload() {
        let has = [shop()];
        assert!(!needs_reload(&has, &has));
        assert!(needs_reload(&has, &[]));
        let idle = Proxy {
            idle_seconds: Some(9),
            ..shop()
        };
        let other = Proxy {
            name: "other".to_owned(),
            ..shop()
        };
        assert!(needs_reload(&has, &[idle]) && needs_reload(&has, &[other]));
    }

    #[test]
    fn a_part_that_is_refused_is_halved_in_its_order() {
        let named = |name: &str| Proxy {
            name: name.to_owned(),
            ..shop()
        };
        let [a, b, c] = ["a", "b", "c"].map(named);
        let parts = halves(vec![a.clone(), b.clone(), c.clone()]);
        assert_eq!(parts, [vec![b.clone(), c.clone()], vec![a]]);
        assert_eq!(halves(vec![b.clone(), c.clone()]), [vec![c], vec![b]]);
    }

    #[test]
    fn a_new_worker_has_the_weights_of_its_configuration() {
        let listener = "red:shop:443".to_owned();
        let expected = [("a.example", 1), ("b", 256)].map(|(node, weight)| {
            let key = (listener.clone(), node.to_owned());
            (key, MemberState::Weight(weight))
        });
        assert_eq!(configured(&[shop()]), expected.into());
    }

    #[test]
    fn an_address_without_ports_is_not_served() {
        let service = "red/shop".to_owned();
        let addresses = shop().addresses.into_iter();
        let expected: BTreeSet<_> = addresses.map(|address| (address, service.clone())).collect();
        assert_eq!(served([shop()].iter()), expected);
        let without = Proxy {
            ports: Vec::new(),
            ..shop()
        };
        assert!(served([without].iter()).is_empty());
    }
}

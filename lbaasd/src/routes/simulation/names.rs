//! A DNS server that is slow, away now and then, and loses answers. Somebody else takes names there, too.
//!
//! At each moment: a name that is a Vip's is named by the Vip's status, its address is leased to the Vip, and nodes
//! announce the address until resolvers have forgotten the name.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::Event;
use serde_json::json;
use thuban_api::{DnsZone, Vip};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use super::{Lbaasd, World};
use crate::dns::names::{Context, reconcile};
use crate::dns::servers::Servers;
use crate::dns::{DnsError, Record, Records, TIMEOUT};
use crate::vip::ending::is_withdrawn;

const NAMES: [&str; 2] = ["one.apps", "two.apps"];
const TTL: u32 = 20;
/// The most milliseconds after which a request is carried out that lbaasd has given up.
const LATE: u64 = 9_000;
const SOMEBODY: &str = "somebody";

/// The records, and when each Vip's last one went.
#[derive(Default)]
pub struct Dns {
    owners: Mutex<BTreeMap<String, String>>,
    gone: Mutex<BTreeMap<String, Instant>>,
    away: Mutex<Option<Instant>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Request {
    Refresh,
    Claim,
    Withdraw,
}

impl Dns {
    pub fn check(&self, vip: Option<&Vip>, holder: Option<&str>) {
        for (name, uid) in self
            .owners
            .lock()
            .unwrap()
            .iter()
            .filter(|(_, uid)| *uid != SOMEBODY)
        {
            assert_eq!(Some(uid.as_str()), holder, "{name} has another's address");
            let status = vip
                .filter(|vip| vip.metadata.uid.as_ref() == Some(uid))
                .and_then(|vip| vip.status.as_ref());
            let noted = status.map(|status| status.dns_name.as_str());
            assert_eq!(noted, Some(name.as_str()), "nobody would remove the name");
            assert!(!vip.is_some_and(is_withdrawn), "{name} leads nowhere");
        }
        let Some(vip) = vip.filter(|vip| is_withdrawn(vip)) else {
            return;
        };
        if let Some(gone) = self.gone.lock().unwrap().get(&vip.uid().unwrap()) {
            let needed = Duration::from_secs((TTL + vip.spec.drain_seconds).into());
            // Objects tell the time in whole steps of the test's clock.
            assert!(
                gone.elapsed() >= needed,
                "resolvers or clients had too little time"
            );
        }
    }

    fn carry_out(&self, world: &World, owner: &str, name: &str, request: Request) -> bool {
        let mut owners = self.owners.lock().unwrap();
        let is_own = owners.get(name).is_some_and(|has| has == owner);
        match request {
            Request::Refresh => is_own,
            Request::Claim => {
                let is_free = !owners.contains_key(name);
                if is_free {
                    owners.insert(name.to_owned(), owner.to_owned());
                    world.count(|seen| seen.published += 1);
                } else if !is_own {
                    world.count(|seen| seen.taken += 1);
                }
                is_free
            }
            Request::Withdraw => {
                if is_own {
                    owners.remove(name);
                    let vip = world.vip.lock().unwrap().clone();
                    let removed = vip.and_then(|vip| vip.status?.name_removed_at);
                    world.count(|seen| seen.late_claims += u32::from(removed.is_some()));
                    self.gone.lock().unwrap().insert(owner.to_owned(), Instant::now());
                }
                is_own
            }
        }
    }
}

struct Server(Arc<World>);

impl Server {
    async fn ask(&self, owner: &str, name: &str, request: Request) -> Result<bool, DnsError> {
        let world = self.0.clone();
        let (sender, answer) = oneshot::channel();
        let (owner, name) = (owner.to_owned(), name.to_owned());
        // Just then a user may want another one.
        if request == Request::Claim {
            change(&world);
        }
        // A request goes on at the server after lbaasd gave it up, or crashed.
        tokio::spawn(async move {
            let most = if world.chance(2) { LATE } else { 500 };
            sleep(Duration::from_millis(world.number(most))).await;
            let until = *world.dns.away.lock().unwrap();
            if until.is_some_and(|until| until > Instant::now()) {
                return;
            }
            let done = world.dns.carry_out(&world, &owner, &name, request);
            world.check();
            world.pause(2).await;
            if !world.chance(10) {
                let _ = sender.send(done);
            }
        });
        let answer = timeout(TIMEOUT, answer).await;
        answer.ok().and_then(Result::ok).ok_or(DnsError::Late)
    }
}

impl Records for Server {
    fn refresh<'a>(&'a self, owner: &'a str, record: &'a Record) -> BoxFuture<'a, Result<bool, DnsError>> {
        Box::pin(self.ask(owner, &record.name, Request::Refresh))
    }

    fn claim<'a>(&'a self, owner: &'a str, record: &'a Record) -> BoxFuture<'a, Result<bool, DnsError>> {
        Box::pin(self.ask(owner, &record.name, Request::Claim))
    }

    fn withdraw<'a>(&'a self, owner: &'a str, name: &'a str) -> BoxFuture<'a, Result<bool, DnsError>> {
        Box::pin(self.ask(owner, name, Request::Withdraw))
    }

    fn check(&self) -> BoxFuture<'_, Result<(), DnsError>> {
        Box::pin(async { Ok(()) })
    }
}

pub fn random(world: &World) -> String {
    NAMES[usize::try_from(world.number(2)).unwrap()].to_owned()
}

/// Has the Vip want another name, perhaps.
pub fn change(world: &World) {
    let vip = world.vip.lock().unwrap().clone();
    if let Some(mut vip) = vip.filter(|vip| vip.metadata.deletion_timestamp.is_none()) {
        vip.spec.dns.as_mut().unwrap().name = random(world);
        world.write(vip);
    }
}

/// Looks at the Vip's name as an lbaasd does, which crashes now and then.
pub async fn live(lbaasd: Arc<Lbaasd>, world: Arc<World>) {
    let zone: DnsZone =
        serde_json::from_value(json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "DnsZone",
        "metadata": {"name": "apps", "uid": "zone"}, "spec": {"zone": "apps", "allowedNamespaces": {},
            "names": "Any", "ttlSeconds": TTL, "rfc2136": {"server": "192.0.2.53:53", "secret": "key"}}}))
        .unwrap();
    let (zones, mut one) = kube::runtime::reflector::store();
    let (namespaces, _none) = kube::runtime::reflector::store::<PartialObjectMeta<Namespace>>();
    let client = lbaasd.speakers.client.clone();
    let servers = Servers::new(client.clone());
    servers.set(&zone, Arc::new(Server(world.clone()))).await;
    one.apply_watcher_event(&Event::Apply(zone));
    let of = world.clone();
    let context = Arc::new(Context {
        client,
        zones,
        namespaces,
        servers,
        clock: Box::new(move || of.timestamp()),
    });
    loop {
        world.pause(6).await;
        let Some(vip) = lbaasd.speakers.vips.state().pop() else {
            continue;
        };
        let most = if world.chance(4) { 8_000 } else { 3_600_000 };
        let life = Duration::from_millis(world.number(most));
        let _ = timeout(life, reconcile(vip, context.clone())).await;
    }
}

/// Takes free names for a while, and has the server be away.
pub async fn others(world: Arc<World>) {
    loop {
        world.pause(120).await;
        if world.chance(3) {
            let back = Instant::now() + Duration::from_secs(world.number(120));
            *world.dns.away.lock().unwrap() = Some(back);
            continue;
        }
        let name = random(&world);
        let is_free = {
            let mut owners = world.dns.owners.lock().unwrap();
            let is_free = !owners.contains_key(&name);
            if is_free {
                owners.insert(name.clone(), SOMEBODY.to_owned());
            }
            is_free
        };
        if is_free {
            world.pause(60).await;
            let left = world.dns.owners.lock().unwrap().remove(&name);
            assert_eq!(
                left.as_deref(),
                Some(SOMEBODY),
                "somebody's record was overwritten"
            );
        }
    }
}

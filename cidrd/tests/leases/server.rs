//! A cidrd: it answers requests, looks at leases that it saw some time ago, and ends at any moment.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use cidrd::expiry::Expiry;
use cidrd::http::Leases;
use cidrd::lease::{Family, LeaseError, Request, Terms, assign, expire, release, renew};
use thuban_api::ip_lease::{LeaseHolder, LeaseState};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use crate::ADDRESSES;
use crate::world::{LEASE, QUARANTINE, World};

/// How long a request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(12);

/// What a holder asks a cidrd.
#[derive(Clone, Debug)]
pub enum Ask {
    Put,
    Renew,
    Release(Vec<String>),
}

/// What a holder hears.
#[derive(Debug)]
pub enum Heard {
    Leases(Leases),
    Released,
    Refused,
    Nothing,
}

#[derive(Clone)]
pub struct Server {
    world: World,
    /// Requests that end with the process.
    running: Arc<Mutex<Vec<AbortHandle>>>,
}

impl Server {
    pub fn new(world: &World) -> Self {
        Self {
            world: world.clone(),
            running: Arc::default(),
        }
    }

    /// Lives, ends and begins anew for ever.
    pub async fn live(self) {
        loop {
            let life = Duration::from_secs(60 + self.world.number(2_400));
            let _ = timeout(life, self.look()).await;
            self.world.note(|seen| seen.crashes += 1);
            for request in self.running.lock().unwrap().drain(..) {
                request.abort();
            }
            sleep(Duration::from_secs(self.world.number(30))).await;
        }
    }

    async fn look(&self) {
        let mut expiry = Expiry::default();
        let mut known = Vec::new();
        loop {
            sleep(Duration::from_secs(1)).await;
            // A watch may be late.
            if !self.world.chance(4) {
                known = self.world.leases();
            }
            let due: Vec<_> = expiry.look(&known, Instant::now()).into_iter().cloned().collect();
            for lease in due {
                if expire(&self.world, &lease).await.is_ok_and(|ended| ended)
                    && lease.state() == LeaseState::Held
                {
                    self.world.note(|seen| seen.expired += 1);
                }
            }
        }
    }

    /// Answers a request of a holder.
    pub async fn answer(&self, uid: &str, ask: Ask) -> Heard {
        let (world, uid) = (self.world.clone(), uid.to_owned());
        let mut tasks = JoinSet::new();
        let request = tasks.spawn(async move { work(&world, &uid, ask).await });
        self.running.lock().unwrap().push(request);
        // Who hangs up has not ended the request.
        let Ok(ended) = timeout(REQUEST_TIMEOUT, tasks.join_next()).await else {
            tasks.detach_all();
            return Heard::Nothing;
        };
        match ended {
            Some(Ok(Ok(heard))) => heard,
            Some(Ok(Err(LeaseError::Refused(_)))) => {
                self.world.note(|seen| seen.refused += 1);
                Heard::Refused
            }
            _ => Heard::Nothing,
        }
    }
}

async fn work(world: &World, uid: &str, ask: Ask) -> Result<Heard, LeaseError> {
    match ask {
        Ask::Put => {
            let terms = Terms {
                pool: "public".into(),
                vpc: String::new(),
                cidrs: vec![ADDRESSES.parse().unwrap()],
                lease_seconds: LEASE,
                quarantine_seconds: QUARANTINE,
            };
            let request = Request {
                holder: LeaseHolder {
                    uid: uid.to_owned(),
                    namespace: "shop".into(),
                    name: "web".into(),
                },
                wanted: [(Family::V4, None)].into(),
            };
            let leases = assign(world, &terms, &request).await?;
            Ok(Heard::Leases(leases.into_iter().collect()))
        }
        Ask::Renew => {
            let leases: Leases = renew(world, uid).await?.into_iter().collect();
            if leases.leases.is_empty() {
                return Ok(Heard::Refused);
            }
            Ok(Heard::Leases(leases))
        }
        Ask::Release(grants) => release(world, uid, &grants).await.map(|()| Heard::Released),
    }
}

//! A leader of lbaasd for one load balancer: it gets an address, announces it until its deadline, renews it, and gives
//! it back in the end.

use std::time::Duration;

use cidrd::client::Grant;
use tokio::time::{Instant, sleep, sleep_until};

use crate::server::{Ask, Heard, Server};
use crate::world::World;

pub struct Holder {
    world: World,
    servers: Vec<Server>,
    /// The number of this process.
    process: u64,
    uid: String,
}

impl Holder {
    pub fn new(world: &World, servers: &[Server], number: u64) -> Self {
        Self {
            world: world.clone(),
            servers: servers.to_vec(),
            process: world.number(u64::MAX),
            uid: format!("uid-{number}"),
        }
    }

    async fn ask(&self, ask: Ask) -> (Heard, Instant) {
        let server = &self.servers[self.world.number(self.servers.len() as u64) as usize];
        let sent = Instant::now();
        (server.answer(&self.uid, ask).await, sent)
    }

    /// Waits up to some seconds.
    async fn wait(&self, seconds: u64) {
        sleep(Duration::from_millis(self.world.number(1_000 * seconds))).await;
    }

    pub async fn live(self) {
        loop {
            // Often together with another leader.
            self.wait(if self.world.chance(2) { 1 } else { 240 }).await;
            let (heard, sent) = self.ask(Ask::Put).await;
            let Heard::Leases(leases) = heard else {
                continue;
            };
            self.use_address(leases, sent).await;
            self.world.withdraw(self.process);
        }
    }

    /// Uses an address until it is lost or given back.
    async fn use_address(&self, mut leases: cidrd::http::Leases, mut sent: Instant) {
        let renewals = self.world.number(12);
        let mut grants = Vec::new();
        for _ in 0..=renewals {
            let Some(lease) = leases.leases.pop() else {
                return;
            };
            let grant = Grant::new(lease, sent);
            let address = grant.lease.address.to_string();
            grants = vec![grant.lease.grant.clone()];
            // An answer that comes after its deadline is worth nothing.
            if grant.deadline <= Instant::now() {
                return;
            }
            self.world
                .announce(self.process, &self.uid, &address, grant.deadline, sent);
            // Renewed late now and then.
            self.wait(if self.world.chance(8) { 1_500 } else { 300 }).await;
            loop {
                let (heard, again) = self.ask(Ask::Renew).await;
                match heard {
                    Heard::Leases(renewed) => {
                        (leases, sent) = (renewed, again);
                        break;
                    }
                    Heard::Refused => return,
                    _ => self.wait(10).await,
                }
            }
        }
        if self.world.chance(2) {
            // Killed: nobody renews, and announcers go on until their deadline.
            sleep_until(sent + Duration::from_secs(crate::world::LEASE.into())).await;
            return;
        }
        self.world.withdraw_all(&self.uid);
        // Refused: another leader has had a later answer.
        while matches!(self.ask(Ask::Release(grants.clone())).await.0, Heard::Nothing) {
            self.wait(10).await;
        }
    }
}

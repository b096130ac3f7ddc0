//! Brings the node's nftables in line with the state.
//!
//! Invariant: a writer holds the lock of netfilter for as long as nft takes, and the lock of the state only for a
//! look. Only tasks that need the rules wait for nft. Changes that come meanwhile are written by the next writer, all
//! at once.

use std::sync::MutexGuard;
use std::time::Duration;

use thuban_common::host_stack::{NFT_LIMITS_TABLE, NFT_OVERLAY_TABLE, NFT_POLICY_TABLE, NFT_TABLE};
use thuban_proto::transit as proto;
use tracing::warn;

use crate::netfilter::ruleset::Ruleset;
use crate::netfilter::{self, Netfilter, NetfilterError};
use crate::node::Node;

/// The least time by which a renewal must extend the lease of tenants' ports: any.
const LEAST_RENEWAL: Duration = Duration::from_nanos(1);

impl Node {
    /// Writes what is due, and applies the rows that waited for it. Returns a nack for each row whose rules could not
    /// be written. Blocks.
    pub fn write_rules(&self) -> Vec<proto::Nack> {
        self.write(self.netfilter());
        self.state().rules.take_nacks()
    }

    /// Writes what is due without a program. The operator hears of rows that waited with its next program. Blocks.
    pub fn write_changed_rules(&self) {
        self.write(self.netfilter());
        self.announce();
    }

    /// Whether rules that could not be replaced may still lead clients to ports of tenants' Services: an ack says that
    /// they don't. Blocks.
    pub fn may_lead_by_old_rules(&self) -> bool {
        let netfilter = self.netfilter();
        !self.state().rules.are_written && netfilter.may_lead(self.node_port_lease())
    }

    /// Bounds the connections that pods have by the node's own stack. Blocks.
    pub fn limit_pods(&self) -> Result<(), NetfilterError> {
        let mut netfilter = self.netfilter();
        let pods = self.state().limited_pods();
        netfilter.limit(pods)
    }

    /// Makes tables again that are gone, and writes what could not be written before. Blocks.
    pub fn restore_rules(&self) {
        let tables = [NFT_TABLE, NFT_OVERLAY_TABLE, NFT_LIMITS_TABLE, NFT_POLICY_TABLE];
        let nft = self.settings.nft();
        let there = netfilter::tables(&nft);
        let are_there = tables.map(|table| there.contains(table));
        let gone = || tables.iter().zip(are_there).filter(|(_, is_there)| !is_there);
        for (table, _) in gone() {
            warn!(table, "a table of nftables is gone, it is made again");
        }
        let mut netfilter = self.netfilter();
        let [has_rules, has_overlay_port, has_limits, has_admission] = are_there;
        if !has_overlay_port {
            netfilter.doubt_overlay_port();
        }
        if !has_limits {
            netfilter.doubt_limits();
        }
        let pods = self.state().limited_pods();
        failed(&netfilter.limit(pods));
        let (droplets, are_all) = self.state().droplets_to_protect();
        // Before the first snapshot nobody knows what table `inet thuban` is to have.
        if !are_all {
            failed(&netfilter.protect_port(droplets, are_all));
            return;
        }
        if !has_rules {
            netfilter.doubt();
        }
        if !has_admission {
            netfilter.doubt_admission();
        }
        if has_rules && has_overlay_port && has_admission && self.state().rules.are_written {
            return;
        }
        self.state().rules.are_written = false;
        self.write(netfilter);
        self.announce();
    }

    fn write(&self, mut netfilter: MutexGuard<Netfilter>) {
        let (wanted, (droplets, are_all)) = {
            let mut state = self.state();
            (state.wanted_rules(), state.droplets_to_protect())
        };
        let is_protected = !failed(&netfilter.protect_port(droplets, are_all));
        // Before the rules that lead to pods.
        if failed(&netfilter.admit(wanted.admission)) {
            self.state().rules.are_written = false;
            return;
        }
        let heard = wanted.heard;
        let until = self.lease_until(heard);
        let Ruleset { text, mut outside } = wanted.rules;
        let mut written = netfilter.set(text, until);
        if let Err(error) = &written
            && !wanted.awaited.is_empty()
        {
            let others = {
                let mut state = self.state();
                state.refuse(&wanted.awaited, error);
                state.wanted_rules()
            };
            written = netfilter.set(others.rules.text, until);
            outside = others.rules.outside;
            if written.is_ok() {
                self.state().admit(&others.awaited);
            }
        } else if written.is_ok() {
            self.state().admit(&wanted.awaited);
        }
        // After a failure a removed service is still served; the next look tries again. The lease is renewed here
        // because the rules may have been the same for a long time.
        let step = self.node_port_lease() / 2;
        let is_written = !failed(&written.and_then(|()| netfilter.renew(until, step)));
        let mut state = self.state();
        state.rules.are_written = is_protected && is_written;
        if is_written {
            state.rules.outside = Some(outside);
            state.rules.enforce(wanted.changes);
            state.heard = state.heard.max(heard);
        }
    }

    /// Makes the lease of tenants' ports longer, or ends it. `heard`: when the operator was heard, by this boot's
    /// clock; `None`: not since the last look. Blocks.
    pub fn renew_lease(&self, heard: Option<u64>) {
        let mut netfilter = self.netfilter();
        let heard = {
            let mut state = self.state();
            // Nothing that the operator said is still on its way into the rules.
            if !state.rules.are_due() {
                state.heard = state.heard.max(heard);
            }
            state.heard
        };
        if heard.is_some() {
            failed(&netfilter.renew(self.lease_until(heard), LEAST_RENEWAL));
            self.contact.keep(heard);
        }
    }

    pub fn node_port_lease(&self) -> Duration {
        Duration::from_secs(self.settings.node_port_lease)
    }

    fn lease_until(&self, heard: Option<u64>) -> u64 {
        let lease = self.node_port_lease().as_nanos() as u64;
        heard.map_or(0, |heard| heard.saturating_add(lease))
    }
}

fn failed(written: &Result<(), NetfilterError>) -> bool {
    if let Err(error) = written {
        warn!(
            error = error as &dyn std::error::Error,
            "the node's rules could not be written, it is tried again"
        );
    }
    written.is_err()
}

//! What droplets tell and what readers ask meet here: names, flows, sums, and who is connected.

use std::sync::{Arc, PoisonError, RwLockReadGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::flow::{Denier, End, Flow, Lost};
use crate::graph::{Graph, graph};
use crate::metrics;
use crate::names::watches::SharedNames;
use crate::names::{Name, Names};
use crate::places::Places;
use crate::reports::droplets::Droplets;
use crate::reports::validation::ValidatedFlow;
use crate::series::Series;
use crate::store::Store;
use crate::top::{By, Top, top};
use crate::view::Scope;

/// All that the process knows.
#[derive(Default)]
pub struct Relay {
    pub names: SharedNames,
    pub store: Arc<Store>,
    pub droplets: Droplets,
    pub places: Arc<Places>,
    series: Series,
}

/// Returns the time, in milliseconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Relay {
    fn names(&self) -> RwLockReadGuard<'_, Names> {
        self.names.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the flows of a report, and gives them the names of this moment.
    pub fn take(&self, droplet: &Name, told: Vec<ValidatedFlow>, lost: Lost) {
        let arrived = now();
        let flows: Vec<Flow> = {
            let names = self.names();
            told.into_iter()
                .map(|told| resolve(&names, droplet, arrived, told))
                .collect()
        };
        self.series.add(&flows);
        let count = flows.len();
        self.store.push(flows);
        metrics::flows(count, self.store.count());
        if !lost.is_empty() {
            metrics::flows_lost(&lost);
            self.store.tell_lost(droplet, lost);
        }
    }

    pub fn graph(&self, scope: &Scope) -> Graph {
        let recent = self.store.recent(now(), |flow| scope.sees(flow));
        graph(&recent, scope, &self.names(), |droplet| {
            self.droplets.mode(droplet)
        })
    }

    pub fn top(&self, scope: &Scope, by: By) -> Top {
        let recent = self.store.recent(now(), |flow| scope.sees(flow));
        top(&recent, scope, by)
    }

    pub fn series(&self, scope: &Scope) -> String {
        self.series.page(scope, &self.names())
    }
}

fn resolve(names: &Names, droplet: &Name, arrived: u64, told: ValidatedFlow) -> Flow {
    let vpc = names.vpc(told.vni);
    let end = |address, port| {
        let (who, is_outside) = vpc.map_or((None, false), |vpc| names.resolve(vpc, address));
        End {
            address,
            port,
            is_outside,
            who,
        }
    };
    let denied_by = told.denied_by.map(|denier| {
        Arc::new(Denier {
            policy: denier.policy.into(),
            rule: denier.rule,
        })
    });
    Flow {
        arrived,
        time: told.time,
        packets: told.packets,
        bytes: told.bytes,
        from: end(told.source, told.ports[0]),
        to: end(told.destination, told.ports[1]),
        vpc: vpc.cloned(),
        droplet: droplet.clone(),
        next: told.next.and_then(|address| names.droplet(address)).cloned(),
        denied_by,
        vni: told.vni,
        verdict: told.verdict,
        protocol: told.protocol,
        tcp_flags: told.tcp_flags,
        event: told.event,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::reports::validation::tests::told;
    use crate::view::{Filter, Query};

    /// Returns a relay that knows the names of tests.
    pub fn relay() -> Arc<Relay> {
        let relay = Relay::default();
        {
            let mut names = relay.names.write().unwrap();
            *names = crate::flow::tests::names();
            names.set_droplet("node-c", Some("192.0.2.3".parse().unwrap()));
        }
        Arc::new(relay)
    }

    #[test]
    fn a_flow_keeps_the_names_of_the_moment_when_it_was_told() {
        let relay = relay();
        let flow = ValidatedFlow::try_from(told()).unwrap();
        relay.take(&"node-a".into(), vec![flow.clone()], Lost::default());
        relay.names.write().unwrap().remove_endpoint("red/web-0");
        relay.take(&"node-a".into(), vec![flow], Lost::default());
        let query = Query {
            scope: Scope::All,
            filter: Filter::default(),
        };
        let held = relay.store.last(&query, 0, 10);
        let names = |flow: &Flow| flow.from.who.as_ref().map(|who| who.full_name());
        assert_eq!(names(&held[0]).as_deref(), Some("red/web-0"));
        assert_eq!(names(&held[1]), None);
        assert_eq!(held[0].vpc.as_deref(), Some("red"));
        assert_eq!(held[0].next.as_deref(), Some("node-c"));
        assert_eq!(held[0].to.who.as_ref().unwrap().full_name(), "blue/db-0");
    }

    #[test]
    fn answers_are_made_of_what_droplets_told() {
        let relay = relay();
        let flow = ValidatedFlow::try_from(told()).unwrap();
        relay.take(&"node-a".into(), vec![flow], Lost::default());
        let red = Scope::Namespace("red".to_owned());
        assert_eq!(relay.top(&red, By::Pod).rows[0].name, "red/web-0");
        assert_eq!(relay.graph(&red).edges[0].to, "withheld");
        assert!(
            relay
                .series(&red)
                .contains("thuban_observe_flow_packets_total{vpc=\"red\",network=\"red-web\"} 6")
        );
    }
}

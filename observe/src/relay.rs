//! What droplets tell and what readers ask meet here: names, flows, sums, and who is connected.

use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLockReadGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::flow::{Denier, End, Flow, Lost, is_drop, is_source_checked};
use crate::graph::{Graph, graph};
use crate::metrics;
use crate::names::watches::SharedNames;
use crate::names::{Holder, Name, Names};
use crate::places::Places;
use crate::reports::droplets::Droplets;
use crate::reports::validation::ValidatedFlow;
use crate::series::Series;
use crate::store::Store;
use crate::top::{By, Top, top};
use crate::view::Scope;

/// How far a droplet's clock may be behind the API server's, in milliseconds.
const MAX_CLOCK_SKEW: u64 = 2_000;

/// All that the process knows.
pub struct Relay {
    pub names: SharedNames,
    pub store: Arc<Store>,
    pub droplets: Droplets,
    /// Readers that follow.
    pub followers: Arc<Places>,
    series: Series,
}

impl Default for Relay {
    fn default() -> Self {
        Self {
            names: SharedNames::default(),
            store: Arc::default(),
            droplets: Droplets::default(),
            followers: Places::new(metrics::readers),
            series: Series::default(),
        }
    }
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
            let names = self.names();
            self.store.tell_lost(droplet, lost, |scope| {
                let namespace = scope.namespace();
                namespace.is_none_or(|namespace| names.has_namespace(droplet, namespace))
            });
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

/// Returns who has an address, as far as the flow can be of that one: what was made later had no address then.
fn holder(names: &Names, told: &ValidatedFlow, address: IpAddr) -> Holder {
    let Some(vpc) = names.vpc(told.vni) else {
        return Holder::Nobody;
    };
    match names.resolve(vpc, address) {
        Holder::Known(who) if told.time.saturating_add(MAX_CLOCK_SKEW) < who.since => Holder::Departed,
        holder => holder,
    }
}

/// Whether the droplet can have seen the flow: it has a part of the VPC, or it drops packets from or to the outside,
/// which any node may get.
fn is_credible(names: &Names, droplet: &Name, told: &ValidatedFlow, holders: &[Holder; 2]) -> bool {
    let Some(vpc) = names.vpc(told.vni) else {
        return true;
    };
    is_drop(told.verdict) && holders.contains(&Holder::Outside) || names.is_in_vpc(droplet, vpc)
}

/// Gives the ends their names. No end has a name that the droplet can't know.
fn ends(names: &Names, droplet: &Name, told: &ValidatedFlow) -> [End; 2] {
    let holders = [told.source, told.destination].map(|address| holder(names, told, address));
    let is_credible = is_credible(names, droplet, told, &holders);
    let [from, to] = holders;
    let is_sender_known = is_credible && is_source_checked(told.verdict) && from != Holder::Nobody;
    // A member of the VPC chooses whom it sends to, so it may read an address that nobody has.
    let is_of_member =
        is_sender_known && matches!(&from, Holder::Known(who) if names.vpc(told.vni) == Some(&who.vpc));
    let is_receiver_known = is_credible && (is_of_member || to != Holder::Nobody);
    [
        End::new(told.source, told.ports[0], from, is_sender_known),
        End::new(told.destination, told.ports[1], to, is_receiver_known),
    ]
}

fn resolve(names: &Names, droplet: &Name, arrived: u64, told: ValidatedFlow) -> Flow {
    let [from, to] = ends(names, droplet, &told);
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
        from,
        to,
        vpc: names.vpc(told.vni).cloned(),
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
    use thuban_common::counters::Counter;

    use super::*;
    use crate::names::Member;
    use crate::names::tests::pod;
    use crate::reports::validation::tests::told;
    use crate::store::Told;
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

    /// Takes a flow as the droplet tells of it, and returns it as it is kept.
    fn kept(relay: &Relay, droplet: &str, flow: ValidatedFlow) -> Arc<Flow> {
        relay.take(&droplet.into(), vec![flow], Lost::default());
        let query = Query {
            scope: Scope::All,
            filter: Filter::default(),
        };
        relay.store.last(&query, 0, 1).remove(0)
    }

    fn of(namespace: &str) -> Scope {
        Scope::Namespace(namespace.to_owned())
    }

    #[test]
    fn a_droplet_without_a_part_of_the_vpc_is_not_believed() {
        let relay = relay();
        let flow = ValidatedFlow::try_from(told()).unwrap();
        assert!(of("red").sees(&kept(&relay, "node-a", flow.clone())));
        let made_up = kept(&relay, "node-z", flow.clone());
        assert!(!of("red").sees(&made_up) && !of("blue").sees(&made_up));
        assert!(made_up.from.who.is_none() && made_up.to.who.is_none());
        relay
            .names
            .write()
            .unwrap()
            .set_divider("red-d0", "red", Some("node-z"));
        assert!(
            of("red").sees(&kept(&relay, "node-z", flow)),
            "its divider is there"
        );
    }

    #[test]
    fn a_node_that_drops_packets_from_outside_is_believed() {
        let relay = relay();
        let mut flow = ValidatedFlow::try_from(told()).unwrap();
        flow.source = "203.0.113.7".parse().unwrap();
        assert!(!of("blue").sees(&kept(&relay, "node-z", flow.clone())), "passed");
        flow.verdict = Counter::OutOfSourceRanges as u8;
        assert!(of("blue").sees(&kept(&relay, "node-z", flow)));
    }

    #[test]
    fn a_source_that_anybody_can_write_names_nobody() {
        let relay = relay();
        let mut flow = ValidatedFlow::try_from(told()).unwrap();
        flow.verdict = Counter::SpoofedSource as u8;
        let spoofed = kept(&relay, "node-a", flow);
        assert!(spoofed.from.who.is_none() && !of("red").sees(&spoofed));
        assert!(of("blue").sees(&spoofed) && of("blue").shown(&spoofed.from).is_none());
        assert!(Scope::All.shown(&spoofed.from).is_some());
    }

    #[test]
    fn an_address_without_name_is_shown_to_who_sends_there() {
        let relay = relay();
        let mut flow = ValidatedFlow::try_from(told()).unwrap();
        flow.destination = "10.0.2.99".parse().unwrap();
        let sent = kept(&relay, "node-a", flow.clone());
        assert!(of("red").shown(&sent.to).is_some());
        std::mem::swap(&mut flow.source, &mut flow.destination);
        let received = kept(&relay, "node-a", flow);
        assert!(of("red").sees(&received));
        assert!(of("red").shown(&received.from).is_none(), "its pod may be gone");
    }

    #[test]
    fn a_flow_of_before_a_pod_is_not_the_pods() {
        let relay = relay();
        let younger = Member {
            since: 4_000,
            ..pod("red", "web-9", "red", "red-web", "10.0.1.9")
        };
        relay.names.write().unwrap().set_endpoint("red/web-9", &younger);
        let mut flow = ValidatedFlow::try_from(told()).unwrap();
        flow.source = "10.0.1.9".parse().unwrap();
        assert!(kept(&relay, "node-a", flow.clone()).from.who.is_none());
        flow.time = 2_000;
        let sent = kept(&relay, "node-a", flow);
        assert!(sent.from.who.is_some(), "clocks differ");
    }

    #[tokio::test]
    async fn losses_are_told_where_the_reader_has_pods() {
        let relay = relay();
        let query = |scope| Query {
            scope,
            filter: Filter::default(),
        };
        let (_, mut red) = relay.store.follow(query(of("red")), 0, 0);
        let (_, mut all) = relay.store.follow(query(Scope::All), 0, 0);
        let lost = Lost {
            ring: 3,
            ..Lost::default()
        };
        for droplet in ["node-z", "node-a"] {
            relay.take(&droplet.into(), Vec::new(), lost);
        }
        let told = |droplet: &str| Some(Told::Lost(Some(droplet.into()), lost));
        assert_eq!(red.next().await, told("node-a"));
        assert_eq!(all.next().await, told("node-z"));
        assert_eq!(all.next().await, told("node-a"));
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

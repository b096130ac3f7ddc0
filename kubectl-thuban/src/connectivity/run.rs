//! Makes the objects of a plan, waits for them, and tells what the clients find, as they find it. It deletes nothing.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Namespace, Pod, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{ListParams, LogParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use thuban_api::condition::find;
use thuban_api::{Condition, ConditionStatus, Network, Phase, PolicyState, Vpc};
use thuban_connectivity::Answer;
use tokio::time::{Instant, sleep};

use super::checks::{Check, Facts, Finding, checks, judge, questions};
use super::manifests::{self, POLICY, selector};
use super::plan::{CLIENT, NETWORKS, Plan, Side};
use super::{failed, pods, say};
use crate::conditions::lacking;
use crate::error::CliError;

/// The time between two looks.
const POLL: Duration = Duration::from_millis(500);
/// When something is not there after this time, the reason is told.
const SAY_AFTER: Duration = Duration::from_secs(10);
/// How long a VPC or network may be refused: ranges are claimed for a second or so.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a policy may take until it is in force. If it takes longer, its check says so.
const POLICY_TIMEOUT: Duration = Duration::from_secs(20);
/// How many pods that do not start are named.
const NAMED_PODS: usize = 3;
/// The ServiceAccount without which the API server accepts no pod in a namespace.
const ACCOUNT: &str = "default";

/// Takes each finding when it is there.
pub type Tell<'a> = &'a mut dyn FnMut(Finding);

/// One run of the test.
pub struct Run<'a> {
    client: Client,
    plan: &'a Plan,
    /// What is waited for, and why it is not there.
    waiting: Mutex<String>,
}

/// A wait, which tells its reason once it takes long.
struct Wait {
    began: Instant,
    told: String,
}

impl Wait {
    fn new() -> Self {
        Self {
            began: Instant::now(),
            told: String::new(),
        }
    }

    fn is_longer_than(&self, limit: Duration) -> bool {
        self.began.elapsed() >= limit
    }

    /// Tells why it still waits, if that is new, and waits until the next look.
    async fn again(&mut self, run: &Run<'_>, why: String) {
        run.set_waiting(&why);
        if self.is_longer_than(SAY_AFTER) && self.told != why {
            say(&format!("not yet: {why}"));
            self.told = why;
        }
        sleep(POLL).await;
    }
}

impl<'a> Run<'a> {
    pub fn new(client: Client, plan: &'a Plan) -> Self {
        Self {
            client,
            plan,
            waiting: Mutex::default(),
        }
    }

    /// Returns what the run waits for, for a run that takes too long.
    pub fn waiting(&self) -> String {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.clone()
    }

    fn set_waiting(&self, what: &str) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        what.clone_into(&mut waiting);
    }

    /// Makes all objects, and tells each finding.
    pub async fn go(&self, facts: &Facts, tell: Tell<'_>) -> Result<(), CliError> {
        let [a, b] = Side::BOTH.map(|side| self.plan.namespace(side));
        say(&format!("making namespaces and VPCs {a} and {b}"));
        Box::pin(self.make_vpcs()).await?;
        let services = Box::pin(self.make_services()).await?;
        say(&format!("making {} servers", self.plan.servers().len()));
        Box::pin(self.make_servers()).await?;
        Box::pin(self.wait_policies()).await?;
        let (checks, skipped) = checks(self.plan, facts, services);
        say(&format!("asking {} questions", checks.len()));
        for finding in skipped {
            tell(finding);
        }
        Box::pin(self.ask(&checks, tell)).await
    }

    fn namespaced<K>(&self, side: Side) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), &self.plan.namespace(side))
    }

    fn all<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = ()>,
    {
        Api::all(self.client.clone())
    }

    /// Makes namespaces, VPCs and networks, and waits until packets can flow there.
    async fn make_vpcs(&self) -> Result<(), CliError> {
        let (namespaces, vpcs, networks) =
            (self.all::<Namespace>(), self.all::<Vpc>(), self.all::<Network>());
        for side in Side::BOTH {
            create(&namespaces, manifests::namespace(self.plan, side)).await?;
            create(&vpcs, manifests::vpc(self.plan, side)).await?;
            for place in 0..NETWORKS.len() {
                create(&networks, manifests::network(self.plan, side, place)).await?;
            }
        }
        for side in Side::BOTH {
            let name = self.plan.namespace(side);
            let state = |vpc: Vpc| vpc.status.map(|status| (status.phase, status.conditions));
            self.wait_provisioned(&vpcs, "VPC", &name, state).await?;
            for place in 0..NETWORKS.len() {
                let name = self.plan.network(side, place);
                let state = |network: Network| network.status.map(|status| (status.phase, status.conditions));
                self.wait_provisioned(&networks, "network", &name, state).await?;
            }
        }
        Ok(())
    }

    async fn wait_provisioned<K>(
        &self,
        api: &Api<K>,
        kind: &str,
        name: &str,
        state: impl Fn(K) -> Option<(Phase, Vec<Condition>)>,
    ) -> Result<(), CliError>
    where
        K: Clone + Debug + DeserializeOwned,
    {
        let mut wait = Wait::new();
        loop {
            let object = Box::pin(api.get(name)).await.map_err(failed)?;
            let (phase, conditions) = state(object).unwrap_or_default();
            if phase == Phase::Provisioned {
                return Ok(());
            }
            let lacking = lacking(&conditions);
            let why = lacking.map_or_else(
                || "the operator has said nothing about it".to_owned(),
                |condition| format!("{}: {}", condition.reason, condition.message),
            );
            let why = format!("{kind} {name}: {why}");
            let is_refused = lacking.is_some_and(|condition| condition.kind == "Accepted");
            if is_refused && wait.is_longer_than(REFUSED_TIMEOUT) {
                return Err(CliError::Unfit(why));
            }
            wait.again(self, why).await;
        }
    }

    /// Makes Services and policies. Returns the Services' ClusterIPs.
    async fn make_services(&self) -> Result<[IpAddr; 2], CliError> {
        let mut addresses = [IpAddr::from([0_u8; 4]); 2];
        for (side, address) in Side::BOTH.into_iter().zip(&mut addresses) {
            let policies: Api<NetworkPolicy> = self.namespaced(side);
            create(&policies, manifests::policy(self.plan, side)).await?;
            let services: Api<Service> = self.namespaced(side);
            let service = create(&services, manifests::service(self.plan, side)).await?;
            let given = service.spec.and_then(|spec| spec.cluster_ip);
            let given = given.and_then(|text| text.parse().ok());
            *address = given.ok_or_else(|| {
                let namespace = self.plan.namespace(side);
                CliError::Unfit(format!("a Service in namespace {namespace} got no ClusterIP"))
            })?;
        }
        Ok(addresses)
    }

    /// Makes the servers, and waits until all are ready.
    async fn make_servers(&self) -> Result<(), CliError> {
        let servers = self.plan.servers();
        for side in Side::BOTH {
            self.wait_account(side).await?;
            let pods: Api<Pod> = self.namespaced(side);
            for server in servers.iter().filter(|server| server.side == side) {
                create(&pods, manifests::server(self.plan, server)).await?;
            }
        }
        for side in Side::BOTH {
            let number = servers.iter().filter(|server| server.side == side).count();
            self.wait_ready(side, number).await?;
        }
        Ok(())
    }

    async fn wait_account(&self, side: Side) -> Result<(), CliError> {
        let accounts: Api<ServiceAccount> = self.namespaced(side);
        let mut wait = Wait::new();
        while Box::pin(accounts.get_opt(ACCOUNT))
            .await
            .map_err(failed)?
            .is_none()
        {
            let namespace = self.plan.namespace(side);
            let why = format!("namespace {namespace} has no ServiceAccount {ACCOUNT}");
            wait.again(self, why).await;
        }
        Ok(())
    }

    async fn wait_ready(&self, side: Side, number: usize) -> Result<(), CliError> {
        let api: Api<Pod> = self.namespaced(side);
        let own = ListParams::default().labels(&selector(self.plan));
        let mut wait = Wait::new();
        loop {
            let listed = Box::pin(api.list(&own)).await.map_err(failed)?.items;
            let late: Vec<&Pod> = listed.iter().filter(|pod| !pods::is_ready(pod)).collect();
            if late.is_empty() && listed.len() >= number {
                return Ok(());
            }
            let events = self.events(side).await;
            let why = |pod: &Pod| {
                let place = format!("{}/{}", self.plan.namespace(side), pod.name_any());
                format!("pod {place}: {}", pods::why(pod, &events))
            };
            if let Some(ended) = late.iter().copied().find(|pod| pods::has_ended(pod)) {
                return Err(CliError::Unfit(why(ended)));
            }
            let mut named: Vec<String> = late.iter().copied().take(NAMED_PODS).map(why).collect();
            if late.len() > NAMED_PODS {
                named.push(format!("and {} more", late.len() - NAMED_PODS));
            }
            wait.again(self, named.join("; ")).await;
        }
    }

    /// Returns the events of a namespace; none if the user may not see them.
    async fn events(&self, side: Side) -> Vec<Event> {
        let events: Api<Event> = self.namespaced(side);
        let listed = Box::pin(events.list(&ListParams::default())).await;
        listed.map(|list| list.items).unwrap_or_default()
    }

    /// Waits until the policies are in force, but not for long: the checks say whether packets are denied.
    async fn wait_policies(&self) -> Result<(), CliError> {
        for side in Side::BOTH {
            let states: Api<PolicyState> = self.namespaced(side);
            let mut wait = Wait::new();
            while !wait.is_longer_than(POLICY_TIMEOUT) {
                let state = Box::pin(states.get_opt(POLICY)).await.map_err(failed)?;
                let conditions = state
                    .and_then(|state| state.status)
                    .map(|status| status.conditions)
                    .unwrap_or_default();
                let provisioned = find(&conditions, "Provisioned");
                if provisioned.is_some_and(|condition| condition.status == ConditionStatus::True) {
                    break;
                }
                let why = provisioned.map_or("no PolicyState tells of it", |condition| {
                    condition.message.as_str()
                });
                let namespace = self.plan.namespace(side);
                wait.again(self, format!("policy {namespace}/{POLICY}: {why}"))
                    .await;
            }
        }
        Ok(())
    }

    /// Makes the clients, and reads their answers until all are there.
    async fn ask(&self, checks: &[Check], tell: Tell<'_>) -> Result<(), CliError> {
        for side in Side::BOTH {
            let api: Api<Pod> = self.namespaced(side);
            create(&api, manifests::client(self.plan, side, &questions(checks, side))).await?;
        }
        let mut answered = BTreeSet::new();
        let mut wait = Wait::new();
        loop {
            let mut late = None;
            for side in Side::BOTH {
                let reading = self.read(side, checks, &mut answered, &mut *tell);
                late = late.or(Box::pin(reading).await?);
            }
            match late {
                Some(why) => wait.again(self, why).await,
                None => return Ok(()),
            }
        }
    }

    /// Reads the new answers in the log of a client. Returns why not all are there, or none if they are.
    async fn read(
        &self,
        side: Side,
        checks: &[Check],
        answered: &mut BTreeSet<usize>,
        tell: Tell<'_>,
    ) -> Result<Option<String>, CliError> {
        let api: Api<Pod> = self.namespaced(side);
        // The pod is read before its log: if it has ended by then, the log is whole.
        let pod = Box::pin(api.get(CLIENT)).await.map_err(failed)?;
        let place = format!("{}/{CLIENT}", self.plan.namespace(side));
        if pods::phase(&pod) == "Pending" {
            let why = pods::why(&pod, &self.events(side).await);
            return Ok(Some(format!("pod {place}: {why}")));
        }
        let log = match Box::pin(api.logs(CLIENT, &LogParams::default())).await {
            Ok(log) => log,
            Err(kube::Error::Api(status)) if status.code == 403 => return Err(CliError::Refused(status)),
            Err(error) => return Ok(Some(format!("the log of pod {place} can't be read: {error}"))),
        };
        for answer in log
            .lines()
            .filter_map(|line| serde_json::from_str::<Answer>(line).ok())
        {
            if let Some(check) = checks.get(answer.id)
                && check.side == side
                && answered.insert(answer.id)
            {
                tell(judge(self.plan, check, &answer.outcome));
            }
        }
        let mut own = checks.iter().enumerate().filter(|(_, check)| check.side == side);
        if own.all(|(id, _)| answered.contains(&id)) {
            return Ok(None);
        }
        if pods::has_ended(&pod) {
            return Err(CliError::Unfit(format!("pod {place}: {}", pods::why(&pod, &[]))));
        }
        Ok(Some(format!("answers of pod {place}")))
    }
}

/// Makes an object.
async fn create<K>(api: &Api<K>, manifest: Value) -> Result<K, CliError>
where
    K: Clone + Debug + DeserializeOwned + Serialize,
{
    let object: K = serde_json::from_value(manifest).map_err(CliError::Manifest)?;
    let made = Box::pin(api.create(&PostParams::default(), &object)).await;
    made.map_err(failed)
}

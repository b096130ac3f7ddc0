//! Reads the objects of reports from the API server, and asks the operator about paths. What the user may not read, or
//! what the API server lacks, is remembered as unseen; any other failure is an error.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Status;
use kube::{Api, Client, Config, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thuban_api::{
    Bouncer, Divider, Droplet, Endpoint, Network, OPERATOR_LEASE, PathTrace, PathTraceStatus, Vpc,
};
use tokio::time::{Instant, sleep};

use crate::arguments::Connection;
use crate::error::CliError;
use crate::objects::{
    CheckObjects, ControlPlane, Endpoints, Seen, StatusObjects, Surroundings, Tenancy, Unseen,
};
use crate::values::{Lists, SYSTEM_NAMESPACE};
use crate::why::Question;

/// How long the API server may take to answer.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
const ANSWER_PAUSE: Duration = Duration::from_millis(100);
/// The name of the operator's Deployment, and of its pods in their label.
const OPERATOR: &str = "thuban-operator";

/// A cluster, as one user sees it.
pub struct Cluster {
    client: Client,
    /// The namespace that the user named, or that of the context.
    namespace: String,
    /// Whether the user named it.
    is_named: bool,
    system_namespace: String,
}

/// Which endpoints are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those of the namespace.
    Namespace,
    /// Those of all namespaces; those of the namespace if the user named one, or may not list all.
    Widest,
    All,
}

impl Cluster {
    pub async fn connect(connection: &Connection) -> Result<Self, CliError> {
        let options = KubeConfigOptions {
            context: connection.context.clone(),
            ..KubeConfigOptions::default()
        };
        let mut config = match (&connection.kubeconfig, &connection.context) {
            (Some(path), _) => Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &options).await?,
            (None, Some(_)) => Config::from_kubeconfig(&options).await?,
            (None, None) => Config::infer().await?,
        };
        if let Some(user) = &connection.as_user {
            config.auth_info.impersonate = Some(user.clone());
        }
        config.read_timeout = Some(READ_TIMEOUT);
        config.reset_reader_on_write = true;
        let namespace = connection.namespace.clone();
        Ok(Self {
            is_named: namespace.is_some(),
            namespace: namespace.unwrap_or_else(|| config.default_namespace.clone()),
            system_namespace: connection.system_namespace.clone(),
            client: Client::try_from(config).map_err(CliError::Client)?,
        })
    }

    pub async fn status(&self) -> Result<StatusObjects, CliError> {
        let (control_plane, droplets, tenancy) =
            tokio::try_join!(self.control_plane(), self.droplets(), self.tenancy())?;
        Ok(StatusObjects {
            control_plane,
            droplets,
            tenancy,
        })
    }

    pub async fn check(&self) -> Result<CheckObjects, CliError> {
        let (control_plane, droplets, vpcs, networks, surroundings) = tokio::try_join!(
            self.control_plane(),
            self.droplets(),
            list(self.all::<Vpc>(), "vpcs.thuban.dev"),
            list(self.all::<Network>(), "networks.thuban.dev"),
            self.surroundings(),
        )?;
        Ok(CheckObjects {
            control_plane,
            droplets,
            vpcs,
            networks,
            surroundings,
        })
    }

    pub async fn tenancy(&self) -> Result<Tenancy, CliError> {
        let (vpcs, networks, dividers, bouncers, endpoints) = tokio::try_join!(
            list(self.all::<Vpc>(), "vpcs.thuban.dev"),
            list(self.all::<Network>(), "networks.thuban.dev"),
            list(self.all::<Divider>(), "dividers.thuban.dev"),
            list(self.all::<Bouncer>(), "bouncers.thuban.dev"),
            self.endpoints(Scope::Widest),
        )?;
        Ok(Tenancy {
            vpcs,
            networks,
            dividers,
            bouncers,
            endpoints,
        })
    }

    pub async fn endpoints(&self, scope: Scope) -> Result<Endpoints, CliError> {
        let is_all = match scope {
            Scope::All => true,
            Scope::Widest => !self.is_named,
            Scope::Namespace => false,
        };
        if is_all {
            let seen = list(self.all::<Endpoint>(), "endpoints.thuban.dev of all namespaces").await?;
            let is_forbidden = matches!(seen, Err(Unseen::Forbidden { .. }));
            if scope == Scope::All || !is_forbidden {
                return Ok(Endpoints {
                    list: seen,
                    namespace: None,
                });
            }
        }
        let api: Api<Endpoint> = Api::namespaced(self.client.clone(), &self.namespace);
        Ok(Endpoints {
            list: list(api, "endpoints.thuban.dev").await?,
            namespace: Some(self.namespace.clone()),
        })
    }

    pub async fn control_plane(&self) -> Result<ControlPlane, CliError> {
        let (client, system) = (&self.client, self.system_namespace.as_str());
        let deployments: Api<Deployment> = Api::namespaced(client.clone(), system);
        let pods: Api<Pod> = Api::namespaced(client.clone(), system);
        let leases: Api<Lease> = Api::namespaced(client.clone(), system);
        let selector = ListParams::default().labels(&format!("app.kubernetes.io/name={OPERATOR}"));
        let (deployment, pods, lease) = tokio::try_join!(
            get(deployments, OPERATOR, "the operator's Deployment"),
            list_some(pods, selector, "the operator's pods"),
            get(leases, OPERATOR_LEASE, "the operator's Lease"),
        )?;
        Ok(ControlPlane {
            deployment,
            pods,
            lease,
        })
    }

    pub async fn vpcs(&self) -> Result<Seen<Vec<Vpc>>, CliError> {
        list(self.all(), "vpcs.thuban.dev").await
    }

    pub async fn droplets(&self) -> Result<Seen<Vec<Droplet>>, CliError> {
        list(self.all(), "droplets.thuban.dev").await
    }

    async fn surroundings(&self) -> Result<Surroundings, CliError> {
        let (nodes, service_cidrs, daemon_sets) = tokio::try_join!(
            list(self.all::<Node>(), "nodes"),
            list(self.all::<ServiceCIDR>(), "servicecidrs.networking.k8s.io"),
            list(self.all::<DaemonSet>(), "daemonsets.apps"),
        )?;
        Ok(Surroundings {
            nodes,
            service_cidrs,
            daemon_sets,
        })
    }

    /// Returns what says with which values Thuban is installed.
    pub async fn lists(&self) -> Result<Lists, CliError> {
        let slices: Api<EndpointSlice> = Api::namespaced(self.client.clone(), "default");
        let of_api_servers = ListParams::default().labels("kubernetes.io/service-name=kubernetes");
        let services: Api<Service> = Api::namespaced(self.client.clone(), SYSTEM_NAMESPACE);
        let (servers, service_cidrs, system_services, nodes) = tokio::try_join!(
            list_some(slices, of_api_servers, "endpointslices in namespace default"),
            list(self.all::<ServiceCIDR>(), "servicecidrs.networking.k8s.io"),
            list(services, "services in namespace kube-system"),
            list(self.all::<Node>(), "nodes"),
        )?;
        Ok(Lists {
            servers: items(&servers?)?,
            // An API server before 1.33 has none.
            service_cidrs: match service_cidrs {
                Ok(cidrs) => items(&cidrs)?,
                Err(_) => Value::Null,
            },
            system_services: items(&system_services?)?,
            nodes: items(&nodes?)?,
        })
    }

    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Returns the namespace that Thuban is installed in.
    pub fn system_namespace(&self) -> &str {
        &self.system_namespace
    }

    /// Returns the namespace that the user named.
    pub fn named_namespace(&self) -> Option<&str> {
        self.is_named.then_some(self.namespace.as_str())
    }

    /// Returns the pod; none if there is no such pod.
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>, CliError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        Ok(get(pods, name, "pods").await??)
    }

    /// Returns the name of transitd's pod on a node.
    pub async fn transitd_on(&self, node: &str) -> Result<Option<String>, CliError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.system_namespace);
        let selector = ListParams::default()
            .labels("app.kubernetes.io/name=transitd")
            .fields(&format!("spec.nodeName={node}"));
        let pods = list_some(pods, selector, "transitd's pods").await??;
        let is_alive = |pod: &&Pod| pod.metadata.deletion_timestamp.is_none();
        Ok(pods.iter().find(is_alive).map(ResourceExt::name_any))
    }

    /// Returns a cluster of a played API server. Its user is in the namespace `red`, or has named one.
    #[cfg(test)]
    pub fn played(client: Client, named: Option<&str>) -> Self {
        Self {
            client,
            namespace: named.unwrap_or("red").to_owned(),
            is_named: named.is_some(),
            system_namespace: thuban_api::SYSTEM_NAMESPACE.to_owned(),
        }
    }

    /// Returns the namespace of objects that are named without one.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Asks the operator. Returns none if it does not answer in time.
    pub async fn ask(&self, question: &Question) -> Result<Option<PathTraceStatus>, CliError> {
        let namespace = question.namespace.as_str();
        let traces: Api<PathTrace> = Api::namespaced(self.client.clone(), namespace);
        let mut trace = PathTrace::new("", question.spec());
        trace.metadata.name = None;
        trace.metadata.generate_name = Some("why-".to_owned());
        let made = Box::pin(traces.create(&PostParams::default(), &trace)).await;
        let name = made
            .map_err(|error| not_asked(error, "create", namespace))?
            .name_any();
        let answer = answer(&traces, &name, question.timeout()).await;
        // If that fails, the operator deletes it later.
        let _ = Box::pin(traces.delete(&name, &DeleteParams::default())).await;
        answer.map_err(|error| not_asked(error, "get", namespace))
    }

    /// Returns the Endpoint of a pod, if the user may see it.
    pub async fn endpoint_of(&self, namespace: &str, pod: &str) -> Result<Option<Endpoint>, CliError> {
        let endpoints: Api<Endpoint> = Api::namespaced(self.client.clone(), namespace);
        let listed = list(endpoints, "endpoints.thuban.dev").await?;
        let is_its = |endpoint: &Endpoint| {
            let current = endpoint
                .status
                .as_ref()
                .and_then(|status| status.pod_ref.as_ref());
            let holder = endpoint.spec.pod_ref.as_ref().or(current);
            holder.is_some_and(|holder| holder.name == pod)
        };
        Ok(listed.ok().into_iter().flatten().find(is_its))
    }

    fn all<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = ()>,
    {
        Api::all(self.client.clone())
    }
}

async fn list<K>(api: Api<K>, resource: &'static str) -> Result<Seen<Vec<K>>, CliError>
where
    K: Clone + Debug + DeserializeOwned,
{
    list_some(api, ListParams::default(), resource).await
}

async fn list_some<K>(
    api: Api<K>,
    parameters: ListParams,
    resource: &'static str,
) -> Result<Seen<Vec<K>>, CliError>
where
    K: Clone + Debug + DeserializeOwned,
{
    // A request's future is large, and a report makes ten.
    let listed = Box::pin(api.list(&parameters)).await;
    seen(listed.map(|list| list.items), "list", resource)
}

fn items(list: &[impl Serialize]) -> Result<Value, CliError> {
    Ok(json!({"items": serde_json::to_value(list)?}))
}

async fn get<K>(api: Api<K>, name: &str, resource: &'static str) -> Result<Seen<Option<K>>, CliError>
where
    K: Clone + Debug + DeserializeOwned,
{
    seen(Box::pin(api.get_opt(name)).await, "get", resource)
}

/// Waits for the answer to a question. None: it did not come, or somebody deleted the question.
async fn answer(
    traces: &Api<PathTrace>,
    name: &str,
    limit: Duration,
) -> Result<Option<PathTraceStatus>, kube::Error> {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        let trace = Box::pin(traces.get_opt(name)).await?;
        let Some(trace) = trace else {
            return Ok(None);
        };
        if let Some(status) = trace.status.filter(|status| status.verdict.is_some()) {
            return Ok(Some(status));
        }
        sleep(ANSWER_PAUSE).await;
    }
    Ok(None)
}

/// Returns why nothing could be asked.
fn not_asked(error: kube::Error, verb: &'static str, namespace: &str) -> CliError {
    match error {
        kube::Error::Api(status) if status.code == 403 => CliError::MayNotAsk {
            verb,
            namespace: namespace.to_owned(),
        },
        kube::Error::Api(status) if status.code == 404 && !is_of_namespaces(&status) => {
            CliError::NoPathTraces
        }
        kube::Error::Api(status) if !status.message.is_empty() => CliError::Refused(status),
        error => CliError::Api {
            resource: "pathtraces.thuban.dev",
            error,
        },
    }
}

/// Whether the namespace is missing, and not the kind.
fn is_of_namespaces(status: &Status) -> bool {
    let details = status.details.as_ref();
    details.is_some_and(|details| details.kind == "namespaces")
}

/// Tells what the user may not see from what failed. The code says it: an API server without a kind answers 404 without
/// a reason.
fn seen<T>(
    answer: Result<T, kube::Error>,
    verb: &'static str,
    resource: &'static str,
) -> Result<Seen<T>, CliError> {
    match answer {
        Ok(answer) => Ok(Ok(answer)),
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(Err(Unseen::Forbidden { verb, resource })),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Err(Unseen::NotInstalled(resource))),
        Err(kube::Error::Api(status)) if !status.message.is_empty() => Err(CliError::Refused(status)),
        Err(error) => Err(CliError::Api { resource, error }),
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::{not_asked, seen};
    use crate::error::CliError;
    use crate::objects::Unseen;

    fn answer(code: u16) -> Result<(), kube::Error> {
        let status = Status {
            code,
            message: "said".to_owned(),
            reason: "Failed to parse error data".to_owned(),
            ..Status::default()
        };
        Err(kube::Error::Api(status.boxed()))
    }

    #[test]
    fn forbidden_and_missing_kinds_are_unseen_others_are_errors() {
        let forbidden = seen(answer(403), "list", "nodes").unwrap();
        assert_eq!(forbidden.unwrap_err().to_string(), "you may not list nodes");
        let missing = seen(answer(404), "list", "nodes").unwrap();
        assert_eq!(missing, Err(Unseen::NotInstalled("nodes")));
        assert!(matches!(
            seen(answer(401), "list", "nodes"),
            Err(CliError::Refused(_))
        ));
        assert_eq!(seen(Ok(7), "list", "nodes").unwrap(), Ok(7));
    }

    #[test]
    fn a_question_that_is_not_taken_says_why() {
        let refused = |code| {
            let error = answer(code).unwrap_err();
            not_asked(error, "create", "red").to_string()
        };
        assert!(refused(403).starts_with("you may not create pathtraces.thuban.dev in namespace red"));
        assert!(refused(404).starts_with("the API server has no pathtraces.thuban.dev"));
        assert_eq!(refused(422), "said");
    }
}

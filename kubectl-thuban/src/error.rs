//! Why a command could not look.

use kube::config::{InferConfigError, KubeconfigError};
use thiserror::Error;

use crate::kubectl::KubectlError;
use crate::objects::Unseen;
use crate::observe::ObserveError;
use crate::uninstall::UninstallError;

#[derive(Debug, Error)]
pub enum CliError {
    #[error("kubeconfig: {0}")]
    Kubeconfig(#[from] KubeconfigError),
    #[error("no configuration of a cluster: {0}")]
    NoCluster(#[from] InferConfigError),
    #[error("the client of the cluster: {0}")]
    Client(#[source] kube::Error),
    #[error("{}", .0.message)]
    Refused(Box<kube::core::Status>),
    #[error("reading {resource}: {error}")]
    Api {
        resource: &'static str,
        error: kube::Error,
    },
    #[error("there is no VPC {0}: kubectl thuban tree lists all")]
    NoVpc(String),
    #[error("{0:?} is no pod: write POD or NAMESPACE/POD")]
    NoSource(String),
    #[error(
        "{0:?} is no target: write [NAMESPACE/]POD, svc/[NAMESPACE/]SERVICE or an address, and behind it :PORT or \
         :PORT/PROTOCOL if you like"
    )]
    NoTarget(String),
    #[error("you may not {verb} pathtraces.thuban.dev in namespace {namespace}: its role edit allows it")]
    MayNotAsk { verb: &'static str, namespace: String },
    #[error("the API server has no pathtraces.thuban.dev: is this version of Thuban installed?")]
    NoPathTraces,
    #[error(transparent)]
    Unseen(#[from] Unseen),
    #[error("Service default/kubernetes has no address")]
    NoServers,
    #[error(transparent)]
    Kubectl(#[from] KubectlError),
    #[error(transparent)]
    Observe(#[from] ObserveError),
    #[error("manual pages in {path}: {error}")]
    Manual { path: String, error: std::io::Error },
    #[error(transparent)]
    Uninstall(#[from] UninstallError),
    #[error("{path} can't be made: {error}")]
    Archive { path: String, error: std::io::Error },
    #[error("{0:?} is no pod: write POD or NAMESPACE/POD")]
    NoPod(String),
    #[error("there is no pod {namespace}/{pod}")]
    PodNotFound { namespace: String, pod: String },
    #[error("pod {0} is on no node yet: kubectl thuban endpoints says what it waits for")]
    NotBound(String),
    #[error("pod {0} is on host network: Thuban does not connect it")]
    OnHostNetwork(String),
    #[error("no pod of transitd is on node {0}")]
    NoTransitd(String),
    #[error("transitd on node {0} ended the trace; the lines above say why")]
    TraceEnded(String),
    #[error("the removal ended: {0}")]
    Ended(#[from] tokio::task::JoinError),
    #[error(
        "there is no DaemonSet transitd in namespace {0}: name the image by --image, or Thuban's namespace by \
         --system-namespace"
    )]
    NoImage(String),
    #[error("you may not {0}: the test needs these rights, which a cluster administrator has")]
    MayNotTest(String),
    #[error(
        "node {0} takes no pods of the test: it is not there, it is tainted or cordoned, or its droplet is not Ready"
    )]
    NodeUnfit(String),
    #[error("--node may be given twice at most")]
    TooManyNodes,
    #[error("no node takes pods: kubectl get nodes,droplets shows taints and droplets that are not Ready")]
    NoNodes,
    #[error("--cidr {0}: it must be an IPv4 range of /23 or larger")]
    RangeTooSmall(String),
    #[error("an object of the test: {0}")]
    Manifest(#[source] serde_json::Error),
    #[error(
        "{}: another test runs, or one was kept: wait for it, delete what `kubectl get namespaces,networks,vpcs -l {}` \
         shows, or choose another --namespace-prefix and another --cidr",
        .0.message, crate::connectivity::RUN_LABEL
    )]
    Exists(Box<kube::core::Status>),
    #[error("{0}")]
    Unfit(String),
    #[error("stopped after {seconds} s, see --timeout; it waited for this: {waiting}")]
    Late { seconds: u64, waiting: String },
    #[error("stopped by the user")]
    Stopped,
    #[error("no reason is called {name}; {}", suggest(.similar))]
    UnknownReason {
        name: String,
        similar: Vec<&'static str>,
    },
    #[error("output: {0}")]
    Output(#[from] std::io::Error),
    #[error("output: {0}")]
    Json(#[from] serde_json::Error),
    #[error("output: {0}")]
    Yaml(#[from] serde_yaml_ng::Error),
}

fn suggest(similar: &[&str]) -> String {
    if similar.is_empty() {
        "a reason is one word, such as NetworkFull or outside_vpc".to_owned()
    } else {
        format!("did you mean {}?", similar.join(", "))
    }
}

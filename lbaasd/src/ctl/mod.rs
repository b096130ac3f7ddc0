//! The commands of lbaasctl. It works by the rights of its user: the API server checks, and the Vips are the record.

pub mod arguments;
mod members;
mod request;
mod table;
mod wait;

use std::time::Duration;

use arguments::{Arguments, Make, Name, Output, Verb, Wait};
use futures::{StreamExt, pin_mut};
use kube::api::{DeleteParams, ListParams, PostParams, Preconditions};
use kube::config::{KubeConfigOptions, KubeconfigError};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Config, ResourceExt};
use request::{Conflict, merge};
use thiserror::Error;
use thuban_api::{IpPool, Vip};
use thuban_client::ClientError;

use crate::service::is_of_service;

/// How often a request begins anew because somebody else changed the Vip meanwhile.
const TRIES: usize = 5;

/// Why a command failed, for its user.
#[derive(Debug, Error)]
pub enum CtlError {
    #[error("kubeconfig: {0}")]
    Kubeconfig(#[from] KubeconfigError),
    #[error("no configuration of a cluster: {0}")]
    NoCluster(#[from] ClientError),
    /// The message names the field.
    #[error("{}", .0.message)]
    Refused(Box<kube::core::Status>),
    #[error("the API server: {0}")]
    Api(kube::Error),
    #[error("watching Vips: {0}")]
    Watch(watcher::Error),
    #[error("{0}")]
    Conflict(#[from] Conflict),
    #[error("Vip {vip} follows from the Service of that name: delete the Service")]
    OfService { vip: String },
    #[error("output: {0}")]
    Output(#[from] serde_json::Error),
    #[error("output: {0}")]
    Yaml(#[from] serde_yaml_ng::Error),
    #[error("Vip {vip} is not {what} after {seconds} s: {why}")]
    Late {
        vip: String,
        what: &'static str,
        seconds: u64,
        why: String,
    },
}

impl From<kube::Error> for CtlError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) if !status.message.is_empty() => Self::Refused(status),
            error => Self::Api(error),
        }
    }
}

/// Runs a command.
pub async fn run(arguments: Arguments) -> Result<(), CtlError> {
    let client = match arguments.context {
        Some(context) => {
            let options = KubeConfigOptions {
                context: Some(context),
                ..KubeConfigOptions::default()
            };
            Client::try_from(Config::from_kubeconfig(&options).await?)?
        }
        None => thuban_client::infer().await?,
    };
    let namespace = arguments.namespace;
    let cluster = Cluster {
        namespace: namespace.unwrap_or_else(|| client.default_namespace().to_owned()),
        client,
    };
    match arguments.verb {
        Verb::Make(request) => cluster.make(&request).await,
        Verb::List {
            all_namespaces,
            output,
        } => cluster.list(all_namespaces, output).await,
        Verb::Get { name, output } => cluster.get(&name, output).await,
        Verb::Members { name, output } => cluster.members(&name, output).await,
        Verb::Watch { name } => cluster.watch(name.as_ref()).await,
        Verb::Delete { name, wait } => cluster.delete(&name, wait).await,
        Verb::Pools { output } => cluster.pools(output).await,
    }
}

struct Cluster {
    client: Client,
    /// The namespace of names without one.
    namespace: String,
}

impl Cluster {
    fn namespace_of<'a>(&'a self, name: &'a Name) -> &'a str {
        name.namespace.as_deref().unwrap_or(&self.namespace)
    }

    fn vips(&self, name: &Name) -> Api<Vip> {
        Api::namespaced(self.client.clone(), self.namespace_of(name))
    }

    async fn make(&self, request: &Make) -> Result<(), CtlError> {
        let (api, parameters) = (self.vips(&request.name), PostParams::default());
        let name = &request.name.name;
        let mut tries = 0;
        let (vip, what) = loop {
            let existing = api.get_opt(name).await?;
            let Some(vip) = merge(existing.as_ref(), request)? else {
                break (existing, "unchanged");
            };
            let (written, what) = if existing.is_some() {
                (api.replace(name, &parameters, &vip).await, "changed")
            } else {
                (api.create(&parameters, &vip).await, "made")
            };
            tries += 1;
            match written {
                Err(kube::Error::Api(status)) if status.code == 409 && tries < TRIES => {}
                written => break (Some(written?), what),
            }
        };
        println!("Vip {}/{name} {what}", self.namespace_of(&request.name));
        match (request.wait.seconds, vip) {
            (Some(seconds), Some(vip)) => wait::until_ready(&api, &vip, Duration::from_secs(seconds)).await,
            _ => Ok(()),
        }
    }

    async fn list(&self, is_all: bool, output: Output) -> Result<(), CtlError> {
        let api: Api<Vip> = if is_all {
            Api::all(self.client.clone())
        } else {
            Api::namespaced(self.client.clone(), &self.namespace)
        };
        let vips = api.list(&ListParams::default()).await?.items;
        table::print(output, &vips, || table::vips(&vips, is_all))
    }

    async fn get(&self, name: &Name, output: Output) -> Result<(), CtlError> {
        let vip = self.vips(name).get(&name.name).await?;
        table::print(output, &vip, || table::details(&vip))
    }

    async fn members(&self, name: &Name, output: Output) -> Result<(), CtlError> {
        let vip = self.vips(name).get(&name.name).await?;
        let members = members::of(&self.client, &vip).await?;
        table::print(output, &members, || members::table_of(&members))
    }

    async fn watch(&self, name: Option<&Name>) -> Result<(), CtlError> {
        let namespace = name.map_or(self.namespace.as_str(), |name| self.namespace_of(name));
        let api: Api<Vip> = Api::namespaced(self.client.clone(), namespace);
        let mut config = watcher::Config::default();
        if let Some(name) = name {
            config = config.fields(&format!("metadata.name={}", name.name));
        }
        let changes = watcher(api, config).default_backoff();
        pin_mut!(changes);
        print!("{}", table::watched(&[]));
        while let Some(change) = changes.next().await {
            match change {
                Ok(watcher::Event::Apply(vip) | watcher::Event::InitApply(vip)) => {
                    print!("{}", table::watched(&table::row(&vip)));
                }
                Ok(watcher::Event::Delete(vip)) => println!("{} is gone", vip.name_any()),
                Ok(watcher::Event::Init | watcher::Event::InitDone) => {}
                Err(watcher::Error::InitialListFailed(error)) => return Err(error.into()),
                Err(error @ watcher::Error::NoResourceVersion) => return Err(CtlError::Watch(error)),
                Err(error) => eprintln!("{error}, trying again"),
            }
        }
        Ok(())
    }

    async fn delete(&self, name: &Name, wait: Wait) -> Result<(), CtlError> {
        let api = self.vips(name);
        let vip = api.get(&name.name).await?;
        if is_of_service(&vip) {
            let vip = name.name.clone();
            return Err(CtlError::OfService { vip });
        }
        let parameters = DeleteParams::default().preconditions(Preconditions {
            uid: vip.uid(),
            resource_version: None,
        });
        api.delete(&name.name, &parameters).await?;
        println!("Vip {}/{} deleted", self.namespace_of(name), name.name);
        match wait.seconds {
            Some(seconds) => wait::until_gone(&api, &vip, Duration::from_secs(seconds)).await,
            None => Ok(()),
        }
    }

    async fn pools(&self, output: Output) -> Result<(), CtlError> {
        let api: Api<IpPool> = Api::all(self.client.clone());
        let pools = api.list(&ListParams::default()).await?.items;
        table::print(output, &pools, || table::pools(&pools))
    }
}

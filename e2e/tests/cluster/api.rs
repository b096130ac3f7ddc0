//! Reads objects as `kubectl get … -o json` does, by connections that stay open. Tests ask many times a second, and
//! each kubectl is a process that first learns the API server's kinds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kube::Client;
use kube::api::{DynamicObject, GetParams, ListParams, Request};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, Resource};
use kube::discovery::{ApiCapabilities, Discovery, Scope};
use serde_json::Value;
use thuban_cluster::Cluster;
use tokio::runtime::Runtime;

const TIMEOUT: Duration = Duration::from_secs(10);

struct Api {
    runtime: Arc<Runtime>,
    client: Client,
    /// Resources by plural and kind in lower case, and by `plural.group`.
    resources: HashMap<String, (ApiResource, ApiCapabilities)>,
}

/// The arguments of `kubectl get`.
#[derive(Debug, Default)]
struct Question<'a> {
    kind: &'a str,
    name: Option<&'a str>,
    namespace: Option<&'a str>,
    is_everywhere: bool,
    selected: ListParams,
}

/// Returns the object, or the list of objects, that `kubectl get` prints for these arguments.
pub fn get(cluster: &Cluster, arguments: &[&str]) -> Result<Value> {
    static API: Mutex<Option<Api>> = Mutex::new(None);
    let question = Question::read(arguments)?;
    let (client, runtime, request) = {
        let mut api = API.lock().unwrap_or_else(PoisonError::into_inner);
        if !api
            .as_ref()
            .is_some_and(|api| api.resources.contains_key(question.kind))
        {
            // This is the first question, or the kind came later.
            *api = Some(Api::new(cluster)?);
        }
        let api = api.as_ref().context("an API")?;
        let resource = api.resources.get(question.kind);
        let resource = resource.with_context(|| format!("the server has no {}", question.kind))?;
        (
            api.client.clone(),
            api.runtime.clone(),
            question.request(resource)?,
        )
    };
    let path = request.uri().to_string();
    let answer = runtime.block_on(async { tokio::time::timeout(TIMEOUT, client.request(request)).await });
    answer.context("the API server is silent")?.context(path)
}

impl Api {
    fn new(cluster: &Cluster) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let runtime = Arc::new(runtime);
        let kubeconfig = Kubeconfig::read_from(cluster.instance().kubeconfig())?;
        let (client, resources) = runtime.block_on(async {
            let config =
                kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
            let client = Client::try_from(config)?;
            let resources = resources(&Discovery::new(client.clone()).run().await?);
            anyhow::Ok((client, resources))
        })?;
        Ok(Self {
            runtime,
            client,
            resources,
        })
    }
}

fn resources(discovery: &Discovery) -> HashMap<String, (ApiResource, ApiCapabilities)> {
    let mut all = HashMap::new();
    // The first group with a name keeps it, as for kubectl: the core group.
    for group in discovery.groups_alphabetical() {
        for one in group.recommended_resources() {
            let resource = &one.0;
            let names = [resource.plural.clone(), resource.kind.to_lowercase()];
            let full = format!("{}.{}", resource.plural, resource.group);
            for name in names.into_iter().chain([full]) {
                all.entry(name).or_insert_with(|| one.clone());
            }
        }
    }
    all
}

impl<'a> Question<'a> {
    fn read(arguments: &[&'a str]) -> Result<Self> {
        let mut question = Self::default();
        let mut rest = arguments.iter().copied();
        while let Some(argument) = rest.next() {
            let mut value = || rest.next().with_context(|| format!("{argument} has no value"));
            match argument {
                "-n" => question.namespace = Some(value()?),
                "-A" => question.is_everywhere = true,
                "-l" => question.selected = question.selected.labels(value()?),
                "--field-selector" => question.selected = question.selected.fields(value()?),
                _ => {
                    if let Some(selector) = argument.strip_prefix("--field-selector=") {
                        question.selected = question.selected.fields(selector);
                    } else if argument.starts_with('-') || question.name.is_some() {
                        bail!("{argument:?} in {arguments:?}: ask kubectl itself");
                    } else if !question.kind.is_empty() {
                        question.name = Some(argument);
                    } else if let Some((kind, name)) = argument.split_once('/') {
                        (question.kind, question.name) = (kind, Some(name));
                    } else {
                        question.kind = argument;
                    }
                }
            }
        }
        Ok(question)
    }

    fn request(
        &self,
        (resource, capabilities): &(ApiResource, ApiCapabilities),
    ) -> Result<http::Request<Vec<u8>>> {
        let is_of_namespace = capabilities.scope == Scope::Namespaced && !self.is_everywhere;
        let namespace = is_of_namespace.then_some(self.namespace.unwrap_or("default"));
        let request = Request::new(DynamicObject::url_path(resource, namespace));
        Ok(match self.name {
            Some(name) => request.get(name, &GetParams::default())?,
            None => request.list(&self.selected)?,
        })
    }
}
